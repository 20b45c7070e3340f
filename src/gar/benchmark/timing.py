"""Times, kernels and memory of things that make updates, side by side.

What is compared takes turns, so that a slow spell hits all alike. Warm-up, and on CUDA the profiler, stay
outside of the times; a time ends when the device has done its work.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from gar.config import Config
from gar.errors import UserError
from gar.features import Source
from gar.model import MultiTaskModel
from gar.training import TrainingFailure, Updater
from gar.training.captured import CapturedUpdates
from gar.training.captured_backbone import updates_of

T = TypeVar("T")
#: Updates of a stretch of single updates, by device type.
STRETCH = {"cuda": 5}


class Runner(Protocol):
    """Something that makes updates, going on from where it stopped."""

    def run(self, updates: int, watch: AbstractContextManager[Any]) -> None:
        """The next updates, ``watch`` around them and nothing else."""
        ...

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """What it trains."""
        ...

    @property
    def stretch(self) -> int:
        """Updates that make a good stretch to time."""
        ...

    @property
    def brings_model(self) -> bool:
        """Whether its model is its own, made with it, and not the common one."""
        ...


class Shipped:
    """The loop of a run: its :class:`~gar.training.Updater`, captured where a run's is, nothing beside it."""

    brings_model = False

    def __init__(self, model: MultiTaskModel, source: Source, config: Config) -> None:
        self.updater = Updater(model, source, config, list(model.tasks))
        self.updates = updates_of(self.updater)
        self.number = 0

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        return self.updater.parameters

    @property
    def stretch(self) -> int:
        return max(self.updates.stride, STRETCH.get(self.updater.model.device.type, 1))

    def run(self, updates: int, watch: AbstractContextManager[Any]) -> None:
        with watch:
            advance(self.updates, self.number, self.number + updates)
        self.number += updates


def advance(updates: Updater | CapturedUpdates, first: int, last: int) -> None:
    """Updates ``first``, …, ``last - 1``, as the training loop makes them."""
    while first < last:
        stop = min(first + updates.stride, last)
        for _ in updates.block(first, stop):
            pass
        first = stop


class Plan(NamedTuple):
    """How much is measured: ``repeats`` stretches after ``warmup``.

    Each is of ``updates`` updates, or of as many as suit what is timed.
    """

    repeats: int
    updates: int | None = None
    warmup: int = 1

    def stretch(self, runner: Runner) -> int:
        """Updates of a stretch."""
        return self.updates or runner.stretch


@dataclass
class Measured:
    """Of one runner: seconds per update of every stretch; on CUDA also the peak of memory in bytes and, per
    update, kernels and the seconds that the device was busy. ``problem`` says why there are none."""

    seconds: list[float] = field(default_factory=list)
    peak: int | None = None
    kernels: float | None = None
    device_seconds: float | None = None
    problem: str = ""


def measure(
    prepare: Callable[[], T], makers: Mapping[str, Callable[[T], Runner]], device: torch.device, plan: Plan
) -> dict[str, Measured]:
    """Measure what the makers make of what ``prepare`` made for all.

    What fails, or does not fit into memory, says so and leaves the others alone. A peak of memory counts
    what a runner adds and, unless it brings a model of its own, what was prepared (model, features); not what
    the others hold.
    """
    found = {name: Measured() for name in makers}
    runners: dict[str, Runner] = {}
    common = Measured()
    with _told(common, device):
        prepared = prepare()
    if common.problem:
        return dict.fromkeys(makers, common)
    shared = _allocated(device)
    for name, make in makers.items():
        with _told(found[name], device):
            runners[name] = _begin(partial(make, prepared), found[name], device, plan, shared)
    for turn in range(plan.repeats):
        names = list(runners)
        first = turn % max(1, len(names))  # each is the first in its turn
        for name in names[first:] + names[:first]:
            runner = runners[name]
            with _told(found[name], device):
                watch = Stopwatch(device)
                runner.run(plan.stretch(runner), watch)
                found[name].seconds.append(watch.seconds / plan.stretch(runner))
        runners = {name: runner for name, runner in runners.items() if not found[name].problem}
    for name, runner in runners.items() if device.type == "cuda" else ():
        with _told(found[name], device):
            profiler = Profiler(device)
            runner.run(plan.stretch(runner), profiler)
            found[name].kernels = profiler.kernels / plan.stretch(runner)
            found[name].device_seconds = profiler.seconds / plan.stretch(runner)
    return found


def _begin(
    make: Callable[[], Runner], measured: Measured, device: torch.device, plan: Plan, shared: int
) -> Runner:
    """A runner after its warm-up, its peak of memory noted."""
    before = _allocated(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    runner = make()
    for _ in range(plan.warmup):
        runner.run(plan.stretch(runner), contextlib.nullcontext())
    if device.type == "cuda":
        measured.peak = torch.cuda.max_memory_allocated(device) - before + shared * (not runner.brings_model)
    for parameter in runner.parameters:  # those of the next runner are its own
        parameter.grad = None
    return runner


class Stopwatch:
    """Seconds inside of its ``with`` block, to the end of what the device was given there."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0

    def __enter__(self) -> Self:
        synchronize(self.device)
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        synchronize(self.device)
        self.seconds = time.perf_counter() - self._began


class Profiler:
    """Kernels of a CUDA device inside of its ``with`` block, and the seconds that they and copies took."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.kernels, self.seconds = device, 0, 0.0

    def __enter__(self) -> Self:
        synchronize(self.device)
        self._profile = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        synchronize(self.device)
        self._profile.__exit__(*error)
        for event in self._profile.events():
            if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
                self.kernels += not event.name.startswith(("Memcpy", "Memset"))
                self.seconds += event.time_range.elapsed_us() * 1e-6


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory, of the machine or of an accelerator, ran out."""
    told = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("not enough memory" in told or "can't allocate memory" in told)
    ):
        return True
    # Where memory runs out while kernels are captured, the end of the capture fails too, in its own words.
    before = error.__cause__ or error.__context__
    return before is not None and out_of_memory(before)


@contextlib.contextmanager
def _told(measured: Measured, device: torch.device) -> Iterator[None]:
    """What may go wrong with one of several runners becomes its ``problem``."""
    try:
        yield
    except TrainingFailure as failure:
        measured.problem = f"not finite: {failure}"
    except UserError as refusal:
        measured.problem = str(refusal).removeprefix("configuration: ")
    except Exception as error:
        if not out_of_memory(error):
            raise
        measured.problem = "out of memory"
    if measured.problem:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(device)
