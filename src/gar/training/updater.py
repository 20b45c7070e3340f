"""One update: forwards, the method's contributions, and nothing that depends on which method it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import get_total_norm

from gar.data.batches import Group, passes
from gar.features.sources import Part, Source
from gar.methods import Method
from gar.methods.update import GroupWeights, Pass, Update
from gar.model import MultiTaskModel, example_losses
from gar.observation import Observed, observe
from gar.seeds import derive_seed, generator

#: Padded tokens that take about as long as the fixed cost of one more pass, by device type.
PASS_COST = {"cpu": 512, "cuda": 16384}


@dataclass(frozen=True)
class UpdateOptions:
    """What an update depends on beside model, data and method."""

    names: Sequence[str]
    observation: str = "one_pass"
    max_tokens: int | None = None
    seed: int = 0


def run_update(
    model: MultiTaskModel,
    source: Source,
    groups: Sequence[Group],
    method: Method,
    number: int,
    options: UpdateOptions,
) -> Tensor:
    """Fill ``.grad`` for update ``number``; returns the groups' mean losses [M], detached.

    The update may be split into several passes of whole groups; the result does not depend on the split. A
    trainable backbone always runs one group a pass: its own dropout then has one stream per group, the same
    for every method and every memory limit.
    """
    parameters = model.trainable_parameters()
    for parameter in parameters:
        parameter.grad = None
    wants_gradients = "gradients" in method.observes
    steps: list[Pass] = []
    scratch: dict[str, Any] = {}
    separate = method.separate_groups or model.config.trainable
    cost = PASS_COST.get(model.device.type, 0)
    for part in passes(groups, source.lengths, options.max_tokens, cost, separate):
        with (
            _backbone_dropout(model, options.seed, number, part[0].number),
            _observing(model, method, options) as observed,
        ):
            losses, weights = group_losses(model, source, part, len(groups), number, options)
            step = Pass.of(losses, weights, parameters, observed, scratch)
            if wants_gradients and options.observation == "per_group":
                step.capture_per_group()
            method.backward(step)
            if wants_gradients and options.observation == "one_pass":
                step.capture_one_pass()
        step.release()
        steps.append(step)
    method.finish(Update(steps))
    for parameter in parameters:
        if parameter.grad is None:  # AdamW skips None, which would tie its moments to what a method computes
            parameter.grad = torch.zeros_like(parameter)
    return torch.cat([step.losses for step in steps])


def group_losses(
    model: MultiTaskModel,
    source: Source,
    groups: Sequence[Group],
    total: int,
    number: int,
    options: UpdateOptions,
) -> tuple[Tensor, GroupWeights]:
    """Mean cross-entropy [M] of the groups of one pass, with their weights."""
    parts = task_parts(groups)
    keep = dropout_mask(model, source.lengths, groups, number, options.seed)
    output = model.suffix(
        source.state(parts), [(options.names[task], len(rows)) for task, rows in parts], keep
    )
    labels = [source.labels[task][torch.from_numpy(rows).to(model.device)] for task, rows in parts]
    rows = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(group) for group in groups]))
    weights = GroupWeights(
        rows,
        torch.tensor([group.task_weight for group in groups], dtype=model.dtype, device=model.device),
        torch.tensor([group.sample_weight for group in groups], dtype=model.dtype, device=model.device),
        total,
    )
    return weights.grouping.mean(example_losses(output, labels)), weights


def broken_group(
    model: MultiTaskModel, source: Source, groups: Sequence[Group], number: int, options: UpdateOptions
) -> Group | None:
    """After a non-finite gradient: the first group whose own task loss has one, with the same dropout."""
    for group in groups:
        with _backbone_dropout(model, options.seed, number, group.number):
            losses, _ = group_losses(model, source, [group], len(groups), number, options)
            gradients = torch.autograd.grad(losses[0], model.trainable_parameters(), allow_unused=True)
        if not get_total_norm([g for g in gradients if g is not None]).isfinite():
            return group
    return None


def task_parts(groups: Sequence[Group]) -> list[Part]:
    """Neighbouring groups of one task as one run of examples."""
    runs = groupby(groups, key=lambda group: group.task)
    return [(task, np.concatenate([group.examples for group in run])) for task, run in runs]


def dropout_mask(
    model: MultiTaskModel,
    lengths: Sequence[NDArray[np.int64]],
    groups: Sequence[Group],
    number: int,
    seed: int,
) -> Tensor | None:
    """The experts' dropout mask of a pass, or None where the bank has no dropout.

    Every group draws from its own stream at its own width: the mask depends neither on padding nor on how
    the update is split into passes.
    """
    site = model.site
    widths = [int(lengths[group.task][group.examples].max()) for group in groups]
    shape = site.dropout_shape(sum(len(group) for group in groups), max(widths)) if model.training else None
    if shape is None:
        return None
    keep = torch.ones(shape, dtype=torch.bool, device=model.device)
    start = 0
    for group, width in zip(groups, widths, strict=True):
        block = keep[start:][tuple(map(slice, site.units(len(group), width)))]
        stream = generator(model.device, seed, "dropout", number, group.number)
        block.copy_(torch.empty_like(block).bernoulli_(1 - site.dropout, generator=stream))
        start += len(group)
    return keep


@contextlib.contextmanager
def _backbone_dropout(model: MultiTaskModel, seed: int, number: int, group: int) -> Iterator[None]:
    """A trainable backbone's own dropout draws from a stream of this update and group."""
    if not model.config.trainable:
        yield
        return
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(derive_seed(seed, "backbone", number, group))
        yield


def _observing(
    model: MultiTaskModel, method: Method, options: UpdateOptions
) -> contextlib.AbstractContextManager[Observed | None]:
    if not method.observes:
        return contextlib.nullcontext()
    factors = "gradients" in method.observes and options.observation == "one_pass"
    return observe(model.bank, gradients=factors)
