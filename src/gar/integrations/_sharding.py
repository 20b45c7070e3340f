"""Parameters that FSDP2 has cut over the ranks: a router whole again, and gradients cut as it is."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from gar.errors import UserError


def whole_parameters(module: nn.Module) -> dict[str, nn.Parameter] | None:
    """Copies of a module's parameters, whole on every rank; None where none is sharded.

    An exchange: all ranks call it together.
    """
    if any(isinstance(inner, FSDPModule) for inner in module.modules()):
        raise UserError(
            f"FSDP wraps a router ({type(module).__name__}) apart from its layer: the routers' objective "
            "cannot be added there; expected decoder layers in fsdp_config's transformer_layer_cls_to_wrap"
        )
    named = dict(module.named_parameters())
    if not any(isinstance(parameter, DTensor) for parameter in named.values()):
        return None
    return {
        name: nn.Parameter(
            (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach(),
            requires_grad=parameter.requires_grad,
        )
        for name, parameter in named.items()
    }


def placed(grad: Tensor, parameter: nn.Parameter) -> Tensor:
    """A gradient that every rank has whole, as the parameter lies: of a sharded one this rank's part."""
    if not isinstance(parameter, DTensor):
        return grad
    return distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
