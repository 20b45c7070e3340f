"""What "the same result" means: the same bits where that is promised, rounding where it is not.

docs/reproducibility.md states what these tests hold to.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gar.training import train_from_config
from support.tiny_backbones import Directories, logits_of, make_model
from support.tiny_runs import make_config, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


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
for name, tree in json.load(sys.stdin).items():
    train_from_config(build(tree), Path(sys.argv[1]) / name)
"""
PLACES: dict[str, dict[str, Any]] = {
    "cached": {},
    "uncached": {"cache__enabled": False},
    "trainable": {"backbone__trainable": True},
    "full_ffn": {"experts__site": "full_ffn"},
    "head": {"experts__site": "lora_head", "method": {"name": "cagrad"}},
    "stgc": {"method": {"name": "stgc"}},
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
