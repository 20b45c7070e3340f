"""Association metrics against plain loops, and against scikit-learn on expanded labels."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from gar.metrics import (
    adjusted_rand_index,
    normalized_mutual_information,
    structure_purity,
    structure_purity_floor,
)

METRICS = [structure_purity, normalized_mutual_information, adjusted_rand_index]


def slow_structure_purity(counts):
    total, main = 0, 0
    for e in range(len(counts[0])):
        best = 0
        for row in counts:
            total += row[e]
            best = max(best, row[e])
        main += best
    return main / total if total else 0.0


def slow_nmi(counts):
    total = sum(sum(row) for row in counts)
    if total == 0:
        return 0.0
    tasks = [sum(row) / total for row in counts]
    experts = [sum(row[e] for row in counts) / total for e in range(len(counts[0]))]
    information, entropies = 0.0, 0.0
    for t, row in enumerate(counts):
        for e, n in enumerate(row):
            if n:
                information += n / total * math.log((n / total) / (tasks[t] * experts[e]))
    for share in tasks + experts:
        if share:
            entropies -= share * math.log(share)
    return information / (entropies / 2) if entropies > 0 else 0.0


def slow_ari(counts):
    """By counting pairs of events one at a time, in fractions."""
    events = [(t, e) for t, row in enumerate(counts) for e, n in enumerate(row) for _ in range(n)]
    if len({t for t, _ in events}) < 2 or len({e for _, e in events}) < 2:
        return 0.0
    both = same_task = same_expert = pairs = 0
    for i in range(len(events)):
        for j in range(i):
            pairs += 1
            same_task += events[i][0] == events[j][0]
            same_expert += events[i][1] == events[j][1]
            both += events[i] == events[j]
    expected = Fraction(same_task * same_expert, pairs)
    possible = Fraction(same_task + same_expert, 2)
    return 1.0 if possible == expected else float((both - expected) / (possible - expected))


def expanded(counts):
    counts = np.asarray(counts)
    tasks, experts = np.indices(counts.shape)
    return np.repeat(tasks.ravel(), counts.ravel()), np.repeat(experts.ravel(), counts.ravel())


def tables(most=6):
    shape = st.tuples(st.integers(1, 5), st.integers(1, 5))
    return shape.flatmap(
        lambda s: st.lists(
            st.lists(st.integers(0, most), min_size=s[1], max_size=s[1]), min_size=s[0], max_size=s[0]
        )
    )


def both_vary(counts):
    counts = np.asarray(counts)
    return (counts.sum(0) > 0).sum() > 1 and (counts.sum(1) > 0).sum() > 1


@given(tables())
def test_association_agrees_with_loops(counts):
    assert structure_purity(counts) == slow_structure_purity(counts)
    assert normalized_mutual_information(counts) == pytest.approx(slow_nmi(counts), abs=1e-13)
    assert adjusted_rand_index(counts) == pytest.approx(slow_ari(counts), abs=1e-15)


@given(tables(most=40))
def test_association_agrees_with_scikit_learn(counts):
    assume(both_vary(counts))
    tasks, experts = expanded(counts)
    assert normalized_mutual_information(counts) == pytest.approx(
        normalized_mutual_info_score(tasks, experts), abs=1e-12
    )
    assert adjusted_rand_index(counts) == pytest.approx(adjusted_rand_score(tasks, experts), abs=1e-12)


def test_association_agrees_with_scikit_learn_on_a_larger_table():
    counts = np.random.default_rng(0).integers(0, 400, (8, 8)) + 300 * np.eye(8, dtype=int)
    tasks, experts = expanded(counts)
    assert normalized_mutual_information(counts) == pytest.approx(
        normalized_mutual_info_score(tasks, experts), abs=1e-12
    )
    assert adjusted_rand_index(counts) == pytest.approx(adjusted_rand_score(tasks, experts), abs=1e-12)


@given(tables(), st.randoms())
def test_order_and_empty_rows_and_columns_do_not_matter(counts, random):
    table = np.asarray(counts)
    shuffled = table[random.sample(range(len(table)), len(table))]
    shuffled = shuffled[:, random.sample(range(table.shape[1]), table.shape[1])]
    padded = np.pad(shuffled, ((1, 2), (2, 1)))
    for metric in METRICS:
        assert metric(padded) == pytest.approx(metric(table), abs=1e-14)


@given(tables(), st.integers(2, 10**12))
def test_purity_and_information_depend_on_proportions_only(counts, factor):
    larger = [[factor * n for n in row] for row in counts]
    assert structure_purity(larger) == structure_purity(counts)
    assert normalized_mutual_information(larger) == pytest.approx(
        normalized_mutual_information(counts), abs=1e-14
    )


@given(tables())
def test_ranges(counts):
    assert 0 <= structure_purity(counts) <= 1
    assert 0 <= normalized_mutual_information(counts) <= 1
    assert -0.5 <= adjusted_rand_index(counts) <= 1


@given(tables())
def test_purity_is_at_least_the_share_of_the_largest_task(counts):
    total = sum(map(sum, counts))
    assume(total)
    assert structure_purity_floor(counts) == max(map(sum, counts)) / total
    assert structure_purity(counts) >= structure_purity_floor(counts)
    assert structure_purity_floor([[0, 0], [0, 0]]) == 0.0


def test_billions_of_tokens():
    # C(n, 2) of these totals does not fit int64, and n^4 not float64's 53 bits.
    n = 10**10
    counts = [[6 * n, 0, n], [n, 5 * n, 0], [0, 0, 7 * n + 1]]
    cells = [v for row in counts for v in row]

    def pairs(sizes):
        return sum(Fraction(v * (v - 1), 2) for v in sizes)

    rows, columns = [sum(r) for r in counts], [sum(c) for c in zip(*counts, strict=True)]
    chance = pairs(rows) * pairs(columns) / pairs([sum(cells)])
    exact = (pairs(cells) - chance) / ((pairs(rows) + pairs(columns)) / 2 - chance)
    assert adjusted_rand_index(counts) == float(exact)
    assert adjusted_rand_index(np.array(counts)) == float(exact)
    assert adjusted_rand_index(torch.tensor(counts)) == float(exact)
    assert normalized_mutual_information(counts) == pytest.approx(slow_nmi(counts), rel=1e-13)


def exact_nmi(counts):
    with localcontext() as context:
        context.prec = 80
        total = Decimal(sum(map(sum, counts)))
        tasks, experts = [sum(r) for r in counts], [sum(c) for c in zip(*counts, strict=True)]
        information = sum(
            Decimal(n) / total * (Decimal(n) * total / (tasks[t] * experts[e])).ln()
            for t, row in enumerate(counts)
            for e, n in enumerate(row)
            if n
        )
        entropies = -sum(n / total * (n / total).ln() for n in map(Decimal, tasks + experts) if n)
        return float(2 * information / entropies)


def test_a_faint_association_in_many_tokens_is_not_rounding():
    # About 1e-15: differences of logarithms of rounded shares are wrong in the second digit.
    counts = [[10**9 + 137, 2 * 10**9 - 59], [3 * 10**9 + 11, 6 * 10**9 + 71]]
    assert normalized_mutual_information(counts) == pytest.approx(exact_nmi(counts), rel=1e-6, abs=0)
    assert normalized_mutual_information([[10**9, 10**9], [10**9, 10**9]]) == 0.0


def test_rounding_does_not_leave_the_range_of_information():
    assert normalized_mutual_information(np.diag([20, 7, 47])) == 1.0  # 1 + 2e-16 without care
    a, b = 10**18, 10**17
    counts = [
        [30 * a, 170 * a, 330 * a],
        [588 * b, 3332 * b, 6468 * b + 1],
        [324 * b - 1, 1836 * b + 1, 3564 * b - 1],
    ]
    assert 0.0 <= normalized_mutual_information(counts) < 1e-30
    assert normalized_mutual_information([[10**18, 1], [1, 10**18]]) == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize(
    ("counts", "purity"),
    [
        ([[0, 0], [0, 0]], 0.0),
        ([[5]], 1.0),
        ([[3, 4, 5]], 1.0),  # one task
        ([[3], [4], [5]], 5 / 12),  # one expert
        ([[3, 0], [4, 0]], 4 / 7),  # one used expert
        ([[0, 0], [4, 3]], 1.0),  # an empty task row leaves one task
    ],
)
def test_one_task_or_one_used_expert_shows_no_association(counts, purity):
    assert structure_purity(counts) == purity
    assert normalized_mutual_information(counts) == 0.0
    assert adjusted_rand_index(counts) == 0.0


def test_single_events_in_their_own_cells_are_the_same_partition():
    assert adjusted_rand_index(np.eye(4)) == 1.0 == adjusted_rand_score([0, 1, 2, 3], [0, 1, 2, 3])
    assert normalized_mutual_information(np.eye(4)) == 1.0


@pytest.mark.parametrize("metric", METRICS)
def test_counts_as_lists_arrays_and_tensors(metric):
    counts = [[6, 0, 2], [1, 3, 2]]
    for same in (np.array(counts, np.int16), np.array(counts, float), torch.tensor(counts).bfloat16()):
        assert metric(same) == metric(counts)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([[1, -1]], "not negative"),
        ([[0.5, 1.0]], "whole numbers"),
        ([[float("nan"), 1.0]], "whole numbers"),
        ([[float("inf"), 1.0]], "whole numbers"),
        ([1, 2], r"\[T, E\]"),
        (np.zeros((0, 3)), "empty"),
    ],
)
def test_counts_that_make_no_sense_are_refused(metric, counts, message):
    with pytest.raises(ValueError, match=message):
        metric(counts)
