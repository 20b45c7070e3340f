"""CAGrad: conflict-averse combination of group gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from gar.methods._rows import GradientCombination, gram_matrix, mixtures
from gar.methods.update import Share

EPS = 1e-8


class CAGrad(GradientCombination):
    """``g_0 + c ||g_0|| g_w / (||g_w|| + eps)`` without rescaling (specification, section 5).

    ``w`` comes from ``inner_steps`` projected-simplex gradient steps of size
    ``inner_learning_rate / trace(R R^T)`` on ``<g_w, g_0> + c ||g_0|| ||g_w||``, from uniform weights.
    """

    name: ClassVar[str] = "cagrad"
    label: ClassVar[str] = "CAGrad"
    style: ClassVar[tuple[str, str] | None] = ("#E69F00", "s")
    capturable: ClassVar[bool] = True
    c: float = Field(0.4, ge=0, description="radius around the mean gradient, relative to its norm")
    inner_learning_rate: float = Field(0.1, gt=0)
    inner_steps: int = Field(10, ge=0)

    def combine(self, rows: Tensor) -> Tensor:
        return self.direction(gram_matrix(rows), lambda some: mixtures(rows, some)).to(rows.dtype)

    def combine_spread(self, rows: Tensor, share: Share) -> Tensor:
        """From the Gram matrix of all rows, and each rank's part of the two sums of rows."""
        own = rows if len(rows) else None
        gram = share.gram(own, rows.device, torch.float64)
        here = share.groups.on(rows.device).numbers[share.ranks.rank]

        def mixed(some: Tensor) -> Tensor:
            return share.sum(mixtures(rows, some[:, here.to(some.device)]))

        direction = self.direction(gram, mixed).to(rows.dtype)
        share.ranks.copy([direction])  # rows on the host of one rank and the GPU of another round differently
        return direction

    def direction(self, gram: Tensor, mixtures: Callable[[Tensor], Tensor]) -> Tensor:
        """[P] in float64, from the Gram matrix and from ``mixtures``: coefficients [K, M] to [K, P]."""
        w = self.weights(gram)
        mean, mixed = mixtures(torch.stack([torch.full_like(w, 1 / len(w)), w]))
        # Of the vectors themselves: the Gram matrix cannot tell norms below 1e-8 of the rows' from zero.
        radius = self.c * torch.linalg.vector_norm(mean)
        direction: Tensor = mean.addcmul_(mixed, radius / (torch.linalg.vector_norm(mixed) + EPS))
        return direction

    def weights(self, gram: Tensor) -> Tensor:
        """The simplex weights [M] from the Gram matrix [M, M]; multiplying the Gram leaves them unchanged.

        Computed in float64; returned in the Gram's dtype. Nothing is read back from the device.
        """
        m, dtype, gram = len(gram), gram.dtype, gram.double()
        w = gram.new_full((m,), 1 / m)
        counts = torch.arange(1, m + 1, dtype=gram.dtype, device=gram.device)
        trace = gram.trace()
        # Dividing by the trace makes every step, not only its size, independent of the gradient scale.
        gram = gram / torch.where(trace > 0, trace, torch.ones_like(trace))
        toward_mean = self.inner_learning_rate * gram.mean(1)
        radius = self.inner_learning_rate * self.c * gram.mean().clamp(min=0).sqrt()
        longest = gram.diagonal().clamp(min=0).sqrt()
        shortest = -longest
        for _ in range(self.inner_steps):
            pull = gram @ w
            # 1 / ||g_w||, and 0 where g_w cancels: rounding leaves a square of either sign.
            inverse = (w @ pull).rsqrt().nan_to_num(nan=0.0, posinf=0.0)
            # <r_m, g_w> / ||g_w|| is at most ||r_m||; where g_w nearly cancels, rounding would say otherwise.
            slope = (pull * inverse).clamp(shortest, longest)
            w = project_to_simplex(torch.addcmul(w - toward_mean, slope, radius, value=-1), counts)
        return w.to(dtype)


def project_to_simplex(v: Tensor, counts: Tensor | None = None) -> Tensor:
    """The Euclidean projection of ``v`` [M] onto the probability simplex; ``counts``: 1, ..., M if at hand.

    ``max(v - theta, 0)``, where theta is the largest of ``(the sum of the k largest - 1) / k``: from k to
    k + 1 it grows exactly while the next entry is above it.

    >>> project_to_simplex(torch.tensor([0.5, 1.5, -1.0]))
    tensor([0., 1., 0.])
    """
    if counts is None:
        counts = torch.arange(1, len(v) + 1, dtype=v.dtype, device=v.device)
    theta = ((v.sort(descending=True).values.cumsum(0) - 1) / counts).amax()
    return (v - theta).clamp(min=0)
