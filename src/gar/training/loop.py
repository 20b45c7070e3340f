"""The training loop (specification, section 1)."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from gar.config import Config, OptimizerConfig
from gar.data.batches import Group, Updates
from gar.data.task import Mixture
from gar.evaluation import evaluate
from gar.model import MultiTaskModel
from gar.training import checkpoint
from gar.training.history import History
from gar.training.sources import make_source
from gar.training.step import UpdateOptions, run_update

ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8


class TrainingFailure(RuntimeError):
    """Training cannot go on (a loss or gradient is not finite); the last good checkpoint stays."""


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
    """Train ``model`` in place; returns the sections ``accuracy``, ``routing`` and ``timing`` of a result."""
    hooks, history = hooks or Hooks(), history or History(None)
    source = make_source(model, [task.train for task in mixture.tasks], config.cache, hooks.features)
    validation = make_source(model, [task.validation for task in mixture.tasks], config.cache, hooks.features)
    names = [task.name for task in mixture.tasks]
    sizes = [len(task.train) for task in mixture.tasks]
    schedule = Updates(names, sizes, mixture.batch_size, mixture.group_size, config.seed)
    total = total_updates(config.optimizer, schedule)
    options = UpdateOptions(names, config.observation, config.max_tokens_per_pass, config.seed)
    optimizer, scheduler = make_optimizer(model, config.optimizer, total)
    start, seconds = 0, 0.0
    if (
        resume
        and checkpoints is not None
        and (state := checkpoint.load(checkpoints, model, optimizer, hooks.message))
    ):
        start, seconds = state["update"], state["facts"]["seconds"]
        for _ in range(start):
            scheduler.step()
    history.rewind(start)

    def save(done: int) -> None:
        if checkpoints is not None:
            history.flush()
            checkpoint.save(checkpoints, done, model, optimizer, {"seconds": seconds}, config.checkpoint.keep)

    model.train()
    parameters = model.trainable_parameters()
    with stop_signals() as stopped:
        for number in range(start, total):
            began = time.perf_counter()
            groups = schedule.groups(number)
            losses = run_update(model, source, groups, config.method, number, options)
            norm = torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.clip)
            values, norm_value = finite(losses, norm, groups, names, number, model)
            rate = float(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            seconds += time.perf_counter() - began
            done = number + 1
            history.update(done, values, groups, names, norm_value, rate)
            if hooks.update is not None:
                hooks.update(done, total, history.last_loss)
            if config.evaluation.every and done % config.evaluation.every == 0 and done < total:
                history.evaluation(
                    done, evaluate(model, mixture, source=validation, options=config.evaluation)
                )
            if stopped or (config.checkpoint.every and done % config.checkpoint.every == 0 and done < total):
                save(done)
            if stopped:
                raise Interrupted(f"stopped after update {done} of {total}")
    history.flush()
    final = evaluate(model, mixture, source=validation, options=config.evaluation)
    steps = max(1, total)
    timing = {"updates_per_second": steps / seconds if seconds else 0.0, "step_seconds_mean": seconds / steps}
    return {"updates": total, **final, "timing": timing}


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


def make_optimizer(model: MultiTaskModel, config: OptimizerConfig, total: int) -> tuple[AdamW, LambdaLR]:
    """AdamW with one parameter group over everything trainable, and its warm-up schedule."""
    optimizer = AdamW(
        model.trainable_parameters(),
        lr=config.learning_rate,
        betas=ADAM_BETAS,
        eps=ADAM_EPS,
        weight_decay=config.weight_decay,
        fused=model.device.type == "cuda",
    )
    return optimizer, LambdaLR(optimizer, lambda update: warmup_factor(update, total, config.warmup))


def finite(
    losses: Tensor, norm: Tensor, groups: list[Group], names: list[str], number: int, model: MultiTaskModel
) -> tuple[list[float], float]:
    """Losses and gradient norm as numbers (the update's only transfer), or a failure that says where."""
    *values, norm_value = torch.cat([losses.double(), norm.detach().double().reshape(1)]).tolist()
    for group, value in zip(groups, values, strict=True):
        if not math.isfinite(value):
            raise TrainingFailure(
                f"update {number + 1}: the loss of task {names[group.task]}, group {group.number} is {value}; "
                "expected finite losses (a smaller learning rate, or inputs without extreme values)"
            )
    if not math.isfinite(norm_value):
        broken = next(
            (n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()),
            "?",
        )
        raise TrainingFailure(f"update {number + 1}: the gradient of {broken} is not finite")
    return values, norm_value


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Inside, SIGINT and SIGTERM are noted instead of raised; a second one acts at once."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    previous: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        for which, handler in previous.items():
            signal.signal(which, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, note)
    try:
        yield seen
    finally:
        for which, handler in previous.items():
            signal.signal(which, handler)
