"""Mutual information of tasks and experts (Chen et al., Mod-Squad, CVPR 2023, arXiv 2212.08066)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from gar.methods.base import Choices, Range
from gar.methods.term import RouterTerm
from gar.methods.update import Update, UpdateSite


class TaskInformation(RouterTerm):
    """``L_task - coefficient * sum_te P(t,e) log(P(t,e) / (P(t) P(e)))``: experts should tell tasks apart.

    ``P(t,e) = sum_{m of t} v_m p_me`` over the groups of the update, with the task weights ``v_m`` of the
    task loss: every task has ``P(t) = 1/T``, and ``P(e|t)`` is the mean routing probability of its examples.

    The formula is the mutual information that Mod-Squad maximises, of the softmax over all experts. What
    could not be checked in the paper: that its P(t) is uniform (here it is), and over how many steps its
    P(e|t) is estimated (here one update). Users report that the authors' code puts P(e|t) where the formula
    has P(t,e). Routing inputs are detached: only the router is reached.
    """

    name: ClassVar[str] = "task_information"
    label: ClassVar[str] = "Task information"
    capturable: ClassVar[bool] = True
    ranges: ClassVar[dict[str, Range]] = {"coefficient": Range(1e-5, 1.0)}

    def check(self, choices: Choices) -> str | None:
        if choices.tasks == 1 and self.coefficient:
            return "there is one task only, and experts tell tasks apart; expected two or more"
        return None

    def at(self, site: UpdateSite, update: Update) -> Tensor:
        p = site.probabilities(soft=True)
        member = one_hot(update.tasks.to(p.device), update.task_count).to(p)
        weighted = member * update.task_weights.to(p).unsqueeze(1)
        return -mutual_information(weighted.T @ p)


def mutual_information(joint: Tensor) -> Tensor:
    """Of a joint distribution [T, E], in nats; an empty cell counts nothing.

    >>> round(float(mutual_information(torch.eye(2) / 2)), 4)
    0.6931
    """
    filled, one = joint > 0, torch.ones_like(joint)
    apart = joint.sum(1, keepdim=True) * joint.sum(0)
    ratio = torch.where(filled, joint, one) / torch.where(filled, apart, one)
    return (joint * ratio.log()).sum()
