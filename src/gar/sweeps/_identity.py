"""Stands in for :func:`gar.data.identity` until it is there."""

from __future__ import annotations

from pathlib import Path

from gar.config import MixtureConfig, TaskConfig
from gar.data.load import resolve
from gar.errors import UserError
from gar.runs.files import checksum


def identity(mixture: MixtureConfig, data_dir: str | None) -> dict[str, str]:
    """A digest for every task of what its examples come from."""
    return {entry.name: _source(entry, data_dir) for entry in resolve(mixture)[1]}


def _source(entry: object, data_dir: str | None) -> str:
    if isinstance(entry, TaskConfig) and entry.train and entry.validation:
        files = [Path(entry.train), Path(entry.validation)]
    elif data_dir is not None:
        folder = Path(data_dir) / entry.name  # type: ignore[attr-defined]
        files = sorted([*folder.glob("train.jsonl*"), *folder.glob("validation.jsonl*")])
    else:
        return f"hub {entry!r}"
    try:
        return " ".join(checksum(file) for file in files)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from None
