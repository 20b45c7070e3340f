"""What an inspection found, as data."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gar.inspection._statistics import Chance, Floats

SCHEMA = 1
#: An expert is called dead where an even share would have been so many selections at least.
EXPECTED = 20


@dataclass(frozen=True)
class Group:
    """A group of texts: ``loss`` is the mean over its predicted tokens, or its texts for a classifier."""

    name: str
    texts: int
    tokens: int
    loss: float


@dataclass(frozen=True, eq=False)
class Layer:
    """One MoE layer: T groups, E experts of which ``top_k`` take part for a token, ``parameters`` each.

    ``counts`` int64 [T, E]: selections. ``load`` [T, E]: share of a group's gates by expert, rows sum to 1;
    ``gate`` [E]: mean gate of an expert where it was selected. ``norms`` [T, E]: length of the gradient of a
    group's mean loss by the expert's own parameters; ``cosines`` [T, T] between the groups over all experts;
    ``cancelled`` [E]: share of the gradient's energy that cancels. Definitions: docs/inspect.md.
    """

    name: str
    layer: int | None
    experts: int
    top_k: float
    parameters: int
    counts: NDArray[np.int64]
    load: Floats
    gate: Floats
    load_variance: float
    utilization: float
    effective_experts: float
    entropy: float
    normalized_entropy: float
    ari: float
    structure_purity: float
    norms: Floats
    cosines: Floats
    cancelled: Floats
    gradient_mass_purity: float
    gradient_mass_floor: float
    intra_expert_coherence: float
    inter_expert_similarity: float
    nmi: Chance
    purity_above_floor: Chance
    cancelled_energy: Chance

    @property
    def title(self) -> str:
        return f"layer {self.layer}" if self.layer is not None else self.name

    @cached_property
    def dead(self) -> list[int]:
        """Experts that were never selected."""
        return [int(e) for e in np.flatnonzero(self.counts.sum(0) == 0)]

    @property
    def selections(self) -> int:
        return int(self.counts.sum())

    @property
    def even(self) -> float:
        """Selections of an expert if all had as many."""
        return self.selections / self.experts

    @property
    def few_tokens(self) -> bool:
        """Whether the texts are too few to call an expert dead."""
        return self.even < EXPECTED

    def to_dict(self) -> dict[str, Any]:
        return {**_plain(self), "dead": self.dead}


@dataclass(frozen=True, eq=False)
class Inspection:
    """What the experts of a model do on groups of texts.

    ``units`` of texts were measured together; ``permutations`` times their labels were shuffled.
    ``dimension`` is that of the gradients' sketches, None where they are exact; ``overall`` are means over
    the layers. ``findings`` are the sentences that the numbers carry, ``verdict`` is the one to act on.
    """

    model: str
    architecture: str
    loss: str
    groups: list[Group]
    units: int
    permutations: int
    tells: bool
    dimension: int | None
    relative_error: float
    layers: list[Layer]
    overall: dict[str, Chance | float]
    notes: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    verdict: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As in result.json."""
        plain = {
            f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "layers"
        }
        for group in plain["groups"]:
            group["perplexity"] = _exp(group["loss"]) if self.loss == "lm" else None
        return {
            "schema": SCHEMA,
            "kind": "inspection",
            **plain,
            "layers": [layer.to_dict() for layer in self.layers],
        }


def _exp(loss: float) -> float | None:
    return math.exp(loss) if loss < 700 else None


def _plain(value: Any) -> Any:
    """Dataclasses, arrays and tuples as what JSON has."""
    if dataclasses.is_dataclass(value):
        plain = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {**plain, "above": value.above} if isinstance(value, Chance) else plain
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
