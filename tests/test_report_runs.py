"""How single run directories are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gar.errors import UserError
from gar.runs.reading import find_runs, read_run
from gar.runs.state import State
from support.made_up_runs import write_run


def test_states_and_reasons(tmp_path: Path) -> None:
    write_run(tmp_path / "deep" / "er", "gar", 1)
    write_run(tmp_path, "gar", 2, state=State.FAILED)
    write_run(tmp_path, "gar", 3, state=State.RUNNING)
    broken = write_run(tmp_path, "gar", 4)
    (broken / "result.json").write_text("{", encoding="utf-8")
    runs = {run.path.name[-1]: run for run in map(read_run, find_runs([tmp_path, tmp_path / "deep"]))}
    assert {seed: run.state for seed, run in runs.items()} == {
        "1": State.FINISHED, "2": State.FAILED, "3": State.UNFINISHED, "4": State.UNREADABLE,
    }  # fmt: skip
    assert "TrainingFailure: update 31" in str(runs["2"].reason)
    assert "at update 30 of 2000" in str(runs["3"].reason)
    assert runs["4"].reason == "result.json: not valid JSON"
    assert runs["3"].last_update == 30


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"accuracy": {"macro": "high", "tasks": {"rte": 0.5}}},
            "accuracy.macro is 'high'",
        ),
        (
            {"accuracy": {"macro": float("nan"), "tasks": {"rte": 0.5}}},
            "accuracy.macro is nan",
        ),
        ({"accuracy": {"macro": 0.5, "tasks": {}}}, "accuracy.tasks is {}"),
        ({"schema": 2}, "2 is newer than this version's 1"),
        ({"seed": "one"}, "seed is 'one'"),
        ({"routing": None}, "routing is None"),
        ({"routing": {"load_variance": "low"}}, "routing.load_variance is 'low', not a finite number"),
        ({"timing": []}, "timing is []"),
    ],
)
def test_wrong_results_are_unreadable(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = write_run(tmp_path, "gar", 1)
    result = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps({**result, **change}))
    run = read_run(path)
    assert run.state == State.UNREADABLE
    assert reason in str(run.reason)


def test_missing_and_broken_configuration(tmp_path: Path) -> None:
    path = write_run(tmp_path, "gar", 1)
    for text, reason in (
        ("a: [", "not valid YAML"),
        ("- 1", "not a mapping"),
        ("method: gar", "method is not a mapping"),
        ("mixture: {tasks: 5}", "mixture.tasks is no list"),
        ("mixture: {tasks: [rte, {train: x.csv}]}", "mixture.tasks is no list"),
        ("seed: one", "seed is no integer"),
    ):
        (path / "config.yaml").write_text(text)
        assert reason in str(read_run(path).reason)
    (path / "config.yaml").unlink()
    assert (read_run(path).state, find_runs([path])) == (State.UNREADABLE, [path])


def test_a_configuration_of_another_version_is_kept_as_it_is(tmp_path: Path) -> None:
    path = write_run(tmp_path, "gar", 1)
    tree = yaml.safe_load((path / "config.yaml").read_text())
    (path / "config.yaml").write_text(yaml.safe_dump({**tree, "from_the_future": 1}))
    run = read_run(path)
    assert run.state == State.FINISHED
    assert run.config["from_the_future"] == 1


def test_paths_that_are_no_runs(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match="no such directory"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="is a file"):
        find_runs([tmp_path / "notes.txt"])
    assert find_runs([tmp_path]) == []
