"""The balance loss of transformers, layer by layer."""

from __future__ import annotations

from torch import Tensor

from gar.errors import UserError
from gar.routing import Routing


def balance_loss(*routings: Routing) -> Tensor:
    """``E sum_e f_e P_e``, a scalar: one layer's load-balancing loss over all valid tokens of ``routings``.

    ``f_e`` is how many of a token's k choices fall on e, ``P_e`` the softmax over all experts, both averaged
    over tokens; balanced experts give k. Formula: Switch Transformer (arXiv 2101.03961, equations 4 to 6)
    with k choices, ``load_balancing_loss_func`` of transformers, which pools all layers where this is one.

    Several routings are the micro-batches of one update: the loss is that of their union. Only ``P`` has a
    gradient; routings of :meth:`SiteObservation.detached_routing` let it reach the router alone.
    """
    if not routings:
        raise UserError("balance_loss: expected the routing of at least one forward")
    if not all(routing.logits.shape == routing.gates.shape for routing in routings):
        raise UserError("balance_loss: the router returns no logits; the loss needs their softmax")
    chosen, mass = routings[0].gates.new_zeros(2, routings[0].gates.shape[-1]).unbind()
    tokens = chosen.new_zeros(())
    for routing in routings:
        valid = chosen.new_ones(routing.gates.shape[:-1]) if routing.mask is None else routing.mask.to(chosen)
        valid = valid.flatten()
        tokens = tokens + valid.sum()
        chosen = chosen + valid @ routing.selected.flatten(0, -2).to(chosen)
        mass = mass + valid @ routing.logits.softmax(-1).flatten(0, -2).to(chosen)
    # Without a valid token both are zero, and so is the loss.
    return len(chosen) * (chosen @ mass) / tokens.square().clamp(min=1)
