"""The opening of a setting: what its runs allow to say, in words, and one table of the widest scope."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd

from gar.evaluation.findings import BALANCED, INFORMATION
from gar.metrics import METRICS, holm, t_test
from gar.report._numbers import Numbers, Scope, mean_interval
from gar.report._table import Cell, Row, Table, interval, shown
from gar.report.verdict import LEAST_SEEDS, POINTS, Kind, Paired, counted, judge, listing
from gar.runs import State

#: Percentage points by which an earlier evaluation has to be better for a run to have peaked.
PEAK = 1.0
#: The metrics of the opening's table beside accuracy.
SHOWN = ("nmi", "purity_above_floor", "effective_experts")


def sentences(results: Numbers, setting: str, compared: pd.DataFrame) -> list[str]:
    """What the setting's runs allow to say; ``compared`` are the paired differences in accuracy."""
    scope = results.scopes(setting)[-1]
    here = [
        row
        for row in compared.to_dict("records")
        if row["setting"] == setting and row["scope"] == scope.label
        if row["b"] in results.references(setting)
    ]
    pairs = {row["a"]: _paired(row) for row in here if row["seeds"]}
    refused = [row["a"] for row in here if not row["seeds"]]
    said = [f"All of it is about the {scope.label}."] if scope.kind == "all" else []
    said += _accuracy(pairs, results, setting)
    if refused:
        missing = "other seeds than Baseline; the table of differences says which are missing"
        said.append(f"Not compared: {listing(refused)}, with {missing}.")
    return [*said, *_experts(results, setting, scope), *_unusual(results, setting)]


def _paired(row: Mapping[str, object]) -> Paired:
    mean, low, high, differences = (row[key] for key in ("mean", "low", "high", "differences"))
    assert isinstance(differences, Mapping)
    return Paired(float(str(mean)), float(str(low)), float(str(high)), tuple(map(int, differences)))


def _accuracy(pairs: Mapping[str, Paired], results: Numbers, setting: str) -> list[str]:
    """Who is better or worse than Baseline, who is neither, and what is left after Holm's correction."""
    references = results.references(setting)
    if not references:
        return ["There is no run of Baseline to compare with."]
    spread = {
        name: judge(name, name, found, references[0])
        for name, found in pairs.items()
        if len(found.seeds) >= LEAST_SEEDS
    }
    told = [v.text for v in spread.values() if v.kind not in (Kind.OPEN, Kind.SAME)]
    neither = [name for name, v in spread.items() if v.kind in (Kind.OPEN, Kind.SAME)]
    few = [name for name, found in pairs.items() if len(found.seeds) < LEAST_SEEDS]
    if neither:
        told.append(f"No difference in accuracy from {references[0]} is shown for {listing(neither)}.")
    if few:
        told.append(f"Too few seeds to judge {listing(few)} by; {LEAST_SEEDS} in common are the least.")
    judged = [name for name, v in spread.items() if v.kind in (Kind.BETTER, Kind.WORSE, Kind.OPEN)]
    if len(judged) > 1 and any(spread[name].kind is not Kind.OPEN for name in judged):
        chances = [_chance(results, setting, name, references[0], pairs[name]) for name in judged]
        left = [name for name, p in zip(judged, holm(chances), strict=True) if p < 0.05]
        kept = (
            f"{listing(left)} still differ{'s' if len(left) == 1 else ''}" if left else "none still differs"
        )
        told.append(f"After Holm's correction for {len(judged)} comparisons {kept} from {references[0]}.")
    return told


def _chance(results: Numbers, setting: str, name: str, reference: str, found: Paired) -> float:
    """The p-value of the paired t-test behind an interval."""
    scope = results.scopes(setting)[-1]
    values = [results.values("accuracy", setting, scope, v) for v in (name, reference)]
    differences = (values[0] - values[1])[list(found.seeds)]
    return t_test(differences)


def _experts(results: Numbers, setting: str, scope: Scope) -> list[str]:
    """How evenly the experts are used, and whether they belong to tasks."""
    kinds: dict[str, list[str]] = {}
    for variant in results.variants(setting):
        used = results.values("effective_experts", setting, scope, variant).mean()
        told = results.values("nmi", setting, scope, variant).mean()
        if math.isnan(used) or math.isnan(told):
            continue
        low, high = INFORMATION
        special = (
            "specialised" if told >= high else "weakly specialised" if told >= low else "not specialised"
        )
        balance = "balanced" if used >= BALANCED else "unevenly used"
        word = "and" if balance == "unevenly used" or special != "not specialised" else "but"
        kinds.setdefault(f"{balance} {word} {special}", []).append(variant)
    if not kinds:
        return []
    return [f"Experts are {'; '.join(f'{kind} under {listing(who)}' for kind, who in kinds.items())}."]


def _unusual(results: Numbers, setting: str) -> list[str]:
    """What a reader should know before trusting the rest."""
    said, runs = [], results.counted[results.counted["setting"] == setting]["run"]
    if dead := sum(results.label(run)[0] == setting for run, _ in results.collapses):
        said.append(f"In {dead} of {counted(len(runs))} experts are dead or one has nearly all the load.")
    accuracy = METRICS["accuracy"]
    peaks = 0
    for run in runs:
        earlier = [accuracy.read(sections) for _, sections in run.evaluations[:-1]]
        peaks += bool(earlier) and max(earlier) - accuracy.read(run.result) >= PEAK / 100
    if peaks:
        said.append(
            f"{counted(peaks)} of {len(runs)} did better on the way than at the end, by {PEAK:g} point or "
            "more."
        )
    low: Counter[str] = Counter()
    for run in runs:
        tasks = run.result["accuracy"]["tasks"]
        low.update(t for t, share in (run.result.get("majority") or {}).items() if tasks.get(t, 1.0) <= share)
    if low:
        found = listing([f"{task} ({times})" for task, times in low.most_common()])
        said.append(
            f"Of {counted(len(runs))} some are not above the majority class in a task: {found}; there "
            "accuracy says little."
        )
    without = [run for run in results.members(setting) if run.state != State.FINISHED]
    if without:
        said.append(f"{counted(len(without))} of this setting without a result; see above.")
    return said


def table(results: Numbers, setting: str, endpoints: pd.DataFrame, compared: pd.DataFrame) -> Table:
    """One line a method in the widest scope; bold is all that cannot be told from the most accurate."""
    scope = results.scopes(setting)[-1]
    here = endpoints[(endpoints["setting"] == setting) & (endpoints["scope"] == scope.label)]
    rows = [row for row in here.to_dict("records") if row["seeds"]]
    if not rows:
        return Table("opening", "", [])
    best = max(rows, key=lambda row: row["accuracy"])["variant"]
    differences = compared[(compared["setting"] == setting) & (compared["scope"] == scope.label)]
    from_base = {
        row["a"]: row for row in differences.to_dict("records") if row["b"] in results.references(setting)
    }
    shown_rows = []
    for row in rows:
        found = from_base.get(row["variant"])
        limits = None if found is None else interval(POINTS, found["low"], found["high"], sign=True).text
        contents: dict[str, Cell | str] = {
            "method": row["variant"],
            "seeds": Cell(str(row["seeds"]), row["seeds"]),
            "accuracy, %": shown(METRICS["accuracy"], row["accuracy"]),
            "difference from Baseline, pp": Cell("–")
            if found is None or not found["seeds"]
            else Cell(f"{POINTS.text(found['mean'], sign=True)} {limits}", found["mean"]),
            **{
                f"{METRICS[name].label} {METRICS[name].arrow}".rstrip(): shown(METRICS[name], row[name])
                for name in SHOWN
            },
        }
        strong = row["variant"] == best or not _behind(results, setting, scope, best, row["variant"])
        shown_rows.append(Row(contents, (row["variant"],), strong=strong))
    note = (
        "Bold: the highest mean accuracy, and all that its paired 95 % interval does not set apart from it. "
        "Nominal intervals."
    )
    return Table("opening", f"In one table: {scope.label}", shown_rows, [note], strong=(0, 2))


def _behind(results: Numbers, setting: str, scope: Scope, best: str, other: str) -> bool:
    """Whether the interval of ``best - other`` lies above 0."""
    values = [results.values("accuracy", setting, scope, v) for v in (best, other)]
    found = (values[0] - values[1]).dropna()
    return Paired(*mean_interval(found), tuple(map(int, found.index))).side > 0


def opening(
    results: Numbers, setting: str, endpoints: pd.DataFrame, compared: pd.DataFrame
) -> tuple[Sequence[str], Table]:
    """The sentences and the table."""
    return sentences(results, setting, compared), table(results, setting, endpoints, compared)
