"""Orthogonal experts, decided routers (Guo et al., Advancing Expert Specialization, arXiv 2505.22323)."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from gar.methods.base import Range
from gar.methods.term import PassTerm
from gar.methods.update import Pass, PassSite, Update
from gar.objective import accurate
from gar.observation import mean_over_units


class OrthogonalityVariance(PassTerm):
    """``L_task + coefficient * L_o - variance_coefficient * V``: a unit's experts differ, its router decides.

    ``L_o = sum_m u_m mean_{i in m} 1/k sum_{a != b} |proj_b y_ia|^2`` over the ordered pairs of the k experts
    that unit i chose, with their outputs y before the gate and ``proj_b y_a = <y_a, y_b> / |y_b|^2 y_b`` (0
    where y_b is 0); ``u_m`` is group m's share of the update's examples. It reaches the experts alone: their
    inputs and the choice are constants. With k = 1 there are no pairs, and L_o is 0. ``V`` is the variance of
    the softmax over the E experts, mean over all units of the update; it reaches the router alone.

    The outputs are computed a second time, k vectors of d_out numbers a unit; no other method pays for that.

    The paper's equation 6 is a sum of such pairwise projections over tokens, so far as an issue at the
    authors' repository tells; their code projects on the span of all other experts (the same for k = 2, which
    is what the division by k is taken from), and pairs rows of different tokens where experts differ. Their
    variance divides by E - 1, here by E. They let gradients into the layers below and scale both coefficients
    by the terms' first values; that, and their epsilon, are left out: outputs of adapters begin at zero.
    """

    name: ClassVar[str] = "ortho_variance"
    label: ClassVar[str] = "Ortho+Variance"
    ranges: ClassVar[dict[str, Range]] = {
        "coefficient": Range(1e-5, 1.0),
        "variance_coefficient": Range(1e-5, 1.0),
    }
    captures: ClassVar[frozenset[str]] = frozenset({"routing", "outputs"})
    coefficient: float = Field(1e-3, ge=0, description="of the orthogonality")
    variance_coefficient: float = Field(1e-3, ge=0)

    @property
    def observes(self) -> frozenset[str]:
        variance = {"routing"} if self.variance_coefficient else set()
        return super().observes | variance

    def at(self, site: PassSite, pass_: Pass) -> Tensor:
        if site.bank.router.top_k == 1:
            return pass_.losses.new_zeros(())
        found = overlap(accurate(site.observation.expert_outputs())).unsqueeze(-1)
        of_groups = mean_over_units(found, site.routing.mask, site.weights.grouping).squeeze(-1)
        return (site.weights.sample_weights.to(of_groups.dtype) * of_groups).sum()

    def router_loss(self, update: Update) -> Tensor | None:
        if not self.variance_coefficient:
            return None
        total = update.zero
        for site in update.sites:
            spread = site.unit_sums(lambda routing: routing.logits.softmax(-1).var(-1, correction=0)).sum()
            total = total + spread / site.unit_count().to(spread.dtype)
        return -self.variance_coefficient * total


def overlap(outputs: Tensor) -> Tensor:
    """``1/k sum_{a != b} |proj_b y_a|^2`` [...] of k vectors [..., k, d].

    >>> overlap(torch.tensor([[3.0, 0.0], [1.0, 1.0]]))
    tensor(2.7500)
    """
    lengths = torch.linalg.vector_norm(outputs, dim=-1, keepdim=True)
    directions = outputs / torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    along = outputs @ directions.mT  # [..., a, b]
    itself = torch.eye(along.shape[-1], dtype=torch.bool, device=along.device)
    return along.masked_fill(itself, 0).square().sum((-2, -1)) / along.shape[-1]
