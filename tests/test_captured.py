"""Captured updates against uncaptured ones: on a CPU the same steps without graphs, on a GPU with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from gar.config import Config
from gar.features.sources import CachedSource, Table, make_sources
from gar.methods import REGISTRY, Method, MethodState, Update, from_config
from gar.nn import expert_banks
from gar.training import captured as module
from gar.training import checkpoint
from gar.training import updater as updater_module
from gar.training.captured import CapturedUpdates
from gar.training.loop import blocks
from gar.training.updater import Outcome, TrainingFailure, Updater
from support import tiny_runs
from support.tiny_runs import largest_difference, make_config, same_bits, weights

NAMES = ["mood", "nli"]
CAPTURABLE = (*(name for name, cls in REGISTRY.items() if cls.capturable), "gar+switchaux+loss_free")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
#: A power of two: the captured step keeps the rate in float32.
RATE = 2.0**-7


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW as on a GPU, where it can be told on the device to change nothing."""
    original = updater_module.make_optimizer

    def fused(*args: Any) -> AdamW:
        optimizer = original(*args)
        for group in optimizer.param_groups:
            group.update(fused=True, foreach=False)
        return optimizer

    monkeypatch.setattr(updater_module, "make_optimizer", fused)


def config_of(world: Path, device: str = "cpu", **changes: Any) -> Config:
    changes = {
        "backbone__dtype": "float64",
        "experts__dropout": 0.3,
        "optimizer__learning_rate": RATE,
        "optimizer__warmup": 0.0,
        "optimizer__updates": 12,
        "device": device,
    } | changes
    return make_config(world, **changes)


def made(config: Config) -> tuple[Updater, CapturedUpdates]:
    model, mixture = tiny_runs.load(config, randomized=True)
    model.to(config.device)
    source, _ = make_sources(model, mixture, config.cache)
    updater = Updater(model.train(), source, config, NAMES)
    assert isinstance(source, CachedSource)
    table = source.table or Table.of(source._features, source.labels, model.device)
    return updater, CapturedUpdates(updater, table, graphs=config.device == "cuda")


def close(found: list[Outcome], expected: list[Outcome], tolerance: float = 1e-10) -> bool:
    assert [len(outcome.losses) for outcome in found] == [len(outcome.losses) for outcome in expected]
    pairs = [
        (value, other)
        for mine, theirs in zip(found, expected, strict=True)
        for value, other in zip(
            [*mine.losses, *mine.tasks.values(), mine.gradient_norm, mine.learning_rate],
            [*theirs.losses, *theirs.tasks.values(), theirs.gradient_norm, theirs.learning_rate],
            strict=True,
        )
    ]
    return all(abs(value - other) <= tolerance * max(1, abs(other)) for value, other in pairs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("site", ["lora_ffn", "lora_head"])
@pytest.mark.parametrize("method", CAPTURABLE)
def test_captured_updates_are_the_uncaptured_ones(
    world: Path, method: str, site: str, top_k: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, short last batches, short groups and texts of several widths."""
    monkeypatch.setattr(module, "BLOCK", 5)
    config = config_of(world, device, method__name=method, experts__site=site, experts__top_k=top_k)
    plain, _ = made(config)
    expected = list(plain.block(0, 12))
    updater, captured = made(config)
    found = [*captured.block(0, 7), *captured.block(7, 12)]
    assert close(found, expected)
    assert largest_difference(weights(updater.model), weights(plain.model)) < 1e-10
    shapes = {captured._shape(updater.schedule.groups(number)) for number in range(12)}
    assert len(shapes) > 1, "more than one shape occurs"
    assert len({len(outcome.losses) for outcome in expected}) > 1, "and more than one number of groups"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("site", ["lora_ffn", "lora_head"])
@pytest.mark.parametrize("gradients", ["unit", "task_scale"])
def test_the_options_of_gar_captured(
    world: Path, gradients: str, site: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that pad a group add nothing to its softmax; the coefficient rises inside and between blocks."""
    monkeypatch.setattr(module, "BLOCK", 5)
    method = {"name": "gar", "gradients": gradients, "probabilities": "softmax", "coefficient": 0.5}
    method["self_pairs"] = gradients == "unit"
    found = []
    for warmup in (8, 0):
        config = config_of(world, device, method={**method, "warmup": warmup}, experts__site=site)
        plain, _ = made(config)
        expected = list(plain.block(0, 12))
        updater, captured = made(config)
        assert close([*captured.block(0, 7), *captured.block(7, 12)], expected)
        assert largest_difference(weights(updater.model), weights(plain.model)) < 1e-10
        found.append(weights(updater.model))
    assert largest_difference(*found) > 1e-6, "the warm-up shows"


def test_dropout_masks_are_those_of_the_uncaptured_step(world: Path) -> None:
    """The control: with another seed of the words the losses differ."""
    config = config_of(world, experts__dropout=0.5)
    plain, _ = made(config)
    updater, captured = made(config)
    expected = list(plain.block(0, 3))
    assert close(list(captured.block(0, 3)), expected)
    updater, captured = made(config)
    updater.seed += 1
    assert not close(list(captured.block(0, 3)), expected, 1e-6)


def poison(updater: Updater, captured: CapturedUpdates, number: int) -> None:
    """Features of an example of mood that update ``number`` is the first to take are NaN, in both layouts."""
    drawn = [{int(i) for i in updater.schedule.groups(u)[0].examples} for u in range(number + 1)]
    example = min(drawn[number] - set().union(*drawn[:number]))
    source = updater.source
    assert isinstance(source, CachedSource)
    for features in (captured.table.features, source._features[0]):
        assert features.x is not None
        features.x[int(features.offsets[example]) : int(features.offsets[example + 1])] = torch.nan


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_what_is_not_finite_names_its_update_and_changes_nothing(
    world: Path, broken: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", 2)
    config = config_of(world, device, method={"name": "gar", "coefficient": 1.0})
    plain, _ = made(config)
    before = list(plain.block(0, broken))
    updater, captured = made(config)
    poison(updater, captured, broken)
    outcomes = captured.block(0, 12)
    assert close([next(outcomes) for _ in range(broken)], before)
    with pytest.raises(TrainingFailure, match=r"the loss of task mood, group 0 is nan") as failure:
        next(outcomes)
    assert failure.value.update == broken + 1
    assert largest_difference(weights(updater.model), weights(plain.model)) < 1e-10


class Counting(Method):
    """A toy of a method with state: counts the updates and moves a selection bias."""

    name: ClassVar[str] = "counting"
    capturable: ClassVar[bool] = True

    @property
    def observes(self) -> frozenset[str]:
        return frozenset({"routing"})

    def initial_state(self, model: nn.Module) -> MethodState:
        bias = expert_banks(model)[0].router.add_selection_bias()
        return {"updates": bias.new_zeros(())}

    def after_step(self, update: Update) -> None:
        update.state["updates"].add_(1)
        for site in update.sites:
            site.bank.router.add_selection_bias().sub_(0.01 * site.selections().sum(0).sign())


@pytest.mark.parametrize("device", DEVICES)
def test_a_methods_state_is_that_of_the_last_good_update(world: Path, device: str) -> None:
    plain, _ = made(config_of(world, device, method=Counting()))
    list(plain.block(0, 2))
    updater, captured = made(config_of(world, device, method=Counting()))
    poison(updater, captured, 2)
    with pytest.raises(TrainingFailure, match="update 3"):
        list(captured.block(0, 12))
    assert float(updater.state["updates"]) == 2
    assert largest_difference(weights(updater.model), weights(plain.model)) < 1e-10


def test_only_what_can_be_captured_is(world: Path) -> None:
    updater, _ = made(config_of(world))
    assert CapturedUpdates.of(updater) is None, "there is no CUDA device here"
    assert not Method.capturable
    assert from_config("gar").capturable
    assert not REGISTRY["torchjd"].capturable


def test_blocks_end_wherever_something_is_due() -> None:
    assert list(blocks(0, 7, 1)) == [(i, i + 1) for i in range(7)]
    assert list(blocks(60, 200, 64, 100, 0)) == [(60, 100), (100, 164), (164, 200)]
    assert list(blocks(5, 5, 64)) == []


def test_updates_may_go_on_behind_the_last_one(world: Path) -> None:
    """As a benchmark's do, whose stretches do not end where a run's budget does."""
    config = config_of(world, optimizer__updates=4)
    (plain, _), (_, captured) = made(config), made(config)
    found = [outcome for start in (0, 3, 6) for outcome in captured.block(start, start + 3)]
    assert close(found, list(plain.block(0, 9)))


@GPU
def test_graphs_have_the_bits_of_the_same_kernels_launched_singly(world: Path) -> None:
    config = config_of(world, "cuda", optimizer__updates=200, method={"name": "gar", "coefficient": 1.0})
    found: list[dict[str, Tensor]] = []
    for graphs in (True, False):
        updater, captured = made(config)
        captured.graphs = graphs
        list(captured.block(0, 200))
        assert bool(captured._captured) == graphs
        found.append(weights(updater.model))
    assert same_bits(*found)


@GPU
@pytest.mark.parametrize("stop", [50, 130])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(world: Path, tmp_path: Path, stop: int) -> None:
    """Blocks and the first use of every shape fall elsewhere in it."""
    config = config_of(world, "cuda", optimizer__updates=200, method=Counting(), backbone__dtype="float32")
    _, whole = made(config)
    expected = list(whole.block(0, 200))
    updater, captured = made(config)
    list(captured.block(0, stop))
    kept = checkpoint.save(tmp_path, stop, updater.model, updater.optimizer, {}, 1, updater.state)
    assert kept.name == f"{stop:08d}"
    updater, captured = made(config)
    loaded = checkpoint.load(tmp_path, updater.model, updater.optimizer, print, updater.state)
    assert loaded is not None
    assert list(captured.block(stop, 200)) == expected[stop:]
    assert same_bits(weights(updater.model), weights(whole.updater.model))


@GPU
def test_float32_updates_are_the_uncaptured_ones_to_rounding(world: Path) -> None:
    config = config_of(world, "cuda", backbone__dtype="float32", method={"name": "gar", "coefficient": 1.0})
    plain, _ = made(config)
    _, captured = made(config)
    assert close(list(captured.block(0, 1)), list(plain.block(0, 1)), 1e-5)
