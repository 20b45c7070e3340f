"""What several verbs share: progress bars, a saved run, and the table of a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from gar.cli.options import option_overrides
from gar.evaluation.diagnosis import collapse_notes
from gar.evaluation.saved import Saved, load_saved
from gar.metrics import METRICS
from gar.presets.catalogue import resolve_config
from gar.training import Hooks


def load_run(
    run: Path, mixture: str | None, device: str | None, data_dir: Path | None, no_cache: bool
) -> Saved:
    """A saved model, and the named mixture or the run's own."""
    changes = option_overrides(data_dir=data_dir, no_cache=no_cache)
    config = None if mixture is None else resolve_config(mixture, changes)
    return load_saved(run, config, changes, device or "auto")


@contextmanager
def progress_hooks(label: str) -> Iterator[Hooks]:
    """Bars for features and updates on a terminal; nothing is drawn into a file."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        rows: dict[str, Any] = {}

        def show(kind: str, done: int, total: int, note: str = "") -> None:
            if kind not in rows or bars.tasks[rows[kind]].total != total:
                rows[kind] = bars.add_task(kind, total=total, note="")
            bars.update(rows[kind], completed=done, note=note)

        yield Hooks(
            features=lambda done, total: show(f"{label}: features", done, total),
            update=lambda done, total, loss: show(f"{label}: updates", done, total, f"loss {loss:.4f}"),
            message=lambda line: console.print(line, style="yellow", markup=False),
        )


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for everything that is counted by its name, on a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        rows: dict[str, Any] = {}

        def show(kind: str, done: int, total: int) -> None:
            if kind not in rows:
                rows[kind] = bars.add_task(kind, total=total)
            bars.update(rows[kind], completed=done)

        yield show


def result_table(results: Sequence[dict[str, Any]], majority: dict[str, float], title: str) -> Table:
    """Accuracy per task beside the majority class, macro accuracy and routing numbers, a column a result."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("majority class", justify="right")
    for result in results:
        table.add_column(result["method"], justify="right")
    for task, share in majority.items():
        cells = (f"{result['accuracy']['tasks'][task]:.3f}" for result in results)
        table.add_row(task, f"{share:.3f}", *cells)
    table.add_section()
    mean = sum(majority.values()) / len(majority)
    table.add_row(
        "macro accuracy", f"{mean:.3f}", *(f"{r['accuracy']['macro']:.4f}" for r in results), style="bold"
    )
    for metric in METRICS.values():
        if metric.brief:
            table.add_row(escape(metric.label), "", *(metric.text(metric.read(result)) for result in results))
    table.caption = escape("\n".join(collapse_notes(results))) or None
    return table
