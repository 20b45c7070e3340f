"""What a model reaches and what its experts do, measured in eval mode (specification, section 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gar import metrics
from gar.config import CacheConfig, EvaluationConfig
from gar.data.batches import split
from gar.data.task import Mixture, Task
from gar.model import MultiTaskModel, evaluating, length_bucketed
from gar.observation import observe
from gar.routing import mean_over_tokens
from gar.training.sources import Source, make_source
from gar.training.step import example_losses

Array = NDArray[np.float64]


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
) -> dict[str, Any]:
    """Accuracy and routing diagnostics of a model on a mixture's validation splits.

    Returns the ``accuracy`` and ``routing`` sections of result.json, with ``routing.by_task`` (load of each
    task) and ``routing.counts`` (the contingency table) beside the summary numbers.
    """
    options = options or EvaluationConfig()
    source = source or make_source(model, [task.validation for task in mixture.tasks], cache or CacheConfig())
    with evaluating(model):
        forward = forward_pass(model, mixture, source, options.batch_tokens)
        probe = gradient_probe(model, mixture, source, options.probe_examples)
    return {
        "accuracy": accuracies(mixture.tasks, forward),
        "routing": routing_summary(model, mixture, forward, probe),
    }


@torch.inference_mode()
def forward_pass(model: MultiTaskModel, mixture: Mixture, source: Source, batch_tokens: int) -> ForwardPass:
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
            predicted[rows] = logits.argmax(1).cpu().numpy()
            q[rows] = mean_over_tokens(routing.gates, routing.mask).double().cpu().numpy()
            counts[t] += routing.selected.flatten(0, -2).sum(0).cpu().numpy()
        predictions.append(predicted)
        gates.append(q)
    return ForwardPass(predictions, gates, counts)


def gradient_probe(model: MultiTaskModel, mixture: Mixture, source: Source, examples: int) -> GradientProbe:
    """The gradient diagnostic: leading batches of each unshuffled validation loader, in groups.

    Whole loader batches are taken until ``examples`` are reached; groups weigh equally.
    """
    bank = model.bank
    rows: list[Tensor] = []  # per task [E, d]
    for t, task in enumerate(mixture.tasks):
        total, groups_seen, taken = None, 0, 0
        for batch in split(np.arange(len(source.lengths[t])), mixture.batch_size):
            if taken >= examples:
                break
            taken += len(batch)
            groups = split(batch, mixture.group_size)
            index = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(g) for g in groups]))
            with torch.enable_grad(), observe(bank) as observed:
                output = model.suffix(source.state([(t, batch)]), [(task.name, len(batch))])
                losses = example_losses(output, [source.labels[t][torch.from_numpy(batch).to(model.device)]])
                sizes = torch.bincount(index).to(losses.device, losses.dtype)
                total_loss = (losses / sizes[index.to(losses.device)]).sum()
                parameters = [p for p in bank.parameters() if p.requires_grad]
                torch.autograd.grad(total_loss, parameters, allow_unused=True)
            ones = torch.ones(len(groups), device=losses.device)
            site = observed.site
            summed = torch.stack(
                [site.expert_group_gradients(index, ones, e).sum(0) for e in range(bank.experts.count)]
            )
            total = summed if total is None else total + summed
            groups_seen += len(groups)
        assert total is not None
        rows.append(total / groups_seen)
    return _grams(torch.stack(rows))


def _grams(gradients: Tensor) -> GradientProbe:
    """[T, E, d] reduced to norms and Gram matrices."""
    by_expert = torch.einsum("ted,sed->ets", gradients, gradients).double().cpu().numpy()
    mean = gradients.mean(0)
    norms = gradients.norm(dim=-1).double().cpu().numpy()
    return GradientProbe(norms, by_expert, (mean @ mean.T).double().cpu().numpy())


def accuracies(tasks: Sequence[Task], forward: ForwardPass) -> dict[str, Any]:
    """The ``accuracy`` section: macro, per task, and the tasks' own metrics under ``extra``."""
    per_task = {
        task.name: metrics.accuracy(predicted, task.validation.labels)
        for task, predicted in zip(tasks, forward.predictions, strict=True)
    }
    functions = {"f1": metrics.f1, "mcc": metrics.matthews_correlation}
    extra = {
        f"{task.name}_{name}": functions[name](predicted, task.validation.labels)
        for task, predicted in zip(tasks, forward.predictions, strict=True)
        for name in task.extra
    }
    return {"macro": metrics.macro_accuracy(per_task), "tasks": per_task, "extra": extra}


def routing_summary(
    model: MultiTaskModel, mixture: Mixture, forward: ForwardPass, probe: GradientProbe
) -> dict[str, Any]:
    """The ``routing`` section. The load is probability mass at FFN sites, selection counts at the head."""
    pooled = np.concatenate(forward.example_gates)
    if model.head is None:
        load = pooled.mean(0)
        by_task = [q.mean(0) for q in forward.example_gates]
    else:
        load = forward.counts.sum(0) / forward.counts.sum()
        by_task = list(forward.counts / forward.counts.sum(1, keepdims=True))
    names = [task.name for task in mixture.tasks]
    return {
        "load": load.tolist(),
        "load_variance": metrics.load_variance(load),
        "utilization": metrics.utilization(load),
        "gradient_mass_purity": metrics.gradient_mass_purity(probe.norms),
        "structure_purity": metrics.structure_purity(forward.counts),
        "nmi": metrics.normalized_mutual_information(forward.counts),
        "ari": metrics.adjusted_rand_index(forward.counts),
        "entropy": metrics.routing_entropy(pooled),
        "normalized_entropy": metrics.routing_entropy(pooled) / math.log(len(load)) if len(load) > 1 else 0.0,
        "intra_expert_coherence": metrics.intra_expert_coherence(gram=probe.by_expert),
        "inter_expert_similarity": metrics.inter_expert_similarity(gram=probe.between),
        "load_by_task": {name: row.tolist() for name, row in zip(names, by_task, strict=True)},
        "counts": {name: row.tolist() for name, row in zip(names, forward.counts, strict=True)},
        "gradient_norms": {name: row.tolist() for name, row in zip(names, probe.norms, strict=True)},
    }
