"""STGC (adapted): push routed units away from experts whose mean gradient they contradict."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from gar.methods.base import Choices
from gar.methods.term import PassTerm
from gar.methods.update import Pass, PassSite
from gar.objective import accurate
from gar.precision import full_precision

THRESHOLD = 0.0


class STGC(PassTerm):
    """``L_task + coefficient * sum_m v_m C_m`` (specification, section 5, STGC).

    Re-implemented from the paper's description of its adapted control. The conflict mask is detached; the
    gradient goes through the router logits, and from there into a trainable backbone.
    """

    name: ClassVar[str] = "stgc"
    label: ClassVar[str] = "STGC"
    style: ClassVar[tuple[str, str] | None] = ("#D55E00", "^")
    capturable: ClassVar[bool] = True
    coefficient: float = Field(1.0, ge=0, description="beta")

    def check(self, choices: Choices) -> str | None:
        if choices.site == "full_ffn":
            return (
                "its conflict score needs the LoRA virtual-bias gradients of every expert; "
                "expected experts.site lora_ffn or lora_head, found full_ffn"
            )
        return None

    def at(self, site: PassSite, pass_: Pass) -> Tensor:
        with full_precision(pass_.losses.device):
            conflict = conflicts(site, site.observation.output_gradient(pass_.task_loss))
        away = torch.log_softmax(-site.routing.logits, -1)
        chosen = torch.where(conflict, away, torch.zeros_like(away))
        grouping = site.weights.grouping
        rows = conflict.shape[0]
        total = grouping.sum(chosen.reshape(rows, -1).sum(1))
        count = grouping.sum(conflict.reshape(rows, -1).sum(1).to(away.dtype))
        losses = -total / (away.shape[-1] * count.clamp(min=1))
        return (site.weights.task_weights.to(losses.dtype) * losses).sum()


@torch.no_grad()
def conflicts(site: PassSite, delta: Tensor) -> Tensor:
    """Conflict mask C, bool like the gates, from the derivative ``delta`` at the gated expert sum.

    The score of unit i at selected expert e is the mean of two cosines, of ``s B_e^T delta_ie`` and of
    ``s delta_ie`` with their means over the units assigned to e in the group; ``delta_ie`` carries the gate.
    """
    routing, grouping = site.routing, site.weights.grouping
    gates = (routing.gates * routing.selected).detach()
    # Cosines do not see the scale; bringing it to 1 keeps tiny LoRA gradients away from underflow.
    delta = accurate(delta)
    peak = delta.abs().max()
    delta = delta / torch.where(peak > 0, peak, torch.ones_like(peak))
    low = site.bank.experts.bias_proxies(delta)  # [..., E, r]
    delta, low, gates, selected = (
        t.reshape(len(t), -1, *t.shape[routing.gates.dim() - 1 :])
        for t in (delta, low, gates, routing.selected)
    )  # rows, tokens, …
    delta, low, gates, selected = (grouping.gather(t).flatten(1, 2) for t in (delta, low, gates, selected))
    assigned = selected.sum(1).clamp(min=1).to(low.dtype)  # [M, E]
    gates, delta = gates.to(low.dtype), delta.to(low.dtype)
    low_mean = torch.einsum("mne,mner->mer", gates, low) / assigned.unsqueeze(-1)
    mean = torch.einsum("mne,mnd->med", gates, delta) / assigned.unsqueeze(-1)
    # A positive gate does not turn a vector, so it drops out of the unit's own side of each cosine.
    cosine = _cosine(torch.einsum("mner,mer->mne", low, low_mean), low.norm(dim=-1), low_mean.norm(dim=-1))
    cosine = cosine + _cosine(
        torch.einsum("mnd,med->mne", delta, mean), delta.norm(dim=-1).unsqueeze(-1), mean.norm(dim=-1)
    )
    conflict = selected & (gates > 0) & (cosine / 2 < THRESHOLD)
    return grouping.scatter(conflict, routing.gates.shape)


def _cosine(inner: Tensor, unit_norm: Tensor, mean_norm: Tensor) -> Tensor:
    """``inner / (a b)``, and 0 where a vector is zero (no conflict)."""
    norms = unit_norm * mean_norm.unsqueeze(1)
    return torch.where(norms > 0, inner / torch.where(norms > 0, norms, torch.ones_like(norms)), 0.0)
