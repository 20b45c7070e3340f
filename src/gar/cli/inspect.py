"""``gar inspect``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gar.cli.common import progress_bars
from gar.cli.options import DataDirOption, DeviceOption, Format, FormatOption
from gar.data.texts import MAX_TEXTS
from gar.inspection import Request, inspect_to
from gar.inspection.inspect import BATCH_TOKENS, MAX_BYTES, MAX_LENGTH, PERMUTATIONS
from gar.report import write_inspection
from gar.report.inspection import COMPARED, layer_title, measured

CAPTION = (
    "eff: share of experts in effect. Purity: above its floor. In brackets: what 97.5 % of shuffled labels "
    "do not exceed. *: above shuffled labels at the 5 % level, all layers together."
)


def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A hub id, a saved model, or an adapter of PEFT.")
    ],
    data: Annotated[
        list[str],
        typer.Option(
            help="JSONL, CSV, TSV, Parquet or text file (several: a group each), or a YAML file with tasks."
        ),
    ],
    group_by: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column of groups; default: group, task, source or domain."),
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of texts; default: text, or messages.")
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column of classes, for a classifier; default: label."),
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="Directory of a PEFT adapter for MODEL.")] = None,
    loss: Annotated[
        str | None, typer.Option(metavar="lm|classification", help="Default: what the model's head is for.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the results; default: inspect/<model>.")
    ] = None,
    max_texts: Annotated[int, typer.Option(min=1, help="Texts of a group, drawn by the seed.")] = MAX_TEXTS,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of a text.")] = MAX_LENGTH,
    group_size: Annotated[
        int | None, typer.Option(min=1, help="Texts measured together; default: about 64 units in all.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Padded tokens of a batch.")] = BATCH_TOKENS,
    permutations: Annotated[int, typer.Option(min=0, help="How often labels are shuffled.")] = PERMUTATIONS,
    max_bytes: Annotated[
        int, typer.Option(min=1, help="For gradients; where they do not fit they are sketched.")
    ] = MAX_BYTES,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws, shuffles and sketches.")] = 0,
    device: DeviceOption = None,
    data_dir: DataDirOption = None,
    output: FormatOption = Format.table,
) -> None:
    """See what the experts of an MoE language model do on your texts: load, groups, conflict. No training.

    gar inspect allenai/OLMoE-1B-7B-0924 --data texts.jsonl --group-by domain

    gar inspect ./my-adapter --data news.txt --data code.jsonl --out inspect/mine

    Interrupted, the same command goes on.
    """
    request = Request(
        model, tuple(data), adapter=adapter, text=text, group_by=group_by, label=label, loss=loss,
        max_texts=max_texts, max_length=max_length, group_size=group_size, permutations=permutations,
        max_bytes=max_bytes, seed=seed, batch_tokens=batch_tokens, device=device or "auto", data_dir=data_dir,
    )  # fmt: skip
    with progress_bars() as progress:
        path, result = inspect_to(request, out, progress)
    files = write_inspection(result, path)
    if output == Format.json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
        return
    show(Console(), result)
    print(f"Page: {files['inspect.html']}")


def show(console: Console, result: Mapping[str, Any]) -> None:
    """The layers as a table for a terminal, and what they say."""

    def say(line: str, style: str | None = None) -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    say(f"{result['model']} ({result['architecture']})", "bold")
    for line in [*measured(result), *result["notes"]]:
        say(line, "dim")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("layer", no_wrap=True)
    for heading in ("E", "eff", "util", "dead", "entr.", "NMI", "purity", "conflict"):
        table.add_column(heading, justify="right", no_wrap=True)
    one = len(result["groups"]) == 1
    for layer in result["layers"]:
        table.add_row(*_cells(layer_title(layer).removeprefix("layer "), layer, str(layer["experts"]), one))
    table.add_section()
    table.add_row(*_cells("all", {**result["overall"], "dead": None}, "", one), style="bold")
    console.print(table)
    if result["permutations"]:
        say(CAPTION, "dim")
    say("")
    for line in result["findings"]:
        say(f"- {line}")
    say("")
    say(result["verdict"], "bold")


def _cells(name: str, numbers: Mapping[str, Any], experts: str, one: bool) -> list[str]:
    """``one``: a single group, which has nothing to be told from."""
    dead = numbers["dead"]
    cells = [
        escape(name),
        experts,
        f"{numbers['effective_experts']:.2f}",
        f"{numbers['utilization']:.2f}",
        "" if dead is None else str(len(dead)),
        f"{numbers['normalized_entropy']:.2f}",
    ]
    for key, *_ in COMPARED:
        if one:
            cells.append("–")
            continue
        chance = numbers[key]
        text = f"{chance['value']:.3f}{'*' if chance['above'] else ''}"
        cells.append(text if chance["high"] is None else f"{text} ({chance['high']:.3f})")
    return cells
