"""Aggregation and intervals against scipy and against the arithmetic of the published tables."""

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from gar.metrics import PairedDifference, paired_difference, pareto_front, population_std, seed_means, t_test

values = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12)


@given(values)
def test_population_std(seeds):
    assert population_std(seeds) == pytest.approx(statistics.pstdev(seeds), rel=1e-9, abs=1e-9)


def test_population_std_of_one_seed_is_zero_and_of_none_is_refused():
    assert population_std([0.8]) == 0.0
    with pytest.raises(ValueError, match="empty"):
        population_std([])


# Paired differences


@pytest.mark.parametrize("seeds", [2, 3, 5, 40])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
def test_intervals_are_those_of_scipy(seeds, confidence):
    generator = np.random.default_rng(seeds)
    a, b = generator.normal(0.8, 0.02, (2, seeds))
    expected = ttest_rel(a, b).confidence_interval(confidence)
    result = paired_difference(a, b, confidence=confidence)
    assert result.mean == pytest.approx(np.mean(a - b), abs=1e-15)
    assert (result.low, result.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert t_test(a - b) == pytest.approx(ttest_rel(a, b).pvalue, rel=1e-9)


def test_no_p_value_without_differences():
    equal = [0.7 - 0.69, 0.31 - 0.3, 0.12 - 0.11]  # all 0.01, up to rounding
    assert len(set(equal)) > 1
    for found in ([], [0.1], [0.1, 0.1], [0.0, 0.0, 0.0], equal):
        assert math.isnan(t_test(found))


@given(
    st.dictionaries(st.integers(0, 99), st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2), st.randoms()
)
def test_seeds_pair_by_number_in_any_order(table, random):
    a = {seed: pair[0] for seed, pair in table.items()}
    b = {seed: pair[1] for seed, pair in table.items()}
    shuffled = {seed: b[seed] for seed in random.sample(list(b), len(b))}
    by_position = paired_difference(list(a.values()), list(b.values()))
    assert paired_difference(a, shuffled) == by_position
    swapped = paired_difference(shuffled, a)
    assert swapped == pytest.approx((-by_position.mean, -by_position.high, -by_position.low), abs=1e-15)


def test_one_seed_has_no_interval():
    alone = paired_difference({7: 0.8}, {7: 0.75})
    assert alone.mean == pytest.approx(0.05)
    assert (alone.low, alone.high) == (None, None)
    assert paired_difference([0.8], [0.75]).low is None


def test_equal_differences_have_an_interval_without_width():
    assert paired_difference([3.0, 4.0, 5.0], [1.0, 2.0, 3.0]) == PairedDifference(2.0, 2.0, 2.0)


def test_unpaired_seeds_are_refused_and_named():
    with pytest.raises(ValueError, match=r"same on both sides: 3 only in a, 4 only in b, 5 only in b"):
        paired_difference({1: 0.5, 3: 0.5}, {1: 0.5, 4: 0.5, 5: 0.5})
    with pytest.raises(ValueError, match="2 and 3 values"):
        paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="there are none"):
        paired_difference({}, {})
    with pytest.raises(ValueError, match="empty"):
        paired_difference([], [])
    with pytest.raises(ValueError, match="both be"):
        paired_difference({1: 0.5}, [0.5])
    with pytest.raises(ValueError, match="nan for seed 2"):
        paired_difference({1: 0.5, 2: math.nan}, {1: 0.5, 2: 0.5})


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95, -0.5])
def test_a_confidence_outside_of_zero_and_one_is_refused(confidence):
    with pytest.raises(ValueError, match="confidence"):
        paired_difference([1.0, 2.0], [0.0, 0.0], confidence=confidence)


def test_paired_tensors():
    a, b = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 1.0, 2.0])
    assert paired_difference(a, b.bfloat16()) == paired_difference([1.0, 2.0, 4.0], [0.5, 1.0, 2.0])


# Mixtures within a seed


def test_mixtures_are_averaged_within_a_seed_first():
    table = {(name, seed): 0.1 * i + 0.01 * seed for i, name in enumerate("abcd") for seed in (3, 1, 2)}
    assert list(seed_means(table)) == [1, 2, 3]
    assert seed_means(table) == pytest.approx({s: 0.15 + 0.01 * s for s in (1, 2, 3)})
    assert seed_means(table, mixtures=["b", "d"]) == pytest.approx({s: 0.2 + 0.01 * s for s in (1, 2, 3)})
    reordered = dict(reversed(table.items()))
    assert seed_means(reordered) == seed_means(table)


def test_a_seed_without_one_of_the_mixtures_is_refused_and_named():
    table = {("five", 1): 0.5, ("six", 1): 0.5, ("five", 2): 0.5}
    with pytest.raises(ValueError, match=r"missing: six with seed 2$"):
        seed_means(table)
    assert seed_means(table, mixtures=["five"]) == {1: 0.5, 2: 0.5}
    with pytest.raises(ValueError, match="no value for nine"):
        seed_means(table, mixtures=["nine"])
    with pytest.raises(ValueError, match="no value"):
        seed_means({})
    with pytest.raises(ValueError, match="finite"):
        seed_means({("five", 1): math.inf})


# The published tables. Means are printed with four or five digits, so a difference of means is known to
# one unit of the last digit; T4 is the 97.5 % point of Student's t with four degrees of freedom.

T4 = 2.7764451051977987
MIXTURES = ("five", "six", "seven_paws", "seven_mrpc", "eight")
# setting, metric: means of both methods by mixture; unit of the last digit; estimate, low, high
PUBLISHED = {
    ("head", "acc"): (
        (0.7873, 0.7711, 0.8141, 0.8113, 0.8202),
        (0.7672, 0.7634, 0.8065, 0.7997, 0.8140),
        1e-4,
        (0.01065, 0.00697, 0.01433),
    ),
    ("head", "lvar"): (
        (0.00605, 0.00464, 0.00439, 0.00323, 0.00342),
        (0.00846, 0.00882, 0.00635, 0.00647, 0.01066),
        1e-4,  # the difference is printed with four digits
        (-0.0038, -0.0050, -0.0026),
    ),
    ("head", "util"): (
        (0.750, 0.825, 0.800, 0.850, 0.850),
        (0.700, 0.650, 0.800, 0.650, 0.625),
        1e-3,
        (0.130, 0.041, 0.219),
    ),
    ("frozen", "acc"): (
        (0.6421, 0.6450, 0.7030, 0.7373, 0.7182),
        (0.6406, 0.6384, 0.6809, 0.7205, 0.7081),
        1e-4,
        (0.01141, 0.00760, 0.01523),
    ),
    ("full_ffn", "acc"): (
        (0.8528, 0.8456, 0.8706, 0.8543, 0.8736),
        (0.8464, 0.8311, 0.8599, 0.8408, 0.8610),
        1e-4,
        (0.01155, 0.00730, 0.01579),
    ),
    ("head_top1", "purity"): (
        (0.5832, 0.5475, 0.3560, 0.5435, 0.3694),
        (0.1976, 0.2903, 0.0436, 0.0609, 0.2086),
        1e-4,
        (0.3197, 0.2526, 0.3868),
    ),
}


def five_seeds(means, spread):
    """{(mixture, seed): value} with these mixture means and this seed deviation of the macro means."""
    pattern = np.array([-2.0, 1.0, 0.0, 2.0, -1.0])
    pattern *= spread / pattern.std(ddof=1)
    offsets = (0.03, -0.01, -0.05, 0.02, 0.01)  # differ by mixture and seed, cancel over mixtures
    return {
        (name, seed): mean + pattern[seed] + offset * (seed - 2)
        for name, mean, offset in zip(MIXTURES, means, offsets, strict=True)
        for seed in range(5)
    }


@pytest.mark.parametrize("key", list(PUBLISHED), ids="-".join)
def test_published_estimates_and_intervals(key):
    ours, base, unit, (estimate, low, high) = PUBLISHED[key]
    assert (low + high) / 2 == pytest.approx(estimate, abs=unit)
    spread = (high - low) / 2 * math.sqrt(5) / T4
    a, b = seed_means(five_seeds(ours, spread)), seed_means(five_seeds(base, 0.0))
    result = paired_difference(a, b)
    assert result.mean == pytest.approx(estimate, abs=unit)
    assert result.high - result.mean == pytest.approx(result.mean - result.low, abs=1e-12)
    assert result.high - result.low == pytest.approx(high - low, abs=1e-12)


def test_published_bins_combine_to_all_mixtures():
    ours, base, unit, (estimate, _, _) = PUBLISHED["head", "acc"]
    a, b = five_seeds(ours, 0.004), five_seeds(base, 0.0)
    small = paired_difference(seed_means(a, MIXTURES[:2]), seed_means(b, MIXTURES[:2])).mean
    large = paired_difference(seed_means(a, MIXTURES[2:]), seed_means(b, MIXTURES[2:])).mean
    assert small == pytest.approx(0.0139, abs=unit)  # printed as 1.39 pp
    assert large == pytest.approx(0.0085, abs=unit)  # printed as 0.85 pp
    assert (2 * small + 3 * large) / 5 == pytest.approx(estimate, abs=unit)


@pytest.mark.parametrize(
    ("estimate", "low", "high", "p"), [(0.929, 0.207, 1.651, 0.0234), (1.133, 0.420, 1.847, 0.0116)]
)
def test_at_confidence_one_minus_a_published_p_value_the_interval_touches_zero(estimate, low, high, p):
    spread = (high - low) / 2 * math.sqrt(5) / T4
    pattern = np.array([-2.0, 1.0, 0.0, 2.0, -1.0])
    a = estimate + pattern * spread / pattern.std(ddof=1)
    assert paired_difference(a, np.zeros(5), confidence=1 - p).low == pytest.approx(0.0, abs=2e-3)


# Pareto front

KEYS = ("accuracy", "purity", "utilization", "load_variance")
points = st.lists(
    st.tuples(*[st.integers(0, 3).map(float)] * 4),
    max_size=7,
)


def slow_front(table):
    kept = []
    for name, p in table.items():
        beaten = False
        for q in table.values():
            no_worse = q[0] >= p[0] and q[1] >= p[1] and q[2] >= p[2] and q[3] <= p[3]
            better = q[0] > p[0] or q[1] > p[1] or q[2] > p[2] or q[3] < p[3]
            beaten = beaten or (no_worse and better)
        if not beaten:
            kept.append(name)
    return kept


@given(points)
def test_pareto_front_agrees_with_loops_in_every_form_of_table(rows):
    table = {f"m{i}": row for i, row in enumerate(rows)}
    front = slow_front(table)
    assert pareto_front(table) == front
    assert pareto_front({n: dict(zip(KEYS, p, strict=True)) for n, p in table.items()}) == front
    assert pareto_front(list(table.items())) == front
    assert [f"m{i}" for i in pareto_front(rows)] == front
    assert [f"m{i}" for i in pareto_front(np.array(rows).reshape(-1, 4))] == front
    assert bool(front) == bool(rows)


def test_equal_entries_are_both_kept_and_order_is_that_of_the_table():
    p, worse = (0.8, 0.5, 0.9, 0.01), (0.8, 0.5, 0.9, 0.02)
    for order in itertools.permutations([("x", p), ("y", worse), ("z", p)]):
        assert pareto_front(dict(order)) == [name for name, _ in order if name != "y"]


def test_published_top1_points_have_one_front():
    table = {  # the five-mixture means of the top-1 head setting
        "baseline": dict(zip(KEYS, (0.8039, 0.1602, 0.215, 0.08619), strict=True)),
        "gar": dict(zip(KEYS, (0.8145, 0.4799, 0.465, 0.03275), strict=True)),
    }
    assert pareto_front(table) == ["gar"]


def test_points_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="gar: the Pareto table lacks purity, load_variance"):
        pareto_front({"gar": {"accuracy": 0.8, "utilization": 0.9}})
    with pytest.raises(ValueError, match="gar: expected the four values"):
        pareto_front({"gar": (0.8, 0.5, 0.9)})
    with pytest.raises(ValueError, match="gar must be finite"):
        pareto_front({"gar": (0.8, math.nan, 0.9, 0.1)})
