"""The common shape of an expert bank: a router and E experts with one parameter template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gar.errors import UserError
from gar.routing import Router, Routing


class Factors(NamedTuple):
    """Per-unit factors of one template slot's gradient: ``sum_i left_i right_i^T`` (bias: ``sum_i left_i``).

    ``left`` is [B, L, p], ``right`` [B, L, q] or None for a bias slot. L may hold several terms a token.
    """

    left: Tensor
    right: Tensor | None


class Call(NamedTuple):
    """What one forward and backward left behind at an expert sum; everything detached.

    ``x`` [B, L, (E,) d_in] is the input that was multiplied (after dropout), ``gates`` and ``active``
    [B, L, E], ``delta`` [B, L, d_out] the loss derivative at the gated sum; ``hidden`` and
    ``hidden_grad`` the output of the bank's hidden module and the derivative at that module's input;
    ``layout`` what it was called with beside that input.
    """

    x: Tensor
    gates: Tensor
    active: Tensor
    delta: Tensor
    hidden: Tensor | None = None
    hidden_grad: Tensor | None = None
    layout: Any = None


class RowGroups(Protocol):
    """Which rows belong to which of ``count`` groups (:class:`gar.observation.Grouping` is one)."""

    count: int
    ordered: bool
    """Whether rows come group by group, every row in one of them."""

    def gather(self, values: Tensor) -> Tensor:
        """Rows [B, ...] as [M, n, ...], zeros where a group is shorter than the longest."""
        ...

    def scatter(self, gathered: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse, into zeros of ``shape`` [B, ...]."""
        ...


def add_product(into: Tensor, left: Tensor, right: Tensor, beta: int = 1) -> None:
    """``into = beta into + left^T right``: [p, q] from [K, p] and [K, q], or all with one batch axis.

    ``into`` is float32 or wider, may be a strided view, and is not read where ``beta`` is 0. Half-precision
    factors are multiplied as such where the device adds their products up in float32.
    """
    left = left.mT
    if left.is_cuda and left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float16):
        product = torch.addmm if into.dim() == 2 else torch.baddbmm
        product(into, left, right, out_dtype=into.dtype, beta=beta, out=into)
        return
    left, right = left.to(into.dtype), right.to(into.dtype)
    if into.dim() == 2:
        into.addmm_(left, right, beta=beta)
    else:
        into.baddbmm_(left, right, beta=beta)


class Experts(nn.Module):
    """E experts as stacked parameters [E, ...]; ``forward(x, gates, active, each)`` is their gated sum.

    ``active`` bool [..., E] marks the (unit, expert) pairs whose output matters, at most ``each`` a unit:
    where it is False the gate is zero in value and gradient. Subclasses list ``slots``, the template's local
    order, and may name a ``hidden_module`` whose input gradient :meth:`factors` needs.
    """

    slots: tuple[str, ...]
    count: int

    def __init__(self) -> None:
        super().__init__()
        self.hidden_module: nn.Module | None = None

    @property
    def capturable(self) -> bool:
        """Whether the sizes of all tensors follow from those of the input: nothing waits for the device."""
        return False

    def template(self) -> dict[str, torch.Size]:
        """Shapes of one expert's parameters, in local order."""
        return {slot: getattr(self, slot).shape[1:] for slot in self.slots}

    def outputs(self, x: Tensor, active: Tensor, each: int) -> Tensor:
        """What every active expert makes of its unit, without the gate: [..., each, d_out].

        In the order of experts, zeros where a unit has fewer. Arguments are those of the forward, which makes
        the gated sum without this: it costs a second forward of the active pairs, and their outputs' memory.
        Hooks do not see it. A user's own experts that have no outputs apart leave it out.
        """
        raise UserError(f"{type(self).__name__} gives its gated sum alone; expected experts with outputs()")

    def factors(self, call: Call) -> dict[str, Factors]:
        """Factors of the common-template gradient, one entry a slot; the sum over experts comes first."""
        raise NotImplementedError

    def add_gradients(self, call: Call, groups: RowGroups, into: Mapping[str, Tensor]) -> None:
        """Add the gradient of every group's part of the loss, experts apart, to ``into[slot]`` [M, E, ...].

        ``into`` has all slots, float32 or wider. Sums over the rows of ``call`` alone: whole parameter
        gradients, group by group, of the one backward that left it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no group gradients of single experts")

    def bias_proxies(self, delta: Tensor) -> Tensor:
        """``scale * B_e^T delta`` [..., E, r]: virtual-bias gradient blocks without the gate (STGC)."""
        raise NotImplementedError(f"{type(self).__name__} has no virtual-bias proxies")


class RoutedExperts(nn.Module):
    """A router and its experts. ``forward(x, mask)`` returns ``(output, Routing)`` and stores nothing."""

    router: Router
    experts: Experts

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        self.router, self.experts = router, experts

    def prepare(self, x: Tensor, keep: Tensor | None) -> Tensor:
        """The experts' input from the routing input: dropout, where the bank has any."""
        return x

    def forward(
        self, x: Tensor, mask: Tensor | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """Route units ``x`` [..., d_in] and return the gated expert sum [..., d_out] with its routing.

        ``mask`` bool [...] marks valid units; the others get zero output. ``keep`` is a dropout mask drawn
        by the caller (True: kept); without it dropout draws from torch's generator.
        """
        routing: Routing = self.router(x, mask)
        # The straight-through gate has a gradient at every expert, so every output is needed for it.
        dense = self.router.top_k == 1 and torch.is_grad_enabled() and routing.gates.requires_grad
        active = (
            routing.selected.any(-1, keepdim=True).expand_as(routing.selected) if dense else routing.selected
        )
        each = self.experts.count if dense else self.router.top_k
        return self.experts(self.prepare(x, keep), routing.gates, active, each), routing


def expert_banks(module: nn.Module) -> list[RoutedExperts]:
    """All expert banks inside a module, in module order."""
    return [inner for inner in module.modules() if isinstance(inner, RoutedExperts)]
