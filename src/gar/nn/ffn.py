"""Routed complete feed-forward networks (site ``full_ffn``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from gar.errors import UserError
from gar.nn._pairs import Pairs, can_group, combine, expert_products, pairs_of, spread, with_bias
from gar.nn.bank import Call, Experts, Factors, RoutedExperts, RowGroups, add_product
from gar.objective import accurate
from gar.routing import Router


class _Hidden(nn.Module):
    """The activation between the two linear layers, a module so that its input's gradient can be read.

    It is called with the pairs too, which a hook finds beside the input.
    """

    def __init__(self, activation: Callable[[Tensor], Tensor], gated: bool) -> None:
        super().__init__()
        if getattr(activation, "inplace", False):
            raise UserError(
                "activation works in place; expected one that leaves its input, which is observed"
            )
        self.activation, self.gated = activation, gated

    def forward(self, pre: Tensor, pairs: Pairs) -> Tensor:
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

    @property
    def capturable(self) -> bool:
        """In bfloat16 on Hopper, where products of experts with unknown numbers of units are one kernel."""
        return can_group(self.W1.device, self._dtype, self.features, self.W1.shape[1], self.hidden_features)

    @property
    def _dtype(self) -> torch.dtype:
        """What products are computed in."""
        kind = self.W1.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.W1.dtype

    def forward(self, x: Tensor, gates: Tensor, active: Tensor, each: int | None = None) -> Tensor:
        shape, dtype = x.shape[:-1], self._dtype
        pairs = pairs_of(active.flatten(0, -2), each or self.count, fixed=self.capturable)
        weight = _slot_gates(gates, pairs)
        first, second = self.W1.to(dtype), self.W2.to(dtype)
        b1, b2 = (None if bias is None else bias.to(dtype) for bias in (self.b1, self.b2))
        x = x.flatten(0, -2).to(dtype)
        if pairs.counts is None and b1 is not None:
            (x, first), b1 = with_bias(x, first, b1), None
        assert self.hidden_module is not None
        hidden = self.hidden_module(expert_products(spread(x, pairs), first, b1, pairs), pairs)
        if pairs.counts is None and self.b2 is not None:
            total = combine(expert_products(hidden, second, None, pairs), weight, pairs)
            with torch.autocast(x.device.type, enabled=False):
                total = total + (gates * active).flatten(0, -2) @ self.b2.to(gates.dtype)
        else:
            total = combine(expert_products(hidden, second, b2, pairs), weight, pairs)
        return total.reshape(*shape, self.features)

    def outputs(self, x: Tensor, active: Tensor, each: int) -> Tensor:
        pairs = pairs_of(active.flatten(0, -2), each)
        rows = spread(x.flatten(0, -2).to(self.W1.dtype), pairs)
        assert self.hidden_module is not None
        # Its forward alone: what hooks have read belongs to the gated sum.
        hidden = self.hidden_module.forward(expert_products(rows, self.W1, self.b1, pairs), pairs)
        apart = pairs.apart(expert_products(hidden, self.W2, self.b2, pairs))
        return apart.reshape(*active.shape[:-1], each, self.features)

    def factors(self, call: Call) -> dict[str, Factors]:
        # W2: delta (sum_e pi_e h_e)^T; W1: (sum_e dpre_e) x^T; biases without the right factor.
        pairs, hidden, hidden_grad = call.layout, call.hidden, call.hidden_grad
        assert isinstance(pairs, Pairs)
        assert hidden is not None
        assert hidden_grad is not None
        units, weight = call.gates.shape[:-1], _slot_gates(accurate(call.gates), pairs)
        x, delta = call.x, accurate(call.delta)
        if hidden.dtype.itemsize < 4:
            # Pair by pair: nothing that was rounded is rounded again, and it is quicker than a sum first.
            there = pairs.filled.to(hidden.dtype).reshape(*units, -1, 1)
            pulled = x.new_empty(*there.shape[:-1], delta.shape[-1], dtype=hidden.dtype)
            torch.mul(weight.reshape(there.shape), delta.unsqueeze(-2), out=pulled)
            terms = [x.to(hidden.dtype).unsqueeze(-2) * there, there, pulled]
            shown, there, pulled = (term.flatten(1, 2) for term in terms)
            dpre, mixed = (t[pairs.slots].reshape(units[0], -1, t.shape[1]) for t in (hidden_grad, hidden))
            slots = {"W1": Factors(dpre, shown), "W2": Factors(pulled, mixed), "b1": Factors(dpre, there)}
        else:
            dpre, mixed = (
                _summed(values, by, pairs).reshape(*units, -1)
                for values, by in ((hidden_grad, pairs.filled.to(weight.dtype)), (hidden, weight))
            )
            slots = {"W1": Factors(dpre, accurate(x)), "W2": Factors(delta, mixed), "b1": Factors(dpre, None)}
        slots["b2"] = Factors(delta * weight.sum(1).reshape(*units, 1), None)
        return {slot: slots[slot] for slot in self.slots}

    def add_gradients(self, call: Call, groups: RowGroups, into: Mapping[str, Tensor]) -> None:
        # W2_e: (pi_e delta) h_e^T; W1_e: dpre_e x^T. A product for every (expert, group), as the forward has
        # one for every expert: pairs lie sorted by expert, within it by group where groups are consecutive.
        assert call.hidden is not None
        assert call.hidden_grad is not None
        rows, count = call.gates.shape[:2], groups.count
        pairs = call.layout
        assert isinstance(pairs, Pairs)
        if pairs.counts is None and groups.ordered:
            self._add_grouped(call, pairs, groups, into)
            return
        total = int(pairs.ends[-1]) if pairs.counts is None else sum(pairs.counts)
        units, experts = pairs.units[:total], pairs.experts[:total]
        spread = torch.arange(count, device=units.device).unsqueeze(1)
        width = groups.gather(call.gates[:, :1, 0]).shape[1]
        group = groups.scatter(spread.expand(count, width), rows[:1])
        key = experts * count + group[units // rows[1]]
        counts = torch.bincount(key, minlength=self.count * count)
        *sizes, ascending = torch.cat([counts, (key.diff() >= 0).all().long().reshape(1)]).tolist()
        hidden, dpre = call.hidden[:total], call.hidden_grad[:total]
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
        self._add_biases(dpre, delta, counts, into)

    def _add_grouped(self, call: Call, pairs: Pairs, groups: RowGroups, into: Mapping[str, Tensor]) -> None:
        """The same where the host does not know the counts: one product for all (expert, group)."""
        assert call.hidden is not None
        assert call.hidden_grad is not None
        hidden, dpre = call.hidden, call.hidden_grad
        units, experts = pairs.units, pairs.experts
        counts = groups.gather(call.active.sum(1)).sum(1).T.flatten()  # pairs lie in this order
        ends = counts.cumsum(0).to(torch.int32)
        x = call.x.to(dpre.dtype).flatten(0, 1)[units]
        weight = call.gates.flatten(0, 1)[units, experts].unsqueeze(-1)
        delta = (weight * call.delta.flatten(0, 1)[units]).to(hidden.dtype)
        for slot, left, right in (("W1", dpre, x), ("W2", delta, hidden)):
            product = functional.grouped_mm(left.T, right, offs=ends)
            into[slot].add_(product.unflatten(0, (self.count, groups.count)).transpose(0, 1))
        self._add_biases(dpre, delta, counts, into)

    def _add_biases(self, dpre: Tensor, delta: Tensor, counts: Tensor, into: Mapping[str, Tensor]) -> None:
        """Sums of pairs, of which ``counts`` [E M] belong to each expert and group."""
        if self.b1 is None:
            return
        for slot, values in (("b1", dpre), ("b2", delta)):
            sums = torch.segment_reduce(values.to(into[slot].dtype), "sum", lengths=counts, unsafe=True)
            into[slot].add_(sums.unflatten(0, (self.count, -1)).transpose(0, 1))

    def extra_repr(self) -> str:
        return f"{self.features} -> {self.hidden_features} -> {self.features}, experts={self.count}"


def _slot_gates(gates: Tensor, pairs: Pairs) -> Tensor:
    """The gates [..., E] of each unit's pairs, [N, k]; 0 where there is none."""
    return gates.flatten(0, -2).gather(1, pairs.choice) * pairs.filled


def _summed(values: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
    """:meth:`Pairs.sum` of wide values as one kernel: nothing of their size is written in between."""
    return functional.embedding_bag(pairs.slots, values, mode="sum", per_sample_weights=weight)


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
