"""The groups of ONE optimizer update whose rows come from several forwards (gradient accumulation)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gar.errors import UserError
from gar.objective import accurate
from gar.observation._grouping import Grouping, group_numbers, group_weights
from gar.observation._site import SLICE_BYTES, SiteObservation, slices
from gar.precision import full_precision


@dataclass(frozen=True)
class _Part:
    """What one micro-batch has of the groups ``present`` int64 [m], the only ones that it knows of."""

    site: SiteObservation
    groups: Grouping
    present: Tensor
    weight: Tensor


class RowSum:
    """Group rows ``g_m`` [count, d] of one layer and one optimizer update, added up over micro-batches.

    A group may be whole in one micro-batch or spread over several. The backward of each micro-batch must have
    been of ``sum_m group_weight[m] * part_m``, with parts that add up to the group's mean loss ``l_m``.

    With neither ``dtype`` nor ``device`` the sites' captures are kept (what group rows are made of), and rows
    are made slice by slice when they are asked for: before the optimizer's step, and before
    :meth:`SiteObservation.forget_factors`. As soon as the rows themselves would take less memory, as those of
    adapters do, they are held in place of the captures. With one of both they always are, in ``dtype`` (else
    float32 or wider) on ``device`` (else the experts'); then captures may be freed after :meth:`add`.

    >>> in_host_memory = RowSum(8, dtype=torch.bfloat16, device="cpu")
    """

    def __init__(
        self, count: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        self.count, self.dtype = count, dtype
        self.device = None if device is None else torch.device(device)
        self._parts: list[_Part] = []
        self._held: Tensor | None = None
        self._template: dict[str, torch.Size] = {}
        self._where = torch.device("cpu")

    def add(self, site: SiteObservation, groups: Tensor | Grouping, group_weight: Tensor) -> None:
        """Add what the micro-batch that ``site`` observed brings to the groups.

        ``groups`` as in :meth:`SiteObservation.group_gradients`, with the update's numbers in [0, count) and
        -1 for what is not counted; ``group_weight`` [count] is undone here.
        """
        groups = groups if isinstance(groups, Grouping) else group_numbers(groups)
        if (group_weight := group_weights(group_weight)).shape != (self.count,):
            raise UserError(f"group_weight must be [{self.count}], got {list(group_weight.shape)}")
        template = site.template()
        if self._template and template != self._template:
            raise UserError(
                f"{site.name or 'the site'}: rows of {_shapes(template)} cannot be added to rows of "
                f"{_shapes(self._template)}; expected one RowSum a layer"
            )
        whole = site.grouping(groups, self.count)
        if isinstance(groups, Grouping):
            part = _Part(site, whole, torch.arange(self.count), group_weight)
        else:
            numbers, local = groups.unique(return_inverse=True)
            uncounted = int((numbers < 0).sum())
            present = numbers[uncounted:]
            own = site.grouping(local - uncounted, len(present))
            part = _Part(site, own, present, group_weight[present.to(group_weight.device)])
        self._template, self._where = template, site.device
        self._parts.append(part)
        if self._held is not None or self.dtype or self.device or self._rows_are_smaller():
            for each in self._parts:
                self._hold(each)
            self._parts.clear()

    @property
    def rows(self) -> Tensor:
        """``g_m`` [count, d], detached; zeros for a group that no micro-batch had."""
        return torch.cat([*self.slices()], 1) if self._held is None else self._held

    @property
    def holds(self) -> bool:
        """Whether rows are held, so that the captures of what was added may be freed."""
        return self._held is not None

    def slices(self, max_bytes: int = SLICE_BYTES) -> Iterator[Tensor]:
        """The columns of :attr:`rows` in their order, [count, c] a time.

        A slice takes ``max_bytes`` at most, but holds at least one row of a parameter's matrix; it is float32
        or wider, on the experts' device.
        """
        if self._held is not None:
            columns = max(1, max_bytes // max(1, self.count * accurate(self._held[:0]).element_size()))
            yield from (accurate(part.to(self._where)) for part in self._held.split(columns, 1))
            return
        if not self._parts:
            raise RuntimeError("nothing was added to this RowSum")
        for found in _made(self._parts, self.count, max_bytes):
            total = found[0].new_zeros(self.count, found[0].shape[1])
            for part, own in zip(self._parts, found, strict=True):
                total.index_add_(0, part.present.to(own.device), own)
            yield total

    def gram(self, max_bytes: int = SLICE_BYTES) -> Tensor:
        """Gram matrix [count, count] of :attr:`rows`, from :meth:`slices`: float32 or wider."""
        total: Tensor | None = None
        for part in self.slices(max_bytes):
            with full_precision(self._where):
                own = part @ part.T
            total = own if total is None else total + own
        assert total is not None
        return total

    def _rows_are_smaller(self) -> bool:
        kept = {id(t): t for part in self._parts for t in part.site.captures()}.values()
        size = self.count * sum(shape.numel() for shape in self._template.values())
        wide = max([4, *(t.element_size() for t in kept if t.is_floating_point())])
        return size * wide < sum(t.numel() * t.element_size() for t in kept)

    def _hold(self, part: _Part) -> None:
        at = 0
        for (own,) in _made([part], self.count, SLICE_BYTES):
            if self._held is None:
                size = sum(shape.numel() for shape in self._template.values())
                device = self.device or own.device
                self._held = torch.zeros(self.count, size, dtype=self.dtype or own.dtype, device=device)
            present = part.present.to(self._held.device)
            columns = self._held[:, at : at + own.shape[1]]
            columns[present] = (accurate(columns[present]) + own.to(columns.device)).to(columns.dtype)
            at += own.shape[1]


class GateSum:
    """Group probabilities ``p_m`` [count, E] of one layer and one optimizer update, over its micro-batches.

    A group may be spread over them: gates are added up (``sums`` [count, E], differentiable in the router
    alone) and so are the numbers of examples (``sizes`` [count]); only then are means taken and rows divided
    by their sums.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.sums: Tensor | None = None
        self.sizes: Tensor | None = None
        self._site: SiteObservation | None = None

    def add(self, site: SiteObservation, groups: Tensor, **options: Any) -> None:
        """Add the gates of one micro-batch; arguments as of :meth:`SiteObservation.group_probabilities`."""
        sums, sizes = site.group_gates(groups, self.count, **options)
        self.sums = sums if self.sums is None else self.sums + sums
        self.sizes = sizes if self.sizes is None else self.sizes + sizes
        self._site = site

    @property
    def probabilities(self) -> Tensor:
        """``p_m`` [count, E]; zeros for a group that no micro-batch had."""
        if self._site is None or self.sums is None or self.sizes is None:
            raise RuntimeError("nothing was added to this GateSum")
        return self._site.probabilities(self.sums, self.sizes)


def _made(parts: Sequence[_Part], count: int, max_bytes: int) -> Iterator[list[Tensor]]:
    """Slice after slice of the rows, [m, c] of every part, with the weights undone."""
    made = [part.site.group_factors(part.groups, part.weight) for part in parts]
    for slot in parts[0].site.template():
        factors = [of[slot] for _, of, _ in made]
        left, right = factors[0]
        # Never across: a matrix's columns stay together, so that slices are in the order of the row.
        width = 1 if right is None else right.shape[-1]
        columns = max(width, max_bytes // max(1, count * accurate(left[:0]).element_size()))
        for pieces in zip(*(slices(of, columns) for of in factors), strict=True):
            found = []
            for part, piece, (groups, _, undo) in zip(parts, pieces, made, strict=True):
                with part.site.full_precision():
                    found.append(groups.product(piece).flatten(1) * undo)
            yield found


def _shapes(template: dict[str, torch.Size]) -> str:
    return ", ".join(f"{slot} {list(shape)}" for slot, shape in template.items())
