"""What the report shows, in reading order, before it becomes HTML, Markdown or LaTeX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd
from matplotlib.figure import Figure

from gar.metrics import METRICS
from gar.metrics.catalogue import listed
from gar.report import _paper as paper
from gar.report import _style as style
from gar.report import _tables as tables
from gar.report import figures, planted
from gar.report._latex import paper_tables
from gar.report._marks import mark
from gar.report._opening import opening
from gar.report._svg import Sheet
from gar.report._table import Table
from gar.report.results import Results


@dataclass(frozen=True)
class Picture:
    """A figure, or what makes one when it is wanted, or none because of ``why``; ``name`` is its id."""

    name: str
    caption: str
    source: Figure | Callable[[], Figure] | None
    why: str = ""
    folded: bool = False
    absent: tuple[str, ...] = ("tex",)

    @cached_property
    def _made(self) -> Figure | str:
        """The figure, or the reason why there is none."""
        if not callable(self.source):
            return self.source or self.why or "nothing to draw"
        try:
            return self.source()
        except figures.NothingToDraw as reason:
            return str(reason)

    @property
    def figure(self) -> Figure | None:
        """The figure; it is made at the first time."""
        return None if isinstance(self._made, str) else self._made

    @cached_property
    def reason(self) -> str:
        """Why there is no figure; empty where there is one."""
        return self._made if isinstance(self._made, str) else ""

    @cached_property
    def drawn(self) -> Sheet | None:
        """The drawing; none where there is no figure."""
        return style.drawn(self.figure, self.name, self.caption) if self.figure else None

    @cached_property
    def svg(self) -> str:
        """The drawing in ink on white, for a file; empty where there is none."""
        return self.drawn.whole() if self.drawn else ""

    @cached_property
    def pdf(self) -> bytes:
        """The drawing for papers; empty where there is none."""
        return style.pdf(self.figure, laid_out=self.drawn is not None) if self.figure else b""


@dataclass(frozen=True)
class Said:
    """Paragraphs."""

    lines: Sequence[str]
    absent: tuple[str, ...] = ("tex",)


Contents = Mapping[tuple[str, str], Sequence["Table | Picture | Said"]]
"""What blocks hold, by ``(key, heading)``."""


@dataclass(frozen=True)
class Block:
    """Tables, pictures and paragraphs under one heading, in reading order."""

    ident: str
    heading: str
    items: Sequence[Table | Picture | Said]

    def items_in(self, file: str) -> list[Table | Picture | Said]:
        """What goes into this kind of file (html, md or tex)."""
        return [item for item in self.items if file not in item.absent]


@dataclass(frozen=True)
class Section:
    """One setting."""

    ident: str
    title: str
    blocks: Sequence[Block]
    variants: Mapping[str, str]  # slug: name


@dataclass(frozen=True)
class Page:
    """The whole report; ``compared`` holds the paired differences by metric."""

    summary: str
    sections: Sequence[Section]
    problems: Table
    collapses: Sequence[str]
    notes: Sequence[str]
    endpoints: pd.DataFrame
    compared: Mapping[str, pd.DataFrame]
    title: str = "Results"

    @property
    def variants(self) -> list[tuple[str, str]]:
        """``(slug, name)`` of everything that a reader may hide."""
        return list(
            {slug: name for section in self.sections for slug, name in section.variants.items()}.items()
        )

    @property
    def pictures(self) -> list[Picture]:
        """All that are drawn."""
        items = (item for section in self.sections for block in section.blocks for item in block.items)
        return [item for item in items if isinstance(item, Picture) and not item.reason]


def build_page(
    results: Results,
    common_seeds: bool = False,
    begin: Callable[[Sequence[Picture]], Callable[[], None]] = lambda pictures: lambda: None,
) -> Page:
    """Everything that the report shows.

    ``begin`` may begin to make the pictures, and returns what ends it; without it each is made when wanted.
    """
    pictures = {
        setting: _pictures(results, setting, f"s{number}", common_seeds)
        for number, setting in enumerate(results.settings, 1)
    }
    end = begin([picture for found in pictures.values() for picture in found.values()])
    endpoints = results.endpoints(common_seeds)
    compared = {name: results.comparisons(name, common_seeds) for name in listed()}
    contents = {
        setting: _contents(results, setting, endpoints, compared, found)
        for setting, found in pictures.items()
    }
    end()
    sections = [
        Section(
            f"s{number}",
            setting,
            arranged(f"s{number}", blocks),
            {style.slug(variant): variant for variant in results.variants(setting)},
        )
        for number, (setting, blocks) in enumerate(contents.items(), 1)
    ]
    if known := _planted(results):
        sections += known
        compared |= {name: results.comparisons(name, common_seeds) for name in planted.COMPARED}
    collapses = []
    for run, said in results.collapses:
        _, mixture, variant = results.label(run)
        collapses.append(f"{variant} on {mixture}, seed {run.result['seed']} ({run.path}): {said}.")
    problems = tables.problems(results)
    return Page(results.summary, sections, problems, collapses, results.notes, endpoints, compared)


def _planted(results: Results) -> list[Section]:
    """Runs with known groups, all settings together; nothing where there are none."""
    table = planted.frame(results)
    blocks = []
    for number, part in enumerate(planted.families(table), 1):
        ident, name = f"planted-{number}", planted.family_name(part)
        endpoints = planted.endpoints(part)
        endpoints.name = f"{ident}-endpoints"
        figure = planted.figure(part)
        reason = "strength, experts and coefficients are the same in all runs"
        picture = Picture(f"{ident}-figure", f"{name}: {planted.SAID}", figure, "" if figure else reason)
        blocks.append(Block(f"{ident}-head", name, [picture, endpoints]))
    variants = {style.slug(name): name for name in dict.fromkeys(table["name"])}
    return [Section("planted", "Known groups of tasks", blocks, variants)] if blocks else []


def _pictures(results: Results, setting: str, ident: str, common_seeds: bool) -> dict[str, Picture]:
    """The pictures of one setting by their short names."""
    widest = results.scopes(setting)[-1].label

    def picture(name: str, *which: str, folded: bool = False) -> Picture:
        kind = name.split("-")[0]
        draw, said = PICTURES[kind]
        seeds = {"common_seeds": common_seeds} if kind == "gains" else {}

        def make() -> Figure:
            figure = draw(results, setting, *which, **seeds)
            mark(figure, results.variants(setting))
            return figure

        return Picture(f"{ident}-{name}", ": ".join([*which, said]), make, folded=folded)

    found = {name: picture(name, widest) for name in ("balance", "trajectories", "sweep")}
    found |= {name: picture(name) for name in ("gains", "steps")}
    for number, mixture in enumerate(results.mixtures(setting)):
        for name in (f"loads-{number}", f"heatmap-{number}", f"conflict-{number}"):
            found[name] = picture(name, mixture, folded=number > 0)
    return found


def _contents(
    results: Results,
    setting: str,
    endpoints: pd.DataFrame,
    compared: Mapping[str, pd.DataFrame],
    pictures: Mapping[str, Picture],
) -> Contents:
    """What the blocks of one setting hold."""
    accuracy, *routing = listed().values()
    published = [metric for metric in routing if metric.paper]
    mixtures = range(len(results.mixtures(setting)))
    words, summary = opening(results, setting, endpoints, compared["accuracy"])
    return {
        ("opening", "In short"): [Said(words), summary],
        ("endpoints", "Endpoints"): [
            *paper_tables(results, setting, endpoints, compared),
            tables.endpoints(results, setting, endpoints),
            paper.endpoints(results, setting, [accuracy], "paper-endpoints", "accuracy"),
            paper.paired(results, setting, compared["accuracy"]),
            Said(paper.refused(results, setting)),
            tables.further(setting, endpoints),
            paper.endpoints(results, setting, published, "paper-further", "routing metrics", folded=True),
            *tables.task_accuracies(results, setting),
        ],
        ("balance", "Balanced is not specialised"): [pictures["balance"]],
        ("gains", "Paired gains"): [
            pictures["gains"],
            *(tables.paired(setting, frame, METRICS[name]) for name, frame in compared.items()),
        ],
        ("trajectories", "Trajectories"): [pictures["trajectories"]],
        ("loads", "Expert loads"): [
            *(pictures[f"{kind}-{number}"] for number in mixtures for kind in ("loads", "heatmap")),
            *tables.seen(results, setting),
        ],
        ("conflict", "Conflict between tasks"): [pictures[f"conflict-{number}"] for number in mixtures],
        ("sweep", "Coefficient sweep"): [pictures["sweep"]],
        ("times", "Time per update"): [pictures["steps"], tables.times(results, setting)],
        ("configuration", "Configuration and versions"): [
            tables.configurations(results, setting),
            *tables.records(results, setting),
        ],
    }


def arranged(prefix: str, blocks: Contents) -> list[Block]:
    """The blocks, without those that hold nothing; why is said in one block at the end."""
    found, absent = [], []
    for (key, heading), items in blocks.items():
        shown = [item for item in items if isinstance(item, Picture) or _full(item)]
        for table in shown:
            if isinstance(table, Table):
                table.name = f"{prefix}-{table.name}"
        pictures = [item for item in shown if isinstance(item, Picture) and item.reason]
        if len(pictures) < len(shown):
            found.append(Block(f"{prefix}-head-{key}", heading, shown))
        else:
            absent += [f"{heading}: {picture.reason}." for picture in pictures]
    if absent:
        found.append(Block(f"{prefix}-head-absent", "Not drawn", [Said(absent)]))
    return found


def _full(item: Table | Said) -> bool:
    return bool(item.rows if isinstance(item, Table) else item.lines)


PICTURES: Mapping[str, tuple[Callable[..., Figure], str]] = {
    "gains": (
        figures.paired_gains,
        "Paired differences in accuracy over the same seeds. Dots: single seeds; bars: two-sided 95 % "
        "Student-t intervals; a hollow mark has one seed and no interval.",
    ),
    "trajectories": (
        figures.trajectories,
        "training loss, accuracy and routing during training, means over seeds; bands: one standard error "
        "over seeds (none with one seed). Strong lines: Baseline, and the most accurate GAR (without GAR, "
        "the most accurate of the others). Dotted: always the most frequent label.",
    ),
    "loads": (
        figures.loads,
        "load of each expert, sorted within a run; bars: means over seeds, dots: seeds, dashed line: "
        "uniform.",
    ),
    "heatmap": (
        figures.task_expert_heatmap,
        "which tasks an expert serves, and whose gradients it receives; one seed, since expert 3 of another "
        "is another expert. Left: how much more of a task goes to an expert than of all examples (white: "
        "no preference; colours end at a quarter and at four times; black: never, which is minus infinity). "
        "Right: each task's share of the expert's gradient. Baseline, and the most accurate GAR (without "
        "GAR, the most accurate of the others); experts keep their numbers and are ordered by the task that "
        "prefers them most.",
    ),
    "conflict": (
        figures.conflict,
        "cosines between the tasks' gradients within one expert, of one seed; red: the tasks pull the expert "
        "apart, blue: they agree. The methods of the heatmap side by side, and of each the four experts with "
        "the lowest cosine at the last update, the lowest first; experts without load, or with one task's "
        "gradient alone, are left out.",
    ),
    "balance": (
        figures.balance,
        "how many experts are in effect, and how far their gradients and their tokens belong to single "
        "tasks. Marks: means over seeds, filled with the colour of their accuracy; crosses: seeds; arrows: "
        "along the coefficient. Purity 0 is what experts with one mix of tasks have.",
    ),
    "sweep": (
        figures.coefficient_sweep,
        "metrics over the coefficient; dots: single seeds, bars: one standard error, dashed: Baseline.",
    ),
    "steps": (
        figures.step_times,
        "Mean time per update of each run (dots) and over runs (bars); numbers are factors over Baseline.",
    ),
}
