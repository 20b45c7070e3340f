"""The one owner of a run directory while it is written: begin, resume, fail, finish.

``result.json`` is written last and atomically, so a directory with one is finished.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from gar.config import Config, flat, result_only
from gar.errors import UserError, path_kind
from gar.runs.environment import environment
from gar.runs.files import read_json, sync, write_json, write_text
from gar.runs.names import (
    CHECKPOINTS,
    CONFIG,
    DIAGNOSTICS,
    ENVIRONMENT,
    FAILURE,
    HISTORY,
    LOCK,
    MODEL,
)
from gar.runs.result import DamagedFile, RunResult, check_files, read_result
from gar.runs.state import State, is_locked, state_of

#: In environment.json, what the key of that name came to.
SPLIT = "max_tokens_per_pass"
#: Facts of an environment that may change last bits of what is computed.
NUMERIC = (
    "device",
    "device_name",
    "threads",
    "libraries.torch",
    "libraries.transformers",
    "libraries.numpy",
    "ranks",
)


class RunDirectory:
    """A run directory held by this process; made by :func:`hold`.

    ``begun`` says whether an earlier process had begun the run, ``changed`` what is other now, in words.
    """

    def __init__(self, path: Path, begun: bool, changed: list[str]) -> None:
        self.path, self.begun, self.changed = path, begun, changed

    @property
    def history(self) -> Path:
        return self.path / HISTORY

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def model(self) -> Path:
        return self.path / MODEL

    def in_force(self, config: Config) -> Config:
        """The configuration, with the split into passes of the run to go on with in the place of ``auto``."""
        if config.max_tokens_per_pass != "auto" or not checkpoints(self.checkpoints):
            return config
        found = _recorded_split(read_json(self.path / ENVIRONMENT) or {})
        return config if found is None else config.model_copy(update={SPLIT: found[0]})

    def record_split(self, tokens: int | None) -> None:
        """environment.json: the padded tokens per pass that ``auto`` came to in this session."""
        facts = read_json(self.path / ENVIRONMENT) or {}
        (facts.get("resumed") or [facts])[-1][SPLIT] = tokens
        write_json(self.path / ENVIRONMENT, facts)

    def fail(self, error: str, reason: str, update: int | None = None) -> None:
        """failure.json: see :func:`write_failure`."""
        write_failure(self.path, error, reason, update)

    def finish(self, result: RunResult, diagnosis: Mapping[str, Any]) -> None:
        """diagnostics.json, then result.json; checkpoints are of no more use."""
        write_json(self.path / DIAGNOSTICS, diagnosis)
        sync(self.path)  # the model directory's entry, before a result says that it is there
        result.write(self.path)
        shutil.rmtree(self.checkpoints, ignore_errors=True)


@contextmanager
def hold(
    path: Path,
    config: Config,
    resume: bool,
    *,
    note: str = "",
    data: Mapping[str, str] | None = None,
    keeps_split: bool = False,
    ranks: int = 1,
) -> Iterator[RunDirectory]:
    """Hold the directory for one process, with config.yaml and environment.json in it.

    ``data`` are digests of the tasks' examples; a run goes on only with those that it began with, and where
    ``keeps_split`` only with the same ``max_tokens_per_pass``. ``ranks`` processes train together. An error
    of the user's before the first update leaves the directory as it was.
    """
    check_directory(path, resume)
    new = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with FileLock(path / LOCK).acquire(timeout=0):
            _check_state(path, resume)  # again, since nobody else can change it now
            begun = (path / CONFIG).is_file()
            try:
                yield _begin(path, config, begun, note, dict(data or {}), keeps_split, ranks)
            except (UserError, OSError):
                if not begun and not _has_progress(path):
                    _forget(path, new)
                raise
    except Timeout:
        raise _busy(path) from None
    except OSError as error:
        if error.errno is None:
            raise
        where = path if error.filename is None else error.filename
        raise UserError(f"{where}: {error.strerror or error}; complete files are kept") from error


@contextmanager
def claimed(path: Path) -> Iterator[Path]:
    """A directory of this name that is nobody's yet, or of the name with the first free of -2, -3, …

    It is removed again if no run began in it, and so are the folders that were made for it.
    """
    new = [parent for parent in path.parents if not parent.exists()]
    made = _claim(path)
    try:
        yield made
    finally:
        if not (made / CONFIG).is_file():
            _forget(made, new=True)
            with suppress(OSError):  # what is not empty stays
                for parent in new:
                    parent.rmdir()


def _claim(path: Path) -> Path:
    for number in itertools.count(1):
        made = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            made.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"{made}: {error.strerror or error}; name another place with --out") from error
        break
    return made


def check_directory(path: Path, resume: bool) -> None:
    """Refuse a running and a finished run, and an unfinished one unless resuming."""
    if path_kind(path) not in ("directory", "missing"):
        raise UserError(f"{path}: exists and is no directory")
    if is_locked(path):
        raise _busy(path)
    _check_state(path, resume)


def finished(path: Path, config: Config) -> RunResult | None:
    """The result of a finished run of this configuration, or None where there is none."""
    if state_of(path) is not State.FINISHED:
        return None
    try:
        result = read_result(path)
        check_files(path)
    except DamagedFile as error:
        raise UserError(f"{path}: {error}") from None
    if (path / CONFIG).is_file():
        _require_same(path / CONFIG, config)
    if not is_locked(path):  # left by a process that was killed at the very end
        shutil.rmtree(path / CHECKPOINTS, ignore_errors=True)
    return result


def checkpoints(root: Path) -> list[Path]:
    """The checkpoints below ``root``, oldest first."""
    return sorted(path for path in root.glob("[0-9]*") if path.is_dir()) if root.is_dir() else []


def write_failure(directory: Path, error: str, reason: str, update: int | None = None) -> None:
    """failure.json: what went wrong, in or after which update, and the checkpoint to go on from."""
    directory.mkdir(parents=True, exist_ok=True)
    kept = checkpoints(directory / CHECKPOINTS)
    facts = {
        "error": error,
        "reason": reason,
        "update": update,
        "checkpoint": f"{CHECKPOINTS}/{kept[-1].name}" if kept else None,
    }
    write_json(directory / FAILURE, facts)


def stored_config(path: Path) -> dict[str, Any]:
    """The tree of a config.yaml, or a :class:`~gar.errors.UserError`."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        tree = None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: cannot be read; expected the configuration of the run to resume")
    return tree


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first key in which two configurations compute something else, with both values.

    >>> first_difference({"seed": 0, "device": "cpu"}, {"seed": 1, "device": "cuda"})
    ('seed', 0, 1)
    """
    old, new = flat(result_only(before)), flat(result_only(now))
    for key in dict.fromkeys([*new, *old]):
        if old.get(key) != new.get(key):
            return key, old.get(key), new.get(key)
    return None


def _begin(
    path: Path,
    config: Config,
    begun: bool,
    note: str,
    data: dict[str, str],
    keeps_split: bool,
    ranks: int,
) -> RunDirectory:
    now = environment(config) | {"ranks": ranks, "data": data}
    changed: list[str] = []
    if begun:
        _require_same(path / CONFIG, config)
        before = read_json(path / ENVIRONMENT) or {}
        last = ([before, *before.get("resumed", [])])[-1]
        _require_same_data(path, before.get("data") or {}, data)
        if keeps_split and checkpoints(path / CHECKPOINTS):
            _require_same_split(path, before, config)
        changed = list(_differences(last, now))
        write_json(path / ENVIRONMENT, {**before, "resumed": [*before.get("resumed", []), now]})
    else:
        write_json(path / ENVIRONMENT, now)
    write_text(path / CONFIG, note + yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))
    (path / FAILURE).unlink(missing_ok=True)
    return RunDirectory(path, begun, changed)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = flat(before), flat(now)
    keys = [*NUMERIC, *(key for key in new if key.startswith("place."))]
    for key in keys:
        taken_over = key == f"place.{SPLIT}" and new.get(key) == "auto"
        if key in old and old[key] != new.get(key) and not taken_over:
            yield f"{key.removeprefix('place.')} was {old[key]!r} and is {new.get(key)!r}"


def _require_same(stored: Path, config: Config) -> None:
    if found := first_difference(stored_config(stored), config.to_dict()):
        key, before, now = found
        raise UserError(
            f"{stored}: the run to resume has {key}: {before!r}, found {now!r}; "
            "expected the same configuration"
        )


def _require_same_data(path: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    for task, digest in now.items():
        if before.get(task, digest) != digest:
            raise UserError(
                f"{path}: the data of task {task} are others than those the run began with; "
                "expected the same examples, or a new directory"
            )


def _recorded_split(facts: Mapping[str, Any]) -> tuple[int | None] | None:
    """The padded tokens per pass that the last session had of those that had a number, or none at all."""
    for session in reversed([facts, *facts.get("resumed", [])]):
        place = session.get("place") or {}
        if SPLIT in session:
            return (session[SPLIT],)
        if place.get(SPLIT, "auto") != "auto":
            return (place[SPLIT],)
    return None


def _require_same_split(path: Path, before: Mapping[str, Any], config: Config) -> None:
    found, now = _recorded_split(before), config.max_tokens_per_pass
    if found is not None and now not in ("auto", found[0]):
        raise UserError(
            f"{path}: the run to resume has passes of at most {_tokens(found[0])}, found {SPLIT}: {now!r}; "
            f"expected {found[0] or 'null'} or auto: the dropout of a trained backbone depends on the split"
        )


def _tokens(limit: int | None) -> str:
    return "a whole update" if limit is None else f"{limit} padded tokens"


def _check_state(path: Path, resume: bool) -> None:
    state = state_of(path)
    if state is State.FINISHED:
        raise UserError(f"{path}: holds a finished run; expected a new directory (--out)")
    if (path / CONFIG).is_file() and not resume:
        raise UserError(f"{path}: holds an unfinished run; continue it with --resume or name a new directory")


def _busy(path: Path) -> UserError:
    return UserError(f"{path}: another process is running in this directory")


def _has_progress(path: Path) -> bool:
    history = path / HISTORY
    return bool(checkpoints(path / CHECKPOINTS)) or (history.is_file() and history.stat().st_size > 0)


def _forget(path: Path, new: bool) -> None:
    with suppress(OSError):
        for name in (CONFIG, ENVIRONMENT, HISTORY, FAILURE):
            (path / name).unlink(missing_ok=True)
        if new:
            (path / LOCK).unlink(missing_ok=True)
            path.rmdir()
