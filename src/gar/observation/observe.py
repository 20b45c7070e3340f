"""Group gradients and routing probabilities from ONE ordinary backward (specification, section 4).

``observe`` records, through forward hooks that live only inside the ``with`` block, the input and the output
gradient of every expert sum. The group gradient of expert parameters is then a product of those factors;
no second backward is run. :func:`gar.per_group_gradients` is the slow, obviously right way to the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gar.nn import Factors, RoutedExperts, expert_banks
from gar.objective import accurate
from gar.observation._grouping import Grouping
from gar.observation._record import Record
from gar.precision import full_precision
from gar.routing import Routing


class SiteObservation:
    """What one expert bank showed during one ``observe`` block."""

    def __init__(
        self, bank: RoutedExperts, paused: list[bool], gradients: bool = True, router_apart: bool = False
    ) -> None:
        self.bank = bank
        self._record = Record(bank, gradients, router_apart, paused)

    @property
    def routing(self) -> Routing:
        """The routing of the observed forward: attached to its graph inside the block, detached after it."""
        return self._record.require_forward()[1]

    def detached_routing(self) -> Routing:
        """The routing recomputed from DETACHED routing inputs: differentiable in router parameters only."""
        x, seen = self._record.require_forward()
        if self._record.behind is not None:
            return self._record.behind
        routing: Routing = self.bank.router(x, seen.mask)
        return routing

    def pending(self) -> tuple[Tensor, Tensor] | None:
        """What a backward that stopped at the gates has to bring to the router; see ``router_apart``."""
        return self._record.pending()

    def group_probabilities(self, groups: Tensor, count: int | None = None) -> Tensor:
        """``p_m`` [M, E]: mean over the group's examples of their gates, no further top-k.

        ``groups`` as in :meth:`group_gradients`; ``count`` is M where the last groups may be empty.
        """
        routing = self.detached_routing()
        if groups.dim() == 1:
            return Grouping(groups, count).mean(routing.example_gates())
        if routing.mask is not None:
            groups = groups.masked_fill(~routing.mask.to(groups.device), -1)
        return Grouping(groups.flatten(), count).mean(routing.gates.flatten(0, 1))

    def group_gradients(self, groups: Tensor | Grouping, group_weight: Tensor) -> Tensor:
        """``g_m`` [M, d], detached: the gradient of group m's mean loss summed over experts in one template.

        The one backward must have been of ``sum_m group_weight[m] * l_m``; the weight is undone here (a
        weight of 0 gives a zero row). ``groups`` is int64 [N] for inputs [N, d]; for inputs [B, L, d] it is
        [B], one number a row, or [B, L], one a token; -1 is not counted; or a :class:`Grouping` of the rows,
        made once for several uses. Slots follow the bank's order.
        """
        groups, factors, undo = self._group_factors(groups, group_weight)
        sizes = [shape.numel() for shape in self.bank.experts.template().values()]
        rows = undo.new_empty(len(undo), sum(sizes))
        with self._full_precision():
            for factor, own in zip(factors.values(), rows.split(sizes, 1), strict=True):
                groups.product(factor, own)
        return rows.mul_(undo)

    def group_gram(self, groups: Tensor | Grouping, group_weight: Tensor) -> Tensor:
        """Gram matrix [M, M] of :meth:`group_gradients`, one slot in memory at a time."""
        groups, factors, undo = self._group_factors(groups, group_weight)
        gram = undo.new_zeros(len(undo), len(undo))
        with self._full_precision():
            for factor, shape in zip(factors.values(), self.bank.experts.template().values(), strict=True):
                own = undo.new_empty(len(undo), shape.numel())
                groups.product(factor, own)
                gram += own @ own.T
        return gram * (undo * undo.T)

    def output_gradient(self, loss: Tensor) -> Tensor:
        """``d loss / d y`` at the gated expert sum y, before the backward and leaving the graph whole."""
        self._record.require_forward()
        assert self._record.output is not None
        with self.paused():
            (grad,) = torch.autograd.grad(loss, self._record.output, retain_graph=True)
        return grad

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes in this block leave no trace in any site of the observation."""
        self._record.paused[0] = True
        try:
            yield
        finally:
            self._record.paused[0] = False

    def hooks(self) -> Iterator[RemovableHandle]:
        return self._record.hooks()

    def release(self) -> None:
        """Drop references into the graph; detached captures stay."""
        self._record.release()

    def forget_factors(self) -> None:
        """Free what only :meth:`group_gradients` needs; routing and routing inputs stay."""
        self._record.forget_factors()

    def _full_precision(self) -> AbstractContextManager[None]:
        return full_precision(self.bank.router.weight.device)

    def _group_factors(
        self, groups: Tensor | Grouping, group_weight: Tensor
    ) -> tuple[Grouping, dict[str, Factors], Tensor]:
        """Rows by group, the factors of every template slot, and ``1 / group_weight`` [M, 1]."""
        call = self._record.call()
        with self._full_precision():
            factors = self.bank.experts.factors(call)
        rows, tokens = call.gates.shape[:2]
        if isinstance(groups, Tensor) and groups.dim() == 2:  # a group number per token
            if tuple(groups.shape) != (rows, tokens):
                raise ValueError(f"groups must be [{rows}] or [{rows}, {tokens}], got {tuple(groups.shape)}")
            groups = groups.flatten()
            factors = {slot: _per_token(f, rows * tokens) for slot, f in factors.items()}
            rows *= tokens
        if isinstance(groups, Tensor):
            if len(groups) != rows:
                raise ValueError(
                    f"groups must have one number for each of the {rows} rows, got {tuple(groups.shape)}"
                )
            groups = Grouping(groups, len(group_weight))
        if (groups.rows, groups.count) != (rows, len(group_weight)):
            raise ValueError(
                f"groups are {groups.count} over {groups.rows} rows, expected {len(group_weight)} over {rows}"
            )
        weight = accurate(group_weight.detach()).to(accurate(call.delta))
        return groups, factors, torch.where(weight > 0, 1 / weight, torch.zeros_like(weight)).unsqueeze(1)


def _per_token(factors: Factors, units: int) -> Factors:
    """One row a token; several terms of a token stay side by side."""
    left, right = factors
    return Factors(
        left.reshape(units, -1, left.shape[-1]),
        None if right is None else right.reshape(units, -1, right.shape[-1]),
    )


class Observed:
    """The observations of all expert banks of a module; ``sites`` has one entry a bank.

    With a single bank its methods are available here directly; with several, each site has its own
    router, probabilities and gradients.
    """

    def __init__(
        self, banks: Sequence[RoutedExperts], gradients: bool = True, router_apart: bool = False
    ) -> None:
        paused = [False]
        self.sites = [SiteObservation(bank, paused, gradients, router_apart) for bank in banks]

    @property
    def site(self) -> SiteObservation:
        if len(self.sites) != 1:
            raise RuntimeError(f"{len(self.sites)} expert banks were observed; use the entries of .sites")
        return self.sites[0]

    def group_gradients(self, groups: Tensor | Grouping, group_weight: Tensor) -> Tensor:
        """:meth:`SiteObservation.group_gradients` of the only site."""
        return self.site.group_gradients(groups, group_weight)

    def group_gram(self, groups: Tensor | Grouping, group_weight: Tensor) -> Tensor:
        """:meth:`SiteObservation.group_gram` of the only site."""
        return self.site.group_gram(groups, group_weight)

    def group_probabilities(self, groups: Tensor, count: int | None = None) -> Tensor:
        """:meth:`SiteObservation.group_probabilities` of the only site."""
        return self.site.group_probabilities(groups, count)


@contextmanager
def observe(*modules: nn.Module, gradients: bool = True, router_apart: bool = False) -> Iterator[Observed]:
    """Record the expert banks inside ``modules`` during one forward and one backward.

    ``gradients=False`` records the routing alone, for methods that never ask for group gradients. With
    ``router_apart`` the backward stops at the gates of routers whose input has no gradient: the caller
    brings it into the router together with that of a loss on :meth:`SiteObservation.detached_routing`, which
    then is the same graph (:meth:`SiteObservation.pending`).

    Forwards without gradients are not recorded. Captures belong to the returned object and are freed
    with it; nothing is stored on the modules.
    """
    banks = list(dict.fromkeys(bank for module in modules for bank in expert_banks(module)))
    if not banks:
        raise ValueError("observe: no expert bank (gar.nn.RoutedLoRA, RoutedFFN, …) inside the given modules")
    observed = Observed(banks, gradients, router_apart)
    handles = [handle for site in observed.sites for handle in site.hooks()]
    try:
        yield observed
    finally:
        for handle in handles:
            handle.remove()
        for site in observed.sites:
            site.release()
