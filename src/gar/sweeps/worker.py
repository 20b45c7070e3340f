"""What runs a job: a process of its own (``python -m gar.sweeps.worker``), or a task on a cluster.

The process reads jobs as JSON lines from its standard input and answers with events, also JSON lines; it
stays for the next job, so that libraries are imported once. What a run prints goes to its ``log.txt``. When
the input ends while a job runs, the coordinator is gone, and the run stops at its next update, after a
checkpoint.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from filelock import FileLock, Timeout

from gar import config as configuration
from gar.config import Config
from gar.data import load_mixture
from gar.data.probe import probe_mixture
from gar.errors import UserError
from gar.model.multitask import MultiTaskModel
from gar.runs.directory import write_failure
from gar.runs.names import CHECKPOINTS
from gar.runs.packing import pack
from gar.training import Hooks, Interrupted, TrainingFailure, train, train_from_config

Emit = Callable[[dict[str, Any]], None]

#: Seconds that a run waits for its directory, while the process of a lost coordinator writes its checkpoint.
PATIENCE = 120.0
#: Seconds between progress reports.
PACE = 0.5


def run_job(job: Mapping[str, Any], emit: Emit = lambda event: None) -> dict[str, Any]:
    """Run one job in this process; how it ended, as a plain mapping. A failure is also in failure.json."""
    directory, began = Path(job["out"]), time.monotonic()
    if job.get("threads"):
        torch.set_num_threads(int(job["threads"]))
    outcome: dict[str, Any]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / ".lock").acquire(timeout=PATIENCE):
            pass
        result = _execute(configuration.build(job["config"]), directory, bool(job.get("probe")), _hooks(emit))
        shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)
        if not job.get("keep_model", True):
            shutil.rmtree(directory / "model", ignore_errors=True)
        outcome = {"kind": "finished", "accuracy": result["accuracy"]["macro"]}
    except Interrupted as stop:
        outcome = {"kind": "interrupted", "reason": str(stop)}
    except Timeout:
        outcome = {
            "kind": "failed",
            "error": "Busy",
            "reason": "another process is running in this directory",
        }
    except Exception as error:
        expected = isinstance(error, UserError | TrainingFailure)
        if not expected:
            traceback.print_exc()
        name = "OutOfMemory" if out_of_memory(error) else type(error).__name__
        reason = " ".join(str(error).split()) or type(error).__name__
        if name == "OutOfMemory":
            reason = f"out of memory: {reason}"
        outcome = {"kind": "failed", "error": name, "reason": reason[:2000], "healthy": expected}
        try:
            write_failure(directory, name, outcome["reason"])
        except OSError as problem:
            outcome["reason"] += f" (failure.json could not be written: {problem.strerror})"
    return {**outcome, "seconds": time.monotonic() - began}


def run_remote(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job in a temporary directory and return it packed: no shared file system is needed."""
    with tempfile.TemporaryDirectory(prefix="gar-") as scratch:
        directory = Path(scratch) / "run"
        outcome = run_job({**job, "out": str(directory)})
        return {**outcome, "archive": pack(directory, bool(job.get("keep_model", True)))}


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory, of the machine or of an accelerator, ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    told = str(error)
    return isinstance(error, RuntimeError) and (
        "not enough memory" in told or "can't allocate memory" in told
    )


def _execute(config: Config, out: Path, probe: bool, hooks: Hooks) -> dict[str, Any]:
    if not probe:
        return train_from_config(config, out, resume=True, hooks=hooks)
    loaded = load_mixture(config.mixture, data_dir=config.data_dir, cache_dir=config.cache.directory)
    mixture = probe_mixture(loaded)
    model = MultiTaskModel.from_pretrained(
        config.backbone, mixture.tasks, config.experts, precision=config.precision, seed=config.seed
    )
    return train(model, mixture, config=config, out=out, resume=True, hooks=hooks)


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


# ---------------------------------------------------------------------- the process


def main() -> None:
    """Serve jobs until the input ends."""
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not look like an event
    jobs: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    busy = threading.Event()

    def read() -> None:
        for line in sys.stdin:
            jobs.put(json.loads(line))
        jobs.put(None)
        if busy.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, daemon=True).start()

    def emit(event: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the coordinator is gone; the reader above ends the run
            answers.write(json.dumps(event) + "\n")
            answers.flush()

    emit({"kind": "ready"})
    while (job := jobs.get()) is not None:
        busy.set()
        with _output_to(Path(job["out"]) / "log.txt"):
            outcome = run_job(job, emit)
        busy.clear()
        emit(outcome)
        if not outcome.get("healthy", True):
            return  # after an unexpected error the next job gets a fresh process


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Standard output and error of this process, libraries in C included, into a file."""
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


if __name__ == "__main__":
    main()
