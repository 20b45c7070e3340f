"""Several texts in one row: whose token is whose, and packing that keeps every text's group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gar.errors import UserError
from gar.observation import Grouping
from gar.routing import Routing

#: What packing adds: the lengths of a row's texts.
LENGTHS = "seq_lengths"


def texts_key(column: str) -> str:
    """Where a batch of packed texts says whose token is whose, beside its groups in ``column``."""
    return f"{column} of texts"


def text_numbers(lengths: Sequence[Sequence[int]], shape: Sequence[int]) -> Tensor:
    """The text of every token, int64 of a batch's ``shape`` [B, L], -1 for padding.

    ``lengths`` are those of the texts of each example; a collator puts an example into a row, or all of them
    into one.

    >>> text_numbers([[2, 1], [1]], (2, 3)), text_numbers([[2, 1], [1]], (1, 5))
    (tensor([[ 0,  0,  1],
            [ 2, -1, -1]]), tensor([[ 0,  0,  1,  2, -1]]))
    """
    sizes = torch.tensor([length for row in lengths for length in row])
    numbers = torch.arange(len(sizes)).repeat_interleave(sizes)
    if shape[0] != 1:
        rows = numbers.split([sum(row) for row in lengths])
        numbers = pad_sequence(list(rows), batch_first=True, padding_value=-1)
    else:
        numbers = numbers.unsqueeze(0)
    free = shape[1] - numbers.shape[1]
    if len(numbers) != shape[0] or free < 0:
        raise UserError(
            f"a batch of {shape[0]} rows of {shape[1]} tokens was made of {len(lengths)} examples of "
            f"{int(sizes.sum())} tokens; expected a row an example, or one row of all"
        )
    return torch.nn.functional.pad(numbers, (0, free), value=-1)


def by_text(routing: Routing, texts: Grouping | None) -> Routing:
    """Routing of rows [B, L, ...] as one of the texts in them, [n, longest, ...] with a mask."""
    if texts is None:
        return routing
    logits, gates, selected = (
        texts.gather(part.flatten(0, 1)) for part in (routing.logits, routing.gates, routing.selected)
    )
    valid = torch.ones_like(routing.gates[..., 0], dtype=torch.bool) if routing.mask is None else routing.mask
    return Routing(logits, gates, selected, texts.gather(valid.flatten()))


def crosses(labels: Tensor, texts: Tensor) -> bool:
    """Whether a text's first token is asked for from the text before it in the row; both [B, L]."""
    return bool((labels[:, 1:].ne(-100) & texts[:, 1:].ne(texts[:, :-1])).any())


def pack(dataset: Any, length: int, column: str, strategy: str, **options: Any) -> Any:
    """TRL's packing of rows of ``input_ids``, ``labels`` and a group ``column``: there a list, one a text."""
    from trl.data_utils import pack_dataset

    if not isinstance(dataset, Dataset) or strategy != "bfd":
        raise UserError(
            "packing=True keeps groups of whole texts in a dataset with random access alone; expected "
            f"packing_strategy='bfd' and a datasets.Dataset, got {strategy!r} and {type(dataset).__name__}"
        )

    def spread(row: dict[str, Any]) -> dict[str, Any]:
        return {column: [row[column]] * len(row["input_ids"])}

    def gathered(row: dict[str, Any]) -> dict[str, Any]:
        return {column: [row[column][end - 1] for end in accumulate(row[LENGTHS])]}

    tokens = dataset.select_columns(["input_ids", "labels", column]).map(spread, **options)
    return pack_dataset(tokens, length, strategy, options).map(gathered, **options)
