"""Tables for a paper: booktabs, inside the text's width and a page's height."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import pandas as pd

from gar.metrics import METRICS, Metric, population_std
from gar.metrics.catalogue import listed
from gar.report._numbers import Numbers, Scope
from gar.report._table import Cell, Row, Table
from gar.report._text import escape_latex
from gar.report.verdict import POINTS, side

#: Width of the text in points, that of LaTeX's article. A table that is wider by more than a tenth is set in
#: parts; the rest is made smaller.
WIDTH = 345.0
#: A sign in \footnotesize, one of a std, and the space between two columns, in points.
SIGN, SMALL, GAP = 4.2, 3.3, 6.0
#: Rows of a float, and signs of its notes; longer notes stand below it.
ROWS, NOTES = 40, 1200
#: Signs of a line in a heading.
HEADING = 13
PREAMBLE = r"""% Needs \usepackage[T1]{fontenc}, \usepackage{booktabs} and \usepackage{graphicx}.
% Tables are set for a text of 345 pt, that of the class article; what is wider than the text is made smaller.
% Signs beyond Latin, in names from data, need LuaLaTeX or XeLaTeX and a font that has them, else they are ?.
\providecommand{\garfit}[1]{{\sbox0{#1}%
  \ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi}}
\ifdefined\garsign\else\DeclareRobustCommand{\garsign}[1]{\ifdefined\Umathchar#1\else?\fi}\fi
"""
MARKS = (
    "± is the population standard deviation over seeds. ⁺ and ⁻: the 95 % interval of the paired difference "
    "from {reference} lies above or below 0 (Student t over seeds, nominal)."
)


def paper_tables(
    results: Numbers, setting: str, endpoints: pd.DataFrame, compared: Mapping[str, pd.DataFrame]
) -> list[Table]:
    """Accuracy by mixture and the routing metrics of the widest scope, a row a method; for LaTeX alone."""
    marks = {name: _marks(results, setting, frame) for name, frame in compared.items()}
    rows = endpoints[(endpoints["setting"] == setting) & (endpoints["seeds"] > 0)].to_dict("records")
    scopes = results.scopes(setting)
    means = {(row["scope"], row["variant"]): row for row in rows}
    accuracy, *routing = listed().values()

    def table(name: str, caption: str, columns: Mapping[str, tuple[Scope, Metric]]) -> Table:
        lines = []
        for variant in results.variants(setting):
            cells = {
                heading: _cell(results, setting, scope, metric, variant, marks[metric.name])
                if (scope.label, variant) in means
                else Cell("–")
                for heading, (scope, metric) in columns.items()
            }
            lines.append(Row({"method": variant, **cells}, (variant,)))
        reference = (results.references(setting) or [""])[0]
        notes = [MARKS.format(reference=reference)] if reference else [MARKS.split(" ⁺")[0]]
        return Table(name, caption, lines, notes, absent=("html", "md"))

    names = {scope: "mean" if scope.kind == "all" else scope.label for scope in scopes}
    widest = scopes[-1]
    return [
        table("paper", "Accuracy, %: mean ± std", {names[scope]: (scope, accuracy) for scope in scopes}),
        table(
            "paper-routing",
            f"Routing, {widest.label}: mean ± std",
            {f"{metric.label} {metric.arrow}".rstrip(): (widest, metric) for metric in routing},
        ),
    ]


def _marks(results: Numbers, setting: str, frame: pd.DataFrame) -> dict[tuple[str, str], str]:
    """By scope and variant: on which side of 0 the interval of the difference from the reference lies."""
    found = {}
    for row in frame[frame["setting"] == setting].to_dict("records"):
        if row["b"] in results.references(setting):
            mark = ("", "⁺", "⁻")[side(row["low"], row["high"])]
            found[str(row["scope"]), str(row["a"])] = mark
    return found


def _cell(
    results: Numbers, setting: str, scope: Scope, metric: Metric, variant: str, marks: Mapping[Any, str]
) -> Cell:
    """``60.12 ± 0.45⁺``, over the seeds that have the metric."""
    values = results.values(metric.name, setting, scope, variant).tolist()
    if not values:
        return Cell("–")
    mean = math.fsum(values) / len(values)
    spread = POINTS if metric == METRICS["accuracy"] else metric
    std = f" ± {spread.text(population_std(values))}" if len(values) > 1 else ""
    return Cell(f"{metric.text(mean)}{std}{marks.get((scope.label, variant), '')}", mean)


def latex(table: Table, label: str) -> str:
    """Floats of booktabs; needs what :data:`PREAMBLE` says. Blocks of rows are separated by thin rules.

    A table that is too wide is split by columns, one that is too long by rows; both say "continued".
    """
    parts = [part for wide in _by_width(table) for part in _by_height(wide)]
    floats = []
    for number, part in enumerate(parts, 1):
        notes = table.notes if number == len(parts) else ()
        if number == 1:
            floats.append(_float(replace(part, notes=notes), label))
        else:
            again = replace(part, caption=f"{table.caption} (continued)", notes=notes)
            floats.append(_float(again, f"{label}-{number}"))
    return "\n".join(floats)


def _float(table: Table, label: str) -> str:
    columns = table.columns
    layout = "".join("r" if number else "l" for number in columns.values())
    headings = [_heading(name, number) for name, number in columns.items()]
    lines = [
        r"\begin{table}[htbp]",
        r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
        rf"\caption{{{escape_latex(table.caption)}}}",
        rf"\label{{{label}}}",
        rf"\garfit{{\begin{{tabular}}{{{layout}}}",
        r"\toprule",
        " & ".join(headings) + r" \\",
    ]
    for _, block in groupby(table.rows, key=lambda row: row.group):
        lines.append(r"\midrule")
        for row in block:
            cells = (_latex_cell(cell, row.strong and i in table.strong) for i, cell in enumerate(row.cells))
            lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}}"]
    notes = escape_latex(" ".join(table.notes))
    inside = rf"\par\smallskip\parbox{{\linewidth}}{{\footnotesize {notes}}}"
    lines += [inside] if 0 < len(notes) <= NOTES else []
    lines += [r"\end{table}"]
    lines += [rf"{{\footnotesize\noindent {notes}\par}}"] if len(notes) > NOTES else []
    return "\n".join(lines) + "\n"


def _by_width(table: Table) -> Iterator[Table]:
    """Parts whose columns fit beside the leading ones that name the row, which every part has."""
    widths = {}
    for at, name in enumerate(table.columns):
        cells = max(_width(row.cells[at].text) for row in table.rows)
        widths[name] = max(cells, *(SIGN * len(line) for line in _lines(name))) + GAP
    names = list(table.columns)
    first = next((at for at, number in enumerate(table.columns.values()) if number), len(names))
    keys, rest = names[: min(first, 2)], names[min(first, 2) :]
    room = 1.1 * WIDTH - sum(widths[name] for name in keys)
    total = sum(widths[name] for name in rest)
    # As many parts as it takes, of one width.
    level = total / max(1, math.ceil(total / room))
    chosen: list[list[str]] = [[]]
    filled = 0.0
    for name in rest:
        over = filled + widths[name] / 2 > level or filled + widths[name] > room
        if chosen[-1] and over:
            chosen.append([])
            filled = 0.0
        chosen[-1].append(name)
        filled += widths[name]
    for part in chosen:
        wanted = [*keys, *part]
        rows = [replace(row, contents={name: row.contents[name] for name in wanted}) for row in table.rows]
        bold = tuple(at for at, name in enumerate(wanted) if names.index(name) in table.strong)
        yield replace(table, rows=rows, strong=bold)


def _by_height(table: Table) -> Iterator[Table]:
    """Parts of at most :data:`ROWS` rows, between blocks where these are short enough."""
    parts: list[list[Row]] = [[]]
    for _, block in groupby(table.rows, key=lambda row: row.group):
        rows = list(block)
        if parts[-1] and len(parts[-1]) + len(rows) > ROWS:
            parts.append([])
        for row in rows:
            if len(parts[-1]) == ROWS:
                parts.append([])
            parts[-1].append(row)
    return (replace(table, rows=part) for part in parts)


def _width(text: str) -> float:
    main, spread, small = text.partition(" ± ")
    return SIGN * len(main + spread.strip()) + SMALL * len(small)


def _lines(heading: str) -> Sequence[str]:
    return textwrap.wrap(heading, HEADING, break_long_words=False) or [""]


def _heading(name: str, number: bool) -> str:
    lines = [escape_latex(line) for line in _lines(name)]
    if len(lines) == 1:
        return lines[0]
    stack = r" \\ ".join(lines)
    return rf"\shortstack[{'r' if number else 'l'}]{{{stack}}}"


def _latex_cell(cell: Cell, bold: bool) -> str:
    text = escape_latex(cell.text)
    text = f"{{{text}}}" if text.startswith("[") else text  # a bracket after \\ would be its argument
    text = rf"\textbf{{{text}}}" if bold and text else text
    return re.sub(r" \\ensuremath\{\\pm\} ([\d.]+)", r"{\\scriptsize\\,\\ensuremath{\\pm}\\,\1}", text)
