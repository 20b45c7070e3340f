"""Which examples or tokens of an update are rows of the observation (``observation.unit``, ``.rows``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from gar.config import ObservationConfig
from gar.data import fixed_permutation
from gar.data.batches import Group
from gar.distributed import Layout
from gar.methods import UnitChoice
from gar.observation import Unit


@dataclass(frozen=True)
class ChosenRows:
    """The rows of one update, known before its passes: the same for every method, split and rank.

    ``counts[g]`` says how many units group number g has, ``chosen[g]`` which of them are rows, in ascending
    order; the update's rows are those of its groups one after the other, ``first[g]`` the first of each.
    """

    unit: Unit
    counts: dict[int, int]
    chosen: dict[int, NDArray[np.int64]]
    first: dict[int, int]

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        lengths: Sequence[NDArray[np.int64]],
        config: ObservationConfig,
        seed: int,
        number: int,
    ) -> Self | None:
        """Of update ``number``, uniformly and without replacement; None where its groups are the rows."""
        if config.unit == "group":
            return None
        sizes = [
            len(group) if config.unit == "example" else int(lengths[group.task][group.examples].sum())
            for group in groups
        ]
        total = sum(sizes)
        drawn = np.arange(total)
        if config.rows is not None and config.rows < total:
            drawn = np.sort(fixed_permutation(total, f"rows/{seed}/{number}")[: config.rows])
        ends = np.searchsorted(drawn, list(accumulate(sizes)))
        parts = np.split(drawn, ends[:-1])
        begins = [0, *accumulate(sizes)]
        numbers = [group.number for group in groups]
        return cls(
            config.unit,
            dict(zip(numbers, sizes, strict=True)),
            {n: part - begin for n, part, begin in zip(numbers, parts, begins, strict=False)},
            dict(zip(numbers, [0, *ends.tolist()], strict=False)),
        )

    def of_pass(self, groups: Sequence[Group], device: torch.device) -> UnitChoice:
        """The rows in a pass of some of the groups."""
        begins = accumulate((self.counts[group.number] for group in groups), initial=0)
        chosen = [self.chosen[group.number] + begin for group, begin in zip(groups, begins, strict=False)]
        return UnitChoice(
            self.unit, torch.from_numpy(np.concatenate(chosen)).to(device), self.tasks(groups, device)
        )

    def tasks(self, groups: Sequence[Group], device: torch.device) -> torch.Tensor:
        """The tasks of the rows of some groups."""
        tasks = [np.full(len(self.chosen[group.number]), group.task) for group in groups]
        return torch.from_numpy(np.concatenate(tasks)).to(device)

    def layout(self, groups: Sequence[Group], numbers: Sequence[Sequence[int]]) -> Layout:
        """Where the update's rows are, if rank r has the groups at the places ``numbers[r]``."""
        spans = [torch.arange(len(self.chosen[g.number])) + self.first[g.number] for g in groups]
        none = torch.zeros(0, dtype=torch.long)
        return Layout(
            tuple(torch.cat([none, *(spans[m] for m in own)]) for own in numbers),
            sum(len(own) for own in self.chosen.values()),
        )
