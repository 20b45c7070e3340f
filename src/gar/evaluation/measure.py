"""What a model reaches and what its experts do, measured in eval mode (specification, section 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gar import metrics
from gar.config import CacheConfig, EvaluationConfig
from gar.data import check_mixture
from gar.data.batches import split
from gar.data.task import Mixture, Task
from gar.features import Source, make_source
from gar.metrics import Measured
from gar.model import MultiTaskModel, evaluating, example_losses, length_bucketed
from gar.objective import accurate
from gar.routing import Routing

Array = NDArray[np.float64]

Watch: TypeAlias = Callable[[int, NDArray[np.int64], Routing], None]
"""Called with the task's number, the example indices and the routing of every forward of an evaluation."""

BLOCK = 1 << 16  # parameters per block of the Gram matrices


class EvaluationFailure(RuntimeError):
    """The model's outputs are not finite: it has diverged, and there is nothing to measure."""


@dataclass(frozen=True)
class ForwardPass:
    """One pass over all validation examples, tasks in order.

    ``predictions[t]`` int64 [N_t]; ``example_gates[t]`` [N_t, E] are the ``q_n``; ``counts`` [T, E] are
    selection events.
    """

    predictions: list[NDArray[np.int64]]
    example_gates: list[Array]
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class GradientProbe:
    """Per task and expert gradients ``g_te``, as what the metrics need of them.

    ``norms`` [T, E]; ``by_expert`` [E, T, T] Gram matrices over tasks; ``between`` [E, E] Gram matrix of the
    experts' mean gradients.
    """

    norms: Array
    by_expert: Array
    between: Array


def evaluate(
    model: MultiTaskModel,
    mixture: Mixture,
    *,
    source: Source | None = None,
    options: EvaluationConfig | None = None,
    cache: CacheConfig | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Accuracy and routing diagnostics of a model on a mixture's validation splits.

    Returns the ``accuracy`` and ``routing`` sections of result.json: beside the summary numbers,
    ``routing.load_by_task``, ``routing.counts`` (the contingency table) and ``routing.gradient_norms``, each
    ``{task: [E]}``. Weights, gradients, mode and random state of the model stay as they are. ``watch`` sees
    the routing of every validation example. Raises :class:`EvaluationFailure` where the model has diverged.
    """
    options = options or EvaluationConfig()
    if source is None:
        check_mixture(model.tasks, mixture)
        source = make_source(model, [task.validation for task in mixture.tasks], cache or CacheConfig())
    with evaluating(model):
        forward = forward_pass(model, mixture, source, options.batch_tokens, watch)
        probe = gradient_probe(model, mixture, source, options.probe_examples)
    return {
        "accuracy": accuracies(mixture.tasks, forward),
        "routing": routing_summary(model, mixture, forward, probe),
    }


@torch.inference_mode()
def forward_pass(
    model: MultiTaskModel, mixture: Mixture, source: Source, batch_tokens: int, watch: Watch | None = None
) -> ForwardPass:
    """Predictions, example gates and selection counts of the whole validation split."""
    predictions: list[NDArray[np.int64]] = []
    gates: list[Array] = []
    counts = np.zeros((len(mixture.tasks), model.bank.experts.count), np.int64)
    for t, task in enumerate(mixture.tasks):
        lengths = source.lengths[t]
        predicted = np.empty(len(lengths), np.int64)
        q = np.empty((len(lengths), counts.shape[1]))
        for rows in length_bucketed(lengths, batch_tokens):
            (logits,), routing = model.suffix(source.state([(t, rows)]), [(task.name, len(rows))])
            _check_finite(logits, f"the validation logits of task {task.name}")
            predicted[rows] = logits.argmax(1).cpu().numpy()
            q[rows] = routing.example_gates().cpu().double().numpy()
            counts[t] += routing.selected.flatten(0, -2).sum(0).cpu().numpy()
            if watch is not None:
                watch(t, rows, routing)
        predictions.append(predicted)
        gates.append(q)
    return ForwardPass(predictions, gates, counts)


def gradient_probe(model: MultiTaskModel, mixture: Mixture, source: Source, examples: int) -> GradientProbe:
    """The gradient diagnostic: leading batches of each unshuffled validation loader, in groups.

    Whole loader batches are taken until ``examples`` are reached; groups weigh equally.
    """
    gradients = []
    for t, task in enumerate(mixture.tasks):
        total, groups = torch.zeros(()), 0
        for batch in leading_batches(len(source.lengths[t]), mixture.batch_size, examples):
            part, count = _batch_gradients(model, source, t, task.name, batch, mixture.group_size)
            total, groups = total.to(part.device) + part, groups + count
        _check_finite(total, f"the expert gradients of task {task.name}")
        gradients.append((total / groups).cpu())
    return _grams(gradients)


def leading_batches(size: int, batch_size: int, examples: int) -> Iterator[NDArray[np.int64]]:
    """Whole batches of an unshuffled loader, until ``examples`` are reached.

    >>> [batch.tolist() for batch in leading_batches(8, 3, 4)]
    [[0, 1, 2], [3, 4, 5]]
    """
    for batch in split(np.arange(size), batch_size):
        if batch[0] >= examples:
            return
        yield batch


def _batch_gradients(
    model: MultiTaskModel, source: Source, t: int, name: str, batch: NDArray[np.int64], group_size: int
) -> tuple[Tensor, int]:
    """Each expert's own gradient of the sum of the groups' mean losses, [E, d]; and how many groups."""
    bank = model.bank
    with torch.no_grad():  # what lies below the experts has no part in their gradients
        state = source.state([(t, batch)])
    labels = source.labels[t][torch.from_numpy(batch).to(model.device)]
    with torch.enable_grad(), model.products():
        losses = example_losses(model.suffix(state, [(name, len(batch))]), [labels])
        means = torch.stack([group.mean() for group in losses.split(group_size)])
        stacked = [getattr(bank.experts, slot) for slot in bank.experts.slots]
        grads = torch.autograd.grad(means.sum(), stacked, materialize_grads=True)
    return torch.cat([accurate(grad).flatten(1) for grad in grads], dim=1), len(means)


def _grams(gradients: Sequence[Tensor]) -> GradientProbe:
    """[E, d] of each task, reduced to norms and Gram matrices in float64, a block of parameters at a time."""
    tasks, (experts, size) = len(gradients), gradients[0].shape
    by_expert = torch.zeros(experts, tasks, tasks, dtype=torch.float64)
    between = torch.zeros(experts, experts, dtype=torch.float64)
    for start in range(0, size, BLOCK):
        block = torch.stack([rows[:, start : start + BLOCK].double() for rows in gradients])
        by_expert += torch.einsum("ted,sed->ets", block, block)
        mean = block.mean(0)
        between += mean @ mean.T
    norms = by_expert.diagonal(dim1=1, dim2=2).sqrt().T
    return GradientProbe(norms.numpy(), by_expert.numpy(), between.numpy())


def _check_finite(values: Tensor, what: str) -> None:
    if not bool(values.isfinite().all()):
        raise EvaluationFailure(
            f"{what} are not finite: the model has diverged; expected one trained with a smaller learning "
            "rate, or an earlier checkpoint"
        )


def accuracies(tasks: Sequence[Task], forward: ForwardPass) -> dict[str, Any]:
    """The ``accuracy`` section: macro, per task, and the tasks' own metrics under ``extra``."""
    per_task = {
        task.name: metrics.accuracy(predicted, task.validation.labels)
        for task, predicted in zip(tasks, forward.predictions, strict=True)
    }
    extra = {
        f"{task.name}_{name}": metrics.TASK_METRICS[name](predicted, task.validation.labels)
        for task, predicted in zip(tasks, forward.predictions, strict=True)
        for name in task.extra
    }
    return {"macro": metrics.macro_accuracy(per_task), "tasks": per_task, "extra": extra}


def routing_summary(
    model: MultiTaskModel, mixture: Mixture, forward: ForwardPass, probe: GradientProbe
) -> dict[str, Any]:
    """The ``routing`` section. The load is probability mass at FFN sites, selection counts at the head."""
    pooled = np.concatenate(forward.example_gates)
    load = model.site.load(pooled, forward.counts.sum(0))
    by_task = map(model.site.load, forward.example_gates, forward.counts)
    arrays = Measured(load, forward.counts, pooled, probe.norms, probe.by_expert, probe.between)
    return {
        "load": load.tolist(),
        **metrics.summarize(arrays),
        **{
            key: {task.name: row.tolist() for task, row in zip(mixture.tasks, rows, strict=True)}
            for key, rows in (
                ("load_by_task", by_task),
                ("counts", forward.counts),
                ("gradient_norms", probe.norms),
            )
        },
    }
