"""SwitchAux: the Switch Transformer's load-balancing loss, group by group."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from gar.methods.term import PassTerm
from gar.methods.update import Pass, PassSite
from gar.observation import mean_over_units


class SwitchAux(PassTerm):
    """``L_task + coefficient * sum_m u_m E sum_e stopgrad(f_me) P_me`` (specification, section 5).

    At FFN sites ``u_m`` is the sample weight and routing inputs are detached; at the head site ``u_m`` is
    the task weight ``v_m`` and the gradient follows the ordinary routing path, into a trainable backbone.

    The specification names the frozen FFN and the trainable head only. For an FFN site with a trained
    backbone, full FFNs above all, the routed unit decides, as for the frozen one: the term balances the
    router and does not shape the states below it.
    """

    name: ClassVar[str] = "switchaux"
    label: ClassVar[str] = "SwitchAux"
    style: ClassVar[tuple[str, str] | None] = ("#56B4E9", "P")
    capturable: ClassVar[bool] = True
    compared: ClassVar[bool] = True
    coefficient: float = Field(1e-3, ge=0, description="alpha")

    def at(self, site: PassSite, pass_: Pass) -> Tensor:
        at_head = site.routes_examples
        routing = site.routing if at_head else site.detached_routing()
        u = site.weights.task_weights if at_head else site.weights.sample_weights
        grouping, gates = site.weights.grouping, routing.gates
        mass = mean_over_units(gates, routing.mask, grouping)
        frequency = (
            mean_over_units(routing.selected.to(gates.dtype), routing.mask, grouping) / site.bank.router.top_k
        )
        return gates.shape[-1] * (u.to(gates.dtype) * (frequency * mass).sum(1)).sum()
