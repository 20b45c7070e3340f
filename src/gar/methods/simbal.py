"""SimBal (Omi et al., Load Balancing MoE with Similarity Preserving Routers, arXiv 2506.14038)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from gar.methods.base import Range
from gar.methods.term import RouterTerm
from gar.methods.update import Update, UpdateSite
from gar.objective import accurate


class SimBal(RouterTerm):
    """``L_task + coefficient * || R^T R - I ||_1``, with the experts' router weights as the columns of R.

    A router of orthonormal columns keeps the similarity of tokens in their logits, so that like tokens go to
    like experts. It depends on the weights alone, not on the update; sites add up.

    The 1-norm is the sum of the entries' absolute values: that the paper means this one, and not the operator
    norm, could not be checked. The routers here begin as N(0, 0.02^2), far from orthonormal, and have a bias,
    which the term leaves alone.
    """

    name: ClassVar[str] = "simbal"
    label: ClassVar[str] = "SimBal"
    capturable: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"weight"})
    ranges: ClassVar[dict[str, Range]] = {"coefficient": Range(1e-5, 1.0)}

    def at(self, site: UpdateSite, update: Update) -> Tensor:
        weight = accurate(site.router_weight)  # [E, d], the transpose of R
        unit = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        return (weight @ weight.T - unit).abs().sum()
