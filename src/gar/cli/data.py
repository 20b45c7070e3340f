"""``gar data``: what is registered, and what a mixture's data look like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from gar.cli.options import DataDirOption, Format, FormatOption, Overrides, configured
from gar.config import MixtureConfig
from gar.data import TaskReport, describe_mixture, export, load_mixture, registry
from gar.data.load import resolve
from gar.data.registry import PLANTED

if TYPE_CHECKING:
    from gar.data import Mixture, SplitReport

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="The registered tasks and mixtures; checks of a mixture's data.",
)


@app.command("ls")
def list_registered(output: FormatOption = Format.table) -> None:
    """List the registered tasks and mixtures, and where their data come from."""
    known = registry()
    made = [task.name for task in resolve(MixtureConfig(name=PLANTED))[1]]
    mixtures = {**known.mixtures, PLANTED: made}
    if output == Format.json:
        tasks = {
            task.name: {"origin": task.origin, "labels": task.labels, "skill": task.skill}
            for task in known.tasks.values()
        }
        print(json.dumps({"tasks": tasks, "mixtures": mixtures}, indent=2))
        return
    console = Console()
    tasks_table = Table("task", "labels", "skill", "from")
    for task in known.tasks.values():
        tasks_table.add_row(task.name, ", ".join(task.labels), task.skill, task.origin)
    mixtures_table = Table("mixture", "tasks")
    for name, members in mixtures.items():
        mixtures_table.add_row(name, ", ".join(members))
    console.print(tasks_table, mixtures_table)


@app.command()
def check(
    what: Annotated[
        str, typer.Argument(metavar="FILE|MIXTURE|PRESET", help="A YAML file, a mixture, task or preset.")
    ],
    overrides: Overrides = None,
    data_dir: DataDirOption = None,
    output: FormatOption = Format.table,
) -> None:
    """Read everything, and show rows, labels, token lengths, and what is truncated.

    The first mistake in the data ends it, with one line that names the file and the row.
    """
    config = configured(what, overrides, data_dir=data_dir)
    mixture = load_mixture(config.mixture, data_dir=config.data_dir, cache_dir=config.cache.directory)
    # transformers takes a while; mistakes in the data come first.
    from gar.model.backbone import load_tokenizer

    max_length = config.backbone.max_length
    reports = describe_mixture(mixture, load_tokenizer(config.backbone), max_length)
    if output == Format.json:
        tree = {
            "mixture": mixture.name,
            "max_length": max_length,
            "tasks": [report.to_dict() for report in reports],
            "notes": list(mixture.notes),
        }
        print(json.dumps(tree, indent=2, ensure_ascii=False))
    else:
        _print(mixture, list(reports), max_length)


@app.command("export")
def export_files(
    what: Annotated[
        str, typer.Argument(metavar="FILE|MIXTURE|PRESET", help="A YAML file, a mixture, task or preset.")
    ],
    out: Annotated[Path, typer.Option(help="Gets <task>/{train,validation}.jsonl.gz.")],
    overrides: Overrides = None,
    data_dir: DataDirOption = None,
) -> None:
    """Write a mixture's examples as files for --data-dir, for a machine that cannot fetch them.

    gar data export bigbench_five --out files mixture.max_train_examples=5000
    """
    config = configured(what, overrides, data_dir=data_dir)
    mixture = load_mixture(config.mixture, data_dir=config.data_dir, cache_dir=config.cache.directory)
    for path, rows in export(mixture, out).items():
        print(f"{path}: {rows} rows")


def _print(mixture: Mixture, reports: list[TaskReport], max_length: int) -> None:
    console = Console()
    for report in reports:
        table = Table(title=report.name, title_justify="left", title_style="bold")
        for heading in ("split", "rows", "labels", "tokens mean", "p95", "max", f"truncated at {max_length}"):
            table.add_column(heading, justify="left" if heading in ("split", "labels") else "right")
        for name, split in (("train", report.train), ("validation", report.validation)):
            table.add_row(name, str(split.rows), *_cells(split))
        console.print(table)
        if report.overlap:
            console.print(
                f"[yellow]warning:[/] {report.overlap} of {report.validation.rows} validation inputs of "
                f"{report.name} stand in its training split too"
            )
    for note in mixture.notes:
        console.print("note:", note, style="dim", markup=False)


def _cells(split: SplitReport) -> list[str]:
    labels = "\n".join(f"{name} {count}" for name, count in split.labels.items())
    truncated = f"{split.truncated} ({split.truncated / split.rows:.1%})"
    return [labels, f"{split.tokens_mean:.1f}", f"{split.tokens_p95:.0f}", str(split.tokens_max), truncated]
