"""The spectral relaxation and its bound (thm:spectral_relaxation, app:spectral_relaxation)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gar.objective import association
from gar.theory.sides import Sides, as_assignment


@dataclass(frozen=True)
class SpectralBound:
    """``floor <= value <= centred <= bound`` for a positive semi-definite Gram matrix.

    ``value`` is ``A_0(P)``; ``floor`` the value of a collapsed assignment; ``bound`` the sum of the E
    largest eigenvalues of the Gram matrix W (Ky Fan); ``centred`` the floor and the E - 1 largest
    eigenvalues of the Gram matrix of ``g_m - mean``. The last is Ding and He's bound on k-means (2004) and
    not in the paper.
    """

    value: float
    floor: float
    bound: float
    centred: float

    @property
    def slack(self) -> float:
        """``bound - value``."""
        return self.bound - self.value


def spectral_bound(probabilities: Tensor, gram: Tensor) -> SpectralBound:
    """What an assignment [M, E] reaches, and what none can exceed, given the Gram matrix [M, M].

    The paper derives the bound for one-hot rows without empty experts. ``A_0`` is convex in P, so soft rows
    reach no more than the best one-hot rows, and eigenvalues of a Gram matrix are not negative, so empty
    experts do not matter: the bound holds for every P and every ``eps >= 0``. A matrix with negative
    eigenvalues (the Gram matrix without its diagonal) can exceed it where experts are empty.

    >>> gram = torch.tensor([[1.0, 0.9, 0.2], [0.9, 1.0, 0.2], [0.2, 0.2, 1.0]])
    >>> found = spectral_bound(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), gram)
    >>> round(found.value, 3), round(found.centred, 3), round(found.bound, 3)
    (2.9, 2.9, 2.9)
    """
    p = as_assignment(probabilities)
    w = _symmetric(gram, len(p))
    experts = min(p.shape[1], len(w))
    middle = torch.eye(len(w), dtype=w.dtype) - 1 / len(w)
    floor = float(w.sum()) / len(w)
    return SpectralBound(
        float(association(p, gram=w, eps=0.0)),
        floor,
        float(torch.linalg.eigvalsh(w)[len(w) - experts :].sum()),
        floor + float(torch.linalg.eigvalsh(middle @ w @ middle)[len(w) - experts + 1 :].sum()),
    )


def spectral_gap(probabilities: Tensor, gram: Tensor) -> Sides:
    """What a partition leaves of the bound, and where it is lost.

    With ``Y = H S^(-1/2)`` (orthonormal columns), eigenpairs ``(lambda_i, v_i)`` in falling order and
    ``c_i = ||Y^T v_i||^2``, the bound minus ``A_0`` is
    ``sum_{i <= E} (lambda_i - lambda_E) (1 - c_i) + sum_{i > E} (lambda_E - lambda_i) c_i``: no term is
    negative, and all vanish exactly where the experts' indicators span a top-E eigenspace of W. Observations
    that are equal within an expert are such a case, whatever the angle between experts.

    ``probabilities`` must be one-hot and use every expert; a ValueError otherwise.
    """
    p = as_assignment(probabilities)
    w = _symmetric(gram, len(p))
    experts = p.shape[1]
    if not ((p == 0) | (p == 1)).all() or not (p.sum(0) > 0).all():
        raise ValueError("the trace form needs one-hot rows and no empty expert")
    values, vectors = (x.flip(-1) for x in torch.linalg.eigh(w))
    caught = ((p / p.sum(0).sqrt()).T @ vectors).square().sum(0)
    least = values[experts - 1]
    lost = ((values - least) * (1 - caught))[:experts].sum() + ((least - values) * caught)[experts:].sum()
    left = values[:experts].sum() - association(p, gram=w, eps=0.0)
    return Sides(left, lost, float(values.abs().sum()))


def _symmetric(gram: Tensor, rows: int) -> Tensor:
    w = gram.detach().to(torch.float64)
    if w.shape != (rows, rows) or not torch.allclose(w, w.T):
        raise ValueError(f"gram must be symmetric, [{rows}, {rows}], got shape {tuple(w.shape)}")
    return w
