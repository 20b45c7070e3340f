"""Files that are whole or as they were, and on the disk when a function returns."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BLOCK = 1 << 22  # bytes read at a time
PART = 1 << 26  # bytes of a large file that one thread reads
#: A file that changed less than so many seconds ago may change again without a trace in its times.
RACY = 2.0
#: Files whose checksums a process remembers.
REMEMBERED = 4096


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON object, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """UTF-8 text, atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Atomically: whatever happens, the file is whole or as it was, and nothing else is left behind."""
    working = path.with_name(f".{path.name}.partial")
    try:
        with working.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(working, path)
        sync(path.parent)
    except OSError:
        working.unlink(missing_ok=True)
        raise


def append_text(path: Path, text: str, durable: bool = True) -> None:
    """At the end of a file: on the disk when it returns, or just for others to read."""
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is none or it was cut short."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def sync(path: Path) -> None:
    """Force a file's content, or a directory's entries, to the disk."""
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


def parts_checksum(path: Path) -> str:
    """Digest of a file's size and the digests of its parts, several of which are read at a time."""
    size = path.stat().st_size

    def digest(first: int) -> bytes:
        found, left = hashlib.blake2b(digest_size=16), PART
        with path.open("rb") as file:
            file.seek(first)
            while left and (block := file.read(min(BLOCK, left))):
                found.update(block)
                left -= len(block)
        return found.digest()

    with ThreadPoolExecutor() as pool:
        return checksum_of(b"".join([size.to_bytes(8, "little"), *pool.map(digest, range(0, size, PART))]))


class Checksums:
    """Checksums ``of`` files, without reading a file again which has not changed since it was read.

    "Not changed" is the same inode, size and times of change, the later of which was more than ``RACY``
    seconds old when the file was read: within the resolution of these times a change would not show. As many
    files are remembered as ``REMEMBERED``, the last asked for.
    """

    def __init__(self, of: Callable[[Path], str]) -> None:
        self._of = of
        self._known: dict[Path, tuple[tuple[int, ...], str]] = {}
        self._lock = threading.Lock()

    def __call__(self, path: Path) -> str:
        path = path.absolute()
        before = self._state(path)
        with self._lock:
            known = self._known.pop(path, None)
            if known is not None and known[0] == before:
                self._known[path] = known  # now the last one
                return known[1]
        read = time.time()
        found = self._of(path)
        if self._state(path) == before and read - max(before[-2:]) / 1e9 > RACY:
            with self._lock:
                self._known[path] = before, found
                while len(self._known) > REMEMBERED:
                    del self._known[next(iter(self._known))]
        return found

    @staticmethod
    def _state(path: Path) -> tuple[int, ...]:
        found = path.stat()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


#: Of this process: what it says depends on the files alone.
remembered_checksum = Checksums(checksum)


def checksum_of(content: bytes) -> str:
    """As :func:`checksum`, of bytes in memory."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
