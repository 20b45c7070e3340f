"""The active (unit, expert) pairs of a forward, expert by expert, and the products over them.

A unit's pairs are read and added up by their places, slot after slot, and never scattered: a sum has one
order on a device, and with it one last bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gar.objective import accurate

#: Bytes that the rows of a grouped product have to be a multiple of.
ALIGNMENT = 16


class Pairs(NamedTuple):
    """P pairs of N units with at most k experts each, sorted by expert, then by unit.

    ``origin`` int64 [P] is each pair's place in a flattened [N, k], ``slots`` int64 [N, k] its inverse: where
    the pairs of a unit stand, in order of experts ``choice`` int64 [N, k]. ``filled`` bool [N, k] says which
    there are; the others point to the first pair. ``ends`` int32 [E] is where each expert's pairs end.

    ``counts`` are the numbers of pairs of the experts, or None: then the host never learned them, P is N k,
    and what lies behind ``ends[-1]`` is undefined and never read.
    """

    origin: Tensor
    slots: Tensor
    choice: Tensor
    filled: Tensor
    ends: Tensor
    counts: list[int] | None

    @property
    def units(self) -> Tensor:
        """The unit of each pair, int64 [P]."""
        return self.origin // self.slots.shape[1]

    @property
    def experts(self) -> Tensor:
        """The expert of each pair, int64 [P]; like the unit without a meaning behind ``ends[-1]``."""
        return self.choice.flatten()[self.origin]

    def apart(self, values: Tensor) -> Tensor:
        """``values`` [P, f] unit by unit, [N, k, f]; zeros where a unit has fewer pairs."""
        return values[self.slots].masked_fill(~self.filled.unsqueeze(-1), 0)

    def sum(self, values: Tensor, weight: Tensor) -> Tensor:
        """``sum_j weight[n, j] values[slots[n, j]]``, [N, f], from [P, f] and [N, k]; float32 or wider."""
        total = accurate(weight)[:, :1] * values[self.slots[:, 0]]
        for j in range(1, self.slots.shape[1]):
            total += weight[:, j : j + 1] * values[self.slots[:, j]]
        return total


def pairs_of(active: Tensor, each: int, fixed: bool = False) -> Pairs:
    """The pairs of ``active`` bool [N, E], with at most ``each`` experts a unit.

    ``fixed``: sizes follow from those of ``active`` alone, and nothing waits for the device.
    """
    units, experts = active.shape
    numbers = torch.arange(experts, device=active.device).expand(units, experts)
    # Scans of one long row: torch's scan over a table of some columns is a hundred times slower on a GPU.
    seen = active.T.flatten().cumsum(0).reshape(experts, units)
    place, ends = (seen - 1).T, seen[:, -1:].flatten() if units else seen.new_zeros(experts)
    row = active.flatten().cumsum(0).reshape(units, experts)
    rank = torch.where(active, row - row[:, -1:] + active.sum(1, keepdim=True) - 1, each)
    choice = numbers.new_zeros(units, each + 1).scatter_(1, rank, numbers)[:, :each]
    filled = numbers.new_zeros(units, each + 1).scatter_(1, rank, 1)[:, :each].bool()
    slots = torch.where(filled, place.gather(1, choice), 0)
    size = units * each
    flat = torch.arange(size, device=active.device)
    behind = torch.where(filled, slots, size).flatten()  # those that are not there all go behind the end
    origin = numbers.new_zeros(size + 1).scatter_(0, behind, flat)[:size]
    if fixed:
        return Pairs(origin, slots, choice, filled, ends.to(torch.int32), None)
    counts = active.sum(0).tolist()  # everything else is under way
    return Pairs(origin[: max(1, sum(counts))], slots, choice, filled, ends.to(torch.int32), counts)


def can_group(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Whether products of fixed size need nothing from the host: bfloat16 on Hopper, in aligned rows."""
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device)[0] == 9
        and hasattr(functional, "grouped_mm")
        and all(width * dtype.itemsize % ALIGNMENT == 0 for width in widths)
    )


def spread(x: Tensor, pairs: Pairs) -> Tensor:
    """``x[units]``, [P, d] from [N, d]."""
    rows: Tensor = _Spread.apply(x, pairs)  # type: ignore[no-untyped-call]
    return rows


def combine(values: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
    """:meth:`Pairs.sum`, differentiable in values [P, d] and weight [N, k]."""
    total: Tensor = _Combine.apply(values, weight, pairs)  # type: ignore[no-untyped-call]
    return total


def with_bias(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` and ``weight`` with columns of ones and of the bias: a product without a bias of its own has it.

    As many columns as keep the rows aligned.
    """
    more = ALIGNMENT // x.element_size()
    ones, zeros = x.new_ones(len(x), more), bias.new_zeros(*bias.shape, more - 1)
    return torch.cat([x, ones], 1), torch.cat([weight, bias.unsqueeze(-1), zeros], -1)


def expert_products(rows: Tensor, weight: Tensor, bias: Tensor | None, pairs: Pairs) -> Tensor:
    """``W_e x_i + b_e`` of every pair, [P, p]: ``rows`` [P, q], ``weight`` [E, p, q], ``bias`` [E, p]."""
    rows = rows.to(weight.dtype)
    if pairs.counts is None:
        assert bias is None
        grouped: Tensor = functional.grouped_mm(rows, weight.transpose(1, 2), offs=pairs.ends)
        return grouped
    out: Tensor = _Products.apply(rows, weight, bias, pairs.counts)  # type: ignore[no-untyped-call]
    return out


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return x[pairs.units]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        pairs: Pairs = ctx.pairs
        return pairs.sum(grad, accurate(pairs.filled.to(grad.dtype))).to(grad.dtype), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.pairs = pairs
        return pairs.sum(values, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (values, weight), pairs = ctx.saved_tensors, ctx.pairs
        inner = [(grad * values[slots]).sum(-1) for slots in pairs.slots.unbind(1)]
        own = weight.flatten()[pairs.origin].unsqueeze(1) * grad[pairs.units]
        return own.to(values.dtype), torch.stack(inner, 1).to(weight.dtype), None


class _Products(torch.autograd.Function):
    """Expert by expert, each product straight into its place."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts, ctx.biased = counts, bias is not None
        out = rows.new_empty(len(rows), weight.shape[1])
        if sum(counts) < len(rows):  # no pair at all
            out.zero_()
        for e, (x, y) in enumerate(_by_expert(counts, rows, out)):
            if bias is None:
                torch.mm(x, weight[e].T, out=y)
            else:
                torch.addmm(bias[e], x, weight[e].T, out=y)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        # Nothing is written in place: so it can be vectorized over several gradients.
        (rows, weight), counts = ctx.saved_tensors, ctx.counts
        to_rows = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            parts = [g @ weight[e] for e, (g,) in enumerate(_by_expert(counts, grad))]
            to_rows = functional.pad(torch.cat(parts), (0, 0, 0, len(rows) - sum(counts)))
        if ctx.needs_input_grad[1]:
            to_weight = torch.stack([g.T @ x for x, g in _by_expert(counts, rows, grad)])
        if ctx.biased and ctx.needs_input_grad[2]:
            to_bias = torch.stack([g.sum(0) for (g,) in _by_expert(counts, grad)])
        return to_rows, to_weight, to_bias, None


def _by_expert(counts: list[int], *tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    """The rows of each expert, of several tensors."""
    total = sum(counts)
    return zip(*(tensor[:total].split(counts) for tensor in tensors), strict=True)
