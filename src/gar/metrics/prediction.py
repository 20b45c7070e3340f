"""Whether a property of mixtures predicts a gain in them, when mixtures share tasks.

Mixtures that share a task are no independent observations: one unusual task moves all that hold it. So
beside the usual bootstrap over mixtures there is one over tasks (the vertex bootstrap of Snijders and
Borgatti, 1999): tasks are drawn with replacement, and a mixture counts as often as the product of its tasks'
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from gar.metrics._arrays import Floats, Values, real

DRAWS = 1000


class Prediction(NamedTuple):
    """How a predictor goes with a gain over mixtures: Spearman's correlation and what is known of it.

    ``low`` and ``high`` are the 95 % interval of the bootstrap over tasks, ``naive`` that over mixtures;
    ``p`` is the two-sided permutation value over mixtures; ``without`` are the smallest and the largest
    correlation when all mixtures with one task are left out. NaN where there is none.
    """

    rho: float
    low: float
    high: float
    naive: tuple[float, float]
    p: float
    without: tuple[float, float]
    mixtures: int
    tasks: int

    @property
    def found(self) -> bool:
        """Whether the interval over tasks is on one side of 0, and rho too whichever task is left out."""
        return bool((self.low > 0 and self.without[0] > 0) or (self.high < 0 and self.without[1] < 0))


def rank_correlation(x: Values, y: Values) -> float:
    """Spearman's rank correlation of ``x`` and ``y`` [N], ties at their mean rank.

    Range: -1 to 1. Degenerate: NaN with fewer than 3 values or where one side has one value only.

    >>> round(rank_correlation([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 30.0, 40.0]), 6)
    0.8
    """
    return _spearman(real(x, "x", "N"), real(y, "y", "N"))


def predicts(
    predictor: Values, gain: Values, mixtures: Sequence[Collection[str]], draws: int = DRAWS
) -> Prediction:
    """How ``predictor`` [N] goes with ``gain`` [N] over N mixtures, each given by its tasks.

    The same input gives the same numbers: the draws are those of a fixed seed of numpy's frozen generator.

    Degenerate: an interval needs half of its draws to have a correlation, else it is NaN. With few tasks a
    draw holds few different mixtures, and the interval over tasks is wide: eight tasks are few.
    """
    x, y = real(predictor, "predictor", "N"), real(gain, "gain", "N")
    if not len(x) == len(y) == len(mixtures):
        raise ValueError(f"expected one value a mixture, got {len(x)}, {len(y)} and {len(mixtures)} mixtures")
    tasks = sorted({task for mixture in mixtures for task in mixture})
    holds = np.array([[task in mixture for task in tasks] for mixture in mixtures])
    draw = np.random.RandomState(0)  # its stream is frozen, unlike that of default_rng
    n, m, rho = len(x), len(tasks), _spearman(x, y)
    by_mixture, by_task, permuted = [], [], []
    a, b = _ranks(x), _ranks(y)
    for _ in range(draws):
        rows = draw.randint(0, n, n)
        by_mixture.append(_spearman(x[rows], y[rows]))
        times = np.bincount(draw.randint(0, m, m), minlength=m)
        rows = np.repeat(np.arange(n), np.where(holds, times, 1).prod(1))
        by_task.append(_spearman(x[rows], y[rows]))
        permuted.append(_pearson(a, b[draw.permutation(n)]))
    beyond = sum(abs(value) >= abs(rho) - 1e-12 for value in permuted)
    left = [_spearman(x[~holds[:, task]], y[~holds[:, task]]) for task in range(m)]
    low, high = _interval(by_task)
    return Prediction(
        rho=rho,
        low=low,
        high=high,
        naive=_interval(by_mixture),
        p=math.nan if math.isnan(rho) else (1 + beyond) / (1 + draws),
        without=(min(left), max(left)) if np.isfinite(left).all() else (math.nan, math.nan),
        mixtures=n,
        tasks=m,
    )


def holm(values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number by Holm's step-down method.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, worst = [math.nan] * len(values), 0.0
    order = sorted((value, i) for i, value in enumerate(values) if not math.isnan(value))
    for rank, (value, i) in enumerate(order):
        worst = max(worst, min(1.0, (len(order) - rank) * value))
        adjusted[i] = worst
    return adjusted


def _spearman(x: Floats, y: Floats) -> float:
    return _pearson(_ranks(x), _ranks(y))


def _ranks(values: Floats) -> Floats:
    """Ranks from 1, ties at their mean."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (counts.cumsum() - (counts - 1) / 2)[place]
    return ranks


def _pearson(a: Floats, b: Floats) -> float:
    if len(a) < 3 or len(b) != len(a):
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    length = math.sqrt(float(a @ a) * float(b @ b))
    return float(np.clip(a @ b / length, -1.0, 1.0)) if length > 0 else math.nan


def _interval(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    if 2 * len(finite) < len(values):
        return math.nan, math.nan
    low, high = np.quantile(finite, [0.025, 0.975])
    return float(low), float(high)
