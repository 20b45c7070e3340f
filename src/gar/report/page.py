"""What the report shows, section by section, before it becomes HTML or Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import pandas as pd
from matplotlib.figure import Figure

from gar.report import figures, grouping, paper, tables
from gar.report import style as figures_style
from gar.report.results import METRICS, Results
from gar.report.table import Table

HEADINGS = {
    "gains": "Paired gains",
    "trajectories": "Trajectories",
    "loads": "Expert loads",
    "pareto": "Pareto view",
    "sweep": "Coefficient sweep",
    "times": "Time per update",
}


@dataclass(frozen=True)
class Picture:
    """A figure, or the reason why there is none; ``name`` is its id."""

    name: str
    caption: str
    figure: Figure | None
    reason: str = ""
    folded: bool = False

    @cached_property
    def svg(self) -> str:
        """The drawing in ink; empty where there is none."""
        return figures_style.svg(self.figure, self.name, self.caption) if self.figure else ""


@dataclass
class Section:
    """One setting. Folded tables and pictures are details that a reader opens."""

    ident: str
    title: str
    endpoints: Table
    paired: Table
    beside_paper: list[Table]
    pictures: dict[str, list[Picture]]
    folded: list[Table]
    seen: list[Table]
    times: Table
    configurations: Table
    versions: Table
    shared: dict[str, str]
    variants: dict[str, str]  # slug: name
    paths: list[str]

    @property
    def tables(self) -> list[Table]:
        """In reading order."""
        beside = [*self.beside_paper, self.times, self.configurations, self.versions]
        return [self.endpoints, self.paired, *self.folded, *self.seen, *beside]


@dataclass
class Page:
    """The whole report."""

    summary: str
    sections: list[Section]
    problems: Table
    collapses: list[str]
    notes: list[str]
    endpoints: pd.DataFrame
    compared: dict[str, pd.DataFrame]  # by metric
    headings: dict[str, str] = field(default_factory=HEADINGS.copy)

    @property
    def variants(self) -> list[tuple[str, str]]:
        """``(slug, name)`` of everything that a reader may hide."""
        return list(
            {slug: name for section in self.sections for slug, name in section.variants.items()}.items()
        )


def build_page(results: Results, common_seeds: bool = False) -> Page:
    """Everything that the report shows."""
    endpoints = results.endpoints(common_seeds)
    compared = {metric: results.comparisons(metric, common_seeds) for metric in METRICS}
    sections = [
        _section(results, setting, f"s{number}", endpoints, compared, common_seeds)
        for number, setting in enumerate(results.settings, 1)
    ]
    collapses = []
    for run, said in results.collapses:
        _, mixture, variant = results.label(run)
        collapses.append(f"{variant} on {mixture}, seed {grouping.seed_of(run)} ({run.path}): {said}.")
    problems = tables.problems(results)
    return Page(_summary(results), sections, problems, collapses, results.notes, endpoints, compared)


def _section(
    results: Results,
    setting: str,
    ident: str,
    endpoints: pd.DataFrame,
    compared: Mapping[str, pd.DataFrame],
    common_seeds: bool,
) -> Section:
    others = [
        tables.paired(setting, frame, metric, f"paired-{metric}")
        for metric, frame in compared.items()
        if metric != "accuracy" and len(frame)
    ]
    beside = [
        paper.endpoints(results, setting, ["accuracy"], "paper-endpoints", "accuracy"),
        paper.paired(results, setting, compared["accuracy"]),
    ]
    routing = [name for name in METRICS if name != "accuracy"]
    further = paper.endpoints(results, setting, routing, "paper-further", "routing metrics")
    folded = [tables.further(results, setting, endpoints), *([further] if further else [])]
    section = Section(
        ident,
        setting,
        tables.endpoints(results, setting, endpoints),
        tables.paired(setting, compared["accuracy"], "accuracy"),
        [table for table in beside if table is not None],
        _pictures(results, setting, ident, common_seeds),
        [*folded, *tables.task_accuracies(results, setting), *others],
        tables.seen(results, setting),
        tables.times(results, setting),
        tables.configurations(results, setting),
        tables.versions(results, setting),
        tables.shared_keys(results, setting),
        {figures_style.slug(variant): variant for variant in results.variants(setting)},
        [str(run.path) for run in results.members(setting) if run.result],
    )
    for table in section.tables:
        table.name = f"{ident}-{table.name}"
    return section


def _pictures(results: Results, setting: str, ident: str, common_seeds: bool) -> dict[str, list[Picture]]:
    mixtures, widest = results.mixtures(setting), results.scopes(setting)[-1].label

    def picture(
        name: str, caption: str, draw: Callable[..., Figure], *which: str, folded: bool = False
    ) -> Picture:
        seeds = {"common_seeds": common_seeds} if draw in (figures.paired_gains, figures.pareto) else {}
        caption = ": ".join([*which, caption])
        try:
            return Picture(f"{ident}-{name}", caption, draw(results, setting, *which, **seeds), folded=folded)
        except figures.NothingToDraw as reason:
            return Picture(f"{ident}-{name}", caption, None, str(reason))

    by_mixture = []
    for number, mixture in enumerate(mixtures):
        folded = number > 0
        by_mixture += [
            picture(f"loads-{number}", LOADS, figures.loads, mixture, folded=folded),
            picture(f"heatmap-{number}", HEATMAP, figures.task_expert_heatmap, mixture, folded=folded),
        ]
    return {
        "gains": [picture("gains", GAINS, figures.paired_gains)],
        "trajectories": [picture("trajectories", TRAJECTORIES, figures.trajectories, widest)],
        "loads": by_mixture,
        "pareto": [picture("pareto", PARETO, figures.pareto, widest)],
        "sweep": [picture("sweep", SWEEP, figures.coefficient_sweep, widest)],
        "times": [picture("steps", TIMES, figures.step_times)],
    }


GAINS = (
    "Paired differences in accuracy over the same seeds. Dots: single seeds; bars: two-sided 95 % Student-t "
    "intervals; a hollow mark has one seed and no interval."
)
TRAJECTORIES = (
    "routing during training, means over seeds; bands: one standard error over seeds (none with one seed)."
)
LOADS = "load of each expert, sorted within a run; bars: means over seeds, dots: seeds, dashed line: uniform."
HEATMAP = (
    "share of each task's load by expert, one seed; experts keep their numbers and are ordered by the task "
    "that uses them most. The line in the colour bar is the uniform share."
)
PARETO = (
    "accuracy against purity, utilization and load variance, means over seeds. Filled marks: no other method "
    "is as good in all four and better in one."
)
SWEEP = "metrics over the coefficient; dots: single seeds, bars: one standard error, dashed: Baseline."
TIMES = "Mean time per update of each run (dots) and over runs (bars); numbers are factors over Baseline."


def _summary(results: Results) -> str:
    counts: dict[str, int] = {}
    for run in results.runs:
        counts[run.state] = counts.get(run.state, 0) + 1
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
