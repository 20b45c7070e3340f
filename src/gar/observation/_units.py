"""Rows of examples or tokens: their factors, and the Gram matrix of these without the rows themselves.

A row is what one example, or one of its tokens, brings to ``sum_e d l_n / d theta_e`` of the example's own
loss ``l_n``. Factors come summed over experts (``gar.nn.Factors``), or as several terms of a unit, so that
products of two rows have all pairs of experts, and the cross terms among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from gar.errors import UserError, nearest
from gar.nn import Factors
from gar.precision import full_precision

#: What a row may be of, beside a group.
Unit = Literal["example", "token"]
#: What the products of a block of rows take at most.
BLOCK_BYTES = 2**26
#: What an entry of two matrices of products costs, in multiplications of the products themselves.
ENTRY = 32


@dataclass(frozen=True)
class UnitRows:
    """N rows of one expert site as factors: row i of a slot is ``sum_a left[i, a] right[i, a]^T``.

    ``factors[slot]`` has ``left`` [N, terms, p] and ``right`` [N, terms, q], or None for a bias; the weight
    of a row's loss is undone already. ``places`` int64 [N] says where the units stand in the forward's
    flattened examples [B] or tokens [B L].
    """

    unit: Unit
    places: Tensor
    factors: Mapping[str, Factors]

    def __len__(self) -> int:
        return len(self.places)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} {self.unit}s, slots {', '.join(self.factors)})"

    def gram(self, scale: Tensor | None = None, max_bytes: int = BLOCK_BYTES) -> Tensor:
        """Gram matrix [N, N] of ``row_i / scale_i``: exact, and [N, d] never exists.

        ``scale`` [N] is 1 where it is 0. Beside the result it takes as much as the factors, and a block of
        ``max_bytes`` (but N numbers at least). What is added up first is what costs less, slot by slot: the
        terms of a unit, or products of all pairs of terms.
        """
        first = next(iter(self.factors.values())).left
        gram = first.new_zeros(len(self), len(self))
        with full_precision(first.device):
            for left, right in self.factors.values():
                if scale is not None:
                    over = torch.where(scale > 0, scale, torch.ones_like(scale))
                    left = left / over.to(left).reshape(-1, 1, 1)
                if right is None:
                    rows = left.sum(1)
                    gram += rows @ rows.T
                elif pairs_are_cheaper(factors := Factors(left, right)):
                    add_pairs(gram, factors, max_bytes)
                else:
                    add_slices(gram, factors, max_bytes)
        return gram

    def lengths(self) -> Tensor:
        """The length [N] of every row, float64: squares of tiny float32 gradients would underflow."""
        total = self.places.new_zeros(len(self), dtype=torch.float64)
        for left, right in self.factors.values():
            own = left.double()
            if right is None:
                total += own.sum(1).square().sum(1)
            else:  # products of a unit's own terms, [N, terms, terms]
                other = right.double()
                total += ((own @ own.mT) * (other @ other.mT)).sum((1, 2))
        return total.clamp(min=0).sqrt()

    def with_terms(self, terms: Mapping[str, int]) -> UnitRows:
        """The same with so many terms in every slot; those behind its own are zero."""
        factors = {
            slot: Factors(_padded(left, terms[slot]), None if right is None else _padded(right, terms[slot]))
            for slot, (left, right) in self.factors.items()
        }
        return replace(self, factors=factors)

    @classmethod
    def joined(cls, parts: Sequence[UnitRows]) -> UnitRows:
        """The rows of several forwards, one after the other; ``places`` then count in each forward anew."""
        if len(parts) == 1:
            return parts[0]
        terms = {slot: max(part.factors[slot].left.shape[1] for part in parts) for slot in parts[0].factors}
        same = [part.with_terms(terms) for part in parts]
        factors = {}
        for slot in terms:
            left = torch.cat([part.factors[slot].left for part in same])
            right = [side for part in same if (side := part.factors[slot].right) is not None]
            factors[slot] = Factors(left, torch.cat(right) if right else None)
        return cls(parts[0].unit, torch.cat([part.places for part in parts]), factors)


def pairs_are_cheaper(factors: Factors) -> bool:
    """Whether products of all pairs of terms cost less than the rows and their products."""
    left, right = factors
    assert right is not None
    (rows, terms, p), q = left.shape, right.shape[-1]
    return rows * terms**2 * (p + q + ENTRY) / 2 < (rows + terms) * p * q


def add_pairs(gram: Tensor, factors: Factors, max_bytes: int) -> None:
    """Add ``sum_ab <left_ia, left_jb> <right_ia, right_jb>`` to ``gram`` [N, N], a block of rows a time."""
    left, right = factors
    assert right is not None
    rows, terms = left.shape[:2]
    if not terms:
        return
    # Two products of a block; what lies below the diagonal is that above it.
    block = max(1, max_bytes // max(1, 2 * rows * terms**2 * gram.element_size()))
    all_left, all_right = left.flatten(0, 1), right.flatten(0, 1)
    for first in range(0, rows, block):
        own = slice(first * terms, (first + block) * terms)
        behind = slice(first * terms, None)
        products = all_left[own] @ all_left[behind].T
        products *= all_right[own] @ all_right[behind].T
        count = len(products) // terms
        if terms > 1:
            products = products.reshape(count, terms, -1, terms).sum((1, 3))
        gram[first : first + count, first:] += products
        gram[first + count :, first : first + count] += products[:, count:].T


def add_slices(gram: Tensor, factors: Factors, max_bytes: int) -> None:
    """Add the same by slices [N, c] of the rows, each added up over the terms first."""
    left, right = factors
    assert right is not None
    columns = max(1, max_bytes // max(1, len(left) * right.shape[-1] * gram.element_size()))
    for part in left.split(columns, -1):
        own = (part.mT @ right).flatten(1)
        gram += own @ own.T


def unit_factors(
    factors: Mapping[str, Factors], unit: Unit, extent: tuple[int, int], places: Tensor, undo: Tensor
) -> dict[str, Factors]:
    """The factors [N, terms, ...] of some units of a forward of ``extent`` rows and tokens a row.

    ``places`` as in :class:`UnitRows`; ``undo`` [N] is what a unit's factors are multiplied by.
    """
    rows, tokens = extent
    count = rows if unit == "example" else rows * tokens

    def chosen(values: Tensor) -> Tensor:
        return values.reshape(count, -1, values.shape[-1])[places]

    return {
        slot: Factors(
            chosen(left) * undo.to(left).reshape(-1, 1, 1), None if right is None else chosen(right)
        )
        for slot, (left, right) in factors.items()
    }


def unit_places(
    unit: str, extent: tuple[int, int], counted: Tensor, mask: Tensor | None, chosen: Tensor | None
) -> Tensor:
    """Where the counted units stand among all; of these the ``chosen`` ones, by their number."""
    if unit not in get_args(Unit):
        raise UserError(f"unit is {unit!r}; expected example or token{nearest(unit, get_args(Unit))}")
    units = counted
    if unit == "token":
        units = counted.unsqueeze(1).expand(extent)
        if mask is not None:
            units = units & mask.to(units.device).reshape(extent)
    places = units.flatten().nonzero().squeeze(1)
    if chosen is None:
        return places
    chosen = chosen.to(places.device)
    if chosen.dim() != 1 or chosen.is_floating_point() or len(chosen.unique()) < len(chosen):
        raise UserError("chosen must be an integer vector of different units")
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < len(places):
        raise UserError(
            f"chosen must lie in [0, {len(places)}), the counted {unit}s in their order, "
            f"got {int(chosen.min())} to {int(chosen.max())}"
        )
    return places[chosen]


def _padded(values: Tensor, count: int) -> Tensor:
    missing = count - values.shape[1]
    return functional.pad(values, (0, 0, 0, missing)) if missing else values
