"""``gar compare``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gar.cli.options import DataDirOption, DeviceOption, option_overrides
from gar.comparison import Comparison
from gar.comparison.compare import compare as compare_methods
from gar.comparison.outcome import failure_lines, recommendation_lines
from gar.config import parse_overrides
from gar.errors import UserError
from gar.report.comparison import Line, difference_text
from gar.sweeps.search import Budget, SearchError

#: Longer labels are shortened where they can be.
LABEL = 20
ONE_SEED = "Accuracy in %: one seed, which is no comparison"
HEADING = "Accuracy in %: mean over seeds, and difference from Baseline [95 % interval]"


def compare(
    what: Annotated[
        str, typer.Argument(metavar="FILE|MIXTURE|PRESET", help="A YAML file, a mixture or a preset.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Set in all runs.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Names with commas. Default: baseline,gar,switchaux and the configuration's own."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many, or a list with commas: 0,1,7.")] = "5",
    search: Annotated[
        bool, typer.Option("--search", help="First search every method's hyperparameters, as `gar search`.")
    ] = False,
    search_updates: Annotated[
        int | None, typer.Option(min=1, help="Updates of a candidate of the search; default: the protocol's.")
    ] = None,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="Also each task by itself, with all experts and with one: would its own help it?",
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="Where runs and results go; start again there to go on.")] = Path(
        "runs/compare"
    ),
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; default: what fills the machine.")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed runs again.")] = False,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
) -> None:
    """Compare methods on your tasks with paired seeds: what helps, how sure that is, and which model to use.

    gar compare own.yaml

    gar compare own.yaml optimizer.updates=500 --methods baseline,gar --seeds 3 --out runs/own

    Exit code: 0 all finished, 1 some runs failed, 2 wrong input, 130 interrupted.
    """
    if search_updates is not None and not search:
        raise UserError("--search-updates: there is no search; expected --search beside it")
    budget = Budget()
    if search_updates is not None:
        budget = Budget(updates=search_updates, single_task_updates=search_updates)
    changes = {**parse_overrides(overrides or []), **option_overrides(device=device, data_dir=data_dir)}
    names = None if methods is None else [name.strip().lower() for name in methods.split(",") if name.strip()]
    try:
        comparison = compare_methods(
            what, names, _seeds(seeds), out,
            overrides=changes, search=budget if search else None, alone=alone, jobs=jobs,
            retry_failed=retry_failed,
        )  # fmt: skip
    except SearchError as failure:
        Console(stderr=True).print(f"error: {failure}; start again to go on", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    _print(Console(), comparison)
    raise typer.Exit(comparison.exit_code)


def _seeds(text: str) -> int | list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds is {text!r}; expected a count, or numbers with commas") from None
    return numbers if "," in text else numbers[0]


def _print(console: Console, comparison: Comparison) -> None:
    for number, table in enumerate(tables(comparison.lines, comparison.arms.labels, console.width)):
        heading = ONE_SEED if len(comparison.arms.seeds) == 1 else HEADING
        console.print(*([] if number else [heading]), table, sep="\n")

    def say(line: str, style: str | None = None) -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    for note in comparison.notes:
        say(f"- {note}", "dim")
    say("")
    for line in failure_lines(comparison):
        say(line, "red")
    for verdict in comparison.verdicts:
        say(verdict.text)
    if (beside := comparison.beside) is not None:
        console.print(f"\n{beside.heading}", *tables(beside.lines, beside.labels, console.width), sep="\n")
        for line in beside.said:
            say(line)
    say("")
    for line in recommendation_lines(comparison):
        say(line)
    say(f"Page: {comparison.files['compare.html']}")


def tables(lines: Sequence[Line], labels: Mapping[str, str], width: int) -> list[Table]:
    """The table, in several parts where the terminal is too narrow for all methods."""
    names = [_short(line) for line in lines]
    first = max(map(len, names), default=0) + 1 + len("majority")
    cells = {method: [_cell(line, method) for line in lines] for method in labels}
    needed = {
        method: 1 + max(len(part) for cell in [labels[method], *column] for part in cell.split("\n"))
        for method, column in cells.items()
    }
    parts: list[list[str]] = [[]]
    for method in labels:
        if parts[-1] and first + sum(needed[m] for m in parts[-1]) + needed[method] > width:
            parts.append([])
        parts[-1].append(method)
    found = []
    for part in parts if lines else ():
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
        table.add_column("", no_wrap=True)
        table.add_column("majority", justify="right")
        for method in part:
            table.add_column(escape(labels[method]), justify="right", no_wrap=True)
        for row, line in enumerate(lines):
            chance = "" if line.majority is None else line.metric.text(line.majority)
            table.add_row(
                escape(names[row]),
                chance,
                *(escape(cells[method][row]) for method in part),
                style="bold" if line.name == "accuracy" else None,
                end_section=line.name == "accuracy",
            )
        found.append(table)
    return found


def _short(line: Line) -> str:
    return line.label if len(line.label) <= LABEL else line.metric.short or line.label


def _cell(line: Line, method: str) -> str:
    """The mean, and for accuracies the difference below it."""
    text = line.metric.text(line.means[method]) if method in line.means else "–"
    found = line.differences.get(method)
    if line.majority is not None and found is not None and len(found.seeds) > 1:
        text += "\n" + difference_text(line.metric, found)
    return text
