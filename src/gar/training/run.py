"""A run directory: what was asked, with what, what happened, and the model.

``result.json`` is written last and atomically, so a directory with one is finished.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from filelock import FileLock, Timeout
from pydantic import ValidationError

import gar
from gar.config import Config, MixtureConfig, OptimizerConfig, explain
from gar.data import Mixture, load_mixture
from gar.errors import UserError, nearest
from gar.methods import Baseline, Method
from gar.model import MultiTaskModel
from gar.training.card import model_card
from gar.training.history import History
from gar.training.loop import Hooks, fit

SCHEMA = 1
CONFIG, ENVIRONMENT, HISTORY, RESULT, FAILURE = (
    "config.yaml",
    "environment.json",
    "history.jsonl",
    "result.json",
    "failure.json",
)
LIBRARIES = ("torch", "transformers", "datasets", "safetensors", "numpy", "pydantic", "scikit-learn", "scipy")


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

    ``options`` are keys of :class:`~gar.config.OptimizerConfig` (``updates=500``, ``learning_rate=1e-3``) or of
    :class:`~gar.config.Config` (``seed=1``, ``observation="per_group"``); everything else comes from the model
    and the mixture. With ``out`` the run is kept in that directory, see ``docs/files.md``.
    """
    if config is None:
        config = _config_of(model, mixture, method or Baseline(), options)
    elif options or method is not None:
        raise TypeError("give either config= or method and options, not both")
    model.to(resolve_device(config.device))
    if out is None:
        return {**_header(config, mixture), **fit(model, mixture, config, hooks=hooks)}
    directory = Path(out)
    with run_directory(directory, config, resume):
        try:
            sections = fit(
                model,
                mixture,
                config,
                history=History(directory / HISTORY),
                checkpoints=directory / "checkpoints",
                resume=resume,
                hooks=hooks,
            )
        except Exception as error:
            write_json(directory / FAILURE, {"error": type(error).__name__, "reason": str(error)})
            raise
        result = {**_header(config, mixture), **sections}
        model.save_pretrained(directory / "model")
        (directory / "model" / "README.md").write_text(
            model_card(model, config, mixture, result), encoding="utf-8"
        )
        write_json(directory / RESULT, result)
        (directory / FAILURE).unlink(missing_ok=True)
    return result


def train_from_config(
    config: Config, out: str | Path, *, resume: bool = False, hooks: Hooks | None = None
) -> dict[str, Any]:
    """Load the mixture, build the model on its backbone, and :func:`train` into ``out``."""
    check_directory(Path(out), resume)
    mixture = load_mixture(config.mixture, data_dir=config.data_dir, cache_dir=config.cache.directory)
    model = MultiTaskModel.from_pretrained(
        config.backbone, mixture.tasks, config.experts, precision=config.precision, seed=config.seed
    )
    return train(model, mixture, config=config, out=out, resume=resume, hooks=hooks)


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
def run_directory(directory: Path, config: Config, resume: bool) -> Iterator[None]:
    """Hold the directory for one process, with config.yaml and environment.json in it."""
    check_directory(directory, resume)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / ".lock")
        with lock.acquire(timeout=0):
            stored = directory / CONFIG
            if resume and stored.is_file():
                _same_config(stored, config)
            text = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
            write_text(stored, text)
            write_json(directory / ENVIRONMENT, environment(config))
            yield
    except Timeout:
        raise UserError(f"{directory}: another process is running in this directory") from None
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        raise UserError(f"{directory}: {error.strerror or error}; complete files are kept") from error


def check_directory(directory: Path, resume: bool) -> None:
    """Refuse a finished run, and an unfinished one unless resuming."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory}: exists and is no directory")
    if (directory / RESULT).is_file():
        raise UserError(f"{directory}: holds a finished run; expected a new directory (--out)")
    if (directory / CONFIG).is_file() and not resume:
        raise UserError(
            f"{directory}: holds an unfinished run; continue it with --resume or name a new directory"
        )


def _same_config(stored: Path, config: Config) -> None:
    before = yaml.safe_load(stored.read_text(encoding="utf-8"))
    now = config.to_dict()
    for tree in (before, now):  # where it runs may change, what it computes may not
        for key in ("device", "data_dir", "cache", "checkpoint", "tracking"):
            tree.pop(key, None)
    if before != now:
        key = next(k for k in now if before.get(k) != now[k])
        raise UserError(
            f"{stored}: the run to resume was started with another {key}; expected the same configuration"
        )


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
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _header(config: Config, mixture: Mixture) -> dict[str, Any]:
    return {"schema": SCHEMA, "method": config.method.name, "mixture": mixture.name, "seed": config.seed}


def _config_of(model: MultiTaskModel, mixture: Mixture, method: Method, options: Mapping[str, Any]) -> Config:
    optimizer = {key: value for key, value in options.items() if key in OptimizerConfig.model_fields}
    rest = {key: value for key, value in options.items() if key not in optimizer}
    for key in rest:
        if key not in Config.model_fields:
            known = [*OptimizerConfig.model_fields, *Config.model_fields]
            raise UserError(f"train: unknown option {key!r}{nearest(key, known)}")
    described = MixtureConfig(
        name=mixture.name,
        batch_size=mixture.batch_size,
        group_size=mixture.group_size,
        tasks=tuple(task.name for task in mixture.tasks),
    )
    try:
        return Config.model_validate(
            {
                "backbone": model.config,
                "experts": model.experts_config,
                "method": method,
                "mixture": described,
                "precision": model.precision,
                **({"optimizer": optimizer} if optimizer else {}),
                **rest,
            }
        )
    except ValidationError as error:
        raise UserError(f"train: {explain(error, Config)}") from None


def majority_shares(mixture: Mixture) -> dict[str, float]:
    """Per task, the accuracy of always answering the most frequent validation label."""
    return {
        task.name: float(np.bincount(task.validation.labels).max() / len(task.validation))
        for task in mixture.tasks
    }


def write_json(path: Path, value: Any) -> None:
    """Atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Atomically: the file is whole or as it was."""
    working = path.with_name(f".{path.name}.partial")
    with working.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(working, path)
