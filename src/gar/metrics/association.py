"""How far the choice of expert tells the task.

``counts`` [T, E] holds selection events: k for each routed unit (token or example), labelled with the task
of its example. Counts are whole numbers of any size and are treated exactly; count in int64, since float32
tallies stop at 2^24. Paper: appendix "Metric Definitions and Aggregation".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from gar.metrics._arrays import Values, non_negative, whole_counts


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


def main_expert(shares: Values) -> NDArray[np.int64]:
    """The expert [T] that has most of each task's routing; ``shares`` [T, E]. A tie goes to the first.

    >>> main_expert([[0.7, 0.3], [0.2, 0.8], [0.5, 0.5]]).tolist()
    [0, 1, 0]
    """
    main: NDArray[np.int64] = non_negative(shares, "shares", "T", "E").argmax(1)
    return main


def recovery(shares: Values, clusters: Values) -> float:
    """:func:`adjusted_rand_index` of two partitions of the *tasks*: by main expert, and the true one.

    ``shares`` [T, E] are each task's routing over the experts, as probability mass or counts; ``clusters``
    [T] number the tasks' true groups. Every task counts once, at its :func:`main_expert`: how much else it
    uses does not show. Range: -0.5 to 1 (every group has an expert of its own, or several groups of equal
    number do), expectation 0 when the tasks are dealt to the experts at random. Not in the paper.

    Degenerate: one cluster or one used expert gives 0. Where every task is a cluster of its own the value is
    1 if every task has its own main expert, else 0.

    >>> recovery([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.0, 1.0]], [0, 0, 1, 1])
    1.0
    """
    return _recovery(main_expert(shares), _groups(shares, clusters))


def recovery_chance(shares: Values, clusters: Values, draws: int = 999, seed: int = 0) -> float:
    """What :func:`recovery` exceeds once in twenty times when the tasks are dealt to the experts anew.

    The 95 % quantile (the next greater value) over ``draws`` shufflings of the clusters among the tasks: the
    numbers of tasks of an expert stay. Range: -0.5 to 1; the mean over shufflings is 0. Not in the paper.
    Degenerate: as :func:`recovery`.

    >>> recovery_chance([[1, 0], [1, 0], [0, 1], [0, 1]], [0, 0, 1, 1])  # one of three pairings is the truth
    1.0
    """
    experts, groups = main_expert(shares), _groups(shares, clusters)
    rng = np.random.default_rng(seed)
    values = [_recovery(experts, rng.permutation(groups)) for _ in range(draws)]
    return float(np.quantile(values, 0.95, method="higher"))


def recovery_ceiling(clusters: Values, experts: int) -> float:
    """The highest :func:`recovery` that any assignment of the tasks to ``experts`` experts can have.

    1 where there is an expert for every cluster. With fewer, the best over all ways to merge whole clusters
    (splitting one never gains; the tests compare with every partition of small sets). Not in the paper.
    Degenerate: one cluster or one expert gives 0.

    >>> recovery_ceiling([0, 0, 1, 1], 2), round(recovery_ceiling([0, 0, 1, 1, 2, 2], 2), 3)
    (1.0, 0.444)
    """
    groups = np.asarray(clusters)
    names, members = np.unique(groups, return_inverse=True)
    if experts < 1:
        raise ValueError(f"expected one expert or more, got {experts}")
    merges = _merges(len(names), experts)
    return max(_recovery(np.asarray(merge)[members], groups) for merge in merges)


def cluster_mixing(shares: Values, clusters: Values) -> float:
    """Share of an expert's routing that is of other clusters, averaged over the routing of all tasks.

    ``1 - sum_e (sum_c m_ce^2 / sum_c m_ce) / sum_ce m_ce``, with ``m_ce`` the sum of ``shares`` [T, E] over
    the tasks of cluster c (``clusters`` [T]). Unlike :func:`recovery` it sees all of a task's routing, and
    does not mind a cluster with several experts. Range: 0 (every expert serves one cluster) to ``1 - 1/K``,
    which routing that knows nothing of equal clusters has. Not in the paper. Degenerate: one cluster, or no
    routing, gives 0.

    >>> cluster_mixing([[1, 0, 0], [0, 1, 0], [0, 0, 1]], [0, 0, 1]), cluster_mixing([[1, 1], [1, 1]], [0, 1])
    (0.0, 0.5)
    """
    mass, groups = non_negative(shares, "shares", "T", "E"), _groups(shares, clusters)
    by_cluster = np.stack([mass[groups == group].sum(0) for group in np.unique(groups)])
    total = by_cluster.sum(0)
    own = (by_cluster**2).sum(0)[total > 0] / total[total > 0]
    return max(0.0, 1.0 - float(own.sum() / total.sum())) if total.any() else 0.0


def _merges(clusters: int, experts: int) -> Iterator[list[int]]:
    """Every partition of the clusters into ``experts`` parts or fewer, as a part for each cluster."""

    def grown(start: list[int], parts: int) -> Iterator[list[int]]:
        if len(start) == clusters:
            yield start
            return
        for part in range(min(parts + 1, experts)):
            yield from grown([*start, part], max(parts, part + 1))

    return grown([], 0)


def _groups(shares: Values, clusters: Values) -> NDArray[np.int64]:
    groups: NDArray[np.int64] = np.asarray(clusters)
    if groups.shape != np.shape(shares)[:1]:
        raise ValueError(f"expected a cluster for each task [T], got {list(groups.shape)}")
    return groups


def _recovery(experts: NDArray[np.int64], groups: NDArray[np.int64]) -> float:
    table = np.zeros((len(experts), int(experts.max()) + 1), np.int64)
    np.add.at(table, (np.unique(groups, return_inverse=True)[1], experts), 1)
    return adjusted_rand_index(table)


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
