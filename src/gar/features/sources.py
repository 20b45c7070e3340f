"""Where the site states of examples come from: raw tokens through the prefix, or the feature cache.

Both give the training loop the same states, so the loop does not know which one runs.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from gar.config import CacheConfig
from gar.data.paths import cache_root
from gar.data.task import Mixture, Split
from gar.data.tokenize import TokenizedSplit, tokenize_split
from gar.features._cache import Features, Writer, check_ahead, does_not_fit, entry_of, open_or_build
from gar.model import Known, MultiTaskModel, SiteState, evaluating, length_bucketed
from gar.runs.environment import in_threads

#: Examples of one task: its number and their indices.
Part = tuple[int, NDArray[np.int64]]
Progress = Callable[[int, int], None]

#: Padded tokens per prefix forward, by device type: what stays in a CPU's caches, what fills a GPU.
TOKENS_PER_FORWARD = {"cpu": 1024, "cuda": 16384}
#: Forwards at a time beside a GPU: while it computes one, the states of another are written.
AHEAD = 2
#: Widths that texts are padded to on a GPU, at most, so that few shapes occur.
WIDTHS = 8
#: Share of free accelerator memory that resident features may take.
RESIDENT_SHARE = 0.4


class Source(Protocol):
    """Site states of the examples of several tasks."""

    lengths: list[NDArray[np.int64]]
    labels: list[Tensor]
    splits: Sequence[TokenizedSplit]

    def state(self, parts: Sequence[Part]) -> SiteState:
        """States of the named examples, in order, padded to the longest, on the model's device."""
        ...


class Keep(Protocol):
    """Gives what ``make`` makes, or what it made for an equal key before."""

    def __call__(
        self, key: Hashable, make: Callable[[], list[CachedSource]], /
    ) -> Sequence[CachedSource]: ...


class RawSource:
    """Runs the prefix on token ids, with gradients when the backbone is trainable."""

    def __init__(self, model: MultiTaskModel, splits: Sequence[TokenizedSplit], cache: CacheConfig) -> None:
        self.model, self.splits = model, splits
        self.lengths = [split.lengths for split in splits]
        self.labels = [torch.from_numpy(split.labels).to(model.device) for split in splits]
        self.table = TokenTable.of(model, splits, self.labels)
        #: A half-precision cache rounds the states of a frozen backbone; the uncached path rounds alike.
        self.rounding = torch.float16 if cache.dtype == "float16" and not model.config.trainable else None

    def shape(self, parts: Sequence[Part]) -> tuple[int, bool]:
        """Padded tokens of such examples together, and whether any of them is padding."""
        lengths = [self.lengths[task][rows] for task, rows in parts]
        width = self.table.width(max(int(own.max()) for own in lengths))
        return width, any(int(own.min()) < width for own in lengths)

    def state(self, parts: Sequence[Part]) -> SiteState:
        rows = torch.from_numpy(self.table.rows(parts)).to(self.model.device, non_blocking=True)
        state = self.table.state(rows, *self.shape(parts))
        if self.rounding is not None:
            state = state.to(self.model.device, self.rounding)
            if not all(t.isfinite().all() for t in (state.x, state.base) if t is not None):
                raise does_not_fit("float16")
        return state.to(self.model.device, self.model.dtype)


class CachedSource:
    """Reads states computed once by a frozen prefix.

    Where they fit the device they lie there as one table over all tasks, ``table``; else they stay, task by
    task, on the host.
    """

    def __init__(
        self, model: MultiTaskModel, splits: Sequence[TokenizedSplit], features: Sequence[Features]
    ) -> None:
        self.splits = splits
        # Pooled states have no token axis, and so no padding.
        self.lengths = [
            split.lengths if f.x is not None else np.ones_like(split.lengths)
            for split, f in zip(splits, features, strict=True)
        ]
        self.labels = [torch.from_numpy(split.labels).to(model.device) for split in splits]
        self._device, self._dtype = model.device, model.dtype
        self._features = features
        self._offsets = [torch.from_numpy(f.offsets) for f in features]
        on_device = model.device.type == "cuda" and _fits(features, model.device)
        self.table = Table.of(features, self.labels, model.device) if on_device else None

    @property
    def nbytes(self) -> int:
        """Of the table on the device; 0 where the features stay on the host."""
        if self.table is None:
            return 0
        kept = self.table.features
        return kept.base.nbytes + (0 if kept.x is None else kept.x.nbytes)

    def state(self, parts: Sequence[Part]) -> SiteState:
        width = max(int(self.lengths[task][rows].max()) for task, rows in parts)
        if self.table is not None:
            rows = torch.from_numpy(self.table.rows(parts)).to(self._device, non_blocking=True)
            return self.table.state(rows, width).to(self._device, self._dtype)
        states = [
            _gather(self._features[task], self._offsets[task], torch.from_numpy(rows), width)
            for task, rows in parts
        ]
        x = None if states[0].x is None else torch.cat([s.x for s in states if s.x is not None])
        state = SiteState(x, torch.cat([s.base for s in states]), torch.cat([s.mask for s in states]))
        return state.to(self._device, self._dtype)


@dataclass(frozen=True)
class Table:
    """The states and labels of several tasks one after the other, on one device.

    ``first`` [T] is each task's first row; rows of the table count over all tasks.
    """

    features: Features
    offsets: Tensor
    labels: Tensor
    first: NDArray[np.int64]

    @classmethod
    def of(cls, parts: Sequence[Features], labels: Sequence[Tensor], device: torch.device) -> Table:
        offsets = np.concatenate([[0], *(np.diff(part.offsets) for part in parts)]).cumsum()
        x = None if parts[0].x is None else _stacked([p.x for p in parts if p.x is not None], device)
        features = Features(offsets, x, _stacked([part.base for part in parts], device))
        first = np.concatenate([[0], np.cumsum([len(own) for own in labels])[:-1]])
        return cls(features, torch.from_numpy(offsets).to(device), torch.cat(list(labels)), first)

    def rows(self, parts: Sequence[Part]) -> NDArray[np.int64]:
        """Rows of the table, int64 [B], of examples of the tasks."""
        return np.concatenate([self.first[task] + rows for task, rows in parts])

    def state(self, rows: Tensor, width: int) -> SiteState:
        """States of rows int64 [B], padded to ``width`` tokens, in the dtype in which they are kept."""
        return _gather(self.features, self.offsets, rows, width)


@dataclass(frozen=True)
class TokenTable:
    """The tokens and labels of several tasks one after the other, on the model's device.

    ``first`` [T] is each task's first row; rows of the table count over all tasks. Texts are padded to
    multiples of ``step`` tokens, but to ``longest`` at most.
    """

    model: MultiTaskModel
    ids: Tensor
    types: Tensor | None
    offsets: Tensor
    labels: Tensor
    first: NDArray[np.int64]
    step: int
    longest: int
    positions: Tensor | None

    @classmethod
    def of(
        cls, model: MultiTaskModel, splits: Sequence[TokenizedSplit], labels: Sequence[Tensor]
    ) -> TokenTable:
        device = model.device
        types = [split.types for split in splits if split.types is not None]
        longest = max(int(split.lengths.max(initial=1)) for split in splits)
        # On a GPU few widths: each has kernels of its own to be found, and a graph of its own.
        step = width_step(longest) if device.type == "cuda" else 1
        offsets = np.concatenate([[0], *(split.lengths for split in splits)]).cumsum()
        return cls(
            model,
            torch.from_numpy(np.concatenate([split.ids for split in splits])).to(device),
            torch.from_numpy(np.concatenate(types)).to(device) if len(types) == len(splits) else None,
            torch.from_numpy(offsets).to(device),
            torch.cat(list(labels)),
            np.concatenate([[0], np.cumsum([len(own) for own in labels])[:-1]]),
            step,
            longest,
            model.positions(longest) if device.type == "cuda" or model.config.trainable else None,
        )

    def width(self, length: int) -> int:
        """Tokens that a text of this length is padded to."""
        return min(self.step * -(-length // self.step), self.longest)

    def rows(self, parts: Sequence[Part]) -> NDArray[np.int64]:
        """Rows of the table, int64 [B], of examples of the tasks."""
        return np.concatenate([self.first[task] + rows for task, rows in parts])

    def state(self, rows: Tensor, width: int, padded: bool) -> SiteState:
        """The prefix's output for rows int64 [B] of ``width`` tokens, some of which are padding or not."""
        tokens, mask = _places(self.offsets, rows, width)
        ids = torch.where(mask, self.ids[tokens], self.model.padding).long()
        types = None if self.types is None else torch.where(mask, self.types[tokens], 0).long()
        relative = None if self.positions is None else self.positions[:, :width, :width]
        return self.model.prefix(ids, mask, types, Known(padded, relative))


def _gather(features: Features, offsets: Tensor, rows: Tensor, width: int) -> SiteState:
    tokens, mask = _places(offsets, rows, width)
    x = None if features.x is None else features.x[tokens]
    base = features.base[rows if features.pooled else tokens]
    return SiteState(x, base, mask)


def _places(offsets: Tensor, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Where the tokens of rows [B] lie, int64 [B, width], and which of them are there, bool."""
    positions = torch.arange(width, device=rows.device)
    start, stop = offsets[rows].unsqueeze(1), offsets[rows + 1].unsqueeze(1)
    # Padding repeats the last token; it is masked everywhere.
    return torch.minimum(start + positions, stop - 1), positions < stop - start


def width_step(longest: int) -> int:
    """Texts of up to ``longest`` tokens are padded to multiples of this, a multiple of 8 itself.

    >>> [width_step(n) for n in (5, 64, 65, 128)]
    [8, 8, 16, 16]
    """
    return 8 * -(-longest // (8 * WIDTHS))


def _stacked(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """One tensor on the device, filled part by part: the host never holds a copy of all."""
    table = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:], device=device)
    for part, own in zip(table.split([len(part) for part in parts]), parts, strict=True):
        part.copy_(own)
    return table


def tokenized(model: MultiTaskModel, splits: Sequence[Split]) -> list[TokenizedSplit]:
    """The splits as token ids under the model's tokenizer and maximum length."""
    return [tokenize_split(model.tokenizer, split, model.config.max_length) for split in splits]


def make_source(
    model: MultiTaskModel, splits: Sequence[Split], cache: CacheConfig, progress: Progress | None = None
) -> Source:
    """The source for some splits: cached when the backbone is frozen and the cache enabled.

    ``progress(done, total)`` counts examples whose features are ready.
    """
    (source,) = sources_of(model, [tokenized(model, splits)], cache, progress)
    return source


def make_sources(
    model: MultiTaskModel,
    mixture: Mixture,
    cache: CacheConfig,
    progress: Progress | None = None,
    selection: Mixture | None = None,
) -> list[Source]:
    """The sources of a mixture's training and validation splits, and of its selection part if there is one.

    ``progress`` counts through all of them.
    """
    splits = [[task.train for task in mixture.tasks], [task.validation for task in mixture.tasks]]
    if selection is not None:
        splits.append([task.validation for task in selection.tasks])
    return sources_of(model, [tokenized(model, part) for part in splits], cache, progress)


def sources_of(
    model: MultiTaskModel,
    parts: Sequence[Sequence[TokenizedSplit]],
    cache: CacheConfig,
    progress: Progress | None = None,
    keep: Keep | None = None,
) -> list[Source]:
    """One source for each part, the splits of several tasks; ``progress`` counts through all of them.

    ``keep(key, make)`` may give back what it got for the same key before, see :class:`Keep`.
    """
    if not is_cached(model, cache):
        return [RawSource(model, part, cache) for part in parts]
    splits = [split for part in parts for split in part]
    place = _Place.of(model, cache)
    features = place.features(model, splits, progress)

    def make() -> list[CachedSource]:
        own = iter(features)
        return [CachedSource(model, part, [next(own) for _ in part]) for part in parts]

    labels = hashlib.blake2b(b"".join(split.labels.tobytes() for split in splits)).hexdigest()
    shape = tuple(map(len, parts))
    key = (tuple(entry.name for entry in place.entries(splits)), shape, labels, model.device, model.dtype)
    return list(make() if keep is None else keep(key, make))


def build_features(
    model: MultiTaskModel,
    splits: Sequence[TokenizedSplit],
    cache: CacheConfig,
    progress: Progress | None = None,
) -> list[Features]:
    """The features of splits under a frozen backbone, from the cache or computed into it, in order."""
    return _Place.of(model, cache).features(model, splits, progress)


def absent_features(
    model: MultiTaskModel, splits: Sequence[TokenizedSplit], cache: CacheConfig
) -> list[TokenizedSplit]:
    """The splits whose features the cache does not have; those that it has may still be damaged."""
    entries = zip(splits, _Place.of(model, cache).entries(splits), strict=True)
    return [split for split, entry in entries if not entry.is_dir()]


@dataclass(frozen=True)
class _Place:
    """Where the features of a prefix lie; its facts are asked for once, since they read all weights."""

    facts: dict[str, Any]
    root: Path
    dtype: str

    @classmethod
    def of(cls, model: MultiTaskModel, cache: CacheConfig) -> _Place:
        exact = (cache.dtype, model.config.dtype) == ("float32", "float64")
        return cls(prefix_facts(model), cache_root(cache.directory), "float64" if exact else cache.dtype)

    def entries(self, splits: Sequence[TokenizedSplit]) -> list[Path]:
        return [entry_of(self.root, self.facts, split, self.dtype) for split in splits]

    def features(
        self, model: MultiTaskModel, splits: Sequence[TokenizedSplit], progress: Progress | None
    ) -> list[Features]:
        """From the cache, or computed into it."""
        check_ahead(self.entries(splits))
        counter = _Counter(progress, sum(map(len, splits)))
        features = []
        for split in splits:
            fill = partial(_fill, model, split, counter)
            features.append(open_or_build(self.root, self.facts, split, self.dtype, fill))
            counter.done(split)
        return features


def _fill(model: MultiTaskModel, split: TokenizedSplit, counter: _Counter, writer: Writer) -> None:
    """Compute the states of a split: several forwards at a time, each of examples of about one length."""
    device = model.device.type

    def compute(indices: NDArray[np.int64]) -> None:
        with torch.no_grad():
            state = model.prefix(*model.tokens([(split, indices)]))
            writer.put(indices, state.x, state.base)
        counter.add(len(indices))

    batches = length_bucketed(split.lengths, TOKENS_PER_FORWARD.get(device, 8192))
    with evaluating(model), model.computing():  # the process's switches are set once, not by every thread
        in_threads(compute, batches, torch.get_num_threads() if device == "cpu" else AHEAD)


class _Counter:
    """Counts examples through several splits, in any number of threads."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total
        self._before = self._now = 0
        self._lock = threading.Lock()

    def add(self, examples: int) -> None:
        with self._lock:
            self._now += examples
            if self._progress is not None:
                self._progress(self._now, self._total)

    def done(self, split: TokenizedSplit) -> None:
        """All of a split, whether it was computed or found."""
        self._before += len(split)
        if self._now < self._before:
            self.add(self._before - self._now)


def is_cached(model: MultiTaskModel, cache: CacheConfig) -> bool:
    """Whether the model's site states are computed once, and kept."""
    return cache.enabled and not model.config.trainable


def prefix_facts(model: MultiTaskModel) -> dict[str, Any]:
    """Everything beside the tokens that determines a frozen prefix's output, with its weights as they are."""
    return {
        "backbone": model.backbone_fingerprint,
        "architecture": model.backbone.config.to_dict() | {"_name_or_path": "", "transformers_version": ""},
        "site": model.experts_config.site,
        "pooling": model.config.pooling,
        "precision": model.precision,
        "device": model.device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _fits(features: Sequence[Features], device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    needed = sum(t.nbytes for f in features for t in (f.x, f.base) if t is not None)
    # What torch holds back for later tensors, of an earlier run for one, is free as well.
    held_back = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return needed <= RESIDENT_SHARE * (torch.cuda.mem_get_info(device)[0] + held_back)
