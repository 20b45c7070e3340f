"""The scripts in benchmarks/ run with the package as it is: a tiny model each."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from gar import config as configuration
from gar.cli.app import run
from gar.data import load_mixture
from support import tiny_runs

FOLDER = Path(__file__).parents[1] / "benchmarks"
CPU = torch.device("cpu")


def script(name: str) -> dict[str, Any]:
    if not FOLDER.is_dir():
        pytest.skip("not a source checkout")
    return runpy.run_path(str(FOLDER / name), run_name="benchmark")


def test_the_script_of_the_presets() -> None:
    tree = {
        "backbone": {"name": "minilm", "max_length": 8},
        "mixture": {"batch_size": 2, "group_size": 2, "tasks": ["rte", "cb"]},
    }
    module = script("presets.py")
    timing, backbone = module["one_update"](configuration.build(tree), CPU, 1, 0, None)
    assert timing.finite
    assert timing.seconds > 0
    again, same = module["one_update"](configuration.build(tree), CPU, 1, 0, backbone)
    assert same is backbone
    assert again.finite


def test_the_script_of_the_methods(tmp_path: Path) -> None:
    config = tiny_runs.make_config(tiny_runs.make_world(tmp_path), experts__count=4)
    mixture = load_mixture(config.mixture)
    short_run = script("methods.py")["short_run"]
    line = short_run(config, mixture, CPU, 2, "lora_ffn", 4, "gar")
    losses, milliseconds, peak = line.split(" | ")
    assert all(float(loss) > 0 for loss in losses.split(" to "))
    assert float(milliseconds) > 0
    assert peak == ""
    assert "expected experts.site lora_ffn or lora_head" in short_run(
        config, mixture, CPU, 2, "full_ffn", 4, "stgc"
    )


def test_the_script_of_the_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"backbone": {"name": "minilm", "max_length": 8}, "mixture": {"batch_size": 2, "group_size": 2}}
    module = script("precision.py")
    base = {**tree, "experts": {"dropout": 0.0}, "method": {"name": "gar", "coefficient": 1.0}}
    cells = [line.split(" | ") for line in module["lines"](configuration.build(base), CPU)]
    assert [cell[0] for cell in cells] == ["float32", "tf32", "bfloat16"]
    assert cells[1][1] == "computes as float32 here"
    errors = [float(cells[n][1].split(" ")[0]) for n in (0, 2)]
    assert 0 < errors[0] < 1e-4 < 1e-3 < errors[1] < 0.2


def test_the_script_of_the_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    module = script("starts.py")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    module["main"](runs=2, updates=2, share=0.001, width=32, device="cpu")
    lines = capsys.readouterr().out.splitlines()
    heads, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in (lines[2], *lines[4:]))
    assert [row[0] for row in rows] == ["0, gar", "1, baseline"]
    for row in rows:
        seconds = dict(zip(heads[1:], map(float, row[1:]), strict=True))
        assert all(value > 0 for part, value in seconds.items() if part != "rest")
        # Nothing is counted twice, or there would be less than nothing left for the rest.
        assert seconds["rest"] > -0.01


def test_bench_names_the_architectures_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "step", "--model", "minilmm"]) == 2
    assert "did you mean 'minilm'" in capsys.readouterr().err
