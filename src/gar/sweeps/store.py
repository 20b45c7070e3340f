"""The run directories of a sweep: their states, what the sweep notes in them, and how one travels.

``DIR/<setting>/<mixture>/<method>/seed-<n>/`` is an ordinary run directory with one file more,
``sweep.json``: which run of the suite it is, a digest of its configuration, and the seconds it took.
``DIR/.sweep/`` holds the planned ids of every suite run there, what is running now, and the sweep's lock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from gar.config import flat
from gar.errors import UserError
from gar.runs.files import read_json, write_json
from gar.runs.names import CHECKPOINTS, CONFIG, ENVIRONMENT, FAILURE, HISTORY, LOG
from gar.sweeps.suite import Run, digest

RECORD, SWEEP = "sweep.json", ".sweep"


def same_configuration(directory: Path, run: Run) -> bool:
    """Whether an existing run directory belongs to the configuration that the suite now gives this run."""
    record = read_json(directory / RECORD)
    if record is not None:
        return record.get("configuration") == run.combination.digest
    stored = _stored_config(directory)  # of a run by `gar train`
    return stored is None or (digest(stored) == run.combination.digest and stored.get("seed") == run.seed)


def first_difference(directory: Path, run: Run) -> str:
    """The first key in which a run directory's configuration is another, for people."""
    before, now = flat(_stored_config(directory) or {}), flat(run.tree())
    for key, value in now.items():
        if before.get(key) != value and key != "seed":
            return f"{key} was {before.get(key)!r} and is {value!r}"
    return "a key was dropped"


def begin(directory: Path, run: Run, retry: bool) -> None:
    """Note that the run starts or goes on. A failed run with another configuration starts from nothing."""
    record = read_json(directory / RECORD) or {}
    if retry:
        if not same_configuration(directory, run):
            record = {}
            for name in (CONFIG, ENVIRONMENT, HISTORY, LOG):
                (directory / name).unlink(missing_ok=True)
            shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)
        (directory / FAILURE).unlink(missing_ok=True)
    combination = run.combination
    directory.mkdir(parents=True, exist_ok=True)
    facts = {
        "schema": 1,
        "id": run.id,
        "setting": combination.setting,
        "mixture": combination.mixture,
        "method": combination.method,
        "seed": run.seed,
        "configuration": combination.digest,
        "attempts": record.get("attempts", 0) + 1,
        "seconds": record.get("seconds", 0.0),
    }
    write_json(directory / RECORD, facts)


def spent(directory: Path, seconds: float) -> None:
    """Add to the time that the run took over all its attempts."""
    if (record := read_json(directory / RECORD)) is not None:
        write_json(directory / RECORD, {**record, "seconds": record.get("seconds", 0.0) + seconds})


# ---------------------------------------------------------------------- the sweep's own files


@contextlib.contextmanager
def planned(out: Path, suite: str) -> Iterator[Any]:
    """A file that takes the ids of the suite's runs, a line each; in place when complete."""
    target = out / SWEEP / f"{suite}.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    working = target.with_suffix(".partial")
    with working.open("w", encoding="utf-8") as file:
        yield file
    os.replace(working, target)


def planned_ids(out: Path) -> list[str]:
    """The ids of all suites run in a directory, each once."""
    if not (out / SWEEP).is_dir():
        raise UserError(f"{out}: no sweep was started here; expected the --out directory of `gar sweep`")
    files = sorted((out / SWEEP).glob("*.txt"))
    return list(
        dict.fromkeys(line for file in files for line in file.read_text(encoding="utf-8").splitlines())
    )


def write_running(out: Path, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """What runs now, for `gar sweep status`."""
    write_json(out / SWEEP / "running.json", {"time": time.time(), "runs": runs})


def running(out: Path, patience: float = 30.0) -> dict[str, dict[str, Any]]:
    """What a sweep said to be running within the last seconds."""
    told = read_json(out / SWEEP / "running.json") or {}
    runs: dict[str, dict[str, Any]] = told.get("runs", {})
    return runs if time.time() - told.get("time", 0.0) < patience else {}


def _stored_config(directory: Path) -> dict[str, Any] | None:
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        tree = yaml.load((directory / CONFIG).read_text(encoding="utf-8"), loader)
    except (OSError, yaml.YAMLError):
        return None
    return tree if isinstance(tree, dict) else None
