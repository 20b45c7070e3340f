"""Baseline: the task loss alone."""

from __future__ import annotations

from typing import ClassVar

from gar.methods.base import Method


class Baseline(Method):
    """``L_task`` only (section 5 of the specification; the paper's Baseline)."""

    name: ClassVar[str] = "baseline"
    label: ClassVar[str] = "Baseline"
    style: ClassVar[tuple[str, str] | None] = ("ink", "o")
    capturable: ClassVar[bool] = True
    compared: ClassVar[bool] = True
    reference: ClassVar[bool] = True
