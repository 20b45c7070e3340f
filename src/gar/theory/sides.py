"""Two sides of a claim, and what a claim is about: assignments and observations in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sides:
    """Both sides of an identity, in float64 and of one shape.

    ``left`` is measured, with the code that trains wherever the claim is about it; ``right`` is the claim's
    formula. ``scale`` is the size of the terms that were added: rounding is proportional to it.
    """

    left: Tensor
    right: Tensor
    scale: float

    @property
    def gap(self) -> float:
        """The largest difference as a share of ``scale``; 0 where both sides are 0."""
        difference = float((self.left - self.right).abs().max()) if self.left.numel() else 0.0
        return difference / self.scale if self.scale > 0 else difference


def as_assignment(probabilities: Tensor) -> Tensor:
    """``probabilities`` [M, E] in float64; a ValueError unless every row is a distribution."""
    p = probabilities.detach().to(torch.float64)
    if p.dim() != 2 or not p.numel():
        raise ValueError(f"probabilities must be [M, E] with M, E > 0, got shape {tuple(p.shape)}")
    if not (p >= 0).all() or not torch.allclose(p.sum(1), p.new_ones(len(p)), rtol=0, atol=1e-9):
        raise ValueError("every row of probabilities must be non-negative and sum to 1")
    return p


def as_observations(gradients: Tensor, rows: int | None = None) -> Tensor:
    """``gradients`` [M, d] in float64; a ValueError unless there are ``rows`` of them, one at least."""
    g = gradients.detach().to(torch.float64)
    if g.dim() != 2 or not g.numel() or (rows is not None and len(g) != rows):
        wanted = f"[{rows}, d]" if rows else "[M, d]"
        raise ValueError(f"gradients must be {wanted} with M, d > 0, got shape {tuple(g.shape)}")
    return g


def energy(gradients: Tensor) -> float:
    """``sum_m ||g_m||^2``, the trace of the Gram matrix."""
    return float(gradients.square().sum())


def centroids(p: Tensor, g: Tensor) -> Tensor:
    """``G_k / d_k`` [E, d]; zero for an unused expert."""
    load = p.sum(0)[:, None]
    return torch.where(load > 0, p.T @ g / torch.where(load > 0, load, 1.0), 0.0)
