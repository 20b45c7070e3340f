"""Routed low-rank adapters (site ``lora_ffn``, and the deltas of ``lora_head``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from gar.nn._pairs import expert_products, pairs_of
from gar.nn.bank import Call, Experts, Factors, RoutedExperts, RowGroups, add_product
from gar.objective import accurate
from gar.routing import Router


class LoRAExperts(Experts):
    """E rank-r deltas ``scale * B_e A_e x``; ``A`` is [E, r, d_in], ``B`` [E, d_out, r].

    All experts are one stacked product, multiplied by their gates: for low ranks this is cheaper than
    sorting units by expert, and shapes stay static.
    """

    slots = ("A", "B")

    def __init__(self, in_features: int, out_features: int, experts: int, rank: int, scale: float) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.count, self.rank, self.scale = experts, rank, scale
        self.A = nn.Parameter(torch.empty(experts, rank, in_features))
        self.B = nn.Parameter(torch.empty(experts, out_features, rank))
        self.low = self.hidden_module = nn.Identity()  # a place to read the rank-r values and their gradient
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A Kaiming-uniform (a = sqrt 5), B zero."""
        for matrix in self.A.unbind():
            nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
        nn.init.zeros_(self.B)

    @property
    def capturable(self) -> bool:
        return True

    def forward(self, x: Tensor, gates: Tensor, active: Tensor, each: int | None = None) -> Tensor:
        """[..., d_out] from ``x`` [..., d_in], or [..., E, d_in] when every expert has its own input."""
        low: Tensor = self.low(_down(x.to(self.A.dtype), self.A, own_input=x.dim() > gates.dim()))
        low = low * (self.scale * gates).to(low.dtype).unsqueeze(-1)
        return functional.linear(low.flatten(-2), _stacked_up(self.B))

    def outputs(self, x: Tensor, active: Tensor, each: int) -> Tensor:
        pairs = pairs_of(active.flatten(0, -2), each)
        low = _down(x.to(self.A.dtype), self.A, own_input=x.dim() > active.dim()).flatten(0, -3)
        rows = self.scale * low[pairs.units, pairs.experts]
        apart = pairs.apart(expert_products(rows, self.B, None, pairs))
        return apart.reshape(*active.shape[:-1], each, self.out_features)

    def factors(self, call: Call) -> dict[str, Factors]:
        # B slot: delta (s sum_e pi_e A_e x)^T; A slot: (s sum_e pi_e B_e^T delta) x^T.
        x, (up, down) = accurate(call.x), self._low(call)
        second = Factors(accurate(call.delta), up.sum(-2))
        if x.dim() > call.gates.dim():
            # Experts saw different inputs: their terms cannot be summed before the product with x.
            return {"A": Factors(down.flatten(1, 2), x.flatten(1, 2)), "B": second}
        return {"A": Factors(down.sum(-2), x), "B": second}

    def add_gradients(self, call: Call, groups: RowGroups, into: Mapping[str, Tensor]) -> None:
        # B_e: delta (s pi_e A_e x)^T; A_e: (s pi_e B_e^T delta) x^T. One batched product for all experts.
        def units(values: Tensor) -> Tensor:  # [B, L, ...] to [M, n L, ...]
            return groups.gather(values).flatten(1, 2)

        x, (up, down) = units(accurate(call.x)), map(units, self._low(call))
        b = up.flatten(2).mT @ units(accurate(call.delta))  # [M, E r, d_out]
        into["B"].add_(b.unflatten(1, up.shape[2:]).mT)
        if x.dim() == down.dim():  # experts saw different inputs
            into["A"].add_(down.permute(0, 2, 3, 1) @ x.transpose(1, 2))
        else:
            add_product(into["A"].view(len(x), -1, self.in_features), down.flatten(2), x)

    def _low(self, call: Call) -> tuple[Tensor, Tensor]:
        """``s pi_e A_e x`` and ``s pi_e B_e^T delta``, both [B, L, E, r], from what the passes computed."""
        assert call.hidden is not None
        assert call.hidden_grad is not None
        shape = (*call.gates.shape, self.rank)
        weight = (self.scale * accurate(call.gates)).unsqueeze(-1)
        return weight * accurate(call.hidden).reshape(shape), accurate(call.hidden_grad).reshape(shape)

    def bias_proxies(self, delta: Tensor) -> Tensor:
        low: Tensor = (accurate(delta) @ _stacked_up(accurate(self.B.detach()))).unflatten(
            -1, (self.count, self.rank)
        )
        return self.scale * low

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, experts={self.count}, rank={self.rank}"


def _down(x: Tensor, a: Tensor, own_input: bool) -> Tensor:
    """``A_e x`` as [..., E, r]."""
    if own_input:
        return torch.einsum("...ei,eri->...er", x, a)
    low: Tensor = functional.linear(x, a.flatten(0, 1)).unflatten(-1, a.shape[:2])
    return low


def _stacked_up(b: Tensor) -> Tensor:
    """``B`` [E, d_out, r] as one [d_out, E r] matrix."""
    return b.permute(1, 0, 2).flatten(1)


class RoutedLoRA(RoutedExperts):
    """Token- or example-routed LoRA deltas.

    >>> moe = RoutedLoRA(8, 8, experts=4, rank=2, top_k=2)
    >>> output, routing = moe(torch.randn(3, 5, 8))
    >>> output.shape, routing.gates.shape
    (torch.Size([3, 5, 8]), torch.Size([3, 5, 4]))

    ``alpha`` defaults to ``rank`` (scale 1). ``dropout`` acts on the experts' input, never on the
    router's; its mask is drawn once per unit (``dropout_mask="shared"``) or once per unit and expert
    (``"per_expert"``). Specification, section 3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        experts: int = 8,
        rank: int = 16,
        top_k: int = 4,
        alpha: float | None = None,
        dropout: float = 0.0,
        dropout_mask: Literal["shared", "per_expert"] = "shared",
    ) -> None:
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        if dropout_mask not in ("shared", "per_expert"):
            raise ValueError(f"dropout_mask must be 'shared' or 'per_expert', got {dropout_mask!r}")
        scale = 1.0 if alpha is None else alpha / rank
        super().__init__(
            Router(in_features, experts, top_k), LoRAExperts(in_features, out_features, experts, rank, scale)
        )
        self.dropout, self.dropout_mask = dropout, dropout_mask

    def dropout_shape(self, unit_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a ``keep`` mask for units of this shape (without the feature axis)."""
        width = self.router.features
        return (
            (*unit_shape, self.experts.count, width)
            if self.dropout_mask == "per_expert"
            else (*unit_shape, width)
        )

    def prepare(self, x: Tensor, keep: Tensor | None) -> Tensor:
        if not self.training or self.dropout == 0:
            return x
        shape = self.dropout_shape(tuple(x.shape[:-1]))
        if keep is None:
            keep = torch.empty(shape, dtype=torch.bool, device=x.device).bernoulli_(1 - self.dropout)
        elif tuple(keep.shape) != shape:
            raise ValueError(f"keep must have shape {shape}, got {tuple(keep.shape)}")
        x = x.unsqueeze(-2) if self.dropout_mask == "per_expert" else x
        return x * keep / (1 - self.dropout)
