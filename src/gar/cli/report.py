"""``gar report``: tables and figures of any number of runs."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gar import report as reporting
from gar.metrics import METRICS, OBJECTIVES
from gar.report import Results
from gar.runs import State, state_of


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUNS...", help="Run directories, or directories of them.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where the report goes; default: report beside or inside RUNS.")
    ] = None,
    common_seeds: Annotated[
        bool,
        typer.Option("--common-seeds", help="Compare the seeds that both sides have, and note it."),
    ] = False,
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Write the figures as PDF too, for papers.", show_default=False)
    ] = False,
) -> None:
    """Write report.html, report.md, tables.tex and CSV files of finished, running and failed runs."""
    results = reporting.load(runs)
    written = reporting.write(results, out or default_out(runs), common_seeds, pdf)
    console = Console()
    _print(console, results, common_seeds)
    for name, path in written.items():
        if not name.startswith("figures/"):
            console.print(str(path), markup=False, highlight=False, soft_wrap=True)


def default_out(runs: list[Path]) -> Path:
    """``report`` in the one directory given, or in the directory that all of the given ones share.

    A single run directory gets its report beside it, so that nothing is written into a run.
    """
    common = Path(os.path.commonpath([path.resolve() for path in runs]))
    return (common if state_of(common) is State.NEW else common.parent) / "report"


def _print(console: Console, results: Results, common_seeds: bool) -> None:
    frame = results.endpoints(common_seeds)
    for setting in results.settings:
        rows = frame[frame["setting"] == setting].to_dict("records")
        console.print(_endpoints(setting, rows))
        for row in rows:
            if row["note"]:
                _line(console, f"{row['scope']}, {row['variant']}: {row['note']}", "yellow")
    if len(frame) and frame["seeds"].min() == 1:
        _line(console, "One seed says nothing about spread.", "dim")
    for note in results.notes:
        _line(console, note, "dim")
    for run, said in results.collapses:
        _line(console, f"{run.path}: {said}", "yellow")
    for run in results.problems:
        _line(
            console,
            f"{run.state} {run.path}: {run.reason}",
            "red" if run.state in (State.FAILED, State.UNREADABLE) else "dim",
        )


def _endpoints(setting: str, rows: list[dict[str, Any]]) -> Table:
    """Narrow enough for a terminal; the files have all columns."""
    table = Table(title=escape(setting), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("mixture")
    table.add_column("method", min_width=9)
    accuracy, *others = (metric for metric in METRICS.values() if metric.name in OBJECTIVES.values())
    headings = [f"{accuracy.short} {accuracy.unit} ± std", *(metric.short for metric in others)]
    for label in ("seeds", *headings, "Pareto"):
        table.add_column(label, justify="right", no_wrap=True)
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        std = row["accuracy_std"]
        spread = "" if math.isnan(std) else f" ± {accuracy.text(std)}"
        names = ["mean" if row["kind"] == "all" else escape(row["scope"]), escape(row["variant"])]
        table.add_row(
            *names,
            str(row["seeds"]),
            accuracy.text(row[accuracy.name]) + spread,
            *(metric.text(row[metric.name]) for metric in others),
            "●" if row["pareto"] else "",
            end_section=after is not None and after["scope"] != row["scope"],
        )
    return table


def _line(console: Console, text: str, style: str) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
