"""The slow, obviously right way to group gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from gar.nn import RoutedExperts
from gar.objective import accurate
from gar.precision import float32_products


def per_group_gradients(group_losses: Tensor, bank: RoutedExperts) -> Tensor:
    """The same [M, d] by M separate autograd calls on ``group_losses`` [M]; the graph is left whole."""
    parameters = [getattr(bank.experts, slot) for slot in bank.experts.slots]
    rows: list[Tensor] = []
    with float32_products(group_losses.device):
        for loss in group_losses.unbind():
            grads = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([accurate(grad).sum(0).flatten() for grad in grads]))
    return torch.stack(rows)
