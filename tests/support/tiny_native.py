"""Two MoE layers in transformers' experts interface whose block, router and experts a test may replace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import use_experts_implementation

import gar

WIDTH, INNER, EXPERTS, CHOSEN = 8, 4, 4, 2
ROWS, TOKENS, COUNT = 6, 4, 3
GROUPS = torch.tensor([2, 0, 1, 0, -1, 2])
WEIGHT = torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64)


@use_experts_implementation(has_bias=True)
class TinyExperts(nn.Module):
    """Gated experts with biases; ``eager`` is a loop over experts that skips the number ``EXPERTS``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, self.act_fn = EXPERTS, nn.SiLU()
        sizes = {"gate_up_proj": (2 * INNER, WIDTH), "gate_up_proj_bias": (2 * INNER,)}
        sizes |= {"down_proj": (WIDTH, INNER), "down_proj_bias": (WIDTH,)}
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.randn(EXPERTS, *size, dtype=torch.float64) / 2))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            token, place = torch.where(top_k_index == e)
            pre = hidden_states[token] @ self.gate_up_proj[e].T + self.gate_up_proj_bias[e]
            out = self._apply_gate(pre) @ self.down_proj[e].T + self.down_proj_bias[e]
            total = total.index_add(0, token, out * top_k_weights[token, place, None])
        return total


class TinyRouter(nn.Module):
    """Returns logits [T, E], weights [T, k] and index [T, k]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(x, self.weight)
        weights, index = logits.softmax(-1).topk(CHOSEN, -1)
        return logits, weights / weights.sum(-1, keepdim=True), index


class TinyBlock(nn.Module):
    """Routes the tokens of [B, L, H]; subclasses override :meth:`mix` of [T, H]."""

    def __init__(self, implementation: str, router: nn.Module) -> None:
        super().__init__()
        self.gate = router
        self.experts = TinyExperts(SimpleNamespace(_experts_implementation=implementation))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.reshape(-1, WIDTH)).view_as(x)

    def mix(self, x: Tensor) -> Tensor:
        _, weights, index = self.gate(x)
        out: Tensor = self.experts(x, index, weights)
        return out


class TinyNative(nn.Module):
    """Float64; two blocks around a residual, a linear layer before and behind."""

    def __init__(
        self,
        implementation: str = "eager",
        block: type[TinyBlock] = TinyBlock,
        router: type[nn.Module] = TinyRouter,
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(block(implementation, router()) for _ in range(2))
        self.first, self.last = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x).tanh()


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=generator)


def group_losses(out: Tensor, groups: Tensor = GROUPS) -> Tensor:
    """Group losses [M] of outputs [B, L, H]: means over the group's rows, or over its tokens."""
    target = torch.randn(WIDTH, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
    values = (out - target).square().sum(-1)
    values = values.mean(1) if groups.dim() == 1 else values
    return torch.stack([values[groups == m].mean() for m in range(COUNT)])


def separate(model: TinyNative, losses: Tensor) -> list[Tensor]:
    """The rows [M, d] of every layer by separate autograd calls, summed over experts in plain loops."""
    found = []
    for layer in model.layers:
        names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        parameters = [layer.experts.get_parameter(name) for name in names]
        rows = []
        for loss in losses:
            grads = torch.autograd.grad(loss, parameters, retain_graph=True)
            rows.append(torch.cat([sum(g[e] for e in range(EXPERTS)).flatten() for g in grads]))
        found.append(torch.stack(rows))
    return found


def observed(model: nn.Module, x: Tensor | None = None) -> gar.observation.Observed:
    """One forward and one backward of the weighted group losses."""
    with gar.observe(model) as seen:
        (WEIGHT * group_losses(model(inputs() if x is None else x))).sum().backward()
    return seen
