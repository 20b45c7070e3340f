"""From units to the numbers of a layer, and to the same numbers under shuffled group labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gar import metrics

Floats = NDArray[np.float64]

#: Claims are made at this level, for all layers of a model together.
LEVEL = 0.05
#: Fewer shuffles leave no p-value of it within reach.
LEAST_PERMUTATIONS = round(1 / LEVEL) - 1
#: The middle share of shuffled values that a band covers.
BAND = (2.5, 97.5)
ROUNDING = 1e-9
#: Numbers that are compared with shuffled labels.
COMPARED = ("nmi", "purity_above_floor", "cancelled_energy")


@dataclass(frozen=True)
class Chance:
    """A number beside what it is where the units' group labels are shuffled.

    ``mean``, ``low`` and ``high`` (the middle 95 %) are of the shuffled values of this layer alone. ``p`` is
    adjusted for the number of layers (Westfall and Young's maximum of standardised values); None where
    nothing was shuffled, as with one group.
    """

    value: float
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None

    @property
    def above(self) -> bool:
        """Whether the value is higher than shuffled labels give, at the 5 % level over all layers."""
        return self.p is not None and self.p <= LEVEL


@dataclass(frozen=True, eq=False)
class LayerUnits:
    """What M units showed in one layer.

    ``counts``, ``shares`` and ``gates`` [M, E], ``entropy`` [M]; ``gram`` [E, M, M] are the inner products of
    the gradients of their summed losses, ``between`` [E, E] those of the experts' mean gradients.
    """

    counts: NDArray[np.int64]
    shares: Floats
    gates: Floats
    entropy: Floats
    gram: Floats
    between: Floats


@dataclass(frozen=True)
class Assignment:
    """Which of T groups each unit belongs to, [M], and how many losses each unit sums, [M]."""

    groups: NDArray[np.int64]
    losses: NDArray[np.int64]
    count: int

    @property
    def weights(self) -> Floats:
        """[T, M]: times the units' rows, the gradient of each group's mean loss."""
        found = np.zeros((self.count, len(self.groups)))
        found[self.groups, np.arange(len(self.groups))] = 1.0
        return found / np.maximum(found @ self.losses, 1)[:, None]

    def sums(self, values: NDArray[Any]) -> NDArray[Any]:
        """[M, ...] to [T, ...]."""
        found = np.zeros((self.count, *values.shape[1:]), values.dtype)
        np.add.at(found, self.groups, values)
        return found

    def shuffled(self, number: int, seed: int) -> list[Assignment]:
        """As many others of the same sizes, drawn at random."""
        draw = np.random.default_rng(seed)
        return [Assignment(draw.permutation(self.groups), self.losses, self.count) for _ in range(number)]

    @property
    def arrangements(self) -> float:
        """How many different assignments of these sizes there are, groups of one size not told apart."""
        sizes = np.bincount(self.groups, minlength=self.count)
        ways = math.lgamma(len(self.groups) + 1) - sum(math.lgamma(n + 1) for n in sizes)
        ways -= sum(math.lgamma(n + 1) for n in np.unique(sizes, return_counts=True)[1])
        return math.exp(min(ways, 700.0))

    @property
    def tells(self) -> bool:
        """Whether a p-value of the level is within reach: several groups, and enough ways to shuffle."""
        return self.count > 1 and self.arrangements > 1 / LEVEL - 1


def group_gram(units: LayerUnits, assignment: Assignment) -> Floats:
    """Inner products [E, T, T] of the groups' gradients within each expert."""
    weights = assignment.weights
    return weights @ units.gram @ weights.T


def compared(units: LayerUnits, assignment: Assignment) -> dict[str, float]:
    """The numbers that are compared with shuffled labels, in the order of :data:`COMPARED`."""
    gram = group_gram(units, assignment)
    found = (
        metrics.normalized_mutual_information(assignment.sums(units.counts)),
        metrics.purity_above_floor(norms(gram)),
        metrics.cancelled_energy(gram=gram),
    )
    return dict(zip(COMPARED, found, strict=True))


def norms(gram: Floats) -> Floats:
    """Lengths [T, E] from inner products [E, T, T]."""
    return np.sqrt(np.maximum(np.diagonal(gram, axis1=1, axis2=2), 0.0)).T


def against_chance(values: Sequence[float], shuffled: Floats) -> tuple[list[Chance], Chance]:
    """Each of L layers' values beside its shuffled ones [B, L], and the mean over layers beside its own.

    The p-value of a layer is the share of shuffles, the data's own labels among them, whose largest
    standardised value over the layers is at least the layer's; one test over a family of layers.
    """
    found, count = np.array(values), len(shuffled)
    whole = float(found.mean())
    if not count:
        return [Chance(value) for value in values], Chance(whole)
    mean = shuffled.mean(0)
    # The data's own labels are one of the ways to shuffle: with them the test keeps its level exactly.
    together = np.vstack([shuffled, found])
    centre, spread = together.mean(0), together.std(0)

    def standard(x: Floats) -> Floats:
        # Without spread nothing is told apart.
        return np.where(spread > ROUNDING, (x - centre) / np.where(spread > ROUNDING, spread, 1.0), 0.0)

    largest = standard(shuffled).max(1)
    p = [(1 + int((largest >= z - ROUNDING).sum())) / (count + 1) for z in standard(found)]
    low, high = np.percentile(shuffled, BAND, axis=0)
    layers = [
        Chance(float(v), float(m), float(a), float(b), q)
        for v, m, a, b, q in zip(found, mean, low, high, p, strict=True)
    ]
    means = shuffled.mean(1)
    below, above = np.percentile(means, BAND)
    share = (1 + int((means >= whole - ROUNDING).sum())) / (count + 1)
    return layers, Chance(whole, float(means.mean()), float(below), float(above), share)
