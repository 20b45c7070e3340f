"""One run directory as it is on disk: finished, running, failed, or unreadable with the reason."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from gar.config import build
from gar.errors import UserError

SCHEMA = 1
FINISHED, RUNNING, FAILED, UNREADABLE = "finished", "running", "failed", "unreadable"


@dataclass(frozen=True, eq=False)
class Run:
    """What a run directory holds; sections that could not be read are empty."""

    path: Path
    state: str
    reason: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    environment: Mapping[str, Any] = field(default_factory=dict, repr=False)
    result: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The complete lines of history.jsonl; a last line cut short is passed over."""
        try:
            text = (self.path / "history.jsonl").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        lines = []
        for line in text.splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                break
            if isinstance(value, dict) and isinstance(value.get("update"), int):
                lines.append(value)
        return lines

    @cached_property
    def seen(self) -> list[list[dict[str, Any]]]:
        """Per expert what it sees most, from diagnostics.json; empty where the run has none of this form."""
        diagnosis = _optional_json(self.path / "diagnostics.json")
        experts = diagnosis.get("seen")
        if not isinstance(experts, list) or not all(_is_seen(expert) for expert in experts):
            return []
        return experts

    @property
    def last_update(self) -> int:
        """The last update that the history knows."""
        return max((line["update"] for line in self.history), default=0)

    @property
    def evaluations(self) -> list[tuple[int, Mapping[str, Any]]]:
        """``(update, sections)`` at the trajectory checkpoints and, for a finished run, at the end."""
        points = [
            (line["update"], line["evaluation"])
            for line in self.history
            if _is_sections(line.get("evaluation"))
        ]
        if self.result:
            final = int(self.result.get("updates") or self.last_update)
            points = [(update, sections) for update, sections in points if update < final]
            points.append((final, self.result))
        return points


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """Run directories at or below the given paths, each once, sorted."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            what = "is a file" if path.exists() else "no such directory"
            raise UserError(f"{path}: {what}; expected run directories or a directory that holds some")
        for directory in _search(path):
            found.setdefault(directory.resolve(), directory)
    return sorted(found.values())


def read_run(path: Path) -> Run:
    """Read one run directory. Nothing in it raises: what is broken makes the run unreadable."""
    environment = _optional_json(path / "environment.json")
    try:
        config = _read_config(path / "config.yaml")
    except ValueError as error:
        return Run(path, UNREADABLE, str(error), {}, environment)
    if (path / "result.json").is_file():
        try:
            return Run(path, FINISHED, None, config, environment, _read_result(path / "result.json"))
        except ValueError as error:
            return Run(path, UNREADABLE, str(error), config, environment)
    if (path / "failure.json").is_file():
        failure = _optional_json(path / "failure.json")
        kind, reason = failure.get("error", "failed"), failure.get("reason", "failure.json is not readable")
        return Run(path, FAILED, f"{kind}: {reason}", config, environment)
    run = Run(path, RUNNING, None, config, environment)
    total = (config.get("optimizer") or {}).get("updates")
    where = f"at update {run.last_update}" + (f" of {total}" if total and run.last_update <= total else "")
    return Run(path, RUNNING, f"no result yet, {where}: still running, or stopped", config, environment)


def seen_name(entry: Mapping[str, Any]) -> str:
    """What an entry of ``seen`` is about: a token, a task, or a task's label.

    >>> seen_name({"task": "rte", "label": None}), seen_name({"task": "rte", "label": "entailment"})
    ('rte', 'rte: entailment')
    """
    if "token" in entry:
        return str(entry["token"])
    return str(entry["task"]) if entry["label"] is None else f"{entry['task']}: {entry['label']}"


def _search(path: Path) -> Iterator[Path]:
    for directory, below, files in os.walk(path):
        if _is_run(set(files)):
            below.clear()
            yield Path(directory)
        else:
            below.sort()


def _is_run(files: set[str]) -> bool:
    started = "config.yaml" in files and files & {"environment.json", "history.jsonl"}
    return bool(started or files & {"result.json", "failure.json"})


def _read_config(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config.yaml: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ValueError("config.yaml: not valid YAML") from None
    if not isinstance(tree, dict):
        raise ValueError("config.yaml: not a mapping")
    for section in ("backbone", "experts", "method", "mixture", "optimizer"):
        if not isinstance(tree.get(section, {}), dict):
            raise ValueError(f"config.yaml: {section} is not a mapping")
    try:
        return build(tree).to_dict()  # keys that an older version did not write get their defaults
    except UserError:
        return tree  # of a version that knows other keys; compared as it is


def _read_result(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"result.json: {error.strerror or error}") from None
    except ValueError:
        raise ValueError("result.json: not valid JSON") from None
    if not _is_sections(tree):
        raise ValueError("result.json: lacks accuracy.macro, accuracy.tasks or routing")
    if isinstance(tree.get("schema"), int) and tree["schema"] > SCHEMA:
        raise ValueError(f"result.json: schema {tree['schema']} is newer than this version's {SCHEMA}")
    if not isinstance(tree.get("seed"), int) or not isinstance(tree.get("method"), str):
        raise ValueError("result.json: lacks method or seed")
    if not isinstance(tree.get("timing", {}), dict) or not isinstance(tree.get("updates", 0), int):
        raise ValueError("result.json: timing or updates has another form")
    for key, value in _leaves(tree):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"result.json: {key} is {value}, not a finite number")
    for key in ("load_variance", "utilization", "gradient_mass_purity"):
        if not isinstance(tree["routing"].get(key, 0.0), int | float):
            raise ValueError(f"result.json: routing.{key} is not a number")
    return dict(tree)


def _is_sections(value: Any) -> bool:
    """Whether this holds the sections ``accuracy`` and ``routing`` in their expected form."""
    if not isinstance(value, dict):
        return False
    accuracy, routing = value.get("accuracy"), value.get("routing")
    if not isinstance(accuracy, dict) or not isinstance(routing, dict):
        return False
    tasks = accuracy.get("tasks")
    if not isinstance(tasks, dict) or not tasks or not isinstance(accuracy.get("macro"), int | float):
        return False
    return all(isinstance(share, int | float) for share in tasks.values())


def _is_seen(expert: Any) -> bool:
    """Whether this is a list of tokens, or of tasks and labels, with their lifts."""
    return isinstance(expert, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("lift"), int | float)
        and isinstance(entry.get("token", entry.get("task")), str)
        for entry in expert
    )


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _leaves(child, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for child in value:
            yield from _leaves(child, key)
    else:
        yield key, value


def _optional_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
