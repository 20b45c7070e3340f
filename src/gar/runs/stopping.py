"""One handler for requests to stop: of a training run, a sweep, a search."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class StopSignals:
    """Inside, the first SIGINT or SIGTERM is noted and asks to stop in order; the next one acts at once.

    Called, it says whether one came; outside of the main thread, where Python delivers none, never.
    """

    def __init__(self) -> None:
        self.seen = False
        self._previous: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.seen

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
