"""Router z-loss (Zoph et al., ST-MoE, arXiv 2202.08906): keeps the router's logits small."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from gar.methods.base import Range
from gar.methods.term import RouterTerm
from gar.methods.update import Update, UpdateSite


class RouterZLoss(RouterTerm):
    """``L_task + coefficient * mean_i (log sum_e exp z_ie)^2``, over all routed units i of the update.

    The paper's definition, a mean over the batch's tokens; sites add up. Routing inputs are detached here, so
    that only the router is reached: the paper's gradient also goes down into a trained backbone.
    """

    name: ClassVar[str] = "zloss"
    label: ClassVar[str] = "z-loss"
    capturable: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"units"})
    ranges: ClassVar[dict[str, Range]] = {"coefficient": Range(1e-6, 1e-1)}

    def at(self, site: UpdateSite, update: Update) -> Tensor:
        squares = site.unit_sums(lambda routing: routing.logits.logsumexp(-1).square())
        return squares.sum() / site.unit_count().to(squares.dtype)
