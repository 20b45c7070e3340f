"""Mixture-of-experts layers of transformers, seen through that library's own experts interface.

A module decorated with ``use_experts_implementation`` says its layout in flags on the instance, and every
implementation of it (eager, batched_mm, grouped_mm, ...) is called as ``experts(hidden [T, H], index [T, k],
weights [T, k])``. Input, output and the output's gradient are taken there by hooks. What lies between is read
where the order of an implementation is known (``_native_order``), else recomputed (``_native_factors``), so
that none has to be known. Nothing is imported from transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gar.errors import UserError
from gar.nn import Factors
from gar.objective import accurate
from gar.observation._grouping import Grouping, group_numbers
from gar.observation._native_factors import differ, probe, read, recomputed
from gar.observation._native_layout import (
    ROUTERS,
    SUPPORTED,
    Layer,
    native_slots,
    template_parameters,
)
from gar.observation._native_lora import Adapter
from gar.observation._native_order import Replaced, known, places, saves_elsewhere
from gar.observation._record import Handle, before_backward, in_backward, repeats, version_of
from gar.observation._site import SiteObservation, call_with, layer_of, summed_gates, unit_gates
from gar.observation._units import Unit, UnitRows
from gar.precision import full_precision
from gar.routing import Routing

#: What the router called again may differ by, of a token's largest gate: half precision, float32, float64.
OTHER = {2: 3e-2, 4: 1e-3, 8: 1e-6}
#: The part of the tokens (and one) for which it may: ties aside none, but compiled forwards round otherwise.
AS_IT_WAS, COMPILED = 0.01, 0.25
#: How far a row of half-precision probabilities may be from a sum of 1.
ROUNDED = 2e-2


@dataclass
class Asked:
    """One observed module's last call: its 2-D attention masks, its rows and tokens; and its sites."""

    #: Whether the module has a decoder with a mask of its own.
    paired: bool = False
    whole: Tensor | None = None
    decoder: Tensor | None = None
    shape: tuple[int, int] | None = None
    sites: list[NativeSiteObservation] = field(default_factory=list)

    def note(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Take what a call says."""
        given = {name: value for name, value in keywords.items() if isinstance(value, Tensor)}
        self.whole, self.decoder = (
            mask.detach() if (mask := given.get(name)) is not None and mask.dim() == 2 else None
            for name in ("attention_mask", "decoder_attention_mask")
        )
        rows = (*args, *(given.get(name) for name in ("input_ids", "inputs_embeds", "hidden_states")))
        found = (t for t in rows if isinstance(t, Tensor) and t.dim() == 2 + t.is_floating_point())
        first = None if self.paired else next(found, None)
        self.shape = None if first is None else (first.shape[0], first.shape[1])

    def of(self, name: str) -> Tensor | None:
        """What belongs to the site at a path."""
        return self.decoder if self.paired and "decoder" in name.split(".") else self.whole


@dataclass
class _Routed:
    """One call of the router: what it was called with, detached, and the autocast it ran under."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    device: str
    autocast: tuple[bool, torch.dtype]
    #: What its parameters were in: FSDP may have cast them.
    dtypes: dict[str, torch.dtype]
    compiled: bool
    #: Where index, weights and logits stand in its result; logits may be missing.
    places: tuple[int, int, int | None] | None = None
    #: Whether there are probabilities in the place of logits (Gemma4).
    normalised: bool = False

    def logits(self, result: tuple[Any, ...]) -> Tensor:
        """What a softmax makes probabilities of, from a result that has it."""
        assert self.places is not None
        assert self.places[2] is not None
        found = accurate(result[self.places[2]])
        return found.clamp(min=torch.finfo(found.dtype).tiny).log() if self.normalised else found


@dataclass
class NativeRecord:
    """Captures of one experts module during one ``observe`` block."""

    layer: Layer
    router: nn.Module
    factors: bool
    paused: list[bool]
    asked: Asked
    #: Rows and tokens that the block was called with; whether it does not tell them apart.
    shape: tuple[int, int] | None = None
    flat: bool = True
    routed: _Routed | None = None
    result: tuple[Any, ...] = ()
    x: Tensor | None = None
    index: Tensor | None = None
    weights: Tensor | None = None
    logits: Tensor | None = None
    delta: Tensor | None = None
    output: Tensor | None = None
    #: The adapters that took part in the forward, and all weights without one.
    adapters: dict[str, Adapter] = field(default_factory=dict)
    effective: dict[str, Tensor] = field(default_factory=dict)
    #: What these are, by name, and its versions at the forward.
    written: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    #: The implementation, while the experts run and if its order of pairs is known, and the calls of the
    #: activation with its result.
    order: str | None = None
    activations: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)
    #: ``sum_k w_k h_k`` [T, F] and ``sum_k dpre_k`` [T, ...], where they were read.
    hidden: Tensor | None = None
    before: Tensor | None = None
    #: Factors made during the backward, where weights are whole no longer.
    made: dict[str, Factors] | None = None
    forwards: int = 0
    backwards: int = 0
    #: Forwards inside a backward, after the recorded one, whose outputs had a gradient.
    repeats: int = 0
    #: What the recorded output is checked by, see :func:`probe`; the version of the activation's input.
    told: tuple[Tensor, float] | None = None
    version: int = 0
    #: Those of ``x``, ``index`` and ``weights``, which are the model's own memory.
    versions: tuple[int, ...] = ()
    #: Whether the router is called by us.
    again: bool = False

    def hooks(self) -> Iterator[Handle]:
        """Register the hooks; the caller removes them."""
        experts = self.layer.experts
        if self.factors:
            yield experts.register_forward_pre_hook(self._before_experts)
            if experts.has_gate:
                yield Replaced(experts, "_apply_gate", partial(self._gate, experts._apply_gate))
            elif isinstance(experts.act_fn, nn.Module):
                yield experts.act_fn.register_forward_pre_hook(self._activation_pre_hook)
                yield experts.act_fn.register_forward_hook(self._activation_hook)
        yield self.layer.block.register_forward_pre_hook(self._block_hook, with_kwargs=True)
        yield self.router.register_forward_hook(self._router_hook, with_kwargs=True)
        # Before hooks of others: what these make of the output has another gradient. After FSDP's, which has
        # the output's gradient gather the weights that ours computes with.
        first = not self.layer.sharded
        yield experts.register_forward_hook(self._experts_hook, with_kwargs=True, prepend=first)

    def _skipped(self) -> bool:
        """No gradients, or the second forward of a checkpoint whose first one is recorded."""
        return not torch.is_grad_enabled() or repeats(self.forwards) or self.again

    def _block_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim() > 1), None)
        if hidden is not None and not self._skipped():
            self.flat = hidden.dim() != 3
            self.shape = (len(hidden), 1) if self.flat else (hidden.shape[0], hidden.shape[1])

    def _router_hook(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if not self._skipped() and isinstance(result, tuple):
            arguments = tuple(map(_detached, args)), {k: _detached(v) for k, v in kwargs.items()}
            kind = next(t.device.type for t in result if isinstance(t, Tensor))
            state = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
            self.routed = _Routed(*arguments, kind, state, dtypes, torch.compiler.is_compiling())
            self.result = result

    def _before_experts(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.activations.clear()
        self.order = None
        elsewhere = in_backward() or saves_elsewhere() or torch.compiler.is_compiling()
        if not (self._skipped() or elsewhere or self.layer.adapters()):
            self.order = known(module)

    def _gate(self, apply: Callable[[Tensor], Tensor], before: Tensor) -> Tensor:
        version = before._version
        hidden: Tensor = apply(before)
        self._activated(before, hidden, version)
        return hidden

    def _activation_pre_hook(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self.order is not None:
            self.version = args[0]._version

    def _activation_hook(self, module: nn.Module, args: tuple[Tensor, ...], hidden: Tensor) -> None:
        self._activated(args[0], hidden, self.version)

    def _activated(self, before: Tensor, hidden: Tensor, version: int) -> None:
        """``version`` is that of ``before`` ahead of the activation, which may work in place."""
        if self.order is not None:
            self.activations.append((before, hidden, version))

    def _experts_hook(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        order, self.order = self.order, None
        activations, self.activations = self.activations, []
        if self._skipped():
            if repeats(self.forwards) and self.factors and output.requires_grad:
                output.register_hook(self._count_repeat)
            return
        self.forwards += 1
        x, index, weights = self.layer.arguments(args, kwargs)
        self.x, self.index, self.weights = (t.detach().flatten(0, -2) for t in (x, index, weights))
        self.versions = tuple(version_of(t) for t in (self.x, self.index, self.weights))
        self._place_routing(index, weights)
        self.adapters = self.layer.adapters()
        if not self.layer.sharded:  # their memory would be freed
            slots = [slot for slot in native_slots(module) if slot not in self.adapters]
            self.effective = {slot: getattr(module, slot).detach() for slot in slots}
            self.written = {name: (t, version_of(t)) for name, t in self._parameters()}
        self.output = output
        # Below everything that is trained there is routing to see, and no gradient.
        if self.factors and output.requires_grad:
            own = [side for adapter in self.adapters.values() for side in (adapter.a, adapter.b)]
            self.told = probe(output.detach(), self.x, *self.effective.values(), *own)
            before_backward(output, self._store_delta)
            if order is not None and len(activations) == 1:
                self._read(order, *activations[0])

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """What the experts are computed with again, by name."""
        yield from self.effective.items()
        for adapter in self.adapters.values():
            yield from zip(adapter.slots, (adapter.a, adapter.b), strict=True)

    def _read(self, order: str, before: Tensor, hidden: Tensor, version: int) -> None:
        """Take the activation's result, and later its input's gradient, summed over each token's experts."""
        assert self.index is not None
        assert self.weights is not None
        units, k = self.index.shape
        whole = len(before) == len(hidden) == units * k and before._version == version
        if not (whole and before.requires_grad):
            return
        place = places(order, self.index)

        def by_token(pairs: Tensor) -> Tensor:
            pairs = pairs if place is None else pairs[place]
            return pairs.reshape(units, k, -1)

        def store(grad: Tensor) -> None:
            if not self.paused[0]:
                wide = torch.promote_types(grad.dtype, torch.float32)
                self.before = by_token(grad.detach()).sum(1, dtype=wide)

        with torch.no_grad(), torch.autocast(before.device.type, enabled=False):
            h = accurate(by_token(hidden.detach()))
            self.hidden = (self.weights.to(h).unsqueeze(1) @ h).squeeze(1)
        before_backward(before, store)

    def _place_routing(self, index: Tensor, weights: Tensor) -> None:
        """Find what the experts were called with in the router's result."""
        result, self.result = self.result, ()
        if self.routed is None:
            return
        place = {
            # Of one expert a token the weights may be its number: 1.0, where all tokens choose number 1.
            "index": _place(
                result,
                lambda t: not t.is_floating_point() and t.shape == index.shape and torch.equal(t, index),
                first=index,
            ),
            "weights": _place(result, lambda t: t.is_floating_point() and _same(t, weights), first=weights),
        }
        count = self.layer.experts.num_experts
        logits = _place(
            result,
            lambda t: t.is_floating_point() and t.shape[-1] == count,
            but=(place["index"], place["weights"]),
        )
        if place["index"] is not None and place["weights"] is not None:
            self.routed.places = (place["index"], place["weights"], logits)
            if logits is not None:
                self.routed.normalised = _is_normalised(result[logits].detach())
                self.logits = self.routed.logits(result).detach()

    def _store_delta(self, grad: Tensor) -> None:
        if not self.paused[0]:
            self.backwards += 1
            # A copy: where it is a parameter's gradient too, seen through a view, the next backward or
            # clipping writes there.
            self.delta = grad.detach().flatten(0, -2).clone()
            if self.layer.sharded and self.hidden is None:
                self.made = self.recompute()

    def _count_repeat(self, grad: Tensor) -> None:
        """Of a checkpoint's second forward nothing gets a gradient, unless its first one had no graph."""
        if not self.paused[0]:
            self.repeats += 1

    def recompute(self) -> dict[str, Factors]:
        """The template's factors [T, ...] without what is read: the experts' forward and backward again."""
        assert self.x is not None
        assert self.index is not None
        assert self.weights is not None
        assert self.delta is not None
        for name, (parameter, before) in self.written.items():
            if version_of(parameter) != before:
                raise self._others(f" any more ({name} changed in place)")
        experts, weight = self.layer.experts, dict(self.effective)
        for slot in native_slots(experts):
            if slot not in weight:  # adapters': parametrised only as long as the forward, which is over
                weight[slot] = getattr(experts, slot).detach()
        with full_precision(self.delta.device):
            factors, told = recomputed(
                experts, weight, self.adapters, self.x, self.index, self.weights, self.delta
            )
        assert self.told is not None
        if differ(told, *self.told):
            raise self._others("")
        return factors

    def _others(self, why: str) -> RuntimeError:
        return RuntimeError(
            f"{self.layer.name}: what these experts returned is not what their weights give for this "
            f"input{why}; expected sum_k w_k V act(W x) as transformers computes it, and input and weights "
            "as they were (ask before the optimizer's step)"
        )

    def require_unchanged(self, routing_only: bool = False) -> None:
        """Raise if something wrote to the input since the forward, or to the pairs' numbers and weights."""
        captured = {"input": self.x, "experts' numbers": self.index, "pairs' weights": self.weights}
        for (name, tensor), before in zip(captured.items(), self.versions, strict=True):
            assert tensor is not None
            if version_of(tensor) != before and not (routing_only and tensor is self.x):
                raise self._others(f" any more (the {name} changed in place)")

    def require_forward(self) -> None:
        if (forwards := self.forwards + self.repeats) > 1:
            raise RuntimeError(
                f"{self.layer.name} ran {forwards} forwards inside one observe block; observe one at a "
                "time (experts shared between layers have no single observation)"
            )
        if self.x is None:
            raise RuntimeError(
                f"{self.layer.name}: nothing was observed: no forward with gradients ran inside the observe "
                "block"
            )

    def require_backward(self) -> None:
        self.require_forward()
        if not self.factors:
            raise RuntimeError("group gradients were not recorded: observe(..., gradients=False)")
        if self.backwards != 1:
            raise RuntimeError(
                f"{self.backwards} backward passes reached {self.layer.name} inside the observe block; group "
                "gradients need exactly one"
            )

    def release(self) -> None:
        self.output, self.result = None, ()

    @property
    def intercepted(self) -> bool:
        """Whether the activation is read; before a forward, whether it would be."""
        if self.x is None:
            return self.factors and not self.layer.adapters() and known(self.layer.experts) is not None
        return self.hidden is not None

    def forget_factors(self) -> None:
        self.delta = self.hidden = self.before = self.made = None
        self.effective, self.written = {}, {}


class NativeSiteObservation(SiteObservation):
    """What one MoE layer of transformers showed during one ``observe`` block; ``bank`` is its experts module.

    ``group_probabilities`` normalises the rows: gates of some families do not sum to 1.
    """

    def __init__(self, layer: Layer, paused: list[bool], gradients: bool, asked: Asked) -> None:
        self.bank: Any = layer.bank
        self.name, self.layer = layer.name, layer_of(layer.name)
        found = (getattr(layer.block, name, None) for name in ROUTERS)
        router = next(module for module in found if isinstance(module, nn.Module))
        self._seen = NativeRecord(layer, router, gradients, paused, asked)
        asked.sites.append(self)

    def __repr__(self) -> str:
        how = "intercepted" if self._seen.intercepted else "recomputed"
        return f"SiteObservation({self.name!r}, {type(self._seen.layer.experts).__name__}, {how})"

    @property
    def routing(self) -> Routing:
        """The observed routing, detached, [B, L, E]; gates as the model used them, not normalised.

        ``mask`` is the ``attention_mask`` [B, L] that the observed module was called with, if any; of a
        longer one the last L columns. :class:`gar.UserError` if it leaves tokens out and fits no site.
        """
        self._seen.require_forward()
        return self._own_routing(self._mask())

    def _own_routing(self, mask: Tensor | None) -> Routing:
        seen = self._seen
        seen.require_unchanged(routing_only=True)
        assert seen.index is not None
        assert seen.weights is not None
        return self._routing(seen.index, seen.weights, seen.logits, mask)

    def _mask(self) -> Tensor | None:
        """The mask of this site's tokens, in their shape."""
        mask = self._seen.asked.of(self.name)
        if mask is None:
            return None
        found = self._fitting(mask)
        sites = self._seen.asked.sites
        if found is None and not any(site._fitting(mask) is not None for site in sites) and not mask.all():
            raise UserError(
                f"{self.name}: the attention_mask {list(mask.shape)} of the call fits none of the observed "
                f"layers, this one has tokens {list(self._shape())}; expected [B, L] (or mask=, or none)"
            )
        return found

    def _fitting(self, mask: Tensor) -> Tensor | None:
        if self._seen.x is None or self._apart:
            return None
        (rows, tokens), (own, columns) = self._shape(), mask.shape
        if own != rows and 1 not in (rows, tokens):
            return None
        # Keys of a cache or a prefix come first; a block may flatten the tokens of all rows.
        count = tokens if own == rows else rows * tokens // max(1, own)
        fits = own * count == rows * tokens and count <= columns
        return mask[:, columns - count :].reshape(rows, tokens) if fits else None

    @property
    def choices(self) -> int:
        self._seen.require_forward()
        assert self._seen.index is not None
        return self._seen.index.shape[-1]

    @property
    def router(self) -> nn.Module:
        return self._seen.router

    def detached_routing(
        self, parameters: Mapping[str, Tensor] | None = None, *, compare: bool = True
    ) -> Routing:
        """The same from the router called again on its DETACHED input: differentiable in the router only.

        :class:`gar.UserError` where it does not give the gates that the model used (unless ``parameters`` are
        given, or ``compare`` is off): it draws in training, or its weights, its input or its own state are
        others by now. Its buffers stay as they are.
        """
        self._seen.require_forward()
        return self._routing_again(self._mask(), parameters, compare)

    def _routing_again(
        self, mask: Tensor | None, parameters: Mapping[str, Tensor] | None = None, compare: bool = True
    ) -> Routing:
        seen = self._seen
        seen.require_unchanged(routing_only=True)
        if seen.routed is None or seen.routed.places is None:
            raise UserError(
                f"{self.name}: the experts are not called with what the router returned; {SUPPORTED} whose "
                "index and weights reach the experts as they are"
            )
        trainable = any(p.requires_grad for p in seen.router.parameters())
        if not trainable:
            return self._own_routing(mask)
        if seen.router.training and _jitters(seen.router):
            raise UserError(
                f"{self.name}: the router of {type(seen.router).__name__} draws random numbers and its "
                "weights carry no usual gradient; supported is a diagnosis, with the model in eval()"
            )
        places, (enabled, dtype) = seen.routed.places, seen.routed.autocast
        buffers = [
            (inner, name, buffer, version_of(buffer), buffer.clone())
            for inner in seen.router.modules()
            for name, buffer in inner._buffers.items()
            if buffer is not None
        ]
        seen.again = True
        try:
            # Rounded as before, so that it selects the same experts.
            with torch.enable_grad(), torch.autocast(seen.routed.device, dtype, enabled, cache_enabled=False):
                result = call_with(
                    seen.router, parameters, seen.routed.arguments, seen.routed.keywords, seen.routed.dtypes
                )
        finally:
            seen.again = False
            for inner, name, buffer, count, before in buffers:
                inner._buffers[name] = buffer
                if version_of(buffer) != count:
                    buffer.detach().copy_(before)
        if compare and parameters is None:
            self._refuse_other_gates(result[places[0]], result[places[1]])
        logits = None if places[2] is None else seen.routed.logits(result)
        return self._routing(result[places[0]], result[places[1]], logits, mask)

    def _refuse_other_gates(self, index: Tensor, weights: Tensor) -> None:
        seen = self._seen
        assert seen.routed is not None
        assert seen.index is not None
        assert seen.weights is not None
        used, found = self._gates(seen.index, seen.weights), self._gates(index.detach(), weights.detach())
        size = 2 if seen.routed.autocast[0] else min(seen.weights.dtype.itemsize, weights.dtype.itemsize)
        other = (found - used).abs().amax(-1) > OTHER[size] * used.abs().amax(-1)
        allowed = COMPILED if seen.routed.compiled else AS_IT_WAS
        if (count := int(other.sum())) > max(1, allowed * len(other)):
            raise UserError(
                f"{self.name}: the router called again gives other gates than the model used, for {count} of "
                f"{len(other)} tokens; supported are routers that draw nothing (noise, dropout: in eval()) "
                "and change nothing of their own, with weights and input as they were (ask before the "
                "optimizer's step)"
            )

    def group_gates(
        self,
        groups: Tensor,
        count: int | None = None,
        *,
        full_softmax: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sums [M, E] of the gates of each group's texts and their numbers [M]; options as of
        :meth:`group_probabilities`.
        """
        self._seen.require_forward()
        groups = group_numbers(groups)
        self._refuse_rows(groups)
        shape = list(self._shape())
        if mask is not None and list(mask.shape) != shape:
            raise UserError(f"{self.name}: mask must be {shape}, got {list(mask.shape)}")
        routing = self._routing_again(self._mask() if mask is None else mask)
        gates, mask = routing.gates, routing.mask
        if full_softmax:
            if not routing.logits.numel():
                raise UserError(f"{self.name}: the router returns no logits; full_softmax needs them")
            gates = routing.logits.softmax(-1)
            gates = gates if mask is None else gates.masked_fill(~mask.unsqueeze(-1), 0)
        routing = Routing(routing.logits, gates, routing.selected, mask)
        return summed_gates(routing, groups, count)

    def probabilities(self, sums: Tensor, sizes: Tensor) -> Tensor:
        """The rows divided by their sums: dividing by ``sizes`` before would change nothing."""
        total = sums.sum(-1, keepdim=True)
        return sums / torch.where(total > 0, total, torch.ones_like(total))

    def group_probabilities(self, groups: Tensor, count: int | None = None, **options: Any) -> Tensor:
        """``p_m`` [M, E]: mean gates of the group's texts, every row then divided by its sum.

        ``full_softmax=True`` takes the softmax of the router's logits in the place of the gates, which has a
        gradient at experts that were not selected too. ``mask`` bool [B, L] says which tokens count, else the
        observed module's ``attention_mask``. A group without a token has a row of zeros.
        """
        return self.probabilities(*self.group_gates(groups, count, **options))

    def unit_probabilities(self, rows: UnitRows, *, soft: bool = False) -> Tensor:
        """The same, every row divided by its sum; ``soft`` needs a router that returns logits."""
        routing = self.detached_routing()
        if soft and not routing.logits.numel():
            raise UserError(f"{self.name}: the router returns no logits; soft needs them")
        gates = unit_gates(routing.soft() if soft else routing, rows)
        return self.probabilities(gates, gates.new_ones(len(gates)))

    def template(self) -> dict[str, torch.Size]:
        seen = self._seen
        adapters = seen.layer.adapters() if seen.x is None else seen.adapters
        found = template_parameters(seen.layer.experts, adapters)
        empty = partial(torch.empty, device="meta")  # of whole parameters, sharded ones too
        return {slot: own(empty(parameter.shape)).shape for slot, (parameter, own) in found.items()}

    def pending(self) -> None:
        """Routers of transformers are never observed apart."""
        return

    def output_gradient(self, loss: Tensor) -> Tensor:
        self._seen.require_forward()
        assert self._seen.output is not None
        with self.paused():
            (grad,) = torch.autograd.grad(loss, self._seen.output, retain_graph=True)
        return grad

    def hooks(self) -> Iterator[Handle]:
        return self._seen.hooks()

    def captures(self) -> list[Tensor]:
        seen = self._seen
        made = () if seen.made is None else (side for pair in seen.made.values() for side in pair)
        kept = (seen.x, seen.delta, seen.hidden, seen.before, *made)
        return [tensor for tensor in kept if tensor is not None]

    def release(self) -> None:
        self._seen.release()

    def forget_factors(self) -> None:
        self._seen.forget_factors()

    def _pause(self, paused: bool) -> bool:
        shared = self._seen.paused
        shared[0], before = paused, shared[0]
        return before

    @property
    def device(self) -> torch.device:
        experts = self._seen.layer.experts
        device: torch.device = getattr(experts, native_slots(experts)[0]).device
        return device

    def _shape(self) -> tuple[int, int]:
        """Rows and tokens a row; where these are not those of the block, a row for each token."""
        assert self._seen.x is not None
        shape = self._seen.shape
        return (len(self._seen.x), 1) if shape is None or self._apart else shape

    @property
    def _apart(self) -> tuple[int, int] | None:
        """Rows and tokens of the block, or of the model, if the experts saw another number of tokens."""
        seen = self._seen
        block = (seen.asked.shape or seen.shape) if seen.flat else seen.shape
        assert seen.x is not None
        return None if block is None or block[0] * block[1] == len(seen.x) else block

    def _refuse_rows(self, entries: Any) -> None:
        """Raise for one entry a row where the experts saw other tokens: it does not say whose they are."""
        apart = self._apart
        if apart is not None and isinstance(entries, Tensor) and entries.shape == apart[:1]:
            assert self._seen.x is not None
            units = len(self._seen.x)
            raise UserError(
                f"{self.name}: the experts saw {units} tokens where the model has {apart[0]} x {apart[1]}: "
                "one entry a row does not say whose they are; expected one for each token that they saw, "
                f"[{units}, 1] (for rows also a Grouping of these)"
            )

    def grouping(self, groups: Tensor | Grouping, count: int) -> Grouping:
        """As of the base; one entry a row is refused where the experts saw other tokens than the block."""
        self._seen.require_backward()
        groups = groups if isinstance(groups, Grouping) else group_numbers(groups)
        self._refuse_rows(groups)
        return super().grouping(groups, count)

    def unit_rows(self, unit: Unit, row_weight: Tensor, chosen: Tensor | None = None) -> UnitRows:
        """As of the base; [T, 1] for each token that the experts saw, where these are not the block's."""
        self._seen.require_backward()
        self._refuse_rows(row_weight)
        if self._apart and row_weight.shape == (len(row_weight), 1):
            row_weight = row_weight.squeeze(1)
        return super().unit_rows(unit, row_weight, chosen)

    def _gates(self, index: Tensor, weights: Tensor) -> Tensor:
        """[T, E] of index and weights [..., k]; the number E is none of the experts, as for transformers."""
        index, weights = index.flatten(0, -2), accurate(weights.flatten(0, -2))
        count = self._seen.layer.experts.num_experts
        return weights.new_zeros(len(index), count + 1).scatter_add(1, index, weights)[:, :count]

    def _routing(self, index: Tensor, weights: Tensor, logits: Tensor | None, mask: Tensor | None) -> Routing:
        gates = self._gates(index, weights)
        units, count = gates.shape
        # A choice without a gate is none: Zaya skips a token so.
        selected = gates.detach() != 0
        shape = (*self._shape(), -1)
        rows = gates.new_empty(units, 0) if logits is None else accurate(logits).reshape(units, count)
        gates, selected = gates.reshape(shape), selected.reshape(shape)
        if mask is not None:
            mask = mask.to(gates.device).bool()
            gates = gates.masked_fill(~mask.unsqueeze(-1), 0)
            selected = selected & mask.unsqueeze(-1)
        return Routing(rows.reshape(*shape[:2], rows.shape[-1]), gates, selected, mask)

    def extent(self) -> tuple[int, int]:
        self._seen.require_backward()
        return self._shape()

    def _factors(self) -> dict[str, Factors]:
        seen = self._seen
        seen.require_backward()
        if seen.hidden is not None and seen.before is not None:
            seen.require_unchanged()
            assert seen.x is not None
            assert seen.weights is not None
            assert seen.delta is not None
            arguments = seen.x, seen.weights, seen.hidden, seen.before, seen.delta
            return self._shaped(read(seen.layer.experts, *arguments))
        return self._shaped(seen.recompute() if seen.made is None else seen.made)

    def _shaped(self, found: dict[str, Factors]) -> dict[str, Factors]:
        rows, _ = self._shape()
        return {slot: _by_rows(found[slot], rows) for slot in self.template()}


def _by_rows(factors: Factors, rows: int) -> Factors:
    """Factors of tokens, [T, ...] or [T, k, ...], as [rows, terms, ...]."""
    left, right = factors
    return Factors(
        left.reshape(rows, -1, left.shape[-1]),
        None if right is None else right.reshape(rows, -1, right.shape[-1]),
    )


def _jitters(router: nn.Module) -> bool:
    """Phi-MoE: its sparse mixer samples the experts in training."""
    return hasattr(router, "router_jitter_noise") and "sparsemixer" in (
        inspect.unwrap(type(router).forward).__code__.co_names
    )


def _is_normalised(values: Tensor) -> bool:
    """Whether every row is of probabilities: no logits of more than one token are."""
    total = accurate(values).sum(-1)
    return values.shape[-1] > 1 and bool((values >= 0).all() & ((total - 1).abs() < ROUNDED).all())


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _same(found: Tensor, weights: Tensor) -> bool:
    return found.shape == weights.shape and torch.equal(found.to(weights.dtype), weights)


def _place(
    values: tuple[Any, ...], fits: Any, but: tuple[int | None, ...] = (), first: Tensor | None = None
) -> int | None:
    """Where the first tensor that ``fits`` stands; the very tensor ``first`` before all others."""
    for i, value in enumerate(values):
        if first is not None and value is first:
            return i
    places = (i for i, v in enumerate(values) if isinstance(v, Tensor) and i not in but and fits(v))
    return next(places, None)
