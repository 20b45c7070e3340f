"""Any number of runs as one set of results: a table, endpoints, paired differences.

Only runs of one setting are ever put together; what a setting is stands in
:mod:`gar.report.grouping`. Mixtures are averaged within a seed first, then seeds are compared;
values stay unrounded until they are shown.
Nothing is left out silently: what could not be averaged or paired has a ``note`` that says why.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from gar.errors import UserError, nearest
from gar.metrics import describe_collapse, paired_difference, pareto_front, population_std
from gar.report import grouping
from gar.runs.reading import FINISHED, UNREADABLE, Run, find_runs, read_run

BINS = {"5–6 tasks": (5, 6), "7–8 tasks": (7, 8)}
PARETO = ("accuracy", "gradient_mass_purity", "utilization", "load_variance")


@dataclass(frozen=True)
class Metric:
    """How a metric is shown; ``better`` is 1 (higher), -1 (lower) or 0 (neither)."""

    label: str
    better: int
    digits: int
    scale: float = 1.0
    unit: str = ""

    def text(self, value: float | None, sign: bool = False) -> str:
        """The value in its unit, or a dash."""
        if value is None or not math.isfinite(value):
            return "–"
        shown = f"{self.scale * value:{'+' if sign else ''}z.{self.digits}f}"
        return shown.replace("-", "−")


METRICS = {
    "accuracy": Metric("accuracy", 1, 2, 100, "%"),
    "load_variance": Metric("load variance", -1, 5),
    "utilization": Metric("utilization", 1, 3),
    "gradient_mass_purity": Metric("gradient-mass purity", 1, 4),
    "structure_purity": Metric("structure purity", 0, 4),
    "nmi": Metric("NMI", 0, 4),
    "ari": Metric("ARI", 0, 4),
    "normalized_entropy": Metric("normalized entropy", 0, 4),
    "intra_expert_coherence": Metric("intra-expert coherence", 0, 4),
    "inter_expert_similarity": Metric("inter-expert similarity", 0, 4),
}
EXTRA_METRICS = {
    "entropy": Metric("routing entropy", 0, 4, unit="nats"),
    "step_seconds": Metric("time per update", -1, 1, 1000, "ms"),
}


@dataclass(frozen=True)
class Scope:
    """What a row is about: one mixture, a bin of task counts, or all mixtures of a setting."""

    label: str
    kind: str
    mixtures: tuple[str, ...]


def load(paths: str | Path | Sequence[str | Path]) -> Results:
    """Read run directories: the given ones, and all below the given ones."""
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found = find_runs(given)
    if not found:
        raise UserError(
            f"no run directories in {', '.join(map(str, given))}; expected some written by gar train --out"
        )
    return Results([read_run(path) for path in found])


class Results:
    """Runs with their settings, mixtures and variants named; see :func:`load`."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = tuple(runs)
        readable = [run for run in self.runs if run.config]
        self._settings = grouping.name_settings(readable)
        self._mixtures = grouping.name_mixtures(readable, self._settings)
        self._variants = grouping.name_variants(readable, self._settings, self._mixtures)
        self._cells, self._repeats = self._place()

    def __repr__(self) -> str:
        states = pd.Series([run.state for run in self.runs], dtype=object).value_counts()
        return f"Results({', '.join(f'{count} {state}' for state, count in states.items())})"

    def _place(self) -> tuple[dict[tuple[str, str, str], dict[int, Run]], list[str]]:
        """Finished runs by (setting, mixture, variant) and seed; a repeated seed counts once and is noted."""
        cells: dict[tuple[str, str, str], dict[int, Run]] = defaultdict(dict)
        repeats = []
        for run in self.runs:
            if run.state != FINISHED:
                continue
            cell = cells[self._settings[run], self._mixtures[run], self._variants[run]]
            first = cell.setdefault(grouping.seed_of(run), run)
            if first is not run:
                same = first.result["accuracy"] == run.result["accuracy"]
                repeats.append(
                    f"{run.path} repeats {first.path} (same configuration and seed, "
                    f"{'same' if same else 'different'} accuracies) and is not counted"
                )
        return dict(cells), repeats

    # -- what there is ---------------------------------------------------------------------------------

    @property
    def settings(self) -> list[str]:
        """Settings that have finished runs."""
        return list(dict.fromkeys(setting for setting, _, _ in sorted(self._cells)))

    def mixtures(self, setting: str) -> list[str]:
        """Mixtures with finished runs, fewest tasks first."""
        found = {m for s, m, _ in self._cells if s == setting}
        return sorted(found, key=lambda m: (self._task_count(setting, m), m))

    def variants(self, setting: str) -> list[str]:
        """Methods with finished runs in the paper's order, several times where hyper-parameters differ."""
        found = {v: next(iter(runs.values())) for (s, _, v), runs in self._cells.items() if s == setting}
        return sorted(found, key=lambda v: (grouping.method_rank(self.method(v)), _coefficient(found[v]), v))

    def method(self, variant: str) -> str:
        """The method's configuration name behind a variant."""
        return next(
            (grouping.method_of(run) for run, name in self._variants.items() if name == variant), variant
        )

    def cell(self, setting: str, mixture: str, variant: str) -> dict[int, Run]:
        """The finished runs that count, by seed."""
        return dict(sorted(self._cells.get((setting, mixture, variant), {}).items()))

    def members(self, setting: str) -> list[Run]:
        """All readable runs of a setting, in any state."""
        return [run for run, name in self._settings.items() if name == setting]

    def scopes(self, setting: str) -> list[Scope]:
        """Each mixture, then the bins of task counts that hold several, then the mean over all."""
        mixtures = self.mixtures(setting)
        scopes = [Scope(mixture, "mixture", (mixture,)) for mixture in mixtures]
        if len(mixtures) < 2:
            return scopes
        for label, (low, high) in BINS.items():
            inside = tuple(m for m in mixtures if low <= self._task_count(setting, m) <= high)
            if 1 < len(inside) < len(mixtures):
                scopes.append(Scope(label, "bin", inside))
        return [*scopes, Scope(f"mean of {len(mixtures)} mixtures", "all", tuple(mixtures))]

    def lone_bins(self, setting: str) -> dict[str, str]:
        """Bins that hold one of several mixtures, and are no scope since they are that mixture."""
        mixtures = self.mixtures(setting) if len(self.mixtures(setting)) > 1 else []
        inside = {
            label: [m for m in mixtures if low <= self._task_count(setting, m) <= high]
            for label, (low, high) in BINS.items()
        }
        return {label: found[0] for label, found in inside.items() if len(found) == 1}

    def _task_count(self, setting: str, mixture: str) -> int:
        runs = [
            run
            for (s, m, _), cell in self._cells.items()
            if (s, m) == (setting, mixture)
            for run in cell.values()
        ]
        return len(runs[0].result["accuracy"]["tasks"]) if runs else 0

    def label(self, run: Run) -> tuple[str, str, str]:
        """``(setting, mixture, variant)`` of a run, in any state; dashes where it is unreadable."""
        return (self._settings.get(run, "–"), self._mixtures.get(run, "–"), self._variants.get(run, "–"))

    @property
    def problems(self) -> list[Run]:
        """Runs that are not finished: running, failed or unreadable, each with its reason."""
        return [run for run in self.runs if run.state != FINISHED]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row a run, in any state. Accuracies of tasks are columns ``accuracy.<task>``."""
        return pd.DataFrame([self._row(run) for run in self.runs])

    @cached_property
    def histories(self) -> pd.DataFrame:
        """Long table of all evaluations of the runs that count, the final ones included."""
        rows = [
            {"setting": s, "mixture": m, "variant": v, "seed": seed, "update": update, **measured(sections)}
            for (s, m, v), cell in self._cells.items()
            for seed, run in sorted(cell.items())
            for update, sections in run.evaluations
        ]
        return pd.DataFrame(
            rows, columns=["setting", "mixture", "variant", "seed", "update", *METRICS, "entropy"]
        )

    def _row(self, run: Run) -> dict[str, Any]:
        setting, mixture, variant = self.label(run)
        readable = run.state != UNREADABLE or bool(run.config)
        values = grouping.hyperparameters(run) if readable else {}
        rate = values.pop("learning_rate", None)
        row: dict[str, Any] = {
            "path": str(run.path),
            "state": run.state,
            "reason": run.reason,
            "setting": setting,
            "mixture": mixture,
            "method": grouping.method_of(run),
            "variant": variant,
            "seed": grouping.seed_of(run) if readable else None,
            "preset": run.config.get("preset"),
            "updates": run.result.get("updates", run.last_update),
            "learning_rate": rate,
            "coefficients": ", ".join(f"{key}={value}" for key, value in values.items()),
            "coefficient": values.get("coefficient"),
            **measured(run.result),
        }
        accuracy = run.result.get("accuracy") or {}
        row |= {f"accuracy.{task}": share for task, share in (accuracy.get("tasks") or {}).items()}
        row |= {f"extra.{name}": value for name, value in (accuracy.get("extra") or {}).items()}
        timing = run.result.get("timing") or {}
        row["step_seconds"] = _number(timing.get("step_seconds_mean"))
        row["updates_per_second"] = _number(timing.get("updates_per_second"))
        return row

    # -- statistics ------------------------------------------------------------------------------------

    def values(self, metric: str, setting: str, scope: Scope, variant: str) -> dict[int, float]:
        """The metric by seed, averaged over the scope's mixtures within each seed that has all of them."""
        per_mixture = [self._by_seed(metric, setting, mixture, variant) for mixture in scope.mixtures]
        seeds = set(per_mixture[0]).intersection(*per_mixture) if per_mixture else set()
        return {seed: math.fsum(m[seed] for m in per_mixture) / len(per_mixture) for seed in sorted(seeds)}

    def missing(self, metric: str, setting: str, scope: Scope, variant: str) -> str:
        """Which mixture and seed is absent although the variant has that seed elsewhere; empty if none is."""
        per_mixture = {m: self._by_seed(metric, setting, m, variant) for m in scope.mixtures}
        seeds = sorted({seed for values in per_mixture.values() for seed in values})
        lacking = {m: [seed for seed in seeds if seed not in values] for m, values in per_mixture.items()}
        return "; ".join(f"{variant} lacks {m} with {_seeds(gap)}" for m, gap in lacking.items() if gap)

    def endpoints(self, common_seeds: bool = False) -> pd.DataFrame:
        """Means over seeds per setting, scope and variant, population std, t interval, Pareto front.

        A mean over mixtures is given only where every seed has every mixture; with ``common_seeds`` it is
        over the seeds that do. Either way ``note`` names what is missing.
        """
        rows = []
        for setting in self.settings:
            for scope in self.scopes(setting):
                block = [self._endpoint(setting, scope, v, common_seeds) for v in self.variants(setting)]
                block = [row for row in block if row["seeds"] or row["note"]]
                points = {row["variant"]: [row[m] for m in PARETO] for row in block}
                points = {name: point for name, point in points.items() if all(map(math.isfinite, point))}
                front = pareto_front(points)
                rows += [{**row, "pareto": row["variant"] in front} for row in block]
        return pd.DataFrame(rows, columns=ENDPOINT_COLUMNS)

    def _endpoint(self, setting: str, scope: Scope, variant: str, common_seeds: bool) -> dict[str, Any]:
        note = self.missing("accuracy", setting, scope, variant)
        accuracy = {} if note and not common_seeds else self.values("accuracy", setting, scope, variant)
        row: dict[str, Any] = {
            "setting": setting,
            "scope": scope.label,
            "kind": scope.kind,
            "mixtures": "+".join(scope.mixtures),
            "method": self.method(variant),
            "variant": variant,
            "seeds": len(accuracy),
            "seed_list": " ".join(map(str, accuracy)),
        }
        for name in METRICS:
            values = self.values(name, setting, scope, variant)
            values = {seed: value for seed, value in values.items() if seed in accuracy}
            row[name] = _mean(values.values()) if len(values) == len(accuracy) else math.nan
            if name == "accuracy":
                row |= dict(
                    zip(("accuracy_std", "accuracy_low", "accuracy_high"), _spread(values), strict=True)
                )
        return {**row, "note": ("not averaged: " if note and not common_seeds else "") + note}

    def paired(
        self, metric: str = "accuracy", a: str = "gar", b: str = "baseline", common_seeds: bool = False
    ) -> pd.DataFrame:
        """Differences ``a - b`` over seeds in every setting and scope that has both.

        ``a`` and ``b`` are methods or variants. Unequal seeds are not compared unless ``common_seeds`` is
        set; ``note`` says which are missing. One seed has no interval.
        """
        for name in (a, b):
            self._known(name)
        rows = [
            self._pair(metric, setting, scope, left, right, common_seeds)
            for setting in self.settings
            for left in self._named(setting, a)
            for right in self._named(setting, b)
            if left != right
            for scope in self.scopes(setting)
        ]
        return pd.DataFrame([row for row in rows if row is not None], columns=PAIRED_COLUMNS)

    def comparisons(self, metric: str = "accuracy", common_seeds: bool = False) -> pd.DataFrame:
        """Every variant minus Baseline, and GAR minus every other, in each setting.

        Where GAR has several variants (a sweep), only differences from Baseline are listed.
        """
        rows = [
            self._pair(metric, setting, scope, a, b, common_seeds)
            for setting in self.settings
            for scope in self.scopes(setting)
            for a, b in self._pairs(setting)
        ]
        return pd.DataFrame([row for row in rows if row is not None], columns=PAIRED_COLUMNS)

    def _pairs(self, setting: str) -> list[tuple[str, str]]:
        variants = self.variants(setting)
        bases, gars = self._named(setting, "baseline"), self._named(setting, "gar")
        pairs = [(v, base) for base in bases for v in variants if v not in bases]
        if len(gars) == 1:
            pairs += [(gars[0], v) for v in variants if v != gars[0] and v not in bases]
        return pairs

    def _pair(
        self, metric: str, setting: str, scope: Scope, a: str, b: str, common_seeds: bool
    ) -> dict[str, Any] | None:
        left, right = (self.values(metric, setting, scope, v) for v in (a, b))
        gaps = [gap for v in (a, b) if (gap := self.missing(metric, setting, scope, v))]
        for name, mine, other in ((a, left, right), (b, right, left)):
            alone = sorted(set(other) - set(mine))
            if mine and alone and not any(gap.startswith(f"{name} lacks") for gap in gaps):
                gaps.append(f"{name} lacks {_seeds(alone)}")
        if not (left and right) and not gaps:
            return None  # one of the two was never run here
        row: dict[str, Any] = {"setting": setting, "scope": scope.label, "kind": scope.kind, "metric": metric}
        row |= {"mixtures": "+".join(scope.mixtures), "a": a, "b": b, "seeds": 0, "differences": {}}
        row |= dict.fromkeys(("mean", "low", "high"), math.nan)
        common = sorted(set(left) & set(right))
        if (gaps and not common_seeds) or not common:
            return {**row, "note": "not compared: " + ("; ".join(gaps) or "no seed in common")}
        result = paired_difference({s: left[s] for s in common}, {s: right[s] for s in common})
        low, high = (math.nan if value is None else value for value in (result.low, result.high))
        notes = [f"over {_seeds(common)} only: {'; '.join(gaps)}"] if gaps else []
        notes += ["one seed: no interval"] if len(common) == 1 else []
        row |= {"seeds": len(common), "mean": result.mean, "low": low, "high": high, "note": "; ".join(notes)}
        return {**row, "differences": {s: left[s] - right[s] for s in common}}

    def _by_seed(self, metric: str, setting: str, mixture: str, variant: str) -> dict[int, float]:
        runs = self.cell(setting, mixture, variant)
        values = {seed: self._measure(metric, run) for seed, run in runs.items()}
        return {seed: value for seed, value in values.items() if math.isfinite(value)}

    def _measure(self, metric: str, run: Run) -> float:
        if metric == "step_seconds":
            return _number((run.result.get("timing") or {}).get("step_seconds_mean"))
        if metric.startswith("accuracy."):
            return _number(run.result["accuracy"]["tasks"].get(metric.removeprefix("accuracy.")))
        if metric not in METRICS and metric not in EXTRA_METRICS:
            known = [*METRICS, *EXTRA_METRICS]
            raise UserError(
                f"unknown metric {metric!r}; expected one of {', '.join(known)}{nearest(metric, known)}"
            )
        return measured(run.result)[metric]

    def _named(self, setting: str, name: str) -> list[str]:
        variants = self.variants(setting)
        return [name] if name in variants else [v for v in variants if self.method(v) == name]

    def _known(self, name: str) -> None:
        known = [*grouping.METHODS, *dict.fromkeys(self._variants.values())]
        if name not in known:
            raise UserError(
                f"unknown method {name!r}; expected one of {', '.join(known)}{nearest(name, known)}"
            )

    # -- what has to be said -----------------------------------------------------------------------------

    @property
    def notes(self) -> list[str]:
        """Repeated runs, and settings whose runs differ in versions or devices."""
        notes = list(self._repeats)
        for setting in self.settings:
            runs = [run for (s, _, _), cell in self._cells.items() if s == setting for run in cell.values()]
            for key in ("gar", "commit", "libraries.torch", "libraries.transformers", "device_name"):
                values = sorted({str(grouping.flat(run.environment).get(key)) for run in runs})
                if len(values) > 1:
                    notes.append(f"{setting}: runs have different {key}: {', '.join(values)}")
        return notes

    @property
    def collapses(self) -> list[tuple[Run, str]]:
        """Finished runs whose experts collapsed, with what happened in plain words."""
        found = []
        for run in self.runs:
            try:
                said = describe_collapse(run.result["routing"]["load"]) if run.state == FINISHED else None
            except (KeyError, ValueError):
                continue  # a result without loads says nothing
            if said:
                found.append((run, said))
        return found


ENDPOINT_COLUMNS = ["setting", "scope", "kind", "mixtures", "method", "variant", "seeds", "seed_list"]
ENDPOINT_COLUMNS += [*METRICS, "accuracy_std", "accuracy_low", "accuracy_high", "pareto", "note"]
PAIRED_COLUMNS = ["setting", "scope", "kind", "mixtures", "metric", "a", "b", "seeds", "mean", "low", "high"]
PAIRED_COLUMNS += ["differences", "note"]


def measured(sections: Mapping[str, Any]) -> dict[str, float]:
    """Accuracy and routing metrics of a result or an evaluation; NaN for what it lacks."""
    routing = sections.get("routing") or {}
    values = {name: _number(routing.get(name)) for name in (*METRICS, "entropy")}
    values["accuracy"] = _number((sections.get("accuracy") or {}).get("macro"))
    experts = len(routing.get("load") or ())
    if math.isnan(values["normalized_entropy"]) and experts:  # not part of the result's contract
        values["normalized_entropy"] = values["entropy"] / math.log(experts) if experts > 1 else 0.0
    return values


def _spread(values: Mapping[int, float]) -> tuple[float, float, float]:
    """Population std and the two-sided 95 % t interval of the mean; NaN where one seed is all."""
    if len(values) < 2:
        return math.nan, math.nan, math.nan
    _, low, high = paired_difference(values, dict.fromkeys(values, 0.0))
    assert low is not None  # for mypy: two seeds have an interval
    assert high is not None
    return population_std(list(values.values())), low, high


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _coefficient(run: Run) -> float:
    value = _number(grouping.hyperparameters(run).get("coefficient"))
    return -1.0 if math.isnan(value) else value


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
