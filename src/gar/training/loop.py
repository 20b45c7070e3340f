"""The training loop (specification, section 1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gar.config import Config
from gar.data.task import Mixture
from gar.distributed import Job
from gar.evaluation import EvaluationFailure, diagnose, evaluate, measure_accuracy
from gar.features.sources import Progress, Source, make_sources
from gar.model import MultiTaskModel
from gar.runs.history import History
from gar.runs.stopping import StopSignals
from gar.training import checkpoint
from gar.training.captured_backbone import updates_of
from gar.training.memory import PassLimit
from gar.training.updater import TrainingFailure, Updater

#: Makes the sources of a mixture's training and validation splits, and of its selection part if it has one,
#: telling how far it is.
Sources = Callable[[Progress | None], Sequence[Source]]

#: Seconds in which a launcher may repeat a signal that its processes have had already.
GRACE = 10.0


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run after its checkpoint was written."""


@dataclass
class Hooks:
    """What a caller may follow: all optional."""

    features: Callable[[int, int], None] | None = None
    update: Callable[[int, int, float], None] | None = None
    message: Callable[[str], None] = field(default=lambda line: None)


def fit(
    model: MultiTaskModel,
    mixture: Mixture,
    config: Config,
    *,
    history: History | None = None,
    checkpoints: Path | None = None,
    resume: bool = False,
    hooks: Hooks | None = None,
    record: Callable[[int | None], None] | None = None,
    sources: Sources | None = None,
    selection: Mixture | None = None,
    job: Job | None = None,
) -> dict[str, Any]:
    """Train ``model`` in place; returns a result's ``updates``, ``accuracy``, ``routing`` and ``timing``.

    Beside them ``diagnosis`` holds what :func:`gar.diagnose` found at the end. ``record`` is told what
    ``max_tokens_per_pass: auto`` comes to. ``sources`` makes those of the mixture's training and validation
    splits where something better is at hand than to begin from the texts. The validation splits of
    ``selection`` are measured at the end too, as ``accuracy.selection``. Of the ranks of a ``job`` the first
    one measures and keeps.
    """
    hooks, history, job = hooks or Hooks(), history or History(None), job or Job.alone()
    make: Sources = sources or partial(make_sources, model, mixture, config.cache, selection=selection)
    source, validation, *held = job.each(lambda: make(hooks.features))
    limit = PassLimit(config.max_tokens_per_pass, hooks.message, record, job)
    updater = job.each(lambda: Updater(model, source, config, [t.name for t in mixture.tasks], limit, job))
    total = updater.total

    def load() -> tuple[int, float]:
        if not resume or checkpoints is None:
            return 0, 0.0
        state = checkpoint.load(checkpoints, model, updater.optimizer, hooks.message, updater.state)
        return (state["update"], state["facts"]["seconds"]) if state else (0, 0.0)

    start, seconds = job.told(load)
    checkpoint.align(job, model, updater.optimizer, updater.state)
    history.rewind(start, hooks.message)
    updates = updates_of(updater)
    saved = time.monotonic()

    def save(done: int) -> None:
        nonlocal saved
        updater.check(done)
        saved = time.monotonic()
        job.first(partial(keep, done))

    def keep(done: int) -> None:
        if checkpoints is not None:
            history.flush()
            facts, count = {"seconds": seconds}, config.checkpoint.keep
            checkpoint.save(checkpoints, done, model, updater.optimizer, facts, count, updater.state)

    def measure(
        done: int, how: Callable[..., dict[str, Any]], of: Mixture = mixture, where: Source = validation
    ) -> dict[str, Any]:
        updater.check(done)

        def measured() -> dict[str, Any]:
            try:
                return how(model, of, source=where, options=config.evaluation)
            except EvaluationFailure as error:
                raise TrainingFailure(str(error), done) from error

        return job.told(measured)

    model.train()
    with StopSignals(GRACE if job.count > 1 else 0.0) as stopping:
        due = config.evaluation.every, config.checkpoint.every
        for first, last in blocks(start, total, updates.stride, *due):
            began = time.perf_counter()
            outcomes = limit.explaining(updates.block(first, last), first, model)
            for done, outcome in enumerate(outcomes, first + 1):
                seconds += time.perf_counter() - began
                history.update(done, outcome.tasks, outcome.gradient_norm, outcome.learning_rate)
                if hooks.update is not None:
                    hooks.update(done, total, history.last_loss)
                began = time.perf_counter()
            if is_due(config.evaluation.every, last) and last < total:
                history.evaluation(last, measure(last, evaluate))
            rested = time.monotonic() - saved >= config.checkpoint.pause
            stop = job.any(stopping())
            # The last one protects finished weights while they are measured and written.
            if stop or last == total or (is_due(config.checkpoint.every, last) and job.any(rested)):
                save(last)
            if stop:
                raise Interrupted(f"stopped after update {last} of {total}")
        history.flush()
        diagnosis = measure(total, diagnose)
        accuracy = dict(diagnosis["accuracy"])
        if selection is not None:
            found = measure(total, measure_accuracy, selection, held[0])
            accuracy["selection"] = {key: found[key] for key in ("macro", "tasks")}
        if job.any(stopping()):
            raise Interrupted(f"stopped after update {total} of {total}")
    timing = {"updates_per_second": total / seconds, "step_seconds_mean": seconds / total}
    if job.count > 1:
        timing["bytes_sent_per_update"] = updater.sent / max(1, total - start)
    sections = {"accuracy": accuracy, "routing": diagnosis["routing"]}
    return {"updates": total, **sections, "timing": timing, "diagnosis": diagnosis}


def blocks(start: int, total: int, stride: int, *every: int) -> Iterator[tuple[int, int]]:
    """Updates from ``start`` in blocks of at most ``stride`` that end wherever something is due.

    >>> list(blocks(3, 12, 4, 5, 0))
    [(3, 5), (5, 9), (9, 10), (10, 12)]
    """
    while start < total:
        stop = min([start + stride, total, *((start // n + 1) * n for n in every if n)])
        yield start, stop
        start = stop


def is_due(every: int, done: int) -> bool:
    """Whether something done every N updates (0: never) is due after ``done``."""
    return bool(every) and done % every == 0
