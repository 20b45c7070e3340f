"""What a method sees of one update: its passes, and per expert site the observations of its groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from gar.distributed import Layout, Ranks, gather_rows, global_gram, sum_tensors
from gar.methods._finer import UnitChoice, spread_rows
from gar.nn import RoutedExperts
from gar.objective import accurate, gram_matrix
from gar.observation import (
    Grouping,
    Observed,
    SiteObservation,
    UnitRows,
    WholeGradients,
    per_group_gradients,
)
from gar.routing import Routing


@dataclass(frozen=True)
class GroupWeights:
    """The groups of one pass: ``groups`` int64 [B] maps its rows to local groups 0..M-1, or is a Grouping.

    ``task_weights`` [M] is ``v_m = |m| / (T B_t)``, ``sample_weights`` [M] is ``|m| / sum_j |j|`` over the
    whole update, ``total`` the number of groups in the update. ``tasks`` int64 [M] is each group's task, a
    number in ``[0, task_count)`` in the order of the mixture's tasks. ``here`` is how many of the update's
    groups this process has, where they are spread over several (None: all of them).
    """

    groups: Tensor | Grouping
    task_weights: Tensor
    sample_weights: Tensor
    total: int
    tasks: Tensor
    task_count: int
    here: int | None = None
    #: Which examples or tokens of the pass are rows of the observation; None: its groups are.
    units: UnitChoice | None = None

    @property
    def own(self) -> int:
        """Groups of the update on this rank."""
        return self.total if self.here is None else self.here

    def row_weights(self) -> Tensor:
        """What every row's own loss weighs in the pass's part of ``L_task``, [B]; 0 if it is not counted."""
        sizes = self.grouping.sizes.clamp(min=1).to(self.task_weights.device)
        return self.grouping.spread(self.task_weights / sizes)

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
    #: In place of ``rows``, where these are of examples or tokens.
    finer: UnitRows | None = None

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

    def row_probabilities(self, soft: bool = False) -> Tensor:
        """``p`` [N, E] of the observation's rows, whatever they are of."""
        if self.weights.units is None:
            return self.probabilities(soft)
        if self.finer is None:
            raise RuntimeError("rows were not captured; the method must ask for 'gradients'")
        return self.observation.unit_probabilities(self.finer, soft=soft)

    def selections(self) -> Tensor:
        """How often the forward chose each expert in each group, int64 [M, E]: k times a valid unit."""
        chosen = self.routing.selected.long()
        return self.weights.grouping.sum(chosen.flatten(1, -2).sum(1) if chosen.dim() > 2 else chosen)

    def unit_sums(self, values: Callable[[Routing], Tensor]) -> Tensor:
        """Sums [M, ...] over each group's valid units of ``values(routing)`` [..., *].

        The routing is that of detached inputs: differentiable in the router alone.
        """
        routing = self.detached_routing()
        found, mask = values(routing), routing.mask
        if mask is not None:
            found = found.masked_fill(~mask.reshape(*mask.shape, *[1] * (found.dim() - mask.dim())), 0)
        units = routing.gates.dim() - 1
        return self.weights.grouping.sum(found.flatten(1, units - 1).sum(1) if units > 1 else found)

    def gradients(self) -> Tensor:
        """``g_m`` [M, d], detached."""
        if self.finer is not None:
            raise RuntimeError(
                f"observed were {self.finer.unit}s, whose gradients are known by their Gram alone"
            )
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

    def seen_with(self, state: Any) -> Pass:
        """The same pass for a method that keeps another state."""
        return replace(self, state=state)

    @property
    def task_loss(self) -> Tensor:
        """This pass's part of ``L_task = sum_m v_m l_m``."""
        return (self.weights.task_weights.to(self.losses.dtype) * self.losses).sum()

    def capture_per_group(self) -> None:
        """Group gradients by M autograd calls, before the backward (the reference path)."""
        if self.weights.units is not None:
            raise ValueError(
                f"a backward a group gives no rows of {self.weights.units.unit}s; expected one_pass"
            )
        for site in self.sites:
            with site.observation.paused():
                site.rows = per_group_gradients(self.losses, site.bank)

    def capture_one_pass(self) -> None:
        """Group gradients from the factors that the backward left behind."""
        units = self.weights.units
        for site in self.sites:
            if units is not None:
                weight = self.weights.row_weights()
                site.finer = site.observation.unit_rows(units.unit, weight, units.chosen)
                continue
            site.rows = site.observation.group_gradients(self.weights.grouping, self.weights.task_weights)

    def release(self) -> None:
        """Drop the graph and the factors of group gradients; rows, routing inputs and loss values stay."""
        self.losses = self.losses.detach()
        for site in self.sites:
            site.observation.forget_factors()


@dataclass(frozen=True, eq=False)
class Share:
    """The groups of one update, spread over ranks: every rank knows where each of them is.

    ``numbers[r]`` are the groups of rank r in its order, counted over the update; ``tasks`` and ``sizes`` [M]
    (in examples) are those of all groups.
    """

    ranks: Ranks
    numbers: Sequence[Sequence[int]]
    tasks: Sequence[int]
    sizes: Sequence[int]
    task_count: int
    #: Tasks of the update's rows [N] and where they are, if these are examples or tokens.
    row_tasks: Tensor | None = None
    units: Layout | None = None

    @cached_property
    def groups(self) -> Layout:
        """Where the groups are."""
        return Layout(tuple(torch.tensor(own, dtype=torch.long) for own in self.numbers), len(self.sizes))

    @cached_property
    def examples(self) -> Layout:
        """Where the examples are, counted group by group."""
        firsts = [0, *accumulate(self.sizes)]
        spans = ([torch.arange(firsts[m], firsts[m + 1]) for m in own] for own in self.numbers)
        none = torch.zeros(0, dtype=torch.long)
        return Layout(tuple(torch.cat([none, *own]) for own in spans), firsts[-1])

    def tasks_on(self, device: torch.device) -> Tensor:
        """``tasks``, int64 [M], on a device; only the first time waits for it."""
        if device not in self._tasks:
            self._tasks[device] = torch.tensor(self.tasks, device=device)
        return self._tasks[device]

    @cached_property
    def _tasks(self) -> dict[torch.device, Tensor]:
        return {}

    def rows(self, own: Tensor | None, device: torch.device, layout: Layout | None = None) -> Tensor:
        """All ranks' rows of a layout (default: that of the groups), in the update's order; differentiable in
        the own ones. A rank without groups has None.
        """
        return gather_rows(self.filled(own, device), layout or self.groups, self.ranks)

    def filled(self, own: Tensor | None, device: torch.device) -> Tensor:
        """The own rows; where there are none, as many of the kind that the others have."""
        if all(self.numbers):
            assert own is not None
            return own
        some = next(rank for rank, numbers in enumerate(self.numbers) if numbers)
        like = self.ranks.tell(None if own is None else (tuple(own.shape[1:]), own.dtype), some)
        assert like is not None
        return torch.zeros(0, *like[0], dtype=like[1], device=device) if own is None else own

    def gram(self, own: Tensor | None, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """The Gram matrix [M, M] of all ranks' rows."""
        return global_gram(self.filled(own, device), self.groups, self.ranks, dtype=dtype)

    def sum(self, own: Tensor) -> Tensor:
        """The sum over ranks, in place; the same bits everywhere."""
        sum_tensors([own], self.ranks)
        return own


class UpdateSite:
    """One expert site over all passes of an update, and all its ranks."""

    def __init__(self, parts: Sequence[PassSite], bank: RoutedExperts, update: Update) -> None:
        self.parts, self.bank, self._update = parts, bank, update

    def probabilities(self, soft: bool = False) -> Tensor:
        """``p_m`` [M, E] of all groups, differentiable in the router alone; see :class:`PassSite`."""
        return self._update.gathered([part.probabilities(soft) for part in self.parts])

    def row_probabilities(self, soft: bool = False) -> Tensor:
        """``p`` [N, E] of the rows that :meth:`observations` is of: groups, examples or tokens."""
        if not self._update.finer:
            return self.probabilities(soft)
        return self._update.gathered([part.row_probabilities(soft) for part in self.parts], units=True)

    def gradients(self) -> Tensor:
        """``g_m`` [M, d] of all groups, detached.

        Over ranks every row goes to every rank: prefer :meth:`observations` or :meth:`gram` where they do.
        """
        return self._update.gathered([part.gradients() for part in self.parts])

    def lengths(self) -> Tensor:
        """``|g_m|`` [M] of all rows, float64: squares of tiny float32 gradients would underflow."""
        if self._update.finer:
            return self._finer.lengths()
        of_parts = (part.gradients() for part in self.parts)
        norms = [torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) for rows in of_parts]
        return self._update.gathered(norms)

    def observations(self, scale: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """What the objective takes of ``g_m / scale_m``: the rows [M, d] and None, or None and their Gram.

        The Gram matrix [M, M] is what goes between ranks, and all that there is of examples and tokens; one
        process has the rows of groups. ``scale`` [M] is 1 where it is 0.
        """
        if self._update.share is None and not self._update.finer:
            return over(self.gradients(), scale), None
        return None, self.gram(scale)

    def gram(self, scale: Tensor | None = None) -> Tensor:
        """The Gram matrix [M, M] of ``g_m / scale_m``, detached."""
        if self._update.finer:
            return self._finer.gram(scale)
        share = self._update.share
        parts = [part.gradients() for part in self.parts]
        if share is None:
            return gram_matrix(accurate(over(torch.cat(parts), scale)))
        own = torch.cat(parts) if parts else None
        if scale is not None and own is not None:
            own = over(own, scale[share.groups.on(scale.device).numbers[share.ranks.rank]])
        return share.gram(own, self._update.zero.device)

    @cached_property
    def _finer(self) -> UnitRows:
        """The rows of all passes and ranks, where they are examples or tokens."""
        parts = [part.finer for part in self.parts if part.finer is not None]
        share, own = self._update.share, UnitRows.joined(parts) if parts else None
        if share is not None:
            device, layout = self._update.zero.device, share.units
            assert layout is not None
            return spread_rows(
                own, layout, share.ranks, lambda part: share.rows(part, device, layout), device
            )
        assert own is not None
        return own

    def example_gates(self) -> Tensor:
        """``q_n`` [n, E] of all examples, differentiable in the router alone.

        In a captured update some rows pad their group: they are zero, and so is their weight.
        """
        gates = [part.detached_routing().example_gates() for part in self.parts]
        return self._update.gathered(gates, examples=True)

    def example_weights(self) -> Tensor:
        """Every row's share of the update's examples, [n]: sums with it are means over examples."""
        return self._update.gathered([part.example_weights() for part in self.parts], examples=True)

    def selections(self) -> Tensor:
        """How often the update's forwards chose each expert in each group, int64 [M, E]."""
        return self._update.gathered([part.selections() for part in self.parts])

    def unit_sums(self, values: Callable[[Routing], Tensor]) -> Tensor:
        """Sums [M, ...] over the valid units of all groups; see :class:`PassSite`."""
        return self._update.gathered([part.unit_sums(values) for part in self.parts])

    @property
    def router_weight(self) -> Tensor:
        """The router's weight [E, d], with its gradient."""
        return self.bank.router.weight

    def unit_count(self) -> Tensor:
        """Valid units of the whole update, a scalar of 1 or more."""
        return (self.selections().sum() // self.bank.router.top_k).clamp(min=1)


def over(rows: Tensor, scale: Tensor | None) -> Tensor:
    """``rows`` [M, d] over ``scale`` [M], in the rows' dtype; 1 stands for a scale of 0."""
    if scale is None:
        return rows
    scale = scale.to(rows.dtype).unsqueeze(1)
    return rows / torch.where(scale > 0, scale, torch.ones_like(scale))


@dataclass
class Update:
    """All passes of one optimizer update.

    Where its groups are spread over ranks (``share``), ``passes`` are those of this one, maybe none; what the
    sites give, and what is said here of groups, is of the whole update on every rank.
    """

    passes: list[Pass]
    parameters: Sequence[nn.Parameter]
    #: The banks that are observed, for a rank without passes.
    banks: Sequence[RoutedExperts] = ()
    #: What a method's own backward left behind in its passes.
    scratch: dict[str, Any] = field(default_factory=dict)
    #: What the method keeps from update to update; see :meth:`Method.initial_state`.
    state: Any = None
    share: Share | None = None
    #: Whether ``.grad`` is that of the whole update already.
    complete: bool = False

    def __post_init__(self) -> None:
        self._gathered: list[Tensor] = []

    def seen_with(self, state: Any) -> Update:
        """The same update for a method that keeps another state."""
        other = replace(self, state=state)
        other._gathered = self._gathered  # one backward brings the losses of all methods back
        return other

    @property
    def sites(self) -> list[UpdateSite]:
        if not self.passes:  # a rank without groups
            return [UpdateSite([], bank, self) for bank in self.banks]
        parts = zip(*(each.sites for each in self.passes), strict=True)
        return [UpdateSite(of_bank, of_bank[0].bank, self) for of_bank in parts]

    def gathered(self, parts: Sequence[Tensor], examples: bool = False, units: bool = False) -> Tensor:
        """What the passes have of their groups (or examples, or rows that are no groups), of the whole update
        and in its order.
        """
        own = parts[0] if len(parts) == 1 else torch.cat(list(parts)) if parts else None
        if self.share is None:
            assert own is not None
            return own
        layout = self.share.examples if examples else self.share.groups
        if units:
            assert self.share.units is not None
            layout = self.share.units
        whole = self.share.rows(own, self.zero.device, layout)
        if whole.requires_grad:
            self._gathered.append(whole)
        return whole

    def backward(self, loss: Tensor | None) -> None:
        """Back-propagate a loss of detached captures, and what the passes' backwards left at the gates."""
        sites = (site for each in self.passes for site in each.sites)
        roots = [pending for site in sites if (pending := site.observation.pending()) is not None]
        if loss is not None and (self.share is None or self.share.ranks.rank == 0):
            roots.append((loss, torch.ones_like(loss)))
        elif loss is not None and self._gathered:
            # Every rank has the same loss. What it takes from a parameter itself, and not from the groups'
            # rows, the first rank alone adds.
            found = torch.autograd.grad(loss, self._gathered, allow_unused=True)
            roots += [(x, grad) for x, grad in zip(self._gathered, found, strict=True) if grad is not None]
        self._gathered = []
        if roots:
            torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])

    def assign(self, direction: Tensor) -> None:
        """``.grad`` of all parameters from the whole update's direction [P], the same on every rank."""
        parts = direction.split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.device, parameter.dtype)
        self.complete = True

    @property
    def losses(self) -> Tensor:
        """The groups' mean losses [M], detached."""
        return self.gathered([each.losses for each in self.passes])

    @property
    def finer(self) -> bool:
        """Whether the observation's rows are examples or tokens."""
        if self.share is not None:
            return self.share.units is not None
        return self.passes[0].weights.units is not None

    @property
    def row_tasks(self) -> Tensor:
        """The task number of every row of the observation, int64."""
        if not self.finer:
            return self.tasks
        if self.share is not None:
            assert self.share.row_tasks is not None
            return self.share.row_tasks
        choices = (each.weights.units for each in self.passes)
        return torch.cat([units.tasks for units in choices if units is not None])

    @property
    def tasks(self) -> Tensor:
        """The task number of every group, int64 [M]; see :attr:`task_count`."""
        if self.share is not None:
            return self.share.tasks_on(self.zero.device)
        return torch.cat([each.weights.tasks for each in self.passes])

    @property
    def task_weights(self) -> Tensor:
        """``v_m`` [M] of all groups."""
        return self.gathered([each.weights.task_weights for each in self.passes])

    @property
    def task_count(self) -> int:
        """Tasks of the mixture; every task has at least one group in an update."""
        return self.passes[0].weights.task_count if self.share is None else self.share.task_count

    @property
    def zero(self) -> Tensor:
        """A scalar zero in the loss's dtype and device, to start sums with."""
        if self.passes:
            return self.passes[0].losses.new_zeros(())
        return accurate(self.parameters[0]).detach().new_zeros(())
