"""How long a comparison takes: by the runs that are finished, else by a few updates timed here.

What is timed is what will run: the shipped update of every method on features of a small sample, with the
threads that a worker has, the forward passes of an evaluation, and the rate at which features are computed.
"""

from __future__ import annotations

import heapq
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from gar.benchmark.timing import Shipped, Stopwatch, out_of_memory
from gar.comparison.arms import Arms
from gar.config import CacheConfig, Config, build
from gar.data import Mixture, fixed_permutation
from gar.data.task import Split, Task
from gar.data.tokenize import TokenizedSplit
from gar.evaluation.measure import WITH_BACKWARD, batch_tokens, forward_pass, gradient_probe
from gar.features.sources import (
    TOKENS_PER_FORWARD,
    Source,
    absent_features,
    build_features,
    is_cached,
    sources_of,
    tokenized,
)
from gar.model import MultiTaskModel, evaluating
from gar.runs.environment import computing_threads, resolve_device
from gar.sweeps.executors import available_cores, threads_of
from gar.training import OutOfMemory, Shared, TrainingFailure

#: Seconds until a worker process has imported its libraries.
WORKER_START = 5.0
#: Seconds of a run for its checkpoint, model and other files, on the disk of a usual machine.
FILES = 0.25
#: Seconds of timed updates a method, of which the first are not counted; updates at least.
TIMED, LEAST = 0.5, 2
#: Examples of a task that are looked at, in batches.
SAMPLE = 2
#: Timed forwards a thread, where features are computed.
FORWARDS = 4

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Estimate:
    """Seconds: of features that are computed once, of the start of a worker, and of a run by method.

    A method is absent where its run cannot be foreseen. ``update`` are seconds an update, and ``around``
    those of a run beside its updates: model, evaluation, files.
    """

    features: float = 0.0
    start: float = WORKER_START
    runs: Mapping[str, float] = field(default_factory=dict)
    update: Mapping[str, float] = field(default_factory=dict)
    around: float = 0.0

    def total(self, todo: Sequence[str], jobs: int) -> float | None:
        """Seconds until runs of these methods are done, ``jobs`` at a time; None where one is unknown."""
        if not todo:
            return 0.0
        if any(method not in self.runs for method in todo):
            return None
        return self.features + self.start + makespan([self.runs[method] for method in todo], jobs)


def makespan(seconds: Sequence[float], jobs: int) -> float:
    """When the last of some runs ends if each starts as soon as one of ``jobs`` places is free.

    >>> makespan([3.0, 3.0, 3.0], 2)
    6.0
    """
    ends = [0.0] * jobs
    for length in seconds:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def updates_of(config: Config, mixture: Mixture) -> int:
    """The updates of a run of the mixture."""
    optimizer = config.optimizer
    if optimizer.epochs is None:
        return optimizer.updates
    batches = [-(-len(task.train) // config.mixture.batch_size) for task in mixture.tasks]
    return max(1, round(optimizer.epochs * max(batches)))


class Prepared:
    """The data and the model of a comparison in this process: what is timed, and where features come from."""

    def __init__(self, arms: Arms) -> None:
        self.configs = {method: build(tree) for method, tree in arms.trees.items()}
        self.config: Config = next(iter(self.configs.values()))
        self.device = resolve_device(self.config.device)
        shared = Shared()
        began = time.perf_counter()
        self.start = shared.start(self.config)
        self.model: MultiTaskModel = self.start.model
        self.mixture: Mixture = self.start.mixture
        self.selection = self.start.selection
        splits = [[task.train for task in self.mixture.tasks], [t.validation for t in self.mixture.tasks]]
        if self.selection is not None:
            splits.append([task.validation for task in self.selection.tasks])
        self.parts = [tokenized(self.model, part) for part in splits]
        self.loading = time.perf_counter() - began
        began = time.perf_counter()
        shared.start(self.config)  # what every further run of a worker pays
        self.again = time.perf_counter() - began
        self.model.to(self.device)

    @property
    def splits(self) -> list[TokenizedSplit]:
        return [split for part in self.parts for split in part]

    @property
    def absent(self) -> list[TokenizedSplit]:
        """The splits whose features have yet to be computed."""
        cached = is_cached(self.model, self.config.cache)
        return absent_features(self.model, self.splits, self.config.cache) if cached else []

    def compute_features(self, progress: Progress | None = None) -> None:
        """Compute what is absent here, with all cores, so that workers need not wait for each other."""
        if self.absent:
            build_features(self.model, self.splits, self.config.cache, progress)

    def estimate(self, jobs: int) -> Estimate:
        """Time what a run does, on a sample. Methods that fail here have none: their runs will tell."""
        with ExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="gar-estimate-"))
            sample = _sampled(self.mixture)
            tokens = tokenized(self.model, [task.train for task in sample.tasks])
            cache = self.config.cache.model_copy(update={"directory": scratch})
            (source,) = sources_of(self.model, [tokens], cache)
            features = self._features(cache)
            tree = self.config.to_dict()
            stack.enter_context(computing_threads(threads_of(tree, max(1, available_cores() // jobs))))
            around = FILES + self.again + self._evaluation(sample, source)
            update = {
                method: seconds
                for method, config in self.configs.items()
                if (seconds := _update_seconds(self.model, source, config)) is not None
            }
            runs = {
                method: around + seconds * updates_of(self.configs[method], self.mixture)
                for method, seconds in update.items()
            }
        return Estimate(features, WORKER_START + self.loading, runs, update, around)

    def _features(self, cache: CacheConfig) -> float:
        """Seconds of the absent features, by a part of them that keeps all threads busy."""
        if not (absent := self.absent):
            return 0.0
        a_forward = TOKENS_PER_FORWARD.get(self.device.type, 8192)
        part = _part_of(absent, FORWARDS * torch.get_num_threads() * a_forward)
        with Stopwatch(self.device) as watch:
            build_features(self.model, [part], cache)
        return watch.seconds * _size(absent) / _size([part])

    def _evaluation(self, sample: Mixture, source: Source) -> float:
        """Seconds of the evaluations: forwards over all that is measured, the probe over its examples."""
        options = self.config.evaluation
        tokens, probe = batch_tokens(self.model, options), options.probe_examples
        examples = min(len(task.train) for task in sample.tasks)
        with evaluating(self.model):
            with Stopwatch(self.device) as forwards:
                forward_pass(self.model, sample, source, tokens, None)
            with Stopwatch(self.device) as backwards:
                gradient_probe(self.model, sample, source, examples, tokens // WITH_BACKWARD)
        measured = sum(_size(part) for part in self.parts[1:])
        probed = sum(min(probe, len(split)) for split in self.parts[1])
        passes = self.config.optimizer.updates // every if (every := self.config.evaluation.every) else 0
        one = forwards.seconds * measured / _size(source.splits)
        one += backwards.seconds * probed / sum(len(task.train) for task in sample.tasks)
        return one * (1 + passes)


def _update_seconds(model: MultiTaskModel, source: Source, config: Config) -> float | None:
    """Mean seconds of an update after the first; None where it fails, as the run itself will."""
    try:
        runner = Shipped(model.train(), source, config)
        runner.run(runner.stretch, Stopwatch(model.device))
        done, seconds = 0, 0.0
        while done < LEAST or seconds < TIMED:
            watch = Stopwatch(model.device)
            runner.run(runner.stretch, watch)
            done, seconds = done + runner.stretch, seconds + watch.seconds
        return seconds / done
    except (TrainingFailure, OutOfMemory):
        return None
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return None
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def _sampled(mixture: Mixture) -> Mixture:
    """A few batches of every task's training split, as both of its splits."""

    def part(task: Task) -> Split:
        count = min(len(task.train), SAMPLE * mixture.batch_size)
        return task.train.select(np.sort(fixed_permutation(len(task.train), task.name)[:count]))

    tasks = [replace(task, train=split, validation=split) for task in mixture.tasks for split in [part(task)]]
    return replace(mixture, tasks=tuple(tasks))


def _part_of(splits: Sequence[TokenizedSplit], tokens: int) -> TokenizedSplit:
    """Every n-th example of some splits, as one split of about so many tokens."""
    step = max(1, _size(splits) // tokens)
    ids, types, labels, lengths = [], [], [], []
    for split in splits:
        for row in range(0, len(split), step):
            here = slice(*split.offsets[row : row + 2])
            ids.append(split.ids[here])
            types.append(np.zeros(0, np.int8) if split.types is None else split.types[here])
            labels.append(split.labels[row])
            lengths.append(len(ids[-1]))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    joined = None if splits[0].types is None else np.concatenate(types)
    return TokenizedSplit(np.concatenate(ids), offsets, joined, np.array(labels))


def _size(splits: Sequence[TokenizedSplit]) -> int:
    """Tokens."""
    return sum(int(split.lengths.sum()) for split in splits)
