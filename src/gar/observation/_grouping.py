"""Which rows belong to which group, and sums over the rows of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from gar.errors import UserError, shown
from gar.nn import Factors
from gar.routing import mean_over_tokens


class Grouping:
    """Which rows belong to which of M groups; sums and products over the rows of each group.

    ``groups`` is int64 [R] with values in ``[0, count)``, or -1 for rows that are not counted.
    """

    def __init__(self, groups: Tensor, count: int | None = None) -> None:
        groups = group_numbers(groups)
        listed = groups.detach().cpu()
        if listed.dim() != 1:
            raise ValueError(
                f"groups must be an integer vector, got {listed.dtype} of shape {tuple(listed.shape)}"
            )
        largest = int(listed.max()) if len(listed) else -1
        self.count = largest + 1 if count is None else count
        if largest >= self.count or (len(listed) and int(listed.min()) < -1):
            raise ValueError(
                f"group numbers must be -1 (not counted) or in [0, {self.count}), got up to {largest}"
            )
        self.rows = len(listed)
        self.ordered = bool((listed.diff(prepend=listed.new_zeros(1)) >= 0).all())
        self.sizes = torch.bincount(listed[listed >= 0], minlength=self.count)
        width = int(self.sizes.max()) if self.count else 0
        # The usual update, consecutive groups of one size, needs no gather at all.
        self._consecutive = self.rows == self.count * width and bool(
            (listed.reshape(self.count, width) == torch.arange(self.count).unsqueeze(1)).all()
        )
        if not self._consecutive:
            self._place(listed.argsort(stable=True)[int((listed < 0).sum()) :], self.sizes, groups.device)

    @classmethod
    def consecutive(cls, sizes: Sequence[int], device: torch.device | None = None) -> Self:
        """Groups of these sizes, one after the other: known as such, nothing is checked or searched.

        >>> Grouping.consecutive([2, 1]).sum(torch.tensor([1, 2, 3]))
        tensor([3, 3])
        """
        grouping = cls.__new__(cls)
        grouping.count, grouping.rows = len(sizes), sum(sizes)
        grouping.sizes, grouping.ordered = torch.tensor(sizes, device=device), True
        width = max(sizes, default=0)
        grouping._consecutive = grouping.rows == grouping.count * width
        if not grouping._consecutive:
            grouping._place(torch.arange(grouping.rows), torch.tensor(sizes), device)
        return grouping

    @classmethod
    def padded(cls, sizes: Tensor, width: int) -> Self:
        """Groups that all take ``width`` rows, of which ``sizes`` [M] (on the device) count, the first ones.

        The others have to bring zeros to every sum, as units that a routing mask leaves out do.
        """
        grouping = cls.__new__(cls)
        grouping.count, grouping.rows, grouping.sizes = len(sizes), len(sizes) * width, sizes
        grouping._consecutive = grouping.ordered = True
        return grouping

    def _place(self, order: Tensor, sizes: Tensor, device: torch.device | None) -> None:
        """Where the counted rows, listed group by group, come to stand in [M, width]; all on the host."""
        width = int(sizes.max()) if len(sizes) else 0
        slots = torch.arange(width).expand(self.count, width) < sizes.unsqueeze(1)
        index = torch.zeros(self.count, width, dtype=torch.long)
        index[slots] = order
        self._index, self._slots = index.to(device), slots.to(device)
        #: The counted rows, and where each stands in a flattened [M, width].
        self._cells = torch.stack([order, slots.flatten().nonzero().squeeze(1)]).to(device)

    def gather(self, values: Tensor) -> Tensor:
        """Rows [R, ...] as [M, n, ...], padded with zeros where a group is shorter than the longest."""
        if self._consecutive:
            return values.reshape(self.count, -1, *values.shape[1:])
        index, slots = self._on(values.device)
        return values[index].masked_fill(~slots.reshape(*slots.shape, *[1] * (values.dim() - 1)), 0)

    def scatter(self, gathered: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of :meth:`gather` for values [M, n * tokens, ...] into zeros of ``shape`` [R, ...]."""
        if self._consecutive:
            return gathered.reshape(shape)
        if self._cells.device != gathered.device:
            self._cells = self._cells.to(gathered.device)
        rows, places = self._cells
        result = gathered.new_zeros(tuple(shape))
        result[rows] = gathered.reshape(-1, *shape[1:])[places]
        return result

    def spread(self, values: Tensor) -> Tensor:
        """Values [M] of the groups as one of each row, [R]; 0 for rows that are not counted."""
        width = self.rows // max(1, self.count) if self._consecutive else self._slots.shape[1]
        counted = torch.arange(width, device=values.device) < self.sizes.to(values.device).unsqueeze(1)
        return self.scatter(values.unsqueeze(1) * counted, (self.rows,))

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The gather index and its valid slots; moved once where values live elsewhere than the groups."""
        if self._index.device != device:
            self._index, self._slots = self._index.to(device), self._slots.to(device)
        return self._index, self._slots

    def sum(self, values: Tensor) -> Tensor:
        """[R, ...] to [M, ...]."""
        return self.gather(values).sum(1)

    def mean(self, values: Tensor) -> Tensor:
        """[R, ...] to [M, ...]; an empty group has mean zero."""
        sizes = self.sizes.clamp(min=1).to(values.device, values.dtype)
        return self.sum(values) / sizes.reshape(-1, *[1] * (values.dim() - 1))

    def product(self, factors: Factors, out: Tensor | None = None) -> Tensor:
        """``sum_i left_i right_i^T`` over the units of each group, [M, p, q] (or [M, p] for a bias).

        Factors narrower than float32 are multiplied as they are, and added up in float32. ``out`` [M, p q]
        takes the result in place of new memory.
        """
        left = self.gather(factors.left).flatten(1, 2)
        wide = torch.promote_types(left.dtype, torch.float32)
        if factors.right is None:
            return torch.sum(left, 1, dtype=wide, out=out)
        right = self.gather(factors.right).flatten(1, 2)
        shape = (self.count, left.shape[-1], right.shape[-1])
        result = left.new_empty(shape, dtype=wide) if out is None else out.view(shape)
        if left.dtype == wide:
            return torch.bmm(left.transpose(1, 2), right, out=result)
        if left.device.type == "cuda":
            return torch.bmm(left.transpose(1, 2), right, out_dtype=wide, out=result)
        return torch.bmm(left.to(wide).transpose(1, 2), right.to(wide), out=result)


def group_numbers(groups: Any) -> Tensor:
    """Integers of a tensor, an array or a list, [N] or [B, L]; or a refusal."""
    try:
        found = torch.as_tensor(groups)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"groups: expected integers [N] or [B, L], got {shown(groups)}") from None
    if found.dtype == torch.bool or found.is_floating_point() or found.is_complex():
        raise UserError(
            f"groups must be an integer vector, got {found.dtype} of shape {tuple(found.shape)} (or one "
            "integer a token)"
        )
    return found


def group_weights(weight: Any) -> Tensor:
    """Weights [M] of a tensor, an array or a list; or a refusal."""
    try:
        found = weight if isinstance(weight, Tensor) else torch.as_tensor(weight, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"group_weight: expected numbers [M], got {shown(weight)}") from None
    if found.dim() != 1 or found.is_complex():
        raise UserError(f"group_weight must be [M], one number a group, got {list(found.shape)}")
    return found


def mean_over_units(values: Tensor, mask: Tensor | None, grouping: Grouping) -> Tensor:
    """Mean of unit values [B, L, E] (or [N, E]) over the valid units of each group, [M, E]."""
    if values.dim() == 2:
        return grouping.mean(values)
    if mask is None:
        return grouping.mean(mean_over_tokens(values, None))
    weight = mask.to(values.dtype)
    totals = grouping.sum((values * weight.unsqueeze(-1)).sum(1))
    return totals / grouping.sum(weight.sum(1)).clamp(min=1).unsqueeze(-1)
