"""Group gradients and routing probabilities from ONE ordinary backward (specification, section 4).

``observe`` records, through forward hooks that live only inside the ``with`` block, the input and the output
gradient of every expert sum. The group gradient of expert parameters is then a product of those factors;
no second backward is run. :func:`per_group_gradients` is the slow, obviously right way to the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gar.nn.bank import Call, Factors, RoutedExperts, expert_banks
from gar.objective import accurate
from gar.routing import Routing, mean_over_tokens


class Grouping:
    """Which rows belong to which of M groups; sums and products over the rows of each group.

    ``groups`` is int64 [R] with values in ``[0, count)``, or -1 for rows that are not counted.
    """

    def __init__(self, groups: Tensor, count: int | None = None) -> None:
        listed = torch.as_tensor(groups).detach().cpu()
        if listed.dim() != 1 or listed.is_floating_point():
            raise ValueError(
                f"groups must be an integer vector, got {listed.dtype} of shape {tuple(listed.shape)}"
            )
        largest = int(listed.max()) if len(listed) else -1
        self.count = largest + 1 if count is None else count
        if largest >= self.count or (len(listed) and int(listed.min()) < -1):
            raise ValueError(
                f"group numbers must be -1 (not counted) or in [0, {self.count}), got up to {largest}"
            )
        self.rows = len(listed)
        self.sizes = torch.bincount(listed[listed >= 0], minlength=self.count)
        width = int(self.sizes.max()) if self.count else 0
        # The usual update, consecutive groups of one size, needs no gather at all.
        self._consecutive = self.rows == self.count * width and bool(
            (listed == torch.arange(self.count).repeat_interleave(max(width, 1))[: self.rows]).all()
        )
        if not self._consecutive:
            order = listed.argsort(stable=True)[int((listed < 0).sum()) :]
            slots = torch.arange(width).expand(self.count, width) < self.sizes.unsqueeze(1)
            index = torch.zeros(self.count, width, dtype=torch.long)
            index[slots] = order
            self._index, self._slots = index.to(groups.device), slots.to(groups.device)

    def gather(self, values: Tensor) -> Tensor:
        """Rows [R, ...] as [M, n, ...], padded with zeros where a group is shorter than the longest."""
        if self._consecutive:
            return values.reshape(self.count, -1, *values.shape[1:])
        index, slots = self._on(values.device)
        return values[index].masked_fill(~slots.reshape(*slots.shape, *[1] * (values.dim() - 1)), 0)

    def scatter(self, gathered: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of :meth:`gather` for values [M, n * tokens, ...] into zeros of ``shape`` [R, ...]."""
        if self._consecutive:
            return gathered.reshape(shape)
        index, slots = self._on(gathered.device)
        result = gathered.new_zeros(tuple(shape))
        result[index[slots]] = gathered.reshape(*slots.shape, *shape[1:])[slots]
        return result

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The gather index and its valid slots; moved once where values live elsewhere than the groups."""
        if self._index.device != device:
            self._index, self._slots = self._index.to(device), self._slots.to(device)
        return self._index, self._slots

    def sum(self, values: Tensor) -> Tensor:
        """[R, ...] to [M, ...]."""
        return self.gather(values).sum(1)

    def mean(self, values: Tensor) -> Tensor:
        """[R, ...] to [M, ...]; an empty group has mean zero."""
        sizes = self.sizes.clamp(min=1).to(values.device, values.dtype)
        return self.sum(values) / sizes.reshape(-1, *[1] * (values.dim() - 1))

    def product(self, factors: Factors) -> Tensor:
        """``sum_i left_i right_i^T`` over the units of each group, [M, p, q] (or [M, p] for a bias)."""
        if factors.right is None:
            return self.sum(factors.left.sum(1))
        left, right = self.gather(factors.left).flatten(1, 2), self.gather(factors.right).flatten(1, 2)
        return left.transpose(1, 2) @ right


@dataclass
class _Record:
    """Captures of one expert bank during one ``observe`` block."""

    bank: RoutedExperts
    routing_input: Tensor | None = None
    mask: Tensor | None = None
    routing: Routing | None = None
    output: Tensor | None = None
    arguments: tuple[Tensor, Tensor, Tensor] | None = None
    hidden: Tensor | None = None
    delta: Tensor | None = None
    hidden_grad: Tensor | None = None
    forwards: int = 0
    backwards: int = 0
    factors: bool = True
    #: Shared by all banks of one block: a backward crosses every site.
    paused: list[bool] = field(default_factory=lambda: [False])

    def hooks(self) -> Iterator[RemovableHandle]:
        yield self.bank.register_forward_hook(self._bank_hook, with_kwargs=True)
        if not self.factors:
            return
        yield self.bank.experts.register_forward_hook(self._experts_hook)
        if self.bank.experts.hidden_module is not None:
            yield self.bank.experts.hidden_module.register_forward_hook(self._hidden_hook)

    def _bank_hook(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], result: tuple[Tensor, Routing]
    ) -> None:
        output, routing = result
        if not output.requires_grad:
            return
        self.forwards += 1
        self.routing_input = (args[0] if args else kwargs["x"]).detach()
        self.mask, self.routing, self.output = routing.mask, routing, output
        if self.factors:
            output.register_hook(self._store_delta)

    def _experts_hook(self, module: nn.Module, args: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        if output.requires_grad:
            x, gates, active = args
            self.arguments = (x.detach(), gates.detach(), active)

    def _hidden_hook(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if output.requires_grad:
            self.hidden = output.detach()
            args[0].register_hook(self._store_hidden_grad)

    def _store_delta(self, grad: Tensor) -> None:
        if not self.paused[0]:
            self.backwards += 1
            self.delta = grad.detach()

    def _store_hidden_grad(self, grad: Tensor) -> None:
        if not self.paused[0]:
            self.hidden_grad = grad.detach()

    def require_forward(self) -> None:
        if self.forwards == 0:
            raise RuntimeError("nothing was observed: no forward with gradients ran inside the observe block")
        if self.forwards > 1:
            raise RuntimeError(
                f"the expert bank ran {self.forwards} forwards inside one observe block; observe one forward "
                "at a time (a bank shared between layers has no single observation)"
            )


class SiteObservation:
    """What one expert bank showed during one ``observe`` block."""

    def __init__(self, bank: RoutedExperts, paused: list[bool], gradients: bool = True) -> None:
        self.bank = bank
        self._record = _Record(bank, factors=gradients, paused=paused)

    @property
    def routing(self) -> Routing:
        """The routing of the observed forward, attached to its graph."""
        self._record.require_forward()
        assert self._record.routing is not None
        return self._record.routing

    def detached_routing(self) -> Routing:
        """The routing recomputed from DETACHED routing inputs: differentiable in router parameters only."""
        self._record.require_forward()
        assert self._record.routing_input is not None
        routing: Routing = self.bank.router(self._record.routing_input, self._record.mask)
        return routing

    def group_probabilities(self, groups: Tensor, count: int | None = None) -> Tensor:
        """``p_m`` [M, E]: mean over the group's examples of their gates, no further top-k.

        ``groups`` as in :meth:`group_gradients`; ``count`` is M where the last groups may be empty.
        """
        routing = self.detached_routing()
        q, groups = self._rows(routing.example_gates(), routing.gates, groups)
        return Grouping(groups, count).mean(q)

    def group_gradients(self, groups: Tensor, group_weight: Tensor) -> Tensor:
        """``g_m`` [M, d], detached: the gradient of group m's mean loss summed over experts in one template.

        The one backward must have been of ``sum_m group_weight[m] * l_m``; the weight is undone here (a
        weight of 0 gives a zero row). ``groups`` is int64 [N] for inputs [N, d]; for inputs [B, L, d] it is
        [B], one number a row, or [B, L], one a token; -1 is not counted. Slots follow the bank's order.
        """
        with self._full_precision():
            return torch.cat(
                [grad.flatten(1) for _, grad in self._slot_gradients(groups, group_weight)], dim=1
            )

    def group_gram(self, groups: Tensor, group_weight: Tensor) -> Tensor:
        """Gram matrix [M, M] of :meth:`group_gradients`, one slot in memory at a time."""
        with self._full_precision():
            flats = (grad.flatten(1) for _, grad in self._slot_gradients(groups, group_weight))
            return sum((flat @ flat.T for flat in flats), start=torch.zeros((), device=group_weight.device))

    def output_gradient(self, loss: Tensor) -> Tensor:
        """``d loss / d y`` at the gated expert sum y, before the backward and leaving the graph whole."""
        record = self._record
        record.require_forward()
        assert record.output is not None
        with self.paused():
            (grad,) = torch.autograd.grad(loss, record.output, retain_graph=True)
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
        self._record.output = None
        self._record.routing = None

    def forget_factors(self) -> None:
        """Free what only :meth:`group_gradients` needs; routing inputs stay."""
        record = self._record
        record.arguments = record.hidden = record.delta = record.hidden_grad = None

    def _full_precision(self) -> torch.autocast:
        return torch.autocast(self.bank.router.weight.device.type, enabled=False)

    def _call(self) -> Call:
        record = self._record
        record.require_forward()
        if not record.factors:
            raise RuntimeError("group gradients were not recorded: observe(..., gradients=False)")
        if record.backwards != 1 or record.delta is None:
            raise RuntimeError(
                f"{record.backwards} backward passes ran inside the observe block; "
                "group gradients need exactly one"
            )
        assert record.arguments is not None
        x, gates, active = record.arguments
        call = Call(x, gates, active, record.delta, record.hidden, record.hidden_grad)
        if record.mask is not None:
            call = call._replace(delta=call.delta * record.mask.unsqueeze(-1))
        if gates.dim() > 3:
            raise ValueError(f"inputs must be [N, d] or [B, L, d], got gates of shape {tuple(gates.shape)}")
        if gates.dim() == 2:  # rows are units: one token each
            call = call._replace(
                x=x.unsqueeze(1),
                gates=gates.unsqueeze(1),
                active=active.unsqueeze(1),
                delta=call.delta.unsqueeze(1),
            )
        return call

    def _slot_gradients(self, groups: Tensor, group_weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        call = self._call()
        return self._grouped(call, self.bank.experts.factors(call), groups, group_weight)

    def _grouped(
        self, call: Call, factors: dict[str, Factors], groups: Tensor, group_weight: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        rows, tokens = call.gates.shape[:2]
        if groups.dim() == 2:  # a group number per token
            if tuple(groups.shape) != (rows, tokens):
                raise ValueError(f"groups must be [{rows}] or [{rows}, {tokens}], got {tuple(groups.shape)}")
            groups = groups.flatten()
            factors = {slot: _per_token(f, rows * tokens) for slot, f in factors.items()}
        elif len(groups) != rows:
            raise ValueError(
                f"groups must have one number for each of the {rows} rows, got {tuple(groups.shape)}"
            )
        grouping = Grouping(groups, len(group_weight))
        weight = accurate(group_weight.detach().to(call.delta.device))
        undo = torch.where(weight > 0, 1 / weight, torch.zeros_like(weight))
        for slot in self.bank.experts.slots:
            grad = grouping.product(factors[slot])
            yield slot, grad * undo.to(grad.dtype).reshape(-1, *[1] * (grad.dim() - 1))

    def _rows(self, q: Tensor, gates: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        if groups.dim() == 1:
            return q, groups
        valid = self._record.mask
        groups = groups if valid is None else groups.masked_fill(~valid.to(groups.device), -1)
        return gates.flatten(0, 1), groups.flatten()


def _per_token(factors: Factors, units: int) -> Factors:
    left, right = (None if side is None else side.reshape(units, -1, side.shape[-1]) for side in factors)
    assert left is not None
    return Factors(left, right)


class Observed:
    """The observations of all expert banks of a module; ``sites`` has one entry a bank.

    With a single bank its methods are available here directly; with several, each site has its own
    router, probabilities and gradients.
    """

    def __init__(self, banks: Sequence[RoutedExperts], gradients: bool = True) -> None:
        paused = [False]
        self.sites = [SiteObservation(bank, paused, gradients) for bank in banks]

    @property
    def site(self) -> SiteObservation:
        if len(self.sites) != 1:
            raise RuntimeError(f"{len(self.sites)} expert banks were observed; use the entries of .sites")
        return self.sites[0]

    def group_gradients(self, groups: Tensor, group_weight: Tensor) -> Tensor:
        """:meth:`SiteObservation.group_gradients` of the only site."""
        return self.site.group_gradients(groups, group_weight)

    def group_gram(self, groups: Tensor, group_weight: Tensor) -> Tensor:
        """:meth:`SiteObservation.group_gram` of the only site."""
        return self.site.group_gram(groups, group_weight)

    def group_probabilities(self, groups: Tensor, count: int | None = None) -> Tensor:
        """:meth:`SiteObservation.group_probabilities` of the only site."""
        return self.site.group_probabilities(groups, count)


@contextmanager
def observe(*modules: nn.Module, gradients: bool = True) -> Iterator[Observed]:
    """Record the expert banks inside ``modules`` during one forward and one backward.

    ``gradients=False`` records the routing alone, for methods that never ask for group gradients.

    Forwards without gradients are not recorded. Captures belong to the returned object and are freed
    with it; nothing is stored on the modules.
    """
    banks = list(dict.fromkeys(bank for module in modules for bank in expert_banks(module)))
    if not banks:
        raise ValueError("observe: no expert bank (gar.nn.RoutedLoRA, RoutedFFN, …) inside the given modules")
    observed = Observed(banks, gradients)
    handles = [handle for site in observed.sites for handle in site.hooks()]
    try:
        yield observed
    finally:
        for handle in handles:
            handle.remove()
        for site in observed.sites:
            site.release()


def per_group_gradients(group_losses: Tensor, bank: RoutedExperts) -> Tensor:
    """The same [M, d] by M separate autograd calls on ``group_losses`` [M]; the graph is left whole."""
    parameters = [getattr(bank.experts, slot) for slot in bank.experts.slots]
    rows: list[Tensor] = []
    for loss in group_losses.unbind():
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([accurate(grad).sum(0).flatten() for grad in grads]))
    return torch.stack(rows)


def mean_over_units(values: Tensor, mask: Tensor | None, grouping: Grouping) -> Tensor:
    """Mean of unit values [B, L, E] (or [N, E]) over the valid units of each group, [M, E]."""
    if values.dim() == 2:
        return grouping.mean(values)
    if mask is None:
        return grouping.mean(mean_over_tokens(values, None))
    weight = mask.to(values.dtype)
    totals = grouping.sum((values * weight.unsqueeze(-1)).sum(1))
    return totals / grouping.sum(weight.sum(1)).clamp(min=1).unsqueeze(-1)
