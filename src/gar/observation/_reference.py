"""The slow, obviously right way to group gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gar.errors import UserError
from gar.nn import RoutedExperts
from gar.objective import accurate
from gar.observation._native_layout import Summed, bank_parameters, is_native_bank
from gar.precision import float32_products


def per_group_gradients(group_losses: Tensor, bank: nn.Module) -> Tensor:
    """The same [M, d] by M separate autograd calls on ``group_losses`` [M]; the graph is left whole.

    ``bank`` is one of ``gar.nn``'s or an experts module of transformers: ``site.bank`` of an observation.
    """
    found: dict[str, Summed]
    if isinstance(bank, RoutedExperts):
        found = {slot: (getattr(bank.experts, slot), _over_experts) for slot in bank.experts.slots}
    elif is_native_bank(bank):
        found = bank_parameters(bank)
    else:
        raise UserError(f"per_group_gradients: {type(bank).__name__} is no expert bank; pass site.bank")
    parameters, sums = zip(*found.values(), strict=True)
    if not all(parameter.requires_grad for parameter in parameters):
        raise UserError("per_group_gradients: these experts are frozen; observe gives their gradients")
    rows: list[Tensor] = []
    with float32_products(group_losses.device):
        for loss in group_losses.unbind():
            grads = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([own(accurate(g)).flatten() for own, g in zip(sums, grads, strict=True)]))
    return torch.stack(rows)


def _over_experts(grad: Tensor) -> Tensor:
    return grad.sum(0)
