"""Trackers: off by default, a clear line when the package is missing, numbers forwarded when it is there."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from gar.errors import UserError
from gar.runs.tracking import TRACKERS, Tracker

LINE = {
    "update": 3,
    "loss": 0.5,
    "tasks": {"a": 0.25, "b": float("nan")},
    "note": "text",
    "load": [0.25, 0.75],
}


def test_none_forwards_nothing() -> None:
    tracker = Tracker("none")
    tracker.log(3, LINE)
    tracker.close()


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_names_its_install_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=rf"tracking is {name}, which is not installed; pip install {name}"):
        Tracker(name)


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'wandb'"):
        Tracker("wandbb")


def test_numbers_arrive_under_joined_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through accelerate's trackio tracker, with a stand-in for the package itself."""
    calls: list[tuple[str, Any]] = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((f"log {step}", values)),
        finish=lambda: calls.append(("finish", None)),
    )
    package: Any = types.ModuleType("trackio")

    def init(**options: Any) -> Any:
        calls.append(("init", options))
        return run

    package.init = init
    package.config = types.SimpleNamespace(update=lambda values, **options: calls.append(("config", values)))
    package.__spec__ = importlib.machinery.ModuleSpec("trackio", None)
    monkeypatch.setitem(sys.modules, "trackio", package)
    config = {"seed": 1, "backbone": {"name": "minilm", "trainable": False}}
    tracker = Tracker("trackio", tmp_path / "setting" / "five" / "gar" / "seed-1", config)
    tracker.log(3, LINE)
    tracker.log(4, {"update": 4})
    tracker.close()
    tracker.close()
    assert calls == [
        ("init", {"project": "gar", "name": "setting/five/gar/seed-1"}),
        ("config", {"seed": 1, "backbone.name": "minilm", "backbone.trainable": "False"}),
        ("log 3", {"loss": 0.5, "tasks/a": 0.25, "load/0": 0.25, "load/1": 0.75}),
        ("finish", None),
    ]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_files_are_in_the_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = Tracker("tensorboard", tmp_path, {"seed": 1})
    tracker.log(3, LINE)
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Scalars("tasks/a")[0].value == 0.25
    assert events.Scalars("loss")[0].step == 3
