"""Where the site states of examples come from: raw tokens through the prefix, or the feature cache.

Both give the training loop the same states, so the loop does not know which one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from gar.features._cache import Features, Writer, does_not_fit, open_or_build
from gar.model import MultiTaskModel, SiteState, evaluating, length_bucketed

#: Examples of one task: its number and their indices.
Part = tuple[int, NDArray[np.int64]]
Progress = Callable[[int, int], None]

#: Padded tokens per prefix forward, by device type: what stays in a CPU's caches, what fills a GPU.
TOKENS_PER_FORWARD = {"cpu": 1024, "cuda": 32768}
#: Share of free accelerator memory that resident features may take.
RESIDENT_SHARE = 0.4


class Source(Protocol):
    """Site states of the examples of several tasks."""

    lengths: list[NDArray[np.int64]]
    labels: list[Tensor]

    def state(self, parts: Sequence[Part]) -> SiteState:
        """States of the named examples, in order, padded to the longest, on the model's device."""
        ...


class RawSource:
    """Runs the prefix on token ids, with gradients when the backbone is trainable."""

    def __init__(self, model: MultiTaskModel, splits: Sequence[TokenizedSplit], cache: CacheConfig) -> None:
        self.model, self.splits = model, splits
        self.lengths = [split.lengths for split in splits]
        self.labels = [torch.from_numpy(split.labels).to(model.device) for split in splits]
        # A half-precision cache rounds the states of a frozen backbone; the uncached path rounds alike.
        self._rounding = torch.float16 if cache.dtype == "float16" and not model.config.trainable else None

    def state(self, parts: Sequence[Part]) -> SiteState:
        state = self.model.prefix(*self.model.tokens([(self.splits[task], rows) for task, rows in parts]))
        if self._rounding is not None:
            state = state.to(self.model.device, self._rounding)
            if not all(t.isfinite().all() for t in (state.x, state.base) if t is not None):
                raise does_not_fit("float16")
        return state.to(self.model.device, self.model.dtype)


class CachedSource:
    """Reads states computed once by a frozen prefix."""

    def __init__(
        self, model: MultiTaskModel, splits: Sequence[TokenizedSplit], features: Sequence[Features]
    ) -> None:
        # Pooled states have no token axis, and so no padding.
        self.lengths = [
            split.lengths if f.x is not None else np.ones_like(split.lengths)
            for split, f in zip(splits, features, strict=True)
        ]
        self.labels = [torch.from_numpy(split.labels).to(model.device) for split in splits]
        self._device, self._dtype = model.device, model.dtype
        resident = self._device if _fits(features, self._device) else torch.device("cpu")
        self._offsets = [torch.from_numpy(f.offsets).to(resident) for f in features]
        self._x = [None if f.x is None else f.x.to(resident) for f in features]
        self._base = [f.base.to(resident) for f in features]
        self._pooled = [f.pooled for f in features]
        self._where = resident

    def state(self, parts: Sequence[Part]) -> SiteState:
        width = max(int(self.lengths[task][rows].max()) for task, rows in parts)
        positions = torch.arange(width, device=self._where)
        x: list[Tensor] = []
        base: list[Tensor] = []
        masks: list[Tensor] = []
        for task, rows in parts:
            index = torch.from_numpy(rows).to(self._where)
            start, stop = self._offsets[task][index], self._offsets[task][index + 1]
            # Padding repeats the last token; it is masked everywhere.
            tokens = torch.minimum(start.unsqueeze(1) + positions, (stop - 1).unsqueeze(1))
            masks.append(positions < (stop - start).unsqueeze(1))
            features = self._x[task]
            if features is not None:
                x.append(features[tokens])
            base.append(self._base[task][index if self._pooled[task] else tokens])
        state = SiteState(torch.cat(x) if x else None, torch.cat(base), torch.cat(masks))
        return state.to(self._device, self._dtype)


def tokenized(model: MultiTaskModel, splits: Sequence[Split]) -> list[TokenizedSplit]:
    """The splits as token ids under the model's tokenizer and maximum length."""
    return [tokenize_split(model.tokenizer, split, model.config.max_length) for split in splits]


def make_source(
    model: MultiTaskModel,
    splits: Sequence[Split],
    cache: CacheConfig,
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Source:
    """The source for some splits: cached when the backbone is frozen and the cache enabled.

    ``progress(done, total)`` counts examples whose features are ready; ``facts`` are the model's
    :func:`prefix_facts`, where they were just computed.
    """
    tokens = tokenized(model, splits)
    if not _cached(model, cache):
        return RawSource(model, tokens, cache)
    facts = facts or prefix_facts(model)
    dtype = "float64" if (cache.dtype, model.config.dtype) == ("float32", "float64") else cache.dtype
    total, done = sum(len(split) for split in tokens), 0
    features: list[Features] = []
    for split in tokens:

        def fill(writer: Writer, split: TokenizedSplit = split, before: int = done) -> None:
            with evaluating(model), torch.no_grad():
                ready = before
                for indices in length_bucketed(
                    split.lengths, TOKENS_PER_FORWARD.get(model.device.type, 8192)
                ):
                    state = model.prefix(*model.tokens([(split, indices)]))
                    writer.put(indices, state.x, state.base)
                    ready += len(indices)
                    if progress is not None:
                        progress(ready, total)

        features.append(open_or_build(cache_root(cache.directory), facts, split, dtype, fill))
        done += len(split)
        if progress is not None:
            progress(done, total)
    return CachedSource(model, tokens, features)


def make_sources(
    model: MultiTaskModel, mixture: Mixture, cache: CacheConfig, progress: Progress | None = None
) -> tuple[Source, Source]:
    """The sources of a mixture's training and validation splits; ``progress`` counts through both."""
    splits = [[task.train for task in mixture.tasks], [task.validation for task in mixture.tasks]]
    sizes = [sum(map(len, part)) for part in splits]

    def from_(start: int) -> Progress | None:
        return None if progress is None else lambda done, total: progress(start + done, sum(sizes))

    facts = prefix_facts(model) if _cached(model, cache) else None
    return (
        make_source(model, splits[0], cache, from_(0), facts),
        make_source(model, splits[1], cache, from_(sizes[0]), facts),
    )


def _cached(model: MultiTaskModel, cache: CacheConfig) -> bool:
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
    return needed <= RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]
