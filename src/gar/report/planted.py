"""Runs on planted mixtures: who finds the known groups, over strength, experts and coefficient.

    table = planted.frame(gar.results("runs/"))    # a line a run
    for part in planted.families(table):
        planted.figure(part), planted.endpoints(part)

Unlike the rest of the report this puts settings side by side. A *family* agrees in all but strength, experts
and method; each axis of its figure varies one of them around a *centre*, the strength and the number of
experts that most of its runs have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gar.methods import REFERENCE, REGISTRY, from_config, label_of
from gar.metrics import METRICS, Metric, holm, t_test
from gar.report import _grouping as grouping
from gar.report._numbers import mean_interval
from gar.report._style import INK, Panels, slug, styles, title
from gar.report._table import Row, Table, interval, shown
from gar.report.results import Results
from gar.report.verdict import POINTS
from gar.runs import Run

#: What the figure shows, from above; what else a line holds.
DRAWN = ("recovery", "cluster_mixing", "accuracy")
#: The metrics whose differences are shown beside accuracy's.
COMPARED = ("recovery",)
MEASURED = (*DRAWN, "recovery_chance", "recovery_ceiling", "nmi", "load_variance", "intra_expert_coherence")
#: What the figure shows, in words.
SAID = (
    "recovery of the known groups, mixing and accuracy over each thing that was varied; marks: means over "
    "seeds, bars: 95 % t intervals. Recovery: the dotted line is the ceiling, the dashed one what tasks "
    "dealt at random exceed once in twenty times; dash-dotted: Baseline."
)
AXES = ("strength", "experts", "coefficient")
#: What a family agrees in.
FAMILY = ("site", "top_k", "clusters", "tasks_per_cluster", "data_seed", "updates")
CELL = ["strength", "experts", "name"]
COLUMNS = [*FAMILY, *CELL, "method", "coefficient", "default", "learning_rate", "seed", *MEASURED]


def frame(results: Results) -> pd.DataFrame:
    """A line for every finished run on a planted mixture, repeated seeds once; empty where there is none.

    ``default`` says whether the method has its default hyper-parameters; ``name`` is its label, with the
    coefficient where it has another one.
    """
    lines = [
        _line(run)
        for run in results.counted["run"]
        if run.config["mixture"].get("planted") and "recovery" in run.result["routing"]
    ]
    return pd.DataFrame(lines, columns=COLUMNS).sort_values([*FAMILY, *CELL, "seed"], ignore_index=True)


def _line(run: Run) -> dict[str, Any]:
    config, method, name = run.config, dict(run.config["method"]), grouping.method_of(run)
    planted, experts, optimizer = config["mixture"]["planted"], config["experts"], config["optimizer"]
    usual = from_config(name).to_config() if name in REGISTRY else method
    changed = {key: value for key, value in method.items() if value != usual.get(key)}
    said = ", ".join(f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}"
                     for key, value in changed.items())  # fmt: skip
    return {
        "site": experts["site"],
        "top_k": experts["top_k"],
        "clusters": planted["clusters"],
        "tasks_per_cluster": planted["tasks_per_cluster"],
        "data_seed": planted["seed"],
        "updates": run.result["updates"],
        "strength": planted["strength"],
        "experts": experts["count"],
        "name": label_of(name) + (f" ({said})" if said else ""),
        "method": name,
        # Only what differs in the coefficient alone is a point of its axis.
        "coefficient": method.get("coefficient", math.nan) if changed.keys() <= {"coefficient"} else math.nan,
        "default": not changed,
        "learning_rate": optimizer["learning_rate"],
        "seed": grouping.seed_of(run),
        **{metric: METRICS[metric].read(run.result) for metric in MEASURED},
    }


def families(table: pd.DataFrame) -> list[pd.DataFrame]:
    """The lines of each family, the one with the most runs first."""
    found = [part for _, part in table.groupby(list(FAMILY), dropna=False)]
    return sorted(found, key=len, reverse=True)


def family_name(part: pd.DataFrame) -> str:
    """What a family is, in words."""
    first = part.iloc[0]
    return (
        f"{first.site}, top-{first.top_k}, {first.clusters} clusters of {first.tasks_per_cluster} tasks, "
        f"texts {first.data_seed}"
    )


class Line(NamedTuple):
    """A method along one axis: the rows of every point."""

    label: str
    method: str
    points: dict[float, pd.DataFrame]


def lines(part: pd.DataFrame, axis: str) -> list[Line]:
    """The methods of a family that have two points or more along an axis."""
    strength, experts = part.groupby(["strength", "experts"]).size().idxmax()
    rows = part
    if axis != "strength":
        rows = rows[rows["strength"] == strength]
    if axis != "experts":
        rows = rows[rows["experts"] == experts]
    rows = rows[rows["default"]] if axis != "coefficient" else rows[rows["coefficient"].notna()]
    found = [
        Line(label_of(str(name)), str(name), {float(x): at for x, at in own.groupby(axis)})
        for name, own in rows.groupby("method")
    ]
    order = {name: rank for rank, name in enumerate(REGISTRY)}
    found = sorted(found, key=lambda line: order.get(line.method, len(order)))
    return [line for line in found if len(line.points) > 1]


def figure(part: pd.DataFrame) -> Figure | None:
    """Recovery, mixing and accuracy of one family over each axis; None where nothing was varied.

    Marks are means over seeds, bars 95 % t intervals. In the panels of recovery the dotted line is the
    ceiling, the dashed one what dealing the tasks at random exceeds once in twenty times (the runs' mean).
    """
    drawn = {axis: found for axis in AXES if (found := lines(part, axis))}
    if not drawn:
        return None
    names = dict.fromkeys((line.label, line.method) for found in drawn.values() for line in found)
    names |= dict.fromkeys([(label_of(REFERENCE), REFERENCE)])
    look = styles(list(names))
    panels = Panels(len(DRAWN) * len(drawn), len(drawn), 3.5, 2.3)
    cells = iter(panels.axes)
    for name in DRAWN:
        metric = METRICS[name]
        for axis, found in drawn.items():
            axes = next(cells)
            place = _scale(axes, axis, sorted({x for line in found for x in line.points}))
            for number, line in enumerate(found):
                shift = 0.05 * (number - (len(found) - 1) / 2)
                _draw(axes, line, metric, place, shift, look[line.label])
            if name == "recovery":
                _bounds(axes, found, place)
            if axis == "coefficient":
                _reference(axes, part, found, metric, look)
            title(axes, f"{metric.label}{metric.unit and ', ' + metric.unit}", axis)
    handles = [Line2D([], [], markersize=6, **look[label]) for label, _ in names]
    panels.legend(handles, [label for label, _ in names], most=3 * len(drawn))
    return panels.figure


def _scale(axes: Axes, axis: str, values: list[float]) -> Callable[[float], float]:
    """Points stand at equal distances, whatever their values."""
    axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    axes.set_xlim(-0.4, len(values) - 0.6)
    return lambda value: float(values.index(value))


def _draw(
    axes: Axes,
    line: Line,
    metric: Metric,
    place: Callable[[float], float],
    shift: float,
    style: Mapping[str, Any],
) -> None:
    found = [mean_interval(metric.scale * rows[metric.name]) for rows in line.points.values()]
    means, lows, highs = (np.array(column) for column in zip(*found, strict=True))
    error = np.nan_to_num(np.stack([means - lows, highs - means]))
    at = [place(x) + shift for x in line.points]
    drawn = axes.errorbar(at, means, error, **style, markersize=4, linewidth=1.1, capsize=1.5, elinewidth=0.8)
    for number, artist in enumerate([drawn.lines[0], *drawn.lines[1], *drawn.lines[2]]):
        artist.set_gid(f"series:{slug(line.label)}:{metric.name}:{number}")


def _bounds(axes: Axes, found: list[Line], place: Callable[[float], float]) -> None:
    for name, dashes in (("recovery_ceiling", ":"), ("recovery_chance", "--")):
        points: dict[float, list[float]] = {}
        for line in found:
            for x, rows in line.points.items():
                points.setdefault(x, []).extend(rows[name])
        level = {x: float(np.mean(values)) for x, values in sorted(points.items())}
        axes.plot(list(map(place, level)), list(level.values()), dashes, color=INK, linewidth=1, alpha=0.7)


def _reference(
    axes: Axes, part: pd.DataFrame, found: list[Line], metric: Metric, look: Mapping[str, Mapping[str, Any]]
) -> None:
    """The reference, which has no coefficient, as a level."""
    strength, experts = found[0].points[next(iter(found[0].points))][["strength", "experts"]].iloc[0]
    rows = part[(part["method"] == REFERENCE) & part["default"]]
    rows = rows[(rows["strength"] == strength) & (rows["experts"] == experts)]
    if len(rows):
        style = look[label_of(REFERENCE)]
        level = metric.scale * rows[metric.name].mean()
        axes.axhline(level, color=style["color"], linestyle="-.", linewidth=0.9)


def endpoints(part: pd.DataFrame) -> Table:
    """A family's cells: accuracy and recovery, their paired differences from the reference, the bounds."""
    rows = []
    for (strength, experts), cell in part.groupby(["strength", "experts"]):
        base = _by_seed(cell[(cell["method"] == REFERENCE) & cell["default"]])
        where = f"{strength:g}, {experts}"
        for name, own in _ordered(cell):
            values = _by_seed(own)
            compared = base if base is not None and own["method"].iloc[0] != REFERENCE else None
            contents: dict[str, Any] = {"strength, experts": where, "method": name, "seeds": len(own)}
            for key in (*COMPARED, "accuracy"):
                contents |= _compared(METRICS[key], values, compared)
            for key in ("cluster_mixing", "recovery_chance", "recovery_ceiling"):
                contents[METRICS[key].label] = shown(METRICS[key], float(own[key].mean()))
            rows.append(Row(contents, (name,), where))
    notes = [
        "Differences are paired by seed, over the seeds that both have; intervals are 95 % t intervals, "
        "nominal: not corrected for their number.",
    ]
    return Table("planted", f"Known groups: {family_name(part)}", rows, notes, absent=("tex",))


def tuned(part: pd.DataFrame) -> Table:
    """A family at one strength and number of experts, every method with hyper-parameters of its own.

    Paired differences from the reference with 95 % t intervals and the p-values of the paired t-tests,
    adjusted by Holm's method for the number of methods, in recovery and in accuracy apart.
    """
    base = _by_seed(part[part["method"] == REFERENCE])
    found = [(own, _by_seed(own)) for _, own in _ordered(part)]
    rows = [
        {
            "method": label_of(own["method"].iloc[0]),
            "chosen": ", ".join([f"learning_rate={own['learning_rate'].iloc[0]:.3g}", *_own(own)]),
            "seeds": len(own),
        }
        for own, _ in found
    ]
    for key in (*COMPARED, "accuracy"):
        against = [None if own["method"].iloc[0] == REFERENCE else base for own, _ in found]
        chances = [_chance(key, values, other) for (_, values), other in zip(found, against, strict=True)]
        for row, (_, values), other, p in zip(rows, found, against, holm(chances), strict=True):
            metric = METRICS[key]
            row |= _compared(metric, values, other)
            row[f"{metric.short or metric.label}: p, Holm"] = "–" if math.isnan(p) else f"{p:.2g}"
    for row, (own, _) in zip(rows, found, strict=True):
        row[METRICS["cluster_mixing"].label] = shown(
            METRICS["cluster_mixing"], float(own["cluster_mixing"].mean())
        )
    count = sum(other is not None for other in against)
    notes = [
        "Differences are paired by seed; intervals are 95 % t intervals, nominal. p: paired t-tests, "
        f"adjusted by Holm's method for {count} methods, recovery and accuracy apart.",
    ]
    named = [Row(row, (str(row["method"]),), "") for row in rows]
    return Table("planted-tuned", f"Chosen by search: {family_name(part)}", named, notes, absent=("tex",))


def _own(rows: pd.DataFrame) -> list[str]:
    """The hyper-parameters that a method's name in a table tells."""
    name = str(rows["name"].iloc[0]).removeprefix(label_of(rows["method"].iloc[0]))
    return [name.strip(" ()")] if name else []


def _chance(key: str, values: pd.DataFrame | None, base: pd.DataFrame | None) -> float:
    """The p-value of a paired t-test; none without a reference, or where nothing differs."""
    if values is None or base is None:
        return math.nan
    return t_test((values[key] - base[key]).dropna())


def _ordered(cell: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    order = {name: rank for rank, name in enumerate(REGISTRY)}
    ranks = cell.assign(rank=cell["method"].map(order).fillna(len(order)))
    for _, own in ranks.groupby(["rank", "method", "coefficient", "name"], dropna=False):
        yield str(own["name"].iloc[0]), own


def _by_seed(rows: pd.DataFrame) -> pd.DataFrame | None:
    """By seed; None without rows. Runs of one seed, as of several learning rates, are averaged."""
    return rows.groupby("seed")[list(MEASURED)].mean() if len(rows) else None


def _compared(metric: Metric, values: pd.DataFrame | None, base: pd.DataFrame | None) -> dict[str, Any]:
    assert values is not None
    points = POINTS if metric.name == "accuracy" else metric
    unit, apart = (f", {metric.unit}" if metric.unit else ""), (f", {points.unit}" if points.unit else "")
    key = f"{metric.label}{unit}"
    found = {key: shown(metric, float(values[metric.name].mean()))}
    difference = (math.nan, math.nan, math.nan)
    if base is not None:
        difference = mean_interval((values[metric.name] - base[metric.name]).dropna())
    return found | {
        f"{key} − {label_of(REFERENCE)}{apart if apart != unit else ''}": shown(
            points, difference[0], sign=True
        ),
        f"{metric.short or metric.label}: 95 % interval": interval(points, *difference[1:], sign=True),
    }
