"""Loss-free balancing (Wang et al., Auxiliary-Loss-Free Load Balancing, arXiv 2408.15664)."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import nn

from gar.methods.base import Method, MethodState, Range
from gar.methods.update import Update
from gar.nn import expert_banks


class LossFreeBias(Method):
    """No term at all: after every step ``b_e += speed * sign(mean_j c_j - c_e)``.

    ``c_e`` is how many routed units of the whole update (all passes, all ranks) chose e. The bias takes part
    in choosing the k experts, and in nothing else: gates are those of the logits without it. It is a buffer
    of the router: in checkpoints, in the saved model, and so in whatever the saved model predicts.

    DeepSeek-V3 adds it to the scores of a sigmoid, which lie in [0, 1]; here it is added to the
    logits, whose differences are what decides, so that ``speed`` is in units of logits. Padding counts
    nowhere.
    """

    name: ClassVar[str] = "loss_free"
    label: ClassVar[str] = "Loss-free bias"
    capturable: ClassVar[bool] = True
    ranges: ClassVar[dict[str, Range]] = {"speed": Range(1e-5, 1e-1)}
    speed: float = Field(1e-3, ge=0, description="u, the step of the bias")

    @property
    def observes(self) -> frozenset[str]:
        return frozenset({"routing"}) if self.speed else frozenset()

    def initial_state(self, model: nn.Module) -> MethodState | None:
        if not self.speed:
            return None
        # The routers' own buffers: what is saved, restored and compared between ranks is what they use.
        return {f"bias{n}": bank.router.add_selection_bias() for n, bank in enumerate(expert_banks(model))}

    def after_step(self, update: Update) -> None:
        for site in update.sites:
            chosen = site.selections().sum(0).double()
            bias = site.bank.router.add_selection_bias()
            bias.add_(self.speed * torch.sign(chosen.mean() - chosen))
