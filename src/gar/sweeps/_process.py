"""How a worker process begins. It imports next to nothing, so that this is done before torch is there."""

from __future__ import annotations

import os
import pkgutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType


@contextmanager
def for_children(environment: Mapping[str, str]) -> Iterator[None]:
    """What is started inside has these variables from its first import on, and is deaf to Ctrl-C.

    It does not see the caller's ``__main__`` either, which may be a script that would start a sweep again.
    """
    resource_tracker.ensure_running()  # its start would end the deafness
    main, before = sys.modules["__main__"], {name: os.environ.get(name) for name in environment}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ.update(environment)
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def begin(work: str, connection: Connection, log: Path) -> None:
    """The first function of a worker process: a session of its own, its output in a file, then the work."""
    os.setsid()  # Ctrl-C reaches the coordinator alone, which then asks the workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    pkgutil.resolve_name(work)(connection)
