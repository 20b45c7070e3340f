"""Columns that several tables of the evidence share."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from gar.metrics import METRICS, Metric
from gar.report._table import Cell, Table, interval, shown
from gar.report.verdict import POINTS, Paired

SHOWN = ("load_variance", "utilization", "gradient_mass_purity", "nmi", "task_cosine")

RHO = Metric("rho", "Spearman's correlation", digits=2, bounds=(-1, 1))

Part = str | Table


def gain_columns(found: Paired) -> dict[str, Any]:
    """A difference in accuracy."""
    return {
        "difference, pp": shown(POINTS, found.mean, sign=True),
        "95 % interval": interval(POINTS, found.low, found.high, sign=True),
    }


def gain_text(found: Paired) -> str:
    """A difference and its interval in one cell of a table."""
    low_to_high = interval(POINTS, found.low, found.high, sign=True).text
    return f"{shown(POINTS, found.mean, sign=True).text} {low_to_high}"


def accuracy_of(runs: pd.DataFrame, name: str = "accuracy") -> Cell:
    """The mean over runs; ``name``: the macro accuracy, or one of :func:`accuracies_of`."""
    return shown(METRICS["accuracy"], mean_of(runs, name))


def routing_columns(runs: pd.DataFrame) -> dict[str, Any]:
    """Means of the metrics of routing."""
    return {METRICS[name].label: shown(METRICS[name], mean_of(runs, name)) for name in SHOWN}


def mean_of(rows: pd.DataFrame, name: str) -> float:
    return float(rows[name].mean()) if name in rows and rows[name].notna().any() else math.nan


def values_of(column: pd.Series[float]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(set(column.dropna())))


def accuracies_of(runs: pd.DataFrame) -> list[str]:
    """The columns ``accuracy.TASK`` that these runs have."""
    return [str(n) for n in runs if str(n).startswith("accuracy.") and runs[n].notna().any()]
