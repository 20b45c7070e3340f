"""Any number of runs as one set of results: a table, endpoints, paired differences.

Only runs of one setting are ever put together; what a setting is stands in :mod:`gar.report._grouping`.
Mixtures are averaged within a seed first, then seeds are compared; values stay unrounded until shown.
Nothing is left out silently: what could not be averaged or paired has a ``note`` that says why.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import pandas as pd

from gar.config import flat
from gar.errors import UserError, nearest
from gar.methods import REGISTRY
from gar.metrics import (
    METRICS,
    OBJECTIVES,
    describe_collapse,
    paired_difference,
    pareto_front,
    population_std,
)
from gar.metrics.catalogue import listed
from gar.report import _grouping as grouping
from gar.runs import Run, State

BINS = {"5–6 tasks": (5, 6), "7–8 tasks": (7, 8)}


@dataclass(frozen=True)
class Scope:
    """What a row is about: one mixture, a bin of task counts, or all mixtures of a setting."""

    label: str
    kind: str
    mixtures: tuple[str, ...]


class Numbers:
    """Runs with their settings, mixtures and variants named; :class:`gar.report.Results` adds their look."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = tuple(runs)
        self._names = grouping.name_runs(run for run in self.runs if run.config)
        self._by_seed: dict[tuple[str, Scope], dict[str, pd.DataFrame]] = {}
        self._columns: dict[tuple[str, str, Scope, str], dict[int, float]] = {}
        #: By run the keys in which it differs from its preset, once they were asked for.
        self.deviations: dict[Run, Sequence[str]] = {}

    @property
    def summary(self) -> str:
        """How many runs are in which state, the most common one first."""
        counts = Counter(run.state for run in self.runs).most_common()
        return ", ".join(f"{count} {state}" for state, count in counts)

    # -- what there is ---------------------------------------------------------------------------------

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row a run, in any state. Accuracies of tasks are columns ``accuracy.<task>``."""
        columns = None if self.runs else FRAME_COLUMNS
        return pd.DataFrame([self._row(run) for run in self.runs], columns=columns)

    def _row(self, run: Run) -> dict[str, Any]:
        values = grouping.hyperparameters(run)
        rate = values.pop("learning_rate")
        accuracy = run.result.get("accuracy") or {}
        identity = (
            str(run.path),
            run.state,
            run.reason,
            *self.label(run),
            grouping.method_of(run),
            grouping.seed_of(run) if run.config else None,
            run.config.get("preset"),
            run.result.get("updates", run.last_update),
            rate,
            ", ".join(f"{key}={value}" for key, value in values.items()),
            values.get("coefficient"),
        )
        return {
            **dict(zip(FRAME_COLUMNS, identity, strict=True)),
            **measured(run.result),
            **{f"accuracy.{task}": share for task, share in (accuracy.get("tasks") or {}).items()},
            **{f"extra.{name}": value for name, value in (accuracy.get("extra") or {}).items()},
        }

    @cached_property
    def _finished(self) -> pd.DataFrame:
        """The rows of the finished runs, with the run itself."""
        rows = self.frame.assign(run=pd.Series(self.runs, dtype=object))
        return rows[rows["state"] == State.FINISHED].astype({"seed": int})

    @cached_property
    def counted(self) -> pd.DataFrame:
        """The rows of the finished runs by seed, with the run itself; a repeated seed counts once."""
        return self._finished.drop_duplicates([*CELL, "seed"]).sort_values("seed", kind="stable")

    @property
    def settings(self) -> list[str]:
        """Settings that have finished runs."""
        return sorted(self.counted["setting"].unique())

    def mixtures(self, setting: str) -> list[str]:
        """Mixtures with finished runs, fewest tasks first."""
        return sorted(counts := self._task_counts(setting), key=lambda mixture: (counts[mixture], mixture))

    def variants(self, setting: str) -> list[str]:
        """Methods with finished runs in the paper's order, several times where hyper-parameters differ."""
        return list(self._orders.get(setting, []))

    @cached_property
    def _orders(self) -> dict[Any, list[str]]:
        order = {name: rank for rank, name in enumerate(REGISTRY)}
        ranks = self.counted["method"].map(order).fillna(len(order))
        coefficients = pd.to_numeric(self.counted["coefficient"], "coerce").fillna(-1)
        rows = self.counted.assign(rank=ranks, coefficient=coefficients)
        rows = rows.sort_values(["rank", "method", "coefficient", "variant"])
        return {setting: list(found.unique()) for setting, found in rows.groupby("setting")["variant"]}

    @cached_property
    def _methods(self) -> dict[str, str]:
        return {names.variant: grouping.method_of(run) for run, names in self._names.items()}

    def method(self, variant: str) -> str:
        """The method's configuration name behind a variant."""
        return self._methods.get(variant, variant)

    def references(self, setting: str) -> list[str]:
        """The variants that others are compared with: Baseline's."""
        return self._called(setting, None, "reference")

    def compared(self, setting: str) -> list[str]:
        """The two variants that figures set side by side: Baseline, and the most accurate one of GAR.

        Without GAR it is the most accurate of all others; accuracies are means in the widest scope. One that
        has no runs is left out.
        """
        scope, bases = self.scopes(setting)[-1], self.references(setting)[:1]
        others = [v for v in self.variants(setting) if v not in bases]
        own = [v for v in self._called(setting, None, "proposed") if v not in bases] or others
        means = {v: self.values("accuracy", setting, scope, v).mean() for v in own}
        best = [max(own, key=lambda v: -math.inf if math.isnan(means[v]) else means[v])] if own else []
        return bases + best

    def majority(self, setting: str, scope: Scope) -> float:
        """Accuracy of always answering a task's most frequent label, as the accuracy is averaged.

        NaN where a mixture has no run that tells; results of versions before 0.2 do not.
        """
        told = {}
        rows = self.counted[self.counted["setting"] == setting]
        for mixture, run in zip(rows["mixture"], rows["run"], strict=True):
            if shares := run.result.get("majority"):
                told[mixture] = fmean(shares.values())
        return fmean(told.get(mixture, math.nan) for mixture in scope.mixtures)

    def cell(self, setting: str, mixture: str, variant: str) -> dict[int, Run]:
        """The finished runs that count, by seed."""
        return dict(self._cells.get((setting, mixture, variant), {}))

    @cached_property
    def _cells(self) -> dict[Any, dict[int, Run]]:
        groups = self.counted.groupby(CELL)
        return {key: dict(zip(rows["seed"], rows["run"], strict=True)) for key, rows in groups}

    def members(self, setting: str) -> list[Run]:
        """All readable runs of a setting, in any state."""
        return [run for run in self.runs if self.label(run)[0] == setting]

    def scopes(self, setting: str) -> list[Scope]:
        """Each mixture, then the bins of task counts that hold several, then the mean over all."""
        mixtures = self.mixtures(setting)
        scopes = [Scope(mixture, "mixture", (mixture,)) for mixture in mixtures]
        if len(mixtures) < 2:
            return scopes
        bins = [Scope(label, "bin", inside) for label, inside in self._bins(setting).items()]
        scopes += [found for found in bins if 1 < len(found.mixtures) < len(mixtures)]
        return [*scopes, Scope(f"mean of {len(mixtures)} mixtures", "all", tuple(mixtures))]

    def lone_bins(self, setting: str) -> dict[str, str]:
        """Bins that hold one of several mixtures, and are no scope since they are that mixture."""
        several = len(self.mixtures(setting)) > 1
        return {
            label: inside[0] for label, inside in self._bins(setting).items() if several and len(inside) == 1
        }

    def _bins(self, setting: str) -> dict[str, tuple[str, ...]]:
        counts = self._task_counts(setting)
        return {
            label: tuple(m for m in self.mixtures(setting) if low <= counts[m] <= high)
            for label, (low, high) in BINS.items()
        }

    def _task_counts(self, setting: str) -> dict[str, int]:
        return self._all_task_counts.get(setting, {})

    @cached_property
    def _all_task_counts(self) -> dict[str, dict[str, int]]:
        counts: dict[str, dict[str, int]] = {}
        for setting, mixture, run in self.counted[["setting", "mixture", "run"]].itertuples(index=False):
            counts.setdefault(setting, {})[mixture] = len(run.result["accuracy"]["tasks"])
        return counts

    def label(self, run: Run) -> grouping.Names:
        """``(setting, mixture, variant)`` of a run, in any state; dashes where it is unreadable."""
        return self._names.get(run, grouping.Names("–", "–", "–"))

    @property
    def problems(self) -> list[Run]:
        """Runs that are not finished, each with its reason."""
        return [run for run in self.runs if run.state != State.FINISHED]

    @cached_property
    def histories(self) -> pd.DataFrame:
        """Long table of all evaluations of the runs that count, the final ones included."""
        rows = [
            {**self.label(run)._asdict(), "seed": seed, "update": update, **measured(sections)}
            for seed, run in zip(self.counted["seed"], self.counted["run"], strict=True)
            for update, sections in run.evaluations
        ]
        of_evaluations = [name for name in measured({}) if METRICS[name].path[0] != "timing"]
        return pd.DataFrame(rows, columns=[*CELL, "seed", "update", *of_evaluations])

    # -- statistics ------------------------------------------------------------------------------------

    def by_seed(self, setting: str, scope: Scope, variant: str) -> pd.DataFrame:
        """All numbers of a variant by seed, averaged over the scope's mixtures; NaN where one has none."""
        if (setting, scope) not in self._by_seed:
            rows = self.counted[self.counted["setting"] == setting]
            rows = rows[rows["mixture"].isin(scope.mixtures)]
            groups = rows.groupby(["variant", "seed"])
            means = groups[self._measures].agg(fmean)
            complete = means[groups.size() == len(scope.mixtures)].reindex(means.index)
            found = {str(name): table.droplevel(0) for name, table in complete.groupby(level=0)}
            self._by_seed[setting, scope] = found
        found = self._by_seed[setting, scope]
        return found[variant] if variant in found else pd.DataFrame(columns=self._measures, dtype=float)

    @cached_property
    def _measures(self) -> list[str]:
        return [name for name in self.frame if name in METRICS or name.startswith(("accuracy.", "extra."))]

    def values(self, metric: str, setting: str, scope: Scope, variant: str) -> pd.Series[float]:
        """The metric by seed, averaged over the scope's mixtures within each seed that has all of them."""
        if metric not in self._measures:
            known = f"{', '.join(METRICS)}{nearest(metric, self._measures)}"
            raise UserError(f"unknown metric {metric!r}; expected one of {known}")
        return self.by_seed(setting, scope, variant)[metric].dropna()

    def _column(self, metric: str, setting: str, scope: Scope, variant: str) -> dict[int, float]:
        """:meth:`values` by seed; asked for thousands of times by the comparisons of one report."""
        key = (metric, setting, scope, variant)
        if key not in self._columns:
            self._columns[key] = self.values(*key).to_dict()
        return self._columns[key]

    def missing(self, metric: str, setting: str, scope: Scope, variant: str) -> str:
        """Which mixture and seed is absent although the variant has that seed elsewhere; empty if none is."""
        if len(self._column(metric, setting, scope, variant)) == len(self.by_seed(setting, scope, variant)):
            return ""
        rows = self.counted[(self.counted["setting"] == setting) & (self.counted["variant"] == variant)]
        table = rows.pivot(index="seed", columns="mixture", values=metric)
        absent = table.reindex(columns=list(scope.mixtures)).dropna(how="all").isna()
        gaps = {mixture: absent.index[absent[mixture]] for mixture in scope.mixtures}
        return "; ".join(f"{variant} lacks {m} with {_seeds(gap)}" for m, gap in gaps.items() if len(gap))

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
                points = {row["variant"]: [row[metric] for metric in OBJECTIVES.values()] for row in block}
                points = {name: point for name, point in points.items() if all(map(math.isfinite, point))}
                front = pareto_front(points)
                rows += [{**row, "pareto": row["variant"] in front} for row in block]
        spread = ["accuracy_std", "accuracy_low", "accuracy_high"]
        return pd.DataFrame(rows, columns=[*ENDPOINT_COLUMNS, *listed(), *spread, "pareto", "note"])

    def _endpoint(self, setting: str, scope: Scope, variant: str, common_seeds: bool) -> dict[str, Any]:
        note = self.missing("accuracy", setting, scope, variant)
        seeds = self.by_seed(setting, scope, variant).dropna(subset="accuracy")
        seeds = seeds[:0] if note and not common_seeds else seeds
        _, low, high = mean_interval(seeds["accuracy"])
        return {
            "setting": setting,
            "scope": scope.label,
            "kind": scope.kind,
            "mixtures": "+".join(scope.mixtures),
            "method": self.method(variant),
            "variant": variant,
            "seeds": len(seeds),
            "seed_list": " ".join(map(str, seeds.index)),
            **{name: fmean(seeds[name]) if len(seeds) else math.nan for name in listed()},
            "accuracy_std": population_std(seeds["accuracy"]) if len(seeds) > 1 else math.nan,
            "accuracy_low": low,
            "accuracy_high": high,
            "note": ("not averaged: " if note and not common_seeds else "") + note,
        }

    def paired(
        self, metric: str = "accuracy", a: str | None = None, b: str | None = None, common_seeds: bool = False
    ) -> pd.DataFrame:
        """Differences ``a - b`` over seeds in every setting and scope that has both.

        ``a`` and ``b`` are methods or variants, GAR and Baseline if not given. Unequal seeds are not compared
        unless ``common_seeds`` is set; ``note`` says which are missing. One seed has no interval.
        """
        known = dict.fromkeys([*REGISTRY, *self._methods.values(), *self._methods])
        for name in (a, b):
            if name is not None and name not in known:
                said = f"{', '.join(known)}{nearest(name, known)}"
                raise UserError(f"unknown method {name!r}; expected one of {said}")
        places = [
            (setting, scope, left, right)
            for setting in self.settings
            for left in self._called(setting, a, "proposed")
            for right in self._called(setting, b, "reference")
            if left != right
            for scope in self.scopes(setting)
        ]
        return self._differences(metric, places, common_seeds)

    def comparisons(self, metric: str = "accuracy", common_seeds: bool = False) -> pd.DataFrame:
        """Every variant minus Baseline, and GAR minus every other, in each setting.

        Where GAR has several variants (a sweep), only differences from Baseline are listed.
        """
        places = [
            (setting, scope, a, b)
            for setting in self.settings
            for scope in self.scopes(setting)
            for a, b in self._pairs(setting)
        ]
        return self._differences(metric, places, common_seeds)

    def _pairs(self, setting: str) -> list[tuple[str, str]]:
        bases, own = (self._called(setting, None, role) for role in ("reference", "proposed"))
        others = [v for v in self.variants(setting) if v not in bases]
        pairs = [(v, base) for base in bases for v in others]
        return pairs + [(own[0], v) for v in others if len(own) == 1 and v != own[0]]

    def _called(self, setting: str, name: str | None, role: str) -> list[str]:
        """The variant of this name, those of a method, or without a name those of methods with the role."""
        variants = self.variants(setting)
        if name is None:
            return [v for v in variants if getattr(REGISTRY.get(self.method(v)), role, False)]
        return [name] if name in variants else [v for v in variants if self.method(v) == name]

    def _differences(
        self, metric: str, places: Iterable[tuple[str, Scope, str, str]], common_seeds: bool
    ) -> pd.DataFrame:
        rows = (self._pair(metric, *place, common_seeds) for place in places)
        return pd.DataFrame([row for row in rows if row is not None], columns=PAIRED_COLUMNS)

    def _pair(
        self, metric: str, setting: str, scope: Scope, a: str, b: str, common_seeds: bool
    ) -> dict[str, Any] | None:
        left, right = (self._column(metric, setting, scope, v) for v in (a, b))
        gaps = {v: self.missing(metric, setting, scope, v) for v in (a, b)}
        for name, mine, other in ((a, left, right), (b, right, left)):
            alone = sorted(other.keys() - mine.keys())
            if mine and alone and not gaps[name]:
                gaps[name] = f"{name} lacks {_seeds(alone)}"
        lacking = "; ".join(gap for gap in gaps.values() if gap)
        if not (left and right) and not lacking:
            return None  # one of the two was never run here
        differences = {seed: left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())}
        note = ""
        if (lacking and not common_seeds) or not differences:
            note, differences = f"not compared: {lacking or 'no seed in common'}", {}
        elif lacking:
            note = f"over {_seeds(differences)} only: {lacking}"
        if len(differences) == 1:
            note += "; " * bool(note) + "one seed: no interval"
        mean, low, high = mean_interval(differences.values())
        found = (setting, scope.label, scope.kind, "+".join(scope.mixtures), metric, a, b, len(differences))
        return dict(zip(PAIRED_COLUMNS, (*found, mean, low, high, differences, note), strict=True))

    # -- what has to be said -----------------------------------------------------------------------------

    @property
    def notes(self) -> list[str]:
        """Repeated runs, and settings whose runs differ in versions or devices."""
        rows = self._finished
        first = rows.groupby([*CELL, "seed"])["run"].transform("first")
        notes = [
            f"{run.path} repeats {other.path} (same configuration and seed, "
            f"{'same' if run.result['accuracy'] == other.result['accuracy'] else 'different'} accuracies) "
            "and is not counted"
            for run, other in zip(rows["run"], first, strict=True)
            if run is not other
        ]
        for setting, members in self.counted.groupby("setting"):
            environments = [flat(run.environment) for run in members["run"]]
            for key in ("gar", "commit", "libraries.torch", "libraries.transformers", "device_name"):
                values = sorted({str(environment.get(key)) for environment in environments})
                if len(values) > 1:
                    notes.append(f"{setting}: runs have different {key}: {', '.join(values)}")
        return notes

    @property
    def collapses(self) -> list[tuple[Run, str]]:
        """Finished runs whose experts collapsed, with what happened in plain words."""
        found = []
        for run in self._finished["run"]:
            try:
                said = describe_collapse(run.result["routing"]["load"])
            except (KeyError, ValueError):
                continue  # a result without loads says nothing
            if said:
                found.append((run, said))
        return found


CELL = ["setting", "mixture", "variant"]
FRAME_COLUMNS = ["path", "state", "reason", *CELL, "method", "seed", "preset", "updates", "learning_rate"]
FRAME_COLUMNS += ["coefficients", "coefficient"]
ENDPOINT_COLUMNS = ["setting", "scope", "kind", "mixtures", "method", "variant", "seeds", "seed_list"]
PAIRED_COLUMNS = ["setting", "scope", "kind", "mixtures", "metric", "a", "b", "seeds", "mean", "low", "high"]
PAIRED_COLUMNS += ["differences", "note"]


def measured(sections: Mapping[str, Any]) -> dict[str, float]:
    """All metrics of a result or an evaluation, the listed ones first; NaN for what it lacks."""
    order = sorted(METRICS.values(), key=lambda metric: not metric.listed)
    return {metric.name: metric.read(sections) for metric in order}


def mean_interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Mean, and its two-sided 95 % t interval; NaN where there is none."""
    if not (found := list(values)):
        return math.nan, math.nan, math.nan
    mean, low, high = paired_difference(found, [0.0] * len(found))
    return mean, math.nan if low is None else low, math.nan if high is None else high


def _seeds(seeds: Iterable[int]) -> str:
    shown = list(map(str, seeds))
    return f"seed{'s' if len(shown) > 1 else ''} {', '.join(shown)}"
