"""The tables of one setting: endpoints, paired differences, tasks, times, configuration."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import pandas as pd

from gar.metrics import METRICS, OBJECTIVES, Metric, population_std
from gar.metrics.catalogue import listed
from gar.report import _grouping as grouping
from gar.report._table import Cell, Column, Record, Table, interval, measure
from gar.report.results import Results
from gar.runs.reading import Run, seen_name

ACCURACY = METRICS["accuracy"]
POINTS = Metric("difference", "difference", better=1, digits=2, scale=100, unit="pp")
METHOD, SEEDS = Column("method", "variant"), Column("seeds", "seeds", True)
SCOPE, MIXTURE = Column("mixture", "scope"), Column("mixture", "mixture")


def endpoints(results: Results, setting: str, frame: pd.DataFrame) -> Table:
    """Accuracy with its spread, the other objectives, and the Pareto front, per mixture and method."""
    rows = frame[frame["setting"] == setting]
    lists = rows[rows["seeds"] > 0].groupby("scope", sort=False)["seed_list"].nunique()
    uneven = list(lists[lists > 1].index)
    best = rows["accuracy"] == rows.groupby("scope")["accuracy"].transform("max")
    rows = rows.assign(group=rows["scope"], strong=best & ~rows["scope"].isin(uneven))
    columns = [
        SCOPE,
        METHOD,
        SEEDS,
        Column("accuracy, %", measure(ACCURACY), True, "mean over tasks, then mixtures, then seeds"),
        Column("std, pp", measure(POINTS, "accuracy_std"), True, "population standard deviation over seeds"),
        Column(
            "95 % interval, %",
            interval(ACCURACY, "accuracy_low", "accuracy_high"),
            title="two-sided Student-t interval of the mean over seeds",
        ),
        *(
            _column(metric)
            for metric in METRICS.values()
            if metric.name in OBJECTIVES.values() and metric != ACCURACY
        ),
        Column(
            "Pareto",
            lambda row: "●" if row["pareto"] else "",
            title="● no other method is as good in accuracy, purity, utilization and load variance",
        ),
    ]
    records = rows.to_dict("records")
    notes = [f"{row['scope']}, {row['variant']}: {row['note']}." for row in records if row["note"]]
    notes += [f"{name}: {mixture} alone, see there." for name, mixture in results.lone_bins(setting).items()]
    notes += [
        f"{scope}: methods have different seeds, so neither means nor ● compare like with like."
        for scope in uneven
    ]
    if (rows["seeds"] == 1).any():
        notes.append("One seed says nothing about spread: rows with one seed have no std and no interval.")
    notes.append("Bold: highest mean accuracy of its mixture, which alone is no evidence of a difference.")
    return Table("endpoints", "Endpoints: means over seeds", columns, records, notes)


def further(setting: str, frame: pd.DataFrame) -> Table:
    """The metrics that are no objectives, one's own among them."""
    others = [metric for name, metric in listed().items() if name not in OBJECTIVES.values()]
    rows = frame[frame["setting"] == setting]
    return Table(
        "further",
        "Further routing metrics: means over seeds",
        [SCOPE, METHOD, SEEDS, *map(_column, others)],
        rows.assign(group=rows["scope"]).to_dict("records"),
        folded=True,
    )


def task_accuracies(results: Results, setting: str) -> list[Table]:
    """Accuracy of every task, a table a mixture."""
    tables = []
    for index, mixture in enumerate(results.mixtures(setting)):
        records: list[Record] = []
        for variant in results.variants(setting):
            if cell := results.cell(setting, mixture, variant):
                shares = pd.DataFrame([run.result["accuracy"]["tasks"] for run in cell.values()])
                records.append({"variant": variant, "seeds": len(cell), "tasks": shares})
        tasks = dict.fromkeys(task for record in records for task in record["tasks"])
        columns = [Column(f"{task}, %", _task_cell(task), True) for task in tasks]
        caption = f"{mixture}: accuracy by task, mean ± population std over seeds"
        tables.append(Table(f"tasks-{index}", caption, [METHOD, SEEDS, *columns], records, folded=True))
    return tables


def seen(results: Results, setting: str) -> list[Table]:
    """What the experts see most, of the first seed with a diagnostics.json; a table a mixture."""
    columns = [
        METHOD,
        Column("seed", "seed", True),
        Column("expert", "expert", True),
        Column("load, %", lambda row: Cell(f"{100 * row['load']:.1f}", row["load"]), True),
        Column("× over chance", lambda row: ", ".join(map(_lift, row["seen"])) or "–"),
    ]
    note = (
        "Tokens (at the head site: tasks and labels) that select the expert more often than others "
        "do, rare ones passed over; one seed, since experts of different seeds do not correspond."
    )
    tables = []
    for index, mixture in enumerate(results.mixtures(setting)):
        cells = {v: results.cell(setting, mixture, v) for v in results.variants(setting)}
        chosen = {v: next(((s, r) for s, r in cell.items() if r.seen), None) for v, cell in cells.items()}
        records = [
            {"variant": v, "group": v, "seed": found[0], "expert": e, "load": load, "seen": entries}
            for v, found in chosen.items()
            if found
            for e, (load, entries) in enumerate(
                zip(found[1].result["routing"].get("load") or (), found[1].seen, strict=False)
            )
        ]
        if records:
            caption = f"{mixture}: what each expert sees most"
            tables.append(
                Table(f"seen-{index}", caption, columns, records, [note], folded=True, absent=("tex",))
            )
    return tables


def paired(setting: str, frame: pd.DataFrame, metric: Metric) -> Table:
    """Paired differences over seeds with their intervals."""
    shown = POINTS if metric == ACCURACY else metric
    unit = f", {shown.unit}" if shown.unit else ""
    columns = [
        SCOPE,
        Column("difference", difference),
        SEEDS,
        Column(f"mean{unit}", measure(shown, "mean", sign=True), True),
        Column(
            f"95 % interval{unit}",
            interval(shown, sign=True),
            title="two-sided Student-t interval over seeds, seeds − 1 degrees of freedom",
        ),
        Column("zero lies", where_zero_lies, title="where zero lies relative to the interval"),
    ]
    rows = frame[frame["setting"] == setting]
    records = [
        {**row, "variants": (row["a"], row["b"]), "group": row["scope"]} for row in rows.to_dict("records")
    ]
    told = [row for row in records if row["note"] and row["note"] != "one seed: no interval"]
    notes = [f"{row['scope']}, {difference(row)}: {row['note']}." for row in told]
    if (rows["seeds"] == 1).any():
        notes.append("One seed has no interval, so its difference may be chance alone.")
    if count := int(rows["low"].notna().sum()):
        corrected = f"Nominal intervals, not corrected for the {count} comparisons in this table."
        notes.append(corrected if count > 1 else "Nominal interval.")
    return Table(
        "paired" if metric == ACCURACY else f"paired-{metric.name}",
        f"Paired differences in {metric.label} over the same seeds",
        columns,
        records,
        notes,
        folded=metric != ACCURACY,
    )


def difference(row: Record) -> str:
    """What a paired row compares."""
    return f"{row['a']} − {row['b']}"


def where_zero_lies(row: Record) -> str:
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
    step = METRICS["step_seconds"]
    columns = [
        MIXTURE,
        METHOD,
        Column("runs", "runs", True),
        Column("time per update, ms", measure(step, "mean"), True),
    ]
    columns += [
        Column("std, ms", measure(step, "std"), True),
        Column("over Baseline", lambda row: factor(row["factor"]), True),
        Column("device", "device"),
    ]
    rows = results.counted[results.counted["setting"] == setting].dropna(subset="step_seconds")
    records = []
    for mixture in results.mixtures(setting):
        base: dict[str, float] = {}
        for variant in results.variants(setting):
            cell = rows[(rows["mixture"] == mixture) & (rows["variant"] == variant)]
            if cell.empty:
                continue
            device = ", ".join(sorted(set(map(_device, results.cell(setting, mixture, variant).values()))))
            mean = fmean(cell["step_seconds"])
            if variant in results.references(setting):
                base.setdefault(device, mean)
            records.append(
                {
                    "mixture": mixture,
                    "variant": variant,
                    "group": mixture,
                    "runs": len(cell),
                    "mean": mean,
                    "std": population_std(cell["step_seconds"]) if len(cell) > 1 else math.nan,
                    "factor": mean / base.get(device, math.nan),
                    "device": device,
                }
            )
    note = "Times are those of the training runs; runs that shared a machine slow each other down."
    return Table("times", "Time per update: mean over runs", columns, records, [note])


def configurations(results: Results, setting: str) -> Table:
    """What every method ran with, per mixture."""
    columns = [
        MIXTURE,
        METHOD,
        Column(
            "hyper-parameters", lambda row: ", ".join(f"{k}={v}" for k, v in row["own"].items()) or "none"
        ),
        Column("learning rate", lambda row: _plain(row["learning_rate"]), True),
        Column("clip", lambda row: _plain(row["clip"]), True),
        Column("weight decay", lambda row: _plain(row["weight_decay"]), True),
        Column("updates", "updates", True),
        Column("seeds", "seeds"),
        Column("preset", "preset"),
    ]
    records = []
    for mixture in results.mixtures(setting):
        for variant in results.variants(setting):
            if not (cell := results.cell(setting, mixture, variant)):
                continue
            run = next(iter(cell.values()))
            own = {k: v for k, v in grouping.hyperparameters(run).items() if k != "learning_rate"}
            optimizer = run.config.get("optimizer") or {}
            records.append(
                {
                    "mixture": mixture,
                    "variant": variant,
                    "group": mixture,
                    "own": own,
                    **{key: optimizer.get(key) for key in ("learning_rate", "clip", "weight_decay")},
                    "updates": int(run.result.get("updates", 0)),
                    "seeds": ", ".join(map(str, cell)),
                    "preset": ", ".join(sorted({str(r.config.get("preset") or "–") for r in cell.values()})),
                }
            )
    return Table("configurations", "Configurations", columns, records, absent=("tex",))


def shared_keys(results: Results, setting: str) -> Table:
    """Configuration keys that are the same in every finished run of the setting."""
    trees = [grouping.flat(run.config) for run in results.members(setting) if run.result]
    names = dict.fromkeys(name for tree in trees for name in tree)
    same = {n: str(trees[0].get(n)) for n in names if all(tree.get(n) == trees[0].get(n) for tree in trees)}
    return Table(
        "shared",
        "The same in every run",
        [Column("key", "key"), Column("value", "value")],
        [{"key": key, "value": value} for key, value in same.items()],
        folded=True,
        record=True,
        absent=("tex",),
    )


def versions(results: Results, setting: str) -> Table:
    """Software and devices behind the finished runs, with the number of runs of each."""
    labels = ["gar", "commit", "python", "libraries", "device", "platform"]
    found = pd.DataFrame([_versions(run) for run in results.members(setting) if run.result], columns=labels)
    counts = found.groupby(labels, sort=False).size().rename("runs").reset_index()
    columns = [*(Column(label, label) for label in labels), Column("runs", "runs", True)]
    return Table(
        "versions",
        "Versions and devices",
        columns,
        counts.to_dict("records"),
        folded=True,
        record=True,
        absent=("tex",),
    )


def directories(results: Results, setting: str) -> Table:
    """Where the finished runs lie."""
    paths = [{"path": str(run.path)} for run in results.members(setting) if run.result]
    return Table(
        "directories", "Run directories", [Column("run", "path")], paths, folded=True, absent=("md", "tex")
    )


def problems(results: Results) -> Table:
    """Runs without a result, and why."""
    columns = [Column("state", "state"), Column("run", "path"), Column("setting", "setting"), MIXTURE]
    columns += [Column("method", "variant"), Column("seed", "seed"), Column("reason", "reason")]
    records = []
    for run in sorted(results.problems, key=lambda run: (run.state, str(run.path))):
        seed = str(grouping.seed_of(run)) if run.config else "–"
        records.append(
            {
                **results.label(run)._asdict(),
                "variants": (),
                "state": run.state,
                "path": str(run.path),
                "seed": seed,
                "reason": run.reason or "–",
            }
        )
    return Table("problems", "Failed, running and unreadable runs", columns, records)


def factor(value: float) -> Cell:
    """How many times as long as the reference, or a dash."""
    return Cell("–") if math.isnan(value) else Cell(f"×{value:.2f}", value)


def _column(metric: Metric) -> Column:
    return Column(f"{metric.label} {metric.arrow}".rstrip(), measure(metric), True)


def _task_cell(task: str) -> Any:
    def show(row: Record) -> Cell:
        if task not in row["tasks"] or (values := row["tasks"][task].dropna()).empty:
            return Cell("–")
        spread = f" ± {100 * population_std(values):.2f}" if len(values) > 1 else ""
        return Cell(f"{100 * fmean(values):.2f}{spread}", 100 * fmean(values))

    return show


def _lift(entry: Record) -> str:
    return f"{seen_name(entry)} ×{entry['lift']:.1f}"


def _plain(value: Any) -> Cell:
    return Cell(f"{value:g}", float(value)) if isinstance(value, int | float) else Cell("–")


def _versions(run: Run) -> tuple[str, ...]:
    libraries = ", ".join(f"{key} {value}" for key, value in (run.environment.get("libraries") or {}).items())
    gar, commit, python, platform = (
        str(run.environment.get(key) or "–") for key in ("gar", "commit", "python", "platform")
    )
    return gar, commit, python, libraries or "–", _device(run), platform


def _device(run: Run) -> str:
    return str(run.environment.get("device_name") or run.environment.get("device") or "–")
