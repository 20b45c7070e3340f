"""One handler for requests to stop: of a training run, a sweep, a search."""

from __future__ import annotations

import math
import signal
import threading
import time
from types import FrameType
from typing import Any, Self


class StopSignals:
    """Inside, the first SIGINT or SIGTERM is noted and asks to stop in order; the next one acts at once.

    One within ``grace`` seconds of the first is the same request: a launcher passes on what a terminal has
    sent to all.

    Called, it says whether one came; outside of the main thread, where Python delivers none, never.
    """

    def __init__(self, grace: float = 0.0) -> None:
        self.seen, self.grace = False, grace
        self._first = math.inf
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
        now = time.monotonic()
        if self.seen and now - self._first >= self.grace:
            self._restore()
            signal.raise_signal(number)
        if not self.seen:
            self.seen, self._first = True, now
            if not self.grace:
                self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
