"""Hold a run directory: begin, resume, fail, finish.

``result.json`` is written last and atomically, so a directory with one is finished.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from gar.config import Config, flat
from gar.errors import UserError
from gar.runs.environment import environment
from gar.runs.files import write_json, write_text
from gar.runs.names import CHECKPOINTS, CONFIG, ENVIRONMENT, FAILURE, HISTORY, LOCK, RESULT

#: What a resumed run may have otherwise: where it runs and what it keeps, not what it computes.
FREE_KEYS = {
    "device",
    "data_dir",
    "cache.enabled",
    "cache.directory",
    "tracking",
    "checkpoint.every",
    "checkpoint.keep",
}


@contextmanager
def run_directory(directory: Path, config: Config, resume: bool, note: str = "") -> Iterator[bool]:
    """Hold the directory for one process, with config.yaml and environment.json in it.

    Yields whether a run had begun there. An error of the user's before the first update leaves the directory
    as it was.
    """
    check_directory(directory, resume)
    new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / LOCK).acquire(timeout=0):
            _check_state(directory, resume)  # again, since nobody else can change it now
            stored = directory / CONFIG
            begun = stored.is_file()
            if begun:
                _same_config(stored, config)
            try:
                text = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
                write_text(stored, note + text)
                write_json(directory / ENVIRONMENT, environment(config))
                (directory / FAILURE).unlink(missing_ok=True)
                yield begun
            except (UserError, OSError):
                if not begun and not _has_progress(directory):
                    _forget(directory, new)
                raise
    except Timeout:
        raise _busy(directory) from None
    except OSError as error:
        if error.errno is None:
            raise
        where = directory if error.filename is None else error.filename
        raise UserError(f"{where}: {error.strerror or error}; complete files are kept") from error


def check_directory(directory: Path, resume: bool) -> None:
    """Refuse a running and a finished run, and an unfinished one unless resuming."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory}: exists and is no directory")
    if _is_locked(directory):
        raise _busy(directory)
    _check_state(directory, resume)


def _check_state(directory: Path, resume: bool) -> None:
    if (directory / RESULT).is_file():
        raise UserError(f"{directory}: holds a finished run; expected a new directory (--out)")
    if (directory / CONFIG).is_file() and not resume:
        raise UserError(
            f"{directory}: holds an unfinished run; continue it with --resume or name a new directory"
        )


def finished(directory: Path, config: Config) -> dict[str, Any] | None:
    """The result of a finished run of this configuration, or None where there is none."""
    path = directory / RESULT
    if not path.is_file():
        return None
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{path}: not valid JSON; expected the result of a finished run") from None
    if (directory / CONFIG).is_file():
        _same_config(directory / CONFIG, config)
    if not _is_locked(directory):  # left by a process that was killed at the very end
        shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)
    return result


def _is_locked(directory: Path) -> bool:
    if not (directory / LOCK).is_file():
        return False
    try:
        with FileLock(directory / LOCK).acquire(timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        return False


def _busy(directory: Path) -> UserError:
    return UserError(f"{directory}: another process is running in this directory")


def _has_progress(directory: Path) -> bool:
    history = directory / HISTORY
    return bool(checkpoints(directory / CHECKPOINTS)) or (history.is_file() and history.stat().st_size > 0)


def _forget(directory: Path, new: bool) -> None:
    with suppress(OSError):
        for name in (CONFIG, ENVIRONMENT, HISTORY, FAILURE):
            (directory / name).unlink(missing_ok=True)
        if new:
            (directory / LOCK).unlink(missing_ok=True)
            directory.rmdir()


def _same_config(stored: Path, config: Config) -> None:
    try:
        tree = yaml.safe_load(stored.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        tree = None
    if not isinstance(tree, dict):
        raise UserError(f"{stored}: cannot be read; expected the configuration of the run to resume")
    before, now = flat(tree), flat(config.to_dict())
    for key in dict.fromkeys([*now, *before]):
        if key not in FREE_KEYS and before.get(key) != now.get(key):
            raise UserError(
                f"{stored}: the run to resume has {key}: {before.get(key)!r}, found {now.get(key)!r}; "
                "expected the same configuration"
            )


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
