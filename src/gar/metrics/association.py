"""How far the choice of expert tells the task.

``counts`` [T, E] holds selection events: k for each routed unit (token or example), labelled with the task
of its example. Counts are whole numbers of any size and are treated exactly; count in int64, since float32
tallies stop at 2^24. Paper: appendix "Metric Definitions and Aggregation".
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from gar.metrics._arrays import Values, whole_counts


def structure_purity(counts: Values) -> float:
    """``sum_e max_t C_te / sum C``: share of the events that belong to their expert's main task.

    ``counts`` [T, E]. Range: the largest task's share of the events (no association) to 1. Source: paper,
    "Routed-unit structure purity".

    Degenerate: all-zero counts give 0; empty rows and columns change nothing; one task gives 1.

    >>> structure_purity([[6, 0], [2, 2]])
    0.8
    """
    table = whole_counts(counts)
    total = sum(map(sum, table))
    return sum(max(column) for column in zip(*table, strict=True)) / total if total else 0.0


def structure_purity_floor(counts: Values) -> float:
    """The largest task's share of the events: the structure purity of experts that say nothing of the task.

    ``counts`` [T, E]. Range: ``1/T`` to 1. Not in the paper. Degenerate: all-zero counts give 0, one task 1.

    >>> structure_purity_floor([[6, 0], [2, 2]])
    0.6
    """
    _, tasks, _, total = _margins(counts)
    return max(tasks) / total if total else 0.0


def normalized_mutual_information(counts: Values) -> float:
    """Mutual information of task and expert over the arithmetic mean of their entropies.

    ``counts`` [T, E], zero cells omitted. Range: 0 (independent) to 1 (each determines the other). Source:
    paper, "Task-expert NMI and ARI".

    Degenerate: one task, one used expert or all-zero counts give 0, because nothing can be learnt about the
    task. This differs from scikit-learn in one case: when both are constant, it says 1. Everywhere else the
    value is that of ``normalized_mutual_info_score`` on expanded labels. Empty rows and columns change
    nothing.

    >>> normalized_mutual_information([[5, 0], [0, 5]])
    1.0
    >>> normalized_mutual_information([[4, 2], [8, 4]])
    0.0
    >>> normalized_mutual_information([[10, 0], [0, 0]])
    0.0
    """
    table, tasks, experts, total = _margins(counts)
    entropies = _entropy(tasks, total) + _entropy(experts, total)
    if entropies == 0:
        return 0.0
    information = math.fsum(
        n / total * _log_ratio(n * total, tasks[t] * experts[e])
        for t, row in enumerate(table)
        for e, n in enumerate(row)
        if n
    )
    return min(1.0, max(0.0, 2 * information / entropies))


def shuffled_information(selections: Values, tasks: Values, draws: int = 19, seed: int = 0) -> float:
    """The highest normalised mutual information over ``draws`` shufflings of the examples' tasks.

    ``selections`` [N, E] counts the events of each example, ``tasks`` [N] holds its task's number. Examples
    are shuffled, not events: the tokens of one text are not independent. With 19 draws, routing that knows
    nothing of the tasks exceeds it once in twenty times. Not in the paper.

    Degenerate: one task or one used expert gives 0, as :func:`normalized_mutual_information`.

    >>> shuffled_information([[1, 0], [1, 0], [0, 1], [0, 1]], [0, 0, 0, 0])
    0.0
    """
    events, labels = np.asarray(selections), np.asarray(tasks)
    if events.ndim != 2 or labels.shape != events.shape[:1] or draws < 1:
        raise ValueError(
            f"expected selections [N, E], tasks [N] and a draw or more, got {list(events.shape)}, "
            f"{list(labels.shape)} and {draws}"
        )
    _, sizes = np.unique(labels, return_counts=True)
    starts, rng = np.cumsum(sizes) - sizes, np.random.default_rng(seed)
    shuffled = (np.add.reduceat(events[rng.permutation(len(events))], starts) for _ in range(draws))
    return max(normalized_mutual_information(counts) for counts in shuffled)


def adjusted_rand_index(counts: Values) -> float:
    """Hubert and Arabie's adjusted Rand index of the task and the expert partition of the events.

    ``counts`` [T, E]. With ``I``, ``A``, ``B`` and ``N`` the pairs of events in a common cell, task, expert
    and overall, ``(I - AB/N) / ((A+B)/2 - AB/N)``, in integers up to the one division. Range: -0.5 to 1,
    expectation 0 under random assignment. Source: paper, "Task-expert NMI and ARI".

    Degenerate: one task, one used expert or all-zero counts give 0; scikit-learn says 1 when both are
    constant, and agrees everywhere else. When every task and every used expert holds a single event, the
    partitions are the same and the value is 1, as there. Empty rows and columns change nothing.

    >>> adjusted_rand_index([[5, 0], [0, 5]])
    1.0
    >>> round(adjusted_rand_index([[6, 0], [2, 2]]), 4)
    0.3023
    >>> adjusted_rand_index([[10, 0], [0, 0]])
    0.0
    """
    table, tasks, experts, total = _margins(counts)
    if sum(n > 0 for n in tasks) < 2 or sum(n > 0 for n in experts) < 2:
        return 0.0
    together = _pairs(n for row in table for n in row)
    by_task, by_expert, overall = _pairs(tasks), _pairs(experts), _pairs([total])
    chance = by_task * by_expert
    possible = (by_task + by_expert) * overall - 2 * chance
    return 2 * (together * overall - chance) / possible if possible else 1.0


def _margins(counts: Values) -> tuple[list[list[int]], list[int], list[int], int]:
    table = whole_counts(counts)
    tasks = [sum(row) for row in table]
    return table, tasks, [sum(column) for column in zip(*table, strict=True)], sum(tasks)


def _pairs(sizes: Iterable[int]) -> int:
    return sum(n * (n - 1) // 2 for n in sizes)


def _entropy(sizes: list[int], total: int) -> float:
    return -math.fsum(n / total * _log_ratio(n, total) for n in sizes if n)


def _log_ratio(numerator: int, denominator: int) -> float:
    """``log(numerator / denominator)`` with full relative precision also where the two are close."""
    if 2 * numerator < denominator:
        return math.log(numerator / denominator)
    return math.log1p((numerator - denominator) / denominator)
