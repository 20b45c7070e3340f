"""LoRA of PEFT on the stacked parameters of experts (``LoraConfig(target_parameters=...)``).

PEFT puts a wrapper around the experts for every targeted parameter, one inside the other, and adds
``scaling * B_e A_e`` to the weight of expert e during the forward. All experts' A are one matrix [E r, in],
expert after expert, and all their B one [out, r E], rank after rank (``ParamWrapper`` in PEFT's
``tuners/lora/layer.py``). Nothing is imported from PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gar.errors import UserError

SUPPORTED = (
    "supported are one active LoRA adapter of PEFT with target_parameters of the experts, and adapters "
    "beside the experts"
)


@dataclass(frozen=True)
class Adapter:
    """One LoRA adapter on the stacked parameter ``slot``; ``a`` and ``b`` as PEFT stores them.

    The weight of an expert gets ``scale`` times ``B A`` if A is ``on_inputs``, else times ``(B A)^T``.
    """

    slot: str
    name: str
    a: nn.Parameter
    b: nn.Parameter
    scale: float
    experts: int
    on_inputs: bool

    def sides(self, a_near: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both matrices of all experts as [E, ..., r]; A first or last."""
        a = self.a.detach().unflatten(0, (self.experts, -1)).mT.to(dtype)
        b = self.b.detach().unflatten(1, (-1, self.experts)).permute(2, 0, 1).to(dtype)
        return (a, b) if a_near else (b, a)

    @property
    def slots(self) -> tuple[str, str]:
        """The names of A and B in the template."""
        return f"{self.slot}.lora_A", f"{self.slot}.lora_B"

    def parameters(self) -> dict[str, tuple[nn.Parameter, Callable[[Tensor], Tensor]]]:
        """By name: A and B, and how their gradients are summed over experts, to [r, ...] and [..., r]."""
        a, b = self.slots
        return {
            a: (self.a, lambda grad: grad.unflatten(0, (self.experts, -1)).sum(0)),
            b: (self.b, lambda grad: grad.unflatten(1, (-1, self.experts)).sum(2)),
        }


def adapters_of(kind: str, experts: Any, slots: Sequence[str], wrappers: Sequence[Any]) -> dict[str, Adapter]:
    """The adapter that takes part in the forward, for every parameter that has one; or a refusal.

    A merged or disabled adapter takes no part: then the experts' own weights are the template.
    """
    found: dict[str, Adapter] = {}
    for wrapper in wrappers:
        if not all(hasattr(wrapper, part) for part in ("parameter_name", "lora_A", "lora_B", "scaling")):
            raise UserError(f"{kind} is inside an adapter of the type {type(wrapper).__name__}; {SUPPORTED}")
        active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        if wrapper.disable_adapters or wrapper.merged or not active:
            continue
        slot = wrapper.parameter_name
        if len(active) > 1:
            raise UserError(f"{kind} has {len(active)} active adapters ({', '.join(active)}); {SUPPORTED}")
        (name,) = active
        if slot not in slots or getattr(experts, slot).dim() != 3 or wrapper.num_experts < 2:
            raise UserError(
                f"{kind} has an adapter on {slot}, which is no stack of matrices [E, ...]; {SUPPORTED}"
            )
        if getattr(wrapper, "lora_variant", {}).get(name) is not None or wrapper.use_dora.get(name):
            raise UserError(f"{kind} has an adapter that is no plain LoRA (such as DoRA); {SUPPORTED}")
        if not isinstance(wrapper.lora_dropout[name], nn.Identity):
            raise UserError(f"{kind} has an adapter with dropout; {SUPPORTED}")
        swapped = bool(getattr(wrapper, "_did_swap_in_out_features", False))
        found[slot] = Adapter(
            slot,
            name,
            wrapper.lora_A[name].weight,
            wrapper.lora_B[name].weight,
            float(wrapper.scaling[name]),
            wrapper.num_experts,
            swapped != bool(experts.is_transposed),
        )
    return found
