"""Where the MoE layers of transformers are inside a model, how their parameters lie, and what is refused."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from gar.errors import UserError
from gar.observation._native_lora import Adapter, adapters_of

#: What the decorator of transformers puts on an instance.
FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
SUPPORTED = "supported are layers of transformers' experts interface with a sibling `gate` or `router`"
ROUTERS = ("gate", "router")
#: What transformers' own implementations call their arguments.
NAMES = ("hidden_states", "top_k_index", "top_k_weights")


def is_native(module: nn.Module) -> bool:
    """Whether a module has the experts interface of transformers."""
    return all(hasattr(module, flag) for flag in FLAGS)


def native_slots(experts: nn.Module) -> tuple[str, ...]:
    """The names of an expert's parameters in the order of the template."""
    up: str = "gate_up_proj" if experts.has_gate else "up_proj"
    return (up, f"{up}_bias", "down_proj", "down_proj_bias") if experts.has_bias else (up, "down_proj")


@dataclass(frozen=True)
class Layer:
    """One MoE layer of transformers inside a model: ``bank`` is what the block calls, at the path ``name``.

    ``experts`` is the bank, or inside of it where adapters are around (``wrappers``, the inner one first).
    """

    name: str
    bank: nn.Module
    experts: Any
    block: nn.Module
    wrappers: tuple[nn.Module, ...] = ()
    #: FSDP shards it: weights are whole during its forward and its backward alone.
    sharded: bool = False

    #: What its forward calls its arguments, as far as it says so.
    names: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """For messages."""
        return f"{self.name or 'the module'} ({type(self.experts).__name__})"

    def adapters(self) -> dict[str, Adapter]:
        """The adapters that take part in a forward, by the parameter that they are on."""
        return adapters_of(self.kind, self.experts, native_slots(self.experts), self.wrappers)

    def arguments(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[Tensor]:
        """Input [..., H], index and weights [..., k] of a call; their names differ between the families."""
        given = dict(zip(self.names, args, strict=False)) | dict(keywords)
        known = (names for names in (self.names, NAMES) if names and given.keys() >= set(names))
        order = next(known, tuple(given))
        found = [given[name] for name in order[:3]] if keywords else list(args[:3])
        kinds = [isinstance(t, Tensor) and t.dim() > 1 and t.is_floating_point() for t in found]
        if (
            kinds != [True, False, True]
            or not found[0].shape[:-1] == found[1].shape[:-1] == found[2].shape[:-1]
        ):
            raise UserError(
                f"{self.kind} was called with {', '.join(map(_shown, found))}; expected hidden [T, H], index "
                "[T, k] and weights [T, k]"
            )
        return found


def _shown(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the first three arguments, behind decorators too; none where a signature has none."""
    try:
        found = list(inspect.signature(forward).parameters.values())[:3]
    except (TypeError, ValueError):
        return ()
    positional = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in found)
    return tuple(p.name for p in found) if positional and len(found) == 3 else ()


#: A parameter, and how its gradient is summed over experts.
Summed = tuple[nn.Parameter, Callable[[Tensor], Tensor]]


def template_parameters(experts: Any, adapters: Mapping[str, Adapter]) -> dict[str, Summed]:
    """By name, in the order of the template: the adapters', if there are any, else the experts' own."""
    slots = native_slots(experts)
    if adapters:
        both = (adapters[slot].parameters() for slot in slots if slot in adapters)
        return {name: found for of in both for name, found in of.items()}
    return {slot: (getattr(experts, slot), lambda grad: grad.sum(0)) for slot in slots}


def bank_parameters(bank: nn.Module) -> dict[str, Summed]:
    """:func:`template_parameters` of a native bank, as its adapters are now."""
    experts, wrappers = _unwrapped(bank)
    adapters = adapters_of(type(experts).__name__, experts, native_slots(experts), wrappers)
    return template_parameters(experts, adapters)


def is_native_bank(module: nn.Module) -> bool:
    """Whether a module has the experts interface, or adapters around such a one."""
    return is_native(_unwrapped(module)[0])


def _unwrapped(bank: nn.Module) -> tuple[Any, tuple[nn.Module, ...]]:
    """The module inside of all adapters, and these, the inner one first."""
    wrappers: list[nn.Module] = []
    while isinstance(inner := getattr(bank, "base_layer", None), nn.Module):
        wrappers.insert(0, bank)
        bank = inner
    return bank, tuple(wrappers)


def native_banks(module: nn.Module) -> dict[nn.Module, Layer]:
    """The MoE layers of transformers inside a module, by their banks; or a refusal."""
    found: dict[nn.Module, Layer] = {}
    inside = dict(module.named_modules())
    for name, inner in inside.items():
        parent = inside.get(name.rpartition(".")[0])
        if any(name.startswith(f"{layer.name}.") for layer in found.values()):
            continue  # what an adapter keeps beside: originals, copies to train
        experts, wrappers = _unwrapped(inner)
        if is_native(experts):
            sharded, names = _is_sharded(inside, name), _names(experts.forward)
            layer = Layer(name, inner, experts, parent or inner, wrappers, sharded, names)
            refuse(layer)
            found[inner] = layer
        elif _is_foreign(name, inner):
            raise UserError(
                f"{name or 'the module'} ({type(inner).__name__}) has experts of a layout of its own; "
                f"{SUPPORTED}"
            )
    return found


def _is_sharded(inside: Mapping[str, nn.Module], name: str) -> bool:
    """Whether ``fully_shard`` was applied to the module at a path, or to one around it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported for those who have none
    if fsdp is None:
        return False
    parts = name.split(".")
    paths = ["", *(".".join(parts[: n + 1]) for n in range(len(parts)))]
    return any(isinstance(inside.get(path), fsdp.FSDPModule) for path in paths)


def refuse(layer: Layer) -> None:
    """Raise, with the reason, for a layer that cannot be observed."""
    kind, experts, block = layer.kind, layer.experts, layer.block
    if getattr(experts, "_is_expert_parallel", False):
        raise UserError(
            f"{kind} is expert parallel: a rank sees only its own experts; supported are experts that every "
            "rank has (load the model without expert parallelism)"
        )
    if getattr(experts, "_is_hooked", False):
        raise UserError(
            f"{kind} is tensor parallel: a rank sees only parts of its experts; supported are experts that "
            "every rank has (load the model without a plan for its experts)"
        )
    if parametrize.is_parametrized(experts):
        raise UserError(f"{kind} has parametrised weights; supported are plain parameters")
    if getattr(experts, "has_post_expert_norm", False):  # older releases of transformers have no such flag
        raise UserError(f"{kind} has a norm behind every expert; supported are experts without")
    missing = [s for s in native_slots(experts) if not isinstance(getattr(experts, s, None), nn.Parameter)]
    if missing:
        raise UserError(f"{kind} has no parameter {missing[0]}; supported are stacked experts [E, ...]")
    for slot in native_slots(experts):
        weight, dtype = getattr(experts, slot), str(getattr(experts, slot).dtype).removeprefix("torch.")
        if dtype not in ("float16", "bfloat16", "float32", "float64"):
            raise UserError(
                f"{kind} has quantised weights ({slot} is {dtype}); supported are float16, bfloat16, float32 "
                "and float64 (load the model dequantised)"
            )
        if weight.is_meta:
            raise UserError(f"{kind} has no weights here ({slot} is offloaded); supported are loaded experts")
    if not any(isinstance(getattr(block, router, None), nn.Module) for router in ROUTERS):
        raise UserError(f"{kind} has no router beside it; {SUPPORTED}; observe the model, not a part of it")
    adapters = layer.adapters()
    trained = [slot for slot in native_slots(experts) if adapters and getattr(experts, slot).requires_grad]
    if trained:
        raise UserError(
            f"{kind} trains {trained[0]} beside the adapter on {', '.join(adapters)}; "
            "supported is one of both"
        )


def refuse_auxiliary_loss(modules: Sequence[nn.Module], keywords: dict[str, Any] | None = None) -> None:
    """Raise if transformers' own balance loss is in the loss: a later layer's reaches earlier experts."""
    for module in modules:
        for inner in module.modules():
            config = getattr(inner, "config", None)
            config = getattr(config, "text_config", None) or config
            coefficient = getattr(inner, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", 0))
            asked = (keywords or {}).get("output_router_logits")
            on = getattr(config, "output_router_logits", False) if asked is None else asked
            if coefficient and on:
                raise UserError(
                    f"output_router_logits adds the built-in auxiliary loss (router_aux_loss_coef "
                    f"{coefficient}), which reaches earlier experts and is no part of a group's loss; set "
                    "output_router_logits=False and add site.balance_loss(), one a layer"
                )


def _is_foreign(name: str, module: nn.Module) -> bool:
    """Whether a module of transformers routes to experts that are not of the experts interface."""
    inner = getattr(module, "experts", None)
    return (
        type(module).__module__.startswith("transformers.")
        and isinstance(inner, nn.Module)
        and not is_native(inner)
        and not hasattr(inner, "base_layer")
        and any(hasattr(module, router) for router in ROUTERS)
    )
