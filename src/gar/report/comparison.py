"""Several methods beside Baseline on one mixture: the lines of one table, and the page around it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pandas as pd

from gar.methods import REFERENCE
from gar.metrics import METRICS, Metric
from gar.report import _style as style
from gar.report import _tables as tables
from gar.report import figures
from gar.report._html import html
from gar.report._marks import mark
from gar.report._page import PICTURES, Block, Page, Picture, Said, Section
from gar.report._table import Cell, Row, Table, interval, shown
from gar.report._write import markdown_page, write_files
from gar.report.results import Results
from gar.report.verdict import Paired

#: The routing metrics of a comparison.
ROUTING = (
    "load_variance", "utilization", "effective_experts", "gradient_mass_purity", "purity_above_floor", "nmi",
    "intra_expert_coherence",
)  # fmt: skip
NAME = "compare"


@dataclass(frozen=True)
class Line:
    """A metric, or a task's accuracy, of every method: means over seeds, and differences from Baseline."""

    name: str
    label: str
    metric: Metric
    majority: float | None
    """What always answering the most frequent label reaches; None where that means nothing."""
    means: Mapping[str, float]
    differences: Mapping[str, Paired]


def compared_lines(
    results: Results, methods: Sequence[str], majority: Mapping[str, float], reference: str = REFERENCE
) -> list[Line]:
    """Every task's accuracy, their mean, and the routing metrics; ``majority`` is by task, in order.

    ``results`` are of one setting and one mixture, one variant a method. Methods without a finished run are
    left out; a difference is over the seeds that both sides have.
    """
    if not results.settings:
        return []
    (setting,) = results.settings
    (scope,) = results.scopes(setting)
    variants = {results.method(variant): variant for variant in results.variants(setting)}
    share = METRICS["accuracy"]
    wanted: list[tuple[str, str, Metric, float | None]] = [
        (f"accuracy.{task}", task, share, value) for task, value in majority.items()
    ]
    wanted.append(("accuracy", "macro accuracy", share, fmean(majority.values())))
    wanted += [(name, METRICS[name].label, METRICS[name], None) for name in ROUTING]
    lines = []
    for name, label, metric, chance in wanted:
        values = {m: results.values(name, setting, scope, variants[m]) for m in methods if m in variants}
        means = {method: float(found.mean()) for method, found in values.items() if len(found)}
        differences = {}
        for method in means:
            if method != reference and reference in means:
                (row,) = results.paired(
                    name, variants[method], variants[reference], common_seeds=True
                ).to_dict("records")
                if row["seeds"]:
                    seeds = tuple(map(int, row["differences"]))
                    differences[method] = Paired(row["mean"], row["low"], row["high"], seeds)
        lines.append(Line(name, label, metric, chance, means, differences))
    return lines


def difference_text(metric: Metric, found: Paired) -> str:
    """``+0.93 [0.32, 1.63]`` in the metric's digits; a dash for one seed, which compares nothing."""
    if len(found.seeds) < 2:
        return "–"
    text = metric.text(found.mean, sign=True)
    limits = interval(metric, found.low, found.high).text if found.has_interval else "[no spread]"
    return f"{text} {limits}"


@dataclass(frozen=True)
class Words:
    """What the page says in words; ``seed`` is the one whose experts are drawn, where there is one."""

    summary: str
    verdicts: Sequence[str]
    recommendation: Sequence[str]
    notes: Sequence[str]
    seed: int | None


@dataclass(frozen=True)
class Beside:
    """A table of its own beside that of the methods; ``labels`` are of its columns, the reference first."""

    name: str
    heading: str
    lines: Sequence[Line]
    labels: Mapping[str, str]
    said: Sequence[str]


def write_comparison(
    out: str | Path,
    results: Results,
    lines: Sequence[Line],
    labels: Mapping[str, str],
    words: Words,
    beside: Beside | None = None,
) -> dict[str, Path]:
    """compare.html, compare.md, compare.csv and the figures, in a directory; returns the files by name.

    ``labels`` are the methods' names for readers, in order, Baseline first. What is ``beside`` has a table on
    the page, and a CSV file of its name.
    """
    page = _page(results, lines, labels, words, beside)
    contents = {
        f"{NAME}.html": html(page),
        f"{NAME}.md": markdown_page(page),
        f"{NAME}.csv": _csv(lines),
        **({f"{beside.name}.csv": _csv(beside.lines)} if beside else {}),
        **{f"figures/{picture.name}.svg": picture.svg + "\n" for picture in page.pictures},
    }
    return write_files(Path(out), contents)


def _page(
    results: Results,
    lines: Sequence[Line],
    labels: Mapping[str, str],
    words: Words,
    beside: Beside | None,
) -> Page:
    sections = []
    dead = []
    for run, said in results.collapses:
        dead.append(f"{results.label(run).variant}, seed {run.result['seed']}: {said}.")
    for setting in results.settings:
        shown = _table(NAME, lines, labels, words.notes)
        apart = []
        if beside is not None and beside.lines:
            table = _table(beside.name, beside.lines, beside.labels, [])
            apart = [Block(f"head-{beside.name}", beside.heading, [table, Said(beside.said)])]
        blocks = [
            Block("head-experts", "Task by expert", [_experts(results, setting, words.seed, list(labels))]),
            Block("head-table", "Accuracy and routing", [shown] if shown.rows else []),
            Block("head-verdict", "Verdict", [Said(words.verdicts)]),
            Block("head-recommended", "Recommended model", [Said(words.recommendation)]),
            *apart,
            *([Block("head-collapse", "Experts without work", [Said(dead)])] if dead else []),
            Block("head-balance", "Balanced is not specialised", [_picture("balance", results, setting)]),
            Block(
                "head-gains", "Paired differences", [_picture("gains", results, setting, common_seeds=True)]
            ),
            Block("head-times", "Time per update", [tables.times(results, setting)]),
            Block(
                "head-configuration",
                "Configuration and versions",
                [tables.configurations(results, setting), *tables.records(results, setting)],
            ),
        ]
        variants = {style.slug(variant): variant for variant in results.variants(setting)}
        sections.append(Section("comparison", setting, blocks, variants))
    empty = pd.DataFrame()
    problems = tables.problems(results)
    return Page(words.summary, sections, problems, [], results.notes, empty, {}, title="Comparison")


def _experts(results: Results, setting: str, seed: int | None, methods: Sequence[str]) -> Picture:
    caption = (
        f"Which tasks an expert serves, and whose gradients it receives, seed {seed}, a row a method. Which "
        "expert has which number is chance and differs between seeds, so a mean over seeds would mean "
        "nothing: one seed is shown. Left: how much more of a task goes to an expert than of all examples "
        "(white: no preference; colours end at a quarter and at four times; black: never, which is minus "
        "infinity). Right: each task's share of the expert's gradient. The experts are ordered by the task "
        "that prefers them most, and keep their numbers."
    )
    found = {results.method(variant): variant for variant in results.variants(setting)}
    variants = [found[method] for method in methods if method in found]
    try:
        figure = figures.task_expert_heatmap(results, setting, None, seed, variants)
    except figures.NothingToDraw as reason:
        return Picture("experts", caption, None, str(reason))
    mark(figure, results.variants(setting))
    return Picture("experts", caption, figure)


def _picture(name: str, results: Results, setting: str, **options: bool) -> Picture:
    draw, caption = PICTURES[name]
    caption = f"{caption[0].upper()}{caption[1:]}"
    try:
        figure = draw(results, setting, **options)
    except figures.NothingToDraw as reason:
        return Picture(name, caption, None, str(reason))
    mark(figure, results.variants(setting))
    return Picture(name, caption, figure)


def _table(name: str, lines: Sequence[Line], labels: Mapping[str, str], notes: Sequence[str]) -> Table:
    rows, (first, *_) = [], labels.values()
    for line in lines:
        unit = f", {line.metric.unit}" if line.metric.unit else ""
        contents: dict[str, Cell | str] = {
            "": f"{line.label}{unit} {line.metric.arrow}".rstrip(),
            "majority class": shown(line.metric, math.nan if line.majority is None else line.majority),
        }
        for method, label in labels.items():
            contents[label] = shown(line.metric, line.means.get(method, math.nan))
            if method in line.differences:
                found = line.differences[method]
                value = found.mean if len(found.seeds) > 1 else None
                contents[f"{label} − {first}"] = Cell(difference_text(line.metric, found), value)
            elif any(method in other.differences for other in lines):
                contents[f"{label} − {first}"] = Cell("–")
        rows.append(Row(contents, group=str(line.majority is None)))
    caption = f"Means over seeds, and paired differences from {first} with their 95 % intervals"
    return Table(name, caption, rows, notes)


def _csv(lines: Sequence[Line]) -> str:
    """Unrounded; accuracies are fractions."""
    rows = []
    for line in lines:
        for method, mean in line.means.items():
            found = line.differences.get(method)
            rows.append(
                {
                    "metric": line.name,
                    "method": method,
                    "mean": mean,
                    "difference": found.mean if found else math.nan,
                    "low": found.low if found else math.nan,
                    "high": found.high if found else math.nan,
                    "seeds": " ".join(map(str, found.seeds)) if found else "",
                    "majority": line.majority,
                }
            )
    columns = ["metric", "method", "mean", "difference", "low", "high", "seeds", "majority"]
    return str(pd.DataFrame(rows, columns=columns).to_csv(index=False))
