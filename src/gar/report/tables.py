"""The tables of one setting: endpoints, paired differences, tasks, times, configuration."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pandas as pd

from gar.report import grouping
from gar.report.results import METRICS, Metric, Results, Scope
from gar.report.table import Cell, Column, Table, number
from gar.runs.reading import Run, seen_name

MAIN = ("load_variance", "utilization", "gradient_mass_purity")
FURTHER = tuple(name for name in METRICS if name not in MAIN and name != "accuracy")
POINTS = Metric("difference", 1, 2, 100, "pp")


def endpoints(results: Results, setting: str, frame: pd.DataFrame) -> Table:
    """Accuracy with its spread, the main routing metrics, and the Pareto front, per mixture and method."""
    table = Table(
        "endpoints",
        "Endpoints: means over seeds",
        [
            Column("mixture"),
            Column("method"),
            Column("seeds", True),
            Column("accuracy, %", True, "mean over tasks, then mixtures, then seeds"),
            Column("std, pp", True, "population standard deviation over seeds"),
            Column("95 % interval, %", False, "two-sided Student-t interval of the mean over seeds"),
            *(_metric_column(name) for name in MAIN),
            Column(
                "Pareto",
                False,
                "● no other method is as good in accuracy, purity, utilization and load variance",
            ),
        ],
    )
    rows = frame[frame["setting"] == setting].to_dict("records") if len(frame) else []
    seeds: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        seeds[row["scope"]] |= {row["seed_list"]} if row["seeds"] else set()
    uneven = [scope for scope, lists in seeds.items() if len(lists) > 1]
    best = {
        scope: max(row["accuracy"] for row in rows if row["scope"] == scope)
        for scope in {r["scope"] for r in rows}
    }
    for row in rows:
        accuracy = METRICS["accuracy"]
        table.add(
            row["scope"],
            row["variant"],
            row["seeds"],
            number(row["accuracy"], accuracy.text(row["accuracy"])),
            number(row["accuracy_std"], POINTS.text(row["accuracy_std"])),
            interval(row["accuracy_low"], row["accuracy_high"], accuracy),
            *(number(row[name], METRICS[name].text(row[name])) for name in MAIN),
            "●" if row["pareto"] else "",
            variants=(row["variant"],),
            group=row["scope"],
            strong=row["scope"] not in uneven and row["accuracy"] == best[row["scope"]],
        )
    table.notes += [f"{row['scope']}, {row['variant']}: {row['note']}." for row in rows if row["note"]]
    table.notes += [
        f"{bin_}: {mixture} alone, see there." for bin_, mixture in results.lone_bins(setting).items()
    ]
    table.notes += [
        f"{scope}: methods have different seeds, so neither means nor ● compare like with like."
        for scope in uneven
    ]
    if any(row["seeds"] == 1 for row in rows):
        table.notes.append(
            "One seed says nothing about spread: rows with one seed have no std and no interval."
        )
    table.notes.append(
        "Bold: highest mean accuracy of its mixture, which alone is no evidence of a difference."
    )
    return table


def further(results: Results, setting: str, frame: pd.DataFrame) -> Table:
    """The remaining routing metrics."""
    columns = [Column("mixture"), Column("method"), Column("seeds", True)]
    table = Table(
        "further", "Further routing metrics: means over seeds", [*columns, *map(_metric_column, FURTHER)]
    )
    for row in frame[frame["setting"] == setting].to_dict("records") if len(frame) else []:
        cells = (number(row[name], METRICS[name].text(row[name])) for name in FURTHER)
        table.add(
            row["scope"], row["variant"], row["seeds"], *cells, variants=(row["variant"],), group=row["scope"]
        )
    return table


def task_accuracies(results: Results, setting: str) -> list[Table]:
    """Accuracy of every task, a table a mixture."""
    tables = []
    for index, mixture in enumerate(results.mixtures(setting)):
        cells = {v: cell for v in results.variants(setting) if (cell := results.cell(setting, mixture, v))}
        tasks = list(
            dict.fromkeys(t for cell in cells.values() for run in cell.values() for t in _tasks(run))
        )
        columns = [Column("method"), Column("seeds", True), *(Column(f"{task}, %", True) for task in tasks)]
        table = Table(
            f"tasks-{index}", f"{mixture}: accuracy by task, mean ± population std over seeds", columns
        )
        for variant, cell in cells.items():
            shown = [_task_cell([_tasks(run)[t] for run in cell.values() if t in _tasks(run)]) for t in tasks]
            table.add(variant, len(cell), *shown, variants=(variant,))
        tables.append(table)
    return tables


def seen(results: Results, setting: str) -> list[Table]:
    """What the experts see most, of the first seed with a diagnostics.json; a table a mixture."""
    tables = []
    for index, mixture in enumerate(results.mixtures(setting)):
        columns = [Column("method"), Column("seed", True), Column("expert", True), Column("load, %", True)]
        table = Table(
            f"seen-{index}", f"{mixture}: what each expert sees most", [*columns, Column("× over chance")]
        )
        for variant in results.variants(setting):
            runs = results.cell(setting, mixture, variant).items()
            seed, run = next(((seed, run) for seed, run in runs if run.seen), (0, None))
            load = run.result["routing"].get("load") or [] if run else []
            for e, (share, entries) in enumerate(zip(load, run.seen if run else [], strict=False)):
                words = ", ".join(f"{seen_name(entry)} ×{entry['lift']:.1f}" for entry in entries)
                table.add(variant, seed, e, number(share, f"{100 * share:.1f}"), words or "–",
                          variants=(variant,), group=variant)  # fmt: skip
        if table.rows:
            table.notes.append(
                "Tokens (at the head site: tasks and labels) that select the expert more often than others "
                "do, rare ones passed over; one seed, since experts of different seeds do not correspond."
            )
            tables.append(table)
    return tables


def paired(setting: str, frame: pd.DataFrame, metric: str, name: str = "paired") -> Table:
    """Paired differences over seeds with their intervals."""
    shown = POINTS if metric == "accuracy" else METRICS[metric]
    unit = f", {shown.unit}" if shown.unit else ""
    table = Table(
        name,
        f"Paired differences in {METRICS[metric].label} over the same seeds",
        [
            Column("mixture"),
            Column("difference"),
            Column("seeds", True),
            Column(f"mean{unit}", True),
            Column(
                f"95 % interval{unit}",
                False,
                "two-sided Student-t interval over seeds, seeds − 1 degrees of freedom",
            ),
            Column("zero lies", False, "where zero lies relative to the interval"),
        ],
    )
    rows = frame[frame["setting"] == setting].to_dict("records") if len(frame) else []
    for row in rows:
        table.add(
            row["scope"],
            f"{row['a']} − {row['b']}",
            row["seeds"],
            number(row["mean"], shown.text(row["mean"], sign=True)),
            interval(row["low"], row["high"], shown, sign=True),
            reading(row),
            variants=(row["a"], row["b"]),
            group=row["scope"],
        )
        if row["note"] and row["note"] != "one seed: no interval":
            table.notes.append(f"{row['scope']}, {row['a']} − {row['b']}: {row['note']}.")
    if any(row["seeds"] == 1 for row in rows):
        table.notes.append("One seed has no interval, so its difference may be chance alone.")
    if any(not math.isnan(row["low"]) for row in rows):
        count = sum(not math.isnan(row["low"]) for row in rows)
        table.notes.append(
            f"Nominal intervals, not corrected for the {count} comparisons in this table."
            if count > 1
            else "Nominal interval."
        )
    return table


def reading(row: Mapping[str, Any]) -> str:
    """What an interval allows to say about zero."""
    if math.isnan(row["mean"]):
        return "not compared"
    if math.isnan(row["low"]):
        return "one seed: no interval"
    if row["low"] > 0:
        return "below the interval"
    return "above the interval" if row["high"] < 0 else "inside the interval"


def times(results: Results, setting: str) -> Table:
    """Time per update; factors over Baseline where both ran on the same device."""
    columns = [Column("mixture"), Column("method"), Column("runs", True), Column("time per update, ms", True)]
    columns += [Column("std, ms", True), Column("over Baseline", True), Column("device")]
    table = Table("times", "Time per update: mean over runs", columns)
    for mixture in results.mixtures(setting):
        scope = Scope(mixture, "mixture", (mixture,))
        base: dict[str, float] = {}
        for variant in results.variants(setting):
            values = list(results.values("step_seconds", setting, scope, variant).values())
            if not values:
                continue
            device = ", ".join(sorted({_device(r) for r in results.cell(setting, mixture, variant).values()}))
            mean, std = (
                pd.Series(values).mean(),
                pd.Series(values).std(ddof=0) if len(values) > 1 else math.nan,
            )
            if results.method(variant) == "baseline":
                base.setdefault(device, mean)
            factor = mean / base[device] if device in base else math.nan
            table.add(
                mixture,
                variant,
                len(values),
                number(1000 * mean, f"{1000 * mean:.1f}"),
                number(1000 * std, "–" if math.isnan(std) else f"{1000 * std:.1f}"),
                number(factor, "–" if math.isnan(factor) else f"×{factor:.2f}"),
                device,
                variants=(variant,),
                group=mixture,
            )
    table.notes.append(
        "Times are those of the training runs; runs that shared a machine slow each other down."
    )
    return table


def configurations(results: Results, setting: str) -> Table:
    """What every method ran with, per mixture."""
    columns = [Column("mixture"), Column("method"), Column("hyper-parameters"), Column("learning rate", True)]
    columns += [Column("clip", True), Column("weight decay", True), Column("updates", True), Column("seeds")]
    columns += [Column("preset")]
    table = Table("configurations", "Configurations", columns)
    for mixture in results.mixtures(setting):
        for variant in results.variants(setting):
            cell = results.cell(setting, mixture, variant)
            if not cell:
                continue
            run = next(iter(cell.values()))
            own = {k: v for k, v in grouping.hyperparameters(run).items() if k != "learning_rate"}
            optimizer = run.config.get("optimizer") or {}
            table.add(
                mixture,
                variant,
                ", ".join(f"{key}={value}" for key, value in own.items()) or "none",
                *(_plain(optimizer.get(key)) for key in ("learning_rate", "clip", "weight_decay")),
                int(run.result.get("updates", 0)),
                ", ".join(map(str, cell)),
                ", ".join(sorted({str(r.config.get("preset") or "–") for r in cell.values()})),
                variants=(variant,),
                group=mixture,
            )
    return table


def shared_keys(results: Results, setting: str) -> dict[str, str]:
    """Configuration keys that are the same in every finished run of the setting."""
    trees = [grouping.flat(run.config) for run in results.members(setting) if run.result]
    names = {name: None for tree in trees for name in tree}
    return {n: str(trees[0].get(n)) for n in names if all(tree.get(n) == trees[0].get(n) for tree in trees)}


def versions(results: Results, setting: str) -> Table:
    """Software and devices behind the finished runs, with the number of runs of each."""
    found: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in results.members(setting):
        if run.result:
            libraries = run.environment.get("libraries") or {}
            shown = ", ".join(f"{key} {value}" for key, value in libraries.items())
            known = [str(run.environment.get(key) or "–") for key in ("gar", "commit", "python")]
            found[(*known, shown or "–", _device(run), str(run.environment.get("platform") or "–"))].append(
                run
            )
    columns = [Column(label) for label in ("gar", "commit", "python", "libraries", "device", "platform")]
    table = Table("versions", "Versions and devices", [*columns, Column("runs", True)])
    for key, runs in found.items():
        table.add(*key, len(runs))
    return table


def problems(results: Results) -> Table:
    """Runs without a result, and why."""
    columns = [Column(label) for label in ("state", "run", "setting", "mixture", "method", "seed", "reason")]
    table = Table("problems", "Failed, running and unreadable runs", columns)
    for run in sorted(results.problems, key=lambda run: (run.state, str(run.path))):
        setting, mixture, variant = results.label(run)
        seed = str(grouping.seed_of(run)) if run.config else "–"
        table.add(run.state, str(run.path), setting, mixture, variant, seed, run.reason or "–")
    return table


def interval(low: float, high: float, metric: Metric, sign: bool = False) -> Cell:
    """``[low, high]``, or a dash where there is none."""
    if math.isnan(low):
        return Cell("–")
    return Cell(f"[{metric.text(low, sign)}, {metric.text(high, sign)}]", low)


def _metric_column(name: str) -> Column:
    arrow = {1: " ↑", -1: " ↓", 0: ""}[METRICS[name].better]
    return Column(METRICS[name].label + arrow, True)


def _tasks(run: Run) -> dict[str, float]:
    return dict(run.result["accuracy"]["tasks"])


def _task_cell(values: list[float]) -> Cell:
    if not values:
        return Cell("–")
    series = 100 * pd.Series(values)
    spread = f" ± {series.std(ddof=0):.2f}" if len(values) > 1 else ""
    return Cell(f"{series.mean():.2f}{spread}", float(series.mean()))


def _plain(value: Any) -> Cell:
    return Cell(f"{value:g}", float(value)) if isinstance(value, int | float) else Cell("–")


def _device(run: Run) -> str:
    name, device = run.environment.get("device_name"), run.environment.get("device")
    return str(name or device or "–")
