"""``gar quickstart``: the packaged comparison, on tiny tasks in this process."""

from __future__ import annotations

import csv
import importlib
import json
from importlib import resources
from pathlib import Path

import pytest

from gar import config as configuration
from gar.cli.app import run
from gar.data import find_task, registry
from gar.methods import REGISTRY
from gar.sweeps.executors import Event, Job
from support import tiny_runs
from support.sweeps import InProcess

FOUND = Path(__file__).parents[1] / "benchmarks" / "results" / "learnable.csv"
#: What a test changes of the packaged settings; all else is as shipped.
SMALL = ("backbone", "mixture", "optimizer.updates", "evaluation.probe_examples", "cache.directory", "device")


class Inline(InProcess):
    """Runs jobs in this process, and says which."""

    started: list[str]

    def work(self, job: Job) -> Event:
        Inline.started.append(job.id)
        return super().work(job)


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(importlib.import_module("gar.comparison.compare"), "LocalExecutor", Inline)
    Inline.started = []
    return Inline.started


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides to tiny tasks and three updates."""
    tree = tiny_runs.tree(tiny_runs.make_world(tmp_path_factory.mktemp("world")), optimizer__updates=3)
    values = configuration.flat(tree)
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if key.startswith(SMALL)]


def packaged() -> configuration.Config:
    with resources.as_file(resources.files("gar.presets") / "quickstart.yaml") as path:
        return configuration.load(path)


def test_three_methods_and_three_seeds(
    small: list[str], started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "quick"
    assert run(["quickstart", *small, "--out", str(out)]) == 0
    names = ("baseline", "switchaux", "gar")
    assert started == [f"quickstart/tiny/{name}/seed-{seed}" for seed in range(3) for name in names]
    stored = configuration.load(out / started[-1] / "config.yaml")
    assert (stored.experts.top_k, stored.threads) == (1, 1)
    printed = capsys.readouterr().out
    assert "not be used in pretraining" in printed
    heads = [line for line in printed.splitlines() if "Baseline" in line and "GAR" in line]
    assert any(line.split() == ["majority", "Baseline", "SwitchAux", "GAR"] for line in heads)
    assert "three seeds" in printed or "without any spread" in printed
    page = printed.split("Page: ")[1].split("\n")[0]
    assert Path(page).read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_it_goes_on_adds_a_method_and_begins_anew(
    small: list[str], started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "quick"
    command = ["quickstart", *small, "--seeds", "0,5", "--out", str(out)]
    assert run(command) == 0
    assert len(started) == 6
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    assert run([*command, "method.name=loadpen"]) == 0
    assert started[6:] == [f"quickstart/tiny/loadpen/seed-{seed}" for seed in (0, 5)]
    capsys.readouterr()
    assert run([*command, "optimizer.updates=2"]) == 2  # other settings: not what is there
    assert "optimizer.updates" in capsys.readouterr().err
    assert len(started) == 8
    assert run([*command, "optimizer.updates=2", "--again"]) == 0
    assert len(started) == 14
    assert not (out / "quickstart" / "tiny" / "loadpen").exists()
    assert (out / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert run(["quickstart", *small, "--out", str(tmp_path), "--again"]) == 2
    assert "holds no comparison" in capsys.readouterr().err
    assert out.exists()


def test_the_packaged_settings_are_what_was_stated() -> None:
    config = packaged()
    assert config.experts.top_k == 1
    assert config.mixture.max_validation_examples is not None
    assert config.mixture.max_validation_examples >= 500
    assert REGISTRY["gar"]().to_config()["coefficient"] == 1e-3
    assert REGISTRY["switchaux"]().to_config()["coefficient"] == 1e-3
    assert config.method == REGISTRY["gar"]()


def test_the_packaged_tasks_are_those_that_the_rule_chose() -> None:
    if not FOUND.is_file():
        pytest.skip("not a source checkout")
    with FOUND.open(encoding="utf-8", newline="") as file:
        rows = {row["folder"]: row for row in csv.DictReader(file)}
    chosen = {row["name"] for row in rows.values() if row["verdict"] == "chosen"}
    assert set(packaged().mixture.tasks) == chosen
    for name in chosen:
        row = rows[str(find_task(name).bigbench)]
        assert float(row["probe"]) - float(row["majority"]) >= 0.05
        assert int(row["validation"]) >= 500
        assert float(row["tokens"]) <= 128
    for task in registry().tasks.values():
        if task.bigbench is not None:
            assert task.skill == rows[task.bigbench]["skill"]
            assert task.name == rows[task.bigbench]["name"]
