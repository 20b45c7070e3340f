"""The objective is k-means on gradients (thm:kmeans_equiv, app:kmeans_equiv)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gar.objective import association
from gar.theory.sides import Sides, as_assignment, as_observations, centroids, energy


def scatter(probabilities: Tensor, gradients: Tensor) -> Tensor:
    """The k-means objective ``J = sum_mk p_mk ||g_m - mu_k||^2``, ``mu_k = G_k / d_k``; a scalar.

    On one-hot rows the classical one; an unused expert adds nothing.
    """
    p = as_assignment(probabilities)
    g = as_observations(gradients, len(p))
    return (p * (g[:, None] - centroids(p, g)).square().sum(2)).sum()


def kmeans_identity(probabilities: Tensor, gradients: Tensor) -> Sides:
    """``A_0(P) = sum_m ||g_m||^2 - J(P)``: a constant minus the k-means objective.

    The paper states it for one-hot rows without empty experts. It holds for every [M, E] whose rows sum to
    1, soft rows and unused experts (which add 0 to both sides) included, and for ``eps = 0`` alone: see
    :func:`stabiliser_cost`.

    >>> g = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, -1.0]])
    >>> both = kmeans_identity(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), g)
    >>> round(float(both.left), 6), round(float(both.right), 6)
    (2.8, 2.8)
    """
    p = as_assignment(probabilities)
    g = as_observations(gradients, len(p))
    return Sides(association(p, g, eps=0.0), energy(g) - scatter(p, g), energy(g))


def stabiliser_cost(probabilities: Tensor, gradients: Tensor, eps: float) -> Sides:
    """``A_0 - A_eps = sum_k eps / (d_k + eps) * d_k ||mu_k||^2``, what the stabiliser takes away.

    Never negative, at most ``eps * sum_k ||mu_k||^2``, and larger, as a share, where an expert has little
    load: with ``eps > 0`` the best partition need not be that of k-means.
    """
    if eps < 0:
        raise ValueError(f"eps must be non-negative, got {eps}")
    p = as_assignment(probabilities)
    g = as_observations(gradients, len(p))
    load = p.sum(0)
    share = eps / torch.where(load > 0, load + eps, 1.0)
    cost = (share * load * centroids(p, g).square().sum(1)).sum()
    return Sides(association(p, g, eps=0.0) - association(p, g, eps=eps), cost, energy(g))


def partitions(rows: int, experts: int) -> Iterator[Tensor]:
    """Every way to split M rows into ``experts`` nonempty sets, as one-hot [M, E]; experts in one order.

    There are Stirling's S(M, E): 301 for 7 rows and 3 experts.

    >>> len(list(partitions(7, 3))), len(list(partitions(2, 3)))
    (301, 0)
    """

    def extend(labels: list[int], used: int) -> Iterator[list[int]]:
        left = rows - len(labels)
        if left < experts - used:
            return
        if not left:
            yield labels
            return
        for label in range(min(used + 1, experts)):
            yield from extend([*labels, label], max(used, label + 1))

    for labels in extend([], 0):
        yield torch.nn.functional.one_hot(torch.tensor(labels), experts).double()
