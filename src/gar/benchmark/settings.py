"""What is timed: a model of a published size, its experts, and where an update's features come from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gar import presets
from gar.benchmark.models import (
    cached_source,
    count_parameters,
    find_size,
    synthetic_model,
    synthetic_splits,
)
from gar.config import CacheConfig, Config
from gar.data.load import resolve
from gar.data.tokenize import TokenizedSplit
from gar.features import RawSource, Source
from gar.methods import REGISTRY, Baseline
from gar.model import MultiTaskModel
from gar.presets import paper

#: What an update is made from: the cached states of a frozen prefix, tokens through the frozen prefix, or
#: tokens through a backbone that trains too.
FEATURES = ("cached", "uncached", "trained")
#: The presets whose tasks, batches, groups and experts an update has: five tasks at once, or one.
WORKLOADS = {
    "five": "paper/deberta_frozen_lora_ffn/five/baseline",
    "single": "paper/deberta_single_lora_ffn/MRPC/baseline",
}
#: Compared where nobody names any.
USUAL = ("baseline", "gar", "cagrad")
#: Methods; ``gar/per_group`` is GAR with the slow observation path.
METHODS = tuple(
    name + path
    for name, cls in REGISTRY.items()
    for path in ("", "/per_group")
    if not path or "gradients" in cls().observes
)
#: Of each task: lengths differ from update to update.
BATCHES = 2


@dataclass(frozen=True)
class Setting:
    """What compared methods share. ``overrides`` are configuration keys on top of it."""

    model: str
    site: str = "lora_ffn"
    features: str = "cached"
    precision: str = "float32"
    workload: str = "five"
    length: int = 64
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        """Its columns in tables."""
        return {name: getattr(self, name) for name in ("model", "site", "features", "precision")}

    def config(self, method: str = Baseline.name, changes: Mapping[str, Any] | None = None) -> Config:
        """A run of it under one of :data:`METHODS`; a user's error where there is none.

        Frozen weights are stored as the paper's presets store them, those that train in float32. The learning
        rate is next to nothing: labels are random, and the work shall be the same in every update.
        """
        name, _, observation = method.partition("/")
        trained = self.features == "trained"
        return presets.resolve_config(
            WORKLOADS[self.workload],
            {
                "backbone.name": self.model,
                "backbone.trainable": trained,
                "backbone.dtype": "float32" if trained else find_size(self.model).frozen_dtype,
                "backbone.max_length": self.length,
                "experts.site": self.site,
                "precision": self.precision,
                "method": {"name": name},
                "observation": observation or "one_pass",
                "optimizer.learning_rate": 1e-6,
                "optimizer.epochs": None,
                "preset": None,
                **self.overrides,
                **(changes or {}),
            },
        )


class Bench:
    """A setting's model, and the tokens and the source of its batches.

    All methods train this one model in turns: what the router chooses, and with it the work, is the same for
    all. ``runs`` says how many they are; each has an optimizer of its own.
    """

    def __init__(self, setting: Setting, device: torch.device, runs: int) -> None:
        config = setting.config()
        _check_memory(setting, device, runs)
        classes = [len(task.labels or ()) or 2 for task in resolve(config.mixture)[1]]
        self.model: MultiTaskModel = synthetic_model(config, classes, device)
        self.splits: Sequence[TokenizedSplit] = synthetic_splits(
            classes, BATCHES * config.mixture.batch_size, config.backbone.max_length, config.seed
        )
        self.source: Source = (
            cached_source(self.model, self.splits)
            if setting.features == "cached"
            else RawSource(self.model, self.splits, CacheConfig())
        )


def published(setting: Setting, method: str) -> paper.Runtime | None:
    """The paper's times of such an update (of DeBERTa-v3-base, float32, uncached), where it has any."""
    for row in paper.runtime():
        if row.method == method:
            theirs = presets.find(f"paper/{row.setting}/{row.mixture_or_task}/{method}").config()
            if _work(setting.config(method)) == _work(theirs):
                return row
    return None


def _work(config: Config) -> tuple[object, ...]:
    """What an update of it has to do, but for the backbone's size and the lengths."""
    experts = config.experts
    return config.mixture, config.backbone.trainable, experts.site, experts.count, experts.top_k


def _check_memory(setting: Setting, device: torch.device, runs: int) -> None:
    """Refuse what the machine's memory cannot hold: an accelerator would say so, Linux kills the process."""
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return
    dtype = setting.config().backbone.dtype
    # Trained weights have a gradient, and two moments in every optimizer.
    copies = 2 + 2 * runs if setting.features == "trained" else 1
    needed = count_parameters(setting.model) * copies * getattr(torch, dtype).itemsize
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free:
        raise MemoryError(f"{needed / 2**30:.1f} GiB of weights and moments, {free / 2**30:.1f} GiB are free")
