"""What the report shows, section by section, before it becomes HTML or Markdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from gar.experiments import figures, figures_style
from gar.experiments.report import paper, tables
from gar.experiments.report.table import Table
from gar.experiments.results import METRICS, Results

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

    def svg(self, ink: str = "currentColor") -> str:
        return figures_style.svg(self.figure, self.name, self.caption, ink) if self.figure else ""


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
        return [self.endpoints, self.paired, *self.folded, *beside]


@dataclass
class Page:
    """The whole report."""

    summary: str
    sections: list[Section]
    problems: Table
    collapses: list[str]
    notes: list[str]
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
    sections = [
        _section(results, setting, f"s{number}", endpoints, common_seeds)
        for number, setting in enumerate(results.settings, 1)
    ]
    collapses = []
    for run, said in results.collapses:
        _, mixture, variant = results.label(run)
        collapses.append(f"{variant} on {mixture}, seed {tables.grouping.seed_of(run)} ({run.path}): {said}.")
    return Page(_summary(results), sections, tables.problems(results), collapses, results.notes)


def _section(results: Results, setting: str, ident: str, endpoints: object, common_seeds: bool) -> Section:
    compared = {metric: results.comparisons(metric, common_seeds) for metric in METRICS}
    others = [
        tables.paired(setting, frame, metric, f"paired-{metric}")
        for metric, frame in compared.items()
        if metric != "accuracy" and len(frame)
    ]
    beside = [paper.endpoints(results, setting), paper.paired(results, setting, compared["accuracy"])]
    section = Section(
        ident,
        setting,
        tables.endpoints(results, setting, endpoints),
        tables.paired(setting, compared["accuracy"], "accuracy"),
        [table for table in beside if table is not None],
        _pictures(results, setting, ident, common_seeds),
        [tables.further(results, setting, endpoints), *tables.task_accuracies(results, setting), *others],
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

    def picture(name: str, caption: str, draw: Callable[[], Figure], folded: bool = False) -> Picture:
        try:
            return Picture(f"{ident}-{name}", caption, draw(), folded=folded)
        except figures.NothingToDraw as reason:
            return Picture(f"{ident}-{name}", caption, None, str(reason))

    by_mixture = [
        picture(
            f"{name}-{number}",
            f"{mixture}: {caption}",
            lambda f=draw, m=mixture: f(results, setting, m),
            number > 0,
        )
        for number, mixture in enumerate(mixtures)
        for name, caption, draw in (
            ("loads", LOADS, figures.loads),
            ("heatmap", HEATMAP, figures.task_expert_heatmap),
        )
    ]
    return {
        "gains": [
            picture("gains", GAINS, lambda: figures.paired_gains(results, setting, common_seeds=common_seeds))
        ],
        "trajectories": [
            picture(
                "trajectories", f"{widest}: {TRAJECTORIES}", lambda: figures.trajectories(results, setting)
            )
        ],
        "loads": by_mixture,
        "pareto": [
            picture(
                "pareto", f"{widest}: {PARETO}", lambda: figures.pareto(results, setting, None, common_seeds)
            )
        ],
        "sweep": [
            picture("sweep", f"{widest}: {SWEEP}", lambda: figures.coefficient_sweep(results, setting))
        ],
        "times": [picture("steps", TIMES, lambda: figures.step_times(results, setting))],
    }


GAINS = (
    "Paired differences in accuracy over the same seeds. Dots: single seeds; bars: two-sided 95 % Student-t "
    "intervals; a hollow mark has one seed and no interval."
)
TRAJECTORIES = (
    "Routing during training, means over seeds; bands: one standard error over seeds (none with one seed)."
)
LOADS = "load of each expert, sorted within a run; bars: means over seeds, dots: single seeds, dashed line: uniform."
HEATMAP = (
    "share of each task's load by expert, one seed; experts keep their numbers and are ordered by the task that "
    "uses them most. The line in the colour bar is the uniform share."
)
PARETO = (
    "Accuracy against purity, utilization and load variance, means over seeds. Filled marks: no other method is "
    "as good in all four and better in one."
)
SWEEP = "Metrics over the coefficient; dots: single seeds, bars: one standard error, dashed: Baseline."
TIMES = "Mean time per update of each run (dots) and over runs (bars); numbers are factors over Baseline."


def _summary(results: Results) -> str:
    counts: dict[str, int] = {}
    for run in results.runs:
        counts[run.state] = counts.get(run.state, 0) + 1
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
