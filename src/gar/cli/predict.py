"""``gar predict``."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gar.cli.common import DeviceOption, RunArgument, model_directory
from gar.data import read_texts
from gar.errors import UserError, one_of
from gar.model.multitask import MultiTaskModel, TaskInfo
from gar.runs.environment import resolve_device

FORMATS = ("table", "json", "jsonl", "csv")


def predict(
    run: RunArgument,
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts; for a task on pairs: first second first second …")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Only this task; default: every task of the right form.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="CSV, TSV, JSONL or Parquet with the task's text columns.")
    ] = None,
    output: Annotated[str, typer.Option("--format", help="table, json, jsonl or csv.")] = "table",
    device: DeviceOption = None,
) -> None:
    """Label texts: names and probabilities.

    gar predict runs/x "a text" --task mood --format json

    gar predict runs/x --file new.csv --task mood --format csv
    """
    if output not in FORMATS:
        raise one_of("--format", output, FORMATS)
    if bool(texts) == (file is not None):
        raise UserError("give either texts as arguments or --file FILE")
    directory = model_directory(run)
    model = MultiTaskModel.from_pretrained(directory).to(resolve_device(device or "auto"))
    tasks = [model.task(task)] if task is not None else list(model.tasks.values())
    rows = list(_predictions(model, tasks, texts or [], file, named=task is not None))
    _write(rows, output)


def _predictions(
    model: MultiTaskModel, tasks: list[TaskInfo], texts: list[str], file: Path | None, named: bool
) -> Iterator[dict[str, Any]]:
    refused: list[UserError] = []
    answered = False
    for info in tasks:
        try:
            inputs = _from_arguments(info, texts) if file is None else read_texts(info.text, file)
        except UserError as error:
            if named or len(tasks) == 1:
                raise
            refused.append(error)  # without --task, tasks of another form are passed over
            continue
        answered = True
        for n, prediction in enumerate(model.predict(info.name, *inputs)):
            text = [inputs[0][n]] if inputs[1] is None else [inputs[0][n], inputs[1][n]]
            yield {
                "task": info.name,
                "text": text[0] if len(text) == 1 else text,
                "label": prediction.label,
                "probabilities": prediction.probabilities,
            }
    if not answered:
        raise refused[0]


def _from_arguments(info: TaskInfo, texts: list[str]) -> tuple[list[str], list[str] | None]:
    if any(not text.strip() for text in texts):
        raise UserError("a text is empty; expected something to classify")
    if len(info.text) == 1:
        return texts, None
    if len(texts) % 2:
        raise UserError(
            f"task {info.name} takes pairs ({', '.join(info.text)}), found {len(texts)} texts; "
            "expected an even number"
        )
    return texts[::2], texts[1::2]


def _write(rows: list[dict[str, Any]], output: str) -> None:
    if output == "json":
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    elif output == "jsonl":
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    elif output == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(["task", "text", "pair", "label", "probability", "probabilities"])
        for row in rows:
            text, pair = (row["text"], "") if isinstance(row["text"], str) else row["text"]
            top = row["probabilities"][row["label"]]
            writer.writerow(
                [row["task"], text, pair, row["label"], f"{top:.6f}", json.dumps(row["probabilities"])]
            )
    else:
        table = Table("task", "text", "label", "probabilities")
        for row in rows:
            shown = " / ".join([row["text"]] if isinstance(row["text"], str) else row["text"])
            shares = ", ".join(f"{name} {share:.3f}" for name, share in row["probabilities"].items())
            table.add_row(row["task"], shown[:80], row["label"], shares)
        Console().print(table)
