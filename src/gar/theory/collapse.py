"""All observations in one expert: without the denominator often best, with it worst (thm:vertex_unstable).

The paper shows, for prototypes, that a collapsed assignment is no local maximum at ``eps = 0``
(sec:ours_case3). For every set of observations it is a global minimum: :func:`over_collapse`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gar.objective import association, marginal_scores
from gar.theory.sides import Sides, as_assignment, as_observations, centroids, energy


def collapsed(rows: int, experts: int) -> Tensor:
    """All rows in the first expert, [M, E] in float64."""
    p = torch.zeros(rows, experts, dtype=torch.float64)
    p[:, 0] = 1
    return p


def over_collapse(probabilities: Tensor, gradients: Tensor) -> Sides:
    """``A_0(P) - A_0(collapsed) = sum_k d_k ||mu_k - mean||^2``: what an assignment gains over collapse.

    Never negative, and 0 exactly where all used experts have the same mean observation: a collapsed
    assignment, and as much any routing that ignores the observations, uniform routing first of all.
    """
    p = as_assignment(probabilities)
    g = as_observations(gradients, len(p))
    gained = association(p, g, eps=0.0) - association(collapsed(*p.shape), g, eps=0.0)
    between = (p.sum(0) * (centroids(p, g) - g.mean(0)).square().sum(1)).sum()
    return Sides(gained, between, energy(g))


def leaving(gradients: Tensor, mass: float, *, normalize: bool = True) -> Sides:
    """What the objective gains when ``mass`` in (0, 1] of one observation leaves a collapsed expert, [M].

    It goes to an empty expert, at ``eps = 0``; needs two observations. Entry m is about observation m:

    * load-normalised: ``||g_m - mean||^2 * mass M / (M - mass)``, positive unless ``g_m`` is the mean;
    * numerator only: ``-2 mass <G, g_m> + 2 mass^2 ||g_m||^2``, negative at first where ``<G, g_m> > 0``.
    """
    g = as_observations(gradients)
    if not 0 < mass <= 1 or len(g) < 2:
        raise ValueError(f"needs 0 < mass <= 1 and two observations, got {mass} and {len(g)}")
    start = collapsed(len(g), 2)
    before = association(start, g, eps=0.0, normalize=normalize)
    gains = []
    for m in range(len(g)):
        moved = start.clone()
        moved[m] = moved.new_tensor([1 - mass, mass])
        gains.append(association(moved, g, eps=0.0, normalize=normalize) - before)
    if normalize:
        formula = (g - g.mean(0)).square().sum(1) * mass * len(g) / (len(g) - mass)
    else:
        formula = -2 * mass * (g @ g.sum(0)) + 2 * mass**2 * g.square().sum(1)
    return Sides(torch.stack(gains), formula, energy(g) * (1 if normalize else len(g)))


def leaving_rate(gradients: Tensor, *, normalize: bool = True, eps: float = 0.0) -> Tensor:
    """The gain per mass of the first mass that leaves a collapsed expert, [M].

    If every entry is negative, collapse is a strict local maximum.

    * numerator only: ``-2 <G, g_m>``;
    * load-normalised, ``eps = 0``: ``||g_m - mean||^2``, never negative;
    * load-normalised, ``eps > 0``: minus the score in the used expert, since the score of an exactly empty
      expert is 0. Mass far below ``eps`` is not rewarded, so collapse *can* be a local maximum again.
    """
    g = as_observations(gradients)
    if normalize and eps == 0:
        return (g - g.mean(0)).square().sum(1)
    scores = marginal_scores(collapsed(len(g), 2), g, eps=eps, normalize=normalize)
    return scores[:, 1] - scores[:, 0]
