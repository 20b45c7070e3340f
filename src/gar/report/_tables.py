"""The tables of one setting: endpoints, paired differences, tasks, times, configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean
from typing import Any

import pandas as pd

from gar.config import flat
from gar.metrics import METRICS, OBJECTIVES, Metric, population_std
from gar.metrics.catalogue import listed
from gar.report import _grouping as grouping
from gar.report._numbers import Numbers
from gar.report._table import Cell, Row, Table, interval, shown
from gar.report.verdict import POINTS, side
from gar.runs.reading import Run, seen_name

ACCURACY, STEP = METRICS["accuracy"], METRICS["step_seconds"]
ENDPOINT_TITLES = {
    "accuracy, %": "mean over tasks, then mixtures, then seeds",
    "std, pp": "population standard deviation over seeds",
    "95 % interval, %": "two-sided Student-t interval of the mean over seeds",
    "Pareto": "● no other method is as good in accuracy, purity, utilization and load variance",
}


def endpoints(results: Numbers, setting: str, frame: pd.DataFrame) -> Table:
    """Accuracy with its spread, the other objectives, and the Pareto front, per mixture and method."""
    frame = frame[frame["setting"] == setting]
    lists = frame[frame["seeds"] > 0].groupby("scope", sort=False)["seed_list"].nunique()
    uneven = list(lists[lists > 1].index)
    best = frame["accuracy"] == frame.groupby("scope")["accuracy"].transform("max")
    others = [
        metric for name, metric in listed().items() if name in OBJECTIVES.values() and metric != ACCURACY
    ]
    records = frame.assign(strong=best & ~frame["scope"].isin(uneven)).to_dict("records")
    rows = []
    for row in records:
        contents = {
            "mixture": row["scope"],
            "method": row["variant"],
            "seeds": row["seeds"],
            "accuracy, %": shown(ACCURACY, row["accuracy"]),
            "std, pp": shown(POINTS, row["accuracy_std"]),
            "95 % interval, %": interval(ACCURACY, row["accuracy_low"], row["accuracy_high"]),
            **_values(others, row),
            "Pareto": "●" if row["pareto"] else "",
        }
        rows.append(Row(contents, (row["variant"],), row["scope"], row["strong"]))
    notes = [f"{row['scope']}, {row['variant']}: {row['note']}." for row in records if row["note"]]
    notes += [f"{name}: {mixture} alone, see there." for name, mixture in results.lone_bins(setting).items()]
    like = "methods have different seeds, so neither means nor ● compare like with like"
    notes += [f"{scope}: {like}." for scope in uneven]
    if (frame["seeds"] == 1).any():
        notes.append("One seed says nothing about spread: rows with one seed have no std and no interval.")
    notes.append("Bold: highest mean accuracy of its mixture, which alone is no evidence of a difference.")
    return Table("endpoints", "Endpoints: means over seeds", rows, notes, ENDPOINT_TITLES, True, ("tex",))


def further(setting: str, frame: pd.DataFrame) -> Table:
    """The metrics that are no objectives, one's own among them."""
    others = [metric for name, metric in listed().items() if name not in OBJECTIVES.values()]
    rows = []
    for row in frame[frame["setting"] == setting].to_dict("records"):
        where = {"mixture": row["scope"], "method": row["variant"], "seeds": row["seeds"]}
        rows.append(Row(where | _values(others, row), (row["variant"],), row["scope"]))
    return Table("further", "Further routing metrics: means over seeds", rows, folded=True, absent=("tex",))


def task_accuracies(results: Numbers, setting: str) -> list[Table]:
    """Accuracy of every task, a table a mixture."""
    tables = []
    for index, mixture in enumerate(results.mixtures(setting)):
        cells = {v: cell for v in results.variants(setting) if (cell := results.cell(setting, mixture, v))}
        shares = {
            v: pd.DataFrame([run.result["accuracy"]["tasks"] for run in cell.values()])
            for v, cell in cells.items()
        }
        tasks = dict.fromkeys(task for frame in shares.values() for task in frame)
        rows = [
            Row(
                {"method": v, "seeds": len(frame), **{f"{t}, %": _task_cell(frame.get(t)) for t in tasks}},
                (v,),
            )
            for v, frame in shares.items()
        ]
        caption = f"{mixture}: accuracy by task, mean ± population std over seeds"
        tables.append(Table(f"tasks-{index}", caption, rows, folded=True))
    return tables


def seen(results: Numbers, setting: str) -> list[Table]:
    """What the experts see most, of the first seed with a diagnostics.json; a table a mixture."""
    note = (
        "Tokens (at the head site: tasks and labels) that select the expert more often than others "
        "do, rare ones passed over; one seed, since experts of different seeds do not correspond."
    )
    tables = []
    for index, mixture in enumerate(results.mixtures(setting)):
        rows = []
        for variant in results.variants(setting):
            cell = results.cell(setting, mixture, variant)
            seed, run = next(((seed, run) for seed, run in cell.items() if run.seen), (0, None))
            loads = run.result["routing"].get("load") or () if run else ()
            for e, (load, entries) in enumerate(zip(loads, run.seen if run else (), strict=False)):
                words = ", ".join(f"{seen_name(entry)} ×{entry['lift']:.1f}" for entry in entries)
                contents = {
                    "method": variant,
                    "seed": seed,
                    "expert": e,
                    "load, %": Cell(f"{100 * load:.1f}", load),
                }
                rows.append(Row({**contents, "× over chance": words or "–"}, (variant,), variant))
        if rows:
            caption = f"{mixture}: what each expert sees most"
            tables.append(Table(f"seen-{index}", caption, rows, [note], folded=True, absent=("tex",)))
    return tables


def paired(setting: str, frame: pd.DataFrame, metric: Metric) -> Table:
    """Paired differences over seeds with their intervals."""
    points = POINTS if metric == ACCURACY else metric
    unit = f", {points.unit}" if points.unit else ""
    frame, rows, notes = frame[frame["setting"] == setting], [], []
    for row in frame.to_dict("records"):
        a, b, scope = row["a"], row["b"], row["scope"]
        contents = {
            "mixture": scope,
            "difference": f"{a} − {b}",
            "seeds": row["seeds"],
            f"mean{unit}": shown(points, row["mean"], sign=True),
            f"95 % interval{unit}": interval(points, row["low"], row["high"], sign=True),
            "zero lies": _zero(row["mean"], row["low"], row["high"]),
        }
        rows.append(Row(contents, (a, b), scope))
        if row["note"] and row["note"] != "one seed: no interval":
            notes.append(f"{scope}, {a} − {b}: {row['note']}.")
    if (frame["seeds"] == 1).any():
        notes.append("One seed has no interval, so its difference may be chance alone.")
    if count := int(frame["low"].notna().sum()):
        corrected = f"Nominal intervals, not corrected for the {count} comparisons in this table."
        notes.append(corrected if count > 1 else "Nominal interval.")
    titles = {
        f"95 % interval{unit}": "two-sided Student-t interval over seeds, seeds − 1 degrees of freedom",
        "zero lies": "where zero lies relative to the interval",
    }
    name, caption = f"paired-{metric.name}", f"Paired differences in {metric.label} over the same seeds"
    main = metric == ACCURACY
    return Table("paired" if main else name, caption, rows, notes, titles, True, () if main else ("tex",))


def times(results: Numbers, setting: str) -> Table:
    """Time per update; factors over Baseline where both ran on the same device."""
    rows = []
    for mixture in results.mixtures(setting):
        base: dict[str, float] = {}
        for variant in results.variants(setting):
            runs = results.cell(setting, mixture, variant).values()
            seconds = [value for run in runs if math.isfinite(value := STEP.read(run.result))]
            if not seconds:
                continue
            device, mean = ", ".join(sorted({_device(run) for run in runs})), fmean(seconds)
            if variant in results.references(setting):
                base.setdefault(device, mean)
            contents = {
                "mixture": mixture,
                "method": variant,
                "runs": len(seconds),
                "time per update, ms": shown(STEP, mean),
                "std, ms": shown(STEP, population_std(seconds) if len(seconds) > 1 else math.nan),
                "over Baseline": factor(mean / base.get(device, math.nan)),
                "device": device,
            }
            rows.append(Row(contents, (variant,), mixture))
    note = "Times are those of the training runs; runs that shared a machine slow each other down."
    return Table("times", "Time per update: mean over runs", rows, [note], folded=True)


def configurations(results: Numbers, setting: str) -> Table:
    """What every method ran with, per mixture."""
    rows = []
    for mixture in results.mixtures(setting):
        for variant in results.variants(setting):
            cell = results.cell(setting, mixture, variant)
            for run in list(cell.values())[:1]:
                own = {k: v for k, v in grouping.hyperparameters(run).items() if k != "learning_rate"}
                optimizer = run.config.get("optimizer") or {}
                contents = {
                    "mixture": mixture,
                    "method": variant,
                    "hyper-parameters": ", ".join(f"{key}={value}" for key, value in own.items()) or "none",
                    "learning rate": _number(optimizer.get("learning_rate")),
                    "clip": _number(optimizer.get("clip")),
                    "weight decay": _number(optimizer.get("weight_decay")),
                    "updates": int(run.result.get("updates", 0)),
                    "seeds": ", ".join(map(str, cell)),
                    "preset": ", ".join(sorted({str(r.config.get("preset") or "–") for r in cell.values()})),
                }
                rows.append(Row(contents, (variant,), mixture))
    return Table("configurations", "Configurations", rows, folded=True, absent=("tex",))


def records(results: Numbers, setting: str) -> list[Table]:
    """What all finished runs of a setting share, the software and devices behind them, and their places."""
    runs = [run for run in results.members(setting) if run.result]
    trees = [flat(run.config) for run in runs]
    keys = [key for key in trees[0] if all(tree.get(key) == trees[0][key] for tree in trees)]
    shared = [Row({"key": key, "value": str(trees[0][key])}) for key in keys]
    found = pd.DataFrame(map(_versions, runs)).value_counts(sort=False, dropna=False).reset_index(name="runs")
    versions = list(map(Row, found.to_dict("records")))
    paths = [Row({"run": str(run.path)}) for run in runs]
    return [
        Table("shared", "The same in every run", shared, folded=True, absent=("tex",)),
        Table("versions", "Versions and devices", versions, folded=True, absent=("tex",)),
        Table("directories", "Run directories", paths, folded=True, absent=("md", "tex")),
    ]


def problems(results: Numbers) -> Table:
    """Runs without a result, and why."""
    rows = []
    for run in sorted(results.problems, key=lambda run: (run.state, str(run.path))):
        setting, mixture, variant = results.label(run)
        contents = {
            "state": run.state,
            "run": str(run.path),
            "setting": setting,
            "mixture": mixture,
            "method": variant,
        }
        seed = str(grouping.seed_of(run)) if run.config else "–"
        rows.append(Row({**contents, "seed": seed, "reason": run.reason or "–"}))
    return Table("problems", "Failed, running and unreadable runs", rows)


def factor(value: float) -> Cell:
    """How many times as long as the reference, or a dash."""
    return Cell("–") if math.isnan(value) else Cell(f"×{value:.2f}", value)


def _values(metrics: Iterable[Metric], row: Any) -> dict[str, Cell]:
    return {f"{metric.label} {metric.arrow}".rstrip(): shown(metric, row[metric.name]) for metric in metrics}


def _zero(mean: float, low: float, high: float) -> str:
    """What an interval allows to say about zero."""
    if math.isnan(mean):
        return "not compared"
    if math.isnan(low):
        return "one seed: no interval"
    return ("inside the interval", "below the interval", "above the interval")[side(low, high)]


def _task_cell(shares: pd.Series[float] | None) -> Cell:
    if shares is None:
        return Cell("–")
    values = shares.dropna()
    spread = f" ± {100 * population_std(values):.2f}" if len(values) > 1 else ""
    return Cell(f"{100 * fmean(values):.2f}{spread}", 100 * fmean(values))


def _number(value: Any) -> Cell:
    return Cell(f"{value:g}", float(value)) if isinstance(value, int | float) else Cell("–")


def _versions(run: Run) -> dict[str, str]:
    known = {key: str(run.environment.get(key) or "–") for key in ("gar", "commit", "python", "platform")}
    libraries = ", ".join(f"{key} {value}" for key, value in (run.environment.get("libraries") or {}).items())
    platform = known.pop("platform")
    return {**known, "libraries": libraries or "–", "device": _device(run), "platform": platform}


def _device(run: Run) -> str:
    return str(run.environment.get("device_name") or run.environment.get("device") or "–")
