"""What a model reaches and what its experts do, measured in eval mode (specification, section 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
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
#: Padded tokens per forward pass, by device type: what stays in a CPU's caches, what keeps a GPU busy.
BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
#: Memory of a forward with its backward, in forwards without.
WITH_BACKWARD = 4


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
    experts' mean gradients; ``observed`` [T, T] that of the tasks' gradients summed over experts.
    """

    norms: Array
    by_expert: Array
    between: Array
    observed: Array


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
    ``{task: [E]}``, ``routing.task_cosines``, ``{task: [T]}``, and ``routing.gradient_grams`` [E, T, T], the
    inner products of the tasks' gradients in each expert. Weights, gradients, mode and random state of the
    model stay as they are. ``watch`` sees the routing of every validation example. Raises
    :class:`EvaluationFailure` where the model has diverged.
    """
    options = options or EvaluationConfig()
    if source is None:
        check_mixture(model.tasks, mixture)
        source = make_source(model, [task.validation for task in mixture.tasks], cache or CacheConfig())
    tokens = batch_tokens(model, options)
    with evaluating(model):
        forward = forward_pass(model, mixture, source, tokens, watch)
        probe = gradient_probe(model, mixture, source, options.probe_examples, tokens // WITH_BACKWARD)
    return {
        "accuracy": accuracies(mixture.tasks, forward),
        "routing": routing_summary(model, mixture, forward, probe),
    }


def measure_accuracy(
    model: MultiTaskModel, mixture: Mixture, *, source: Source, options: EvaluationConfig
) -> dict[str, Any]:
    """The ``accuracy`` section alone, of the mixture's validation splits; ``source`` has their states."""
    with evaluating(model):
        forward = forward_pass(model, mixture, source, batch_tokens(model, options), None)
    return accuracies(mixture.tasks, forward)


def batch_tokens(model: MultiTaskModel, options: EvaluationConfig) -> int:
    """Padded tokens of an evaluation's forward pass: what is configured, else what suits the device."""
    return options.batch_tokens or BATCH_TOKENS.get(model.device.type, 8192)


@torch.inference_mode()
def forward_pass(
    model: MultiTaskModel, mixture: Mixture, source: Source, batch_tokens: int, watch: Watch | None = None
) -> ForwardPass:
    """Predictions, example gates and selection counts of the whole validation split.

    Everything stays on the device until all is computed: the host never waits for a batch.
    """
    orders = [list(length_bucketed(lengths, batch_tokens)) for lengths in source.lengths]
    predicted: list[Tensor] = []
    gates: list[Tensor] = []
    counts: list[Tensor] = []
    finite: list[Tensor] = []
    for t, (task, order) in enumerate(zip(mixture.tasks, orders, strict=True)):
        count, sound = torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.bool)
        for rows in order:
            (logits,), routing = model.suffix(source.state([(t, rows)]), [(task.name, len(rows))])
            predicted.append(logits.argmax(1))
            gates.append(routing.example_gates())
            count = count.to(logits.device) + routing.selected.flatten(0, -2).sum(0)
            sound = sound.to(logits.device) & logits.isfinite().all()
            if watch is not None:
                watch(t, rows, routing)
        counts.append(count)
        finite.append(sound)
    _check_finite(finite, mixture, "the validation logits of task {}")
    answers, q = torch.cat(predicted).cpu().numpy(), torch.cat(gates).cpu().double().numpy()
    ends = np.cumsum([len(lengths) for lengths in source.lengths])[:-1]
    sorted_ = [np.argsort(np.concatenate(order)) for order in orders]
    return ForwardPass(
        [part[back] for part, back in zip(np.split(answers, ends), sorted_, strict=True)],
        [part[back] for part, back in zip(np.split(q, ends), sorted_, strict=True)],
        torch.stack(counts).cpu().numpy(),
    )


def gradient_probe(
    model: MultiTaskModel, mixture: Mixture, source: Source, examples: int, pass_tokens: int
) -> GradientProbe:
    """The gradient diagnostic: leading batches of each unshuffled validation loader, in groups.

    Whole loader batches are taken until ``examples`` are reached; groups weigh equally. As many batches run
    together as have ``pass_tokens`` padded tokens, one at least.
    """
    gradients = []
    for t, task in enumerate(mixture.tasks):
        batches = list(leading_batches(len(source.lengths[t]), mixture.batch_size, examples))
        sizes = [[len(group) for group in split(batch, mixture.group_size)] for batch in batches]
        total: Tensor | None = None
        for first, stop in _together([source.lengths[t][batch] for batch in batches], pass_tokens):
            rows, groups = np.concatenate(batches[first:stop]), [*chain(*sizes[first:stop])]
            part = _summed_gradients(model, source, t, task.name, rows, groups)
            total = part if total is None else total + part
        assert total is not None
        gradients.append(total / sum(map(len, sizes)))
    finite = [gradient.isfinite().all() for gradient in gradients]
    _check_finite(finite, mixture, "the expert gradients of task {}")
    return _grams(gradients)


def _together(lengths: Sequence[NDArray[np.int64]], tokens: int) -> Iterator[tuple[int, int]]:
    """Neighbouring batches that have ``tokens`` padded tokens together, or less, as (first, stop)."""
    first, rows, widest = 0, 0, 0
    for i, batch in enumerate(lengths):
        if i > first and (rows + len(batch)) * max(widest, batch.max()) > tokens:
            yield first, i
            first, rows, widest = i, 0, 0
        rows, widest = rows + len(batch), max(widest, int(batch.max()))
    yield first, len(lengths)


def leading_batches(size: int, batch_size: int, examples: int) -> Iterator[NDArray[np.int64]]:
    """Whole batches of an unshuffled loader, until ``examples`` are reached.

    >>> [batch.tolist() for batch in leading_batches(8, 3, 4)]
    [[0, 1, 2], [3, 4, 5]]
    """
    for batch in split(np.arange(size), batch_size):
        if batch[0] >= examples:
            return
        yield batch


def _summed_gradients(
    model: MultiTaskModel,
    source: Source,
    t: int,
    name: str,
    rows: NDArray[np.int64],
    groups: Sequence[int],
) -> Tensor:
    """Each expert's own gradient of the sum of the groups' mean losses, [E, d].

    ``rows`` are consecutive examples of task ``t``, ``groups`` the sizes of its groups in this order.
    """
    bank = model.bank
    with torch.no_grad():  # what lies below the experts has no part in their gradients
        state = source.state([(t, rows)])
    weights = torch.from_numpy(1 / np.repeat(groups, groups)).to(model.device, non_blocking=True)
    with torch.enable_grad(), model.products():
        labels = source.labels[t][rows[0] : rows[-1] + 1]
        losses = example_losses(model.suffix(state, [(name, len(rows))]), [labels])
        stacked = [getattr(bank.experts, slot) for slot in bank.experts.slots]
        loss = (losses * weights.to(losses.dtype)).sum()
        grads = torch.autograd.grad(loss, stacked, materialize_grads=True)
    return torch.cat([accurate(grad).flatten(1) for grad in grads], dim=1)


def _grams(gradients: Sequence[Tensor]) -> GradientProbe:
    """[E, d] of each task, reduced to norms and Gram matrices in float64, a block of parameters at a time."""
    tasks, (experts, size) = len(gradients), gradients[0].shape
    device = gradients[0].device
    by_expert = torch.zeros(experts, tasks, tasks, dtype=torch.float64, device=device)
    between = torch.zeros(experts, experts, dtype=torch.float64, device=device)
    observed = torch.zeros(tasks, tasks, dtype=torch.float64, device=device)
    for start in range(0, size, BLOCK):
        block = torch.stack([rows[:, start : start + BLOCK].double() for rows in gradients])
        by_expert += torch.einsum("ted,sed->ets", block, block)
        mean, total = block.mean(0), block.sum(1)
        between += mean @ mean.T
        observed += total @ total.T
    norms = by_expert.diagonal(dim1=1, dim2=2).sqrt().T
    return GradientProbe(*(part.cpu().numpy() for part in (norms, by_expert, between, observed)))


def _check_finite(finite: Sequence[Tensor], mixture: Mixture, what: str) -> None:
    """Refuse the first task whose values are not all finite; read back at once for all tasks."""
    for task, sound in zip(mixture.tasks, torch.stack(list(finite)).tolist(), strict=True):
        if not sound:
            raise EvaluationFailure(
                f"{what.format(task.name)} are not finite: the model has diverged; expected one trained "
                "with a smaller learning rate, or an earlier checkpoint"
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
    clusters = mixture.clusters
    arrays = Measured(
        load,
        forward.counts,
        pooled,
        probe.norms,
        probe.by_expert,
        probe.between,
        probe.observed,
        np.stack([gates.mean(0) for gates in forward.example_gates]),
        None if clusters is None else [clusters[task.name] for task in mixture.tasks],
    )
    return {
        "load": load.tolist(),
        **metrics.summarize(arrays),
        **{
            key: {task.name: row.tolist() for task, row in zip(mixture.tasks, rows, strict=True)}
            for key, rows in (
                ("load_by_task", by_task),
                ("counts", forward.counts),
                ("gradient_norms", probe.norms),
                ("task_cosines", metrics.task_cosines(gram=probe.by_expert)),
            )
        },
        "gradient_grams": probe.by_expert.tolist(),
    }
