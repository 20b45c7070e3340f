"""The experts' dropout mask against plain integers, its distribution, and what it does not depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gar.data.batches import Group
from gar.seeds import derive_seed
from gar.training import dropout
from gar.training.dropout import keep_mask, row_words

SEED, UPDATE = 7, 11


def groups_of(*sizes: int) -> list[Group]:
    return [Group(m, 0, np.arange(size), 1.0, 1.0) for m, size in enumerate(sizes)]


def words_of(*sizes: int, number: int = UPDATE, seed: int = SEED) -> Tensor:
    return torch.from_numpy(row_words(groups_of(*sizes), number, seed))


def mixed(x: int) -> int:
    """lowbias32 of a 32-bit integer, from its publication."""
    x &= 0xFFFFFFFF
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def kept(m: int, row: int, units: list[int], feature: int, rate: float) -> bool:
    word = mixed(derive_seed(SEED, "dropout", UPDATE, m) + 0x9E3779B1 * row)
    for unit in units:
        word = mixed(word + 0x85EBCA77 * (unit + 1))
    word = mixed(word + mixed(feature // 2 + 1))
    half = word >> 16 * (feature % 2) & 0xFFFF
    signed = half - 65536 if half >= 32768 else half
    return signed + 32768 >= round(rate * 65536)


@pytest.mark.parametrize("shape", [(5, 7), (5, 3, 6), (5, 3, 2, 7), (5, 1)])
def test_masks_equal_plain_integers(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "BLOCK", 8)
    found = keep_mask(words_of(3, 2), shape, 0.3)
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    for index in np.ndindex(*shape):
        m, row = places[index[0]]
        assert bool(found[index]) == kept(m, row, list(index[1:-1]), index[-1], 0.3)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_every_row_token_and_feature_is_dropped_at_the_rate_and_alone(rate: float) -> None:
    shape = (64, 32, 96)
    dropped = 1 - keep_mask(words_of(*[8] * 8), shape, rate).double()
    variance = rate * (1 - rate)
    for axis, count in enumerate(shape):
        others = [other for other in range(3) if other != axis]
        deviation = (dropped.mean(others) - rate) / (variance * count / dropped.numel()) ** 0.5
        assert float(deviation.abs().max()) < 5
        assert float(deviation.std()) == pytest.approx(1, abs=0.35)
    centred = dropped - rate
    for shift in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2), (1, 1, 1), (8, 0, 0)]:
        product = (centred * centred.roll(shift, (0, 1, 2))).mean() / variance
        assert abs(float(product)) < 5 / dropped.numel() ** 0.5


def test_padding_and_other_groups_do_not_change_a_mask() -> None:
    words, shape = words_of(3, 2, 4), (9, 5, 7)
    mask = keep_mask(words, shape, 0.3)
    assert torch.equal(keep_mask(words, (9, 12, 7), 0.3)[:, :5], mask)
    assert torch.equal(keep_mask(words[3:5], (2, 5, 7), 0.3), mask[3:5])
    assert torch.equal(words_of(3, 2), words[:5])


def test_updates_seeds_and_groups_have_masks_of_their_own() -> None:
    shape = (4, 5, 32)
    masks = [keep_mask(w, shape, 0.5) for w in (words_of(4), words_of(4, number=12), words_of(4, seed=8))]
    masks.append(keep_mask(words_of(4, 4)[4:], shape, 0.5))
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert float((mask == other).double().mean()) == pytest.approx(0.5, abs=0.1)


def test_rate_zero_keeps_everything() -> None:
    assert keep_mask(words_of(4), (4, 5, 6), 0.0).all()
