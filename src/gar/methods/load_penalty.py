"""LoadPen: an update-level load-balancing penalty on the router."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor
from torch.nn.functional import one_hot

from gar.methods.base import Method
from gar.methods.update import Update


class LoadPenalty(Method):
    """``L_task + coefficient * E sum_e stopgrad(f_e) P_e`` (specification, section 5, LoadPen).

    ``P`` is the mean of the examples' gates ``q_n`` over the update and ``f`` the share of examples whose
    largest gate is at e; routing inputs are detached, so only the router is reached.
    """

    name: ClassVar[str] = "loadpen"
    label: ClassVar[str] = "LoadPen"
    style: ClassVar[tuple[str, str] | None] = ("#009E73", "v")
    capturable: ClassVar[bool] = True
    coefficient: float = Field(1e-3, ge=0, description="lambda_load")

    @property
    def observes(self) -> frozenset[str]:
        return frozenset({"routing"}) if self.coefficient else frozenset()

    def router_loss(self, update: Update) -> Tensor | None:
        return load_penalty(update, self.coefficient) if self.coefficient else None


def load_penalty(update: Update, coefficient: float) -> Tensor:
    """The penalty summed over expert sites."""
    total = update.zero
    for site in update.sites:
        q = site.example_gates()
        share, experts = site.example_weights().to(q.dtype), q.shape[1]
        frequency = share @ one_hot(q.argmax(1), experts).to(q.dtype)
        total = total + experts * (frequency * (share @ q)).sum()
    return coefficient * total
