"""Where jobs run; the coordinator cannot tell one executor from another.

An executor takes a job when ``free`` is positive, and tells by :meth:`Executor.events` what became of it:
``progress``, ``message`` and ``lost`` any number of times, then once ``finished``, ``failed`` or
``interrupted``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

ENDS = frozenset({"finished", "failed", "interrupted"})
#: Read by the libraries that compute on the CPU when they are imported.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """One run to do: its configuration as a plain tree, and the directory where its files shall be."""

    id: str
    config: dict[str, Any]
    out: Path
    probe: bool = False
    """Train on 90 % of the training split and evaluate on the other 10 %."""
    keep_model: bool = True
    threads: int | None = None
    """CPU threads, set by the executor; None leaves torch's own choice."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a job: ``kind`` and its facts (loss, accuracy, reason, seconds, …)."""

    job: Job
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def ends(self) -> bool:
        return self.kind in ENDS


class Executor(Protocol):
    """Runs jobs elsewhere; a context manager that ends everything at once when it is left."""

    @property
    def free(self) -> int:
        """How many more jobs may be submitted now."""
        ...

    @property
    def busy(self) -> int:
        """How many jobs have not ended."""
        ...

    def submit(self, job: Job) -> None: ...

    def events(self, timeout: float) -> list[Event]:
        """What happened since the last call; waits up to ``timeout`` seconds for it."""
        ...

    def stop(self) -> None:
        """Ask all jobs to write a checkpoint and stop; each then ends as ``interrupted``."""
        ...

    def close(self) -> None: ...


class Closing:
    """A ``with`` block that ends with :meth:`close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything at once."""


def drive(executor: Executor, jobs: Iterator[Job], stopping: Callable[[], bool]) -> Iterator[Event]:
    """Keep an executor busy until ``jobs`` is used up; every submitted job ends in one event of ENDS."""
    stopped = False
    while True:
        while not stopping() and executor.free > 0 and (job := next(jobs, None)) is not None:
            executor.submit(job)
            yield Event(job, "started")
        if stopping() and not stopped:
            executor.stop()
            stopped = True
        if not executor.busy:
            return
        yield from executor.events(0.25)


def threads_of(config: Mapping[str, Any], share: int) -> int:
    """CPU threads of a run, as alone: the key ``threads``, else $OMP_NUM_THREADS; else its share."""
    if config.get("threads"):
        return int(config["threads"])
    told = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(told) if told.isdigit() and int(told) else share


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
