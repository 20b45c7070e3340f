"""One run directory as it is on disk: finished, running, failed, or unreadable with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from gar.config import build
from gar.errors import UserError, path_kind
from gar.runs.files import read_json
from gar.runs.history import read_lines
from gar.runs.names import CONFIG, DIAGNOSTICS, ENVIRONMENT, FAILURE, HISTORY, INSPECTION, RESULT
from gar.runs.result import check_files, read_result
from gar.runs.state import State, is_locked

#: libyaml's reader, where PyYAML was built with it: ten times as fast.
YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Course(NamedTuple):
    """The last update, the loss of every update, and the evaluations of a history."""

    last: int
    updates: NDArray[np.int64]
    losses: NDArray[np.float64]
    points: list[tuple[int, Mapping[str, Any]]]


@dataclass(frozen=True, eq=False)
class Run:
    """What a run directory holds; sections that could not be read are empty."""

    path: Path
    state: State
    reason: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    environment: Mapping[str, Any] = field(default_factory=dict, repr=False)
    result: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The complete lines of history.jsonl, read anew; a last line cut short is passed over."""
        return read_lines(self.path / HISTORY)

    @cached_property
    def _course(self) -> _Course:
        """What is kept of the history, whose lines take a hundred times the room."""
        updates, losses, points, last = [], [], [], 0
        for line in self.history:
            last = max(last, line["update"])
            loss = line.get("loss")
            if isinstance(loss, int | float) and not isinstance(loss, bool):
                updates.append(line["update"])
                losses.append(loss)
            if _is_sections(line.get("evaluation")):
                points.append((line["update"], line["evaluation"]))
        return _Course(last, np.array(updates, np.int64), np.array(losses, np.float64), points)

    @property
    def losses(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The updates of the history [U], and the mean of the tasks' training losses at each [U]."""
        return self._course.updates, self._course.losses

    @cached_property
    def seen(self) -> list[list[dict[str, Any]]]:
        """Per expert what it sees most, from diagnostics.json; empty where the run has none of this form."""
        diagnosis = read_json(self.path / DIAGNOSTICS) or {}
        experts = diagnosis.get("seen")
        if not isinstance(experts, list) or not all(_is_seen(expert) for expert in experts):
            return []
        return experts

    @property
    def last_update(self) -> int:
        """The last update that the history knows."""
        return self._course.last

    @property
    def evaluations(self) -> list[tuple[int, Mapping[str, Any]]]:
        """``(update, sections)`` at the trajectory checkpoints and, for a finished run, at the end."""
        points = list(self._course.points)
        if self.result:
            final = int(self.result.get("updates") or self.last_update)
            points = [(update, sections) for update, sections in points if update < final]
            points.append((final, self.result))
        return points


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """Run directories at or below the given paths, each once, sorted; hidden folders are passed over."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if (kind := path_kind(path)) != "directory":
            what = "no such directory" if kind == "missing" else f"is a {kind}"
            raise UserError(f"{path}: {what}; expected run directories or a directory that holds some")
        for directory in _search(path):
            found.setdefault(directory.resolve(), directory)
    return sorted(found.values())


def read_run(path: Path) -> Run:
    """Read one run directory. Nothing in it raises: what is broken makes the run unreadable."""
    environment = read_json(path / ENVIRONMENT) or {}
    config: dict[str, Any] = {}
    try:
        config = _read_config(path / CONFIG)
        if (path / RESULT).is_file():
            result = read_result(path)
            check_files(path, CONFIG, ENVIRONMENT, HISTORY, DIAGNOSTICS)
            return Run(path, State.FINISHED, None, config, environment, result.to_dict())
    except ValueError as error:
        return Run(path, State.UNREADABLE, str(error), config, environment)
    if (path / FAILURE).is_file():
        failure = read_json(path / FAILURE) or {}
        kind, reason = failure.get("error", "failed"), failure.get("reason", f"{FAILURE} is not readable")
        return Run(path, State.FAILED, f"{kind}: {reason}", config, environment)
    running = is_locked(path)
    run = Run(path, State.RUNNING if running else State.UNFINISHED, None, config, environment)
    total = (config.get("optimizer") or {}).get("updates")
    where = f"at update {run.last_update}" + (f" of {total}" if total and run.last_update <= total else "")
    return replace(
        run, reason=f"no result yet, {where}" + ("" if running else ": stopped, or on another machine")
    )


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
            below[:] = sorted(name for name in below if not name.startswith("."))


def _is_run(files: set[str]) -> bool:
    started = CONFIG in files and files & {ENVIRONMENT, HISTORY}
    return INSPECTION not in files and bool(started or files & {RESULT, FAILURE})


def _read_config(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), YAML)
    except OSError as error:
        raise ValueError(f"{CONFIG}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ValueError(f"{CONFIG}: not valid YAML") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{CONFIG}: not a mapping")
    for section in ("backbone", "experts", "method", "mixture", "optimizer"):
        if not isinstance(tree.get(section, {}), dict):
            raise ValueError(f"{CONFIG}: {section} is not a mapping")
    tasks = (tree.get("mixture") or {}).get("tasks") or []
    if not isinstance(tasks, list) or not all(isinstance(t, str) or _has_name(t) for t in tasks):
        raise ValueError(f"{CONFIG}: mixture.tasks is no list of names and tasks")
    if not isinstance(tree.get("seed", 0), int):
        raise ValueError(f"{CONFIG}: seed is no integer")
    try:
        return build(tree).to_dict()  # keys that an older version did not write get their defaults
    except UserError:
        return tree  # of a version that knows other keys; compared as it is


def _has_name(task: Any) -> bool:
    return isinstance(task, dict) and isinstance(task.get("name"), str)


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
