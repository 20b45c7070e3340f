"""How a run directory travels between machines."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from gar.runs.directory import checkpoints
from gar.runs.files import sync, write_bytes
from gar.runs.names import (
    CHECKPOINTS,
    CHECKSUMS,
    CONFIG,
    DIAGNOSTICS,
    ENVIRONMENT,
    FAILURE,
    HISTORY,
    LOG,
    MODEL,
    RESULT,
)

#: Files that always travel; the model and the newest checkpoint do when they are asked for.
TRAVELLING = (CONFIG, ENVIRONMENT, HISTORY, FAILURE, LOG, DIAGNOSTICS, CHECKSUMS, RESULT)


def pack(directory: Path, *, model: bool = False, checkpoint: bool = False) -> bytes:
    """A run directory as a zip archive, with its model and its newest checkpoint on demand."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in _packed(directory, model, checkpoint):
            # Weights do not get smaller.
            method = zipfile.ZIP_STORED if path.suffix == ".safetensors" else zipfile.ZIP_DEFLATED
            archive.write(path, path.relative_to(directory).as_posix(), method)
    return content.getvalue()


def unpack(content: bytes, directory: Path) -> None:
    """Write a packed run directory, every file whole or not at all; result.json comes last.

    A checkpoint comes into place complete and takes that of the earlier ones; with a result all of them go.
    """
    root = directory / CHECKPOINTS
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = [_checked(name) for name in archive.namelist()]
        shipped = [name for name in names if name.startswith(f"{CHECKPOINTS}/")]
        for name in names:
            if name != RESULT and name not in shipped:
                _write(directory / name, archive.read(name))
        if shipped:
            _place_checkpoint(root, {PurePosixPath(name): archive.read(name) for name in shipped})
        if RESULT in names:
            _write(directory / RESULT, archive.read(RESULT))
            shutil.rmtree(root, ignore_errors=True)


def _place_checkpoint(root: Path, files: Mapping[PurePosixPath, bytes]) -> None:
    (number,) = {path.parts[1] for path in files}
    working = root / f".{number}.partial"
    shutil.rmtree(working, ignore_errors=True)
    try:
        for path, content in files.items():
            _write(working / path.name, content)
        shutil.rmtree(root / number, ignore_errors=True)
        os.replace(working, root / number)
    except OSError:
        shutil.rmtree(working, ignore_errors=True)
        raise
    sync(root)
    for other in checkpoints(root):
        if other.name != number:
            shutil.rmtree(other, ignore_errors=True)


def _packed(directory: Path, model: bool, checkpoint: bool) -> Iterator[Path]:
    yield from (path for name in TRAVELLING if (path := directory / name).is_file())
    folders = [directory / MODEL] if model else []
    folders += checkpoints(directory / CHECKPOINTS)[-1:] if checkpoint else []
    for folder in folders:
        yield from sorted(path for path in folder.rglob("*") if path.is_file())


def _checked(name: str) -> str:
    first, *below = PurePosixPath(name).parts
    inside = (first == MODEL and below) or (first == CHECKPOINTS and len(below) == 2 and below[0].isdigit())
    if name not in TRAVELLING and (not inside or ".." in below or "\\" in name):
        raise ValueError(f"a packed run holds the unexpected file {name!r}")
    return name


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content)
