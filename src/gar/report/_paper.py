"""The paper's values beside ours, for runs of a paper preset.

A cell is compared only when all of its runs name the same preset of the paper; runs that changed their preset
are said to be no reproduction.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
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
from gar.report._numbers import Numbers, Scope, mean_interval
from gar.report._table import Row, Table, interval, shown
from gar.report.verdict import POINTS, counted
from gar.runs import Run

SCOPES = {  # the paper's scopes by their mixtures
    frozenset({"five", "six"}): "five_six",
    frozenset({"seven_paws", "seven_mrpc", "eight"}): "seven_eight",
    frozenset({"five", "six", "seven_paws", "seven_mrpc", "eight"}): "five_mixtures",
    frozenset({"cola", "mrpc", "qqp", "rte", "sst2"}): "five_tasks",
}
#: With another of these a run is no run of its preset at all; with other keys it is a changed one.
MODEL = {"backbone.name", "backbone.trainable", "mixture.tasks"}
NOTE = (
    "The paper's means are over five seeds; the interval is that of our mean and knows nothing of the "
    "paper's own spread. Accuracies in %, differences of accuracies in percentage points."
)


def endpoints(
    results: Numbers, setting: str, metrics: Iterable[Metric], name: str, caption: str, folded: bool = False
) -> Table:
    """Our mean, the paper's, their difference, and whether the paper's lies in our interval."""
    rows = []
    for scope, variant in itertools.product(results.scopes(setting), results.variants(setting)):
        found = _presets(results, setting, scope, variant)
        if not found or results.missing("accuracy", setting, scope, variant):
            continue
        changed = _changed(results, setting, scope, variant)
        for metric in metrics:
            printed = _published(found, metric.paper)
            values = results.values(metric.name, setting, scope, variant)
            if printed is None or values.empty:
                continue
            mean, low, high = mean_interval(values)
            contents = {
                "mixture": scope.label,
                "method": variant,
                "metric": metric.label,
                "seeds": len(values),
                "here": shown(metric, mean),
                "here, 95 % interval": interval(metric, low, high),
                "paper": shown(metric, printed),
                "here − paper": shown(metric, mean - printed, sign=True),
                "paper's value": changed + _verdict(printed, low, high),
            }
            rows.append(Row(contents, (variant,), f"{scope.label}/{variant}"))
    notes = [NOTE, *_deviations(results, setting)]
    return Table(name, f"Beside the paper: {caption}", rows, notes, folded=folded)


def paired(results: Numbers, setting: str, frame: pd.DataFrame) -> Table:
    """Our paired differences in accuracy beside the paper's."""
    scopes = {scope.label: scope for scope in results.scopes(setting)}
    rows = []
    for row in frame[frame["setting"] == setting].dropna(subset="mean").to_dict("records"):
        a, b = (_presets(results, setting, scopes[row["scope"]], row[side]) for side in ("a", "b"))
        if (printed := _paired_row(a, b)) is None:
            continue
        mean, low, high = (float(cell) / 100 for cell in (printed.estimate, printed.ci_low, printed.ci_high))
        sides = (_changed(results, setting, scopes[row["scope"]], row[side]) for side in ("a", "b"))
        contents = {
            "mixtures": row["scope"],
            "difference": f"{row['a']} − {row['b']}",
            "seeds": row["seeds"],
            "here": shown(POINTS, row["mean"], sign=True),
            "here, 95 % interval": interval(POINTS, row["low"], row["high"], sign=True),
            "paper": shown(POINTS, mean, sign=True),
            "paper, 95 % interval": interval(POINTS, low, high, sign=True),
            "here − paper": shown(POINTS, row["mean"] - mean, sign=True),
            "paper's value": max(sides) + _verdict(mean, row["low"], row["high"]),
        }
        rows.append(Row(contents, (row["a"], row["b"])))
    return Table("paper-paired", "Beside the paper: paired differences in accuracy, pp", rows)


def _verdict(printed: float, low: float, high: float) -> str:
    """Whether the paper's value lies inside our interval."""
    if math.isnan(low):
        return "one seed: no interval to compare with"
    return "inside our interval" if low <= printed <= high else "outside our interval"


def _presets(results: Numbers, setting: str, scope: Scope, variant: str) -> list[Preset]:
    """The paper preset behind each of the scope's mixtures, if all runs have one, of one setting."""
    found = []
    for mixture in scope.mixtures:
        names = {str(run.config.get("preset")) for run in results.cell(setting, mixture, variant).values()}
        if len(names) != 1 or not (name := names.pop()).startswith("paper/") or not presets.is_preset(name):
            return []
        found.append(presets.find(name))
    if any(_other_model(results, run) for run in _runs(results, setting, scope, variant)):
        return []
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


def _runs(results: Numbers, setting: str, scope: Scope, variant: str) -> list[Run]:
    return [run for m in scope.mixtures for run in results.cell(setting, m, variant).values()]


def _changed(results: Numbers, setting: str, scope: Scope, variant: str) -> str:
    """What a cell says first where runs are no reproduction."""
    changed = any(_differing(results, run) for run in _runs(results, setting, scope, variant))
    return "changed preset; " if changed else ""


def _differing(results: Numbers, run: Run) -> Sequence[str]:
    """The keys of the result in which a run of a paper preset differs from it; a moved backbone is none."""
    if run not in results.deviations:
        results.deviations[run] = _deviating(run)
    return results.deviations[run]


def _deviating(run: Run) -> list[str]:
    """A backbone in a directory is the published one where the directory is named like it."""
    try:
        config = configuration.build(run.config)
        keys = presets.deviations(config)
    except UserError:
        return ["the form of the configuration"]
    if "backbone.name" in keys and config.preset is not None:
        names = (config.backbone.name, presets.find(config.preset).config(config.seed).backbone.name)
        own, published = (str(name).rstrip("/").rsplit("/", 1)[-1].lower() for name in names)
        keys = [key for key in keys if key != "backbone.name" or own != published]
    return keys


def _other_model(results: Numbers, run: Run) -> bool:
    """Whether a run of a paper preset is of another model or other tasks: its values are something else."""
    return any(key in MODEL or key.startswith("experts.") for key in _differing(results, run))


def refused(results: Numbers, setting: str) -> list[str]:
    """The runs of paper presets that are not set beside the paper's values, and why, in a sentence each."""
    found: Counter[str] = Counter()
    for run in results.members(setting):
        if run.result and grouping.paper_setting(run) and _other_model(results, run):
            name = str((run.config.get("backbone") or {}).get("name"))
            keys = [key for key in _differing(results, run) if key != "backbone.name"]
            what = [f"backbone {name}"] * ("backbone.name" in _differing(results, run)) + keys
            found[", ".join(what)] += 1
    return [
        f"Not set beside the paper: {counted(count)} of its presets with other models or tasks ({what})."
        for what, count in found.items()
    ]


def _deviations(results: Numbers, setting: str) -> list[str]:
    """Runs that changed their preset reproduce nothing; which keys, and how many runs."""
    changed: Counter[str] = Counter()
    for run in results.members(setting):
        if run.result and grouping.paper_setting(run):
            changed[", ".join(_differing(results, run))] += 1
    return [
        f"Not a reproduction: {counted(count)} differ{'s' if count == 1 else ''} from "
        f"{'its' if count == 1 else 'their'} preset in {keys}."
        for keys, count in changed.items()
        if keys
    ]
