"""Factors of one expert's template, from what went into the experts and the gradient of what came out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gar.nn import Factors
from gar.observation._native_layout import native_slots
from gar.observation._native_lora import Adapter
from gar.precision import is_reduced


class _Projection:
    """One stacked weight and what the tokens bring to it, added up expert after expert.

    All experts of a token ``share`` one side of its product, [T, ...]: ``up`` the input, else the output's
    gradient. The other side is each expert's ``own``. Summed over experts, ``sum_e own_e share^T`` is one
    product. Of an adapter's two matrices the one on the shared side has one product again, the other takes a
    term an expert.
    """

    def __init__(
        self,
        slot: str,
        weight: Tensor,
        transposed: bool,
        adapter: Adapter | None,
        share: Tensor,
        places: int,
        up: bool,
    ) -> None:
        self.slot, self.weight, self.transposed, self.adapter = slot, weight, transposed, adapter
        self.share, self.up = share, up
        units, width = len(share), weight.shape[1 if up != transposed else 2]
        if adapter is None:
            self.sum = share.new_zeros(units, width)
        else:
            self.near, self.far = adapter.sides(a_near=adapter.on_inputs == up, dtype=share.dtype)
            rank = self.near.shape[-1]
            self.sum = share.new_zeros(units, rank)
            self.own, self.mixed = share.new_zeros(units, places, width), share.new_zeros(units, places, rank)

    def matrix(self, e: int) -> Tensor:
        """The weight [out, in] of expert e."""
        base = self.weight[e].to(self.share.dtype)
        base = base.T if self.transposed else base
        if self.adapter is None:
            return base
        outer, inner = (self.far[e], self.near[e]) if self.up else (self.near[e], self.far[e])
        return torch.addmm(base, outer, inner.T, alpha=self.adapter.scale)

    def add(self, e: int, token: Tensor, place: Tensor, own: Tensor) -> None:
        """What expert e has, ``own`` [n, ...], for the pairs of ``token`` and ``place`` [n]."""
        if self.adapter is None:
            self.sum.index_add_(0, token, own)
            return
        scale = self.adapter.scale
        self.sum.index_add_(0, token, own @ self.far[e], alpha=scale)
        self.own[token, place] = own
        self.mixed[token, place] = scale * (self.share[token] @ self.near[e])

    def factors(self) -> dict[str, Factors]:
        if self.adapter is None:
            own_first = self.up != self.transposed
            pair = (self.sum, self.share) if own_first else (self.share, self.sum)
            return {self.slot: Factors(*pair)}
        near, far = (self.share, self.sum), (self.own, self.mixed)
        a, b = (near, far) if self.adapter.on_inputs == self.up else (far, near)
        a_slot, b_slot = self.adapter.slots
        return {a_slot: Factors(a[1], a[0]), b_slot: Factors(*b)}


def recomputed(
    experts: Any,
    weight: Mapping[str, Tensor],
    adapters: Mapping[str, Adapter],
    x: Tensor,
    index: Tensor,
    gates: Tensor,
    delta: Tensor,
) -> tuple[dict[str, Factors], Tensor]:
    """Factors [T, ...] or, of one term an expert, [T, k, ...] of the template's slots, and what :func:`probe`
    would say of the output.

    ``x`` [T, H], ``index`` and ``gates`` [T, k] are what the experts were called with, ``delta`` [T, H] the
    gradient of what they returned. With ``h = act(W x)`` and the output ``sum_k w_k V h_k``:
    ``dW = (sum_k dpre_k) x^T`` and ``dV = delta (sum_k w_k h_k)^T``, because all experts have one template.
    """
    up, *_ = native_slots(experts)
    down = "down_proj"
    wide = torch.promote_types(torch.promote_types(x.dtype, weight[up].dtype), torch.float32)
    x, gates, delta = x.to(wide), gates.to(wide), delta.to(wide)
    activate = experts._apply_gate if experts.has_gate else experts.act_fn
    transposed, places = experts.is_transposed, index.shape[1]
    first = _Projection(up, weight[up], transposed, adapters.get(up), x, places, up=True)
    second = _Projection(down, weight[down], transposed, adapters.get(down), delta, places, up=False)
    total, told = x.new_zeros(len(x), 1), x.new_zeros(len(x))
    towards = _direction(delta)
    for e in index.unique().tolist():
        if e >= experts.num_experts:
            continue  # as transformers' own loops: such a pair is dropped
        token, place = torch.where(index == e)
        gate = gates[token, place].unsqueeze(1)
        pre = x[token] @ first.matrix(e).T
        if experts.has_bias:
            pre = pre + weight[f"{up}_bias"][e].to(wide)
        with torch.enable_grad():
            pre.requires_grad_()
            h = activate(pre.clone())  # it may work in place
        (grad,) = torch.autograd.grad(h, pre, (gate * delta[token]) @ second.matrix(e))
        first.add(e, token, place, grad)
        second.add(e, token, place, gate * h.detach())
        total.index_add_(0, token, gate)
        seen = h.detach() @ (towards @ second.matrix(e))
        if experts.has_bias:
            seen = seen + weight[f"{down}_bias"][e].to(wide) @ towards
        told.index_add_(0, token, gate.squeeze(1) * seen)
    found = first.factors() | second.factors()
    if experts.has_bias:
        found |= {f"{up}_bias": Factors(first.sum, None), f"{down}_bias": Factors(total * delta, None)}
    return found, told


#: What outputs and recomputed ones may differ by, of their size: half precision, TF32, float32, and float64,
#: of which some families compute parts in float32.
HALF, REDUCED, SINGLE, DOUBLE = 0.1, 0.02, 5e-4, 1e-5


def probe(output: Tensor, *others: Tensor) -> tuple[Tensor, float]:
    """One number [T] of what experts returned [T, H], by which it is known again; how far others may be.

    ``others`` are inputs and weights: what one of them is rounded to, the output is.
    """
    half = (
        torch.is_autocast_enabled(output.device.type)
        or min(t.dtype.itemsize for t in (output, *others)) < torch.float32.itemsize
    )
    reduced = output.dtype == torch.float32 and is_reduced(output.device)
    bound = DOUBLE if output.dtype == torch.float64 else SINGLE
    if half or reduced:
        # What a CPU takes in the place of float32 products is bfloat16.
        bound = REDUCED if output.is_cuda and not half else HALF
    wide = output.to(torch.promote_types(output.dtype, torch.float32)).flatten(0, -2)
    return wide @ _direction(wide), bound


def differ(found: Tensor, told: Tensor, bound: float) -> bool:
    """Whether recomputed values are others than those of :func:`probe`; never where one is not finite."""
    size = torch.maximum(found.norm(), told.norm())
    return bool((found - told).norm() > bound * size)


def _direction(like: Tensor) -> Tensor:
    """A fixed vector [H] without a pattern that outputs could have; the same numbers in any dtype."""
    return torch.arange(1.0, like.shape[-1] + 1, device=like.device).square().cos().to(like.dtype)


def read(
    experts: Any, x: Tensor, gates: Tensor, hidden: Tensor, before: Tensor, delta: Tensor
) -> dict[str, Factors]:
    """The same without adapters, of ``hidden`` and ``before`` that were read: sums over a token's experts."""
    up, *_ = native_slots(experts)
    found = {up: (before, x), "down_proj": (delta, hidden)}
    wide = torch.promote_types(torch.promote_types(x.dtype, before.dtype), hidden.dtype)
    factors = {
        slot: Factors(*(t.to(wide) for t in (pair[::-1] if experts.is_transposed else pair)))
        for slot, pair in found.items()
    }
    if experts.has_bias:
        delta = gates.to(wide).sum(1, keepdim=True) * delta.to(wide)
        factors |= {f"{up}_bias": Factors(before.to(wide), None), "down_proj_bias": Factors(delta, None)}
    return factors
