"""The slow float64 twin of a :class:`gar.MultiTaskModel` on BERT, from the expert site to the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gar.model.multitask import MultiTaskModel
from support import oracles
from support.tiny import twin_experts, twin_gates, twin_logits


@dataclass(frozen=True)
class Example:
    """``loss`` with its graph, ``logits`` [C]; ``gates`` [N, E] of its units, ``chosen`` [E] their number."""

    loss: Tensor
    logits: Tensor
    gates: Tensor
    chosen: Tensor

    @property
    def answer(self) -> int:
        return int(self.logits.argmax())

    @property
    def q(self) -> Tensor:
        """The mean gate over units, [E]."""
        return self.gates.mean(0)


class ModelTwin:
    """One unpadded example at a time, every expert by loops.

    What lies below the experts is read from the model, which has tests of its own. ``parameters`` are float64
    copies under the model's names, leaves where the model trains them.
    """

    def __init__(self, model: MultiTaskModel) -> None:
        self.model, self.bank = model, model.bank
        self.top_k, self.head = model.bank.router.top_k, model.site.unit == "example"
        self.name = next(name for name, module in model.named_modules() if module is model.bank)
        self.parameters = {
            name: p.detach().double().clone().requires_grad_(p.requires_grad)
            for name, p in model.named_parameters()
        }

    def slots(self, change: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The expert parameters, one change added to all experts."""
        slots = {slot: self.parameters[f"{self.name}.experts.{slot}"] for slot in self.bank.experts.slots}
        return slots if change is None else {slot: t + change[slot] for slot, t in slots.items()}

    def read(self, ids: Tensor, types: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Site input [N, d] and base of the one example ``ids`` [1, L]."""
        with torch.no_grad():
            state = self.model.prefix(ids, torch.ones_like(ids, dtype=torch.bool), types)
        base = state.base[0].double()
        return (base.unsqueeze(0) if state.x is None else state.x[0].double()), base

    def example(
        self,
        task: str,
        x: Tensor,
        base: Tensor,
        label: int,
        change: Mapping[str, Tensor] | None = None,
        keep: Tensor | None = None,
    ) -> Example:
        """``change`` is added to every expert; ``keep`` is the dropout mask of the example's units."""
        p = self.parameters
        z = twin_logits(p, self.name, x)
        gates = twin_gates(z, self.top_k)
        mixed = twin_experts(self.bank, self.slots(change), x, gates, keep)
        if self.head:
            logits = p["head.base.weight"] @ base + p["head.base.bias"] + mixed[0]
        else:
            logits = p[f"heads.task_{task}.weight"] @ self._pooled(base, mixed) + p[f"heads.task_{task}.bias"]
        loss = torch.logsumexp(logits, 0) - logits[label]
        return Example(loss, logits, gates, oracles.selected(z.detach(), self.top_k).long().sum(0))

    def _pooled(self, base: Tensor, mixed: Tensor) -> Tensor:
        """The pooled output of the site in BERT: its norm follows only where the experts replace the FFN."""
        norm: Any = self.model.site.tail
        if base.dim() == 1:
            return base + mixed.mean(0)
        summed = base + mixed
        centred = summed - summed.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + norm.eps)
        return (scaled * norm.weight.detach().double() + norm.bias.detach().double()).mean(0)
