"""The training loop (specification, section 1)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW

from gar.config import Config, OptimizerConfig
from gar.data.batches import Group, Updates
from gar.data.task import Mixture
from gar.evaluation import EvaluationFailure, diagnose, evaluate
from gar.features.sources import Source, make_sources
from gar.model import MultiTaskModel
from gar.runs.history import History
from gar.runs.stopping import StopSignals
from gar.training import checkpoint
from gar.training.updater import UpdateOptions, broken_group, run_update

ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8


class TrainingFailure(RuntimeError):
    """Training cannot go on (something is not finite); the last good checkpoint stays.

    ``update`` is the update, counted from 1, in which it happened.
    """

    def __init__(self, message: str, update: int) -> None:
        super().__init__(message, update)
        self.update = update

    def __str__(self) -> str:
        return f"update {self.update}: {self.args[0]}"


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
) -> dict[str, Any]:
    """Train ``model`` in place; returns a result's ``updates``, ``accuracy``, ``routing`` and ``timing``.

    Beside them ``diagnosis`` holds what :func:`gar.diagnose` found at the end.
    """
    hooks, history = hooks or Hooks(), history or History(None)
    source, validation = make_sources(model, mixture, config.cache, hooks.features)
    names = [task.name for task in mixture.tasks]
    sizes = [len(task.train) for task in mixture.tasks]
    schedule = Updates(names, sizes, mixture.batch_size, mixture.group_size, config.seed)
    total = total_updates(config.optimizer, schedule)
    options = UpdateOptions(names, config.observation, config.max_tokens_per_pass, config.seed)
    optimizer, learning_rate = make_optimizer(model, config.optimizer, total)
    parameters = model.trainable_parameters()
    start, seconds = 0, 0.0
    if resume and checkpoints is not None:
        state = checkpoint.load(checkpoints, model, optimizer, hooks.message)
        start, seconds = (state["update"], state["facts"]["seconds"]) if state else (0, 0.0)
    history.rewind(start, hooks.message)

    def save(done: int) -> None:
        check_weights(model, done)
        if checkpoints is not None:
            history.flush()
            checkpoint.save(checkpoints, done, model, optimizer, {"seconds": seconds}, config.checkpoint.keep)

    def measure(done: int, how: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        check_weights(model, done)
        try:
            return how(model, mixture, source=validation, options=config.evaluation)
        except EvaluationFailure as error:
            raise TrainingFailure(str(error), done) from error

    model.train()
    with StopSignals() as stopping:
        for number in range(start, total):
            began = time.perf_counter()
            groups = schedule.groups(number)
            losses = run_update(model, source, groups, config.method, number, options)
            norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
            values, norm_value = finite(losses, norm, groups, model, source, number, options)
            clip_grads_with_norm_(parameters, config.optimizer.clip, norm)
            rate = optimizer.param_groups[0]["lr"] = learning_rate(number)
            optimizer.step()
            seconds += time.perf_counter() - began
            done = number + 1
            history.update(done, task_losses(values, groups, names), norm_value, rate)
            if hooks.update is not None:
                hooks.update(done, total, history.last_loss)
            if is_due(config.evaluation.every, done) and done < total:
                history.evaluation(done, measure(done, evaluate))
            # The last one protects finished weights while they are measured and written.
            if stopping() or done == total or is_due(config.checkpoint.every, done):
                save(done)
            if stopping():
                raise Interrupted(f"stopped after update {done} of {total}")
        history.flush()
        diagnosis = measure(total, diagnose)
        if stopping():
            raise Interrupted(f"stopped after update {total} of {total}")
    timing = {"updates_per_second": total / seconds, "step_seconds_mean": seconds / total}
    sections = {key: diagnosis[key] for key in ("accuracy", "routing")}
    return {"updates": total, **sections, "timing": timing, "diagnosis": diagnosis}


def task_losses(losses: Sequence[float], groups: Sequence[Group], names: Sequence[str]) -> dict[str, float]:
    """The mean loss of every task's batch from the groups' mean losses."""
    tasks = dict.fromkeys(names, 0.0)
    for loss, group in zip(losses, groups, strict=True):
        tasks[names[group.task]] += group.task_weight * len(names) * loss
    return tasks


def is_due(every: int, done: int, last: int | None = None) -> bool:
    """Whether something done every N updates (0: never) is due after ``done``, and after the ``last`` one.

    >>> [done for done in range(1, 9) if is_due(3, done, 8)]
    [3, 6, 8]
    """
    return bool(every) and (done % every == 0 or done == last)


def total_updates(optimizer: OptimizerConfig, schedule: Updates) -> int:
    """The update budget; epochs count passes over the largest task."""
    if optimizer.epochs is None:
        return optimizer.updates
    return max(1, round(optimizer.epochs * schedule.updates_per_epoch))


def warmup_factor(update: int, total: int, warmup: float) -> float:
    """Share of the learning rate at update 0, 1, …: linear over the first ``warmup`` share, then 1.

    >>> [warmup_factor(u, 40, 0.1) for u in range(6)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """
    length = math.ceil(total * warmup - 1e-9)
    return min(1.0, (update + 1) / length) if length else 1.0


def make_optimizer(
    model: MultiTaskModel, config: OptimizerConfig, total: int
) -> tuple[AdamW, Callable[[int], float]]:
    """AdamW with one parameter group over everything trainable, and the learning rate of update 0, 1, …"""
    optimizer = AdamW(
        model.trainable_parameters(),
        lr=config.learning_rate,
        betas=ADAM_BETAS,
        eps=ADAM_EPS,
        weight_decay=config.weight_decay,
        fused=model.device.type == "cuda",
    )
    return optimizer, lambda update: config.learning_rate * warmup_factor(update, total, config.warmup)


def finite(
    losses: Tensor,
    norm: Tensor,
    groups: list[Group],
    model: MultiTaskModel,
    source: Source,
    number: int,
    options: UpdateOptions,
) -> tuple[list[float], float]:
    """Losses and gradient norm as numbers (the update's only read-back), or a failure that says where."""
    *values, norm_value = torch.cat([losses.double(), norm.detach().double().reshape(1)]).tolist()
    for group, value in zip(groups, values, strict=True):
        if not math.isfinite(value):
            raise TrainingFailure(
                f"the loss of task {options.names[group.task]}, group {group.number} is {value}; "
                "expected finite losses (a smaller learning rate, or inputs without extreme values)",
                number + 1,
            )
    if not math.isfinite(norm_value):
        gradients = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        where = next(
            (name for name, grad in gradients if not grad.isfinite().all()), "all parameters together"
        )
        guilty = broken_group(model, source, groups, number, options)
        whose = (
            "the method's own terms (no group's task loss has such a gradient)"
            if guilty is None
            else f"task {options.names[guilty.task]}, group {guilty.number}"
        )
        raise TrainingFailure(
            f"the gradient of {whose} is not finite in {where}; "
            "expected finite gradients (a smaller learning rate, or inputs without extreme values)",
            number + 1,
        )
    return values, norm_value


def check_weights(model: MultiTaskModel, done: int) -> None:
    """Refuse to keep or measure weights that the last update made non-finite."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.isfinite().all():
            raise TrainingFailure(f"{name} is no longer finite; expected a smaller learning rate", done)
