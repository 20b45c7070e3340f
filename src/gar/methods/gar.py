"""GAR: the router is trained to group examples whose expert gradients agree."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from gar.methods.base import Method
from gar.methods.update import Update
from gar.objective import alignment_loss


class GAR(Method):
    """Router parameters get the gradient of ``L_task + coefficient * L_norm``, all others of ``L_task``.

    ``L_norm`` is :func:`gar.alignment_loss` over the update's group gradients and group routing
    probabilities, summed over expert sites (paper, section "Training with First-Order Detached Alignment").
    """

    name: ClassVar[str] = "gar"
    label: ClassVar[str] = "GAR"
    style: ClassVar[tuple[str, str] | None] = ("#0072B2", "D")
    capturable: ClassVar[bool] = True
    proposed: ClassVar[bool] = True
    coefficient: float = Field(1e-3, ge=0, description="lambda; 0 is exactly Baseline")
    objective: Literal["load_normalized", "numerator_only"] = "load_normalized"
    entropy_weight: float = Field(0.0, ge=0, description="tau of the added sum p log p")

    @property
    def observes(self) -> frozenset[str]:
        return frozenset({"routing", "gradients"}) if self.coefficient else frozenset()

    def router_loss(self, update: Update) -> Tensor | None:
        if not self.coefficient:
            return None
        return self.coefficient * sum(
            (
                alignment_loss(
                    site.probabilities(),
                    site.gradients(),
                    normalize=self.objective == "load_normalized",
                    entropy_weight=self.entropy_weight,
                )
                for site in update.sites
            ),
            start=update.zero,
        )
