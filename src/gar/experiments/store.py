"""The run directories of a sweep: their states, what the sweep notes in them, and how one travels.

``DIR/<setting>/<mixture>/<method>/seed-<n>/`` is an ordinary run directory with one file more,
``sweep.json``: which run of the suite it is, a digest of its configuration, and the seconds it took.
``DIR/.sweep/`` holds the planned ids of every suite run there, what is running now, and the sweep's lock.
"""

from __future__ import annotations

import contextlib
import enum
import io
import json
import os
import shutil
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from gar.errors import UserError
from gar.experiments.suite import Run, digest

# The names of gar.training.run, whose import takes the model libraries with it: a coordinator stays small.
CONFIG, RESULT, FAILURE, CHECKPOINTS = "config.yaml", "result.json", "failure.json", "checkpoints"
RECORD, SWEEP = "sweep.json", ".sweep"
#: Files of a run directory that travel back from another machine; the model is added on demand.
TRAVELLING = (CONFIG, "environment.json", "history.jsonl", FAILURE, "log.txt", RESULT)


class State(enum.StrEnum):
    """What a run directory says about its run."""

    FINISHED = "finished"
    FAILED = "failed"
    UNFINISHED = "unfinished"
    NEW = "new"


def state(directory: Path) -> State:
    """The state of a run directory, which need not exist."""
    if (directory / RESULT).is_file():
        return State.FINISHED
    if (directory / FAILURE).is_file():
        return State.FAILED
    return State.UNFINISHED if (directory / CONFIG).is_file() else State.NEW


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is none or it was cut short."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Atomically."""
    working = path.with_name(f".{path.name}.partial")
    working.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(working, path)


def same_configuration(directory: Path, run: Run) -> bool:
    """Whether an existing run directory belongs to the configuration that the suite now gives this run."""
    record = read_json(directory / RECORD)
    if record is not None:
        return record.get("configuration") == run.combination.digest
    stored = _stored_config(directory)  # of a run by `gar train`
    return stored is None or (digest(stored) == run.combination.digest and stored.get("seed") == run.seed)


def first_difference(directory: Path, run: Run) -> str:
    """The first key in which a run directory's configuration is another, for people."""
    before, now = _flat(_stored_config(directory) or {}), _flat(run.tree())
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
            for name in (CONFIG, "environment.json", "history.jsonl", "log.txt"):
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


def write_failure(directory: Path, error: str, reason: str) -> None:
    """Record why a run failed, and the checkpoint from which it can go on."""
    directory.mkdir(parents=True, exist_ok=True)
    checkpoints = directory / CHECKPOINTS
    complete = (
        sorted(p.name for p in checkpoints.glob("[0-9]*") if p.is_dir()) if checkpoints.is_dir() else []
    )
    last = f"{CHECKPOINTS}/{complete[-1]}" if complete else None
    write_json(directory / FAILURE, {"error": error, "reason": reason, "checkpoint": last})


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


# ---------------------------------------------------------------------- travelling


def pack(directory: Path, model: bool) -> bytes:
    """A run directory as a zip archive: everything but checkpoints, and the model only when asked for."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in TRAVELLING:
            if (directory / name).is_file():
                archive.write(directory / name, name)
        for path in sorted((directory / "model").rglob("*")) if model else ():
            if path.is_file():
                archive.write(path, path.relative_to(directory).as_posix())
    return content.getvalue()


def unpack(content: bytes, directory: Path) -> None:
    """Write a packed run directory; result.json comes last, as in a run of one's own."""
    directory.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in sorted(archive.namelist(), key=lambda name: name == RESULT):
            parts = PurePosixPath(name).parts
            if name not in TRAVELLING and (parts[0] != "model" or ".." in parts or "\\" in name):
                raise ValueError(f"a returned run holds the unexpected file {name!r}")
            target = directory.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            working = target.with_name(f".{target.name}.partial")
            working.write_bytes(archive.read(name))
            os.replace(working, target)


def _stored_config(directory: Path) -> dict[str, Any] | None:
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        tree = yaml.load((directory / CONFIG).read_text(encoding="utf-8"), loader)
    except (OSError, yaml.YAMLError):
        return None
    return tree if isinstance(tree, dict) else None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
