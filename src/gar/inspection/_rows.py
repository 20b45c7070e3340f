"""A gradient's row: all its numbers, or a sketch that keeps inner products in expectation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from gar.errors import UserError
from gar.objective import accurate

#: More numbers a row are of no use: a relative standard error of 2 %.
LARGEST = 4096
#: Fewer would be of none: 18 %.
SMALLEST = 64
#: What a sketch copies at a time.
CHUNK_BYTES = 2**23


class Reducer:
    """Rows of the gradient of experts with one template: ``reduce`` a slot's gradient, add up over slots.

    With ``dimension`` s None a row is the whole gradient, its slots side by side. Else it is a count sketch:
    the numbers get random signs and are added up in s random heaps of one size. The expectation of the
    inner product of two sketches <Sx, Sy> over the signs is <x, y>, with a standard error of at most
    ``sqrt((|x|^2 |y|^2 + <x, y>^2) / s)``; sketches of sums are sums of sketches.
    """

    def __init__(self, template: Mapping[str, int], dimension: int | None, seed: int = 0) -> None:
        self.template, self.dimension, self._seed = dict(template), dimension, seed
        self._maps: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}

    @property
    def width(self) -> int:
        """Numbers a row."""
        return sum(self.template.values()) if self.dimension is None else self.dimension

    @cached_property
    def _offsets(self) -> dict[str, int]:
        offsets, at = {}, 0
        for slot, size in self.template.items():
            offsets[slot], at = at, at + size
        return offsets

    def add(self, rows: Tensor, slot: str, gradient: Tensor, scale: float) -> None:
        """``rows`` [E, width], on the host, plus ``scale`` times the gradient [E, ...] of one slot."""
        flat = gradient.detach().reshape(len(gradient), -1)
        if self.dimension is None:
            place = rows[:, self._offsets[slot] :][:, : flat.shape[1]]
            place.add_(accurate(flat).to(rows), alpha=scale)
            return
        heap, signs = self._map(slot, flat.device)
        step = max(1, CHUNK_BYTES // (4 * len(heap)))
        for start in range(0, len(flat), step):
            part = accurate(flat[start : start + step])
            heaps = part.new_zeros(len(part), self.dimension).index_add_(1, heap, part * signs)
            rows[start : start + step].add_(heaps.to(rows), alpha=scale)

    def _map(self, slot: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """The heap and the sign of every number of a slot; drawn on the host, the same on every device."""
        if (slot, device) not in self._maps:
            assert self.dimension is not None
            size, place = self.template[slot], list(self.template).index(slot)
            draw = torch.Generator().manual_seed(self._seed * len(self.template) + place)
            heap = torch.randperm(size, generator=draw) % self.dimension
            signs = torch.randint(0, 2, (size,), generator=draw, dtype=torch.int8) * 2 - 1
            self._maps[slot, device] = heap.to(device), signs.to(device)
        return self._maps[slot, device]


def choose_dimension(
    templates: Mapping[str, tuple[int, int]], units: int, itemsize: int, max_bytes: int
) -> int | None:
    """None where all rows fit in ``max_bytes``, else the largest power of two for a sketch that does.

    ``templates`` are experts and parameters of one expert by layer. Refused is what not even the smallest
    sketch, or the inner products [E, M, M] of a layer's rows, would fit in.

    >>> choose_dimension({"a": (4, 100)}, 8, 4, 12800), choose_dimension({"a": (4, 1000)}, 8, 4, 12800)
    (None, 64)
    """
    experts = sum(count for count, _ in templates.values())
    whole = units * sum(count * size for count, size in templates.values()) * itemsize
    # The units' inner products, of one layer at a time, in float64.
    gram = 8 * units**2 * max(count for count, _ in templates.values())
    needed = max(min(whole, units * experts * itemsize * SMALLEST), gram)
    if max_bytes < needed:
        raise UserError(
            f"max_bytes is {max_bytes}, too little for {units} units of texts and {experts} experts; "
            f"expected {needed} or more, or larger units (--group-size)"
        )
    if whole <= max_bytes:
        return None
    most = max_bytes // (units * experts * itemsize)
    return int(min(LARGEST, 2 ** int(math.log2(most))))


def relative_error(dimension: int | None) -> float:
    """Bound on the relative standard error of a squared length.

    >>> relative_error(None), round(relative_error(512), 4)
    (0.0, 0.0625)
    """
    return 0.0 if dimension is None else math.sqrt(2 / dimension)
