"""The objective on plain tensors against float64 loops written from its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gar
from gar.objective import gram_matrix
from support import oracles

SHAPES = [(1, 1, 3), (1, 4, 3), (6, 1, 5), (5, 3, 7), (9, 2, 4), (3, 8, 2), (16, 4, 30), (40, 3, 5)]
VARIANTS: list[dict[str, Any]] = [{}, {"normalize": False}, {"eps": 0.5}]


def problem(m: int, experts: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Probabilities [M, E] whose rows sum to 1, with exact zeros, and observations [M, d]."""
    torch.manual_seed(seed)
    p = torch.rand(m, experts, dtype=torch.float64)
    p[:, 1:] *= torch.rand(m, experts - 1) > 0.4
    return p / p.sum(1, keepdim=True), torch.randn(m, d, dtype=torch.float64)


def degenerate() -> dict[str, tuple[Tensor, Tensor]]:
    one_used = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).expand(5, 3)
    p, g = problem(5, 3, 4)
    some_zero = g * torch.tensor([1.0, 0, 0, 1, 1], dtype=torch.float64).unsqueeze(1)
    return {
        "one row, one expert": problem(1, 1, 3),
        "one expert used": (one_used, g),
        "all gradients zero": (p, torch.zeros_like(g)),
        "some gradients zero": (p, some_zero),
        "opposite gradients": (torch.ones(2, 1, dtype=torch.float64), torch.stack([g[0], -g[0]])),
        "uniform": (torch.full((5, 3), 1 / 3, dtype=torch.float64), g),
        "no mass at all": (torch.zeros(5, 3, dtype=torch.float64), g),
        "one dimension": problem(5, 3, 1),
        "an empty row": (p * torch.tensor([1.0, 1, 0, 1, 1], dtype=torch.float64).unsqueeze(1), g),
    }


def same(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def oracle_options(options: dict[str, Any]) -> dict[str, Any]:
    return {"eps": 1e-8, **options}


def forms(g: Tensor) -> dict[str, dict[str, Any]]:
    """The two ways to give the same observations."""
    return {"gradients": {"gradients": g}, "gram": {"gram": g @ g.T}}


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_equal_the_oracles(shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    p, g = problem(*shape)
    expected = oracles.association(p, g, **oracle_options(options))
    same(gar.association(p, g, **options), expected)
    same(gar.association(p, gram=g @ g.T, **options), expected)
    same(oracles.association_gram(p, g @ g.T, **oracle_options(options)), expected)
    same(gar.alignment_loss(p, g, **options), -expected)
    scores = oracles.marginal_scores(p, g, **oracle_options(options))
    same(gar.marginal_scores(p, g, **options), scores)
    same(gar.marginal_scores(p, gram=g @ g.T, **options), scores)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("name", list(degenerate()))
def test_degenerate_inputs_have_the_value_of_the_definition(name: str, options: dict[str, Any]) -> None:
    p, g = degenerate()[name]
    p = p.clone().requires_grad_()
    for inputs in forms(g).values():
        loss = gar.alignment_loss(p, **inputs, **options)
        same(loss.detach(), -oracles.association(p.detach(), g, **oracle_options(options)))
        (grad,) = torch.autograd.grad(loss, p)
        scores = gar.marginal_scores(p, **inputs, **options)
        assert torch.isfinite(grad).all()
        # An unused expert divides rounding by eps^2 where the oracle has an exact zero.
        same(scores, oracles.marginal_scores(p, g, **oracle_options(options)), 1e-7)
        same(-grad, scores, 1e-7)


@pytest.mark.parametrize("form", ["gradients", "gram"])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_is_minus_the_marginal_scores(
    shape: tuple[int, int, int], options: dict[str, Any], form: str
) -> None:
    p, g = problem(*shape)
    inputs = forms(g)[form]
    p.requires_grad_()
    (grad,) = torch.autograd.grad(gar.alignment_loss(p, **inputs, **options), p)
    same(-grad, oracles.marginal_scores(p, g, **oracle_options(options)), 1e-8)
    if (p.sum(0) > 1e-2).all():  # near an unused expert the step of finite differences is larger than eps
        assert torch.autograd.gradcheck(lambda q: gar.alignment_loss(q, **inputs, **options), p)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_is_close(shape: tuple[int, int, int]) -> None:
    p, g = problem(*shape)
    expected = oracles.association(p, g, 1e-8)
    same(gar.association(p.float(), g.float()), expected, 1e-5)
    same(gar.association(p.float(), gram=g.float() @ g.float().T), expected, 1e-5)


@pytest.mark.parametrize("form", ["gradients", "gram"])
def test_without_eps_an_unused_expert_counts_nothing(form: str) -> None:
    p, g = degenerate()["one expert used"]
    p = p.clone().requires_grad_()
    inputs = forms(g)[form]
    loss = gar.alignment_loss(p, **inputs, eps=0.0)
    same(loss.detach(), -oracles.association(p.detach(), g, 0.0))
    assert torch.isfinite(torch.autograd.grad(loss, p)[0]).all()
    same(gar.marginal_scores(p, **inputs, eps=0.0), oracles.marginal_scores(p, g, 0.0))


def test_the_three_vectors_of_the_paper() -> None:
    gram = torch.tensor([[1.0, 0.9, 0.2], [0.9, 1.0, 0.2], [0.2, 0.2, 1.0]], dtype=torch.float64)
    vectors = torch.linalg.cholesky(gram)
    for inputs in ({"gram": gram}, {"gradients": vectors}):
        for pair, value in (((0, 1), 2.9), ((0, 2), 2.2), ((1, 2), 2.2)):
            p = torch.zeros(3, 2, dtype=torch.float64)
            for m in range(3):
                p[m, 0 if m in pair else 1] = 1.0
            assert float(gar.association(p, **inputs)) == pytest.approx(value, abs=1e-6)
            assert float(gar.alignment_loss(p, **inputs)) == pytest.approx(-value, abs=1e-6)


@pytest.mark.parametrize("tau", [0.05, 1.0])
@pytest.mark.parametrize("normalize", [True, False])
def test_entropy_weight_with_exact_zeros(tau: float, normalize: bool) -> None:
    p, g = problem(6, 4, 3)
    assert (p == 0).any()
    p.requires_grad_()
    loss = gar.alignment_loss(p, g, normalize=normalize, entropy_weight=tau)
    expected = oracles.alignment_loss(p, g, normalize=normalize, tau=tau)
    same(loss.detach(), expected.detach())
    (grad,) = torch.autograd.grad(loss, p)
    (expected_grad,) = torch.autograd.grad(expected, p)
    assert torch.isfinite(grad).all()
    same(grad, expected_grad, 1e-8)
    inner = torch.zeros(6, 4, dtype=torch.float64)
    inner[p.detach() > 0] = tau * (p.detach()[p.detach() > 0].log() + 1)
    same(grad + gar.marginal_scores(p, g, normalize=normalize), inner, 1e-8)


@pytest.mark.parametrize("form", ["gradients", "gram"])
def test_order_of_groups_and_experts_does_not_matter(form: str) -> None:
    p, g = problem(9, 4, 5)
    rows, columns = torch.randperm(9), torch.randperm(4)

    def inputs(g: Tensor) -> dict[str, Any]:
        return {"gradients": g} if form == "gradients" else {"gram": g @ g.T}

    moved = p[rows][:, columns]
    options: dict[str, Any] = {"entropy_weight": 0.3}
    same(
        gar.alignment_loss(moved, **inputs(g[rows]), **options), gar.alignment_loss(p, **inputs(g), **options)
    )
    same(gar.marginal_scores(moved, **inputs(g[rows])), gar.marginal_scores(p, **inputs(g))[rows][:, columns])
    rotation, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
    same(gar.association(p, **inputs(g @ rotation)), gar.association(p, **inputs(g)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("c", [1e-9, 1e-4, 1e4, 1e9])
def test_scaling_gradients_scales_the_loss_by_the_square(c: float, dtype: torch.dtype) -> None:
    p, g = (t.to(dtype) for t in problem(9, 4, 5))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for options in VARIANTS:
        loss, scaled = gar.alignment_loss(p, g, **options), gar.alignment_loss(p, c * g, **options)
        torch.testing.assert_close(scaled, c**2 * loss, rtol=tolerance, atol=0)
        scores = gar.marginal_scores(p, g, **options)
        scaled_scores = gar.marginal_scores(p, c * g, **options)
        torch.testing.assert_close(scaled_scores / c**2, scores, rtol=tolerance, atol=10 * tolerance)


def test_observations_get_no_gradient() -> None:
    p, g = problem(5, 3, 4)
    p.requires_grad_()
    g.requires_grad_()
    gram = (g @ g.T).requires_grad_()
    gar.alignment_loss(p, g, entropy_weight=0.1).backward()
    gar.alignment_loss(p, gram=gram).backward()
    assert p.grad is not None
    assert g.grad is None
    assert not gar.marginal_scores(p, g).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["gradients", "gram"])
def test_half_inputs_accumulate_in_float32(form: str, dtype: torch.dtype) -> None:
    p, g = problem(37, 3, 20)
    p, g = p.to(dtype), (g + 1).to(dtype)
    observations = g if form == "gradients" else (g.double() @ g.double().T).to(dtype)
    wide = observations.double()
    inputs: dict[str, Any] = {form: observations}
    exact = (
        oracles.association(p, wide, 1e-8) if form == "gradients" else oracles.association_gram(p, wide, 1e-8)
    )
    found = gar.association(p, **inputs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)
    scores = gar.marginal_scores(p, **inputs)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(
        scores.double(), gar.marginal_scores(p.double(), **{**inputs, form: wide}), rtol=1e-4, atol=1e-4
    )


def test_half_probabilities_keep_their_entropy() -> None:
    p, g = (t.bfloat16() for t in problem(37, 3, 4))
    entropy = gar.alignment_loss(p, 0 * g, entropy_weight=1.0)
    expected = oracles.alignment_loss(p, 0 * g.double(), tau=1.0)
    torch.testing.assert_close(entropy.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("size", "columns"), [(7, 3), (6, 3), (2, 3), (1, 1), (20_000, 4096)])
def test_gram_matrix_by_blocks_of_columns(size: int, columns: int) -> None:
    rows = torch.randn(5, size, dtype=torch.float64)
    assert torch.allclose(gram_matrix(rows, columns), rows @ rows.T, rtol=1e-12, atol=1e-12)
    strided = torch.randn(5, 2 * size + 1, dtype=torch.float64)[:, 1 : size + 1]
    assert torch.allclose(gram_matrix(strided, columns), strided @ strided.T, rtol=1e-12, atol=1e-12)


def test_autocast_does_not_lower_the_precision() -> None:
    p, g = (t.float() for t in problem(9, 4, 5))
    expected = [gar.association(p, g), gar.association(p, gram=g @ g.T), gar.marginal_scores(p, g)]
    gram = g @ g.T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [gar.association(p, g), gar.association(p, gram=gram), gar.marginal_scores(p, g)]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [gar.association, gar.alignment_loss, gar.marginal_scores])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"gradients \[M, d\] or as gram="),
        ({"gradients": torch.ones(5, 4), "gram": torch.ones(5, 5)}, "not both"),
        ({"gradients": torch.ones(4, 4)}, r"M = 5 rows.*\(4, 4\)"),
        ({"gradients": torch.ones(5)}, r"got shape \(5,\)"),
        ({"gram": torch.ones(5, 4)}, r"gram must be \[5, 5\].*\(5, 4\)"),
    ],
)
def test_wrong_inputs_are_named(function: Any, arguments: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(torch.ones(5, 3), **arguments)


@pytest.mark.parametrize("function", [gar.association, gar.alignment_loss, gar.marginal_scores])
def test_probabilities_must_be_a_matrix(function: Any) -> None:
    with pytest.raises(ValueError, match=r"probabilities must be \[M, E\]"):
        function(torch.ones(5), torch.ones(5, 4))


def test_a_negative_entropy_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"entropy_weight must be non-negative, got -0\.1"):
        gar.alignment_loss(torch.ones(2, 2), torch.ones(2, 2), entropy_weight=-0.1)
