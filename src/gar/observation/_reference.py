"""The slow, obviously right way to group gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gar.errors import UserError
from gar.nn import RoutedExperts
from gar.objective import accurate
from gar.observation._native import is_native, native_slots
from gar.precision import float32_products


def per_group_gradients(group_losses: Tensor, bank: nn.Module) -> Tensor:
    """The same [M, d] by M separate autograd calls on ``group_losses`` [M]; the graph is left whole.

    ``bank`` is one of ``gar.nn``'s or an experts module of transformers: ``site.bank`` of an observation.
    """
    if isinstance(bank, RoutedExperts):
        parameters = [getattr(bank.experts, slot) for slot in bank.experts.slots]
    elif is_native(bank):
        parameters = [getattr(bank, slot) for slot in native_slots(bank)]
    else:
        raise UserError(f"per_group_gradients: {type(bank).__name__} is no expert bank; pass site.bank")
    if not all(parameter.requires_grad for parameter in parameters):
        raise UserError("per_group_gradients: these experts are frozen; observe gives their gradients")
    rows: list[Tensor] = []
    with float32_products(group_losses.device):
        for loss in group_losses.unbind():
            grads = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([accurate(grad).sum(0).flatten() for grad in grads]))
    return torch.stack(rows)
