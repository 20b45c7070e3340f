"""What a method sees of one update: its passes, and per expert site the observations of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gar.nn import RoutedExperts
from gar.observation import Grouping, Observed, SiteObservation, WholeGradients, per_group_gradients
from gar.routing import Routing


@dataclass(frozen=True)
class GroupWeights:
    """The groups of one pass: ``groups`` int64 [B] maps its rows to local groups 0..M-1, or is a Grouping.

    ``task_weights`` [M] is ``v_m = |m| / (T B_t)``, ``sample_weights`` [M] is ``|m| / sum_j |j|`` over the
    whole update, ``total`` the number of groups in the update. ``tasks`` int64 [M] is each group's task, a
    number in ``[0, task_count)`` in the order of the mixture's tasks.
    """

    groups: Tensor | Grouping
    task_weights: Tensor
    sample_weights: Tensor
    total: int
    tasks: Tensor
    task_count: int

    @cached_property
    def grouping(self) -> Grouping:
        groups = self.groups
        return groups if isinstance(groups, Grouping) else Grouping(groups, len(self.task_weights))


@dataclass
class PassSite:
    """One expert site during one pass."""

    observation: SiteObservation
    weights: GroupWeights
    rows: Tensor | None = None

    @property
    def bank(self) -> RoutedExperts:
        return self.observation.bank

    @property
    def routes_examples(self) -> bool:
        """True at the head site, where the routed unit is a whole example."""
        return self.routing.gates.dim() == 2

    @property
    def routing(self) -> Routing:
        """Routing of the forward; attached to the graph until the pass is over, detached afterwards."""
        return self.observation.routing

    def detached_routing(self) -> Routing:
        """Routing recomputed from detached inputs; differentiable in the router alone."""
        return self.observation.detached_routing()

    def example_weights(self) -> Tensor:
        """Every row's share of the update's examples, [B]; 0 for a row that only pads its group."""
        grouping, weights = self.weights.grouping, self.weights.sample_weights
        return grouping.spread(weights / grouping.sizes.to(weights.device))

    def probabilities(self, soft: bool = False) -> Tensor:
        """``p_m`` [M, E]; ``soft``: of the softmax over all experts in place of the configured gates."""
        routing = self.detached_routing()
        return self.weights.grouping.mean((routing.soft() if soft else routing).example_gates())

    def selections(self) -> Tensor:
        """How often the forward chose each expert in each group, int64 [M, E]: k times a valid unit."""
        chosen = self.routing.selected.long()
        return self.weights.grouping.sum(chosen.flatten(1, -2).sum(1) if chosen.dim() > 2 else chosen)

    def gradients(self) -> Tensor:
        """``g_m`` [M, d], detached."""
        if self.rows is None:
            raise RuntimeError("group gradients were not captured; the method must ask for 'gradients'")
        return self.rows


@dataclass
class Pass:
    """One forward of whole groups. ``losses`` [M] are the groups' mean losses, attached to the graph."""

    losses: Tensor
    weights: GroupWeights
    parameters: Sequence[nn.Parameter]
    sites: list[PassSite] = field(default_factory=list)
    #: Room for a method's own backward, shared by the passes of one update.
    scratch: dict[str, Any] = field(default_factory=dict)
    #: What :meth:`Method.initial_state` made, as the last update left it.
    state: Any = None
    #: Splits the backward by groups, for a method with ``whole_gradients``.
    whole: WholeGradients | None = None

    @classmethod
    def of(
        cls,
        losses: Tensor,
        weights: GroupWeights,
        parameters: Sequence[nn.Parameter],
        observed: Observed | None,
        scratch: dict[str, Any] | None = None,
        state: Any = None,
        whole: WholeGradients | None = None,
    ) -> Pass:
        sites = [] if observed is None else [PassSite(site, weights) for site in observed.sites]
        return cls(losses, weights, parameters, sites, {} if scratch is None else scratch, state, whole)

    @property
    def task_loss(self) -> Tensor:
        """This pass's part of ``L_task = sum_m v_m l_m``."""
        return (self.weights.task_weights.to(self.losses.dtype) * self.losses).sum()

    def capture_per_group(self) -> None:
        """Group gradients by M autograd calls, before the backward (the reference path)."""
        for site in self.sites:
            with site.observation.paused():
                site.rows = per_group_gradients(self.losses, site.bank)

    def capture_one_pass(self) -> None:
        """Group gradients from the factors that the backward left behind."""
        for site in self.sites:
            site.rows = site.observation.group_gradients(self.weights.grouping, self.weights.task_weights)

    def release(self) -> None:
        """Drop the graph and the factors of group gradients; rows, routing inputs and loss values stay."""
        self.losses = self.losses.detach()
        for site in self.sites:
            site.observation.forget_factors()


class UpdateSite:
    """One expert site over all passes of an update."""

    def __init__(self, parts: Sequence[PassSite]) -> None:
        self.parts = parts

    @property
    def bank(self) -> RoutedExperts:
        return self.parts[0].bank

    def probabilities(self, soft: bool = False) -> Tensor:
        """``p_m`` [M, E] of all groups, differentiable in the router alone; see :class:`PassSite`."""
        return torch.cat([part.probabilities(soft) for part in self.parts])

    def gradients(self) -> Tensor:
        """``g_m`` [M, d] of all groups, detached."""
        parts = [part.gradients() for part in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def example_gates(self) -> Tensor:
        """``q_n`` [n, E] of all examples, differentiable in the router alone.

        In a captured update some rows pad their group: they are zero, and so is their weight.
        """
        return torch.cat([part.detached_routing().example_gates() for part in self.parts])

    def example_weights(self) -> Tensor:
        """Every row's share of the update's examples, [n]: sums with it are means over examples."""
        return torch.cat([part.example_weights() for part in self.parts])

    def selections(self) -> Tensor:
        """How often the update's forwards chose each expert in each group, int64 [M, E]."""
        return torch.cat([part.selections() for part in self.parts])


@dataclass
class Update:
    """All passes of one optimizer update."""

    passes: list[Pass]

    @property
    def sites(self) -> list[UpdateSite]:
        return [UpdateSite(parts) for parts in zip(*(each.sites for each in self.passes), strict=True)]

    def backward(self, loss: Tensor | None) -> None:
        """Back-propagate a loss of detached captures, and what the passes' backwards left at the gates."""
        sites = (site for each in self.passes for site in each.sites)
        roots = [pending for site in sites if (pending := site.observation.pending()) is not None]
        if loss is not None:
            roots.append((loss, torch.ones_like(loss)))
        if roots:
            torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])

    @property
    def losses(self) -> Tensor:
        """The groups' mean losses [M], detached."""
        return torch.cat([each.losses for each in self.passes])

    @property
    def tasks(self) -> Tensor:
        """The task number of every group, int64 [M]; see :attr:`task_count`."""
        return torch.cat([each.weights.tasks for each in self.passes])

    @property
    def task_count(self) -> int:
        """Tasks of the mixture; every task has at least one group in an update."""
        return self.passes[0].weights.task_count

    @property
    def state(self) -> Any:
        """What the method keeps from update to update; see :meth:`Method.initial_state`."""
        return self.passes[0].state

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return self.passes[0].parameters

    @property
    def zero(self) -> Tensor:
        """A scalar zero in the loss's dtype and device, to start sums with."""
        return self.passes[0].losses.new_zeros(())

    @property
    def scratch(self) -> dict[str, Any]:
        """What a method's own backward left behind in its passes."""
        return self.passes[0].scratch
