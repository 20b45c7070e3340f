"""The paper's claims: both sides of each on random and degenerate inputs, and the edges of their conditions.

``left`` sides use the package's objective; oracles here are loops from the definitions.
"""

from __future__ import annotations

import itertools
import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from torch import Tensor

import gar
from gar import theory
from gar.report import theory_page
from support import oracles

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "theory.py"
ROUNDING = 1e-12

KINDS = ("random", "zero", "equal", "one zero", "opposite", "one large", "line", "tiny", "huge")
ROUTES = ("soft", "hard", "uniform", "collapsed", "sparse", "ignoring")


def gradients_of(kind: str, rows: int, size: int) -> Tensor:
    g = torch.randn(rows, size, dtype=torch.float64)
    if kind == "zero":
        return 0 * g
    if kind == "equal":
        return g[:1].repeat(rows, 1)
    if kind == "one zero":
        g[0] = 0
    elif kind == "opposite":
        g = g[:1] * torch.tensor([(-1.0) ** m for m in range(rows)], dtype=g.dtype)[:, None]
    elif kind == "one large":
        g[0] *= 1e6
    elif kind == "line":
        g = g[:, :1] * g[:1]
    return g * {"tiny": 1e-9, "huge": 1e9}.get(kind, 1.0)


def assignment_of(route: str, rows: int, experts: int) -> Tensor:
    soft = (2 * torch.randn(rows, experts, dtype=torch.float64)).softmax(1)
    if route == "hard":
        return torch.eye(experts, dtype=torch.float64)[torch.randint(experts, (rows,))]
    if route == "uniform":
        return torch.full_like(soft, 1 / experts)
    if route == "collapsed":
        return theory.collapsed(rows, experts)
    if route == "ignoring":
        return soft[:1].repeat(rows, 1)
    if route == "sparse":
        soft = soft * (soft >= soft.max(1, keepdim=True).values / 2)
        return soft / soft.sum(1, keepdim=True)
    return soft


@st.composite
def observations(draw: st.DrawFn, least: int = 1, most: int = 7) -> Tensor:
    torch.manual_seed(draw(st.integers(0, 10**6)))
    return gradients_of(draw(st.sampled_from(KINDS)), draw(st.integers(least, most)), draw(st.integers(1, 4)))


@st.composite
def problems(draw: st.DrawFn, routes: tuple[str, ...] = ROUTES) -> tuple[Tensor, Tensor]:
    g = draw(observations())
    return assignment_of(draw(st.sampled_from(routes)), len(g), draw(st.integers(1, 4))), g


def one_hot(*labels: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(labels)).double()


def rows(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def energy(g: Tensor) -> float:
    return float(g.square().sum())


# ---------------------------------------------------------------------- sides


def test_a_gap_is_relative_and_zero_where_all_is_zero() -> None:
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    assert theory.Sides(one, two, 5.0).gap == pytest.approx(0.1)
    assert theory.Sides(one, one, 0.0).gap == 0
    assert theory.Sides(one, two, 0.0).gap == 0.5


@pytest.mark.parametrize(
    ("p", "message"),
    [
        (torch.ones(3), r"must be \[M, E\]"),
        (torch.ones(0, 2), r"M, E > 0"),
        (torch.full((3, 2), 0.4), "sum to 1"),
        (torch.tensor([[1.5, -0.5]] * 3), "non-negative"),
        (torch.tensor([[float("nan"), 1.0]] * 3), "non-negative"),
    ],
)
def test_rows_that_are_no_distribution_are_refused(p: Tensor, message: str) -> None:
    for claim in (theory.kmeans_identity, theory.over_collapse, theory.scatter):
        with pytest.raises(ValueError, match=message):
            claim(p, torch.ones(3, 2))


@pytest.mark.parametrize("g", [torch.ones(2, 2), torch.ones(3), torch.ones(3, 0)])
def test_observations_of_another_shape_are_refused(g: Tensor) -> None:
    with pytest.raises(ValueError, match=r"gradients must be \[3, d\]"):
        theory.kmeans_identity(one_hot(0, 1, 1), g)


# ---------------------------------------------------------------------- k-means


def slow_scatter(p: Tensor, g: Tensor) -> float:
    total = 0.0
    for k in range(p.shape[1]):
        load = sum(float(p[m, k]) for m in range(len(p)))
        if load == 0:
            continue
        centre = [sum(float(p[m, k] * g[m, i]) for m in range(len(p))) / load for i in range(g.shape[1])]
        for m in range(len(p)):
            total += float(p[m, k]) * sum((float(g[m, i]) - c) ** 2 for i, c in enumerate(centre))
    return total


@given(problems())
def test_the_objective_is_a_constant_minus_kmeans(problem: tuple[Tensor, Tensor]) -> None:
    p, g = problem
    both = theory.kmeans_identity(p, g)
    assert both.gap < ROUNDING
    slow = energy(g) - slow_scatter(p, g)
    assert abs(float(both.right) - slow) <= ROUNDING * energy(g)
    assert abs(float(both.left) - float(oracles.association(p, g, 0.0))) <= ROUNDING * energy(g)


def test_scatter_is_the_inertia_of_a_kmeans_library() -> None:
    g = torch.randn(30, 3, dtype=torch.float64)
    found = KMeans(4, n_init=1, random_state=0, tol=0).fit(g.numpy())
    p = one_hot(*found.labels_.tolist())
    assert float(theory.scatter(p, g)) == pytest.approx(found.inertia_, rel=1e-10)


@pytest.mark.parametrize("experts", [1, 2, 3, 6])
def test_the_best_partitions_are_the_same(experts: int) -> None:
    g = torch.randn(6, 2, dtype=torch.float64)
    every = list(theory.partitions(6, experts))
    most = max(every, key=lambda p: float(gar.association(p, g, eps=0.0)))
    least = min(every, key=lambda p: slow_scatter(p, g))
    assert torch.equal(most, least)


@pytest.mark.parametrize(("m", "experts"), [(1, 1), (4, 2), (5, 3), (5, 5), (2, 3)])
def test_partitions_are_all_and_each_once(m: int, experts: int) -> None:
    found = [frozenset(frozenset(map(int, c.nonzero())) for c in p.T) for p in theory.partitions(m, experts)]
    wanted = {
        frozenset(frozenset(i for i in range(m) if labels[i] == k) for k in range(experts))
        for labels in itertools.product(range(experts), repeat=m)
        if len(set(labels)) == experts
    }
    assert len(found) == len(set(found))
    assert set(found) == wanted


def test_the_identity_needs_rows_that_sum_to_one() -> None:
    p, g = one_hot(0, 1, 1) / 2, torch.randn(3, 2, dtype=torch.float64)
    claimed = energy(g) - slow_scatter(p, g)
    assert abs(float(gar.association(p, g, eps=0.0)) - claimed) > 0.1


@given(problems(), st.sampled_from([0.0, 1e-8, 0.1, 10.0]))
def test_what_the_stabiliser_takes(problem: tuple[Tensor, Tensor], eps: float) -> None:
    p, g = problem
    cost = theory.stabiliser_cost(p, g, eps)
    assert cost.gap < ROUNDING
    means = [c[None] @ g / c.sum() for c in p.T if c.sum() > 0]
    assert 0 <= float(cost.right) <= eps * sum(energy(mean) for mean in means) + ROUNDING * energy(g)


def test_the_stabiliser_can_change_the_best_partition() -> None:
    g, every = rows(-2, -1, 1, 4), list(theory.partitions(4, 2))
    best = {
        eps: max(every, key=lambda p, eps=eps: float(gar.association(p, g, eps=eps)))  # type: ignore[misc]
        for eps in (0.0, gar.objective.EPS, 0.1)
    }
    assert torch.equal(best[0.0], one_hot(0, 0, 0, 1))
    assert torch.equal(best[gar.objective.EPS], best[0.0])
    assert torch.equal(best[0.1], one_hot(0, 0, 1, 1))
    with pytest.raises(ValueError, match="non-negative"):
        theory.stabiliser_cost(best[0.0], g, -0.1)


@given(problems(), st.integers(0, 10**6))
def test_to_split_an_expert_never_costs(problem: tuple[Tensor, Tensor], seed: int) -> None:
    p, g = problem
    share = torch.rand(len(p), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    split = torch.cat([p[:, :1] * share[:, None], p[:, :1] * (1 - share[:, None]), p[:, 1:]], 1)
    gain = float(gar.association(split, g, eps=0.0) - gar.association(p, g, eps=0.0))
    assert gain >= -ROUNDING * energy(g)


def test_the_criterion_is_distance_not_direction() -> None:
    aligned = rows(1, 3)  # the same direction, and still better apart
    assert float(gar.association(one_hot(0, 1), aligned, eps=0.0)) == pytest.approx(10)
    assert float(gar.association(theory.collapsed(2, 2), aligned, eps=0.0)) == pytest.approx(8)
    eye, eps = torch.eye(2, dtype=torch.float64), 0.3  # app:self_cross_association
    assert float(gar.association(eye, gram=eye, eps=eps)) == pytest.approx(2 / (1 + eps))
    assert float(gar.association(torch.full_like(eye, 0.5), gram=eye, eps=eps)) == pytest.approx(
        1 / (1 + eps)
    )


# ---------------------------------------------------------------------- spectral


@given(problems())
def test_no_assignment_passes_the_eigenvalues(problem: tuple[Tensor, Tensor]) -> None:
    p, g = problem
    found = theory.spectral_bound(p, g @ g.T)
    little = 1e-11 * energy(g)
    assert found.floor - little <= found.value <= found.centred + little
    assert found.centred <= found.bound + little
    assert found.slack == found.bound - found.value
    singular = np.linalg.svd(g.numpy(), compute_uv=False)[: p.shape[1]]
    assert found.bound == pytest.approx(float((singular**2).sum()), rel=1e-9, abs=little)
    singular = np.linalg.svd((g - g.mean(0)).numpy(), compute_uv=False)[: min(p.shape[1], len(g)) - 1]
    assert found.centred == pytest.approx(found.floor + float((singular**2).sum()), rel=1e-9, abs=little)


@given(observations(), st.integers(1, 4), st.integers(0, 10**6))
def test_where_a_partition_falls_short(g: Tensor, experts: int, seed: int) -> None:
    every = list(theory.partitions(len(g), experts))
    if not every:
        return
    p = every[seed % len(every)]
    lost = theory.spectral_gap(p, g @ g.T)
    assert lost.gap < 1e-11
    assert float(lost.right) >= -1e-11 * energy(g)
    y = (p / p.sum(0).sqrt()).numpy()
    assert np.allclose(y.T @ y, np.eye(experts))
    trace = float(np.trace(y.T @ (g @ g.T).numpy() @ y))
    assert trace == pytest.approx(float(gar.association(p, g, eps=0.0)), abs=1e-11 * energy(g))


@given(observations(), st.integers(1, 4), st.integers(0, 10**6))
def test_the_relaxation_is_solved_by_eigenvectors(g: Tensor, experts: int, seed: int) -> None:
    experts = min(experts, len(g))
    w = g @ g.T
    bound = theory.spectral_bound(theory.collapsed(len(g), experts), w).bound
    top = torch.linalg.eigh(w).eigenvectors[:, len(g) - experts :]
    assert float((top.T @ w @ top).trace()) == pytest.approx(bound, abs=1e-11 * energy(g))
    drawn = torch.randn(len(g), experts, generator=torch.Generator().manual_seed(seed), dtype=g.dtype)
    other = torch.linalg.qr(drawn).Q
    assert float((other.T @ w @ other).trace()) <= bound + 1e-11 * energy(g)


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.9])
def test_the_bound_is_reached_where_observations_are_equal_within_experts(rho: float) -> None:
    p = one_hot(0, 0, 0, 1, 1, 2)
    g = p @ (torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)[:, None] * theory.equiangular(3, rho))
    found = theory.spectral_bound(p, g @ g.T)
    assert found.value == pytest.approx(found.bound) == pytest.approx(energy(g))
    moved = one_hot(1, 0, 0, 1, 1, 2)
    assert theory.spectral_bound(moved, g @ g.T).slack > 0.01
    noisy = g + 0.1 * torch.randn(g.shape, dtype=g.dtype) @ torch.randn(3, 3, dtype=g.dtype)
    noisy = torch.cat([noisy, 0.3 * torch.randn(6, 3, dtype=g.dtype)], 1)
    best = max(float(gar.association(q, noisy, eps=0.0)) for q in theory.partitions(6, 3))
    assert best < theory.spectral_bound(p, noisy @ noisy.T).bound - 1e-3


def test_a_matrix_that_is_no_gram_matrix_needs_nonempty_experts() -> None:
    w = torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # a Gram matrix without its diagonal
    assert theory.spectral_bound(one_hot(0, 1), w).slack == pytest.approx(0)
    assert theory.spectral_bound(theory.collapsed(2, 2), w).slack == pytest.approx(-1)


def test_the_trace_form_refuses_soft_rows_and_empty_experts() -> None:
    for p in (torch.full((2, 2), 0.5), theory.collapsed(2, 2)):
        with pytest.raises(ValueError, match="one-hot rows and no empty expert"):
            theory.spectral_gap(p, torch.eye(2))
    for w in (torch.eye(3), torch.tensor([[0.0, 1.0], [2.0, 0.0]])):
        with pytest.raises(ValueError, match=r"symmetric, \[2, 2\]"):
            theory.spectral_bound(one_hot(0, 1), w)


# ---------------------------------------------------------------------- Gibbs form

TAUS = st.sampled_from([1e-3, 0.1, 1.0, 50.0])


@given(problems(), TAUS, st.integers(0, 10**6))
def test_the_softmax_is_the_best_row(problem: tuple[Tensor, Tensor], tau: float, seed: int) -> None:
    p, _ = problem
    scores = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=p.dtype)
    lost = theory.linearised_optimum(p, scores, tau)
    assert lost.gap < ROUNDING
    assert (lost.left >= -ROUNDING * lost.scale).all()
    best = theory.gibbs(scores, tau)
    assert theory.linearised_optimum(best, scores, tau).left.abs().max() < ROUNDING * lost.scale

    def value(q: Tensor, m: int) -> float:
        inner = sum(float(q[m, k] * scores[m, k]) for k in range(q.shape[1]))
        return inner - tau * sum(x * math.log(x) for x in q[m].tolist() if x > 0)

    for m in range(len(p)):
        assert value(best, m) - value(p, m) == pytest.approx(float(lost.left[m]), abs=1e-11 * lost.scale)


@given(problems(("soft", "uniform")), TAUS, st.sampled_from([0.0, 1e-8, 0.5]))
def test_the_gradient_along_the_simplex(problem: tuple[Tensor, Tensor], tau: float, eps: float) -> None:
    both = theory.stationarity(*problem, tau, eps)
    assert both.gap < 1e-11


@given(observations(most=5), st.integers(1, 3), st.sampled_from([0.05, 0.3, 1.0, 3.0]), st.integers(0, 10**6))
@settings(max_examples=15)
def test_fixed_points_are_stationary_and_steps_never_lose(
    g: Tensor, experts: int, share: float, seed: int
) -> None:
    tau = share * max(energy(g) / len(g), 1e-12)
    torch.manual_seed(seed)
    p = assignment_of("soft", len(g), experts)

    def objective(q: Tensor) -> float:
        return float(gar.alignment_loss(q, g, eps=0.0, entropy_weight=tau))

    values = [objective(p)]
    for _ in range(40):
        p = theory.fixed_point(p, g, tau, steps=1)
        values.append(objective(p))
    little = 1e-11 * (energy(g) + tau * len(g) * (1 + math.log(experts)))
    assert all(after <= before + little for before, after in itertools.pairwise(values))
    p = theory.fixed_point(p, g, tau, steps=400)
    moved = float((theory.gibbs(gar.marginal_scores(p, g, eps=0.0), tau) - p).abs().max())
    if moved < 1e-10 and (p > 1e-6).all():  # near the critical temperature steps become short
        both = theory.stationarity(p, g, tau)
        assert float(both.left.abs().max()) < 1e-6 * both.scale


def test_as_the_temperature_goes_to_zero_the_best_expert_takes_all() -> None:
    scores = torch.tensor([[1.0, 1.1, 0.0], [2.0, 2.0, 1.0]])
    cold = theory.gibbs(scores, 1e-3)
    assert cold[0].tolist() == pytest.approx([0, 1, 0], abs=1e-12)
    assert cold[1].tolist() == pytest.approx([0.5, 0.5, 0], abs=1e-12)  # no unique maximiser: they share


@pytest.mark.parametrize("experts", [2, 3])
@pytest.mark.parametrize("kind", ["random", "line", "one zero"])
def test_uniform_routing_is_stationary_and_stable_above_the_critical_temperature(
    kind: str, experts: int
) -> None:
    g = gradients_of(kind, 5, 3)
    uniform = torch.full((5, experts), 1 / experts, dtype=torch.float64)
    critical = theory.critical_temperature(g)
    covariance = np.cov(g.numpy().T, bias=True)
    assert critical == pytest.approx(2 * float(np.linalg.eigvalsh(covariance)[-1]))
    along = torch.eye(5 * experts, dtype=torch.float64).reshape(-1, 5, experts)
    along = (along - along.mean(2, keepdim=True)).flatten(1)
    for share, stable in ((1.02, True), (0.98, False)):
        tau = share * critical
        assert float(theory.stationarity(uniform, g, tau).left.abs().max()) < 1e-10

        def loss(flat: Tensor, tau: float = tau) -> Tensor:
            return gar.alignment_loss(flat.reshape(5, experts), g, eps=0.0, entropy_weight=tau)

        hessian = torch.autograd.functional.hessian(loss, uniform.flatten())
        curvature = torch.linalg.eigvalsh(along @ hessian @ along.T)
        assert (float(curvature.min()) > -1e-9 * tau) == stable


def test_equal_observations_keep_uniform_routing_at_every_temperature() -> None:
    assert theory.critical_temperature(torch.ones(4, 3)) == 0


def test_the_gibbs_form_is_about_positive_probabilities_and_temperatures() -> None:
    with pytest.raises(ValueError, match="positive probabilities"):
        theory.stationarity(one_hot(0, 1), torch.ones(2, 2), 0.1)
    for tau in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="tau must be positive"):
            theory.gibbs(torch.ones(2, 2), tau)


# ---------------------------------------------------------------------- collapse


@given(problems())
def test_collapse_is_the_worst_assignment_with_the_denominator(problem: tuple[Tensor, Tensor]) -> None:
    found = theory.over_collapse(*problem)
    assert found.gap < ROUNDING
    assert float(found.right) >= 0


@given(problems(("ignoring", "uniform", "collapsed")))
def test_routing_that_ignores_the_observations_is_as_bad(problem: tuple[Tensor, Tensor]) -> None:
    found = theory.over_collapse(*problem)
    assert abs(float(found.left)) <= ROUNDING * found.scale


@given(problems())
def test_equal_observations_make_all_assignments_equal(problem: tuple[Tensor, Tensor]) -> None:
    p, g = problem
    g = g[:1].repeat(len(p), 1)
    assert abs(float(theory.over_collapse(p, g).left)) <= ROUNDING * energy(g)


@given(observations(least=2), st.sampled_from([1e-6, 0.01, 0.5, 1.0]), st.booleans())
def test_what_leaving_gains(g: Tensor, mass: float, normalize: bool) -> None:
    found = theory.leaving(g, mass, normalize=normalize)
    assert found.gap < ROUNDING
    if normalize:
        assert (found.right >= 0).all()


@given(observations(least=2), st.booleans(), st.sampled_from([0.0, 0.3]))
def test_the_rate_is_the_limit_of_small_masses(g: Tensor, normalize: bool, eps: float) -> None:
    rate = theory.leaving_rate(g, normalize=normalize, eps=eps)
    start, mass = theory.collapsed(len(g), 2), 1e-6
    for m in range(len(g)):
        moved = start.clone()
        moved[m] = moved.new_tensor([1 - mass, mass])
        options: dict[str, Any] = {"eps": eps, "normalize": normalize}
        gain = gar.association(moved, g, **options) - gar.association(start, g, **options)
        assert float(gain) / mass == pytest.approx(float(rate[m]), rel=1e-4, abs=1e-4 * len(g) * energy(g))


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.6])
@pytest.mark.parametrize("mass", [1e-3, 0.5, 2.0])
def test_the_separating_perturbation_of_the_paper(rho: float, mass: float) -> None:
    """thm:vertex_unstable: ``mass`` of one of 3 kinds, of 4 observations each, goes to an empty expert."""
    u, each = theory.equiangular(3, rho), 4
    p = theory.collapsed(3 * each, 3)
    p[:each] = torch.tensor([1 - mass / each, mass / each, 0], dtype=p.dtype)
    load = 3.0 * each
    claimed = (1 - rho) * (1 - 1 / 3) * (mass + mass**2 / (load - mass))
    found = theory.over_collapse(p, u.repeat_interleave(each, 0))
    assert float(found.left) == pytest.approx(claimed, rel=1e-9)
    assert claimed > 0


def test_without_the_denominator_collapse_is_best_where_nothing_conflicts() -> None:
    g = torch.rand(6, 3, dtype=torch.float64)  # every inner product is positive
    top = float(gar.association(theory.collapsed(6, 3), g, normalize=False))
    assert top == pytest.approx(float((g @ g.T).sum()))
    assert (theory.leaving_rate(g, normalize=False) < 0).all()
    others = [float(gar.association(p, g, normalize=False)) for p in theory.partitions(6, 3)]
    soft = [float(gar.association(assignment_of("soft", 6, 3), g, normalize=False)) for _ in range(50)]
    assert max(others + soft) < top
    assert float(theory.leaving(g, 1.0, normalize=False).left.max()) < 0
    assert float(theory.leaving(g, 1.0).left.min()) > 0


def test_without_the_denominator_conflict_can_prevent_collapse() -> None:
    assert float(gar.association(theory.collapsed(2, 2), rows(1, -1), normalize=False)) == 0
    assert float(gar.association(one_hot(0, 1), rows(1, -1), normalize=False)) == 2
    # The condition is about <G, g_m>: a conflict of pairs that the sum outweighs does not help.
    g = rows(3, 3, -1)
    assert (theory.leaving_rate(g, normalize=False) < 0).tolist() == [True, True, False]
    g = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-0.5, 2.0]])
    assert float(g[0] @ g[2]) < 0
    assert (theory.leaving_rate(g, normalize=False) < 0).all()


def test_with_eps_collapse_is_a_local_maximum_again_below_eps() -> None:
    g = theory.equiangular(2, 0.5).repeat(4, 1)
    assert (theory.leaving_rate(g) > 0).all()
    assert (theory.leaving_rate(g, eps=gar.objective.EPS) < 0).all()
    scores = gar.marginal_scores(theory.collapsed(8, 2), g)
    assert (scores[:, 1] == 0).all()
    assert (scores[:, 0] > 0).all()


@given(observations(least=2), st.integers(2, 4))
def test_at_top_1_full_collapse_is_pushed_on(g: Tensor, experts: int) -> None:
    """Exactly empty experts have score 0, the used one on average ||mean||^2: no cure there."""
    z = torch.randn(len(g), experts, dtype=torch.float64)
    z[:, 0] = z.max(1).values + 1
    scores = gar.marginal_scores(theory.collapsed(len(g), experts), g)
    assert (scores[:, 1:] == 0).all()
    mean = energy(g.mean(0))
    assert float(scores[:, 0].mean()) == pytest.approx(mean, rel=1e-6, abs=1e-10 * energy(g))
    push = theory.router_tilt(z, g, top_k=1).left
    q = z.softmax(1)
    slow = q[:, 0] * (1 - q[:, 0]) * scores[:, 0]
    assert torch.allclose(push[:, 0], slow, rtol=1e-9, atol=1e-12 * energy(g))


def test_an_unsuitable_mass_is_refused() -> None:
    for mass in (0.0, 1.5):
        with pytest.raises(ValueError, match="0 < mass <= 1"):
            theory.leaving(torch.ones(3, 2), mass)
    with pytest.raises(ValueError, match="two observations"):
        theory.leaving(torch.ones(1, 2), 1.0)


# ---------------------------------------------------------------------- load


@given(
    observations(most=3), st.integers(1, 3), st.sampled_from([0.0, 1e-8, 0.7]), st.booleans(), st.booleans()
)
@settings(max_examples=40)
def test_expected_rewards_are_those_of_all_windows(
    g: Tensor, load: int, eps: float, normalize: bool, weighted: bool
) -> None:
    weights = torch.rand(len(g), dtype=g.dtype) + 0.01 if weighted else torch.ones(len(g), dtype=g.dtype)
    found = theory.window(g, load, weights / weights.sum(), eps=eps, normalize=normalize)
    for name in ("utility", "member", "newcomer", "joining"):
        assert getattr(found, name).gap < ROUNDING, name


def test_expected_scores_against_loops() -> None:
    """Every window of two of three observations, with the score's definition written out."""
    g, load, eps = torch.randn(3, 2, dtype=torch.float64).tolist(), 2, 0.1
    member = newcomer = 0.0
    for a, b, c in itertools.product(g, g, g):
        total = [x + y for x, y in zip(a, b, strict=True)]
        square = sum(x * x for x in total) / (load + eps) ** 2
        member += 2 * sum(x * y for x, y in zip(total, a, strict=True)) / (load + eps) - square
        newcomer += 2 * sum(x * y for x, y in zip(total, c, strict=True)) / (load + eps) - square
    of = theory.moments(torch.tensor(g))
    assert theory.member_score(load, of, eps=eps) == pytest.approx(member / 27)
    assert theory.newcomer_score(load, of, eps=eps) == pytest.approx(newcomer / 27)


@given(observations())
def test_load_does_not_raise_a_members_score(g: Tensor) -> None:
    of = theory.moments(g)
    little = ROUNDING * of.nu
    assert 0 <= of.gamma <= of.nu + little
    members = [theory.member_score(load, of) for load in range(1, 30)]
    assert all(later <= earlier + little for earlier, later in itertools.pairwise(members))
    assert members[0] == pytest.approx(of.nu)
    assert theory.member_score(1e9, of) == pytest.approx(of.gamma, abs=1e-8 * of.nu)
    assert theory.utility(1e6, of) / 1e6 == pytest.approx(of.gamma, abs=2e-6 * of.nu)
    # Not in the paper: a newcomer's score does rise, to the same limit; a whole one adds gamma at any load.
    newcomers = [theory.newcomer_score(load, of) for load in range(1, 30)]
    assert all(later >= earlier - little for earlier, later in itertools.pairwise(newcomers))
    assert theory.newcomer_score(1e9, of) == pytest.approx(of.gamma, abs=1e-8 * of.nu)
    joining = [theory.joining_gain(load, of) for load in range(1, 30)]
    assert joining == pytest.approx([of.gamma] * 29, abs=1e-11 * of.nu)
    assert theory.joining_gain(0, of) == pytest.approx(of.nu)


@given(observations(), st.integers(1, 50))
def test_without_the_denominator_load_raises_every_score(g: Tensor, load: int) -> None:
    of = theory.moments(g)
    for score in (theory.member_score, theory.newcomer_score, theory.joining_gain):
        rise = score(load + 1, of, normalize=False) - score(load, of, normalize=False)
        assert rise == pytest.approx(2 * of.gamma, abs=1e-11 * load * of.nu)


@given(st.floats(0, 3), st.floats(0, 3), st.sampled_from([1e-8, 0.1, 1.0, 5.0]), st.floats(1, 20))
def test_with_eps_a_members_score_rises_exactly_below_a_load(
    gamma: float, spread: float, eps: float, load: float
) -> None:
    of = theory.Moments(gamma + spread, gamma)
    step = 1e-4 * load
    rise = theory.member_score(load + step, of, eps=eps) - theory.member_score(load - step, of, eps=eps)
    margin = 2 * gamma * eps**2 - spread * (load + 3 * eps)
    assert rise / (2 * step) == pytest.approx(margin / (load + eps) ** 3, rel=1e-4, abs=1e-7)
    # Whatever eps, the score stays below its value at eps = 0.
    assert theory.member_score(load, of, eps=eps) <= theory.member_score(load, of) + 1e-12


def test_equal_observations_are_the_edge_where_load_raises_the_score() -> None:
    of = theory.moments(torch.ones(3, 2))
    assert of.nu == of.gamma
    assert theory.member_score(2, of, eps=0.5) > theory.member_score(1, of, eps=0.5)
    assert theory.member_score(2, of) == theory.member_score(1, of)


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.4, 1.0])
def test_moments_of_the_papers_prototypes(rho: float) -> None:
    u = theory.equiangular(3, rho)
    assert (u @ u.T).fill_diagonal_(rho).flatten().tolist() == pytest.approx([rho] * 9)
    weights = torch.tensor([0.5, 0.3, 0.2])
    of = theory.moments(u, weights)
    assert of.nu == pytest.approx(1)
    assert of.gamma == pytest.approx(rho + (1 - rho) * float(weights.square().sum()))
    assert theory.moments(u).gamma == pytest.approx(rho + (1 - rho) / 3, abs=1e-12)


def test_impossible_prototypes_and_weights_are_refused() -> None:
    for count, rho in ((3, -0.51), (2, 1.1), (0, 0.0)):
        with pytest.raises(ValueError, match="unit vectors cannot"):
            theory.equiangular(count, rho)
    for weights in (torch.ones(3), torch.ones(2) / 2, torch.tensor([1.5, -0.5, 0.0])):
        with pytest.raises(ValueError, match="3 probabilities"):
            theory.moments(torch.ones(3, 2), weights)
    with pytest.raises(ValueError, match="load must be 1"):
        theory.window(torch.ones(3, 2), 0)


# ---------------------------------------------------------------------- tilt


def slow_gate(z: list[float], top_k: int) -> list[float]:
    chosen = sorted(range(len(z)), key=lambda k: (-z[k], k))[:top_k]
    parts = [math.exp(z[k] - max(z)) if k in chosen else 0.0 for k in range(len(z))]
    return [x / sum(parts) for x in parts]


@given(
    observations(),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([0.0, 1e-8, 0.5]),
    st.booleans(),
    st.sampled_from([0.0, 0.3]),
)
def test_the_push_on_the_logits(
    g: Tensor, experts: int, top_k: int, eps: float, normalize: bool, tau: float
) -> None:
    top_k = min(top_k, experts)
    z = torch.randn(len(g), experts, dtype=torch.float64)
    tilt = theory.router_tilt(z, g, top_k=top_k, eps=eps, normalize=normalize, entropy_weight=tau)
    assert tilt.gap < 1e-10
    assert tilt.left.sum(1).abs().max() <= 1e-10 * tilt.scale
    p = torch.tensor([slow_gate(row, top_k) for row in z.tolist()], dtype=torch.float64)
    wide = experts if top_k == 1 else top_k
    q = torch.tensor([slow_gate(row, wide) for row in z.tolist()], dtype=torch.float64)
    gain = oracles.marginal_scores(p, g, eps=eps, normalize=normalize)
    gain = gain - tau * torch.where(p > 0, 1 + p.clamp(min=1e-300).log(), 0.0)
    for m in range(len(g)):
        average = sum(float(q[m, k] * gain[m, k]) for k in range(experts))
        for k in range(experts):
            slow = float(q[m, k]) * (float(gain[m, k]) - average)
            assert float(tilt.left[m, k]) == pytest.approx(slow, abs=1e-10 * tilt.scale)
    if top_k > 1:
        assert (tilt.left[p == 0] == 0).all()


def test_the_push_is_the_slope_of_the_association() -> None:
    g = torch.randn(6, 3, dtype=torch.float64)
    z = torch.randn(6, 4, dtype=torch.float64)
    push = theory.router_tilt(z, g).left

    def value(logits: Tensor) -> float:
        gates = [slow_gate(row, 4) for row in logits.tolist()]
        return float(gar.association(torch.tensor(gates, dtype=torch.float64), g))

    for m, k in itertools.product(range(6), range(4)):
        step = torch.zeros_like(z)
        step[m, k] = 1e-5
        assert (value(z + step) - value(z - step)) / 2e-5 == pytest.approx(float(push[m, k]), abs=1e-6)


@given(observations(), st.integers(1, 4))
def test_routing_that_ignores_the_observations_is_not_pushed_apart(g: Tensor, experts: int) -> None:
    z = torch.randn(experts, dtype=torch.float64).expand(len(g), experts)
    tilt = theory.router_tilt(z, g, eps=0.0).left
    assert tilt.abs().max() <= 1e-10 * max(energy(g), 1e-300)


@given(st.integers(2, 3), st.floats(0, 1), st.integers(1, 3), st.sampled_from([0.0, 0.7]), st.floats(0, 1))
@settings(max_examples=30)
def test_enriching_one_kind(count: int, closeness: float, load: int, eps: float, place: float) -> None:
    rho = closeness - (1 - closeness) / (count - 1)
    delta = place - 1 / count
    found = theory.mixture_tilt(count, rho, load, delta, eps=eps)
    assert found.alignment.gap < ROUNDING
    assert found.utility.gap < ROUNDING
    assert float(found.utility.left) >= -ROUNDING
    assert float(found.alignment.left) * delta >= -ROUNDING


def test_the_edges_of_the_directional_tilt() -> None:
    equal = theory.mixture_tilt(3, 1.0, 2, 0.3)  # rho < 1 is needed
    assert abs(float(equal.alignment.left)) < 1e-12
    assert abs(float(equal.utility.left)) < 1e-12
    alone = theory.mixture_tilt(3, 0.2, 1, 0.3)  # L > 1 is needed for the utility
    assert float(alone.alignment.left) == pytest.approx(0.24)
    assert abs(float(alone.utility.left)) < 1e-12
    depleted, enriched = (theory.mixture_tilt(2, 0.2, 3, delta) for delta in (-0.3, 0.3))
    assert float(depleted.utility.left) == pytest.approx(float(enriched.utility.left))
    assert float(depleted.alignment.left) == pytest.approx(-float(enriched.alignment.left))
    for count, delta in ((1, 0.0), (3, 0.7), (3, -0.4)):
        with pytest.raises(ValueError, match="prototypes"):
            theory.mixture_tilt(count, 0.2, 2, delta)


# ---------------------------------------------------------------------- the page


def test_the_page_shows_what_the_functions_give() -> None:
    assert runpy.run_path(str(SCRIPT))["old"](ROOT / "docs", theory_page.compute()) == []


def test_the_check_sees_an_old_number_figure_and_page(tmp_path: Path) -> None:
    old = runpy.run_path(str(SCRIPT))["old"]
    computed = pd.DataFrame({"figure": "spectral", "series": list("ab"), "x": [0.0, 1.0], "y": [2.0, 3.0]})
    assert old(tmp_path, computed) == ["no figures.csv"]
    folder = tmp_path / "theory"
    folder.mkdir()
    computed.to_csv(folder / "figures.csv", index=False)
    assert old(tmp_path, computed) == [
        "spectral.svg is not drawn from figures.csv",
        "theory.md does not show spectral.svg",
    ]
    (folder / "spectral.svg").write_text(f"data {theory_page.digest(computed)}")
    (tmp_path / "theory.md").write_text("![a](theory/spectral.svg)")
    assert old(tmp_path, computed) == []
    assert old(tmp_path, computed.assign(y=[2.0, 3.1])) == ["figures.csv has other numbers"]
    assert old(tmp_path, computed[:1]) == ["figures.csv has other series"]
    (folder / "stray.svg").write_text("")
    assert len(old(tmp_path, computed)) == 2
