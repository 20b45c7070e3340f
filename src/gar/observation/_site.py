"""What one expert bank showed: probabilities, group gradients and their Gram matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gar.errors import UserError
from gar.nn import Factors, RoutedExperts
from gar.objective import accurate
from gar.observation._balance import balance_loss
from gar.observation._grouping import Grouping, group_numbers, group_weights
from gar.observation._record import Handle, Record
from gar.observation._units import Unit, UnitRows, add_pairs, pairs_are_cheaper, unit_factors, unit_places
from gar.precision import full_precision
from gar.routing import Routing

#: What the slices of a Gram matrix's rows take at most.
SLICE_BYTES = 2**28


class SiteObservation:
    """What one expert bank showed during one ``observe`` block.

    ``name`` is the bank's path in the observed module, ``layer`` the first number in it (None without any).
    """

    def __init__(
        self,
        bank: RoutedExperts,
        paused: list[bool],
        gradients: bool = True,
        router_apart: bool = False,
        name: str = "",
        outputs: bool = False,
    ) -> None:
        self.bank = bank
        self.name, self.layer = name, layer_of(name)
        self._record = Record(bank, gradients, router_apart, outputs, paused)

    def __repr__(self) -> str:
        return f"SiteObservation({self.name!r}, {type(self.bank).__name__}, recorded)"

    @property
    def routing(self) -> Routing:
        """The routing of the observed forward: attached to its graph inside the block, detached after it."""
        return self._record.require_forward()[1]

    @property
    def choices(self) -> int:
        """How many experts a unit chooses, k; a forward of nothing but padding says it too."""
        choices: int = self.bank.router.top_k
        return choices

    @property
    def router(self) -> nn.Module:
        """What decides here, adapters included; a router loss reaches its trainable parameters."""
        router: nn.Module = self.bank.router
        return router

    def detached_routing(
        self, parameters: Mapping[str, Tensor] | None = None, *, compare: bool = True
    ) -> Routing:
        """The routing recomputed from DETACHED routing inputs: differentiable in router parameters only.

        ``parameters`` stand for the router's own of these names, and are then what has the gradient. Where a
        model's own code chose the gates, ``compare`` them with these, which waits for the device.
        """
        x, seen = self._record.require_forward()
        if self._record.behind is not None and parameters is None:
            return self._record.behind
        routing: Routing = call_with(self.bank.router, parameters, (x, seen.mask))
        return routing

    def expert_outputs(self) -> Tensor:
        """What each chosen expert makes of its unit, without the gate: [..., k, d_out], zeros for padding.

        In the order of experts. Computed again from the observed input as a constant, after the forward's own
        dropout: differentiable in the experts' parameters alone. Needs ``observe(..., outputs=True)``, and
        until the backward has freed its graph memory for k outputs of every unit.
        """
        _, seen = self._record.require_forward()
        if not self._record.outputs or self._record.arguments is None:
            raise RuntimeError("experts' inputs were not recorded: observe(..., outputs=False)")
        x = self._record.arguments[0]
        return self.bank.experts.outputs(x, seen.selected, self.bank.router.top_k)

    def pending(self) -> tuple[Tensor, Tensor] | None:
        """What a backward that stopped at the gates has to bring to the router; see ``router_apart``."""
        return self._record.pending()

    def group_gates(self, groups: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Sums [M, E] of the gates of each group's examples, or tokens for groups [B, L]; their numbers [M].

        Both add up where a group is spread over several forwards: :class:`GateSum`. Arguments as of
        :meth:`group_probabilities`; differentiable in the router alone.
        """
        return summed_gates(self.detached_routing(), groups, count)

    def probabilities(self, sums: Tensor, sizes: Tensor) -> Tensor:
        """``p_m`` [M, E] from what :meth:`group_gates` returns, of one forward or added up over several."""
        return sums / sizes.clamp(min=1).to(sums).unsqueeze(1)

    def group_probabilities(self, groups: Tensor, count: int | None = None) -> Tensor:
        """``p_m`` [M, E]: mean over the group's examples of their gates, no further top-k.

        ``groups`` as in :meth:`group_gradients`; ``count`` is M where the last groups may be empty.
        """
        return self.probabilities(*self.group_gates(groups, count))

    def balance_loss(self, mask: Tensor | None = None) -> Tensor:
        """This layer's :func:`balance_loss`, with a gradient in the router alone.

        ``mask`` bool, of the units' shape, says which of the valid units count.
        """
        routing = self.detached_routing()
        if mask is not None:
            units = routing.gates.shape[:-1]
            if mask.shape != units:
                raise UserError(f"{self.name}: mask must be {list(units)}, got {list(mask.shape)}")
            mask = mask.to(routing.gates.device).bool()
            routing = replace(routing, mask=mask if routing.mask is None else mask & routing.mask)
        return balance_loss(routing)

    def group_gradients(self, groups: Tensor | Grouping, group_weight: Tensor) -> Tensor:
        """``g_m`` [M, d], detached: the gradient of group m's mean loss summed over experts in one template.

        The one backward must have been of ``sum_m group_weight[m] * l_m``; the weight is undone here (a
        weight of 0 gives a zero row). Ask before the optimizer's step. ``groups`` is int64 [N] for inputs
        [N, d]; for inputs [B, L, d] it is [B], one number a row, or [B, L], one a token; -1 is not counted;
        or a :class:`Grouping` of the rows, made once for several uses. Slots follow the bank's order.
        Lists and arrays will do; what is no such integers is a :class:`gar.UserError`, as is a
        ``group_weight`` that is not [M].
        """
        groups, factors, undo = self.group_factors(groups, group_weight)
        sizes = [shape.numel() for shape in self.template().values()]
        rows = undo.new_empty(len(undo), sum(sizes))
        with self.full_precision():
            for factor, own in zip(factors.values(), rows.split(sizes, 1), strict=True):
                groups.product(factor, own)
        return rows.mul_(undo)

    def group_gram(
        self, groups: Tensor | Grouping, group_weight: Tensor, max_bytes: int = SLICE_BYTES
    ) -> Tensor:
        """Gram matrix [M, M] of :meth:`group_gradients`: exact, and [M, d] never exists.

        Rows are made slice by slice of the template, of ``max_bytes`` at most (but M numbers at least); where
        groups are as small as a token, products of all pairs of units cost less and take their place.
        """
        groups, factors, undo = self.group_factors(groups, group_weight)
        gram = undo.new_zeros(len(undo), len(undo))
        with self.full_precision():
            for factor in factors.values():
                if (pairs := _gathered_pairs(factor, groups)) is not None:
                    add_pairs(gram, pairs, max_bytes)
                    continue
                for part in slices(factor, max_bytes // max(1, len(undo) * undo.element_size())):
                    own = groups.product(part).flatten(1)
                    gram += own @ own.T
        return gram * (undo * undo.T)

    def unit_rows(self, unit: Unit, row_weight: Tensor, chosen: Tensor | None = None) -> UnitRows:
        """Rows of examples or tokens, as factors: the Gram matrix of N of them never needs [N, d].

        The one backward must have been of ``sum_n row_weight[n] * l_n`` over the rows (examples) of the
        forward; the weight [B] >= 0 is undone here, and a row of weight 0 is not counted. An ``"example"``
        row is the gradient of ``l_n``; its ``"token"`` rows are what each valid token brings to it, and add
        up to it. ``chosen`` int64 [N] are numbers of the counted units, in the order of rows and tokens
        (default: all of them). Waits for the device.
        """
        weight, extent = accurate(row_weight.detach()), self.extent()
        if weight.shape != extent[:1]:
            raise UserError(f"row_weight must be [{extent[0]}], got {list(weight.shape)}")
        weight = weight.to(self.device)
        if not ((weight >= 0) & weight.isfinite()).all():
            raise UserError("row_weight: expected finite weights of 0 or more")
        places = unit_places(unit, extent, weight != 0, self.routing.mask, chosen)
        undo = 1 / weight[places if unit == "example" else places // extent[1]]
        return UnitRows(unit, places, unit_factors(self._factors(), unit, extent, places, undo))

    def unit_probabilities(self, rows: UnitRows, *, soft: bool = False) -> Tensor:
        """``p`` [N, E] of the units of ``rows``: a token's gates, or their mean over an example's tokens.

        ``soft``: of the softmax over all experts in place of the gates. Differentiable in the router alone.
        """
        routing = self.detached_routing()
        return unit_gates(routing.soft() if soft else routing, rows)

    def template(self) -> dict[str, torch.Size]:
        """Shapes of one expert's parameters by name: the order of a row of :meth:`group_gradients`."""
        return self.bank.experts.template()

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
        before = self._pause(True)
        try:
            yield
        finally:
            self._pause(before)

    def hooks(self) -> Iterator[Handle]:
        return self._record.hooks()

    def captures(self) -> list[Tensor]:
        """What is kept for group rows alone."""
        record = self._record
        kept = (*(record.arguments or ()), record.hidden, record.delta, record.hidden_grad)
        return [tensor for tensor in kept if tensor is not None]

    def release(self) -> None:
        """Drop references into the graph; detached captures stay."""
        self._record.release()

    def forget_factors(self) -> None:
        """Free what only :meth:`group_gradients` needs; routing and routing inputs stay."""
        self._record.forget_factors()

    def full_precision(self) -> AbstractContextManager[None]:
        """No TF32 and no autocast, where the experts are."""
        return full_precision(self.device)

    @property
    def device(self) -> torch.device:
        """Where the experts are."""
        return self.bank.router.weight.device

    def extent(self) -> tuple[int, int]:
        """Rows and tokens a row of the observed forward, whose one backward must be over."""
        call = self._record.call()
        return call.gates.shape[0], call.gates.shape[1]

    def grouping(self, groups: Tensor | Grouping, count: int) -> Grouping:
        """The groups of this forward's rows, or of its tokens, checked; ``groups`` as in
        :meth:`group_gradients`.
        """
        rows, tokens = self.extent()
        groups = groups if isinstance(groups, Grouping) else group_numbers(groups)
        if isinstance(groups, Tensor) and groups.dim() == 2:  # a group number per token
            if tuple(groups.shape) != (rows, tokens):
                raise ValueError(f"groups must be [{rows}] or [{rows}, {tokens}], got {tuple(groups.shape)}")
            return Grouping(groups.flatten(), count)
        if isinstance(groups, Tensor):
            if groups.shape != (rows,):
                raise ValueError(
                    f"groups must have one number for each of the {rows} rows, got {tuple(groups.shape)}"
                )
            groups = Grouping(groups, count)
        if groups.count != count or groups.rows not in (rows, rows * tokens):
            raise ValueError(
                f"groups are {groups.count} over {groups.rows} rows, expected {count} over {rows}"
            )
        return groups

    def group_factors(
        self, groups: Tensor | Grouping, group_weight: Tensor
    ) -> tuple[Grouping, dict[str, Factors], Tensor]:
        """Rows by group, the factors of every template slot, and ``1 / group_weight`` [M, 1]."""
        group_weight = group_weights(group_weight)
        groups = self.grouping(groups, len(group_weight))
        factors, (rows, _) = self._factors(), self.extent()
        if groups.rows != rows:
            factors = {slot: _per_token(f, groups.rows) for slot, f in factors.items()}
        weight = accurate(group_weight.detach()).to(accurate(next(iter(factors.values())).left))
        return groups, factors, torch.where(weight != 0, 1 / weight, torch.zeros_like(weight)).unsqueeze(1)

    def _pause(self, paused: bool) -> bool:
        """What it was before."""
        shared = self._record.paused
        shared[0], before = paused, shared[0]
        return before

    def _factors(self) -> dict[str, Factors]:
        """The factors of every template slot, [rows, tokens, ...]."""
        with self.full_precision():
            return self.bank.experts.factors(self._record.call())


def unit_gates(routing: Routing, rows: UnitRows) -> Tensor:
    """The gates [N, E] of the units of ``rows``."""
    if rows.unit == "token" and routing.gates.dim() > 2:
        return routing.gates.flatten(0, 1)[rows.places]
    return routing.example_gates()[rows.places]


def summed_gates(routing: Routing, groups: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
    """Gates [M, E] summed over each group's examples, or tokens for groups [B, L]; their numbers [M]."""
    groups, gates = group_numbers(groups), routing.example_gates()
    units = routing.gates.shape[: groups.dim()] if groups.dim() > 1 else gates.shape[:1]
    if groups.shape != units:
        rows, extent = len(gates), list(routing.gates.shape[:-1])
        raise ValueError(f"groups must be [{rows}] or {extent}, got {list(groups.shape)}")
    if groups.dim() > 1:
        if routing.mask is not None:
            groups = groups.masked_fill(~routing.mask.to(groups.device), -1)
        groups, gates = groups.flatten(), routing.gates.flatten(0, 1)
    grouping = Grouping(groups, count)
    return grouping.sum(gates), grouping.sizes


def call_with(
    module: nn.Module,
    parameters: Mapping[str, Tensor] | None,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Any:
    """What a module returns, with other ``parameters`` if there are any, cast to the ``dtypes`` given."""
    keywords = dict(keywords or {})
    if parameters is None:
        return module(*arguments, **keywords)
    cast = {name: value.to((dtypes or {}).get(name, value.dtype)) for name, value in parameters.items()}
    return torch.func.functional_call(module, cast, arguments, keywords)


def _gathered_pairs(factors: Factors, groups: Grouping) -> Factors | None:
    """A slot's factors [M, terms, ...] where the Gram of M small groups is better made of pairs of terms."""
    left, right = factors
    if right is None or not groups.count:
        return None
    terms = int(groups.sizes.max()) * left.shape[1]
    shape = Factors(
        left.new_empty(groups.count, terms, left.shape[-1], device="meta"),
        right.new_empty(groups.count, terms, right.shape[-1], device="meta"),
    )
    if not pairs_are_cheaper(shape):
        return None
    gathered = (accurate(groups.gather(side).flatten(1, 2)) for side in (left, right))
    return Factors(*gathered)


def _per_token(factors: Factors, units: int) -> Factors:
    """One row a token; several terms of a token stay side by side."""
    left, right = factors
    return Factors(
        left.reshape(units, -1, left.shape[-1]),
        None if right is None else right.reshape(units, -1, right.shape[-1]),
    )


def slices(factors: Factors, columns: int) -> Iterator[Factors]:
    """The factors of slices of a slot, of ``columns`` entries at most (1 at least)."""
    left, right = factors
    if right is None:
        yield from (Factors(part, None) for part in left.split(max(1, columns), -1))
        return
    width = min(right.shape[-1], max(1, columns))
    for part in left.split(max(1, columns // width), -1):
        yield from (Factors(part, other) for other in right.split(width, -1))


def layer_of(name: str) -> int | None:
    """The first number in a module's path.

    >>> layer_of("model.layers.3.mlp.experts")
    3
    """
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)
