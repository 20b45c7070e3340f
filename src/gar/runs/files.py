"""Files that are whole or as they were."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

BLOCK = 1 << 22  # bytes read at a time


def write_json(path: Path, value: Any) -> None:
    """Atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Atomically: the file is whole or as it was."""
    working = path.with_name(f".{path.name}.partial")
    try:
        with working.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(working, path)
    except OSError:
        working.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Force a file's or directory's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """Digest of a file's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is none or it was cut short."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
