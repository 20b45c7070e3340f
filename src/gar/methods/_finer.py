"""Rows of an update that are examples or tokens in place of groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gar.nn import Factors
from gar.observation import Unit, UnitRows

if TYPE_CHECKING:
    from gar.methods.update import Share


@dataclass(frozen=True)
class UnitChoice:
    """Which units of one pass are rows: ``chosen`` int64 [N], numbers of the pass's counted examples or
    tokens in their order; ``tasks`` int64 [N] are those of the rows.
    """

    unit: Unit
    chosen: Tensor
    tasks: Tensor


def spread_rows(share: Share, own: UnitRows | None, device: torch.device) -> UnitRows:
    """All ranks' rows in the update's order, on every rank; one without groups has None.

    What travels is N times the widths of the slots. Ranks pad their examples to different lengths: terms
    that a rank does not have are zero.
    """
    assert share.units is not None
    said = None
    if own is not None:
        kept = {slot: (left.shape[1], right is not None) for slot, (left, right) in own.factors.items()}
        said = own.unit, kept
    told = [each for each in share.ranks.collect(said) if each is not None]
    unit, slots = told[0]
    terms = {slot: max(each[slot][0] for _, each in told) for slot in slots}
    padded = None if own is None else own.with_terms(terms)

    def whole(slot: str, side: int) -> Tensor:
        return share.rows(None if padded is None else padded.factors[slot][side], device, share.units)

    factors = {
        slot: Factors(whole(slot, 0), whole(slot, 1) if paired else None)
        for slot, (_, paired) in slots.items()
    }
    return UnitRows(unit, torch.arange(share.units.count, device=device), factors)
