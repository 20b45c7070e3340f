"""Waiting for what another process does."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], limit: float = 600.0) -> None:
    """Return once the condition holds. The limit only keeps a hang from lasting: no speed is asserted."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"nothing happened within {limit:.0f} s")
        time.sleep(0.01)
