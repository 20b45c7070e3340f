"""Load balance over the global batch (Qiu et al., Demons in the Detail, arXiv 2501.11873)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from gar.methods.base import Range
from gar.methods.term import RouterTerm
from gar.methods.update import Update, UpdateSite


class GlobalBalance(RouterTerm):
    """``L_task + coefficient * E sum_e stopgrad(f_e) P_e`` with f and P of the whole update.

    ``f_e`` is the share of the update's selections (k a routed unit) that went to e, ``P_e`` the mean over
    the units of the softmax over all experts: all passes, all ranks, all tasks. Even use has the value 1.

    The paper defines ``N_E sum_i f_i p_i`` by the frequency f of being selected and the mean gating score p,
    with f synchronised over micro-batches and ranks. Whether its f sums to k or to 1 could not be checked;
    the two differ by a factor k in the coefficient. Routing inputs are detached: only the router is reached.
    """

    name: ClassVar[str] = "global_balance"
    label: ClassVar[str] = "Global balance"
    capturable: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"units"})
    ranges: ClassVar[dict[str, Range]] = {"coefficient": Range(1e-6, 1e-1)}

    def at(self, site: UpdateSite, update: Update) -> Tensor:
        mass = site.unit_sums(lambda routing: routing.logits.softmax(-1)).sum(0)
        chosen = site.selections().sum(0).to(mass.dtype)
        mean = mass / site.unit_count().to(mass.dtype)
        return len(mass) * (chosen / chosen.sum().clamp(min=1) * mean).sum()
