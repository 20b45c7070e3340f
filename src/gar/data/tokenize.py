"""Texts to token ids, kept ragged: one flat vector and offsets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gar.data.task import Split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEPARATOR = "\n"
CHUNK = 4096


@dataclass(frozen=True)
class TokenizedSplit:
    """``ids`` int32 [total], example i at ``offsets[i]:offsets[i+1]``; ``types``: token type ids or None."""

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
        types += [row or [0] for row in encoded_types]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in ids], dtype=np.int64)]).astype(np.int64)
    flat = np.fromiter(chain.from_iterable(ids), np.int32, count=int(offsets[-1]))
    flat_types = np.fromiter(chain.from_iterable(types), np.int8, count=len(flat)) if types else None
    return TokenizedSplit(flat, offsets, flat_types, split.labels)


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], pairs: list[str] | None, max_length: int
) -> tuple[list[list[int]], list[list[int]]]:
    if pairs is not None and not has_pair_form(tokenizer):
        joined = [first + SEPARATOR + second for first, second in zip(texts, pairs, strict=True)]
        rows = tokenizer(joined, verbose=False)["input_ids"]
        return [
            row if len(row) <= max_length else _cut(tokenizer, row, first, second, max_length)
            for row, first, second in zip(rows, texts, pairs, strict=True)
        ], []
    encoding = tokenizer(
        texts,
        pairs,
        truncation="longest_first" if pairs is not None else True,
        max_length=max_length,
        padding=False,
        return_attention_mask=False,
    )
    return encoding["input_ids"], encoding.get("token_type_ids", [])


def _cut(
    tokenizer: PreTrainedTokenizerBase, row: list[int], first: str, second: str, max_length: int
) -> list[int]:
    """A joined pair's ids ``row``, too long, with the longer segment's end cut: both segments stay."""

    def bare(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    whole, a = bare(first + SEPARATOR + second), bare(first)
    # Where the newline has merged into the first text's last token, the second keeps one of its own.
    b = whole[len(a) :] if whole[: len(a)] == a else bare(SEPARATOR + second)
    special = len(row) - len(whole)
    before = next((at for at in range(special + 1) if row[at : at + len(whole)] == whole), special)
    keep_a, keep_b = longest_first(len(a), len(b), max_length - special)
    return row[:before] + a[:keep_a] + b[:keep_b] + row[before + len(whole) :]


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
