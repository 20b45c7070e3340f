"""A tiny multi-task model around an expert bank, one update of it, and its slow float64 twin.

The model has nothing to do with the package's trainer: token embedding (the "backbone"), experts added to it,
``tanh``, masked mean, one linear head per task; at the head site the experts sit in a shared head. The twin
computes the same losses through :mod:`oracles` over the valid tokens alone, so padding cannot reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gar.methods import GroupWeights, Method, Update
from gar.nn import FFNExperts, LoRAExperts, RoutedExperts, RoutedFFN, RoutedHead, RoutedLoRA
from gar.training import fill_gradients
from support import oracles

WIDTH, VOCABULARY, CLASSES = 4, 9, (2, 3)
Gradients = dict[str, Tensor]


def randomize(module: nn.Module, scale: float = 0.6) -> None:
    """Every parameter N(0, scale^2): nothing stays zero or tied."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn_like(parameter))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected entry."""
    return float((found - expected).abs().max() / expected.abs().max())


# --------------------------------------------------------------------------------------------------
# Batches
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Examples of one update: ``ids``, ``mask`` [B, L]; ``labels``, ``tasks``, ``groups`` [B].

    ``sizes`` is (task, size) of every group, ``v`` and ``w`` their task and sample weights; ``keep`` is the
    experts' dropout mask, if any.
    """

    ids: Tensor
    mask: Tensor
    labels: Tensor
    tasks: Tensor
    groups: Tensor
    sizes: list[tuple[int, int]]
    v: list[float]
    w: list[float]
    keep: Tensor | None = None

    def rows(self, chosen: Tensor) -> Batch:
        """The chosen examples, with the group numbers that they had."""
        keep = None if self.keep is None else self.keep[chosen]
        moved = {name: getattr(self, name)[chosen] for name in ("ids", "mask", "labels", "tasks", "groups")}
        return replace(self, keep=keep, **moved)

    def weights(self, dtype: torch.dtype, total: int | None = None) -> GroupWeights:
        """Of its groups, ``total`` of which make the update (default: they all do)."""
        v, w = (torch.tensor(weights, dtype=dtype) for weights in (self.v, self.w))
        tasks = torch.tensor([task for task, _ in self.sizes])
        return GroupWeights(self.groups, v, w, total or len(self.sizes), tasks, len(CLASSES))

    def part(self, first: int, last: int) -> Batch:
        """Groups first, ..., last - 1 alone, numbered from 0, with their weights in the update."""
        part = self.rows(((self.groups >= first) & (self.groups < last)).nonzero().squeeze(1))
        kept = slice(first, last)
        return replace(
            part, groups=part.groups - first, sizes=self.sizes[kept], v=self.v[kept], w=self.w[kept]
        )

    def reordered(self, order: Sequence[int]) -> Batch:
        """The same groups in another order, tasks interleaved."""
        rows = torch.cat([(self.groups == m).nonzero().squeeze(1) for m in order])
        moved = self.rows(rows)
        number = torch.tensor([order.index(m) for m in range(len(order))])
        lists: dict[str, Any] = {
            name: [getattr(self, name)[m] for m in order] for name in ("sizes", "v", "w")
        }
        return replace(moved, groups=number[moved.groups], **lists)

    def padded(self, length: int) -> Batch:
        """Padded to ``length`` tokens; padding is a real token, so that only the mask tells it apart."""
        more = length - self.ids.shape[1]
        keep = self.keep
        if keep is not None and keep.shape[1] == self.ids.shape[1] and keep.dim() > 2:
            keep = torch.cat([keep, torch.zeros_like(keep[:, :1]).expand(-1, more, *keep.shape[2:])], dim=1)
        ids = functional.pad(self.ids, (0, more), value=VOCABULARY - 1)
        return replace(self, ids=ids, mask=functional.pad(self.mask, (0, more)), keep=keep)


def make_batch(sizes: Sequence[int] = (5, 3), group_size: int = 2, length: int = 4, seed: int = 0) -> Batch:
    """``sizes[t]`` examples of task t, 1 to ``length`` tokens each, in groups with short last ones."""
    random = torch.Generator().manual_seed(seed)
    groups = oracles.split_groups(sizes, group_size)
    tasks = torch.tensor([t for t, size in enumerate(sizes) for _ in range(size)])
    rows = len(tasks)
    lengths = torch.randint(1, length + 1, (rows,), generator=random)
    lengths[0] = length
    return Batch(
        ids=torch.randint(0, VOCABULARY, (rows, length), generator=random),
        mask=torch.arange(length) < lengths.unsqueeze(1),
        labels=torch.tensor(
            [int(torch.randint(0, CLASSES[t], (), generator=random)) for t in tasks.tolist()]
        ),
        tasks=tasks,
        groups=torch.tensor(oracles.group_of_example(groups)),
        sizes=groups,
        v=oracles.task_weights(groups),
        w=oracles.sample_weights([size for _, size in groups]),
    )


# --------------------------------------------------------------------------------------------------
# The model
# --------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """``site`` lora_ffn, full_ffn or lora_head; ``options`` go to the expert bank."""

    def __init__(self, site: str = "lora_ffn", backbone: bool = True, **options: Any) -> None:
        super().__init__()
        self.site = site
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(backbone)
        options = {"experts": 3, "top_k": 2, **options}
        if site == "lora_head":
            self.head = RoutedHead(WIDTH, max(CLASSES), rank=2, alpha=3.0, **options)
        else:
            self.experts: RoutedExperts = (
                RoutedLoRA(WIDTH, WIDTH, rank=2, alpha=3.0, **options)
                if site == "lora_ffn"
                else RoutedFFN(WIDTH, 5, activation=torch.tanh, **options)
            )
            self.heads = nn.ModuleList(nn.Linear(WIDTH, classes) for classes in CLASSES)

    @property
    def bank(self) -> RoutedExperts:
        return self.head.deltas if self.site == "lora_head" else self.experts

    @property
    def bank_name(self) -> str:
        return "head.deltas" if self.site == "lora_head" else "experts"

    def forward(self, batch: Batch) -> Tensor:
        """Cross-entropy of every example, [B]."""
        x = self.embedding(batch.ids)
        if self.site == "lora_head":
            logits, _ = self.head(masked_mean(torch.tanh(x), batch.mask), keep=batch.keep)
            return functional.cross_entropy(logits, batch.labels, reduction="none")
        delta, _ = (
            self.experts(x, batch.mask, batch.keep) if batch.keep is not None else self.experts(x, batch.mask)
        )
        pooled = masked_mean(torch.tanh(x + delta), batch.mask)
        losses = pooled.new_zeros(len(pooled))
        for task, head in enumerate(self.heads):
            rows = (batch.tasks == task).nonzero().squeeze(1)
            own = functional.cross_entropy(head(pooled[rows]), batch.labels[rows], reduction="none")
            losses = losses.index_add(0, rows, own)
        return losses


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    weight = mask.to(values.dtype).unsqueeze(-1)
    return (values * weight).sum(1) / weight.sum(1)


def make_model(site: str = "lora_ffn", backbone: bool = True, seed: int = 0, **options: Any) -> Tiny:
    """A float64 model with no zero parameter, in training mode."""
    torch.manual_seed(seed)
    model = Tiny(site, backbone, **options).double()
    randomize(model)
    return model


def with_keep(model: Tiny, batch: Batch, seed: int = 0) -> Batch:
    """The batch with a dropout mask of the shape that the model's bank wants."""
    bank = model.bank
    if not isinstance(bank, RoutedLoRA) or bank.dropout == 0:
        return batch
    units = (len(batch.ids),) if model.site == "lora_head" else tuple(batch.ids.shape)
    random = torch.Generator().manual_seed(seed)
    return replace(batch, keep=torch.rand(bank.dropout_shape(units), generator=random) > bank.dropout)


# --------------------------------------------------------------------------------------------------
# One update through the package
# --------------------------------------------------------------------------------------------------


def run_passes(
    model: nn.Module,
    losses_of: Callable[[Batch], Tensor],
    batch: Batch,
    method: Method,
    *,
    observation: str = "one_pass",
    split: Sequence[int] | None = None,
    scale: float = 1.0,
    observed: Sequence[nn.Module] | None = None,
    state: Any = None,
) -> Update:
    """The gradients of one update as a run fills them.

    ``split`` is the number of groups of each pass, ``scale`` multiplies every loss, ``observed`` are the
    modules to observe (default: the model), ``state`` is the method's own.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    ends = list(accumulate(split or [len(batch.sizes)]))
    assert ends[-1] == len(batch.sizes)

    def forward(part: Batch) -> tuple[Tensor, GroupWeights]:
        rows = losses_of(part)
        weights = part.weights(rows.dtype, len(batch.sizes))
        return scale * weights.grouping.mean(rows), weights

    parts = (batch.part(first, last) for first, last in zip([0, *ends[:-1]], ends, strict=True))
    return fill_gradients(
        method,
        (partial(forward, part) for part in parts),
        parameters,
        observed or [model],
        observation=observation,
        state=state,
    )


def named_gradients(model: nn.Module) -> Gradients:
    """The gradient of every trainable parameter, zeros where none was left."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def update_gradients(model: Tiny, batch: Batch, method: Method, **options: Any) -> Gradients:
    """All gradients of one update."""
    run_passes(model, model, batch, method, **options)
    return named_gradients(model)


# --------------------------------------------------------------------------------------------------
# The slow twin
# --------------------------------------------------------------------------------------------------


def twin_gates(logits: Tensor, top_k: int) -> Tensor:
    """Gates of units [N, E] in float64."""
    return oracles.straight_through_gate(logits) if top_k == 1 else oracles.masked_softmax(logits, top_k)


def twin_logits(parameters: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ parameters[f"{name}.router.weight"].T + parameters[f"{name}.router.bias"]


def twin_experts(
    bank: RoutedExperts,
    slots: Mapping[str, Tensor],
    x: Tensor,
    gates: Tensor,
    keep: Tensor | None = None,
) -> Tensor:
    """The gated expert sum of units [N, d] through the oracles, from float64 expert parameters ``slots``."""
    experts = bank.experts
    if isinstance(experts, LoRAExperts):
        assert isinstance(bank, RoutedLoRA)
        scaled = None if keep is None else keep.double() / (1 - bank.dropout)
        return oracles.lora_forward(x, slots["A"], slots["B"], gates, experts.scale, scaled)
    assert isinstance(experts, FFNExperts)
    W1, W2 = slots["W1"], slots["W2"]
    b1 = slots.get("b1", torch.zeros(W1.shape[:2], dtype=torch.float64))
    b2 = slots.get("b2", torch.zeros(W2.shape[:2], dtype=torch.float64))
    hidden: Any = experts.hidden_module
    return oracles.ffn_forward(x, W1, b1, W2, b2, gates, hidden.activation)


@dataclass(frozen=True)
class TwinOutput:
    """``losses`` [M] of the groups; of every routed unit its input, logits, gates, selection and group."""

    losses: Tensor
    x: Tensor
    logits: Tensor
    gates: Tensor
    chosen: Tensor
    unit_groups: list[int]


class Twin:
    """The float64 twin of a :class:`Tiny` on one batch; ``parameters`` are leaves named like the model's."""

    def __init__(self, model: Tiny, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self.name, self.bank = model.bank_name, model.bank
        self.top_k = self.bank.router.top_k
        self.parameters = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
        self.trainable = [n for n, p in model.named_parameters() if p.requires_grad]
        head = model.site == "lora_head"
        rows, tokens = batch.mask.nonzero(as_tuple=True)
        self.unit_rows = list(range(len(batch.ids))) if head else rows.tolist()
        self.positions = (
            (torch.arange(len(batch.ids)), torch.zeros(len(batch.ids)).long()) if head else (rows, tokens)
        )
        self.unit_mask = torch.ones(len(batch.ids), 1) if head else batch.mask
        if batch.keep is None:
            self.keep = None
        else:
            self.keep = batch.keep if head else batch.keep[batch.mask]

    def slots(self, perturbation: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The expert parameters, one perturbation added to all experts."""
        slots = {slot: self.parameters[f"{self.name}.experts.{slot}"] for slot in self.bank.experts.slots}
        return slots if perturbation is None else {slot: t + perturbation[slot] for slot, t in slots.items()}

    def forward(
        self, perturbation: Mapping[str, Tensor] | None = None, at_outputs: Tensor | None = None
    ) -> TwinOutput:
        """``at_outputs`` [N, E, d_out] is added to every expert's output, before the gate."""
        p, batch = self.parameters, self.batch
        head = self.model.site == "lora_head"
        embedded = p["embedding.weight"][batch.ids]
        x = oracles.masked_mean(torch.tanh(embedded), batch.mask) if head else embedded[batch.mask]
        logits = twin_logits(p, self.name, x)
        gates = twin_gates(logits, self.top_k)
        y = twin_experts(self.bank, self.slots(perturbation), x, gates, self.keep)
        if at_outputs is not None:
            y = y + (gates.unsqueeze(-1) * at_outputs).sum(1)
        losses = []
        for n in range(len(batch.ids)):
            if head:
                scores = p["head.base.weight"] @ x[n] + p["head.base.bias"] + y[n]
            else:
                own = [i for i, row in enumerate(self.unit_rows) if row == n]
                pooled = torch.tanh(x[own] + y[own]).mean(0)
                task = int(batch.tasks[n])
                scores = p[f"heads.{task}.weight"] @ pooled + p[f"heads.{task}.bias"]
            losses.append(torch.logsumexp(scores, 0) - scores[int(batch.labels[n])])
        groups = batch.groups.tolist()
        return TwinOutput(
            oracles.group_losses(torch.stack(losses), groups, len(batch.sizes)),
            x,
            logits,
            gates,
            oracles.selected(logits.detach(), self.top_k),
            [groups[n] for n in self.unit_rows],
        )

    def gates_from_detached(self, x: Tensor) -> Tensor:
        """Gates recomputed from the routing inputs as constants: a function of the router alone."""
        return twin_gates(twin_logits(self.parameters, self.name, x.detach()), self.top_k)

    def example_gates(self, gates: Tensor) -> Tensor:
        """``q_n`` [B, E]."""
        return oracles.masked_mean(self._placed(gates), self.unit_mask)

    def group_probabilities(self, gates: Tensor) -> Tensor:
        """``p_m`` [M, E]."""
        groups = self.batch.groups.tolist()
        return oracles.group_probabilities(self._placed(gates), self.unit_mask, groups, len(self.batch.sizes))

    def template_gradients(self) -> Tensor:
        """``g_m`` [M, d]."""
        shapes = {slot: tuple(shape) for slot, shape in self.bank.experts.template().items()}
        return oracles.template_gradients(lambda change: self.forward(change).losses, shapes)

    def gradients(self, loss: Tensor) -> Gradients:
        """The derivative of ``loss`` by every trainable parameter of the model."""
        leaves = [self.parameters[name] for name in self.trainable]
        found = torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True)
        return dict(zip(self.trainable, found, strict=True))

    def _placed(self, gates: Tensor) -> Tensor:
        grid = torch.zeros(*self.unit_mask.shape, gates.shape[1], dtype=torch.float64)
        return grid.index_put(self.positions, gates)
