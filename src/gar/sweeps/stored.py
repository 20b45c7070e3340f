"""Finished runs as lines of a CSV file: what stays of a sweep when its directories are gone.

A line has all that tables need of a run, and what tells it from any other: its id, which ends with its seed,
and the digests of its configuration and data. Accuracies have six significant digits, metrics five. The
evaluations on the way are lines of a second file beside it, ``NAME.trajectories.csv.gz``, with fewer metrics;
pandas reads it as it is, and where it stands unpacked that is read. The first file may be gzipped as well.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from gar.config import flat
from gar.errors import UserError, path_errors, path_kind
from gar.methods import from_config
from gar.metrics import METRICS
from gar.presets.catalogue import searched
from gar.runs import Run, State, find_runs, read_run
from gar.runs.files import read_json, write_bytes
from gar.sweeps.store import RECORD
from gar.sweeps.suite import Combination, PlannedRun

Line = dict[str, str]

#: What tells one run from any other.
KEY = ("id", "configuration", "data")
#: The columns before the metrics; ``name`` is the registered method, the id has the suite's name for it.
HEAD = (
    *KEY, "name", "gar", "torch", "device", "updates", "learning_rate", "clip", "weight_decay",
    "hyperparameters", "seconds",
)  # fmt: skip
TRAJECTORY = ("id", "configuration", "update")
CHOSEN_KEYS = ("learning_rate", "clip", "weight_decay")
#: Columns that every line has as a number.
NUMBERS = {*CHOSEN_KEYS, "updates", "accuracy"}
#: The metrics kept of an evaluation on the way.
ON_THE_WAY = (
    "accuracy", "load_variance", "nmi", "task_cosine", "observed_cosine", "task_conflict",
    "intra_expert_coherence",
)  # fmt: skip
#: Seconds between two writes of the file while runs end.
PACE = 2.0
#: Digits of a digest that are kept.
DIGITS = 16
#: How a stored file's name ends.
SUFFIXES = (".csv", ".csv.gz")
#: How the name of its trajectories ends, and how it ends unpacked.
POINTS, UNPACKED = ".trajectories.csv.gz", ".trajectories.csv"


class Store:
    """The CSV file of finished runs at ``path``, which need not exist yet, and its trajectories."""

    def __init__(self, path: Path) -> None:
        if not is_store(path):
            raise UserError(f"{path}: expected a file name that ends in .csv or .csv.gz")
        self.path = path
        self.lines: dict[tuple[str, ...], Line] = {}
        self._points: dict[tuple[str, ...], list[Line]] = {}
        self._written = 0.0
        self._changed = False
        self.merge(path)
        self._changed = False

    def merge(self, path: Path) -> int:
        """Take over the lines of a file, where they are new; how many were."""
        before = len(self.lines)
        points: dict[tuple[str, ...], list[Line]] = {}
        for line in read_points(path):
            points.setdefault((line["id"], line["configuration"]), []).append(line)
        for line in read_lines(path, HEAD):
            if (key := _key(line)) not in self.lines:
                self.lines[key] = line
                self._points[key] = points.get(key[:2], [])
        self._changed |= len(self.lines) > before
        return len(self.lines) - before

    def has(self, run: PlannedRun) -> bool:
        """Whether this run, with this configuration on these data, is there."""
        # Where the data are not here, nobody knows whether they are those of the line.
        return bool(run.combination.data) and self._planned(run) in self.lines

    def seconds(self, run: PlannedRun) -> float:
        """What a stored run took."""
        return float(self.lines[self._planned(run)]["seconds"] or 0)

    def _planned(self, run: PlannedRun) -> tuple[str, ...]:
        combination = run.combination
        return run.id, combination.digest[:DIGITS], data_digest(combination.data)

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
            _write(self.path, _text(self.lines.values(), HEAD))
            if points := [point for key in self.lines for point in self._points[key]]:
                _write(_beside(self.path, POINTS), _text(points, TRAJECTORY))
                _beside(self.path, UNPACKED).unlink(missing_ok=True)
        self._written, self._changed = time.monotonic(), False


def collect(sources: Iterable[Path], store: Store) -> int:
    """Take over all finished runs of sweeps below directories, and the lines of files; how many were new."""
    new = 0
    for source in sources:
        if is_store(source):
            if path_kind(source) != "file":
                raise UserError(f"{source}: no such file")
            new += store.merge(source)
        else:
            new += sum(store.add(directory) for directory in find_runs([source]))
    store.save()
    return new


def is_store(path: Path) -> bool:
    """Whether a file is a store by its name; its trajectories are none."""
    name = path.name.lower()
    return name.endswith(SUFFIXES) and not name.endswith((POINTS, UNPACKED))


def read_points(path: Path) -> list[Line]:
    """The evaluations on the way of a store's runs; none where it has no such file."""
    packed = _beside(path, POINTS)
    there = _beside(path, UNPACKED) if path_kind(packed) == "missing" else packed
    return read_lines(there, TRAJECTORY)


def read_lines(path: Path, columns: Iterable[str]) -> list[Line]:
    """The lines of a stored file that has these columns; none where there is no file."""
    if path_kind(path) == "missing":
        return []
    with path_errors(path):
        content = path.read_bytes()
    try:
        text = (gzip.decompress(content) if _packed(path) else content).decode("utf-8")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is damaged ({error}); expected a file of `gar sweep --store`") from None
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    if rows and (missing := [name for name in columns if name not in rows[0]]):
        raise UserError(f"{path}: has no column {missing[0]}; expected a file of `gar sweep --store`")
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise UserError(
                f"{path}, line {number}: is damaged; expected as many columns as the first line has"
            )
        for name in NUMBERS & row.keys():
            try:
                float(row[name])
            except ValueError:
                raise UserError(
                    f"{path}, line {number}: {name} is {row[name]!r}; expected a number"
                ) from None
    return rows


def line_of(run: Run, record: Mapping[str, Any]) -> Line:
    """A finished run and its sweep.json as a line."""
    config, environment, result = run.config, run.environment, run.result
    optimizer, method = config["optimizer"], config["method"]
    facts: dict[str, Any] = {
        "id": record["id"],
        "configuration": record["configuration"][:DIGITS],
        "data": data_digest(record["data"]),
        "name": method["name"],
        "gar": environment.get("gar"),
        "torch": (environment.get("libraries") or {}).get("torch"),
        "device": environment.get("device_name") or environment.get("device"),
        "updates": result.get("updates", optimizer["updates"]),
        **{key: repr(optimizer[key]) for key in CHOSEN_KEYS},
        "hyperparameters": " ".join(f"{key}={value}" for key, value in _own(method).items()),
        "seconds": record["seconds"],
        **_metrics(result),
        "accuracy": f"{result['accuracy']['macro']:.6g}",
        **{f"accuracy.{task}": f"{share:.6g}" for task, share in result["accuracy"]["tasks"].items()},
        **{f"extra.{name}": share for name, share in (result["accuracy"].get("extra") or {}).items()},
    }
    return {name: _cell(value) for name, value in facts.items()}


def follows(line: Mapping[str, str], combination: Combination) -> bool:
    """Whether a line's run is the combination's but for its hyper-parameters, by its digest."""
    changes: dict[str, Any] = {f"optimizer.{key}": float(line[key]) for key in CHOSEN_KEYS}
    for word in line["hyperparameters"].split():
        key, _, value = word.partition("=")
        changes[f"method.{key}"] = yaml.safe_load(value)
    try:
        same = replace(combination, changes={**combination.changes, **changes}).digest
    except UserError:
        return False
    return same[:DIGITS] == line["configuration"]


def points_of(run: Run, line: Line) -> Iterator[Line]:
    """The evaluations of a run before its end."""
    for update, sections in run.evaluations[:-1]:
        values = {name: _cell(METRICS[name].read(sections), digits=4) for name in ON_THE_WAY}
        yield {"id": line["id"], "configuration": line["configuration"], "update": str(update), **values}


def data_digest(data: Mapping[str, str]) -> str:
    """One short digest of the tasks' digests; empty where they are not known."""
    if not data:
        return ""
    return hashlib.blake2b(json.dumps(sorted(data.items())).encode(), digest_size=DIGITS // 2).hexdigest()


def _metrics(sections: Mapping[str, Any]) -> dict[str, float]:
    return {name: m.read(sections) for name, m in METRICS.items() if m.path[0] != "timing"}


def _own(method: Mapping[str, Any]) -> dict[str, Any]:
    """The method's searched keys, and those that are not its defaults."""
    given = flat({key: value for key, value in method.items() if key != "name"})
    usual = flat(from_config(method["name"]).to_config())
    own = {key.removeprefix("method.") for key in searched(method["name"])}
    return {key: value for key, value in given.items() if key in own or value != usual.get(key)}


def _key(line: Line) -> tuple[str, ...]:
    return tuple(line[name] for name in KEY)


def _cell(value: Any, digits: int = 5) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:.{digits}g}"
    return "" if value is None else str(value)


def _packed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _beside(path: Path, suffix: str) -> Path:
    """The file that goes with a store and ends like this."""
    end = next(end for end in reversed(SUFFIXES) if path.name.lower().endswith(end))
    return path.with_name(path.name[: -len(end)] + suffix)


def _write(path: Path, text: str) -> None:
    """Atomically, packed where the name says so; the same text is the same bytes at any time."""
    content = text.encode("utf-8")
    write_bytes(path, gzip.compress(content, mtime=0) if _packed(path) else content)


def _text(lines: Iterable[Line], first: Iterable[str]) -> str:
    """All lines with the columns of all of them; those that no line fills are left out."""
    lines = list(lines)
    used = dict.fromkeys([*first, *(name for line in lines for name, value in line.items() if value)])
    file = io.StringIO()
    writer = csv.DictWriter(file, list(used), restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()
