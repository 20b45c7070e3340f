"""What the experts of a model do on groups of texts, without any training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from gar import metrics
from gar.data.texts import GroupedTexts, Text
from gar.errors import UserError, one_of
from gar.inspection._encode import Encoded, Unit, encode, make_units
from gar.inspection._load import LOSSES, class_index
from gar.inspection._measure import Site, find_sites, metering
from gar.inspection._rows import Reducer, choose_dimension, relative_error
from gar.inspection._statistics import (
    COMPARED,
    LEAST_PERMUTATIONS,
    Assignment,
    Chance,
    LayerUnits,
    against_chance,
    compared,
    group_gram,
    norms,
)
from gar.inspection._store import Memory, Store, layer_units
from gar.inspection._words import findings, verdict
from gar.inspection.result import Group, Inspection, Layer

MAX_LENGTH = 512
BATCH_TOKENS = 2048
PERMUTATIONS = 199
MAX_BYTES = 2**30

Progress = Callable[[str, int, int], None]


def inspect(
    model: nn.Module,
    texts: Mapping[str, Sequence[Text]] | GroupedTexts,
    tokenizer: PreTrainedTokenizerBase,
    *,
    loss: str = "lm",
    max_length: int = MAX_LENGTH,
    group_size: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    permutations: int = PERMUTATIONS,
    max_bytes: int = MAX_BYTES,
    seed: int = 0,
    name: str | None = None,
    progress: Progress | None = None,
    store: Store | None = None,
    stopping: Callable[[], bool] | None = None,
) -> Inspection:
    """Load, association with the groups, and gradients of the experts of every MoE layer of ``model``.

    ``model`` takes ``input_ids`` and ``attention_mask`` and returns ``logits``: [B, L, V] of a language model
    (``loss="lm"``: cross-entropy of every token but the first), or [B, C] of a classifier
    (``"classification"``; ``texts`` then have labels). It is left as it was; nothing is trained.

    ``texts`` are by the name of their group. They are measured in units of ``group_size`` texts of one group
    (by default, the smallest for which there are about 64 units), in batches of ``batch_tokens`` padded
    tokens. Rows of gradients, one a unit and expert, take ``max_bytes`` together: whole where they fit, else
    as sketches (``dimension`` and ``relative_error`` of the result). Labels of units are shuffled
    ``permutations`` times. ``progress`` is called with what is done, how many, and of how many.

    A model without MoE layers or with unusual ones, and texts without a token, are a
    :class:`~gar.errors.UserError`. Definitions: docs/inspect.md.
    """
    if loss not in LOSSES:
        raise one_of("loss", loss, LOSSES)
    if permutations < 0 or batch_tokens < 1:
        raise UserError(
            f"permutations and batch_tokens are {permutations} and {batch_tokens}; expected 0 and 1, or more"
        )
    sites = find_sites(model)
    grouped = texts if isinstance(texts, GroupedTexts) else GroupedTexts.of(texts)
    encoded = encode_for(model, grouped, tokenizer, loss, max_length)
    units = make_units(encoded, group_size, seed)
    store = store or Memory()
    dimension = measure(
        model, sites, encoded, units, store,
        pad=_pad(model, tokenizer, loss), batch_tokens=batch_tokens, max_bytes=max_bytes, seed=seed,
        progress=progress, stopping=stopping,
    )  # fmt: skip
    found = analyse(sites, encoded, units, store, permutations, seed, progress)
    architecture = type(model).__name__
    result = dataclasses.replace(
        found, model=name or architecture, architecture=architecture, loss=loss, dimension=dimension,
        relative_error=relative_error(dimension), notes=encoded.notes,
    )  # fmt: skip
    return dataclasses.replace(result, findings=tuple(findings(result)), verdict=verdict(result))


def encode_for(
    model: nn.Module, texts: GroupedTexts, tokenizer: PreTrainedTokenizerBase, loss: str, max_length: int
) -> Encoded:
    """Token ids that fit the model, and classes where the loss needs them."""
    config: Any = getattr(model, "config", None)
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = getattr(inner, "max_position_embeddings", None) or max_length
    vocabulary = getattr(inner, "vocab_size", None) or len(tokenizer)
    classifies = loss == "classification"
    if classifies and getattr(config, "num_labels", 0) < 2:
        raise UserError(f"{type(model).__name__} has fewer than two classes; expected a classifier")
    return encode(
        tokenizer,
        texts,
        max_length=min(max_length, longest),
        vocabulary=vocabulary,
        class_of=(lambda label: class_index(config, label)) if classifies else None,
    )


def _pad(model: nn.Module, tokenizer: PreTrainedTokenizerBase, loss: str) -> int | None:
    """The token to pad with. Classifiers find the last token by it, and take one text at a time without."""
    own = getattr(getattr(model, "config", None), "pad_token_id", None)
    if own is not None or loss == "classification":
        return own
    return int(tokenizer.pad_token_id or 0)


def measure(
    model: nn.Module,
    sites: Sequence[Site],
    encoded: Encoded,
    units: Sequence[Unit],
    store: Store,
    *,
    pad: int | None,
    batch_tokens: int,
    max_bytes: int,
    seed: int,
    progress: Progress | None = None,
    stopping: Callable[[], bool] | None = None,
) -> int | None:
    """Every unit that ``store`` does not have yet; returns the dimension of the rows, None for whole ones."""
    widest = max(max(4, p.element_size()) for site in sites for p in site.slots.values())
    sizes = {site.name: (site.experts, site.size) for site in sites}
    dimension = choose_dimension(sizes, len(units), widest, max_bytes)
    shared: dict[tuple[tuple[str, int], ...], Reducer] = {}
    reducers = [
        shared.setdefault(tuple(site.template.items()), Reducer(site.template, dimension, seed))
        for site in sites
    ]
    with metering(model, sites, reducers, pad, batch_tokens) as meter:
        for number, unit in enumerate(units):
            if progress is not None:
                progress("texts", number, len(units))
            if not store.has(number):
                store.put(number, meter.measure(encoded, unit))
            if stopping is not None and stopping():
                raise KeyboardInterrupt(
                    f"interrupted after {number + 1} of {len(units)} units; the same command goes on"
                )
    if progress is not None:
        progress("texts", len(units), len(units))
    return dimension


def analyse(
    sites: Sequence[Site],
    encoded: Encoded,
    units: Sequence[Unit],
    store: Store,
    permutations: int,
    seed: int,
    progress: Progress | None = None,
) -> Inspection:
    """The numbers of every layer, and those under shuffled labels, from what the units showed."""
    count, groups = len(units), len(encoded.names)
    totals = {key: np.array(values) for key, values in store.totals(count).items()}
    labels = np.array([unit.group for unit in units])
    own = Assignment(labels, totals["losses"], groups)
    shuffled = own.shuffled(permutations if groups > 1 else 0, seed)
    weights = torch.from_numpy(own.weights.mean(0))
    layers: list[dict[str, Any]] = []
    chance = np.empty((len(COMPARED), len(shuffled), len(sites)))
    for at, site in enumerate(sites):
        if progress is not None:
            progress("layers", at, len(sites))
        seen = layer_units(store, count, at, weights)
        layers.append(_numbers(site, seen, own, own.sums(totals["texts"]), int(totals["tokens"].sum())))
        for b, other in enumerate(shuffled):
            chance[:, b, at] = list(compared(seen, other).values())
    if progress is not None:
        progress("layers", len(sites), len(sites))
    overall: dict[str, Chance | float] = {
        key: float(np.mean([layer[key] for layer in layers])) for key in AVERAGED
    }
    for which, what in enumerate(COMPARED):
        beside, overall[what] = against_chance([layer[what] for layer in layers], chance[which])
        for layer, value in zip(layers, beside, strict=True):
            layer[what] = value
    losses, sums = own.sums(totals["losses"]), own.sums(totals["loss"])
    tokens, number = own.sums(totals["tokens"]), own.sums(totals["texts"])
    found = [
        Group(name, int(number[t]), int(tokens[t]), float(sums[t] / losses[t]))
        for t, name in enumerate(encoded.names)
    ]
    return Inspection(
        model="", architecture="", loss="", groups=found, units=count, permutations=len(shuffled),
        tells=own.tells and len(shuffled) >= LEAST_PERMUTATIONS, dimension=None, relative_error=0.0,
        layers=[Layer(**layer) for layer in layers], overall=overall,
    )  # fmt: skip


#: Numbers of a layer whose mean over layers is given.
AVERAGED = (
    "load_variance", "utilization", "effective_experts", "entropy", "normalized_entropy", "ari",
    "structure_purity", "gradient_mass_purity", "gradient_mass_floor",
    "intra_expert_coherence", "inter_expert_similarity",
)  # fmt: skip


def _numbers(site: Site, seen: LayerUnits, own: Assignment, texts: Any, tokens: int) -> dict[str, Any]:
    """The fields of a :class:`Layer`; what is compared with shuffled labels as plain numbers."""
    counts, shares = own.sums(seen.counts), own.sums(seen.shares)
    chosen = counts.sum(0)
    load = shares.sum(0) / max(1, texts.sum())
    gram = group_gram(seen, own)
    entropy = float(seen.entropy.sum() / max(1, texts.sum()))
    return {
        "name": site.name,
        "layer": site.layer,
        "experts": site.experts,
        "top_k": float(chosen.sum() / max(1, tokens)),
        "parameters": site.size,
        "counts": counts,
        "load": shares / np.maximum(texts, 1)[:, None],
        "gate": seen.gates.sum(0) / np.maximum(chosen, 1),
        "load_variance": metrics.load_variance(load),
        "utilization": metrics.utilization(load),
        "effective_experts": metrics.effective_experts(load),
        "entropy": entropy,
        "normalized_entropy": entropy / math.log(site.experts) if site.experts > 1 else 0.0,
        "ari": metrics.adjusted_rand_index(counts),
        "structure_purity": metrics.structure_purity(counts),
        "norms": norms(gram),
        "gradient_mass_purity": metrics.gradient_mass_purity(norms(gram)),
        "gradient_mass_floor": metrics.gradient_mass_floor(norms(gram)),
        "cosines": metrics.task_cosines(gram=gram),
        "cancelled": np.array(metrics.cancelled_by_expert(gram=gram)),
        "intra_expert_coherence": metrics.intra_expert_coherence(gram=gram),
        "inter_expert_similarity": metrics.inter_expert_similarity(gram=seen.between),
        **compared(seen, own),
    }
