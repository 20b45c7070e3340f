"""Where the objective pushes the router's logits, and a mixture of prototypes.

The second is the paper's static directional tilt (prop:formal_self_reinforcing_specialization,
sec:ours_case2); the first is the chain rule through the gates that the paper's section on training uses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gar.objective import EPS, alignment_loss, marginal_scores
from gar.routing import masked_softmax, straight_through
from gar.theory.load import equiangular, window
from gar.theory.sides import Sides, as_observations


def router_tilt(
    logits: Tensor,
    gradients: Tensor,
    *,
    top_k: int | None = None,
    eps: float = EPS,
    normalize: bool = True,
    entropy_weight: float = 0.0,
) -> Sides:
    """``-dL/dz_mk = q_mk (a_mk - sum_l q_ml a_ml)``: logits [M, E] rise where an expert beats the average.

    ``left`` is autograd's through the gate of :class:`gar.Router`: the softmax over the ``top_k`` largest
    logits (over all when None), and the straight-through gate at 1. ``q`` is the gate, or at 1 the full
    softmax; ``a_mk`` is the marginal score, minus ``tau (1 + log p_mk)`` where ``p_mk > 0``. Rows sum to 0.
    An expert that is not selected has ``q = 0`` and so no tilt, however good it would be; at ``top_k = 1``
    all experts have one, from scores at the one-hot assignment.
    """
    g = as_observations(gradients, len(logits))
    z = logits.detach().to(torch.float64).requires_grad_()
    experts = z.shape[1]
    top_k = experts if top_k is None else top_k
    hard = top_k == 1 and experts > 1
    p = straight_through(z) if hard else masked_softmax(z, top_k)
    loss = alignment_loss(p, g, eps=eps, normalize=normalize, entropy_weight=entropy_weight)
    (slope,) = torch.autograd.grad(loss, z)
    z, p = z.detach(), p.detach()
    gain = marginal_scores(p, g, eps=eps, normalize=normalize)
    gain = gain - entropy_weight * torch.where(p > 0, 1 + torch.where(p > 0, p, 1.0).log(), 0.0)
    q = z.softmax(1) if hard else p
    return Sides(-slope, q * (gain - (q * gain).sum(1, keepdim=True)), float((q * gain.abs()).sum(1).max()))


@dataclass(frozen=True)
class MixtureTilt:
    """What enriching one prototype by ``delta`` changes against uniform mixing."""

    alignment: Sides
    utility: Sides


def mixture_tilt(count: int, rho: float, load: int, delta: float, *, eps: float = 0.0) -> MixtureTilt:
    """Both sides of prop:formal_self_reinforcing_specialization, for C = ``count`` >= 2 prototypes.

    An expert holds ``load`` independent draws, of the first prototype with probability ``1 / C + delta``.

    * ``alignment``: ``E <E G, g>`` of an independent draw of that prototype rises by
      ``L delta (1 - rho)``;
    * ``utility``: ``E U`` rises by ``L (L - 1) / (L + eps) * (1 - rho) * C / (C - 1) * delta^2``.

    The first is linear in ``delta``, the second quadratic: near uniform mixing the gain in utility is of
    second order, and it is the same for a depleted prototype (``delta < 0``), whose alignment falls.
    """
    if count < 2 or not -1e-12 <= delta + 1 / count <= 1 + 1e-12:
        raise ValueError(f"needs 2 prototypes and -1/C <= delta <= (C - 1)/C, got {count} and {delta}")
    u = equiangular(count, rho)
    uniform = torch.full((count,), 1 / count, dtype=u.dtype)
    tilted = uniform - delta / (count - 1)
    tilted[0] = 1 / count + delta
    tilted = tilted.clamp(min=0)
    aligned = load * (tilted - uniform) @ u @ u[0]
    gained = window(u, load, tilted, eps=eps).utility.left - window(u, load, uniform, eps=eps).utility.left
    slope = load * (load - 1) / (load + eps) * (1 - rho) * count / (count - 1)
    return MixtureTilt(
        Sides(aligned, torch.tensor(load * delta * (1 - rho), dtype=u.dtype), load),
        Sides(gained, torch.tensor(slope * delta**2, dtype=u.dtype), load),
    )
