"""Routed complete feed-forward networks (site ``full_ffn``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from gar.nn.bank import Call, Experts, Factors, RoutedExperts, RowGroups, add_product
from gar.objective import accurate
from gar.routing import Router


class _Hidden(nn.Module):
    """The activation between the two linear layers, a module so that its input's gradient can be read."""

    def __init__(self, activation: Callable[[Tensor], Tensor], gated: bool) -> None:
        super().__init__()
        self.activation, self.gated = activation, gated

    def forward(self, pre: Tensor) -> Tensor:
        if not self.gated:
            return self.activation(pre)
        value, gate = pre.chunk(2, dim=-1)
        return self.activation(value) * gate


class FFNExperts(Experts):
    """E feed-forward networks ``W2_e act(W1_e x + b1_e) + b2_e``.

    ``W1`` is [E, f, d] ([E, 2f, d] when ``gated``: ``act(first half) * second half``), ``W2`` [E, d, f];
    the biases ``b1`` and ``b2`` exist when ``bias``. Only active (unit, expert) pairs are computed.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        experts: int,
        activation: Callable[[Tensor], Tensor] = functional.gelu,
        gated: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.features, self.hidden_features, self.count = features, hidden, experts
        inner = 2 * hidden if gated else hidden
        self.W1 = nn.Parameter(torch.empty(experts, inner, features))
        self.b1 = nn.Parameter(torch.zeros(experts, inner)) if bias else None
        self.W2 = nn.Parameter(torch.empty(experts, features, hidden))
        self.b2 = nn.Parameter(torch.zeros(experts, features)) if bias else None
        self.slots = ("W1", "b1", "W2", "b2") if bias else ("W1", "W2")
        self.hidden_module = _Hidden(activation, gated)
        for weight in (*self.W1.unbind(), *self.W2.unbind()):
            nn.init.kaiming_uniform_(weight, a=5**0.5)

    def forward(self, x: Tensor, gates: Tensor, active: Tensor) -> Tensor:
        shape, x = x.shape, x.to(self.W1.dtype).flatten(0, -2)
        units, experts, counts = _pairs(active)
        rows: Tensor = _Spread.apply(x, units, counts)  # type: ignore[no-untyped-call]
        pre = self._each(rows, counts, self.W1, self.b1)
        assert self.hidden_module is not None
        out = self._each(self.hidden_module(pre), counts, self.W2, self.b2)
        weight = gates.flatten(0, -2)[units, experts].to(out.dtype)
        total = _add_up(out * weight.unsqueeze(-1), units, counts, len(x))
        return total.reshape(*shape[:-1], self.features)

    @staticmethod
    def _each(rows: Tensor, counts: list[int], weight: Tensor, bias: Tensor | None) -> Tensor:
        biases = [None] * len(counts) if bias is None else bias.unbind()
        parts = rows.split(counts)
        return torch.cat(
            [functional.linear(p, w, b) for p, w, b in zip(parts, weight.unbind(), biases, strict=True)]
        )

    def factors(self, call: Call) -> dict[str, Factors]:
        # W2: delta (sum_e pi_e h_e)^T; W1: (sum_e dpre_e) x^T; biases without the right factor.
        assert call.hidden is not None
        assert call.hidden_grad is not None
        shape = call.gates.shape[:-1]
        units, experts, counts = _pairs(call.active)
        weight = accurate(call.gates).flatten(0, -2)[units, experts].unsqueeze(-1)

        def summed(values: Tensor) -> Tensor:
            return _add_up(values, units, counts, shape.numel()).reshape(*shape, -1)

        x, delta = accurate(call.x), accurate(call.delta)
        dpre = summed(accurate(call.hidden_grad))
        mixed = summed(weight * accurate(call.hidden))
        slots = {"W1": Factors(dpre, x), "W2": Factors(delta, mixed)}
        if self.b1 is not None:
            slots |= {"b1": Factors(dpre, None), "b2": Factors(delta * summed(weight), None)}
        return {slot: slots[slot] for slot in self.slots}

    def add_gradients(self, call: Call, groups: RowGroups, into: Mapping[str, Tensor]) -> None:
        # W2_e: (pi_e delta) h_e^T; W1_e: dpre_e x^T. A product for every (expert, group), as the forward has
        # one for every expert: pairs lie sorted by expert, within it by group where groups are consecutive.
        assert call.hidden is not None
        assert call.hidden_grad is not None
        rows, count = call.gates.shape[:2], groups.count
        units, experts, _ = _pairs(call.active)
        spread = torch.arange(count, device=units.device).unsqueeze(1)
        width = groups.gather(call.gates[:, :1, 0]).shape[1]
        group = groups.scatter(spread.expand(count, width), rows[:1])
        key = experts * count + group[units // rows[1]]
        counts = torch.bincount(key, minlength=self.count * count)
        *sizes, ascending = torch.cat([counts, (key.diff() >= 0).all().long().reshape(1)]).tolist()
        hidden, dpre = call.hidden, call.hidden_grad
        if not ascending:
            order = key.argsort(stable=True)
            units, experts, hidden, dpre = (t[order] for t in (units, experts, hidden, dpre))
        x = call.x.to(dpre.dtype).flatten(0, 1)[units]
        weight = call.gates.flatten(0, 1)[units, experts].unsqueeze(-1)
        delta = (weight * call.delta.flatten(0, 1)[units]).to(hidden.dtype)
        parts = zip(*(t.split(sizes) for t in (x, dpre, hidden, delta)), strict=True)
        for number, (x_, dpre_, hidden_, delta_) in enumerate(parts):
            e, m = divmod(number, count)
            add_product(into["W1"][m, e], dpre_, x_)
            add_product(into["W2"][m, e], delta_, hidden_)
        if self.b1 is not None:
            for slot, values in (("b1", dpre), ("b2", delta)):
                sums = torch.segment_reduce(values.to(into[slot].dtype), "sum", lengths=counts, unsafe=True)
                into[slot].add_(sums.unflatten(0, (self.count, count)).transpose(0, 1))

    def extra_repr(self) -> str:
        return f"{self.features} -> {self.hidden_features} -> {self.features}, experts={self.count}"


class _Spread(torch.autograd.Function):
    """``x[units]`` for active pairs. A plain index adds its gradient up in an order that threads decide."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, units: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(units)
        ctx.counts, ctx.rows = counts, len(x)
        return x[units]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (units,), (grad,) = ctx.saved_tensors, grads
        return _add_up(grad, units, ctx.counts, ctx.rows).to(grad.dtype), None, None


def _pairs(active: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Active (unit, expert) pairs sorted by expert, and how many each expert has."""
    experts, units = active.flatten(0, -2).T.nonzero(as_tuple=True)
    return units, experts, torch.bincount(experts, minlength=active.shape[-1]).tolist()


def _add_up(values: Tensor, units: Tensor, counts: list[int], rows: int) -> Tensor:
    """Pair values [P, f] summed per unit, [rows, f].

    Expert by expert: a unit occurs once in each part, so the order of additions, and with it the last bit,
    is the same in every run on every device.
    """
    total = accurate(values.new_zeros(rows, values.shape[-1]))
    for part, index in zip(values.split(counts), units.split(counts), strict=True):
        total.index_add_(0, index, part.to(total.dtype))
    return total


class RoutedFFN(RoutedExperts):
    """Token-routed complete feed-forward networks.

    >>> moe = RoutedFFN(8, 16, experts=4, top_k=2)
    >>> output, routing = moe(torch.randn(3, 5, 8))
    >>> output.shape
    torch.Size([3, 5, 8])
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        experts: int = 8,
        top_k: int = 4,
        activation: Callable[[Tensor], Tensor] = functional.gelu,
        gated: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(
            Router(features, experts, top_k), FFNExperts(features, hidden, experts, activation, gated, bias)
        )

    @classmethod
    def from_dense(
        cls,
        first: list[nn.Linear],
        second: nn.Linear,
        activation: Callable[[Tensor], Tensor],
        experts: int = 8,
        top_k: int = 4,
    ) -> Self:
        """Every expert a copy of a dense FFN; two ``first`` layers are the value and gate halves."""
        gated = len(first) == 2 or first[0].out_features == 2 * second.in_features
        bias = second.bias is not None
        moe = cls(second.out_features, second.in_features, experts, top_k, activation, gated, bias)
        copies = {"W1": torch.cat([layer.weight for layer in first]), "W2": second.weight}
        if bias:
            copies |= {"b1": torch.cat([layer.bias for layer in first]), "b2": second.bias}
        moe.experts.to(second.weight.dtype)
        with torch.no_grad():
            for slot, dense in copies.items():
                getattr(moe.experts, slot).copy_(dense.expand(experts, *dense.shape))
        return moe
