"""The mixin on two ranks under FSDP2 (over gloo) is the mixin in one process on the same examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support import trainer_shares
from support.tiny import relative_error
from support.torchrun import on_ranks, saved_by
from support.trainer_fsdp import ADAPTERS, SHARES, TRAININGS, adapted, added, training
from support.trainer_hsdp import NAMES, sizes

ranks = saved_by("trainer_fsdp.py")


def compare(found: dict[str, Any], alone: Any) -> None:
    """Weights, and what was logged, of a training on ranks and of one in a single process."""
    for key, value in alone.model.state_dict().items():
        assert relative_error(found["model"][key], value) < 1e-6, key
    logs = [log for log in alone.state.log_history if "loss" in log]
    for log, expected in zip(found["logs"], logs, strict=True):
        for key in {"grad_norm", *(key for key in expected if "/" in key)}:
            assert log[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-7), key


@pytest.mark.parametrize("name", TRAININGS)
def test_sharded_ranks_train_as_one_process(name: str, ranks: Any, tmp_path: Path) -> None:
    """Parts of the models are float32, whatever the rest is. The norm that was clipped is the same, too."""
    alone = training(tmp_path, name)
    alone.train()
    for rank in (0, 1):
        compare(ranks(name, rank), alone)


@pytest.mark.parametrize("name", SHARES)
def test_unequal_shares_of_sharded_ranks(name: str, ranks: Any, tmp_path: Path) -> None:
    alone = trainer_shares.training(tmp_path, name, trainer_shares.LOSSES["all"])
    alone.train()
    for rank in (0, 1):
        compare(ranks(name, rank), alone)


def test_ranks_of_unequal_micro_batches_are_told_not_left_waiting(ranks: Any) -> None:
    """FSDP gathers weights from all ranks in each micro-batch; the second rank has one less."""
    for rank in (0, 1):
        assert "ranks have 2, 1 micro-batches in an update" in ranks("refused", rank)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_on_sharded_ranks(name: str, ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    alone = adapted(tmp_path, name)
    alone.train()
    for rank in (0, 1):
        compare(ranks(name, rank), alone)


def test_without_the_objective_a_sharded_training_is_the_plain_one_to_the_bit(ranks: Any) -> None:
    ours, plain = (ranks(name, 0)["model"] for name in ("without the objective", "without gar"))
    assert all(torch.equal(ours[key], value) for key, value in plain.items())


def test_a_resumed_sharded_training_is_the_uninterrupted_one(ranks: Any) -> None:
    resumed, uninterrupted = (ranks(name, 1)["model"] for name in ("resumed", "plain"))
    assert all(torch.equal(resumed[key], value) for key, value in uninterrupted.items())


def test_in_bfloat16_it_is_the_float32_gradient_up_to_bfloat16(ranks: Any, tmp_path: Path) -> None:
    """FSDP casts weights, in the place of autocast; the router is called as the forward called it."""
    exact = added(tmp_path)
    for key, value in exact.items():
        assert relative_error(ranks("bf16", 0)[key], value) < 0.1
        assert torch.equal(ranks("bf16", 0)[key], ranks("bf16", 1)[key])


@pytest.mark.slow
def test_two_copies_of_two_shards_train_as_one_process(tmp_path: Path) -> None:
    """HSDP, on four ranks."""
    (tmp_path / "ranks").mkdir()
    ranks = on_ranks(4, "trainer_hsdp.py", tmp_path / "ranks")
    for name in NAMES:
        alone = training(tmp_path / name, name, **sizes(name))
        alone.train()
        for rank in range(4):
            compare(ranks(name, rank), alone)
