"""Load metrics against plain loops written from their definitions."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gar.metrics import (
    describe_collapse,
    effective_experts,
    load_variance,
    routing_entropy,
    task_preference,
    utilization,
)


def slow_load_variance(load):
    total = 0.0
    for share in load:
        total += (share - 1 / len(load)) ** 2
    return total / len(load)


def slow_utilization(load):
    used = 0
    for share in load:
        if share >= 1 / (2 * len(load)):
            used += 1
    return used / len(load)


def slow_routing_entropy(rows):
    total = 0.0
    for row in rows:
        for p in row:
            if p > 0:
                total -= p * math.log(p)
    return total / len(rows)


def slow_effective_experts(load):
    product = 1.0
    for share in load:
        if share > 0:
            product *= share**-share
    return product / len(load)


@st.composite
def distributions(draw, experts=None):
    n = experts or draw(st.integers(1, 12))
    weights = draw(st.lists(st.integers(0, 50), min_size=n, max_size=n))
    total = sum(weights)
    return [w / total for w in weights] if total else [1.0] + [0.0] * (n - 1)


rows = st.integers(1, 9).flatmap(lambda e: st.lists(distributions(e), min_size=1, max_size=6))


@given(distributions())
def test_load_metrics_agree_with_loops(load):
    assert load_variance(load) == pytest.approx(slow_load_variance(load), abs=1e-15)
    assert utilization(load) == slow_utilization(load)
    assert effective_experts(load) == pytest.approx(slow_effective_experts(load), rel=1e-12)


@given(distributions())
def test_load_variance_is_the_population_variance_within_its_bound(load):
    experts = len(load)
    assert load_variance(load) == pytest.approx(np.var(load), abs=1e-15)
    assert -1e-15 <= load_variance(load) <= (experts - 1) / experts**2 + 1e-15


@given(distributions(), st.randoms())
def test_the_order_of_experts_does_not_matter(load, random):
    shuffled = random.sample(load, len(load))
    assert load_variance(shuffled) == pytest.approx(load_variance(load), abs=1e-15)
    assert utilization(shuffled) == utilization(load)
    assert routing_entropy([shuffled]) == pytest.approx(routing_entropy([load]), abs=1e-14)


def test_one_expert_of_eight_holds_everything():
    # The paper's bound 7/64; its most collapsed cell prints 0.10936 with utilization 0.125.
    load = np.eye(8)[3]
    assert load_variance(load) == 7 / 64
    assert utilization(load) == 0.125


def test_half_of_the_uniform_share_is_used_and_less_is_not():
    assert utilization([0.125, 0.125, 0.25, 0.5]) == 1.0
    assert utilization([0.125 - 1e-9, 0.125 + 1e-9, 0.25, 0.5]) == 0.75


@pytest.mark.parametrize(("load", "variance", "used"), [([1.0], 0.0, 1.0), ([0.0] * 4, 1 / 16, 0.0)])
def test_degenerate_loads(load, variance, used):
    assert load_variance(load) == variance
    assert utilization(load) == used
    assert effective_experts(load) == float(sum(load))


@given(rows)
def test_routing_entropy_agrees_with_loops(probabilities):
    assert routing_entropy(probabilities) == pytest.approx(slow_routing_entropy(probabilities), abs=1e-14)
    experts = len(probabilities[0])
    if experts > 1:
        expected = slow_routing_entropy(probabilities) / math.log(experts)
        assert routing_entropy(probabilities, normalize=True) == pytest.approx(expected, abs=1e-14)


def test_uniform_top_four_of_eight_has_two_thirds_of_the_entropy():
    assert routing_entropy([[0.25] * 4 + [0.0] * 4] * 3, normalize=True) == pytest.approx(2 / 3, abs=1e-15)


def test_degenerate_entropies():
    assert routing_entropy([[1.0]], normalize=True) == 0.0
    assert routing_entropy([[0.0, 0.0]]) == 0.0
    assert routing_entropy([[0.0, 0.0], [0.5, 0.5]]) == pytest.approx(math.log(2) / 2)
    assert math.copysign(1.0, routing_entropy([[1.0, 0.0]])) == 1.0  # and not -0.0


@pytest.mark.parametrize("metric", [load_variance, utilization, describe_collapse])
@pytest.mark.parametrize(
    ("load", "message"),
    [
        ([0.6, 0.6, -0.2], "negative"),
        ([3, 5], "divide counts"),
        ([0.3, 0.3], "must sum to 1"),
        ([float("nan"), 1.0], "finite"),
        ([[0.5, 0.5]], re.escape("[E]")),
        ([], "empty"),
    ],
)
def test_loads_that_make_no_sense_are_refused(metric, load, message):
    with pytest.raises(ValueError, match=message):
        metric(load)


def test_probabilities_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"\[N, E\]"):
        routing_entropy([0.5, 0.5])
    with pytest.raises(ValueError, match="empty"):
        routing_entropy(np.zeros((0, 4)))
    with pytest.raises(ValueError, match="sum to 1"):
        routing_entropy([[0.5, 0.5], [2.0, 0.0]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_any_precision_that_still_need_a_gradient(dtype):
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 0.0, -4.0]], dtype=dtype)
    q = logits.softmax(1).requires_grad_()
    exact = q.detach().double().numpy()
    assert routing_entropy(q) == routing_entropy(exact)
    assert load_variance(q.mean(0)) == load_variance(q.mean(0).detach().double().numpy())
    assert utilization(list(q[0])) == utilization(exact[0])  # a list of scalar tensors


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu():
    load = torch.tensor([0.5, 0.25, 0.25], device="cuda", dtype=torch.bfloat16)
    assert load_variance(load) == load_variance([0.5, 0.25, 0.25])
    assert utilization(list(load)) == 1.0


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ([0.25] * 4, None),
        ([1.0], None),
        ([0.9, 0.1], None),  # 90 % is not above 90 %
        ([0.05, 0.95], "expert 1 holds 95.0 % of the load"),
        ([0.5, 0.5, 0.0], "expert 2 is dead (below 1 % of a uniform share)"),
        ([0.5, 0.0, 0.5, 0.0, 0.0], "experts 1, 3 and 4 are dead (below 1 % of a uniform share)"),
        (
            [0.0, 0.99, 0.01, 0.0],
            "expert 1 holds 99.0 % of the load; experts 0 and 3 are dead (below 1 % of a uniform share)",
        ),
        ([0.0] * 4, "nothing was routed to any expert"),
        ([0.5, 0.4974, 0.0026, 0.0], "expert 3 is dead (below 1 % of a uniform share)"),  # 0.25 % is the line
        ([0.5, 0.4976, 0.0024], "expert 2 is dead (below 1 % of a uniform share)"),
    ],
)
def test_collapse_in_plain_words(load, words):
    assert describe_collapse(load) == words


def test_task_preference_is_the_loops():
    rng = np.random.default_rng(6)
    by_task, weights = rng.dirichlet(np.ones(4), 3), rng.dirichlet(np.ones(3))
    by_task[0] = [0.5, 0.5, 0.0, 0.0]
    load = weights @ by_task
    found = task_preference(by_task, load)
    for t in range(3):
        for e in range(4):
            expected = math.log(by_task[t][e] / load[e]) / math.log(2) if by_task[t][e] else -math.inf
            assert found[t, e] == pytest.approx(expected)
    order = [3, 1, 0, 2]
    np.testing.assert_allclose(task_preference(by_task[:, order], load[order]), found[:, order])


def test_task_preference_where_nothing_can_be_preferred():
    assert task_preference([[0.2, 0.8]], [0.2, 0.8]).tolist() == [[0.0, 0.0]]  # one task
    assert task_preference([[1.0, 0.0], [0.0, 0.0]], [1.0, 0.0]).tolist() == [[0.0, 0.0]] * 2
    with pytest.raises(ValueError, match="load must have the 2 experts of by_task, got 3"):
        task_preference([[0.5, 0.5]], [0.2, 0.2, 0.6])
