"""Task and Mixture: labelled text in memory, whatever source it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Split:
    """Examples of one split.

    ``texts`` and, for pair tasks, ``pairs`` are lists of N strings; ``labels`` is int64 [N], indices into
    the task's label names.
    """

    texts: list[str]
    labels: NDArray[np.int64]
    pairs: list[str] | None = None

    def __post_init__(self) -> None:
        n = len(self.texts)
        if len(self.labels) != n or (self.pairs is not None and len(self.pairs) != n):
            raise ValueError("texts, pairs and labels of a split must have one length")

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> Split:
        """The examples at ``indices``, in that order."""
        rows = [int(i) for i in indices]
        pairs = None if self.pairs is None else [self.pairs[i] for i in rows]
        return Split([self.texts[i] for i in rows], self.labels[rows], pairs)

    def fingerprint(self) -> str:
        """A digest of the texts (labels excluded): what a feature cache of this split depends on."""
        digest = hashlib.blake2b(digest_size=16)
        for column in (self.texts, self.pairs or []):
            digest.update(str(len(column)).encode() + b"\0")
            for text in column:
                encoded = text.encode()
                digest.update(str(len(encoded)).encode() + b"\0" + encoded)
        return digest.hexdigest()


@dataclass(frozen=True)
class Task:
    """One classification task with its data.

    ``text`` names the one or two text fields, ``labels`` the label names in index order, ``extra`` the
    task's own metrics beside accuracy (``"f1"``, ``"mcc"``). ``notes`` are remarks of the reader, such as
    dropped rows.
    """

    name: str
    labels: tuple[str, ...]
    train: Split
    validation: Split
    text: tuple[str, ...] = ("text",)
    extra: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Mixture:
    """Tasks trained jointly; ``batch_size`` examples of each per update, in groups of ``group_size``."""

    name: str
    tasks: tuple[Task, ...]
    batch_size: int = 32
    group_size: int = 8
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a mixture needs one or more tasks with distinct names, got {names}")
        if self.batch_size < 1 or self.group_size < 1:
            raise ValueError("batch_size and group_size must be positive")
