"""Rows of an update that are examples or tokens in place of groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gar.distributed import Layout, Ranks
from gar.nn import Factors
from gar.observation import Unit, UnitRows


@dataclass(frozen=True)
class UnitChoice:
    """Which units of one pass are rows: ``chosen`` int64 [N], numbers of the pass's counted examples or
    tokens in their order; ``tasks`` int64 [N] are those of the rows.
    """

    unit: Unit
    chosen: Tensor
    tasks: Tensor


def spread_rows(
    own: UnitRows | None,
    layout: Layout,
    ranks: Ranks,
    gather: Callable[[Tensor | None], Tensor],
    device: torch.device,
) -> UnitRows:
    """All ranks' rows in the update's order, on every rank; one without groups has None.

    ``gather`` brings the own part of a tensor's rows together with those of others. What travels is N times
    the widths of the slots. Ranks pad their examples to different lengths: terms that a rank does not have
    are zero.
    """
    said = None
    if own is not None:
        kept = {slot: (left.shape[1], right is not None) for slot, (left, right) in own.factors.items()}
        said = own.unit, kept
    told = [each for each in ranks.collect(said) if each is not None]
    unit, slots = told[0]
    terms = {slot: max(each[slot][0] for _, each in told) for slot in slots}
    padded = None if own is None else own.with_terms(terms)

    def whole(slot: str, side: int) -> Tensor:
        return gather(None if padded is None else padded.factors[slot][side])

    factors = {
        slot: Factors(whole(slot, 0), whole(slot, 1) if paired else None)
        for slot, (_, paired) in slots.items()
    }
    return UnitRows(unit, torch.arange(layout.count, device=device), factors)
