"""What a run directory says about its run."""

from __future__ import annotations

import enum
from pathlib import Path

from filelock import FileLock, Timeout

from gar.runs.names import CONFIG, FAILURE, LOCK, RESULT


class State(enum.StrEnum):
    """What became of a run."""

    FINISHED = "finished"
    FAILED = "failed"
    UNFINISHED = "unfinished"
    """Begun, with neither result nor failure."""
    NEW = "new"
    RUNNING = "running"
    """Told by readers: unfinished, and held by a process."""
    UNREADABLE = "unreadable"
    """Told by readers: a file of it is not what was written."""


def state_of(directory: Path) -> State:
    """The state of a run directory, which need not exist, by its files alone."""
    if (directory / RESULT).is_file():
        return State.FINISHED
    if (directory / FAILURE).is_file():
        return State.FAILED
    return State.UNFINISHED if (directory / CONFIG).is_file() else State.NEW


def is_locked(directory: Path) -> bool:
    """Whether a living process holds the directory."""
    if not (directory / LOCK).is_file():
        return False
    try:
        with FileLock(directory / LOCK).acquire(timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        return False
