"""The frozen-prefix feature cache: site states computed once per example, memory-mapped from disk.

An entry is a directory named by a digest of everything that determines its content: backbone weights, site,
pooling, tokens, dtype and library versions. It is built under another name, checksummed, and renamed into
place, so that it is complete or absent; a lock keeps two processes from building it at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor

from gar.data.tokenize import TokenizedSplit
from gar.errors import UserError
from gar.runs.files import Checksums, parts_checksum

#: Of what an entry's name stands for; and of the manifest, another one of which is built again in its place.
VERSION, LAYOUT = 1, 2
MANIFEST = "manifest.json"
#: Features are large: several threads read them, and a process reads them once.
remembered_checksum = Checksums(parts_checksum)


@dataclass(frozen=True)
class Features:
    """Site states of a split. ``x`` [total tokens, d] or None, ``base`` [total tokens, d] or [N, d]."""

    offsets: NDArray[np.int64]
    x: Tensor | None
    base: Tensor

    @property
    def pooled(self) -> bool:
        """Whether ``base`` has one row an example."""
        return self.x is None or self.base.shape[0] != self.x.shape[0]


class _Array:
    """A .npy file filled row by row, in any order of rows.

    Written, not mapped: a full disk then is an error of a write, where a mapping would kill the process.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], rows: int, width: int) -> None:
        self._file = path.open("wb")
        header = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (rows, width),
        }
        np.lib.format.write_array_header_1_0(self._file, header)
        self._start, self._bytes = self._file.tell(), dtype.itemsize * width

    def put(self, row: int, values: NDArray[Any]) -> None:
        self._file.seek(self._start + row * self._bytes)
        self._file.write(np.ascontiguousarray(values).data)

    def close(self) -> None:
        self._file.close()


class Writer:
    """Receives the states of a split batch by batch, in any order of examples, from any number of threads."""

    def __init__(self, directory: Path, tokens: TokenizedSplit, dtype: np.dtype[Any]) -> None:
        self.directory, self.tokens, self.dtype = directory, tokens, dtype
        self._rounding = torch.from_numpy(np.empty(0, dtype)).dtype
        self._arrays: dict[str, _Array] = {}
        self._writing = threading.Lock()

    def put(self, indices: NDArray[np.int64], x: Tensor | None, base: Tensor) -> None:
        """States of the examples ``indices``: ``x`` [B, L, d], ``base`` [B, L, d] or [B, d]."""
        for name, values in (("x", x), ("base", base)):
            if values is None:
                continue
            first, lengths = indices, np.ones_like(indices)
            # By torch, as without the cache: it rounds float64 to float16 by way of float32, numpy at once.
            rounded = values.detach().to(self._rounding)
            if values.dim() == 3:
                first, lengths = self.tokens.offsets[indices], self.tokens.lengths[indices]
                valid = np.arange(values.shape[1]) < lengths[:, None]
                rounded = rounded[torch.from_numpy(valid).to(values.device)]
            if not rounded.isfinite().all():
                raise does_not_fit(self.dtype.name)
            states = rounded.cpu().numpy()
            with self._writing:
                array = self._array(name, values)
                for row, part in zip(first, np.split(states, np.cumsum(lengths)[:-1]), strict=True):
                    array.put(int(row), part)

    def _array(self, name: str, values: Tensor) -> _Array:
        if name not in self._arrays:
            count = len(self.tokens) if values.dim() == 2 else int(self.tokens.offsets[-1])
            self._arrays[name] = _Array(self.directory / f"{name}.npy", self.dtype, count, values.shape[-1])
        return self._arrays[name]

    def close(self) -> None:
        """Give the files up, whether complete or not."""
        for array in self._arrays.values():
            array.close()

    def finish(self) -> None:
        """Complete the files and list them, with their checksums, in the manifest."""
        self.close()
        np.save(self.directory / "offsets.npy", self.tokens.offsets, allow_pickle=False)
        files = {path.name: parts_checksum(path) for path in sorted(self.directory.glob("*.npy"))}
        (self.directory / MANIFEST).write_text(
            json.dumps({"version": LAYOUT, "files": files}), encoding="utf-8"
        )


def does_not_fit(dtype: str) -> UserError:
    """For states beyond the largest number of a cache's dtype."""
    return UserError(
        f"the backbone's hidden states do not fit {dtype} (or are not finite); expected cache.dtype=float32"
    )


def key_of(facts: Mapping[str, Any], tokens: TokenizedSplit) -> str:
    """The entry name for given facts about the model and the tokens of a split."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps({"version": VERSION, **facts}, sort_keys=True).encode())
    for array in (tokens.ids, tokens.offsets, tokens.types):
        digest.update(b"\0" if array is None else np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def check_ahead(entries: Iterable[Path]) -> None:
    """Read the files of the entries that are there, several at once: to open one reads them no more."""

    def check(file: Path) -> None:
        with contextlib.suppress(OSError):
            remembered_checksum(file)

    with ThreadPoolExecutor() as pool:
        list(pool.map(check, [file for entry in entries for file in entry.glob("*.npy")]))


def entry_of(root: Path, facts: Mapping[str, Any], tokens: TokenizedSplit, dtype: str) -> Path:
    """The directory that has, or will have, the features of a split."""
    return root / "features" / key_of({**facts, "dtype": dtype}, tokens)


def open_or_build(
    root: Path, facts: Mapping[str, Any], tokens: TokenizedSplit, dtype: str, fill: Callable[[Writer], None]
) -> Features:
    """The features of a split, from the cache or computed by ``fill``. A damaged entry is rebuilt."""
    entry = entry_of(root, facts, tokens, dtype)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            features = _open(entry)
            if features is None:
                _build(entry, tokens, np.dtype(dtype), fill)
                features = _open(entry)
    except OSError as error:
        if error.errno is None:  # not the disk's: of a hub or a socket inside ``fill``
            raise
        raise UserError(
            f"feature cache {root}: {error.strerror or error}; "
            "expected a writable directory with enough space (cache.directory=DIR, or --no-cache)"
        ) from error
    if features is None:
        raise UserError(
            f"feature cache {entry}: reads back other bytes than were written; the disk may be failing"
        )
    return features


def _build(entry: Path, tokens: TokenizedSplit, dtype: np.dtype[Any], fill: Callable[[Writer], None]) -> None:
    shutil.rmtree(entry, ignore_errors=True)
    for stale in entry.parent.glob(f"{entry.name}.*.partial"):  # of a killed process: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    working = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", suffix=".partial", dir=entry.parent))
    writer = Writer(working, tokens, dtype)
    try:
        fill(writer)
        writer.finish()
        os.replace(working, entry)
    finally:
        with contextlib.suppress(OSError):  # what the buffers still hold may not fit the disk
            writer.close()
        shutil.rmtree(working, ignore_errors=True)


def _open(entry: Path) -> Features | None:
    try:
        manifest = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        if manifest["version"] != LAYOUT or any(
            remembered_checksum(entry / n) != c for n, c in manifest["files"].items()
        ):
            return None
        names = set(manifest["files"])
        offsets = np.load(entry / "offsets.npy", allow_pickle=False)
        x = _mapped(entry / "x.npy") if "x.npy" in names else None
        return Features(offsets, x, _mapped(entry / "base.npy"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _mapped(path: Path) -> Tensor:
    # Copy-on-write: torch wants a writable buffer, the file is never written.
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
