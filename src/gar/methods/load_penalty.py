"""LoadPen: an update-level load-balancing penalty on the router."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor
from torch.nn.functional import one_hot

from gar.methods.term import RouterTerm
from gar.methods.update import Update, UpdateSite


class LoadPenalty(RouterTerm):
    """``L_task + coefficient * E sum_e stopgrad(f_e) P_e`` (specification, section 5, LoadPen).

    ``P`` is the mean of the examples' gates ``q_n`` over the update and ``f`` the share of examples whose
    largest gate is at e; routing inputs are detached, so only the router is reached.
    """

    name: ClassVar[str] = "loadpen"
    label: ClassVar[str] = "LoadPen"
    style: ClassVar[tuple[str, str] | None] = ("#009E73", "v")
    capturable: ClassVar[bool] = True
    coefficient: float = Field(1e-3, ge=0, description="lambda_load")

    def at(self, site: UpdateSite, update: Update) -> Tensor:
        return load_penalty(site)


def load_penalty(site: UpdateSite) -> Tensor:
    """The penalty at one expert site."""
    q = site.example_gates()
    share, experts = site.example_weights().to(q.dtype), q.shape[1]
    frequency = share @ one_hot(q.argmax(1), experts).to(q.dtype)
    return experts * (frequency * (share @ q)).sum()
