"""Blocks of updates through the backbone against one by one: on a CPU without graphs, on a GPU with them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from gar.config import Config
from gar.errors import UserError
from gar.features.sources import RawSource, make_sources
from gar.methods import REGISTRY
from gar.training import captured as captured_module
from gar.training import updater as updater_module
from gar.training.captured_backbone import CapturedBackbone
from gar.training.updater import Outcome, TrainingFailure, Updater
from support import tiny_runs
from support.tiny_runs import largest_difference, make_config, same_bits, weights

NAMES = ["mood", "nli"]
CAPTURABLE = (*(name for name, cls in REGISTRY.items() if cls.capturable), "gar+switchaux+loss_free")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
RATE = 2.0**-9  # a power of two: captured steps keep the rate in float32


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
        "backbone__trainable": True,
        "backbone__dtype": "float64",
        "experts__dropout": 0.3,
        "optimizer__learning_rate": RATE,
        "optimizer__warmup": 0.0,
        "optimizer__updates": 12,
        "device": device,
        "max_tokens_per_pass": None,
    } | changes
    return make_config(world, **changes)


def made(config: Config, graphs: bool | None = None) -> tuple[Updater, CapturedBackbone]:
    model, mixture = tiny_runs.load(config, randomized=True)
    model.to(config.device)
    source, _ = make_sources(model, mixture, config.cache)
    updater = Updater(model.train(), source, config, NAMES)
    assert isinstance(source, RawSource)
    return updater, CapturedBackbone(updater, source, config.device == "cuda" if graphs is None else graphs)


def flat(outcomes: list[Outcome]) -> Tensor:
    rows = ([*o.losses, *o.tasks.values(), o.gradient_norm, o.learning_rate] for o in outcomes)
    return torch.tensor(list(itertools.chain(*rows)), dtype=torch.float64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("limit", [None, 150])
@pytest.mark.parametrize("site", ["lora_ffn", "full_ffn", "lora_head"])
@pytest.mark.parametrize("method", CAPTURABLE)
def test_blocks_are_the_updates_one_by_one(
    world: Path, method: str, site: str, limit: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the backbone's dropout and the experts', short last batches, several widths and several passes."""
    if site == "full_ffn" and method.startswith("stgc"):
        pytest.skip("refused")
    monkeypatch.setattr(captured_module, "BLOCK", 5)
    changes = {"method__name": method, "experts__site": site, "max_tokens_per_pass": limit}
    config = config_of(world, device, **changes)
    plain, _ = made(config)
    expected = list(plain.block(0, 12))
    updater, captured = made(config, graphs=device == "cuda" and site != "full_ffn")
    found = [*captured.block(0, 7), *captured.block(7, 12)]
    torch.testing.assert_close(flat(found), flat(expected), rtol=1e-10, atol=1e-10)
    assert largest_difference(weights(updater.model), weights(plain.model)) < 1e-10
    shapes = {captured._shape(updater.schedule.groups(number)) for number in range(12)}
    assert len(shapes) > 1
    assert any(len(shape.passes) > 1 for shape in shapes) == (limit is not None)
    assert captured.graphs == bool(captured._captured) or limit is not None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", ["float32", "float16"])
@pytest.mark.parametrize("limit", [None, 150])
@pytest.mark.parametrize("method", ["gar", "cagrad", "stgc_load"])
def test_a_frozen_prefix_that_is_not_cached(
    world: Path, method: str, limit: int | None, kept: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states are rounded as a cache rounds them; updates of several passes fit a graph too."""
    monkeypatch.setattr(captured_module, "BLOCK", 5)
    config = config_of(
        world,
        device,
        method__name=method,
        max_tokens_per_pass=limit,
        backbone__trainable=False,
        cache={"enabled": False, "dtype": kept},
    )
    plain, _ = made(config)
    expected = list(plain.block(0, 12))
    updater, captured = made(config, graphs=device == "cuda")
    found = list(captured.block(0, 12))
    torch.testing.assert_close(flat(found), flat(expected), rtol=1e-10, atol=1e-10)
    assert largest_difference(weights(updater.model), weights(plain.model)) < 1e-10
    assert captured.graphs == bool(captured._captured)


def test_a_state_that_a_cache_could_not_hold_is_refused(world: Path) -> None:
    """As one update at a time refuses it."""
    config = config_of(
        world,
        optimizer__updates=4,
        backbone__trainable=False,
        cache={"enabled": False, "dtype": "float16"},
    )
    updater, captured = made(config)
    list(captured.block(0, 2))
    with torch.no_grad():
        updater.model.backbone.get_input_embeddings().weight.mul_(torch.inf)
    with pytest.raises(UserError, match="do not fit float16"):
        list(captured.block(2, 4))


def test_masks_are_those_of_the_update(world: Path) -> None:
    """The control: with the next update's stream the losses differ."""
    config = config_of(world, experts__dropout=0.0)
    plain, _ = made(config)
    updater, captured = made(config)
    original = updater.backbone_stream
    updater.backbone_stream = lambda number, first: original(number + 1, first)  # type: ignore[method-assign]
    assert (flat(list(captured.block(0, 2))) - flat(list(plain.block(0, 2)))).abs().max() > 1e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_what_is_not_finite_names_its_update_and_changes_nothing(
    world: Path, broken: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's embedding is NaN, which update ``broken`` is the first to read."""
    config = config_of(world, device, method={"name": "gar", "coefficient": 1.0})
    plain, _ = made(config)
    updater, captured = made(config)
    table = captured._tokens

    def read(number: int) -> set[int]:
        groups = updater.schedule.groups(number)
        rows = table.rows([(group.task, group.examples) for group in groups])
        return {int(row) for row in rows}

    row = min(read(broken) - set().union(*(read(number) for number in range(broken))))
    start = int(table.offsets[row])
    for one in (updater, plain):
        one.model.backbone.resize_token_embeddings(len(updater.model.tokenizer) + 1)
        with torch.no_grad():
            one.model.backbone.get_input_embeddings().weight[-1] = torch.nan
    table.ids[start] = len(updater.model.tokenizer)
    plain, updater_ = (Updater(u.model, u.source, config, NAMES) for u in (plain, updater))
    captured = CapturedBackbone(updater_, captured._source, captured.graphs)
    before = list(plain.block(0, broken))
    outcomes = captured.block(0, 12)
    found = [next(outcomes) for _ in range(broken)]
    torch.testing.assert_close(flat(found), flat(before), rtol=1e-10, atol=1e-10)
    with pytest.raises(TrainingFailure, match=r"the loss of task (mood|nli), group \d is nan") as failure:
        next(outcomes)
    assert failure.value.update == broken + 1
    mine, theirs = (
        {name: w for name, w in weights(u.model).items() if "word_embeddings" not in name}
        for u in (updater_, plain)
    )
    assert largest_difference(mine, theirs) < 1e-10


def test_only_on_a_gpu(world: Path) -> None:
    updater, _ = made(config_of(world))
    assert CapturedBackbone.of(updater) is None


@GPU
@pytest.mark.parametrize("when", ["before", "after", "memory"])
def test_where_a_capture_fails_updates_are_launched(
    world: Path, when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a backbone goes through the host: nothing is lost, and later runs of the process capture.

    Nor does the memory that was taken until then stay with a graph that never was.
    """
    batches = {"mixture__batch_size": 4, "mixture__group_size": 4, "optimizer__updates": 40}
    config = config_of(world, "cuda", method__name="gar", **batches)
    update = CapturedBackbone._update

    def asking(self: CapturedBackbone, shape: Any) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        held = torch.empty(2**28, dtype=torch.uint8, device="cuda") if capturing else None
        if capturing and when == "before":
            self._line.item()
        update(self, shape)
        if capturing and when == "after":
            self._line.item()
        if capturing and when == "memory":
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        del held

    plain, _ = made(config)
    list(plain.block(0, 40))
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    with monkeypatch.context() as patch:
        patch.setattr(CapturedBackbone, "_update", asking)
        updater, captured = made(config)
        list(captured.block(0, 40))
    assert "updates are not captured from here on" in caplog.text
    assert (captured.graphs, captured.captured) == (False, 0)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved + 2**28
    assert same_bits(weights(updater.model), weights(plain.model))
    updater, captured = made(config)
    list(captured.block(0, 40))
    assert captured.captured > 0
    assert same_bits(weights(updater.model), weights(plain.model))


@GPU
@pytest.mark.parametrize(
    ("site", "precision", "graphs"),
    [
        ("lora_ffn", "float32", True),
        ("lora_ffn", "tf32", True),
        ("lora_head", "bfloat16", True),
        ("full_ffn", "bfloat16", True),
        ("full_ffn", "float32", False),
        ("full_ffn", "tf32", False),
    ],
)
def test_graphs_have_the_bits_of_the_same_kernels_launched_singly(
    world: Path, site: str, precision: str, graphs: bool
) -> None:
    """And of one update at a time: with dropout, in every precision."""
    config = config_of(
        world,
        "cuda",
        optimizer__updates=60,
        method={"name": "gar", "coefficient": 1.0},
        backbone__dtype="float32",
        precision=precision,
        experts__site=site,
    )
    found: list[dict[str, Tensor]] = []
    for how in ("graphs", "singly", "updater"):
        updater, _ = made(config)
        captured = CapturedBackbone.of(updater)
        assert captured is not None
        hopper = torch.cuda.get_device_capability()[0] == 9
        assert captured.graphs == (graphs and (hopper or site != "full_ffn"))
        captured.graphs = captured.graphs and how == "graphs"
        list((updater if how == "updater" else captured).block(0, 60))
        found.append(weights(updater.model))
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])
