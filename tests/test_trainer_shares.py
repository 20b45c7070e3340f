"""Ranks with unequal shares of an update, and with empty ones, are one process on the same examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny import relative_error
from support.tiny_training import Gradients, cut, gradients, slow_losses, slow_router_gradient
from support.torchrun import saved_by
from support.trainer_shares import LOSSES, MEANS, ROWS, SHARES, TRAININGS, model, rows_of, training

#: Examples of the first update, where they are not four a rank.
FIRST = {"two examples less": 6, "a micro-batch less": 12}
PLAIN = {"coefficient": 0.0}


ranks = saved_by("trainer_shares.py")


@pytest.mark.parametrize(("name", "loss"), TRAININGS)
def test_unequal_ranks_train_as_one_process(name: str, loss: str, ranks: Any, tmp_path: Path) -> None:
    """Parts of the models are float32, whatever the rest is."""
    first, second = (ranks(f"{name}, {loss}", rank) for rank in (0, 1))
    assert all(torch.equal(first["model"][key], second["model"][key]) for key in first["model"])
    alone = training(tmp_path, name, LOSSES[loss])
    alone.train()
    for key, value in alone.model.state_dict().items():
        assert relative_error(first["model"][key], value) < 1e-6, key
    logs = [log for log in alone.state.log_history if "loss" in log]
    for log, expected in zip(first["logs"], logs, strict=True):
        for key in {"grad_norm", *(key for key in expected if "/" in key)}:
            assert log[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-7), key


def slow(examples: Sequence[dict[str, Any]]) -> Gradients:
    """What all losses and the objective add to the routers' gradients; float64, plain loops."""
    if not any(any(example["input_ids"]) for example in examples):
        return slow_losses(
            [text for text in LOSSES["all"]["router_losses"] if "simbal" in text], examples, model()
        )[1]
    asked = [any(label != -100 for label in example["labels"][1:]) for example in examples]
    numbers = iter(cut([e for e, some in zip(examples, asked, strict=True) if some], 2))
    groups = [next(numbers) if some else -1 for some in asked]
    found = slow_router_gradient(model(), examples, groups, LOSSES["all"])
    more = slow_losses(LOSSES["all"]["router_losses"], examples, model())[1]
    return {key: grad + more[key] for key, grad in found.items()}


@pytest.mark.numerics
@pytest.mark.parametrize("name", [name for name in SHARES if name != "packed"])
def test_one_process_is_the_plain_loops(name: str, tmp_path: Path) -> None:
    """Of unequal micro-batches, of which some may be empty."""
    ours, plain = (gradients(training(tmp_path, name, options)) for options in (LOSSES["all"], PLAIN))
    rows = rows_of(name)
    expected = slow([rows[n] for n in range(FIRST.get(name, 2 * ROWS))])
    for key, grad in ours.items():
        if key in expected:
            assert relative_error(grad - plain[key], expected[key]) < 1e-5
            assert float(expected[key].norm()) > 1e-4
        else:
            assert torch.equal(grad, plain[key])


def test_the_mean_of_a_rank_without_a_loss(ranks: Any) -> None:
    """Its tokens count in the routers' losses, and what was given to it is no group."""
    rows = rows_of("no labels")
    expected = slow([rows[n] for n in range(2 * ROWS)])
    for rank in (0, 1):
        without, found = (ranks(f"means, {loss}", rank) for loss in MEANS)
        for key, value in expected.items():
            assert relative_error(found[key] - without[key], value) < 1e-5
