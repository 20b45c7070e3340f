"""The experts' dropout mask, as a function of counters: seed, update, group, row, token, feature.

Nothing is drawn from a generator, so a mask depends neither on padding nor on passes, threads or device, and
it can be computed anywhere, also inside a captured CUDA graph. Integers of 32 bits, which wrap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gar.data.batches import Group
from gar.seeds import derive_seed

# Chris Wellons' "lowbias32" (2018): a one-to-one function of 32 bits in which every bit depends on all.
SHIFTS = (16, 15, 16)
FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))
#: Words at a time on a CPU, which stay in its caches.
BLOCK = 1 << 16
#: Odd numbers that set apart the counters of a sum.
ROW, TOKEN = 0x9E3779B1, 0x85EBCA77 - (1 << 32)


def row_words(groups: Sequence[Group], number: int, seed: int) -> NDArray[np.int32]:
    """One word for every row of some groups of update ``number``, in order, int32 [B]."""
    words = [
        derive_seed(seed, "dropout", number, group.number) + ROW * np.arange(len(group)) for group in groups
    ]
    return np.concatenate(words).astype(np.uint32).view(np.int32)


def keep_mask(words: Tensor, shape: Sequence[int], rate: float) -> Tensor:
    """What to keep, bool of ``shape`` [B, L, (E,) d] or [B, (E,) d], from the rows' words int32 [B].

    Every element is False with probability ``rate`` (to 1 in 65,536). ``shape[1:-1]`` are counters too, of
    which a longer one only adds to the mask: padding does not change it.
    """
    *units, features = shape
    word = _mix(words)
    for count in units[1:]:
        word = _mix(word.unsqueeze(-1) + TOKEN * _count(count, words.device))
    # A word of 32 bits serves two features.
    columns = _mix(_count((features + 1) // 2, words.device))
    threshold = round(rate * (1 << 16)) - (1 << 15)
    rows = BLOCK // (word[0].numel() * len(columns)) + 1 if words.device.type == "cpu" else len(word)
    blocks = (_mix(part.unsqueeze(-1) + columns).view(torch.int16) for part in word.split(rows))
    return torch.cat([(halves >= threshold)[..., :features] for halves in blocks])


def _count(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.int32, device=device)


def _mix(word: Tensor) -> Tensor:
    word = word ^ _shifted(word, SHIFTS[0])
    for factor, shift in zip(FACTORS, SHIFTS[1:], strict=True):
        word.mul_(factor).bitwise_xor_(_shifted(word, shift))
    return word


def _shifted(word: Tensor, by: int) -> Tensor:
    return (word >> by).bitwise_and_((1 << 32 - by) - 1)  # ``>>`` fills up with the sign
