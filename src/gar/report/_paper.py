"""The paper's values beside ours, for runs of a paper preset.

A cell is compared only when all of its runs name the same preset of the paper; runs that changed their preset
are said to be no reproduction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from statistics import fmean

import pandas as pd

from gar import config as configuration
from gar.errors import UserError
from gar.metrics import Metric
from gar.presets import catalogue as presets
from gar.presets import paper
from gar.presets.catalogue import Preset
from gar.presets.paper import Paired
from gar.report import _grouping as grouping
from gar.report._table import Column, Record, Table, interval, measure
from gar.report._tables import METHOD, POINTS, SCOPE, SEEDS, difference
from gar.report.results import Results, Scope, mean_interval

SCOPES = {  # the paper's scopes by their mixtures
    frozenset({"five", "six"}): "five_six",
    frozenset({"seven_paws", "seven_mrpc", "eight"}): "seven_eight",
    frozenset({"five", "six", "seven_paws", "seven_mrpc", "eight"}): "five_mixtures",
    frozenset({"cola", "mrpc", "qqp", "rte", "sst2"}): "five_tasks",
}
NOTE = (
    "The paper's means are over five seeds; the interval is that of our mean and knows nothing of the "
    "paper's own spread. Accuracies in %, differences of accuracies in percentage points."
)


def endpoints(
    results: Results, setting: str, metrics: Iterable[Metric], name: str, caption: str, folded: bool = False
) -> Table:
    """Our mean, the paper's, their difference, and whether the paper's lies in our interval."""
    records = []
    for scope in results.scopes(setting):
        for variant in results.variants(setting):
            found = _presets(results, setting, scope, variant)
            if not found or results.missing("accuracy", setting, scope, variant):
                continue
            for metric in metrics:
                printed = _published(found, metric.paper)
                values = results.values(metric.name, setting, scope, variant)
                if printed is None or values.empty:
                    continue
                mean, low, high = mean_interval(values)
                ours = {"mean": mean, "low": low, "high": high, "seeds": len(values)}
                theirs = {"paper": printed, "difference": mean - printed, "metric": metric}
                where = {"scope": scope.label, "variant": variant, "group": f"{scope.label}/{variant}"}
                records.append(where | ours | theirs)
    columns = [
        SCOPE,
        METHOD,
        Column("metric", lambda row: row["metric"].label),
        SEEDS,
        Column("here", lambda row: measure(row["metric"], "mean")(row), True),
        Column("here, 95 % interval", lambda row: interval(row["metric"])(row)),
        Column("paper", lambda row: measure(row["metric"], "paper")(row), True),
        Column("here − paper", lambda row: measure(row["metric"], "difference", sign=True)(row), True),
        Column("paper's value", _verdict),
    ]
    notes = [NOTE, *_deviations(results, setting)]
    return Table(name, f"Beside the paper: {caption}", columns, records, notes, folded)


def paired(results: Results, setting: str, frame: pd.DataFrame) -> Table:
    """Our paired differences in accuracy beside the paper's."""
    scopes = {scope.label: scope for scope in results.scopes(setting)}
    records = []
    for row in frame[frame["setting"] == setting].to_dict("records"):
        a, b = (_presets(results, setting, scopes[row["scope"]], row[side]) for side in ("a", "b"))
        printed = None if math.isnan(row["mean"]) else _paired_row(a, b)
        if printed is not None:
            cells = (printed.estimate, printed.ci_low, printed.ci_high)
            mean, low, high = (float(value) / 100 for value in cells)
            theirs = {"paper": mean, "paper_low": low, "paper_high": high, "difference": row["mean"] - mean}
            records.append({**row, **theirs, "variants": (row["a"], row["b"])})
    columns = [
        Column("mixtures", "scope"),
        Column("difference", difference),
        SEEDS,
        Column("here", measure(POINTS, "mean", sign=True), True),
        Column("here, 95 % interval", interval(POINTS, sign=True)),
        Column("paper", measure(POINTS, "paper", sign=True), True),
        Column("paper, 95 % interval", interval(POINTS, "paper_low", "paper_high", sign=True)),
        Column("here − paper", measure(POINTS, "difference", sign=True), True),
        Column("paper's value", _verdict),
    ]
    caption = "Beside the paper: paired differences in accuracy, pp"
    return Table("paper-paired", caption, columns, records)


def _verdict(row: Record) -> str:
    """Whether the paper's value lies inside our interval."""
    if math.isnan(row["low"]):
        return "one seed: no interval to compare with"
    return "inside our interval" if row["low"] <= row["paper"] <= row["high"] else "outside our interval"


def _presets(results: Results, setting: str, scope: Scope, variant: str) -> list[Preset]:
    """The paper preset behind each of the scope's mixtures, if all runs have one, of one setting."""
    found = []
    for mixture in scope.mixtures:
        names = {str(run.config.get("preset")) for run in results.cell(setting, mixture, variant).values()}
        if len(names) != 1 or not (name := names.pop()).startswith("paper/") or not presets.is_preset(name):
            return []
        found.append(presets.find(name))
    return found if len({(preset.setting, preset.method) for preset in found}) == 1 else []


def _published(found: list[Preset], metric: str) -> float | None:
    """The paper's endpoint, or the mean of its endpoints over the mixtures."""
    values = [preset.published.get(metric) for preset in found]
    return fmean(float(value) for value in values if value) if all(values) else None


def _paired_row(a: list[Preset], b: list[Preset]) -> Paired | None:
    """The paper's row for these two, when they are its main configurations of one of its scopes."""
    subjects = frozenset(map(_subject, a))
    if not a or subjects != frozenset(map(_subject, b)) or a[0].setting != b[0].setting:
        return None
    if any(preset.name.startswith("paper/lambda_sweep/") for preset in (*a, *b)):
        return None
    wanted = (a[0].setting, SCOPES.get(subjects), f"{a[0].method}-{b[0].method}", "acc")
    return next((row for row in paper.paired() if row[:4] == wanted), None)


def _subject(preset: Preset) -> str:
    """Mixture or task without the spelling differences (``SST-2``, ``sst2``)."""
    return preset.subject.lower().replace("-", "")


def _deviations(results: Results, setting: str) -> list[str]:
    """Runs that changed their preset reproduce nothing; which keys, and how many runs."""
    changed: Counter[str] = Counter()
    for run in results.members(setting):
        if run.result and grouping.paper_setting(run):
            try:
                changed.update([", ".join(presets.deviations(configuration.build(run.config)))])
            except UserError:
                changed.update(["the form of the configuration"])
    return [
        f"Not a reproduction: {count} runs differ from their preset in {keys}."
        for keys, count in changed.items()
        if keys
    ]
