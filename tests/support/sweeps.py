"""Sweeps of runs on the tiny world, and stand-ins for what runs them."""

from __future__ import annotations

import atexit
import functools
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from gar.methods import REGISTRY, Baseline
from gar.runs.directory import write_failure
from gar.runs.names import CONFIG
from gar.runs.result import RunResult
from gar.sweeps._worker import run_job
from gar.sweeps.executors import Event, Job
from gar.sweeps.progress import View
from gar.sweeps.suite import Suite, build_suite
from gar.training import Shared
from support.tiny_runs import make_world, tree


@functools.cache
def tiny_world() -> Path:
    """The tiny world, once a process."""
    directory = Path(tempfile.mkdtemp(prefix="gar-tiny-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return make_world(directory)


def tiny_base(updates: int = 3) -> dict[str, Any]:
    """A configuration tree that trains in well under a second; its mixture is called mood+nli."""
    base = tree(tiny_world(), optimizer={"updates": updates, "learning_rate": 1e-3})
    del base["mixture"]["name"]
    return base


def tiny_suite(updates: int = 3, **suite: Any) -> Suite:
    return build_suite({"settings": {"tiny": tiny_base(updates)}, **suite}, "tiny", Path.cwd())


def own_method(monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """The text of a plugin with a method of this name, which is unregistered after the test."""
    monkeypatch.setitem(REGISTRY, name, Baseline)
    del REGISTRY[name]
    return f"""
from typing import ClassVar
from gar.methods import Baseline, register

@register
class Own(Baseline):
    name: ClassVar[str] = "{name}"
    label: ClassVar[str] = "{name}"
"""


def directories(plan_or_suite: Any, out: Path) -> Iterator[Path]:
    return (out / run.id for run in plan_or_suite.runs())


def quiet() -> View:
    return View(0, console=Console(file=io.StringIO()))


class StandIn:
    """An executor that runs nothing: ``does(job)`` says how each job ends."""

    def __init__(self, does: Callable[[Job], Event], slots: int = 2) -> None:
        self.does, self.slots = does, slots
        self.waiting: list[Job] = []
        self.seen: list[str] = []
        self.most = 0
        self.stopped = False

    @property
    def busy(self) -> int:
        return len(self.waiting)

    @property
    def free(self) -> int:
        return self.slots - self.busy

    def submit(self, job: Job) -> None:
        assert not self.stopped
        self.waiting.append(job)
        self.seen.append(job.id)
        self.most = max(self.most, self.busy)

    def events(self, timeout: float) -> list[Event]:
        job = self.waiting.pop(0)
        return [Event(job, "interrupted") if self.stopped else self.does(job)]

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None:
        pass


class InProcess(StandIn):
    """Runs jobs one after the other in this process, as a worker does."""

    def __init__(self, jobs: int, logs: Path) -> None:
        self.shared = Shared()
        super().__init__(self.work, 1)

    def work(self, job: Job) -> Event:
        outcome = run_job(job, shared=self.shared)
        return Event(job, outcome.pop("kind"), outcome)

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *error: object) -> None: ...


def write_result(directory: Path, accuracy: float) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    facts = {"macro": accuracy, "tasks": {"mood": accuracy}}
    RunResult.model_validate({"method": "gar", "seed": 0, "accuracy": facts, "routing": {}}).write(directory)


def finish(job: Job) -> Event:
    (job.out / CONFIG).write_text(yaml.safe_dump(job.config))
    write_result(job.out, 0.5)
    return Event(job, "finished", {"accuracy": 0.5, "seconds": 2.0})


def fail(job: Job, reason: str = "no luck") -> Event:
    (job.out / CONFIG).write_text(yaml.safe_dump(job.config))
    write_failure(job.out, "Broken", reason)
    return Event(job, "failed", {"error": "Broken", "reason": reason, "seconds": 1.0})
