"""Load does not raise the score: anti-amplification (prop:case1_antiamplification, sec:ours_case1).

An expert holds a window of L observations, drawn independently. With ``nu = E||g||^2`` and
``gamma = ||E g||^2 <= nu`` everything below is exact for every distribution of observations; the paper's
equiangular prototypes have ``gamma = rho + (1 - rho) / C``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gar.objective import association, marginal_scores
from gar.theory.sides import Sides, as_observations


@dataclass(frozen=True)
class Moments:
    """``nu = E||g||^2`` and ``gamma = ||E g||^2`` of one observation."""

    nu: float
    gamma: float


@dataclass(frozen=True)
class Window:
    """Expectations over all windows: ``left`` by going through every one, ``right`` the formula.

    ``utility`` is ``E U``, the expert's term of the objective; ``member`` and ``newcomer`` are the expected
    score of an observation in the window and of one that is not; ``joining`` is the gain in ``E U`` when a
    whole one joins.
    """

    utility: Sides
    member: Sides
    newcomer: Sides
    joining: Sides


def moments(gradients: Tensor, weights: Tensor | None = None) -> Moments:
    """Of a draw from the rows of ``gradients`` [n, d], with probabilities ``weights`` [n] (equal ones)."""
    g, w = _population(gradients, weights)
    return Moments(float(w @ g.square().sum(1)), float((w @ g).square().sum()))


def utility(load: float, of: Moments, *, eps: float = 0.0, normalize: bool = True) -> float:
    """``E U = (gamma L^2 + (nu - gamma) L) / (L + eps)`` (eq:case1_U); ``E||G||^2`` without normalisation."""
    mass = of.gamma * load**2 + (of.nu - of.gamma) * load
    return mass / (load + eps) if normalize and load + eps > 0 else mass


def member_score(load: float, of: Moments, *, eps: float = 0.0, normalize: bool = True) -> float:
    """The expected score of an observation in the window, L >= 1 (eq:marginal_score_saturation).

    ``gamma + (nu - gamma) / L`` at ``eps = 0``: it does not rise with load. With ``eps > 0`` it rises where
    ``2 gamma eps^2 > (nu - gamma) (L + 3 eps)``, as for equal observations, but never beyond
    ``gamma + (nu - gamma) / L``. Without normalisation ``2 nu + 2 (L - 1) gamma``: no limit.
    """
    if not normalize:
        return 2 * (of.nu + (load - 1) * of.gamma)
    total = load + eps
    return of.gamma * (1 - eps**2 / total**2) + (of.nu - of.gamma) * (load + 2 * eps) / total**2


def newcomer_score(load: float, of: Moments, *, eps: float = 0.0, normalize: bool = True) -> float:
    """The expected score of an observation outside of the window, L >= 1; not in the paper.

    ``gamma - (nu - gamma) / L`` at ``eps = 0``: it *rises* with load, to the same limit. Without
    normalisation ``2 L gamma``.
    """
    inner = load * of.gamma
    if not normalize:
        return 2 * inner
    return 2 * inner / (load + eps) - utility(load, of, eps=eps) / (load + eps)


def joining_gain(load: float, of: Moments, *, eps: float = 0.0, normalize: bool = True) -> float:
    """``E U`` at L + 1 minus that at L: what a whole observation adds; not in the paper.

    At ``eps = 0`` it is ``gamma`` for every L >= 1, and ``nu`` for an empty expert. Without normalisation
    ``nu + 2 L gamma``.
    """
    if not normalize:
        return of.nu + 2 * load * of.gamma
    return utility(load + 1, of, eps=eps) - utility(load, of, eps=eps)


def window(
    gradients: Tensor, load: int, weights: Tensor | None = None, *, eps: float = 0.0, normalize: bool = True
) -> Window:
    """Both sides of every expectation over windows of ``load`` >= 1 rows of ``gradients`` [n, d].

    Goes through all n^(load + 1) of them: a population of a few rows and a load of a few.
    """
    g, w = _population(gradients, weights)
    if load < 1:
        raise ValueError(f"load must be 1 at least, got {load}")
    options: dict[str, Any] = {"eps": eps, "normalize": normalize}
    found = torch.zeros(4, dtype=g.dtype)
    joined = torch.ones(load + 1, 1, dtype=g.dtype)
    held = joined.clone()
    held[load] = 0  # the last of the draws is the newcomer
    for rows in itertools.product(range(len(g)), repeat=load + 1):
        drawn = g[list(rows)]
        value = association(held, drawn, **options)
        scores = marginal_scores(held, drawn, **options)
        gain = association(joined, drawn, **options) - value
        found += w[list(rows)].prod() * torch.stack([value, scores[0, 0], scores[load, 0], gain])
    of = moments(g, w)
    formulas = (utility, member_score, newcomer_score, joining_gain)
    scale = of.nu * (1 if normalize else load + 1)
    scales = (load * scale, 3 * scale, 3 * scale, (load + 1) * scale)
    return Window(
        *(
            Sides(left, left.new_tensor(formula(load, of, **options)), size)
            for left, formula, size in zip(found, formulas, scales, strict=True)
        )
    )


def equiangular(count: int, rho: float) -> Tensor:
    """``count`` unit vectors [C, C] with inner product ``rho`` in [-1 / (C - 1), 1] between each two.

    >>> u = equiangular(3, -0.5)
    >>> [round(float(x), 6) + 0.0 for x in (u @ u.T)[0]]
    [1.0, -0.5, -0.5]
    """
    if count < 1 or not (-1 / max(count - 1, 1) - 1e-12 <= rho <= 1):
        raise ValueError(f"{count} unit vectors cannot have the inner product {rho} between each two")
    gram = torch.full((count, count), rho, dtype=torch.float64).fill_diagonal_(1.0)
    values, vectors = torch.linalg.eigh(gram)
    root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root


def _population(gradients: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    g = as_observations(gradients)
    w = torch.ones(len(g)) / len(g) if weights is None else weights
    w = w.to(g.dtype)
    if w.shape != (len(g),) or not (w >= 0).all() or abs(float(w.sum()) - 1) > 1e-6:
        raise ValueError(f"weights must be {len(g)} probabilities, got shape {tuple(w.shape)}")
    return g, w / w.sum()
