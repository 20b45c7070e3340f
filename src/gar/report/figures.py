"""Figures of a loaded result set, as matplotlib figures.

    results = gar.results("runs/")
    figures.paired_gains(results)

Each function draws one setting - named, or the only one there is. Where the runs hold nothing for it, it
raises :class:`NothingToDraw`, which says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from gar.errors import one_of
from gar.evaluation.findings import BALANCED, INFORMATION
from gar.methods import label_of
from gar.metrics import METRICS, OBJECTIVES, Metric
from gar.metrics.catalogue import listed
from gar.report import _grouping as grouping
from gar.report._choose import NothingToDraw, looks, scope_of, setting_of
from gar.report._experts import (
    conflict,
    conflict_matrices,
    heatmaps,
    load_heatmap,
    loads,
    task_expert_heatmap,
)
from gar.report._style import INK, Panels, dress, plain, slug, title
from gar.report._tables import factor
from gar.report.results import Results, Scope

__all__ = [
    "FIGURES",
    "NothingToDraw",
    "balance",
    "coefficient_sweep",
    "conflict",
    "conflict_matrices",
    "heatmaps",
    "load_heatmap",
    "loads",
    "paired_gains",
    "step_times",
    "task_expert_heatmap",
    "trajectories",
]


#: Points of a loss curve: so many windows of updates, each a mean.
WINDOWS = 60
LOSS = "loss"


def trajectories(
    results: Results,
    setting: str | None = None,
    scope: str | None = None,
    metrics: Sequence[str] | None = None,
    highlighted: Sequence[str] | None = None,
) -> Figure:
    """A panel a metric over training: means over seeds, and bands of one standard error of several seeds.

    ``metrics`` are names of listed metrics, and ``loss``, the training loss, of which every point is the mean
    of a window of updates (default: the loss, and those of the catalogue that are drawn). Mixtures are
    averaged within a seed first. Only updates at which every seed and mixture of a variant was evaluated are
    drawn. The ``highlighted`` variants (:meth:`Results.compared`) have strong lines; the dotted line is the
    accuracy of always answering the most frequent label.
    """
    known = listed()
    wanted = [LOSS, *(m.name for m in known.values() if m.drawn)] if metrics is None else list(metrics)
    if unknown := [name for name in wanted if name not in (LOSS, *known)]:
        raise one_of("metric", unknown[0], [LOSS, *known])
    setting, where = scope_of(results, setting, scope)
    strong = results.compared(setting) if highlighted is None else list(highlighted)
    curves: dict[str, dict[str, pd.DataFrame]] = {}
    width = 1
    if LOSS in wanted:
        width, curves[LOSS] = _losses(results, setting, where)
    lines = {v: _trajectory(results, setting, where, v) for v in results.variants(setting)}
    if any(len(line) > 1 for line in lines.values()):
        lines = {variant: line for variant, line in lines.items() if len(line)}
        for name in wanted:
            if name != LOSS and any(line[name].notna().any(axis=None) for line in lines.values()):
                curves[name] = {v: METRICS[name].scale * line[name] for v, line in lines.items()}
    shown = [name for name in wanted if curves.get(name)]
    if not shown:
        raise NothingToDraw("no evaluations during training; runs with evaluation.every=200 have them")
    look = {v: _weighted(style, v in strong) for v, style in looks(results, setting).items()}
    panels = Panels(len(shown), 4, 2.75, 2.2, extra=1)
    for axes, name in zip(panels.axes, shown, strict=True):
        for variant, curve in curves[name].items():
            style = {**look[variant], "markersize": 0 if name == LOSS else 3}
            (drawn,) = axes.plot(curve.index, curve["mean"], **style)
            drawn.set_gid(f"series:{slug(variant)}:line")
            if curve["sem"].notna().all():
                low, high = curve["mean"] - curve["sem"], curve["mean"] + curve["sem"]
                color, alpha = style["color"], 0.18 if variant in strong else 0.06
                band = axes.fill_between(curve.index, low, high, color=color, alpha=alpha, lw=0)
                band.set_gid(f"series:{slug(variant)}:band")
        if name == "accuracy":
            _majority(axes, results, setting, where)
        means = f", means of {width} updates" if width > 1 else ""
        title(axes, f"training loss{means}" if name == LOSS else _heading(METRICS[name]), "update")
    _legend(panels, look, [v for v in look if any(v in curves[name] for name in shown)])
    return panels.figure


def _weighted(style: dict[str, Any], strong: bool) -> dict[str, Any]:
    """The compared variants' lines lie above the others'."""
    return {**style, "linewidth": 2.0, "zorder": 3} if strong else {**style, "linewidth": 0.9, "alpha": 0.6}


def _majority(axes: Axes, results: Results, setting: str, scope: Scope) -> None:
    """The line of always answering the most frequent label, where the runs tell."""
    level = METRICS["accuracy"].scale * results.majority(setting, scope)
    if math.isnan(level):
        return
    axes.axhline(level, color=INK, linestyle=":", linewidth=1).set_gid("majority")
    axes.text(0.99, level, "majority class", transform=axes.get_yaxis_transform(), ha="right", va="bottom",
              fontsize=7, color=INK)  # fmt: skip


def paired_gains(
    results: Results, setting: str | None = None, metric: str = "accuracy", common_seeds: bool = False
) -> Figure:
    """Paired differences with 95 % t intervals, seeds as dots; one seed is a hollow mark, no interval."""
    setting = setting_of(results, setting)
    table = results.comparisons(metric, common_seeds)
    table = table[table["setting"] == setting]
    if table.empty:
        raise NothingToDraw("no two methods to compare")
    shown, unit = METRICS[metric], "percentage points" if metric == "accuracy" else METRICS[metric].label
    pairs = list(dict.fromkeys(zip(table["a"], table["b"], strict=True)))
    scopes = list(dict.fromkeys(table["scope"]))
    panels = Panels(len(scopes), 3, 3.6, 0.9 + 0.24 * len(pairs), sharey=True, sharex=True)
    look = looks(results, setting)
    for axes, scope in zip(panels.axes, scopes, strict=True):
        axes.axvline(0, color=INK, linewidth=0.8)
        for row in table[table["scope"] == scope].itertuples():
            y = pairs.index((row.a, row.b))
            style = look[row.a if row.b in results.references(setting) else row.b]
            _interval(axes, row, y, shown.scale, style)
        title(axes, scope, unit)
        _names(axes, [f"{a} − {b}" for a, b in pairs])
        axes.tick_params(labelbottom=True, labelleft=True)
    return panels.figure


#: What the quadrants of :func:`balance` are called: from the left, from below.
QUADRANTS = (
    ("few experts, mixed", "few experts, specialised"),
    ("balanced\nbut mixed", "balanced and\nspecialised"),
)


def balance(results: Results, setting: str | None = None, scope: str | None = None) -> Figure:
    """Balanced is not specialised: experts in effect against purity above floor, and against NMI.

    A method's mark is at its mean over seeds, filled with the colour of its accuracy; crosses are its seeds.
    An arrow leads along the coefficient where a method has several. The dashed lines are where ``gar
    diagnose`` begins to speak of balance and of specialisation.
    """
    setting, where = scope_of(results, setting, scope)
    across, measures = METRICS["effective_experts"], (METRICS["purity_above_floor"], METRICS["nmi"])
    names = ["accuracy", across.name, *(metric.name for metric in measures)]
    found = {
        variant: table
        for variant in results.variants(setting)
        if len(table := results.by_seed(setting, where, variant)[names].dropna())
    }
    if not found:
        raise NothingToDraw("the results hold no loads and gradient norms")
    look, means = looks(results, setting), {variant: table.mean() for variant, table in found.items()}
    accuracies = [100 * mean["accuracy"] for mean in means.values()]
    color = ScalarMappable(
        Normalize(min(accuracies), max(max(accuracies), min(accuracies) + 0.01)), "viridis"
    )
    panels = Panels(len(measures), 3, 3.5, 3.3, extra=1)
    for axes, metric in zip(panels.axes, measures, strict=True):
        every = pd.concat(list(found.values()))
        low, high = every[metric.name].min(), every[metric.name].max()
        # All four fields are in sight, and no more of their room than the marks need.
        left, top = (
            min(BALANCED - 0.2, every[across.name].min() - 0.05),
            max(INFORMATION[1] + 0.2, 1.1 * high),
        )
        axes.set(xlim=(max(0.0, left), 1.03), ylim=(min(0.0, 1.1 * low) - 0.02, min(1.04, top)))
        _quadrants(axes, BALANCED, INFORMATION[1])
        for curve in _curves(results, setting).values():
            path = [
                means[variant][[across.name, metric.name]] for variant in curve.values() if variant in means
            ]
            for start, stop in pairwise(path):
                arrow = {"arrowstyle": "->", "color": INK, "linewidth": 0.8, "alpha": 0.6}
                axes.annotate("", tuple(stop), tuple(start), arrowprops=arrow)
        for variant, table in found.items():
            style, own = look[variant], means[variant]
            (seeds,) = axes.plot(
                table[across.name], table[metric.name], "x", color=style["color"], markersize=4, alpha=0.6
            )
            (mark,) = axes.plot(
                [own[across.name]], [own[metric.name]], style["marker"], markersize=9, markeredgewidth=1.6,
                markerfacecolor=color.to_rgba(100 * own["accuracy"]), markeredgecolor=style["color"],
            )  # fmt: skip
            for number, artist in enumerate((seeds, mark)):
                artist.set_gid(f"series:{slug(variant)}:{number}")
        title(axes, "", f"{across.label}, share of all ({across.arrow} better)")
        axes.set_ylabel(_heading(metric), fontsize=8)
    bar = panels.figure.colorbar(color, ax=panels.axes[-1], fraction=0.05)
    dress(bar.ax)
    bar.ax.grid(visible=False)
    bar.set_label("accuracy, %", fontsize=8, color=INK)
    handles = [
        Line2D([], [], marker=look[v]["marker"], linestyle="none", markersize=7, markerfacecolor="none",
               markeredgecolor=look[v]["color"]) for v in found
    ]  # fmt: skip
    panels.legend(handles, list(found))
    return panels.figure


def _quadrants(axes: Axes, across: float, up: float) -> None:
    """Four named fields, divided at these places."""
    axes.axvline(across, color=INK, linestyle="--", linewidth=0.8, alpha=0.5)
    axes.axhline(up, color=INK, linestyle="--", linewidth=0.8, alpha=0.5)
    for column, names in enumerate(QUADRANTS):
        for name, high in zip(names, (False, True), strict=True):
            x, y = (0.98 if column else 0.02), (1.0 if high else up - 0.02)
            across_of = axes.transAxes if high else axes.get_yaxis_transform()
            axes.text(x, y, name, transform=across_of, va="top", ha="right" if column else "left", fontsize=7,
                      style="italic", color=INK, alpha=0.7)  # fmt: skip


def coefficient_sweep(results: Results, setting: str | None = None, scope: str | None = None) -> Figure:
    """Accuracy, purity, utilization and load variance over the coefficient; bars of one standard error.

    A curve joins variants that differ in nothing else. Coefficient 0 stands apart at the left of the axis;
    Baseline is the dashed line.
    """
    setting, where = scope_of(results, setting, scope)
    curves = _curves(results, setting)
    if not curves:
        raise NothingToDraw("no method has runs with more than one coefficient")
    look, lowest = looks(results, setting), min(c for curve in curves.values() for c in curve if c > 0)
    zero = 10.0 ** (math.floor(math.log10(lowest)) - 1)
    panels = Panels(len(OBJECTIVES), 5, 2.2, 2.6, extra=1)
    handles: dict[str, Any] = {}
    for axes, metric in zip(panels.axes, (METRICS[name] for name in OBJECTIVES.values()), strict=True):

        def by_seed(variant: str, metric: Metric = metric) -> pd.Series[float]:
            return metric.scale * results.values(metric.name, setting, where, variant)

        for label, curve in curves.items():
            style = {**look[next(iter(curve.values()))], "linestyle": "-"}
            points = {c or zero: by_seed(variant) for c, variant in curve.items()}
            means, errors = [v.mean() for v in points.values()], [v.sem() for v in points.values()]
            bars = axes.errorbar(list(points), means, errors, **style, markersize=4, linewidth=1.3, capsize=2)
            handles.setdefault(label, bars)
            for at, values in points.items():
                axes.plot([at] * len(values), values, ".", color=style["color"], alpha=0.4, markersize=4)
        if metric.name == "accuracy":
            _majority(axes, results, setting, where)
        for base in results.references(setting):
            level = by_seed(base).mean()
            handles.setdefault(base, axes.axhline(level, color=INK, linestyle="--", linewidth=1))
        axes.set_xscale("log")
        coefficients = sorted({c for curve in curves.values() for c in curve})
        axes.set_xticks([c or zero for c in coefficients], [f"{c:g}" for c in coefficients], rotation=45)
        axes.set_xticks([], minor=True)
        title(axes, _heading(metric), "coefficient")
    panels.legend(list(handles.values()), list(handles))
    return panels.figure


def step_times(results: Results, setting: str | None = None) -> Figure:
    """Mean time of an update in milliseconds, a dot a run; the number is the factor over Baseline's mean."""
    setting = setting_of(results, setting)
    mixtures, variants = results.mixtures(setting), results.variants(setting)
    rows = results.counted[results.counted["setting"] == setting].dropna(subset="step_seconds")
    if rows.empty:
        raise NothingToDraw("the results hold no timing")
    look = looks(results, setting)
    panels = Panels(len(mixtures), 3, 3.6, 0.9 + 0.24 * len(variants), sharey=True)
    for axes, mixture in zip(panels.axes, mixtures, strict=True):
        inside = rows[rows["mixture"] == mixture]
        base = inside[inside["variant"].isin(results.references(setting))]["step_seconds"].mean()
        for y, variant in enumerate(variants):
            times = inside[inside["variant"] == variant]["step_seconds"]
            if times.empty:
                continue
            milliseconds = 1000 * times
            axes.barh(y, milliseconds.mean(), height=0.6, color=look[variant]["color"], alpha=0.35)
            axes.plot(milliseconds, [y] * len(times), marker=".", linestyle="none", color=INK, markersize=5)
            if not math.isnan(base):
                axes.annotate(factor(times.mean() / base).text, (milliseconds.max(), y), (6, 0), va="center",
                              textcoords="offset points", fontsize=8, color=INK)  # fmt: skip
        title(axes, mixture, "time per update, ms")
        _names(axes, variants)
        axes.tick_params(labelleft=True)
        axes.margins(x=0.18)
        axes.set_xlim(left=0)
    return panels.figure


def _interval(axes: Axes, row: Any, y: int, scale: float, style: dict[str, Any]) -> None:
    mean, low, high = (scale * getattr(row, key) for key in ("mean", "low", "high"))
    if math.isnan(mean):
        axes.text(0.98, y, "not compared", transform=axes.get_yaxis_transform(), ha="right", va="center",
                  fontsize=7, style="italic", color=INK)  # fmt: skip
        return
    color, marker = style["color"], style["marker"]
    seeds = [scale * value for value in row.differences.values()]
    (dots,) = axes.plot(
        seeds, [y + 0.28] * len(seeds), marker=".", linestyle="none", color=color, markersize=4, alpha=0.7
    )
    artists = [dots]
    if not math.isnan(low):
        artists += axes.plot([low, high], [y, y], color=color, linewidth=2, solid_capstyle="butt")
    face = color if not math.isnan(low) else "none"
    artists += axes.plot([mean], [y], marker=marker, color=color, markersize=6, markerfacecolor=face)
    for number, artist in enumerate(artists):
        artist.set_gid(f"series:{slug(row.a)} {slug(row.b)}:{y}:{number}")


def _trajectory(results: Results, setting: str, scope: Scope, variant: str) -> pd.DataFrame:
    """Mean and standard error over seeds by update; columns (metric, mean | sem)."""
    table = results.histories
    table = table[(table["setting"] == setting) & (table["variant"] == variant)]
    table = table[table["mixture"].isin(scope.mixtures)]
    groups = table.groupby(["update", "seed"])
    by_seed = groups[list(listed())].mean()[groups.size() == len(scope.mixtures)]
    counts = by_seed.groupby("update").size()
    kept = counts.index[counts == table["seed"].nunique()]
    return by_seed[by_seed.index.isin(kept, level="update")].groupby("update").agg(["mean", "sem"])


def _losses(results: Results, setting: str, scope: Scope) -> tuple[int, dict[str, pd.DataFrame]]:
    """Updates in a window; by variant mean and standard error over seeds of the training loss in each.

    The index is the last update of a window. Mixtures are averaged within a seed first; windows that a seed
    or a mixture of the variant lacks are left out, and so are runs without a history.
    """
    rows = results.counted[results.counted["setting"] == setting]
    rows = rows[rows["mixture"].isin(scope.mixtures)]
    curves = {run: run.losses for run in rows["run"]}
    longest = max((int(updates.max()) for updates, _ in curves.values() if len(updates)), default=1)
    width = -(-longest // WINDOWS)
    found: dict[str, pd.DataFrame] = {}

    def ends(updates: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.minimum(-(-updates // width) * width, longest)

    for variant in results.variants(setting):
        here = rows[rows["variant"] == variant]
        parts = [
            pd.DataFrame({"seed": seed, "update": ends(updates), "loss": losses})
            .groupby(["update", "seed"])
            .mean()
            for seed, (updates, losses) in zip(
                here["seed"], (curves[run] for run in here["run"]), strict=True
            )
        ]
        if not parts:
            continue
        groups = pd.concat(parts)["loss"].groupby(["update", "seed"])
        by_seed = groups.mean()[groups.size() == len(scope.mixtures)]
        counts = by_seed.groupby("update").size()
        kept = counts.index[counts == by_seed.index.get_level_values("seed").nunique()]
        curve = by_seed[by_seed.index.isin(kept, level="update")].groupby("update").agg(["mean", "sem"])
        if len(curve) > 1:
            found[variant] = curve
    return width, found


def _curves(results: Results, setting: str) -> dict[str, dict[float, str]]:
    """``{label: {coefficient: variant}}`` of methods with several coefficients, all else being equal."""
    found: dict[tuple[str, str], dict[float, str]] = {}
    rows = results.counted[results.counted["setting"] == setting]
    for run, variant in zip(rows["run"], rows["variant"], strict=True):
        values = grouping.hyperparameters(run)
        coefficient = values.pop("coefficient", None)
        if isinstance(coefficient, int | float):
            rest = ", ".join(f"{key}={value}" for key, value in values.items())
            found.setdefault((grouping.method_of(run), rest), {})[float(coefficient)] = variant
    found = {key: dict(sorted(curve.items())) for key, curve in found.items() if len(curve) > 1}
    methods = [method for method, _ in found]
    return {
        label_of(method) + ("" if methods.count(method) == 1 else f" ({rest})"): curve
        for (method, rest), curve in found.items()
    }


def _names(axes: Axes, names: Sequence[str]) -> None:
    """One name a line, from the top."""
    axes.set_yticks(range(len(names)), list(map(plain, names)))
    axes.set_ylim(len(names) - 0.4, -0.6)


def _legend(
    panels: Panels,
    look: dict[str, dict[str, Any]],
    variants: Sequence[str],
    filled: dict[str, bool] | None = None,
) -> None:
    handles = []
    for variant in variants:
        style = dict(look[variant])
        if filled is not None:
            style |= {"linestyle": "none", "markerfacecolor": style["color"] if filled[variant] else "none"}
        handles.append(Line2D([], [], markersize=6, **style))
    panels.legend(handles, list(variants))


def _heading(metric: Metric) -> str:
    """Label, unit, and which direction is the better one."""
    unit, better = metric.unit and f", {metric.unit}", metric.arrow and f" ({metric.arrow} better)"
    return f"{metric.label}{unit}{better}"


_ALL = (
    balance,
    trajectories,
    loads,
    task_expert_heatmap,
    conflict,
    paired_gains,
    coefficient_sweep,
    step_times,
)
FIGURES: dict[str, Callable[..., Figure]] = {function.__name__: function for function in _ALL}
