"""What several verbs share: options, progress bars, and the table of a result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
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

from gar.errors import UserError
from gar.evaluation.diagnosis import collapse_notes
from gar.metrics import METRICS
from gar.training import Hooks

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Configuration overrides, e.g. optimizer.updates=500 method.name=gar."
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="A run directory or a saved model.")]
MixtureOption = Annotated[
    str | None, typer.Option(help="A YAML file, mixture or preset; default: the run's own mixture.")
]
SeedOption = Annotated[int | None, typer.Option(help="Seed of weights, data order and dropout.")]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DataDirOption = Annotated[
    Path | None, typer.Option(help="DIR/<task>/{train,validation}.jsonl[.gz] in place of the hub.")
]
NoCacheOption = Annotated[
    bool, typer.Option("--no-cache", help="Compute the frozen prefix anew for every batch.")
]


def option_overrides(
    seed: int | None = None, device: str | None = None, data_dir: Path | None = None, no_cache: bool = False
) -> list[str]:
    """Command-line options as the overrides they stand for."""
    chosen: dict[str, Any] = {}
    if seed is not None:
        chosen["seed"] = seed
    if device is not None:
        chosen["device"] = device
    if data_dir is not None:
        chosen["data_dir"] = str(data_dir)
    if no_cache:
        chosen["cache.enabled"] = False
    return [f"{key}={json.dumps(value)}" for key, value in chosen.items()]


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


def read_result(directory: Path) -> dict[str, Any]:
    """A finished run's result.json."""
    try:
        result: dict[str, Any] = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{directory}: no result.json; expected the directory of a finished run") from None
    except ValueError:
        raise UserError(f"{directory / 'result.json'}: not valid JSON") from None
    return result


def model_directory(path: Path) -> Path:
    """The saved model in a run directory, or the path itself when it is one."""
    for candidate in (path / "model", path):
        if (candidate / "config.json").is_file():
            return candidate
    if not path.exists():
        raise UserError(f"{path}: no such directory; expected a run or a saved model")
    raise UserError(f"{path}: holds no saved model; expected a finished run or a directory with config.json")
