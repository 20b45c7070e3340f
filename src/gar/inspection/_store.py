"""Where measured units are kept: in memory, or as files of a directory from which a later process goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gar.inspection._measure import UnitRecord
from gar.inspection._statistics import LayerUnits
from gar.runs.files import write_bytes

_PARTS = ("counts", "gates", "shares", "entropy", "rows")


class Store(Protocol):
    """Records of units by number."""

    def has(self, number: int) -> bool: ...

    def put(self, number: int, record: UnitRecord) -> None: ...

    def totals(self, count: int) -> dict[str, list[Any]]:
        """``texts``, ``tokens``, ``losses`` and ``loss`` of the first ``count`` units."""
        ...

    def parts(self, count: int, layer: int) -> Iterator[dict[str, Tensor]]:
        """What the first ``count`` units showed in one layer."""
        ...


class Memory:
    """A :class:`Store` in this process."""

    def __init__(self) -> None:
        self._records: dict[int, UnitRecord] = {}

    def has(self, number: int) -> bool:
        return number in self._records

    def put(self, number: int, record: UnitRecord) -> None:
        self._records[number] = record

    def totals(self, count: int) -> dict[str, list[Any]]:
        records = [self._records[n] for n in range(count)]
        return {key: [getattr(r, key) for r in records] for key in ("texts", "tokens", "losses", "loss")}

    def parts(self, count: int, layer: int) -> Iterator[dict[str, Tensor]]:
        for n in range(count):
            found = self._records[n].layers[layer]
            yield {part: getattr(found, part) for part in _PARTS}


class Files:
    """A :class:`Store` in a directory, one file a unit, each written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _file(self, number: int) -> Path:
        return self._path / f"{number:05d}.safetensors"

    def has(self, number: int) -> bool:
        if not self._file(number).is_file():
            return False
        try:
            with safe_open(self._file(number), "pt") as file:
                return "totals" in file.keys()  # noqa: SIM118 - it is no mapping
        except (SafetensorError, OSError):
            return False  # measured again

    def put(self, number: int, record: UnitRecord) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        facts = [record.texts, record.tokens, record.losses, record.loss]
        tensors = {"totals": torch.tensor(facts, dtype=torch.float64)}
        for layer, found in enumerate(record.layers):
            tensors |= {f"{part}.{layer}": getattr(found, part).contiguous() for part in _PARTS}
        write_bytes(self._file(number), save(tensors))

    def totals(self, count: int) -> dict[str, list[Any]]:
        found = []
        for n in range(count):
            with safe_open(self._file(n), "pt") as file:
                found.append(file.get_tensor("totals").tolist())
        texts, tokens, losses, loss = zip(*found, strict=True)
        whole = {"texts": texts, "tokens": tokens, "losses": losses}
        return {**{key: [int(v) for v in values] for key, values in whole.items()}, "loss": list(loss)}

    def parts(self, count: int, layer: int) -> Iterator[dict[str, Tensor]]:
        for n in range(count):
            with safe_open(self._file(n), "pt") as file:
                yield {part: file.get_tensor(f"{part}.{layer}") for part in _PARTS}

    def clear(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


def layer_units(store: Store, count: int, layer: int, weights: Tensor) -> LayerUnits:
    """One layer of all units; only here are their rows in memory together.

    ``weights`` [M] make the mean over groups of a gradient.
    """
    stacked: dict[str, list[Tensor]] = {part: [] for part in _PARTS}
    for found in store.parts(count, layer):
        for part, tensor in found.items():
            stacked[part].append(tensor)
    rows = stacked.pop("rows")
    small = {part: torch.stack(tensors).numpy() for part, tensors in stacked.items()}
    experts = rows[0].shape[0]
    gram = np.empty((experts, count, count))
    means = []
    for e in range(experts):
        own = torch.stack([row[e] for row in rows]).double()
        gram[e] = (own @ own.T).numpy()
        means.append(weights @ own)
    mean = torch.stack(means)
    return LayerUnits(**small, gram=gram, between=(mean @ mean.T).numpy())
