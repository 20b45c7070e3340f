"""In which order an implementation of transformers hands pairs of a token and an expert to the activation.

Where it is known, the activation's result and the gradient of its input are read as they come; elsewhere they
are recomputed. An implementation is known by the lines of its source that make the order, so that neither a
later release nor one of the user's own under the same name is taken for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

#: Implementation: what its source holds where the order is as :func:`places` has it.
_LINES = {
    "batched_mm": ("hidden_states.repeat_interleave(num_top_k, dim=0)",),
    "grouped_mm": ("expert_ids_g, perm = torch.sort(expert_ids)", "hidden_states[perm // num_top_k]"),
}
_BOTH = (
    "expert_ids = top_k_index.reshape(-1)",
    "proj_out = self._apply_gate(proj_out)",
    "proj_out = self.act_fn(proj_out)",
)


def known(experts: Any) -> str | None:
    """The name of the implementation that the experts run with, if its order of pairs is known."""
    name = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    functions = getattr(sys.modules.get("transformers.integrations.moe"), "ALL_EXPERTS_FUNCTIONS", {})
    if name not in _LINES or name not in functions or "forward" in vars(experts):
        return None
    return name if _has_lines(functions[name], name) and _dispatches(type(experts).forward) else None


@lru_cache
def _has_lines(function: Callable[..., Any], name: str) -> bool:
    if hasattr(function, "__wrapped__"):
        return False  # the source would be that of what is wrapped
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return False
    return all(line in source for line in (*_BOTH, *_LINES[name]))


@lru_cache
def _dispatches(forward: Any) -> bool:
    """Whether a class takes its implementation from transformers' own table, not one of quantised experts."""
    moe = sys.modules["transformers.integrations.moe"]
    cells = getattr(forward, "__closure__", None) or ()
    return any(cell.cell_contents is getattr(moe, "ALL_EXPERTS_FUNCTIONS", moe) for cell in cells)


def places(name: str, index: Tensor) -> Tensor | None:
    """Where each pair of a flattened ``index`` [T, k] stands, int64 [T k]; None: they stand in that order."""
    if name == "batched_mm":
        return None
    order = torch.sort(index.reshape(-1))[1]  # as the implementation sorts, ties included
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order), device=order.device)
    return found


def saves_elsewhere() -> bool:
    """Whether saved tensors are packed (checkpointing, offloading): then nothing large should be kept."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


class Replaced:
    """An attribute of one instance, replaced until :meth:`remove`: no other instance sees it."""

    def __init__(self, module: Any, name: str, value: Any) -> None:
        self._module, self._name = module, name
        self._before = {key: v for key, v in vars(module).items() if key == name}
        vars(module)[name] = value

    def remove(self) -> None:
        vars(self._module).pop(self._name, None)
        vars(self._module).update(self._before)
