"""What a sweep notes about its runs, and its own files.

``DIR/<setting>/<mixture>/<method>/seed-<n>/`` is an ordinary run directory with one file more,
``sweep.json``: which run of the suite it is, digests of its configuration and its data, the number of its
starts and the seconds they took. ``DIR/.sweep/`` holds the planned ids of every suite run there, what is
running now, and the sweep's lock.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gar.config import digest
from gar.errors import UserError
from gar.runs.directory import first_difference, stored_config, write_failure
from gar.runs.files import read_json, write_json, write_text
from gar.runs.names import CHECKPOINTS, CONFIG, ENVIRONMENT, FAILURE, HISTORY, LOCK, LOG
from gar.runs.state import is_locked
from gar.sweeps.suite import PlannedRun

RECORD, SWEEP = "sweep.json", ".sweep"
#: Of sweep.json. Digests of another schema mean something else; the run's configuration is compared then.
SCHEMA = 3


def difference(directory: Path, run: PlannedRun) -> str | None:
    """In what an existing run directory computes something else than the suite now asks for, for people."""
    record, stored = read_json(directory / RECORD) or {}, None
    if record.get("schema") == SCHEMA:
        same = record["configuration"] == run.combination.digest
    else:  # of an older version, or by `gar train`
        stored = _stored_config(directory)
        same = stored is None or (digest(stored), stored.get("seed")) == (run.combination.digest, run.seed)
    if not same:
        found = first_difference(stored or _stored_config(directory) or {}, run.tree())
        what = "" if found is None else " ({} was {!r} and is {!r})".format(*found)
        return f"its run has another configuration{what}"
    data = record.get("data") or {}  # a run by `gar train` knows its data by another digest
    for task, now in run.combination.data.items():
        if data.get(task, now) != now:
            return f"its run was on other data (the examples of task {task} are not the same)"
    return None


def begin(directory: Path, run: PlannedRun, retry: bool) -> None:
    """Note that the run starts or goes on. A failed run with another configuration starts from nothing."""
    record = read_json(directory / RECORD) or {}
    if retry and difference(directory, run):
        record = {}
        for name in (CONFIG, ENVIRONMENT, HISTORY, LOG):
            (directory / name).unlink(missing_ok=True)
        shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)
    (directory / FAILURE).unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    combination = run.combination
    facts = {
        "schema": SCHEMA,
        "id": run.id,
        "setting": combination.setting,
        "mixture": combination.mixture,
        "method": combination.method,
        "seed": run.seed,
        "configuration": combination.digest,
        "data": combination.data,
        "attempts": record.get("attempts", 0) + 1,
        "seconds": record.get("seconds", 0.0),
    }
    write_json(directory / RECORD, facts)


def spent(directory: Path, seconds: float, starts: int = 0) -> None:
    """Add to the time that the run took over all its starts, and to their number."""
    if (record := read_json(directory / RECORD)) is not None:
        record["seconds"] = record.get("seconds", 0.0) + seconds
        record["attempts"] = record.get("attempts", 0) + starts
        write_json(directory / RECORD, record)


def note_failure(directory: Path, error: str, reason: str) -> None:
    """failure.json of a run that could not write its own; one that it wrote since :func:`begin` stays."""
    if read_json(directory / FAILURE) is None:
        write_failure(directory, error, reason)


# ---------------------------------------------------------------------- the sweep's own files


@contextlib.contextmanager
def hold(out: Path) -> Iterator[None]:
    """Keep a second sweep or search out of a directory."""
    try:
        (out / SWEEP).mkdir(parents=True, exist_ok=True)
        # Whoever asks for the status holds the lock for a moment.
        with FileLock(out / SWEEP / LOCK).acquire(timeout=0.5):
            yield
    except Timeout:
        raise UserError(f"{out}: another sweep or search is running in this directory") from None
    except OSError as error:
        if error.errno is None:
            raise
        where = out if error.filename is None else error.filename
        raise UserError(f"{where}: {error.strerror or error}; finished runs are kept") from error


def write_planned(out: Path, suite: str, ids: Iterable[str]) -> None:
    """The ids of a suite's runs, a line each."""
    write_text(out / SWEEP / f"{suite}.txt", "".join(f"{name}\n" for name in ids))


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
    write_json(out / SWEEP / "running.json", {"runs": runs})


def running(out: Path) -> dict[str, dict[str, Any]]:
    """What the sweep that holds the directory says to be running; nothing where none does."""
    if not is_locked(out / SWEEP):
        return {}
    runs: dict[str, dict[str, Any]] = (read_json(out / SWEEP / "running.json") or {}).get("runs", {})
    return runs


def _stored_config(directory: Path) -> dict[str, Any] | None:
    try:
        return stored_config(directory / CONFIG)
    except UserError:
        return None
