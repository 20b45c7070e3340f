"""Gradient metrics against plain loops written from their definitions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gar.metrics import (
    cancelled_by_expert,
    cancelled_energy,
    expert_cosines,
    gradient_mass_floor,
    gradient_mass_purity,
    gradient_mass_shares,
    inter_expert_similarity,
    intra_expert_coherence,
    live_gradient_mass_purity,
    observed_cosine,
    purity_above_floor,
    task_conflict,
    task_cosine,
    task_cosines,
)
from gar.metrics.gradient import MASS_FLOOR

COSINES = [intra_expert_coherence, inter_expert_similarity, task_cosine, observed_cosine]


def slow_purity(norms):
    total = 0.0
    for e in range(len(norms[0])):
        mass, top = 0.0, 0.0
        for row in norms:
            mass += row[e]
            top = max(top, row[e])
        if mass > 1e-12:
            total += top / mass
    return total / len(norms[0])


def slow_cosine(a, b):
    dot = sum(float(x) * float(y) for x, y in zip(a, b, strict=True))
    lengths = math.sqrt(sum(float(x) ** 2 for x in a)) * math.sqrt(sum(float(y) ** 2 for y in b))
    return dot / lengths if lengths else 0.0


def slow_intra(gradients):
    tasks, experts, _ = gradients.shape
    total = 0.0
    for e in range(experts):
        for i in range(tasks):
            for j in range(i + 1, tasks):
                total += slow_cosine(gradients[i, e], gradients[j, e]) / math.comb(tasks, 2)
    return total / experts


def test_expert_cosines_are_the_loops():
    rng = np.random.default_rng(4)
    gradients = rng.normal(size=(3, 4, 5)) * 10.0 ** rng.integers(-6, 6, (3, 4, 1))
    gradients[1, 2] = 0
    expected = [[[slow_cosine(a, b) for b in gradients[:, e]] for a in gradients[:, e]] for e in range(4)]
    gram = np.einsum("ted,sed->ets", gradients, gradients)
    np.testing.assert_allclose(expert_cosines(gradients), expected, atol=1e-12)
    np.testing.assert_allclose(expert_cosines(gram=gram), expected, atol=1e-12)
    order = [2, 0, 1]
    np.testing.assert_allclose(
        expert_cosines(gradients[order]), np.array(expected)[:, order][:, :, order], atol=1e-12
    )
    assert expert_cosines([[[2.0]]]).tolist() == [[[1.0]]]


def test_mass_shares_are_the_loops():
    norms = np.random.default_rng(5).uniform(0, 1, (3, 4))
    norms[:, 1] = 0
    shares = gradient_mass_shares(norms)
    for t in range(3):
        for e in range(4):
            total = sum(norms[s][e] for s in range(3))
            assert shares[t, e] == pytest.approx(norms[t][e] / total if total else 0.0)
    assert gradient_mass_shares([[1e300], [3e300]]).tolist() == [[0.25], [0.75]]
    assert gradient_mass_shares([[1e-13]]).tolist() == [[0.0]]


def slow_inter(gradients):
    tasks, experts, d = gradients.shape
    mean = [[sum(gradients[t, e, k] for t in range(tasks)) / tasks for k in range(d)] for e in range(experts)]
    total = 0.0
    for e in range(experts):
        for f in range(e + 1, experts):
            total += slow_cosine(mean[e], mean[f]) / math.comb(experts, 2)
    return total


def slow_pairs(rows):
    """The cosines of all pairs of rows, lists of numbers."""
    return [slow_cosine(rows[i], rows[j]) for i in range(len(rows)) for j in range(i + 1, len(rows))]


def slow_mean(values):
    return sum(values) / len(values) if values else 0.0


def slow_whole(gradients):
    """A task's gradients in all experts as one long row."""
    return [[x for expert in task for x in expert] for task in gradients]


def slow_observed(gradients):
    """A task's gradients, added up over the experts."""
    return [[sum(expert[k] for expert in task) for k in range(len(task[0]))] for task in gradients]


def probe(seed, tasks=4, experts=3, d=7, zeros=0.0):
    generator = np.random.default_rng(seed)
    gradients = generator.normal(size=(tasks, experts, d)) + generator.normal(size=(1, 1, d))
    gradients[generator.random((tasks, experts)) < zeros] = 0.0
    return gradients


def grams(gradients):
    mean, total = gradients.mean(0), gradients.sum(1)
    by_expert = np.einsum("ied,jed->eij", gradients, gradients)
    return by_expert, mean @ mean.T, by_expert, total @ total.T


norms = st.tuples(st.integers(1, 5), st.integers(1, 5)).flatmap(
    lambda s: st.lists(
        st.lists(
            st.one_of(st.just(0.0), st.floats(1e-15, 1e15), st.just(5e-13)), min_size=s[1], max_size=s[1]
        ),
        min_size=s[0],
        max_size=s[0],
    )
)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6))


@given(norms)
def test_purity_agrees_with_loops(mass):
    assert gradient_mass_purity(mass) == pytest.approx(slow_purity(mass), abs=1e-14)


@given(norms)
def test_the_floor_and_what_lies_above_it_agree_with_loops(mass):
    tasks, experts = len(mass), len(mass[0])
    totals = [sum(mass[t][e] for t in range(tasks)) for e in range(experts)]
    live = [e for e in range(experts) if totals[e] > MASS_FLOOR]
    shares = [max(mass[t][e] for t in range(tasks)) / totals[e] for e in live]
    whole = sum(totals)
    floor = max(map(sum, mass)) / whole if whole else 0.0
    purity = sum(shares) / len(live) if live else 0.0
    assert gradient_mass_floor(mass) == pytest.approx(floor, rel=1e-12)
    assert live_gradient_mass_purity(mass) == pytest.approx(purity, rel=1e-12)
    if 0 < floor < 1 - 1e-9:
        assert purity_above_floor(mass) == pytest.approx((purity - floor) / (1 - floor), rel=1e-6, abs=1e-9)


def test_idle_experts_and_unequal_tasks_move_purity_but_not_what_lies_above_the_floor():
    apart = np.array([[3.0, 0.0], [0.0, 1.0]])
    idle = np.pad(apart, ((0, 0), (0, 2)))
    assert gradient_mass_purity(apart) == 1.0
    assert gradient_mass_purity(idle) == 0.5
    assert purity_above_floor(apart) == purity_above_floor(idle) == 1.0
    mixed = np.array([[9.0, 18.0, 27.0], [1.0, 2.0, 3.0]])  # one mix of tasks, one task's gradients longer
    assert gradient_mass_purity(mixed) == pytest.approx(0.9)
    assert gradient_mass_floor(mixed) == pytest.approx(0.9)
    assert purity_above_floor(mixed) == pytest.approx(0.0, abs=1e-12)
    for nothing in (np.zeros((2, 3)), np.ones((1, 3))):  # no gradient, one task
        assert purity_above_floor(nothing) == 0.0
    assert gradient_mass_floor(np.full((2, 2), 1e308)) == 0.5


def test_an_expert_at_the_floor_counts_zero_and_stays_in_the_mean():
    assert gradient_mass_purity([[1e-12, 1.0], [0.0, 1.0]]) == 0.25
    assert gradient_mass_purity([[1.1e-12, 1.0], [0.0, 1.0]]) == 0.75
    assert gradient_mass_purity(np.zeros((3, 4))) == 0.0
    assert gradient_mass_purity([[2.0, 0.0, 1.0]]) == pytest.approx(2 / 3)  # one task


def test_purity_of_enormous_norms():
    assert gradient_mass_purity([[1e308, 1e308], [1e308, 0.0]]) == 0.75


@given(shapes, st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 1.0]))
def test_cosine_diagnostics_agree_with_loops_and_with_gram_matrices(shape, seed, zeros):
    tasks, experts, d = shape
    gradients = probe(seed, tasks, experts, d, zeros)
    by_expert, of_means, _, of_sums = grams(gradients)
    assert intra_expert_coherence(gradients) == pytest.approx(slow_intra(gradients), abs=1e-12)
    assert intra_expert_coherence(gram=by_expert) == pytest.approx(slow_intra(gradients), abs=1e-12)
    assert inter_expert_similarity(gradients) == pytest.approx(slow_inter(gradients), abs=1e-11)
    assert inter_expert_similarity(gram=of_means) == pytest.approx(slow_inter(gradients), abs=1e-11)
    whole, observed = slow_pairs(slow_whole(gradients)), slow_pairs(slow_observed(gradients))
    assert task_cosine(gradients) == pytest.approx(slow_mean(whole), abs=1e-12)
    assert task_cosine(gram=by_expert) == pytest.approx(slow_mean(whole), abs=1e-12)
    assert observed_cosine(gradients) == pytest.approx(slow_mean(observed), abs=1e-11)
    assert observed_cosine(gram=of_sums) == pytest.approx(slow_mean(observed), abs=1e-11)
    conflict = slow_mean([float(c < -1e-12) for c in whole])
    assert task_conflict(gradients) == task_conflict(gram=by_expert) == pytest.approx(conflict)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e-30, 1e-9, 1.0, 1e15, 1e160, 1e300])
def test_cosines_do_not_depend_on_the_scale(scale):
    gradients = probe(1, zeros=0.2)
    for metric in COSINES:
        assert metric(scale * gradients) == pytest.approx(metric(gradients), abs=1e-12)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e15])
def test_purity_and_gram_cosines_do_not_depend_on_the_scale(scale):
    gradients = probe(2, zeros=0.2)
    mass = np.linalg.norm(gradients, axis=2)
    assert gradient_mass_purity(scale * mass) == pytest.approx(gradient_mass_purity(mass), abs=1e-14)
    for metric, gram in zip(COSINES, grams(gradients), strict=True):
        assert metric(gram=scale**2 * gram) == pytest.approx(metric(gram=gram), abs=1e-12)


def test_coherence_ignores_the_length_of_each_gradient_and_similarity_that_of_each_expert():
    gradients = probe(3)
    lengths = 10.0 ** np.random.default_rng(3).uniform(-9, 15, (4, 3, 1))
    assert intra_expert_coherence(lengths * gradients) == pytest.approx(
        intra_expert_coherence(gradients), abs=1e-12
    )
    assert inter_expert_similarity(lengths[:1] * gradients) == pytest.approx(
        inter_expert_similarity(gradients), abs=1e-12
    )


@given(st.integers(0, 10**6), st.permutations(range(4)), st.permutations(range(3)), st.permutations(range(7)))
def test_the_order_of_tasks_experts_and_parameters_does_not_matter(seed, tasks, experts, entries):
    gradients = probe(seed, zeros=0.2)
    shuffled = gradients[tasks][:, experts][:, :, entries]
    for metric in COSINES:
        assert metric(shuffled) == pytest.approx(metric(gradients), abs=1e-11)
    mass, other = np.linalg.norm(gradients, axis=2), np.linalg.norm(shuffled, axis=2)
    assert gradient_mass_purity(other) == pytest.approx(gradient_mass_purity(mass), abs=1e-14)


def test_a_task_without_gradient_changes_purity_and_similarity_not_at_all_and_coherence_by_its_pairs():
    gradients = probe(4)
    padded = np.concatenate([gradients, np.zeros((1, 3, 7))])
    mass, other = np.linalg.norm(gradients, axis=2), np.linalg.norm(padded, axis=2)
    assert gradient_mass_purity(other) == gradient_mass_purity(mass)
    assert inter_expert_similarity(padded) == pytest.approx(inter_expert_similarity(gradients), abs=1e-14)
    # 6 of 10 pairs are active; the active mean is multiplied by that share
    assert intra_expert_coherence(padded) == pytest.approx(0.6 * intra_expert_coherence(gradients), abs=1e-14)


def test_identical_and_opposite_gradients():
    g = np.random.default_rng(5).normal(size=7)
    assert intra_expert_coherence(np.tile(g, (3, 2, 1))) == pytest.approx(1.0, abs=1e-15)
    assert inter_expert_similarity(np.tile(g, (3, 2, 1))) == pytest.approx(1.0, abs=1e-15)
    assert intra_expert_coherence(np.stack([[g], [-g]])) == pytest.approx(-1.0, abs=1e-15)
    assert inter_expert_similarity(np.stack([[g, g], [-g, -g]])) == 0.0  # the task means cancel


def test_degenerate_probes():
    g = probe(6)
    assert intra_expert_coherence(g[:1]) == 0.0 == intra_expert_coherence(gram=np.ones((3, 1, 1)))
    assert inter_expert_similarity(g[:, :1]) == 0.0 == inter_expert_similarity(gram=[[4.0]])
    for metric in COSINES:
        assert metric(0 * g) == 0.0
    assert intra_expert_coherence(gram=np.zeros((3, 4, 4))) == 0.0
    assert inter_expert_similarity(gram=np.zeros((3, 3))) == 0.0


def test_tasks_in_conflict():
    g = probe(9)[0]
    assert task_cosine([g, g, -g]) == pytest.approx(-1 / 3)
    assert task_conflict([g, g, -g]) == pytest.approx(2 / 3)
    assert task_conflict([g, 0 * g]) == 0.0 == task_conflict([g]) == task_cosine([g]) == observed_cosine([g])
    assert task_cosines([g, 0 * g]).tolist() == [[pytest.approx(1.0), 0.0], [0.0, 0.0]]
    # Two experts that are pulled apart: the observation is zero, the gradients in the experts are not.
    apart = np.stack([np.stack([g[0], -g[0]]), np.stack([g[0], -g[0]])])
    assert observed_cosine(apart) == 0.0
    assert task_cosine(apart) == pytest.approx(1.0)
    # An expert that receives nearly all of the gradient decides, unlike in the mean over experts.
    lopsided = np.stack([np.stack([1e3 * g[0], g[1]]), np.stack([1e3 * g[0], -g[1]])])
    assert task_cosine(lopsided) > 0.99
    assert intra_expert_coherence(lopsided) == pytest.approx(0.0, abs=1e-12)


def test_rounding_below_zero_on_the_diagonal_is_a_zero_gradient():
    assert inter_expert_similarity(gram=[[1.0, 1e-9], [1e-9, -1e-9]]) == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_any_precision(dtype):
    tensor = torch.tensor(probe(7), dtype=dtype, requires_grad=True)
    exact = tensor.detach().double().numpy()
    for metric in COSINES:
        assert metric(tensor) == metric(exact) == metric(exact.tolist())
    mass = tensor.detach().norm(dim=2)
    assert gradient_mass_purity(mass) == gradient_mass_purity(mass.double().numpy())


@pytest.mark.parametrize("metric", COSINES)
def test_cosine_inputs_that_make_no_sense_are_refused(metric):
    g = probe(8)
    with pytest.raises(ValueError, match=r"\[T, E, d\]"):
        metric(g[0])
    with pytest.raises(ValueError, match="empty"):
        metric(g[:, :, :0])
    with pytest.raises(ValueError, match="finite"):
        metric(np.where(g == g.max(), np.nan, g))
    with pytest.raises(ValueError, match="give the observations"):
        metric()
    with pytest.raises(ValueError, match="not both"):
        metric(g, gram=np.eye(3))


def test_grams_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"\[E, T, T\]"):
        intra_expert_coherence(gram=np.eye(3))
    with pytest.raises(ValueError, match=r"\[E, E\]"):
        inter_expert_similarity(gram=np.ones((2, 3, 3)))
    with pytest.raises(ValueError, match="square"):
        inter_expert_similarity(gram=np.ones((2, 3)))
    with pytest.raises(ValueError, match="diagonal"):
        inter_expert_similarity(gram=[[1.0, 0.0], [0.0, -1.0]])


def test_norms_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="negative"):
        gradient_mass_purity([[1.0, -1.0]])
    with pytest.raises(ValueError, match="finite"):
        gradient_mass_purity([[1.0, math.inf]])
    with pytest.raises(ValueError, match=r"\[T, E\]"):
        gradient_mass_purity([1.0, 2.0])


def slow_cancelled(gradients, experts):
    """1 - |sum_t g|^2 / (sum_t |g|)^2, numerators and denominators added over experts first."""
    left = whole = 0.0
    for e in experts:
        rows = [gradients[t, e] for t in range(len(gradients))]
        left += sum(sum(row[k] for row in rows) ** 2 for k in range(gradients.shape[2]))
        whole += sum(math.sqrt(sum(x**2 for x in row)) for row in rows) ** 2
    return 1 - left / whole if whole else 0.0


@given(shapes, st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 1.0]))
def test_cancelled_energy_agrees_with_loops_and_with_gram_matrices(shape, seed, zeros):
    tasks, experts, d = shape
    gradients = probe(seed, tasks, experts, d, zeros)
    by_expert = grams(gradients)[0]
    expected = pytest.approx(slow_cancelled(gradients, range(experts)), abs=1e-12)
    assert cancelled_energy(gradients) == expected
    assert cancelled_energy(gram=by_expert) == expected
    alone = [slow_cancelled(gradients, [e]) for e in range(experts)]
    assert cancelled_by_expert(gradients) == pytest.approx(alone, abs=1e-12)
    assert cancelled_by_expert(gram=by_expert) == pytest.approx(alone, abs=1e-12)


def test_cancelled_energy_of_known_gradients():
    g = probe(9)[0]
    assert cancelled_energy([g, 2 * g]) == pytest.approx(0, abs=1e-12)
    assert cancelled_energy([g, -g]) == 1.0
    assert cancelled_energy([g, 0 * g]) == pytest.approx(0, abs=1e-12)  # specialised: nothing cancels
    assert cancelled_energy([g]) == pytest.approx(0, abs=1e-12)
    assert cancelled_energy([0 * g, 0 * g]) == 0.0
    for tasks in (2, 3, 5):
        assert cancelled_energy(np.eye(tasks)[:, None]) == pytest.approx(1 - 1 / tasks)
    # By their energy: an expert with nearly all of the gradient decides.
    lopsided = np.stack([np.stack([1e3 * g[0], g[1]]), np.stack([1e3 * g[0], -g[1]])])
    assert cancelled_energy(lopsided) < 1e-3
    assert cancelled_by_expert(lopsided) == [pytest.approx(0, abs=1e-9), 1.0]


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30, 1e300])
def test_cancelled_energy_does_not_depend_on_the_scale(scale):
    gradients = probe(1, zeros=0.2)
    assert cancelled_energy(scale * gradients) == pytest.approx(cancelled_energy(gradients), rel=1e-9)


def test_cancelled_energy_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match="either"):
        cancelled_energy([[[1.0]]], gram=[[[1.0]]])
    with pytest.raises(ValueError, match="square"):
        cancelled_energy(gram=np.ones((1, 2, 3)))
    with pytest.raises(ValueError, match="observations"):
        cancelled_energy()
