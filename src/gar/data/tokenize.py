"""Texts to token ids, kept ragged: one flat vector and offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from gar.data.task import Split

SEPARATOR = "\n"
CHUNK = 4096


@dataclass(frozen=True)
class TokenizedSplit:
    """``ids`` int32 [total], example i at ``offsets[i]:offsets[i+1]``; ``types`` are token type ids or None."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    types: NDArray[np.int8] | None
    labels: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per example, [N]."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1


def has_pair_form(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Encoders join two segments with a separator token; decoders have none and get a newline."""
    return tokenizer.sep_token is not None


def tokenize_split(tokenizer: PreTrainedTokenizerBase, split: Split, max_length: int) -> TokenizedSplit:
    """Token ids of a split, the longest segment truncated first to ``max_length`` tokens."""
    ids: list[list[int]] = []
    types: list[list[int]] = []
    for start in range(0, len(split), CHUNK):
        texts = split.texts[start : start + CHUNK]
        pairs = None if split.pairs is None else split.pairs[start : start + CHUNK]
        encoded_ids, encoded_types = _encode(tokenizer, texts, pairs, max_length)
        # A tokenizer without special tokens makes nothing of an empty text; every example needs one token.
        ids += [row or [int(tokenizer.pad_token_id)] for row in encoded_ids]
        types += encoded_types
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in ids], dtype=np.int64)]).astype(np.int64)
    flat = np.fromiter((i for row in ids for i in row), np.int32, count=int(offsets[-1]))
    flat_types = np.fromiter((i for row in types for i in row), np.int8) if types else None
    return TokenizedSplit(flat, offsets, flat_types, split.labels)


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], pairs: list[str] | None, max_length: int
) -> tuple[list[list[int]], list[list[int]]]:
    if pairs is not None and not has_pair_form(tokenizer):
        return [_joined(tokenizer, a, b, max_length) for a, b in zip(texts, pairs, strict=True)], []
    encoding = tokenizer(
        texts,
        pairs,
        truncation="longest_first" if pairs is not None else True,
        max_length=max_length,
        padding=False,
    )
    return encoding["input_ids"], encoding.get("token_type_ids", [])


def _joined(tokenizer: PreTrainedTokenizerBase, first: str, second: str, max_length: int) -> list[int]:
    whole: list[int] = tokenizer(first + SEPARATOR + second)["input_ids"]
    if len(whole) <= max_length:
        return whole
    # Too long: cut the longer segment's end, so that a long first text never pushes the second out.
    a: list[int] = tokenizer(first, add_special_tokens=False)["input_ids"]
    b: list[int] = tokenizer(SEPARATOR + second, add_special_tokens=False)["input_ids"]
    keep_a, keep_b = longest_first(len(a), len(b), max_length - tokenizer.num_special_tokens_to_add())
    built: list[int] = tokenizer.build_inputs_with_special_tokens(a[:keep_a] + b[:keep_b])
    return built


def longest_first(a: int, b: int, budget: int) -> tuple[int, int]:
    """How many tokens of two segments stay when the longer one is always cut first.

    >>> longest_first(100, 20, 60), longest_first(50, 50, 60), longest_first(10, 5, 60)
    ((40, 20), (30, 30), (10, 5))
    """
    if a + b <= budget:
        return a, b
    half = budget // 2
    if min(a, b) <= half:
        return (budget - b, b) if a > b else (a, budget - a)
    return budget - half, half


def pad(rows: Sequence[NDArray[np.generic]], value: int) -> NDArray[np.int64]:
    """Ragged integer rows as one [B, L] array."""
    width = max(len(row) for row in rows)
    padded = np.full((len(rows), width), value, dtype=np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded
