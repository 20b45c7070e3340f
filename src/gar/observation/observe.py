"""Group gradients and routing probabilities from ONE ordinary backward (specification, section 4).

``observe`` records, through forward hooks that live only inside the ``with`` block, the input and the output
gradient of every expert sum. The group gradient of expert parameters is then a product of those factors;
no second backward is run. :func:`gar.per_group_gradients` is the slow, obviously right way to the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gar.errors import UserError
from gar.nn import RoutedExperts
from gar.observation._grouping import Grouping
from gar.observation._native import Asked, NativeSiteObservation
from gar.observation._native_layout import native_banks, refuse_auxiliary_loss
from gar.observation._record import Handle
from gar.observation._site import SLICE_BYTES, SiteObservation
from gar.observation._units import Unit, UnitRows


class Observed:
    """The observations of all expert banks of a module; ``sites`` has one entry a bank.

    With a single bank its methods are available here directly; with several, each site has its own
    router, probabilities and gradients.
    """

    def __init__(self, sites: Sequence[SiteObservation]) -> None:
        self.sites = list(sites)

    def __repr__(self) -> str:
        return f"Observed({', '.join(map(repr, self.sites))})"

    @property
    def site(self) -> SiteObservation:
        if len(self.sites) != 1:
            raise RuntimeError(f"{len(self.sites)} expert banks were observed; use the entries of .sites")
        return self.sites[0]

    def group_gradients(self, groups: Tensor | Grouping, group_weight: Tensor) -> Tensor:
        """:meth:`SiteObservation.group_gradients` of the only site."""
        return self.site.group_gradients(groups, group_weight)

    def group_gram(
        self, groups: Tensor | Grouping, group_weight: Tensor, max_bytes: int = SLICE_BYTES
    ) -> Tensor:
        """:meth:`SiteObservation.group_gram` of the only site."""
        return self.site.group_gram(groups, group_weight, max_bytes)

    def unit_rows(self, unit: Unit, row_weight: Tensor, chosen: Tensor | None = None) -> UnitRows:
        """:meth:`SiteObservation.unit_rows` of the only site."""
        return self.site.unit_rows(unit, row_weight, chosen)

    def unit_probabilities(self, rows: UnitRows, *, soft: bool = False) -> Tensor:
        """:meth:`SiteObservation.unit_probabilities` of the only site."""
        return self.site.unit_probabilities(rows, soft=soft)

    def group_probabilities(self, groups: Tensor, count: int | None = None, **options: Any) -> Tensor:
        """:meth:`SiteObservation.group_probabilities` of the only site."""
        return self.site.group_probabilities(groups, count, **options)


@contextmanager
def observe(
    *modules: nn.Module, gradients: bool = True, router_apart: bool = False, outputs: bool = False
) -> Iterator[Observed]:
    """Record the expert banks inside ``modules`` during one forward and one backward.

    ``gradients=False`` records the routing alone, for methods that never ask for group gradients. With
    ``router_apart`` the backward stops at the gates of routers whose input has no gradient: the caller
    brings it into the router together with that of a loss on :meth:`SiteObservation.detached_routing`, which
    then is the same graph (:meth:`SiteObservation.pending`).

    ``outputs`` keeps the experts' inputs, for :meth:`SiteObservation.expert_outputs`; layers of transformers
    have none.

    MoE layers of transformers are sites too, by that library's experts interface (docs/native_moe.md); a
    layer that does not fit is a :class:`gar.UserError` with the reason.

    Forwards without gradients are not recorded. Captures belong to the returned object and are freed
    with it; nothing is stored on the modules.
    """
    paused = [False]
    asked = [Asked(paired="decoder_attention_mask" in _named(module)) for module in modules]
    sites: dict[nn.Module, SiteObservation] = {}
    for module, own in zip(modules, asked, strict=True):
        native = native_banks(module)
        for name, inner in module.named_modules():
            if inner in sites:
                continue
            if isinstance(inner, RoutedExperts):
                sites[inner] = SiteObservation(inner, paused, gradients, router_apart, name, outputs)
            elif inner in native:
                if outputs:
                    raise UserError(
                        f"{native[inner].name}: outputs of single experts are not read from layers of "
                        "transformers; expected the expert banks of gar.nn"
                    )
                sites[inner] = NativeSiteObservation(native[inner], paused, gradients, own)
    if not sites:
        raise UserError(
            "observe: no expert bank (gar.nn.RoutedLoRA, RoutedFFN, … or an MoE layer of transformers) "
            "inside the given modules"
        )
    if gradients or outputs:
        _refuse_shared_experts([bank for bank in sites if isinstance(bank, RoutedExperts)])
    observed = Observed(list(sites.values()))
    theirs = any(isinstance(site, NativeSiteObservation) for site in observed.sites)

    def called(own: Asked, module: nn.Module, args: Any, keywords: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if gradients:
            refuse_auxiliary_loss([module], keywords)
        own.note(args, keywords)

    handles: list[Handle] = []
    try:
        for site in observed.sites:
            handles.extend(site.hooks())
        if theirs:
            handles.extend(
                module.register_forward_pre_hook(partial(called, own), with_kwargs=True)
                for module, own in zip(modules, asked, strict=True)
            )
        yield observed
    finally:
        for handle in handles:
            handle.remove()
        for site in observed.sites:
            site.release()


def _named(module: nn.Module) -> Collection[str]:
    """What the module's forward calls its arguments."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return ()


def _refuse_shared_experts(banks: Sequence[Any]) -> None:
    """One module of experts behind two routers: what it captures is of its last call alone."""
    first: dict[nn.Module, int] = {}
    for number, bank in enumerate(banks):
        if first.setdefault(bank.experts, number) != number:
            raise UserError(
                f"observe: the banks {first[bank.experts]} and {number} share their experts, of which there "
                "is no single observation; expected experts of its own for each, or gradients=False"
            )
