"""From whatever the caller holds to checked NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from torch import Tensor

Values: TypeAlias = "ArrayLike | Tensor"
"""Anything ``numpy.asarray`` takes, or a torch tensor of any dtype on any device."""

Floats: TypeAlias = NDArray[np.float64]

SUM_TOLERANCE = 1e-2  # a bfloat16 distribution sums to 1 within 0.002


def array(values: Any) -> NDArray[Any]:
    """``values`` as a NumPy array; tensors are detached, moved to the host and read without loss."""
    if isinstance(values, (list, tuple)) and values and hasattr(values[0], "detach"):
        values = [array(v) for v in values]
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    return np.asarray(values)


def real(values: Any, name: str, *axes: str) -> Floats:
    """``values`` in float64 with these axes, none of them empty, every entry finite."""
    host = array(values)
    check_shape(host, name, *axes)
    out: Floats = host.astype(np.float64)
    broken = int((~np.isfinite(out)).sum())
    if broken:
        raise ValueError(f"{name} must be finite, got {broken} NaN or infinite entries")
    return out


def non_negative(values: Any, name: str, *axes: str) -> Floats:
    """As :func:`real`, and no entry below zero."""
    out = real(values, name, *axes)
    if (out < 0).any():
        raise ValueError(f"{name} must not be negative, got {out.min():g}")
    return out


def distributions(values: Any, name: str, *axes: str) -> Floats:
    """As :func:`non_negative`, and the last axis sums to 1 or, where nothing was routed, to 0."""
    out = non_negative(values, name, *axes)
    totals = out.sum(-1)
    wrong = (totals != 0) & (np.abs(totals - 1) > SUM_TOLERANCE)
    if wrong.any():
        raise ValueError(
            f"{name} must sum to 1 over the experts (or to 0 where nothing was routed), "
            f"got {totals[wrong].flat[0]:g}; divide counts by their total first"
        )
    return out


def whole_counts(values: Any) -> list[list[int]]:
    """A contingency table [T, E] as Python integers, which do not overflow."""
    host = array(values)
    check_shape(host, "counts", "T", "E")
    rows = host.tolist()
    for row in rows:
        for e, n in enumerate(row):
            if n < 0 or n != n or n == float("inf") or n != int(n):
                raise ValueError(f"counts must be whole numbers and not negative, got {n!r}")
            row[e] = int(n)
    return rows  # type: ignore[no-any-return]


def check_shape(host: Any, name: str, *axes: str) -> None:
    """Refuse another number of axes, and empty ones. ``host`` may also be a tensor."""
    if host.ndim != len(axes) or 0 in host.shape:
        raise ValueError(f"{name} must be [{', '.join(axes)}] and not empty, got shape {tuple(host.shape)}")
