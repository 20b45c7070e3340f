"""The paper's values beside ours, for runs of a paper preset.

A cell is compared only when all of its runs name the same preset of the paper; runs that changed their preset
are said to be no reproduction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd

from gar import config as configuration
from gar.errors import UserError
from gar.metrics import paired_difference
from gar.presets import catalogue as presets
from gar.presets import paper
from gar.presets.catalogue import Preset
from gar.presets.paper import Paired
from gar.report import grouping
from gar.report.results import METRICS, Results, Scope
from gar.report.table import Cell, Column, Table, number
from gar.report.tables import POINTS, interval

NAMES = {  # ours: the paper tables'
    "accuracy": "acc",
    "load_variance": "lvar",
    "utilization": "util",
    "gradient_mass_purity": "purity",
    "structure_purity": "struct_purity",
    "nmi": "nmi",
    "ari": "ari",
    "normalized_entropy": "norm_routing_entropy",
    "intra_expert_coherence": "intra_coherence",
    "inter_expert_similarity": "inter_similarity",
}
SCOPES = {  # the paper's scopes by their mixtures
    frozenset({"five", "six"}): "five_six",
    frozenset({"seven_paws", "seven_mrpc", "eight"}): "seven_eight",
    frozenset({"five", "six", "seven_paws", "seven_mrpc", "eight"}): "five_mixtures",
    frozenset({"cola", "mrpc", "qqp", "rte", "sst2"}): "five_tasks",
}
CAPTION = "Beside the paper: "


def endpoints(
    results: Results, setting: str, metrics: Sequence[str], name: str, caption: str
) -> Table | None:
    """Our mean, the paper's, their difference, and whether the paper's lies in our interval."""
    table = Table(
        name,
        CAPTION + caption,
        [
            Column("mixture"),
            Column("method"),
            Column("metric"),
            Column("seeds", True),
            Column("here", True),
            Column("here, 95 % interval"),
            Column("paper", True),
            Column("here − paper", True),
            Column("paper's value"),
        ],
    )
    for scope in results.scopes(setting):
        for variant in results.variants(setting):
            found = _presets(results, setting, scope, variant)
            if found is None or results.missing("accuracy", setting, scope, variant):
                continue
            for metric in metrics:
                printed = _published(found, NAMES[metric])
                values = results.values(metric, setting, scope, variant)
                if printed is not None and values:
                    _add(table, scope, variant, metric, values, printed)
    if not table.rows:
        return None
    table.notes.append(
        "The paper's means are over five seeds; the interval is that of our mean and knows nothing of the "
        "paper's own spread. Accuracies in %, differences of accuracies in percentage points."
    )
    table.notes += _deviations(results, setting)
    return table


def paired(results: Results, setting: str, frame: pd.DataFrame) -> Table | None:
    """Our paired differences in accuracy beside the paper's."""
    table = Table(
        "paper-paired",
        CAPTION + "paired differences in accuracy, pp",
        [
            Column("mixtures"),
            Column("difference"),
            Column("seeds", True),
            Column("here", True),
            Column("here, 95 % interval"),
            Column("paper", True),
            Column("paper, 95 % interval"),
            Column("here − paper", True),
            Column("paper's value"),
        ],
    )
    rows = frame[frame["setting"] == setting].to_dict("records") if len(frame) else []
    scopes = {scope.label: scope for scope in results.scopes(setting)}
    for row in rows:
        a, b = (_presets(results, setting, scopes[row["scope"]], row[side]) for side in ("a", "b"))
        if not a or not b or math.isnan(row["mean"]) or (printed := _paired_row(a, b)) is None:
            continue
        mean, low, high = (
            float(value) / 100 for value in (printed.estimate, printed.ci_low, printed.ci_high)
        )
        table.add(
            row["scope"],
            f"{row['a']} − {row['b']}",
            row["seeds"],
            number(row["mean"], POINTS.text(row["mean"], sign=True)),
            interval(row["low"], row["high"], POINTS, sign=True),
            number(mean, POINTS.text(mean, sign=True)),
            interval(low, high, POINTS, sign=True),
            number(row["mean"] - mean, POINTS.text(row["mean"] - mean, sign=True)),
            verdict(mean, row["low"], row["high"]),
            variants=(row["a"], row["b"]),
        )
    return table if table.rows else None


def verdict(paper_value: float, low: float, high: float) -> str:
    """Whether the paper's value lies inside our interval."""
    if math.isnan(low):
        return "one seed: no interval to compare with"
    return "inside our interval" if low <= paper_value <= high else "outside our interval"


def _add(
    table: Table, scope: Scope, variant: str, metric: str, values: Mapping[int, float], printed: float
) -> None:
    shown = METRICS[metric]
    result = paired_difference(values, dict.fromkeys(values, 0.0))
    low, high = (math.nan if end is None else end for end in (result.low, result.high))
    difference = result.mean - printed
    table.add(
        scope.label,
        variant,
        shown.label,
        len(values),
        number(result.mean, shown.text(result.mean)),
        interval(low, high, shown),
        Cell(shown.text(printed), printed),
        number(difference, shown.text(difference, sign=True)),
        verdict(printed, low, high),
        variants=(variant,),
        group=f"{scope.label}/{variant}",
    )


def _presets(results: Results, setting: str, scope: Scope, variant: str) -> list[Preset] | None:
    """The paper preset behind each of the scope's mixtures, if all runs have one, of one setting."""
    found = []
    for mixture in scope.mixtures:
        names = {str(run.config.get("preset")) for run in results.cell(setting, mixture, variant).values()}
        if len(names) != 1 or not (name := names.pop()).startswith("paper/") or not presets.is_preset(name):
            return None
        found.append(presets.find(name))
    return found if len({(preset.setting, preset.method) for preset in found}) == 1 else None


def _published(found: list[Preset], metric: str) -> float | None:
    """The paper's endpoint, or the mean of its endpoints over the mixtures."""
    values = [preset.published.get(metric) for preset in found]
    if None in values or "" in values:
        return None
    return math.fsum(float(value) for value in values if value) / len(values)


def _paired_row(a: list[Preset], b: list[Preset]) -> Paired | None:
    """The paper's row for these two, when they are its main configurations of one of its scopes."""
    subjects = {_plain(preset.subject) for preset in a}
    if subjects != {_plain(preset.subject) for preset in b} or a[0].setting != b[0].setting:
        return None
    if any(preset.name.startswith("paper/lambda_sweep/") for preset in (*a, *b)):
        return None
    wanted = (a[0].setting, SCOPES.get(frozenset(subjects)), f"{a[0].method}-{b[0].method}", "acc")
    return next((row for row in paper.paired() if row[:4] == wanted), None)


def _plain(subject: str) -> str:
    """Mixture or task without the spelling differences (``SST-2``, ``sst2``)."""
    return subject.lower().replace("-", "")


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
