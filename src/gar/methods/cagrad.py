"""CAGrad: conflict-averse combination of group gradients."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from gar.methods._rows import GradientCombination, gram_matrix, weighted_rows

EPS = 1e-8


class CAGrad(GradientCombination):
    """``g_0 + c ||g_0|| g_w / (||g_w|| + eps)`` without rescaling (specification, section 5).

    ``w`` comes from ``inner_steps`` projected-simplex gradient steps of size
    ``inner_learning_rate / trace(R R^T)`` on ``<g_w, g_0> + c ||g_0|| ||g_w||``, from uniform weights.
    """

    name: ClassVar[str] = "cagrad"
    label: ClassVar[str] = "CAGrad"
    style: ClassVar[tuple[str, str] | None] = ("#E69F00", "s")
    c: float = Field(0.4, ge=0, description="radius around the mean gradient, relative to its norm")
    inner_learning_rate: float = Field(0.1, gt=0)
    inner_steps: int = Field(10, ge=0)

    def combine(self, rows: Tensor) -> Tensor:
        w = self.weights(gram_matrix(rows))
        both = torch.stack([torch.full_like(w, 1 / len(w)), w])
        # Of the vectors themselves: the Gram matrix cannot tell norms below 1e-8 of the rows' from zero.
        squares = sum((part.square().sum(1) for part in weighted_rows(rows, both)), start=w.new_zeros(2))
        mean_norm, mixed_norm = squares.sqrt()
        coefficients = both[0] + self.c * mean_norm / (mixed_norm + EPS) * w
        return torch.cat([part.to(rows.dtype) for part in weighted_rows(rows, coefficients)])

    def weights(self, gram: Tensor) -> Tensor:
        """The simplex weights [M] from the Gram matrix [M, M]; multiplying the Gram leaves them unchanged.

        Computed in float64; returned in the Gram's dtype.
        """
        m, dtype, gram = len(gram), gram.dtype, gram.double()
        w = gram.new_full((m,), 1 / m)
        trace = gram.trace()
        # Dividing by the trace makes every step, not only its size, independent of the gradient scale.
        gram = gram / torch.where(trace > 0, trace, torch.ones_like(trace))
        toward_mean = gram.mean(1)
        mean_norm = gram.mean().clamp(min=0).sqrt()
        lengths = gram.diagonal().clamp(min=0).sqrt()
        for _ in range(self.inner_steps):
            pull = gram @ w
            norm = (w @ pull).clamp(min=0).sqrt()
            # <r_m, g_w> / ||g_w|| is at most ||r_m||; where g_w cancels, rounding would say otherwise.
            slope = torch.where(norm > 0, pull / norm, 0.0).clamp(-lengths, lengths)
            w = project_to_simplex(w - self.inner_learning_rate * (toward_mean + self.c * mean_norm * slope))
        return w.to(dtype)


def project_to_simplex(v: Tensor) -> Tensor:
    """The Euclidean projection of ``v`` [M] onto the probability simplex.

    >>> project_to_simplex(torch.tensor([0.5, 1.5, -1.0]))
    tensor([0., 1., 0.])
    """
    ordered = v.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(v) + 1, dtype=v.dtype, device=v.device)
    support = (ordered > excess).sum()
    return (v - excess[support - 1]).clamp(min=0)
