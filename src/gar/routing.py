"""Routers and gates (specification, section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gar.precision import linear

ROUTER_STD = 0.02


@dataclass(frozen=True)
class Routing:
    """What one forward of an expert bank decided, per routed unit.

    ``logits`` and ``gates`` are [..., E] (float32 or wider), ``selected`` is bool [..., E] with k True
    per valid unit, ``mask`` is bool [...] or None when every unit is valid. Gates of a valid unit sum to
    1; gates and ``selected`` of an invalid (padding) unit are all zero.
    """

    logits: Tensor
    gates: Tensor
    selected: Tensor
    mask: Tensor | None = None

    def example_gates(self) -> Tensor:
        """``q_n`` [rows, E]: gates averaged over a row's valid tokens; [N, E] gates pass unchanged."""
        if self.mask is None or self.gates.dim() < 3:
            return mean_over_tokens(self.gates, self.mask)
        # Gates of invalid tokens are zero already.
        return self.gates.sum(1) / self.mask.sum(1).clamp(min=1).unsqueeze(-1)

    def soft(self) -> Routing:
        """With the softmax over all experts as gates, whatever was selected; padding units stay zero."""
        gates = self.logits.softmax(-1)
        if self.mask is not None:
            gates = gates.masked_fill(~self.mask.unsqueeze(-1), 0)
        return Routing(self.logits, gates, self.selected, self.mask)

    def detach(self) -> Routing:
        """The same decisions without their graph."""
        return Routing(self.logits.detach(), self.gates.detach(), self.selected, self.mask)


def select(logits: Tensor, top_k: int) -> Tensor:
    """The k largest logits of each row as a bool mask [..., E]; ties go to one of the equal experts."""
    chosen = logits.topk(top_k, dim=-1, sorted=False).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, chosen, True)


def masked_softmax(logits: Tensor, top_k: int) -> Tensor:
    """Softmax over the ``top_k`` largest logits of [..., E], zero elsewhere; rows sum to 1.

    >>> masked_softmax(torch.tensor([0.0, 3.0, 3.0, -1.0]), 2)
    tensor([0.0000, 0.5000, 0.5000, 0.0000])
    """
    return _softmax_over(logits, select(logits, top_k))


def straight_through(logits: Tensor) -> Tensor:
    """Exactly one-hot at the largest logit of [..., E]; backward is the full softmax's Jacobian.

    >>> straight_through(torch.tensor([0.0, 3.0, 1.0]))
    tensor([0., 1., 0.])
    """
    return _one_hot_gate(logits, select(logits, 1))


def _softmax_over(logits: Tensor, selected: Tensor) -> Tensor:
    return logits.masked_fill(~selected, float("-inf")).softmax(-1)


def _one_hot_gate(logits: Tensor, selected: Tensor) -> Tensor:
    soft = logits.softmax(-1)
    # Adding an exact zero keeps the forward value one-hot to the last bit.
    return selected.to(soft.dtype) + (soft - soft.detach())


def mean_over_tokens(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of [B, L, ...] over valid tokens (``mask`` [B, L]); [N, ...] values pass through unchanged."""
    if values.dim() < 3:
        return values
    if mask is None:
        return values.mean(1)
    weight = mask.to(values.dtype).unsqueeze(-1)
    return (values * weight).sum(1) / weight.sum(1).clamp(min=1)


class Router(nn.Module):
    """One linear map from the routing input to E logits, in float32 even under autocast and TF32.

    ``top_k=1`` gives the straight-through gate, except with a single expert, whose gate is always 1.
    Weights start as N(0, 0.02^2), the bias as zero: a zero router would tie every top-k.

    ``selection_bias`` [E], absent (None) until :meth:`add_selection_bias`, is added to the logits where
    experts are chosen and nowhere else: gates and gradients come from the logits alone. It is a buffer, no
    parameter: who adds it also changes it (a method after the step), and it is saved with the model.
    """

    selection_bias: Tensor | None

    def __init__(self, features: int, experts: int, top_k: int) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k must be between 1 and the number of experts ({experts}), got {top_k}")
        self.features, self.experts, self.top_k = features, experts, top_k
        self.weight = nn.Parameter(torch.empty(experts, features))
        self.bias = nn.Parameter(torch.zeros(experts))
        self.register_buffer("selection_bias", None)
        self.reset_parameters()

    def add_selection_bias(self) -> Tensor:
        """The selection bias [E], float32 or wider, to be changed in place; zeros from the first call on."""
        if self.selection_bias is None:
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            self.selection_bias = torch.zeros(self.experts, dtype=wide, device=self.weight.device)
        return self.selection_bias

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=ROUTER_STD)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Routing:
        """Route units [..., features]; ``mask`` [...] marks the valid ones."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = linear(x.to(wide), self.weight.to(wide), self.bias.to(wide))
            return self.gate(logits, mask)

    def gate(self, logits: Tensor, mask: Tensor | None = None) -> Routing:
        """The configured gate on given logits [..., E]."""
        bias = self.selection_bias
        selected = select(logits if bias is None else logits + bias.to(logits), self.top_k)
        gates = _one_hot_gate(logits, selected) if self.top_k == 1 else _softmax_over(logits, selected)
        if mask is not None:
            valid = mask.bool().unsqueeze(-1)
            gates, selected = gates.masked_fill(~valid, 0), selected & valid
            mask = mask.bool()
        return Routing(logits, gates, selected, mask)

    def extra_repr(self) -> str:
        return f"features={self.features}, experts={self.experts}, top_k={self.top_k}"
