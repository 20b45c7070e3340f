"""The figures of the evidence's page, by file name; each None where nothing of it was run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gar.methods import PROPOSED, REFERENCE, REGISTRY
from gar.metrics import METRICS
from gar.report._style import INK, Panels, title
from gar.report.evidence import (
    APART,
    COEFFICIENTS,
    OTHERS,
    PREDICTORS,
    Cell,
    Evidence,
    gains,
    label,
)

#: Metrics whose bounds are 0 and 1, or nearly, drawn over training.
DRAWN = ("accuracy", "load_variance", "nmi", "task_cosine")


def _look(method: str) -> tuple[str | None, str]:
    style = REGISTRY[method].style if method in REGISTRY else None
    color, marker = style or ("#8c8c8c", "*")
    return (INK if color == "ink" else color), marker


def draw_coefficients(evidence: Evidence) -> Figure | None:
    cells = [c for c in evidence.cells([COEFFICIENTS]) if "gar-0" in evidence.methods(c)]
    if not cells:
        return None
    panels = Panels(len(cells), 2, 3.6, 2.6)
    for axes, cell in zip(panels.axes, cells, strict=True):
        suite = evidence.suites[COEFFICIENTS]
        methods = [m for m in evidence.methods(cell) if m in suite.methods(*cell) and m != "gar-0"]
        found = [evidence.difference("accuracy", cell, method, "gar-0") for method in methods]
        x = [float(method.removeprefix("gar-")) for method in methods]
        axes.axhline(0, color=INK, linewidth=0.8)
        error = [[100 * (f.mean - f.low) for f in found], [100 * (f.high - f.mean) for f in found]]
        axes.errorbar(
            x, [100 * f.mean for f in found], yerr=np.nan_to_num(error), fmt="D", color=_look(PROPOSED)[0]
        )
        axes.set_xscale("log")
        axes.set_ylabel("pp of accuracy", fontsize=8)
        title(axes, ", ".join(cell), "coefficient")
    return panels.figure


def draw_trajectories(evidence: Evidence) -> Figure | None:
    cells = list(evidence.cells(s for s in evidence.suites if s not in APART))
    lines: dict[tuple[Cell, str], pd.DataFrame] = {}
    points = evidence.points.assign(run=evidence.points["id"].astype(str))
    for cell in cells:
        for method in evidence.methods(cell):
            rows = evidence.rows(*cell, method).reset_index()
            inside = points[points["run"].isin(rows["id"])]
            if len(inside):
                ends = rows.rename(columns={"updates": "update"})
                both = pd.concat([inside, ends], ignore_index=True)
                lines[cell, method] = both.groupby("update")[[n for n in DRAWN if n in both]].mean()
    shown_cells = [cell for cell in cells if any(key[0] == cell for key in lines)]
    if not shown_cells:
        return None
    panels = Panels(len(shown_cells) * len(DRAWN), len(DRAWN), 2.75, 2.2)
    drawn: dict[str, object] = {}
    for number, axes in enumerate(panels.axes):
        cell, metric = shown_cells[number // len(DRAWN)], METRICS[DRAWN[number % len(DRAWN)]]
        for (where, method), line in lines.items():
            if where == cell and metric.name in line:
                color, marker = _look(method)
                (handle,) = axes.plot(
                    line.index,
                    metric.scale * line[metric.name],
                    color=color,
                    marker=marker,
                    markersize=3,
                    linewidth=1.2,
                )
                drawn.setdefault(label(method), handle)
        title(axes, f"{', '.join(cell)}: {metric.label}", "update")
    panels.legend(list(drawn.values()), list(drawn))
    return panels.figure


def draw_balance(evidence: Evidence) -> Figure | None:
    names = ("load_variance", "gradient_mass_purity", "nmi")
    cells = list(evidence.cells(s for s in evidence.suites if s not in APART))
    marks = [
        (method, [evidence.difference(n, cell, method, REFERENCE).mean for n in (*names, "accuracy")])
        for cell in cells
        for method in evidence.methods(cell)
        if method != REFERENCE
    ]
    marks = [(method, values) for method, values in marks if np.isfinite(values).all()]
    if not marks:
        return None
    panels = Panels(len(names), 3, 2.9, 2.6)
    drawn: dict[str, object] = {}
    for i, (axes, name) in enumerate(zip(panels.axes, names, strict=True)):
        for method, values in marks:
            color, marker = _look(method)
            (handle,) = axes.plot(
                values[i], 100 * values[-1], color=color, marker=marker, linestyle="none", markersize=5
            )
            drawn.setdefault(label(method), handle)
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_ylabel("accuracy, pp", fontsize=8)
        title(axes, f"change of {METRICS[name].label}", "difference from Baseline")
    panels.legend(list(drawn.values()), list(drawn))
    return panels.figure


def draw_conflict(evidence: Evidence) -> Figure | None:
    methods = [method for method in OTHERS if (PREDICTORS[0], None) in gains(evidence, method).predictors]
    if not methods:
        return None
    panels = Panels(len(methods), 2, 3.8, 2.8)
    for axes, method in zip(panels.axes, methods, strict=True):
        found = gains(evidence, method)
        color, marker = _look(method)
        x = found.predictors[PREDICTORS[0], None]
        axes.plot(
            x, [100 * gain for gain in found.gain], color=color, marker=marker, linestyle="none", markersize=4
        )
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_ylabel("gain, pp", fontsize=8)
        title(axes, f"{label(method)} − Baseline", "cosine between tasks under Baseline")
    return panels.figure


FIGURES: Mapping[str, Callable[[Evidence], Figure | None]] = {
    "coefficients": draw_coefficients,
    "trajectories": draw_trajectories,
    "balance": draw_balance,
    "conflict": draw_conflict,
}
