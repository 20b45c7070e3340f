"""Finished runs as lines of a CSV file: what stays of a sweep when its directories are gone.

A line has all that tables need of a run, and what tells it from any other: its id, the digests of its
configuration and data, and its seed. Numbers have six significant digits. The evaluations on the way are
lines of a second file beside it, ``NAME.trajectories.csv``.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gar.config import flat
from gar.errors import UserError, path_errors, path_kind
from gar.metrics import METRICS
from gar.runs import Run, State, find_runs, read_run
from gar.runs.files import read_json, write_text
from gar.sweeps.store import RECORD
from gar.sweeps.suite import PlannedRun

Line = dict[str, str]

#: What tells one run from any other.
KEY = ("id", "configuration", "data", "seed")
#: The columns before the metrics.
HEAD = (
    *KEY, "setting", "mixture", "method", "name", "gar", "torch", "device", "updates", "learning_rate",
    "clip", "weight_decay", "hyperparameters", "seconds",
)  # fmt: skip
TRAJECTORY = ("id", "configuration", "data", "seed", "update")
#: Seconds between two writes of the file while runs end.
PACE = 2.0


class Store:
    """The CSV file of finished runs at ``path``, which need not exist yet, and its trajectories."""

    def __init__(self, path: Path) -> None:
        if path.suffix.lower() != ".csv":
            raise UserError(f"{path}: expected a file name that ends in .csv")
        self.path = path
        self.trajectories = path.with_name(f"{path.stem}.trajectories.csv")
        self.lines: dict[tuple[str, ...], Line] = {}
        self._points: dict[tuple[str, ...], list[Line]] = {}
        self._written = 0.0
        self._changed = False
        self.merge(path)
        self._changed = False

    def merge(self, path: Path) -> int:
        """Take over the lines of a file, where they are new; how many were."""
        before = len(self.lines)
        trajectories = path.with_name(f"{path.stem}.trajectories.csv")
        points: dict[tuple[str, ...], list[Line]] = {}
        for line in read_lines(trajectories, TRAJECTORY):
            points.setdefault(_key(line), []).append(line)
        for line in read_lines(path, HEAD):
            if (key := _key(line)) not in self.lines:
                self.lines[key] = line
                self._points[key] = points.get(key, [])
        self._changed |= len(self.lines) > before
        return len(self.lines) - before

    def has(self, run: PlannedRun) -> bool:
        """Whether this run, with this configuration on these data, is there."""
        return self._planned(run) in self.lines

    def seconds(self, run: PlannedRun) -> float:
        """What a stored run took."""
        return float(self.lines[self._planned(run)]["seconds"] or 0)

    def _planned(self, run: PlannedRun) -> tuple[str, ...]:
        combination = run.combination
        return run.id, combination.digest, data_digest(combination.data), str(run.seed)

    def add(self, directory: Path) -> bool:
        """Take over a finished run of a sweep; whether it is new here."""
        run, record = read_run(directory), read_json(directory / RECORD)
        if run.state is not State.FINISHED or record is None:
            return False
        line = line_of(run, record)
        if (key := _key(line)) in self.lines:
            return False
        self.lines[key] = line
        self._points[key] = list(points_of(run, line))
        self._changed = True
        return True

    def save(self, pace: float = 0.0) -> None:
        """Write what is new, unless that was done less than ``pace`` seconds ago."""
        if not self._changed or time.monotonic() - self._written < pace:
            return
        with path_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, _text(self.lines.values(), HEAD))
            if points := [point for key in self.lines for point in self._points[key]]:
                write_text(self.trajectories, _text(points, TRAJECTORY))
        self._written, self._changed = time.monotonic(), False


def collect(sources: Iterable[Path], store: Store) -> int:
    """Take over all finished runs of sweeps below directories, and the lines of files; how many were new."""
    new = 0
    for source in sources:
        if source.suffix.lower() == ".csv":
            if path_kind(source) != "file":
                raise UserError(f"{source}: no such file")
            new += store.merge(source)
        else:
            new += sum(store.add(directory) for directory in find_runs([source]))
    store.save()
    return new


def read_lines(path: Path, columns: Iterable[str]) -> list[Line]:
    """The lines of a stored file that has these columns; none where there is no file."""
    if path_kind(path) == "missing":
        return []
    with path_errors(path):
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
    if rows and (missing := [name for name in columns if name not in rows[0]]):
        raise UserError(f"{path}: has no column {missing[0]}; expected a file of `gar sweep --store`")
    return [{name: value or "" for name, value in row.items() if name is not None} for row in rows]


def line_of(run: Run, record: Mapping[str, Any]) -> Line:
    """A finished run and its sweep.json as a line."""
    config, environment, result = run.config, run.environment, run.result
    optimizer, method = config["optimizer"], config["method"]
    facts: dict[str, Any] = {
        "id": record["id"],
        "configuration": record["configuration"],
        "data": data_digest(record["data"]),
        "seed": record["seed"],
        "setting": record["setting"],
        "mixture": record["mixture"],
        "method": record["method"],
        "name": method["name"],
        "gar": environment.get("gar"),
        "torch": (environment.get("libraries") or {}).get("torch"),
        "device": environment.get("device_name") or environment.get("device"),
        "updates": result.get("updates", optimizer["updates"]),
        **{key: optimizer[key] for key in ("learning_rate", "clip", "weight_decay")},
        "hyperparameters": " ".join(f"{k}={_cell(v)}" for k, v in flat(method).items() if k != "name"),
        "seconds": record["seconds"],
        **_metrics(result),
        **{f"accuracy.{task}": share for task, share in result["accuracy"]["tasks"].items()},
        **{f"extra.{name}": share for name, share in (result["accuracy"].get("extra") or {}).items()},
    }
    return {name: _cell(value) for name, value in facts.items()}


def points_of(run: Run, line: Line) -> Iterator[Line]:
    """The evaluations of a run before its end."""
    for update, sections in run.evaluations[:-1]:
        values = {name: _cell(value) for name, value in _metrics(sections).items()}
        yield {**{name: line[name] for name in KEY}, "update": str(update), **values}


def data_digest(data: Mapping[str, str]) -> str:
    """One short digest of the tasks' digests; empty where they are not known."""
    if not data:
        return ""
    return hashlib.blake2b(json.dumps(sorted(data.items())).encode(), digest_size=8).hexdigest()


def _metrics(sections: Mapping[str, Any]) -> dict[str, float]:
    return {name: metric.read(sections) for name, metric in METRICS.items()}


def _key(line: Line) -> tuple[str, ...]:
    return tuple(line[name] for name in KEY)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:.6g}"
    return "" if value is None else str(value)


def _text(lines: Iterable[Line], first: Iterable[str]) -> str:
    """All lines with the columns of all of them; those that no line fills are left out."""
    lines = list(lines)
    used = dict.fromkeys([*first, *(name for line in lines for name, value in line.items() if value)])
    file = io.StringIO()
    writer = csv.DictWriter(file, list(used), restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()
