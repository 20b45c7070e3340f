"""Task and Mixture: labelled text in memory, whatever source it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gar.errors import UserError, name_problem, one_of, shown, unwritable
from gar.metrics import TASK_METRICS


@dataclass(frozen=True)
class Split:
    """Examples of one split.

    ``texts`` and, for pair tasks, ``pairs`` are lists of N strings; ``labels`` is int64 [N], indices into
    the task's label names; other integers are converted.
    """

    texts: list[str]
    labels: NDArray[np.int64]
    pairs: list[str] | None = None

    def __post_init__(self) -> None:
        labels: NDArray[Any] = np.asarray(self.labels)
        n = len(self.texts)
        if labels.shape != (n,) or (self.pairs is not None and len(self.pairs) != n):
            raise UserError("texts, pairs and labels of a split must have one length")
        if n and labels.dtype.kind not in "iub":
            raise UserError(
                f"labels of a split are {labels.dtype}; expected integers, indices into the label names"
            )
        object.__setattr__(self, "labels", labels.astype(np.int64, copy=False))
        for name in ("texts", "pairs"):
            column = getattr(self, name)
            if column is not None and not isinstance(column, list):
                object.__setattr__(self, name, list(column))

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> Split:
        """The examples at ``indices``, in that order."""
        rows = [int(i) for i in indices]
        pairs = None if self.pairs is None else [self.pairs[i] for i in rows]
        return Split([self.texts[i] for i in rows], self.labels[rows], pairs)


@dataclass(frozen=True)
class Task:
    """One classification task with its data.

    ``text`` names the one or two text fields, ``labels`` the label names in index order, ``extra`` the
    task's own metrics beside accuracy (``"f1"``, ``"mcc"``). ``notes`` are remarks of the reader, such as
    dropped rows. ``cluster`` numbers the group of tasks that it belongs to, from 0, where that is known
    (:func:`gar.data.planted`).
    """

    name: str
    labels: tuple[str, ...]
    train: Split
    validation: Split
    text: tuple[str, ...] = ("text",)
    extra: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)
    cluster: int | None = None

    def check(self) -> None:
        """Refuse names, labels and texts that no model could be trained or measured on.

        Raises :class:`~gar.errors.UserError` for the first problem; examples are counted from 0.
        """
        where = f"task {self.name!r}"
        if (problem := name_problem(self.name)) is not None:
            raise UserError(f"{where}: the name {problem}")
        check_labels(where, self.labels)
        for metric in self.extra:
            if metric not in TASK_METRICS:
                raise one_of(f"{where}: extra", metric, TASK_METRICS)
        if len(self.text) not in (1, 2):
            raise UserError(f"{where}: text names {len(self.text)} fields; expected one, or two for a pair")
        for name, split in (("train", self.train), ("validation", self.validation)):
            self._check_split(f"{where}, {name}", split)

    def _check_split(self, where: str, split: Split) -> None:
        if not len(split):
            raise UserError(f"{where}: has no examples; expected at least one")
        if (split.pairs is not None) != (len(self.text) == 2):
            has, fields = ("no pairs", "two") if split.pairs is None else ("pairs", "one")
            raise UserError(
                f"{where}: has {has}, but text names {fields} ({', '.join(self.text)}); "
                "expected pairs where text=(first, second), and only there"
            )
        outside = np.flatnonzero((split.labels < 0) | (split.labels >= len(self.labels)))
        if len(outside):
            raise UserError(
                f"{where}, example {outside[0]}: label {split.labels[outside[0]]} is no class, as in "
                f"{len(outside)} of {len(split)} examples; expected 0 to {len(self.labels) - 1}, indices of "
                f"{', '.join(self.labels)}"
            )
        for column in (split.texts, split.pairs or ()):
            for i, text in enumerate(column):
                if not isinstance(text, str):
                    raise UserError(f"{where}, example {i}: text is {shown(text)}, expected a string")
                if (problem := text_problem(text)) is not None:
                    raise UserError(f"{where}, example {i}: the text holds {problem}")

    def fingerprint(self) -> str:
        """A digest of the content: texts, pairs and labels of both splits, and the label names."""
        digest = hashlib.blake2b(digest_size=16)
        _add(digest, self.labels)
        for split in (self.train, self.validation):
            for column in (split.texts, split.pairs or ()):
                _add(digest, column)
            digest.update(split.labels.astype("<i8").tobytes())
        return digest.hexdigest()


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
            raise UserError(f"a mixture needs one or more tasks with distinct names, got {names}")
        if self.batch_size < 1 or self.group_size < 1:
            raise UserError("batch_size and group_size must be positive")

    @property
    def clusters(self) -> dict[str, int] | None:
        """The true grouping, ``{task: cluster}``; None where it is not known of every task."""
        found = {task.name: task.cluster for task in self.tasks if task.cluster is not None}
        return found if len(found) == len(self.tasks) else None

    def check(self) -> None:
        """:meth:`Task.check` for every task."""
        if (found := unwritable(self.name)) is not None:
            raise UserError(f"mixture {self.name!r}: the name holds {found}; expected printable characters")
        for task in self.tasks:
            task.check()

    def fingerprint(self) -> str:
        """A digest of the tasks' names and contents, in order; batches and groups have no part in it."""
        digest = hashlib.blake2b(digest_size=16)
        for task in self.tasks:
            _add(digest, (task.name, task.fingerprint()))
        return digest.hexdigest()


def check_labels(where: str, labels: Sequence[str]) -> None:
    """Refuse label names that are not two or more, distinct, not blank, free of control characters."""
    if len(set(labels)) < max(2, len(labels)):
        raise UserError(f"{where}: labels are {list(labels)}; expected two or more, all distinct")
    for label in labels:
        if not isinstance(label, str):
            raise UserError(f"{where}: label name {shown(label)}; expected a string")
        if not label.strip():
            raise UserError(f"{where}: the label name {label!r} is blank; expected a name")
        if (found := unwritable(label)) is not None:
            raise UserError(
                f"{where}: the label name {label!r} holds {found}; expected printable characters on one line"
            )


def text_problem(text: str) -> str | None:
    """A character that tokenizers and files cannot carry, and what to do; None for an ordinary text.

    >>> text_problem("two\\nlines"), text_problem("a\\0b")
    (None, 'a NUL (U+0000) at character 2; remove it, or save a UTF-16 file as UTF-8')
    """
    if (at := text.find("\0")) >= 0:
        return f"a NUL (U+0000) at character {at + 1}; remove it, or save a UTF-16 file as UTF-8"
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"the lone surrogate U+{ord(text[error.start]):04X} at character {error.start + 1}, half of a "
            "UTF-16 pair; write the whole character, or remove it"
        )
    return None


def _add(digest: hashlib.blake2b, texts: Sequence[str]) -> None:
    """Unambiguously: how many texts, and each with its length."""
    digest.update(b"%d\n" % len(texts))
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d\n" % len(encoded) + encoded)
