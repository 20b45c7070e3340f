"""STGC+Load: the STGC term and the LoadPen term together."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from gar.methods.load_penalty import load_penalty
from gar.methods.stgc import STGC
from gar.methods.update import Update


class STGCLoad(STGC):
    """``L_task + coefficient * sum_m v_m C_m + load_coefficient * E sum_e stopgrad(f_e) P_e``."""

    name: ClassVar[str] = "stgc_load"
    label: ClassVar[str] = "STGC+Load"
    style: ClassVar[tuple[str, str] | None] = ("#CC79A7", "X")
    capturable: ClassVar[bool] = True
    load_coefficient: float = Field(1e-3, ge=0, description="lambda_load")

    @property
    def observes(self) -> frozenset[str]:
        return self.captures if self.coefficient or self.load_coefficient else frozenset()

    def router_loss(self, update: Update) -> Tensor | None:
        if not self.load_coefficient:
            return None
        return self.load_coefficient * sum(map(load_penalty, update.sites), start=update.zero)
