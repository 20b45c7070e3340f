"""A run directory: what was asked, with what, what happened, and the model.

``result.json`` is written last and atomically, so a directory with one is finished.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from filelock import FileLock, Timeout
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

import gar
from gar.config import Config, MixtureConfig, OptimizerConfig, TaskConfig, explain
from gar.data import Mixture, load_mixture
from gar.data.registry import registry
from gar.data.task import Task
from gar.diagnostics import DIAGNOSTICS
from gar.errors import UserError, nearest
from gar.methods import GAR, Method
from gar.model import WEIGHTS_FILE, MultiTaskModel
from gar.training import checkpoint
from gar.training.card import model_card
from gar.training.files import sync
from gar.training.files import write_json as write_json
from gar.training.files import write_text as write_text
from gar.training.history import History
from gar.training.loop import Hooks, TrainingFailure, fit
from gar.training.tracking import Tracker

SCHEMA = 1
CONFIG, ENVIRONMENT, HISTORY, RESULT, FAILURE = (
    "config.yaml",
    "environment.json",
    "history.jsonl",
    "result.json",
    "failure.json",
)
CHECKPOINTS, MODEL, LOCK = "checkpoints", "model", ".lock"
LIBRARIES = ("torch", "transformers", "datasets", "safetensors", "numpy", "pydantic", "scikit-learn", "scipy")
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
IN_MEMORY = (
    "# Made by gar.train from a mixture in memory: where its data came from is not known here,\n"
    "# and whether it was a sample; result.json has the numbers of examples.\n"
)


def train(
    model: MultiTaskModel,
    mixture: Mixture,
    method: Method | None = None,
    *,
    config: Config | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    hooks: Hooks | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a model in place on a mixture; returns the result (the content of result.json).

    ``options`` are keys of :class:`~gar.config.OptimizerConfig` (``updates=500``, ``learning_rate=1e-3``)
    or of :class:`~gar.config.Config` (``seed=1``, ``observation="per_group"``); everything else comes from
    the model and the mixture. With ``out`` the run is kept in that directory, see ``docs/files.md``;
    ``resume=True`` goes on from its last checkpoint; of a finished run it returns the result, and gives
    ``model`` the weights.
    """
    described = config is not None
    if config is None:
        config = _config_of(model, mixture, method or GAR(), options)
    elif options or method is not None:
        raise TypeError("give either config= or method and options, not both")
    else:
        _check_described(config, model, mixture)
    model.to(resolve_device(config.device))
    if out is None:
        with closing(Tracker(config.tracking, None, config.to_dict())) as tracker:
            sections = fit(model, mixture, config, history=History(None, tracker), hooks=hooks)
        return _result(config, mixture, sections)
    directory = Path(out)
    if resume and (result := finished(directory, config)) is not None:
        weights = directory / MODEL / WEIGHTS_FILE
        if weights.is_file():
            model.load_owned_state(load_file(weights), str(weights))
        return result
    note = "" if described else IN_MEMORY
    with run_directory(directory, config, resume, note) as begun:
        return _train_into(directory, model, mixture, config, begun, hooks)


def train_from_config(
    config: Config, out: str | Path, *, resume: bool = False, hooks: Hooks | None = None
) -> dict[str, Any]:
    """Load the mixture, build the model on its backbone, and :func:`train` into ``out``.

    A finished run is not loaded again: with ``resume`` its result is returned.
    """
    directory = Path(out)
    if resume and (result := finished(directory, config)) is not None:
        return result
    check_directory(directory, resume)
    mixture = load_mixture(config.mixture, data_dir=config.data_dir, cache_dir=config.cache.directory)
    model = MultiTaskModel.from_pretrained(
        config.backbone, mixture.tasks, config.experts, precision=config.precision, seed=config.seed
    )
    return train(model, mixture, config=config, out=out, resume=resume, hooks=hooks)


def _train_into(
    directory: Path,
    model: MultiTaskModel,
    mixture: Mixture,
    config: Config,
    resume: bool,
    hooks: Hooks | None,
) -> dict[str, Any]:
    with closing(Tracker(config.tracking, directory, config.to_dict())) as tracker:
        history = History(directory / HISTORY, tracker)
        try:
            sections = fit(
                model,
                mixture,
                config,
                history=history,
                checkpoints=directory / CHECKPOINTS,
                resume=resume,
                hooks=hooks,
            )
            result = _result(config, mixture, sections)
            _save_model(directory / MODEL, model, model_card(model, config, mixture, result))
            write_json(directory / DIAGNOSTICS, sections["diagnosis"])
        except Exception as error:
            _record_failure(directory, history, error)
            raise
        write_json(directory / RESULT, result)
        sync(directory)
        tracker.log(
            result["updates"], {"evaluation": {key: sections[key] for key in ("accuracy", "routing")}}
        )
    shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)
    return result


def _save_model(directory: Path, model: MultiTaskModel, card: str) -> None:
    try:
        model.save_pretrained(directory)
        (directory / "README.md").write_text(card, encoding="utf-8")
        for path in directory.rglob("*"):
            sync(path)
    except UserError:
        raise
    except Exception as error:  # the libraries in Rust wrap the system's errors, some in bare exceptions
        if not isinstance(error, OSError | SafetensorError) and "os error" not in str(error):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{directory}: the model could not be written ({reason}); checkpoints are kept"
        ) from error


def _record_failure(directory: Path, history: History, error: Exception) -> None:
    """failure.json: what went wrong, in or after which update, and the checkpoint to go on from."""
    kept = checkpoint.existing(directory / CHECKPOINTS)
    with suppress(OSError):  # a full disk must not hide the error itself
        history.flush()
        write_json(
            directory / FAILURE,
            {
                "error": type(error).__name__,
                "reason": str(error),
                "update": error.update if isinstance(error, TrainingFailure) else history.last_update,
                "checkpoint": f"{CHECKPOINTS}/{kept[-1].name}" if kept else None,
            },
        )


def resolve_device(name: str) -> torch.device:
    """``auto`` is the first CUDA device, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        known = ("auto", "cpu", "cuda")
        raise UserError(
            f"device is {name!r}; expected auto, cpu, cuda or cuda:N{nearest(name, known)}"
        ) from None
    if device.type == "cuda" and (
        not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()
    ):
        raise UserError(f"device is {name!r}, but {torch.cuda.device_count()} CUDA devices are available")
    return device


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
    return bool(checkpoint.existing(directory / CHECKPOINTS)) or (
        history.is_file() and history.stat().st_size > 0
    )


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


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree's values by dotted keys.

    >>> flat({"seed": 1, "optimizer": {"clip": 1.0}})
    {'seed': 1, 'optimizer.clip': 1.0}
    """
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


def environment(config: Config) -> dict[str, Any]:
    """Versions, device, seed and commit behind a run."""
    device = resolve_device(config.device)
    return {
        "gar": gar.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "seed": config.seed,
        "commit": _commit(),
        "command": sys.argv,
    }


def _commit() -> str | None:
    """The commit of the source tree the package runs from, if it is one."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=here.parent, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", here.name
        )  # installed inside another project, its commit says nothing
        return git("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None


def _result(config: Config, mixture: Mixture, sections: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "method": config.method.name,
        "mixture": mixture.name,
        "seed": config.seed,
        "updates": sections["updates"],
        "examples": {task.name: [len(task.train), len(task.validation)] for task in mixture.tasks},
        **{key: sections[key] for key in ("accuracy", "routing", "timing")},
    }


def _config_of(model: MultiTaskModel, mixture: Mixture, method: Method, options: Mapping[str, Any]) -> Config:
    optimizer = {key: value for key, value in options.items() if key in OptimizerConfig.model_fields}
    rest = {key: value for key, value in options.items() if key not in optimizer}
    for key in rest:
        if key in ("backbone", "experts", "mixture", "precision"):
            raise UserError(f"train: option {key!r} belongs to the model or the mixture, which are given")
        if key not in Config.model_fields:
            known = [*OptimizerConfig.model_fields, *Config.model_fields]
            raise UserError(f"train: unknown option {key!r}{nearest(key, known)}")
    try:
        return Config.model_validate(
            {
                "backbone": model.config,
                "experts": model.experts_config,
                "method": method,
                "mixture": _described(mixture),
                "precision": model.precision,
                **({"optimizer": optimizer} if optimizer else {}),
                **rest,
            }
        )
    except ValidationError as error:
        raise UserError(f"train: {explain(error, Config)}") from None


def _check_described(config: Config, model: MultiTaskModel, mixture: Mixture) -> None:
    """A configuration given beside a model and a mixture must describe them."""
    facts = {
        "backbone": (config.backbone, model.config),
        "experts": (config.experts, model.experts_config),
        "precision": (config.precision, model.precision),
        "mixture.batch_size": (config.mixture.batch_size, mixture.batch_size),
        "mixture.group_size": (config.mixture.group_size, mixture.group_size),
    }
    for key, (said, found) in facts.items():
        if said != found:
            raise UserError(f"train: {key} of config= is {said!r}, but the given one has {found!r}")


def _described(mixture: Mixture) -> MixtureConfig:
    """What a mixture in memory tells about itself: registered names where they fit, no files otherwise."""
    tasks = tuple(task.name if _is_registered(task) else _as_config(task) for task in mixture.tasks)
    name: str | None = mixture.name
    if mixture.name in registry().mixtures:
        same = tasks == registry().mixtures[mixture.name]
        name, tasks = (name, ()) if same else (None, tasks)
    return MixtureConfig(name=name, batch_size=mixture.batch_size, group_size=mixture.group_size, tasks=tasks)


def _is_registered(task: Task) -> bool:
    entry = registry().tasks.get(task.name)
    return entry is not None and entry.labels == task.labels and len(entry.text) == len(task.text)


def _as_config(task: Task) -> TaskConfig:
    text = task.text[0] if len(task.text) == 1 else (task.text[0], task.text[1])
    return TaskConfig(name=task.name, text=text, labels=task.labels)


def majority_shares(mixture: Mixture) -> dict[str, float]:
    """Per task, the accuracy of always answering the most frequent validation label."""
    return {
        task.name: float(np.bincount(task.validation.labels).max() / len(task.validation))
        for task in mixture.tasks
    }
