"""Whether a property of mixtures predicts a gain: against scipy and slow loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from gar.metrics import holm, predicts, rank_correlation

TASKS = "abcdefghijk"
PAIRS = [set(pair) for pair in itertools.combinations(TASKS, 2)]


def slow_spearman(x, y):
    """From the definition: Pearson's correlation of mean ranks, by counting."""

    def ranks(values):
        return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]

    if len(x) < 3 or len(set(x)) == 1 or len(set(y)) == 1:
        return math.nan
    a, b = ranks(x), ranks(y)
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    both = sum((u - mean_a) * (v - mean_b) for u, v in zip(a, b, strict=True))
    return both / math.sqrt(sum((u - mean_a) ** 2 for u in a) * sum((v - mean_b) ** 2 for v in b))


def slow_intervals(x, y, mixtures, draws):
    """The two bootstraps and the permutations, loop by loop, from the same random numbers."""
    tasks = sorted(set().union(*mixtures))
    generator = np.random.RandomState(0)
    naive, by_task, beyond = [], [], 0
    whole = slow_spearman(x, y)
    for _ in range(draws):
        rows = [int(i) for i in generator.randint(0, len(x), len(x))]
        naive.append(slow_spearman([x[i] for i in rows], [y[i] for i in rows]))
        drawn = [tasks[int(i)] for i in generator.randint(0, len(tasks), len(tasks))]
        rows = []
        for i, mixture in enumerate(mixtures):
            times = 1
            for task in mixture:
                times *= drawn.count(task)
            rows += [i] * times
        by_task.append(slow_spearman([x[i] for i in rows], [y[i] for i in rows]))
        shuffled = [y[int(i)] for i in generator.permutation(len(x))]
        beyond += abs(slow_spearman(x, shuffled)) >= abs(whole) - 1e-9
    ends = []
    for values in (by_task, naive):
        finite = [v for v in values if not math.isnan(v)]
        ends.append(tuple(np.quantile(finite, [0.025, 0.975])))
    return *ends, (1 + beyond) / (1 + draws)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), max_size=12))
def test_the_rank_correlation_is_the_slow_one_and_scipy_s(pairs):
    x, y = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    if not x:
        return
    found, slow = rank_correlation(x, y), slow_spearman(x, y)
    assert found == pytest.approx(slow, abs=1e-12, nan_ok=True)
    if not math.isnan(slow):
        assert found == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)


def test_predictions_against_slow_loops():
    rng = np.random.default_rng(0)
    x = rng.normal(size=len(PAIRS))
    y = -0.7 * x + rng.normal(size=len(PAIRS))
    found = predicts(x, y, PAIRS, draws=80)
    of_tasks, of_mixtures, p = slow_intervals(x.tolist(), y.tolist(), PAIRS, 80)
    assert found.rho == pytest.approx(slow_spearman(x.tolist(), y.tolist()))
    assert (found.low, found.high) == pytest.approx(of_tasks)
    assert found.naive == pytest.approx(of_mixtures)
    assert found.p == pytest.approx(p)
    left = []
    for task in TASKS:
        rows = [i for i, mixture in enumerate(PAIRS) if task not in mixture]
        left.append(slow_spearman([x[i] for i in rows], [y[i] for i in rows]))
    assert found.without == pytest.approx((min(left), max(left)))
    assert (found.mixtures, found.tasks) == (55, 11)
    assert found == predicts(x, y, PAIRS, draws=80)


def test_one_unusual_task_is_no_finding():
    """Predictor and gain are high wherever task a is: 45 mixtures of noise, ten that share a cause."""
    rng = np.random.default_rng(4)
    unusual = np.array([float("a" in pair) for pair in PAIRS])
    x, y = 3 * unusual + rng.normal(size=55), 3 * unusual + rng.normal(size=55)
    found = predicts(x, y, PAIRS)
    assert found.naive[0] > 0  # mixtures as independent observations would call it found
    assert found.p < 0.05
    assert not found.found
    assert found.high - found.low > found.naive[1] - found.naive[0]


def test_a_relation_that_all_tasks_carry_is_found():
    rng = np.random.default_rng(2)
    x = rng.normal(size=55)
    found = predicts(x, -x + 0.1 * rng.normal(size=55), PAIRS)
    assert found.found
    assert found.high < 0
    assert found.p < 0.01
    turned = predicts(-x, -x + 0.1 * rng.normal(size=55), PAIRS)
    assert turned.found
    assert turned.low > 0


def test_degenerate_predictions():
    constant = predicts([1.0] * 55, np.arange(55.0), PAIRS, draws=20)
    assert math.isnan(constant.rho)
    assert math.isnan(constant.low)
    assert math.isnan(constant.p)
    assert not constant.found
    few = predicts([1.0, 2.0], [1.0, 2.0], [{"a", "b"}, {"b", "c"}], draws=20)
    assert math.isnan(few.rho)
    with pytest.raises(ValueError, match="one value a mixture"):
        predicts([1.0, 2.0], [1.0], [{"a"}, {"b"}])


def slow_holm(values):
    """The smallest level at which each is rejected, by trying the levels where something changes."""
    levels = sorted({min(1.0, k * v) for v in values for k in range(1, len(values) + 1)} | {1.0})
    found = []
    for i in range(len(values)):
        for level in levels:
            rejected, order = set(), sorted(range(len(values)), key=lambda j: values[j])
            for rank, j in enumerate(order):
                if values[j] * (len(values) - rank) > level + 1e-15:
                    break
                rejected.add(j)
            if i in rejected or level == 1.0:
                found.append(level)
                break
    return found


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=6, unique=True))
def test_holm_adjusts_as_the_step_down_procedure_rejects(values):
    assert holm(values) == pytest.approx(slow_holm(values))


def test_holm_passes_what_is_not_known_over():
    assert holm([]) == []
    found = holm([math.nan, 0.02])
    assert math.isnan(found[0])
    assert found[1] == 0.02
