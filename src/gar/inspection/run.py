"""An inspection in a directory: begun, interrupted, gone on with, finished."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from gar.data.load import load_mixture
from gar.data.texts import MAX_TEXTS, GroupedTexts, grouped_mixture, read_grouped
from gar.errors import UserError, path_kind, user_path
from gar.inspection import _load as loading
from gar.inspection._store import Files
from gar.inspection.inspect import BATCH_TOKENS, MAX_BYTES, MAX_LENGTH, PERMUTATIONS, Progress, inspect
from gar.inspection.result import SCHEMA
from gar.presets.catalogue import resolve_config
from gar.runs.environment import resolve_device
from gar.runs.files import read_json, write_json
from gar.runs.names import INSPECTION, LOCK, RESULT, path_part
from gar.runs.stopping import StopSignals
from gar.version import __version__

UNITS = "units"


@dataclass(frozen=True)
class Request:
    """What to inspect, and how; ``batch_tokens`` and ``device`` may be others when it goes on."""

    model: str
    data: tuple[str, ...]
    adapter: str | None = None
    text: str | None = None
    group_by: str | None = None
    label: str | None = None
    loss: str | None = None
    max_texts: int = MAX_TEXTS
    max_length: int = MAX_LENGTH
    group_size: int | None = None
    permutations: int = PERMUTATIONS
    max_bytes: int = MAX_BYTES
    seed: int = 0
    batch_tokens: int = BATCH_TOKENS
    device: str = "auto"
    data_dir: Path | None = None

    def facts(self, source: loading.Source, texts: GroupedTexts, loss: str) -> dict[str, Any]:
        """What the numbers come from."""
        kept = ("adapter", "max_length", "group_size", "permutations", "max_bytes", "seed")
        return {
            "schema": SCHEMA,
            "model": self.model,
            "loss": loss,
            **{key: getattr(self, key) for key in kept},
            "the model's files": loading.digest(source),
            "the texts": _digest(texts),
        }


def inspect_to(
    request: Request, out: str | Path | None = None, progress: Progress | None = None
) -> tuple[Path, dict[str, Any]]:
    """Inspect into a directory (``inspect/<model>``); returns it and the content of its result.json.

    What is measured is kept there unit by unit: the same request goes on, or gives the finished
    result; another one is a :class:`~gar.errors.UserError`.
    """
    source = loading.find_source(request.model, request.adapter)
    device = resolve_device(request.device)
    loss = loading.loss_of(source, request.loss)
    texts = _read(request, loss)
    path = user_path(out) if out is not None else Path("inspect") / path_part(source.name)
    facts = request.facts(source, texts, loss)
    if (done := _finished(path, facts)) is not None:
        return path, done
    loaded = loading.load(source, loss, device)
    with _held(path, facts) as finished, StopSignals() as stopping:
        if finished is not None:
            return path, finished
        found = _inspected(request, loaded, texts, path, source.name, progress, stopping)
        result = {**found, "request": facts, "environment": _environment(device, loaded)}
        write_json(path / RESULT, result)
        Files(path / UNITS).clear()
    return path, result


def _inspected(
    request: Request,
    loaded: loading.Loaded,
    texts: GroupedTexts,
    path: Path,
    name: str,
    progress: Progress | None,
    stopping: Callable[[], bool],
) -> dict[str, Any]:
    found = inspect(
        loaded.model, texts, loaded.tokenizer, loss=loaded.loss, max_length=request.max_length,
        group_size=request.group_size, batch_tokens=request.batch_tokens, permutations=request.permutations,
        max_bytes=request.max_bytes, seed=request.seed, name=name, progress=progress,
        store=Files(path / UNITS), stopping=stopping,
    ).to_dict()  # fmt: skip
    return {**found, "notes": [*loaded.notes, *found["notes"]]}


def _environment(device: torch.device, loaded: loading.Loaded) -> dict[str, Any]:
    return {
        "gar": __version__,
        "device": str(device),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
    }


def _read(request: Request, loss: str) -> GroupedTexts:
    """The texts that ``data`` names: files and directories, or one description of a mixture."""
    if not request.data:
        raise UserError("no data; expected files of texts, or a YAML file with tasks (--data)")
    options = {"max_texts": request.max_texts, "seed": request.seed}
    described = [name for name in request.data if name.lower().endswith((".yaml", ".yml"))]
    if not described:
        return read_grouped(
            request.data, text=request.text, group_by=request.group_by, label=_label(request, loss), **options
        )
    if len(request.data) > 1:
        raise UserError(f"--data {described[0]}: a YAML file with tasks stands alone; expected no other data")
    for option in ("text", "group_by", "label"):
        if getattr(request, option) is not None:
            raise UserError(
                f"--{option.replace('_', '-')}: the tasks of {described[0]} say this themselves; "
                "expected it for files of texts"
            )
    changes = {} if request.data_dir is None else {"data_dir": str(request.data_dir)}
    config = resolve_config(described[0], changes)
    mixture = load_mixture(config.mixture, data_dir=config.data_dir)
    return grouped_mixture(mixture, labels=True, **options)


def _label(request: Request, loss: str) -> str | None:
    """The column of classes, where the loss needs one."""
    if loss == "lm":
        if request.label is not None:
            raise UserError(f"--label {request.label}: a language model has no classes; expected no --label")
        return None
    return request.label or "label"


def _digest(texts: GroupedTexts) -> str:
    found = hashlib.blake2b(
        repr((texts.names, texts.labels)).encode("utf-8", "surrogatepass"), digest_size=16
    )
    found.update(texts.groups.astype("<i8").tobytes())
    for text in texts.texts:
        found.update(repr(text).encode("utf-8", "surrogatepass") + b"\0")
    return found.hexdigest()


def _finished(path: Path, facts: dict[str, Any]) -> dict[str, Any] | None:
    """The result that is there for these facts; another inspection, or something else, is refused."""
    kind = path_kind(path)
    if kind == "missing":
        return None
    if kind != "directory":
        raise UserError(f"{path}: is a {kind}; expected a directory (--out)")
    known = read_json(path / INSPECTION)
    if known is None:
        if any(child.name != LOCK for child in path.iterdir()):
            raise UserError(
                f"{path}: holds something else; expected a new directory, or an inspection (--out)"
            )
        return None
    if not (path / RESULT).is_file() and not (path / UNITS).is_dir():
        return None  # nothing was measured for it
    for key in dict.fromkeys([*facts, *known]):
        if known.get(key) != facts.get(key):
            if key.startswith("the "):
                raise UserError(f"{path}: {key} are others than those it began with; expected a new --out")
            raise UserError(
                f"{path}: the inspection there has {key}: {known.get(key)!r}, found {facts.get(key)!r}; "
                "expected the same, or a new --out"
            )
    return read_json(path / RESULT)


@contextmanager
def _held(path: Path, facts: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
    """The directory, held by this process, with the request in it."""
    new = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with FileLock(path / LOCK).acquire(timeout=0):
            done = _finished(path, facts)  # again, since nobody else can change it now
            if done is None:
                write_json(path / INSPECTION, facts)
            try:
                yield done
            finally:
                _forget(path, new)
    except Timeout:
        raise UserError(f"{path}: another process is running in this directory") from None
    except OSError as error:
        if error.errno is None:
            raise
        where = error.filename or path
        raise UserError(f"{where}: {error.strerror or error}; complete files are kept") from error


def _forget(path: Path, new: bool) -> None:
    """Where nothing was measured, the directory is as it was before."""
    if not (path / RESULT).is_file() and not (path / UNITS).is_dir():
        with suppress(OSError):
            for name in (INSPECTION, LOCK):
                (path / name).unlink(missing_ok=True)
            if new:
                path.rmdir()
