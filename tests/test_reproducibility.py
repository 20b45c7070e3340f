"""What "the same result" means: the same bits where that is promised, rounding where it is not.

docs/reproducibility.md states what these tests hold to.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gar.config import Config
from gar.data.batches import Updates
from gar.features.sources import make_sources
from gar.runs.environment import computing_threads
from gar.training import train_from_config
from gar.training.updater import Updater, dropout_mask
from support.tiny_backbones import Directories, logits_of, make_model
from support.tiny_runs import load, make_config


@pytest.fixture(scope="module")
def backbones(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return Directories(tmp_path_factory.mktemp("backbones"))


# ---------------------------------------------------------------------- the same bits


def relaid(directory: str, to: Path, shift: int) -> str:
    """A copy of a backbone's directory whose weights lie ``shift`` bytes further into their file."""
    shutil.copytree(directory, to)
    weights = load_file(to / "model.safetensors")
    save_file(weights, to / "model.safetensors", {"format": "pt", "note": "x" * shift})
    return str(to)


@pytest.mark.parametrize("shift", range(0, 64, 8))
def test_where_weights_lie_in_their_file_changes_no_bit(
    backbones: Directories, tmp_path: Path, shift: int
) -> None:
    model = make_model(relaid(backbones["bert"], tmp_path / "bert", shift), dtype="float32")
    assert {tensor.data_ptr() % 64 for tensor in model.parameters()} == {0}
    expected = logits_of(make_model(backbones["bert"], dtype="float32"))
    assert all(torch.equal(a, b) for a, b in zip(logits_of(model), expected, strict=True))


def what_is_left(out: Path) -> dict[str, bytes]:
    """The weights, history and result of a run, as bytes, without the times in it."""
    result = json.loads((out / "result.json").read_text())
    del result["timing"]
    names = ("history.jsonl", "model/model.safetensors")
    return {"result": json.dumps(result).encode(), **{name: (out / name).read_bytes() for name in names}}


TRAIN = """
import json, sys
from pathlib import Path
from gar.config import build
from gar.training import train_from_config
from gar.training.updater import Updater, dropout_mask
for name, tree in json.load(sys.stdin).items():
    train_from_config(build(tree), Path(sys.argv[1]) / name)
"""
PLACES: dict[str, dict[str, Any]] = {
    "cached": {},
    "uncached": {"cache__enabled": False, "method": {"name": "stgc"}},
    "trainable": {"backbone__trainable": True},
    "full_ffn": {"experts__site": "full_ffn"},
    "head": {"experts__site": "lora_head", "method": {"name": "cagrad"}},
}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_has_the_same_bits_in_any_process_and_after_any_other_run(
    world: Path, tmp_path: Path, threads: int
) -> None:
    """Here in one order, in a new process in the other one, where the buffers lie elsewhere."""
    configs = {name: make_config(world, threads=threads, **changes) for name, changes in PLACES.items()}
    numbers = np.random.default_rng(0)
    held = [np.empty(numbers.integers(1, 3000), np.uint8) for _ in range(200)]
    del held[::3]
    for name, config in configs.items():
        train_from_config(config, tmp_path / "here" / name)
    trees = {name: config.to_dict() for name, config in reversed(configs.items())}
    command = [sys.executable, "-c", TRAIN, str(tmp_path / "there")]
    subprocess.run(command, input=json.dumps(trees), check=True, capture_output=True, text=True)
    for name in configs:
        assert what_is_left(tmp_path / "here" / name) == what_is_left(tmp_path / "there" / name), name


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def test_the_order_of_the_data_is_the_same_on_every_machine() -> None:
    updates = Updates(["mood", "nli"], [21, 11], 8, 3, 0)
    drawn = [group.examples.tolist() for number in range(20) for group in updates.groups(number)]
    assert digest(repr(drawn).encode()) == "17629e88e9209bb6"


def test_dropout_is_the_same_on_every_machine(world: Path) -> None:
    model, _ = load(make_config(world, experts__dropout=0.3))
    groups = Updates(["mood", "nli"], [21, 11], 8, 3, 0).groups(3)
    keep = dropout_mask(model.train(), [np.full(21, 9), np.full(11, 17)], groups, 3, 0)
    assert keep is not None
    assert digest(keep.numpy().tobytes()) == "37ea686a15481226"


# ---------------------------------------------------------------------- equal but for rounding

#: Summands of the longest chain of sums behind a gradient of the tiny model: per layer, attention and FFN sum
#: over at most 40 inputs and 24 tokens, forwards and backwards, two layers; then 8 examples of 24 tokens.
SUMMANDS = 2 * 2 * (4 * 32 + 2 * 40 + 2 * 24) + 8 * 24


def first_gradients(config: Config) -> dict[str, Tensor]:
    """Of the first update, from values that leave no gradient zero."""
    model, mixture = load(config, randomized=True)
    source, _ = make_sources(model, mixture, config.cache)
    updater = Updater(model.train(), source, config, [task.name for task in mixture.tasks])
    updater.gradients(updater.schedule.groups(0), 0)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_but_for_rounding(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    """Every gradient agrees to sqrt(n) eps of the largest one, n the summands of a chain of sums.

    n eps is certain; the errors of single sums have both signs and add up like steps to the left and right.
    """
    assert one.keys() == two.keys()
    largest = max(float(grad.abs().max()) for grad in one.values())
    for name, grad in one.items():
        bound = math.sqrt(SUMMANDS) * torch.finfo(grad.dtype).eps * largest
        assert float((grad - two[name]).abs().max()) <= bound, name


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_other_threads_change_one_update_by_rounding_alone(world: Path, dtype: str) -> None:
    config = make_config(world, backbone__dtype=dtype, backbone__trainable=True, cache__enabled=False)
    found = []
    for threads in (1, 2):
        with computing_threads(threads):
            found.append(first_gradients(config))
    assert_equal_but_for_rounding(*found)  # seen: 1.4 eps


@pytest.mark.parametrize("site", ["lora_ffn", "full_ffn", "lora_head"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_cache_changes_one_update_by_rounding_alone(world: Path, dtype: str, site: str) -> None:
    """Its batches of the backbone are others."""
    found = [
        first_gradients(make_config(world, backbone__dtype=dtype, experts__site=site, cache__enabled=enabled))
        for enabled in (True, False)
    ]
    assert_equal_but_for_rounding(*found)
