"""From single runs to statements about methods.

Order of aggregation: tasks within a run (equal weight), mixtures within a seed (:func:`seed_means`), then
seeds. Values stay unrounded until they are shown. Paper: appendix "Metric Definitions and Aggregation".
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from scipy.special import stdtr, stdtrit  # scipy.stats takes longer to import than to read a hundred runs

from gar.metrics._arrays import Floats, Values, real
from gar.metrics.catalogue import METRICS, OBJECTIVES, ROUNDING


class PairedDifference(NamedTuple):
    """Mean of the differences and their interval; ``low`` and ``high`` are None where one seed is all."""

    mean: float
    low: float | None
    high: float | None


def t_test(differences: Sequence[float] | Floats) -> float:
    """The two-sided p-value of Student's t-test that ``differences`` [S] have mean 0.

    It belongs to the interval of :func:`paired_difference`: below 0.05 where that excludes 0. NaN for fewer
    than two, and where they are all equal up to rounding.

    >>> round(t_test([0.02, 0.01, 0.03]), 4)
    0.0742
    """
    if len(differences) < 2:
        return math.nan
    values = real(differences, "differences", "S")
    spread = float(values.std(ddof=1))
    if spread <= ROUNDING:
        return math.nan
    return float(2 * stdtr(len(values) - 1, -abs(float(values.mean())) * math.sqrt(len(values)) / spread))


def population_std(values: Values) -> float:
    """Population standard deviation ``sqrt((1/S) sum_s (a_s - mean)^2)`` of ``values`` [S].

    Range: 0 and up. Source: paper, "Accuracy and seed standard deviation". Degenerate: one seed gives 0, the
    formula's value, which says nothing about spread. No value at all is refused.

    >>> population_std([1.0, 2.0, 3.0, 4.0])
    1.118033988749895
    """
    seeds = real(values, "values", "S").tolist()
    mean = _mean(seeds)
    return math.sqrt(_mean([(v - mean) ** 2 for v in seeds]))


def seed_means(
    table: Mapping[tuple[str, int], float], mixtures: Iterable[str] | None = None
) -> dict[int, float]:
    """Equal-weight mean over mixtures within each seed, from ``{(mixture, seed): value}``.

    ``mixtures`` picks some of them, for example a bin of task counts; without it all are used. Sorted by
    seed. A seed that lacks one of the mixtures is refused, since its mean would be of something else.
    Source: paper, "Higher-level summaries".

    >>> seed_means({("five", 1): 0.5, ("six", 1): 0.75, ("five", 2): 0.5, ("six", 2): 0.5})
    {1: 0.625, 2: 0.5}
    """
    wanted = dict.fromkeys([name for name, _ in table] if mixtures is None else mixtures)
    seeds = sorted({seed for name, seed in table if name in wanted})
    if not seeds:
        raise ValueError(f"table has no value{' for ' + ', '.join(wanted) if wanted else ''}")
    missing = [f"{name} with seed {seed}" for seed in seeds for name in wanted if (name, seed) not in table]
    if missing:
        raise ValueError(f"every seed needs every mixture; missing: {', '.join(missing)}")
    return {seed: _mean([_finite(table[name, seed], seed) for name in wanted]) for seed in seeds}


def paired_difference(
    a: Mapping[int, float] | Values, b: Mapping[int, float] | Values, confidence: float = 0.95
) -> PairedDifference:
    """Mean of ``a - b`` over seeds, with its two-sided Student-t interval (S - 1 degrees of freedom).

    ``a`` and ``b`` are ``{seed: value}``, paired by seed in any order, or arrays [S] paired by position.
    Nominal interval, no correction for many comparisons. Source: paper, "Uncertainty convention".

    Degenerate: one seed has no interval, ``low`` and ``high`` are None; equal differences give an interval
    of width 0. Seeds that only one side has are refused, and named.

    >>> result = paired_difference({1: 0.81, 2: 0.79, 3: 0.83}, {3: 0.80, 2: 0.78, 1: 0.79})
    >>> [round(v, 4) for v in result]
    [0.02, -0.0048, 0.0448]
    >>> paired_difference([3.0], [1.0])
    PairedDifference(mean=2.0, low=None, high=None)
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    differences = [x - y for x, y in _paired(a, b)]
    seeds = len(differences)
    mean = _mean(differences)
    if seeds == 1:
        return PairedDifference(mean, None, None)
    variance = math.fsum((d - mean) ** 2 for d in differences) / (seeds - 1)
    half = float(stdtrit(seeds - 1, (1 + confidence) / 2)) * math.sqrt(variance / seeds)
    return PairedDifference(mean, mean - half, mean + half)


def pareto_front(table: Mapping[Any, Any] | Iterable[Any]) -> list[Any]:
    """Names of the entries that no other entry dominates, in the order given.

    ``table`` maps a name to ``(accuracy, purity, utilization, load_variance)`` or to a mapping with these
    keys; pairs ``(name, point)`` do as well, and rows without names [M, 4] are named by their index. Higher
    is better for the first three, lower for the load variance. An entry dominates another when it is no
    worse in all four and better in at least one; so equal entries do not dominate each other and are both
    kept. Source: paper, main endpoint table.

    Degenerate: an empty table gives an empty list.

    >>> pareto_front({"a": (0.8, 0.5, 0.9, 0.01), "b": (0.7, 0.5, 0.9, 0.01), "c": (0.7, 0.6, 0.9, 0.01)})
    ['a', 'c']
    """
    entries = [(name, _point(name, point)) for name, point in _named(table)]
    return [name for name, point in entries if not any(_dominates(other, point) for _, other in entries)]


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(x >= y for x, y in zip(one, other, strict=True))


def _named(table: Mapping[Any, Any] | Iterable[Any]) -> Iterable[tuple[Hashable, Any]]:
    if isinstance(table, Mapping):
        return table.items()
    rows = enumerate(table)
    return [row if isinstance(row, tuple) and len(row) == 2 else (i, row) for i, row in rows]


def _point(name: Hashable, point: Any) -> tuple[float, ...]:
    """The four values with their signs turned so that higher is better."""
    if isinstance(point, Mapping):
        missing = [key for key in OBJECTIVES if key not in point]
        if missing:
            raise ValueError(f"{name}: the Pareto table lacks {', '.join(missing)}")
        point = [point[key] for key in OBJECTIVES]
    values = real(point, f"the Pareto values of {name}", "4").tolist()
    if len(values) != len(OBJECTIVES):
        raise ValueError(f"{name}: expected the four values {', '.join(OBJECTIVES)}, got {len(values)}")
    return tuple(METRICS[name].better * v for name, v in zip(OBJECTIVES.values(), values, strict=True))


def _paired(a: Any, b: Any) -> Iterable[tuple[float, float]]:
    if isinstance(a, Mapping) != isinstance(b, Mapping):
        raise ValueError("a and b must both be {seed: value} or both be arrays [S]")
    if not isinstance(a, Mapping):
        left, right = real(a, "a", "S").tolist(), real(b, "b", "S").tolist()
        if len(left) != len(right):
            raise ValueError(f"a and b must pair up, got {len(left)} and {len(right)} values")
        return zip(left, right, strict=True)
    alone = [f"{seed} only in a" for seed in a if seed not in b]
    alone += [f"{seed} only in b" for seed in b if seed not in a]
    if alone or not a:
        raise ValueError(f"seeds must be the same on both sides: {', '.join(alone) or 'there are none'}")
    return [(_finite(a[seed], seed), _finite(b[seed], seed)) for seed in a]


def _finite(value: Any, seed: Hashable) -> float:
    if not math.isfinite(value):
        raise ValueError(f"values must be finite, got {value} for seed {seed}")
    return float(value)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
