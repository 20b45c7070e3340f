"""The mixin on two ranks (DDP over gloo) is the mixin in one process on the same examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny import relative_error
from support.tiny_training import cut, examples_of, gradients, make, olmoe, slow_router_gradient
from support.torchrun import saved_by
from support.trainer_ranks import TRAININGS, adapted, training

ranks = saved_by("trainer_ranks.py")


@pytest.mark.parametrize("name", TRAININGS)
def test_two_ranks_train_as_one_process(name: str, ranks: Any, tmp_path: Path) -> None:
    """And they stay the same to the bit. Parts of the models are float32, whatever the rest is."""
    first, second = (ranks(name, rank)["model"] for rank in (0, 1))
    assert all(torch.equal(first[key], second[key]) for key in first)
    alone = training(tmp_path, name, 2)
    alone.train()
    for key, value in alone.model.state_dict().items():
        assert relative_error(first[key], value) < 1e-6, key


def test_adapters_on_two_ranks(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    first, second = (ranks("adapted", rank) for rank in (0, 1))
    assert all(torch.equal(first[key], second[key]) for key in first)
    alone = adapted(tmp_path, 2)
    alone.train()
    for key, value in alone.model.state_dict().items():
        assert relative_error(first[key], value) < 1e-6, key


def test_statistics_are_those_of_all_ranks(ranks: Any, tmp_path: Path) -> None:
    alone = training(tmp_path, "plain", 2)
    alone.train()
    logs = [log for log in alone.state.log_history if "loss" in log]
    for found, expected in zip(ranks("plain", 0)["logs"], logs, strict=True):
        for key, value in found.items():
            assert value == pytest.approx(expected[key], rel=1e-5, abs=1e-7), key


def test_a_second_backward_is_wrong(ranks: Any, tmp_path: Path) -> None:
    """The control: what the naive way gives to the routers, and that this test would notice."""
    alone = gradients(training(tmp_path, "plain", 2))
    errors: dict[str, list[float]] = {"exact": [], "naive": []}
    for name, found in errors.items():
        for rank in (0, 1):
            grads = ranks(name, rank)
            found.extend(relative_error(grads[key], alone[key]) for key in alone if ".gate." in key)
    assert max(errors["exact"]) < 1e-6
    assert min(errors["naive"]) > 0.01


def test_each_ranks_own_mean_is_undone(ranks: Any, tmp_path: Path) -> None:
    """Group gradients are those of the groups' own means, however the trainer weighs ranks."""
    examples = examples_of(make(tmp_path), 8)
    expected = slow_router_gradient(olmoe(), examples, cut(examples, 2), {"coefficient": 2.0})
    for rank in (0, 1):
        without, found = (ranks(f"means-{coefficient}", rank) for coefficient in (0.0, 2.0))
        for key, value in expected.items():
            assert relative_error(found[key] - without[key], value) < 1e-5


def test_a_rank_without_a_group(ranks: Any, tmp_path: Path) -> None:
    found = [ranks("empty", rank) for rank in (0, 1)]
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert all(bool(grad.isfinite().all()) for grad in found[0].values())
