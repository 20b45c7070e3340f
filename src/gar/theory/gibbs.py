"""With entropy the best assignment is a softmax of the scores (prop:gibbs_form, app:gibbs_form_proof)."""

from __future__ import annotations

import torch
from torch import Tensor

from gar.objective import alignment_loss, marginal_scores
from gar.theory.sides import Sides, as_assignment, as_observations


def gibbs(scores: Tensor, tau: float) -> Tensor:
    """``softmax(s_mk / tau)`` [M, E]; where the largest score is alone it gets all mass as tau goes to 0."""
    return (scores.to(torch.float64) / _positive(tau)).softmax(1)


def linearised_optimum(probabilities: Tensor, scores: Tensor, tau: float) -> Sides:
    """How far rows are from the best of ``<s_m, p> + tau H(p)``: exactly ``tau KL(p || softmax(s_m / tau))``.

    ``left`` [M] is the optimum ``tau log sum_k exp(s_mk / tau)`` minus the value at ``p``. The divergence is
    not negative and 0 for the softmax alone, so that is the one maximiser, for any scores.
    """
    p, s = as_assignment(probabilities), scores.to(torch.float64)
    value = (p * s).sum(1) + tau * torch.special.entr(p).sum(1)
    divergence = (torch.xlogy(p, p) - p * (s / _positive(tau)).log_softmax(1)).sum(1)
    scale = float(s.abs().max()) + tau * (1 + float(torch.tensor(p.shape[1]).log()))
    return Sides(tau * (s / tau).logsumexp(1) - value, tau * divergence, scale)


def stationarity(probabilities: Tensor, gradients: Tensor, tau: float, eps: float = 0.0) -> Sides:
    """The objective's gradient along the simplex is ``tau (log p - log gibbs)``, row means taken away.

    ``left`` [M, E] is autograd's gradient of :func:`gar.alignment_loss` with ``entropy_weight=tau``. It is 0
    exactly where ``p_mk = gibbs(s(P))_mk``. ``probabilities`` must be positive: the claim is about interior
    points, and gates of top-k routing are none.
    """
    p = as_assignment(probabilities)
    g = as_observations(gradients, len(p))
    if not (p > 0).all():
        raise ValueError("the Gibbs form is about positive probabilities")
    leaf = p.clone().requires_grad_()
    loss = alignment_loss(leaf, g, eps=eps, entropy_weight=_positive(tau))
    (slope,) = torch.autograd.grad(loss, leaf)
    scores = marginal_scores(p, g, eps=eps)
    difference = tau * (p.log() - (scores / tau).log_softmax(1))
    scale = float(scores.abs().max()) + tau * (1 + float(p.log().abs().max()))
    return Sides(_along(slope), _along(difference), scale)


def fixed_point(start: Tensor, gradients: Tensor, tau: float, steps: int, eps: float = 0.0) -> Tensor:
    """``P <- gibbs(s(P))``, ``steps`` times from ``start`` [M, E].

    ``A_eps`` is convex in P, so that each step maximises a lower bound of ``A_eps + tau H``: the objective
    never rises. The limit is a stationary point, not always the best one.
    """
    p = as_assignment(start)
    g = as_observations(gradients, len(p))
    for _ in range(steps):
        p = gibbs(marginal_scores(p, g, eps=eps), tau)
    return p


def critical_temperature(gradients: Tensor) -> float:
    """``2 lambda_max`` of the observations' covariance [d, d] (over M, not M - 1).

    Uniform routing satisfies the Gibbs form at every tau, since its scores are the same for all experts. At
    ``eps = 0`` it is a strict local minimum above this temperature and none below (two experts or more).
    Not in the paper; it is Rose's first phase transition of deterministic annealing (1998).
    """
    g = as_observations(gradients)
    return 2 * float(torch.linalg.matrix_norm(g - g.mean(0), 2)) ** 2 / len(g)


def _along(slope: Tensor) -> Tensor:
    """The part along the simplex: rows that sum to 0."""
    return slope - slope.mean(1, keepdim=True)


def _positive(tau: float) -> float:
    if not tau > 0:
        raise ValueError(f"tau must be positive, got {tau}")
    return tau
