"""How a run directory travels between machines."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path, PurePosixPath

from gar.runs.names import CHECKSUMS, CONFIG, DIAGNOSTICS, ENVIRONMENT, FAILURE, HISTORY, LOG, MODEL, RESULT

#: Files of a run directory that travel back from another machine; the model is added on demand.
TRAVELLING = (CONFIG, ENVIRONMENT, HISTORY, FAILURE, LOG, DIAGNOSTICS, CHECKSUMS, RESULT)


def pack(directory: Path, model: bool) -> bytes:
    """A run directory as a zip archive: everything but checkpoints, and the model only when asked for."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in TRAVELLING:
            if (directory / name).is_file():
                archive.write(directory / name, name)
        for path in sorted((directory / MODEL).rglob("*")) if model else ():
            if path.is_file():
                archive.write(path, path.relative_to(directory).as_posix())
    return content.getvalue()


def unpack(content: bytes, directory: Path) -> None:
    """Write a packed run directory; result.json comes last, as in a run of one's own."""
    directory.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in sorted(archive.namelist(), key=lambda name: name == RESULT):
            parts = PurePosixPath(name).parts
            if name not in TRAVELLING and (parts[0] != MODEL or ".." in parts or "\\" in name):
                raise ValueError(f"a returned run holds the unexpected file {name!r}")
            target = directory.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            working = target.with_name(f".{target.name}.partial")
            working.write_bytes(archive.read(name))
            os.replace(working, target)
