"""Where a run computes: device, versions, commit."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from gar.config import Config, Kind, flat, kind_of
from gar.errors import UserError, nearest
from gar.precision import precision_on
from gar.version import __version__

T = TypeVar("T")
LIBRARIES = ("torch", "transformers", "datasets", "safetensors", "numpy", "pydantic", "scikit-learn", "scipy")


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
def computing_threads(threads: int | None) -> Iterator[None]:
    """Inside, torch computes on the CPU with this many threads; None leaves its own choice as it is."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(before)


def in_threads(do: Callable[[T], None], items: Iterable[T], threads: int) -> None:
    """``do`` for every item, in ``threads`` threads, torch computing with one thread in each of them.

    What is computed for an item has then the same bits for every number of threads. Gradient mode and other
    settings of a thread have to be set inside ``do``. The first error ends it all.
    """
    before, waiting = torch.get_num_threads(), _Taken(items)

    def work() -> None:
        torch.set_num_threads(1)
        for item in waiting:
            do(item)

    try:
        with ThreadPoolExecutor(threads) as pool:
            try:
                for worker in as_completed([pool.submit(work) for _ in range(threads)]):
                    worker.result()
            finally:  # the pool waits for the items that were begun, no more
                waiting.ended = True
    finally:
        torch.set_num_threads(before)


class _Taken(Iterator[T]):
    """An iterator that several threads take from."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items, self._lock, self.ended = iter(items), threading.Lock(), False

    def __next__(self) -> T:
        with self._lock:
            if self.ended:
                raise StopIteration
            return next(self._items)


def environment(config: Config) -> dict[str, Any]:
    """Versions, device, threads, seed and commit behind a run, and the keys that say where it runs."""
    device = resolve_device(config.device)
    places = {key: value for key, value in flat(config.to_dict()).items() if kind_of(key) is Kind.PLACE}
    return {
        "gar": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "precision": precision_on(device, config.precision),
        "seed": config.seed,
        "commit": _commit(),
        "place": {key: value for key, value in places.items() if key not in ("device", "threads")},
        "command": sys.argv,
    }


@functools.cache
def _version(library: str) -> str | None:
    """None where it is not there: what only some commands need is imported by them alone."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache  # a process runs the code that it has imported
def _commit() -> str | None:
    """The commit of the source tree the package runs from, if it is one."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=here.parent, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        # Installed inside another project, that one's commit says nothing.
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None
