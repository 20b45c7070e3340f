"""A worker that trains nothing: what it does is the first part of the job's name."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

THREADS = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")


def pretend(connection: Connection) -> None:
    """In place of ``gar.sweeps._worker.serve``; a good job's accuracy is the process id."""
    with suppress(EOFError):
        while True:
            what = connection.recv().id.split("-")[0]
            connection.send({"kind": "progress", "stage": "update", "done": 1, "total": 2, "loss": 0.5})
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "exits":
                sys.exit(3)
            elif what == "broken":
                connection.send({"kind": "failed", "error": "Bug", "reason": "strange", "healthy": False})
                return
            elif what == "waits":
                time.sleep(60)
            elif what == "tells":
                facts: dict[str, Any] = {name: os.environ.get(name) for name in THREADS}
                facts |= {"session": os.getsid(0), "pid": os.getpid(), "path": sys.path, "cwd": os.getcwd()}
                facts |= {"main": vars(sys.modules["__main__"]).get("__file__")}
                connection.send({"kind": "finished", "accuracy": 0.5, **facts})
            else:
                connection.send({"kind": "finished", "accuracy": os.getpid()})
