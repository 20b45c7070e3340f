"""Which examples an update takes, and in which same-task groups (specification, section 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gar.data._permutation import fixed_permutation
from gar.errors import UserError


@dataclass(frozen=True)
class Group:
    """One same-task group of an update.

    ``number`` counts the groups of the update; ``task_weight`` is ``v_m = |m| / (T B_t)``, ``sample_weight``
    ``|m| / sum_j |j|``.
    """

    number: int
    task: int
    examples: NDArray[np.int64]
    task_weight: float
    sample_weight: float

    def __len__(self) -> int:
        return len(self.examples)


class TaskOrder:
    """The order of one task's examples: a fresh shuffle each epoch, the last short batch kept.

    A pure function of seed, task and batch number, so that any update can be drawn without its forerunners,
    and the same with every numpy (:func:`~gar.data.fixed_permutation`).
    """

    def __init__(self, name: str, size: int, batch_size: int, seed: int) -> None:
        if size < 1:
            raise UserError(f"task {name} has no training examples; expected at least one")
        self.name, self.size, self.batch_size, self.seed = name, size, batch_size, seed
        self.batches_per_epoch = -(-size // batch_size)
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def batch(self, number: int) -> NDArray[np.int64]:
        """Example indices of the task's batch ``number`` = 0, 1, 2, …"""
        epoch, position = divmod(number, self.batches_per_epoch)
        if epoch != self._epoch:
            stream = f"order/{self.seed}/{epoch}/{self.name}"
            self._epoch, self._order = epoch, fixed_permutation(self.size, stream)
        start = position * self.batch_size
        return self._order[start : start + self.batch_size]


class Updates:
    """The groups of every update of a mixture: one batch per task, split into consecutive groups."""

    def __init__(
        self, names: Sequence[str], sizes: Sequence[int], batch_size: int, group_size: int, seed: int
    ) -> None:
        self.orders = [TaskOrder(n, s, batch_size, seed) for n, s in zip(names, sizes, strict=True)]
        self.group_size = group_size

    def groups(self, update: int) -> list[Group]:
        """The groups of update 0, 1, 2, …, in task order."""
        batches = [order.batch(update) for order in self.orders]
        total = sum(len(batch) for batch in batches)
        groups: list[Group] = []
        for task, batch in enumerate(batches):
            for part in split(batch, self.group_size):
                task_weight = len(part) / (len(batches) * len(batch))
                groups.append(Group(len(groups), task, part, task_weight, len(part) / total))
        return groups

    @property
    def full_groups(self) -> list[int]:
        """Groups of every task in an update with whole batches."""
        return [-(-min(order.batch_size, order.size) // self.group_size) for order in self.orders]

    @property
    def updates_per_epoch(self) -> int:
        """Updates after which the largest task has been seen once."""
        return max(order.batches_per_epoch for order in self.orders)


def split(indices: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Consecutive parts of ``size``; the last may be shorter."""
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def passes(
    groups: Sequence[Group],
    lengths: Sequence[NDArray[np.int64]],
    max_tokens: int | None,
    pass_cost: int = 0,
) -> Iterator[list[Group]]:
    """Consecutive whole groups to run together; the update itself does not depend on the split.

    A pass is padded to its longest example. It ends where one more group would exceed ``max_tokens`` padded
    tokens, or where joining would add more padding than a pass of its own costs (``pass_cost`` tokens).
    ``lengths`` holds the token lengths of every task's examples.
    """
    current: list[Group] = []
    rows = widest = 0
    for group in groups:
        longest = int(lengths[group.task][group.examples].max())
        joined = (rows + len(group)) * max(widest, longest)
        padding = joined - rows * widest - len(group) * longest
        too_large = max_tokens is not None and joined > max_tokens
        if current and (too_large or (padding > pass_cost and group.task != current[-1].task)):
            yield current
            current, rows, widest = [], 0, 0
        current.append(group)
        rows, widest = rows + len(group), max(widest, longest)
    yield current
