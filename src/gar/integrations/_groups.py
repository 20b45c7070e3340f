"""From a dataset's column to the groups of one optimizer update."""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gar.errors import UserError, nearest, shown
from gar.integrations._packing import LENGTHS, text_numbers, texts_key

#: What a group can be called.
LABELS = (str, numbers.Integral)
#: Examples in a group of the paper.
GROUP_SIZE = 8


def label_id(label: object) -> int:
    """A text or whole number as an int64 that is the same in every process; different ones differ.

    >>> label_id("code") == label_id("code"), label_id("code") == label_id("prose")
    (True, False)
    """
    value = label.item() if isinstance(label, Tensor) and label.numel() == 1 else label
    if not isinstance(value, LABELS):
        raise UserError(f"a group must be a text or a whole number, got {shown(value)}")
    data = str(value).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def label_ids(labels: Sequence[object]) -> Tensor:
    """:func:`label_id` of every label, int64 [B]."""
    return torch.tensor([label_id(label) for label in labels], dtype=torch.long)


class GroupCollator:
    """Collates examples without their ``column``; with ``keep`` it comes back as a tensor of numbers, [B].

    Where it is not ``required``, it comes back only if every example has one. Of packed texts (a list of
    groups an example, or all examples in one row) it is a number a text [n], and the batch has under
    :func:`texts_key` whose text every token is.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], column: str, keep: bool, required: bool) -> None:
        self.collate, self.column, self.keep, self.required = collate, column, keep, required

    def __call__(self, examples: Sequence[Any]) -> Any:
        mappings = [example for example in examples if isinstance(example, Mapping)]
        there = [self.column in example for example in mappings]
        if self.keep and self.required and not (mappings and all(there)):
            known = [str(name) for name in mappings[0]] if mappings else []
            raise missing_column(self.column, known, left=True)
        if not any(there):
            return self.collate(list(examples))
        batch = self.collate([{k: v for k, v in e.items() if k != self.column} for e in mappings])
        if not isinstance(batch, MutableMapping):
            raise UserError(
                f"the data collator returns {type(batch).__name__}, which cannot hold the groups; expected a "
                "dictionary of tensors"
            )
        labels: list[Any] = [example.get(self.column) for example in mappings]
        packed = [isinstance(label, list | tuple) for label in labels]
        flat = [label for own, many in zip(labels, packed, strict=True) for label in (own if many else [own])]
        if not self.keep or not (self.required or all(isinstance(label, LABELS) for label in flat)):
            return batch
        batch[self.column] = label_ids(flat)
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 2 and (any(packed) or len(ids) < len(mappings)):
            lengths = [list(e.get(LENGTHS) or [len(e["input_ids"])]) for e in mappings]
            batch[texts_key(self.column)] = text_numbers(lengths, ids.shape)
        return batch


def missing_column(column: str, known: Sequence[str], left: bool = False) -> UserError:
    """``known`` are the dataset's columns, or what is ``left`` of an example that is collated."""
    has = "its examples come to the collator with" if left else "it has"
    listed = f"{has} {', '.join(known)}" if known else "its examples are no dictionaries"
    return UserError(
        f"group_column {column!r}: the training dataset has no such column ({listed})"
        f"{nearest(column, known)}; every example needs its group there, a text or a whole number"
    )


@dataclass(frozen=True)
class Groups:
    """The groups of one update: ``members`` [n] has every example's group, -1: it is in none.

    Examples are in the order of the update: by micro-batch, then by rank. ``items`` [M] is how many losses (a
    token's or an example's) each group's mean is over, ``labels`` [M] whose label it has.
    """

    members: list[int]
    items: list[int]
    labels: list[int]

    @property
    def count(self) -> int:
        return len(self.items)

    @classmethod
    def of(cls, labels: Sequence[int], items: Sequence[int], size: int) -> Groups:
        """Cut the examples of each label into groups of ``size`` consecutive ones, 0: one group a label.

        Examples without an item have no gradient of their own, and are in no group.

        >>> Groups.of([7, 7, 5, 7, 5], [2, 3, 1, 4, 0], size=2)
        Groups(members=[0, 0, 1, 2, -1], items=[5, 1, 4], labels=[7, 5, 7])
        """
        members: list[int] = []
        sums: list[int] = []
        owners: list[int] = []
        open_: dict[int, tuple[int, int]] = {}  # label: its unfinished group, and the examples in it
        for label, count in zip(labels, items, strict=True):
            if not count:
                members.append(-1)
                continue
            group, filled = open_.get(label, (len(sums), 0))
            if group == len(sums):
                sums.append(0)
                owners.append(label)
            members.append(group)
            sums[group] += count
            if filled + 1 == size:
                open_.pop(label, None)
            else:
                open_[label] = (group, filled + 1)
        return cls(members, sums, owners)


def automatic_size(examples: int, ratio: float) -> int:
    """Examples a group: the paper's 8, fewer where an update would have less than twice ``ratio`` groups.

    ``ratio`` is E/k: up to that many groups each may have experts of its own, and nothing has to align.

    >>> automatic_size(256, 8), automatic_size(64, 8), automatic_size(8, 8)
    (8, 4, 1)
    """
    return max(1, min(GROUP_SIZE, int(examples / (2 * ratio))))
