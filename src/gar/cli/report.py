"""``gar report``: tables and figures of any number of runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as RichTable

from gar.experiments import report as reporting
from gar.experiments.report import tables
from gar.experiments.report.table import Table
from gar.experiments.results import Results, load


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUNS...", help="Run directories, or directories of them.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where the report goes; default: report beside or inside RUNS.")
    ] = None,
    common_seeds: Annotated[
        bool,
        typer.Option(
            "--common-seeds", help="Compare the seeds that both sides have instead of refusing; it is noted."
        ),
    ] = False,
) -> None:
    """Write report.html, report.md, tables.tex and CSV files; finished, running and failed runs are all shown."""
    results = load(runs)
    written = reporting.write(results, out or default_out(runs), common_seeds)
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
    inside_a_run = (common / "config.yaml").exists() or (common / "result.json").exists()
    return (common.parent if inside_a_run else common) / "report"


def _print(console: Console, results: Results, common_seeds: bool) -> None:
    frame = results.endpoints(common_seeds)
    for setting in results.settings:
        console.print(setting, style="bold", markup=False, highlight=False)
        _table(console, tables.endpoints(results, setting, frame))
    problems = tables.problems(results)
    if problems.rows:
        _table(console, problems)
    for run, said in results.collapses:
        console.print(f"{run.path}: {said}", style="yellow", markup=False)


def _table(console: Console, table: Table) -> None:
    shown = RichTable(title=table.caption, title_justify="left")
    for column in table.columns:
        shown.add_column(column.label, justify="right" if column.number else "left")
    previous = table.rows[0].group if table.rows else ""
    for row in table.rows:
        if row.group != previous:
            shown.add_section()
        previous = row.group
        shown.add_row(*(cell.text.replace("[", "\\[") for cell in row.cells))
    console.print(shown)
    for note in table.notes:
        console.print(f"  {note}", markup=False, highlight=False, style="dim")
