"""Texts to token ids, units of texts of one group, and batches of texts of similar length."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from gar.data.texts import GroupedTexts, Text
from gar.errors import UserError

#: As many units at most where no size is asked for: inner products of all of them are kept.
UNITS = 64


@dataclass(frozen=True)
class Encoded:
    """N texts as token ids: ``groups`` int64 [N] index ``names``; ``classes`` are for a classifier."""

    names: tuple[str, ...]
    groups: NDArray[np.int64]
    ids: list[list[int]]
    classes: list[int] | None
    notes: tuple[str, ...]

    def digest(self) -> str:
        """Of everything but the notes."""
        found = hashlib.blake2b(repr(self.names).encode(), digest_size=16)
        for row, group in zip(self.ids, self.groups, strict=True):
            found.update(np.array([group, len(row), *row], "<i8").tobytes())
        found.update(repr(self.classes).encode())
        return found.hexdigest()


@dataclass(frozen=True)
class Unit:
    """Texts of one group, measured together: what is shuffled when labels are."""

    group: int
    texts: tuple[int, ...]


def encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: GroupedTexts,
    *,
    max_length: int,
    vocabulary: int,
    class_of: Callable[[tuple[str, int | None]], int] | None = None,
) -> Encoded:
    """Token ids of all texts, cut after ``max_length``.

    Without ``class_of`` every token but the first is predicted: a text of one token is left out, with a note.
    A group that loses all its texts is refused.
    """
    if max_length < 2:
        raise UserError(f"max_length is {max_length}; expected 2 or more tokens")
    rows = [_ids(tokenizer, text) for text in texts.texts]
    if (largest := max((max(row) for row in rows if row), default=0)) >= vocabulary:
        raise UserError(
            f"the tokenizer gives token {largest}, but the model has {vocabulary}; expected the model's own"
        )
    least = 2 if class_of is None else 1
    kept = [i for i, row in enumerate(rows) if len(row) >= least]
    notes = list(texts.notes)
    if short := len(rows) - len(kept):
        notes.append(f"{short} of {len(rows)} texts left out: shorter than {least} tokens")
    if cut := sum(len(rows[i]) > max_length for i in kept):
        notes.append(f"{cut} of {len(rows)} texts cut after {max_length} tokens")
    groups = texts.groups[kept]
    for t, name in enumerate(texts.names):
        if t not in groups:
            raise UserError(f"group {name!r}: no text of {least} tokens or more; expected some text")
    classes = None
    if class_of is not None:
        if texts.labels is None:
            raise UserError("the loss of a classifier needs labels; expected a column of classes (--label)")
        classes = [class_of(texts.labels[i]) for i in kept]
    return Encoded(texts.names, groups, [rows[i][:max_length] for i in kept], classes, tuple(notes))


def _ids(tokenizer: PreTrainedTokenizerBase, text: Text) -> list[int]:
    if isinstance(text, str):
        found: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return found
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the texts are messages, but the tokenizer has no chat template; expected a column of texts "
            "(--text)"
        )
    try:
        written = tokenizer.apply_chat_template(text, tokenize=False)
    except Exception as error:  # templates raise errors of their own for roles they do not know
        raise UserError(f"the chat template refuses the messages {str(text)[:60]}… ({error})") from None
    # The template writes the special tokens.
    ids: list[int] = tokenizer(written, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def make_units(encoded: Encoded, size: int | None = None, seed: int = 0) -> list[Unit]:
    """Every group's texts, shuffled and dealt evenly to units of ``size`` texts at most.

    Without a size it is the smallest that leaves no more than 64 units of all texts together (but for each
    group's last). Units of a group differ by one text at most.
    """
    if size is not None and size < 1:
        raise UserError(f"group_size is {size}; expected 1 or more texts")
    size = size or -(-len(encoded.ids) // UNITS)
    draw = np.random.default_rng(seed)
    units = []
    for t in range(len(encoded.names)):
        own = draw.permutation(np.flatnonzero(encoded.groups == t))
        units += [Unit(t, tuple(part.tolist())) for part in np.array_split(own, -(-len(own) // size))]
    return units


def batches(lengths: Sequence[int], texts: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """The texts of a unit by length, in batches of ``tokens`` padded tokens at most (one text at least).

    >>> list(batches([3, 1, 2], [0, 1, 2], 4))
    [[1, 2], [0]]
    """
    batch: list[int] = []
    for i in sorted(texts, key=lambda i: (lengths[i], i)):
        if batch and lengths[i] * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
