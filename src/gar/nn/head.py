"""Classification heads: one a task, and a shared one with routed LoRA deltas (site ``lora_head``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gar.nn.lora import RoutedLoRA
from gar.routing import Routing


class LinearHeads(nn.ModuleDict):
    """Linear heads by name. Called, it is those of some names side by side, in one product."""

    def of(self, names: Sequence[str]) -> list[nn.Linear]:
        """The heads of these names."""
        heads = [self[name] for name in names]
        assert all(isinstance(head, nn.Linear) for head in heads)
        return heads  # type: ignore[return-value]

    def forward(self, hidden: Tensor, names: Sequence[str]) -> Tensor:
        """[B, C] from ``hidden`` [B, d], C classes of all named heads together."""
        heads = self.of(names)
        weight = torch.cat([head.weight for head in heads])
        return functional.linear(hidden, weight, torch.cat([head.bias for head in heads]))


class RoutedHead(nn.Module):
    """``logits = base(h) + sum_e pi_e Delta_e(h)`` for pooled ``h`` [B, d]; returns ``(logits, Routing)``.

    Keyword arguments are those of :class:`~gar.nn.RoutedLoRA`.
    """

    def __init__(self, features: int, classes: int, **experts: Any) -> None:
        super().__init__()
        self.base = nn.Linear(features, classes)
        self.deltas = RoutedLoRA(features, classes, **experts)

    def forward(
        self, h: Tensor, keep: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        delta, routing = self.deltas(h, mask, keep)
        return self.base(h) + delta, routing
