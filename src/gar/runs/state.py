"""What a run directory says about its run."""

from __future__ import annotations

import enum
from pathlib import Path

from gar.runs.names import CONFIG, FAILURE, RESULT


class State(enum.StrEnum):
    """What a run directory says about its run."""

    FINISHED = "finished"
    FAILED = "failed"
    UNFINISHED = "unfinished"
    NEW = "new"


def state_of(directory: Path) -> State:
    """The state of a run directory, which need not exist."""
    if (directory / RESULT).is_file():
        return State.FINISHED
    if (directory / FAILURE).is_file():
        return State.FAILED
    return State.UNFINISHED if (directory / CONFIG).is_file() else State.NEW
