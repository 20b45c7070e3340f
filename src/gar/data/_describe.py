"""What a mixture holds: rows, label counts, token lengths, truncation and overlap of the splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gar.data.task import Mixture, Split, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_LIMIT = 2**31 - 1  # tokens


@dataclass(frozen=True)
class SplitReport:
    rows: int
    labels: dict[str, int]
    tokens_mean: float
    tokens_p95: float
    tokens_max: int
    truncated: int


@dataclass(frozen=True)
class TaskReport:
    """``overlap`` counts the validation rows whose input stands in the training split too."""

    name: str
    train: SplitReport
    validation: SplitReport
    overlap: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe_mixture(
    mixture: Mixture, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Iterator[TaskReport]:
    """One report a task, each as soon as it is done."""
    for task in mixture.tasks:
        train, validation = (
            _describe(task, split, tokenizer, max_length) for split in (task.train, task.validation)
        )
        yield TaskReport(task.name, train, validation, overlap(task))


def encode_lengths(tokenizer: PreTrainedTokenizerBase, split: Split) -> NDArray[np.int64]:
    """Tokens of each example [N], special tokens included, before any truncation."""
    from gar.data.tokenize import tokenize_split  # transformers is slow to import

    return tokenize_split(tokenizer, split, NO_LIMIT).lengths


def overlap(task: Task) -> int:
    """Validation rows whose text (both texts, for a pair) also stands in the training split."""
    known = set(_inputs(task.train))
    return sum(text in known for text in _inputs(task.validation))


def label_counts(task: Task, split: Split) -> dict[str, int]:
    """Rows of each label, in index order."""
    counts = np.bincount(split.labels, minlength=len(task.labels))
    return {name: int(count) for name, count in zip(task.labels, counts, strict=True)}


def majority_shares(mixture: Mixture) -> dict[str, float]:
    """Per task, the accuracy of always answering the most frequent validation label."""
    return {
        task.name: float(np.bincount(task.validation.labels).max() / len(task.validation))
        for task in mixture.tasks
    }


def _describe(task: Task, split: Split, tokenizer: PreTrainedTokenizerBase, max_length: int) -> SplitReport:
    lengths = encode_lengths(tokenizer, split)
    return SplitReport(
        rows=len(split),
        labels=label_counts(task, split),
        tokens_mean=round(float(lengths.mean()), 1),
        tokens_p95=round(float(np.percentile(lengths, 95)), 1),
        tokens_max=int(lengths.max()),
        truncated=int((lengths > max_length).sum()),
    )


def _inputs(split: Split) -> Iterator[tuple[str, ...]]:
    columns = (split.texts,) if split.pairs is None else (split.texts, split.pairs)
    return zip(*columns, strict=True)
