"""Group gradients of one module's parameters from its input and its output's gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gar.nn import Experts
from gar.nn.bank import add_product
from gar.nn.head import LinearHeads
from gar.objective import accurate
from gar.observation._grouping import Grouping
from gar.routing import Router


class Rows:
    """The gradients [M, P] of the groups of one pass, filled parameter by parameter; one may come twice.

    ``places`` are the columns of every parameter, ``out`` may lie on another device than the gradients.
    """

    def __init__(self, out: Tensor, places: dict[nn.Parameter, slice], grouping: Grouping) -> None:
        self.out, self.places, self.grouping = out, places, grouping
        self.written: set[nn.Parameter] = set()

    def view(self, parameter: nn.Parameter) -> Tensor:
        """[M, *shape], as it is in memory."""
        return self.out[:, self.places[parameter]].view(len(self.out), *parameter.shape)

    def room(self, parameter: nn.Parameter) -> Tensor:
        """The same to be added to: zeros where nothing was written yet."""
        view = self.view(parameter)
        if parameter not in self.written:
            self.written.add(parameter)
            view.zero_()
        return view

    def add(self, parameter: nn.Parameter, gradients: Tensor) -> None:
        """``gradients`` [M, *shape]."""
        view = self.view(parameter)
        if parameter in self.written:
            view += gradients.to(view.device)
        else:
            self.written.add(parameter)
            view.copy_(gradients)

    def add_product(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """``sum_i left_i right_i^T`` over the units of each group: [B, ..., p] and [B, ..., q]."""
        view = self.view(parameter)
        if view.device != left.device:
            self.add(parameter, self.product(left, right))
            return
        add_product(view, self.units(left), self.units(right), beta=int(parameter in self.written))
        self.written.add(parameter)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """The same [M, p, q], for no parameter in particular."""
        left, right = self.units(left), self.units(right)
        found = self.out.new_empty(len(left), left.shape[-1], right.shape[-1], device=left.device)
        add_product(found, left, right, beta=0)
        return found

    def add_sum(self, parameter: nn.Parameter, values: Tensor) -> None:
        """The sum over the units of each group of [B, ..., *shape] (one axis)."""
        self.add(parameter, self.units(values).sum(1, dtype=self.out.dtype))

    def units(self, values: Tensor) -> Tensor:
        """[B, ..., p] as [M, n, p]: the units of each group, padded with zeros."""
        return self.grouping.gather(values).flatten(1, -2)


#: Adds a module's gradients to the rows, from its input [B, ...] and the gradient of its output [B, ...], and
#: whatever else it was called with.
Factorization = Callable[..., None]


def _linear(module: nn.Module, x: Tensor, grad: Tensor, rows: Rows, *_: Any) -> None:
    own = dict(module.named_parameters(recurse=False))
    if own["weight"] in rows.places:
        rows.add_product(own["weight"], grad, x.to(grad.dtype))  # autocast rounded the input alike
    if (bias := own.get("bias")) is not None and bias in rows.places:
        rows.add_sum(bias, grad)


def _heads(heads: LinearHeads, x: Tensor, grad: Tensor, rows: Rows, names: Sequence[str]) -> None:
    own = heads.of(names)
    weights, sums = rows.product(grad, x.to(grad.dtype)), rows.units(grad).sum(1, dtype=rows.out.dtype)
    sizes = [head.out_features for head in own]
    for head, weight, bias in zip(own, weights.split(sizes, 1), sums.split(sizes, 1), strict=True):
        for parameter, gradients in zip(head.parameters(), (weight, bias), strict=True):
            if parameter in rows.places:
                rows.add(parameter, gradients)


def _embedding(module: nn.Module, x: Tensor, grad: Tensor, rows: Rows, *_: Any) -> None:
    assert isinstance(module, nn.Embedding)
    (weight,) = module.parameters(recurse=False)
    padding = -1 if module.padding_idx is None else module.padding_idx
    indices, grads = rows.grouping.gather(x).flatten(1), rows.units(accurate(grad))
    first, tables = weight not in rows.written, rows.view(weight)
    for table, index, values in zip(tables, indices, grads, strict=True):
        # What autograd itself calls: a scatter would be slow, or undeterministic, where tokens recur.
        own = torch.ops.aten.embedding_dense_backward(values, index, len(weight), padding, False)
        if first:
            table.copy_(own)
        else:
            table += own.to(table.device)
    rows.written.add(weight)


def _norm(module: nn.Module, x: Tensor, grad: Tensor, rows: Rows, *_: Any) -> None:
    """``y = weight f(x) + bias``; the module itself says what f(x) is."""
    own = dict(module.named_parameters(recurse=False))
    grad = accurate(grad)
    if (weight := own.get("weight")) is not None and weight in rows.places:
        neutral = {name: torch.full_like(p, float(name == "weight")) for name, p in own.items()}
        normalized: Tensor = torch.func.functional_call(module, neutral, (accurate(x),))
        rows.add_sum(weight, grad * normalized)
    if (bias := own.get("bias")) is not None and bias in rows.places:
        rows.add_sum(bias, grad)


def factorization(module: nn.Module) -> Factorization | None:
    """How the module's own parameters get their gradients from its input and output gradient, if they do.

    Those of linear heads count as their container's own, too.
    """
    kind = type(module)
    if isinstance(module, LinearHeads):
        return _heads
    if isinstance(module, Router) and kind.forward is Router.forward:
        return _linear
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        return _linear
    if isinstance(module, nn.Embedding) and kind.forward is nn.Embedding.forward:
        plain = not module.sparse and not module.scale_grad_by_freq and module.max_norm is None
        return _embedding if plain else None
    own = dict(module.named_parameters(recurse=False))
    if kind.__name__.endswith("Norm") and own.keys() <= {"weight", "bias"}:
        return _norm if all(p.dim() == 1 for p in own.values()) else None
    return None


def knows_its_experts(module: nn.Module) -> bool:
    """Whether these are a bank's experts that give the group gradients of each (:meth:`add_gradients`)."""
    return (
        isinstance(module, Experts)
        and module.hidden_module is not None
        and type(module).add_gradients is not Experts.add_gradients
    )
