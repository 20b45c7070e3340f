"""Router losses of :mod:`gar.methods` at MoE layers that are not ours, over an update's micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gar.distributed import Ranks, sum_tensors
from gar.errors import UserError, one_of
from gar.methods import REGISTRY, RouterTerm, UpdateSite, from_config
from gar.objective import accurate
from gar.routing import Routing

#: What a layer has for :meth:`gar.methods.RouterTerm.at`.
READABLE = frozenset({"units", "weight"})
#: Names of PEFT's for a router that it trains a copy of.
COPY, ORIGINAL = "modules_to_save", "original_module"


def able() -> list[str]:
    """The registered methods that are losses for any router."""
    return [name for name, cls in REGISTRY.items() if issubclass(cls, RouterTerm) and cls.reads <= READABLE]


def terms_of(names: Sequence[str], where: str) -> list[RouterTerm]:
    """The losses of ``names``, each ``NAME`` or ``NAME=COEFFICIENT``; those of coefficient 0 are left out."""
    if isinstance(names, str):
        raise UserError(f"{where} is {names!r}; expected a list, as [{names!r}]")
    found: dict[str, RouterTerm] = {}
    for text in names:
        name, given, value = text.partition("=")
        if name not in REGISTRY:
            raise one_of(where, name, able())
        if name not in able():
            raise UserError(
                f"{where}: {name} is no loss of a router's logits or weights alone; expected one of "
                f"{', '.join(able())}"
            )
        if name in found:
            raise UserError(f"{where} has {name} twice; expected distinct names")
        try:
            own = {"coefficient": float(value)} if given else {}
        except ValueError:
            raise UserError(f"{where} has {text!r}; expected {name}=COEFFICIENT") from None
        if not all(0 <= number < math.inf for number in own.values()):
            raise UserError(f"{where} has {text!r}; expected a finite coefficient of 0 or more")
        term = from_config({"name": name, **own})
        assert isinstance(term, RouterTerm)
        found[name] = term
    return [term for term in found.values() if term.coefficient]


class LayerSite(UpdateSite):
    """One layer as a router term sees it: all units of the update, of all ranks, as one group.

    Sums are leaves; :meth:`inner` gives the gradient at them, which the caller takes into the router one
    micro-batch at a time (:meth:`sums`).
    """

    def __init__(self, name: str, routings: Sequence[Routing], weights: Mapping[str, Tensor]) -> None:
        self._name, self._routings, self._weights = name, routings, weights
        self._asked: list[tuple[Callable[[Routing], Tensor], Tensor]] = []
        self._leaf: Tensor | None = None

    def unit_sums(self, values: Callable[[Routing], Tensor]) -> Tensor:
        """Sums [1, ...] over all valid units of ``values(routing)`` [..., *]."""
        if not self._routings[0].logits.numel():
            raise UserError(f"{self._name}: the router returns no logits; a loss of logits needs them")
        total = torch.stack([_sum(values, routing) for routing in self._routings]).sum(0).detach()
        sum_tensors([total], Ranks())
        self._asked.append((values, total.requires_grad_()))
        return total.unsqueeze(0)

    @property
    def zero(self) -> Tensor:
        """A scalar zero, to start sums with."""
        return accurate(self._routings[0].gates).new_zeros(())

    def selections(self) -> Tensor:
        """How often each expert was chosen, int64 [1, E]."""
        total = torch.stack([r.selected.flatten(0, -2).sum(0) for r in self._routings]).sum(0)
        sum_tensors([total], Ranks())
        return total.unsqueeze(0)

    def unit_count(self) -> Tensor:
        """Valid units, a scalar of 1 or more."""
        total = torch.stack([r.selected.any(-1).sum() for r in self._routings]).sum()
        sum_tensors([total], Ranks())
        return total.clamp(min=1)

    @property
    def weight_name(self) -> str:
        """The router's one matrix with a row an expert."""
        experts = self._routings[0].gates.shape[-1]
        found = [name for name, p in self._weights.items() if p.dim() == 2 and len(p) == experts]
        if len(found) != 1 or len([p for p in self._weights.values() if p.dim() == 2]) != 1:
            raise UserError(
                f"{self._name}: the router has no single weight [{experts}, d]; a loss of router weights "
                "needs one, without an adapter beside it"
            )
        return found[0]

    @property
    def router_weight(self) -> Tensor:
        if self._leaf is None:
            self._leaf = self._weights[self.weight_name].detach().requires_grad_()
        return self._leaf

    def inner(self, loss: Tensor, scale: float) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The gradients of ``scale * loss`` at the sums, and at the router's own parameters by name."""
        leaves = [total for _, total in self._asked] + ([] if self._leaf is None else [self._leaf])
        grads = [scale * g for g in torch.autograd.grad(loss, leaves, materialize_grads=True)]
        own = {} if self._leaf is None else {self.weight_name: grads.pop()}
        return grads, own

    def sums(self, routing: Routing) -> list[Tensor]:
        """This micro-batch's part of every sum, with its graph into the router."""
        return [_sum(values, routing) for values, _ in self._asked]


def _sum(values: Callable[[Routing], Tensor], routing: Routing) -> Tensor:
    found, units = values(_wide(routing)), routing.gates.shape[:-1]
    if routing.mask is not None:
        mask = routing.mask.reshape(*units, *[1] * (found.dim() - len(units)))
        found = found.masked_fill(~mask, 0)
    return found.flatten(0, len(units) - 1).sum(0)


def _wide(routing: Routing) -> Routing:
    """Logits in float32 or wider."""
    return Routing(accurate(routing.logits), routing.gates, routing.selected, routing.mask)


def named(router: nn.Module, whole: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """A router's parameters by name, those of a sharded one whole.

    Where PEFT trains a copy (``modules_to_save``), those of the copy: the original routes nothing.
    """
    found = dict(whole or router.named_parameters())
    copied = any(COPY in name.split(".") for name in found)
    return {name: p for name, p in found.items() if not (copied and ORIGINAL in name.split("."))}
