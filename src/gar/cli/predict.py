"""``gar predict``."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gar.cli.options import DeviceOption, Format, RunArgument, format_option
from gar.errors import UserError
from gar.evaluation.saved import label, load_model


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
    output: Annotated[str, format_option(*Format)] = Format.table,
    device: DeviceOption = None,
) -> None:
    """Label texts: names and probabilities.

    gar predict runs/x "a text" --task mood --format json

    gar predict runs/x --file new.csv --task mood --format csv
    """
    if bool(texts) == (file is not None):
        raise UserError("give either texts as arguments or --file FILE")
    model = load_model(run, device or "auto")
    _write(list(label(model, texts or [] if file is None else file, task)), output)


def _write(rows: list[dict[str, Any]], output: str) -> None:
    if output == Format.json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    elif output == Format.jsonl:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    elif output == Format.csv:
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
