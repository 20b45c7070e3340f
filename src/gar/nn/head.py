"""A shared classification head with routed LoRA deltas (site ``lora_head``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gar.nn.lora import RoutedLoRA
from gar.routing import Routing


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
