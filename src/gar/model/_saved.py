"""The directory of a saved model: what it holds, how it is written whole, and what is checked on loading.

config.json names the other files with their checksums and is written last; nothing in it is defaulted.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

from pydantic import Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gar.config import BackboneConfig, ExpertsConfig, Section, explain
from gar.errors import UserError
from gar.runs.files import checksum, checksum_of, sync, write_json

CONFIG_FILE, WEIGHTS_FILE, BACKBONE_DIR = "config.json", "model.safetensors", "backbone"
FORMAT = "gar-multitask-model"


class SavedTask(Section):
    name: str
    labels: tuple[str, ...] = Field(min_length=1)
    text: tuple[str, ...] = Field(min_length=1, max_length=2)


class SavedModel(Section):
    """The content of config.json."""

    format: Literal["gar-multitask-model"]
    gar_version: str
    backbone: BackboneConfig
    #: Of the frozen pretrained weights, which are not saved; None where the directory holds the backbone.
    backbone_fingerprint: str | None
    experts: ExpertsConfig
    precision: Literal["float32", "tf32", "bfloat16"]
    tasks: tuple[SavedTask, ...] = Field(min_length=1)
    #: Checksums of the saved files by their name, and under config.json's own that of its other keys.
    files: dict[str, str] | None = None

    @model_validator(mode="after")
    def _distinct_tasks(self) -> Self:
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"tasks: names must be distinct, found {', '.join(names)}")
        return self


# ---------------------------------------------------------------------- reading


def read(directory: Path) -> SavedModel | None:
    """What config.json says, checked in whole; None where the directory holds no model of ours.

    Warns of keys of a newer version, which are ignored, and of an edited file. Raises
    :class:`~gar.errors.UserError`, with file and key, where anything else is not as it is written, or another
    file of the model is missing or has other bytes.
    """
    path = directory / CONFIG_FILE
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text, parse_constant=_no_constant)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(tree).__name__}")
    if tree.get("format") != FORMAT and not {"gar_version", "experts"} & tree.keys():
        return None
    saved, notes = _validated(tree, path)
    _verify(directory, saved.files or {})
    if saved.files is None:
        notes.append("has no checksums of the model's files, so these are not checked")
    elif saved.files.get(CONFIG_FILE) != _digest(json.loads(text)):
        notes.append("was changed after the model was saved (its checksum differs)")
    for note in notes:
        warnings.warn(f"{path}: {note}", UserWarning, stacklevel=3)
    return saved


def _validated(tree: dict[str, Any], path: Path) -> tuple[SavedModel, list[str]]:
    """The checked content, and what was ignored in it; ``tree`` loses unknown keys."""
    for name, section in (("backbone", BackboneConfig), ("experts", ExpertsConfig)):
        values: Any = tree.get(name)
        for key in section.model_fields if isinstance(values, dict) else ():
            if key not in values:  # a default could be another model
                raise UserError(f"{path}: missing key '{name}.{key}'")
    notes = []
    try:
        try:
            saved = _strict(tree)
        except ValidationError as error:
            unknown = [problem["loc"] for problem in error.errors() if problem["type"] == "extra_forbidden"]
            for *parents, last in unknown:
                node: Any = tree
                for parent in parents:
                    node = node[parent]
                del node[last]
            if unknown:
                names = ", ".join(sorted(".".join(map(str, location)) for location in unknown))
                notes.append(f"ignoring {names}, saved by a newer version of gar")
            saved = _strict(tree)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, SavedModel)}") from None
    return saved, notes


def _strict(tree: Mapping[str, Any]) -> SavedModel:
    # As JSON: there a list may be a tuple, and still no text a number.
    return SavedModel.model_validate_json(json.dumps(tree), strict=True)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"found {name}")


def _verify(directory: Path, files: Mapping[str, str]) -> None:
    for name in sorted(files.keys() - {CONFIG_FILE}):
        path = directory / name
        try:
            found = checksum(path)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; expected it, as a file of the saved model") from None
        if found != files[name]:
            raise UserError(
                f"{path}: damaged: its checksum is {found}, expected {files[name]} as in {CONFIG_FILE}"
            )


def read_weights(directory: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors."""
    try:
        tensors: dict[str, Tensor] = load_file(directory / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory / WEIGHTS_FILE}: cannot be read ({error})") from None
    return tensors


def _digest(tree: Mapping[str, Any]) -> str:
    content = {key: value for key, value in tree.items() if key != "files"}
    return checksum_of(json.dumps(content, sort_keys=True).encode())


# ---------------------------------------------------------------------- writing


def write(directory: Path, facts: Mapping[str, Any], fill: Callable[[Path], None]) -> None:
    """Save a model: ``fill`` writes its files into a directory, ``facts`` are the rest of config.json.

    The files take the place of older ones when all are whole and on the disk. Until config.json follows,
    which has their checksums, the directory is refused. Other files in it are left alone.
    """
    directory.mkdir(parents=True, exist_ok=True)
    working = directory / ".partial"
    shutil.rmtree(working, ignore_errors=True)
    try:
        working.mkdir()
        fill(working)
        files = {}
        for path in sorted(working.rglob("*")):
            sync(path)
            if path.is_file():
                files[path.relative_to(working).as_posix()] = checksum(path)
        shutil.rmtree(directory / BACKBONE_DIR, ignore_errors=True)
        for path in working.iterdir():
            os.replace(path, directory / path.name)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    write_json(directory / CONFIG_FILE, {**facts, "files": {**files, CONFIG_FILE: _digest(facts)}})
    sync(directory.parent)
