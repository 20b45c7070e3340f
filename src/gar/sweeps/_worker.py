"""What runs a job: a worker process of this machine, or a task on a cluster.

A worker process takes jobs from its pipe and answers with events; it stays for the next job, so that
libraries are imported once. What a run prints goes to its ``log.txt``. When the pipe ends while a job runs,
the coordinator is gone, and the run stops at its next update, after a checkpoint.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import torch
from filelock import FileLock, Timeout

from gar import config as configuration
from gar.errors import UserError
from gar.runs.directory import checkpoints, write_failure
from gar.runs.files import read_json
from gar.runs.names import CHECKPOINTS, FAILURE, LOCK, LOG, MODEL
from gar.runs.packing import pack, unpack
from gar.sweeps.executors import Job
from gar.training import Hooks, Interrupted, OutOfMemory, Shared, TrainingFailure, train_from_config
from gar.training.memory import release_memory

Emit = Callable[[dict[str, Any]], None]

#: Seconds that a run waits for its directory, while the process of a lost coordinator writes its checkpoint.
PATIENCE = 120.0
#: Seconds between progress reports.
PACE = 0.5
#: Sending checkpoints to the coordinator may cost a run this share of its time.
SHIPPING = 0.05


def run_job(job: Job, emit: Emit = lambda event: None, shared: Shared | None = None) -> dict[str, Any]:
    """Run one job in this process; how it ended, as a plain mapping. A failure is also in failure.json.

    ``shared`` is what the jobs of this process have in common.
    """
    began = time.monotonic()
    if job.threads and job.threads != torch.get_num_threads():
        torch.set_num_threads(job.threads)
    outcome: dict[str, Any]
    try:
        job.out.mkdir(parents=True, exist_ok=True)
        with FileLock(job.out / LOCK).acquire(timeout=PATIENCE):
            (job.out / FAILURE).unlink(missing_ok=True)  # from here on it is this attempt's
        result = train_from_config(
            configuration.build(job.config),
            job.out,
            resume=True,
            hooks=_hooks(emit),
            shared=shared,
            probe=job.probe,
        )
        shutil.rmtree(job.out / CHECKPOINTS, ignore_errors=True)
        if not job.keep_model:
            shutil.rmtree(job.out / MODEL, ignore_errors=True)
        outcome = {"kind": "finished", "accuracy": result["accuracy"]["macro"]}
    except Interrupted as stop:
        outcome = {"kind": "interrupted", "reason": str(stop)}
    except Timeout:
        reason = "another process is running in this directory"
        outcome = {"kind": "failed", "error": "Busy", "reason": reason}
    except Exception as error:
        expected = isinstance(error, UserError | TrainingFailure) and not out_of_memory(error)
        if not expected:
            traceback.print_exc()
        outcome = {"kind": "failed", **_record(job.out, error), "healthy": expected}
    release_memory()  # of the run's graphs, for one: several workers share a GPU
    return {**outcome, "seconds": time.monotonic() - began}


def run_remote(job: Job, kept: bytes | None, emit: Emit) -> tuple[dict[str, Any], bytes]:
    """Run a job in a temporary directory; how it ended, and the directory packed.

    No shared file system is needed: ``kept`` is what the coordinator has of the run, and new checkpoints are
    events on the way, so that a run whose machine is lost goes on from the last of them.
    """
    with tempfile.TemporaryDirectory(prefix="gar-") as scratch:
        directory = Path(scratch) / "run"
        if kept is not None:
            unpack(kept, directory)
        with output_to(directory / LOG):
            outcome = run_job(replace(job, out=directory), _shipping(directory, emit))
        finished = outcome["kind"] == "finished"
        return outcome, pack(directory, model=finished, checkpoint=not finished)


def _shipping(directory: Path, emit: Emit) -> Emit:
    """``emit``, and with it every new checkpoint, as often as that is cheap."""
    sent, due = checkpoints(directory / CHECKPOINTS)[-1:], 0.0

    def emit_and_ship(event: dict[str, Any]) -> None:
        nonlocal sent, due
        emit(event)
        began, newest = time.monotonic(), checkpoints(directory / CHECKPOINTS)[-1:]
        if newest and newest != sent and began >= due:
            emit({"kind": "checkpoint", "archive": pack(directory, checkpoint=True)})
            sent, now = newest, time.monotonic()
            due = now + (now - began) / SHIPPING

    return emit_and_ship


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory, of the machine or of an accelerator, ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemory):
        return True
    told = str(error)
    return isinstance(error, RuntimeError) and (
        "not enough memory" in told or "can't allocate memory" in told
    )


def _record(directory: Path, error: Exception) -> dict[str, str]:
    """``error`` and ``reason`` of a failed run, in failure.json too; what training wrote there stays."""
    name, reason = type(error).__name__, " ".join(str(error).split()) or type(error).__name__
    written = read_json(directory / FAILURE)
    if out_of_memory(error):
        told = isinstance(error, OutOfMemory)
        name, reason = "OutOfMemory", reason if told else f"out of memory: {reason}"
    reason = reason[:2000]
    try:
        if written is None or name == "OutOfMemory":
            write_failure(directory, name, reason, (written or {}).get("update"))
    except OSError as problem:
        reason += f" ({FAILURE} could not be written: {problem.strerror})"
    return {"error": name, "reason": reason}


def _hooks(emit: Emit) -> Hooks:
    last = 0.0

    def update(done: int, total: int, loss: float) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= PACE or done == total:
            last = now
            emit({"kind": "progress", "stage": "update", "done": done, "total": total, "loss": loss})

    def features(done: int, total: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= PACE:
            last = now
            emit({"kind": "progress", "stage": "features", "done": done, "total": total})

    def message(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        emit({"kind": "message", "line": line})

    return Hooks(features=features, update=update, message=message)


# ---------------------------------------------------------------------- a worker process


def serve(connection: Connection) -> None:
    """Do jobs until the pipe ends."""
    faulthandler.enable()
    jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    busy = threading.Event()

    def read() -> None:
        with suppress(EOFError, OSError):
            while True:
                job = connection.recv()
                busy.set()
                jobs.put(job)
        jobs.put(None)
        if busy.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, daemon=True).start()

    def emit(event: dict[str, Any]) -> None:
        with suppress(OSError):  # the coordinator is gone; the reader above ends the run
            connection.send(event)

    shared = Shared()
    while (job := jobs.get()) is not None:
        with output_to(job.out / LOG):
            outcome = run_job(job, emit, shared)
        busy.clear()
        emit(outcome)
        if not outcome.get("healthy", True):
            return  # after an unexpected error the next job gets a fresh process


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Standard output and error of this process, libraries in C included, into a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    try:
        with _log(path) as log:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, before in zip((1, 2), saved, strict=True):
            os.dup2(before, descriptor)
            os.close(before)
        with suppress(OSError):
            if not path.stat().st_size:
                path.unlink()


def _log(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError:  # the job itself will say what is wrong with the directory
        return open(os.devnull, "ab")
