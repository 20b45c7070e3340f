"""``gar diagnose``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gar.cli.common import load_run
from gar.cli.options import (
    DataDirOption,
    DeviceOption,
    Format,
    FormatOption,
    MixtureOption,
    NoCacheOption,
    RunArgument,
)
from gar.evaluation.diagnosis import MINIMUM_COUNT, TOP, gradient_shares
from gar.evaluation.diagnosis import diagnose as diagnose_model
from gar.metrics.catalogue import listed
from gar.report import write_diagnosis
from gar.runs.reading import seen_name

COLUMNS = 12  # experts side by side
SHOWN = 6  # tokens of an expert in the table; the JSON has all


def diagnose(
    run: RunArgument,
    mixture: MixtureOption = None,
    device: DeviceOption = None,
    data_dir: DataDirOption = None,
    no_cache: NoCacheOption = False,
    output: FormatOption = Format.table,
    out: Annotated[
        Path | None, typer.Option(help="Also write diagnostics.json and its figures (SVG, PNG) there.")
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="Tokens (or labels) to keep for each expert.")] = TOP,
    minimum_count: Annotated[
        int, typer.Option(min=1, help="Pass over tokens (or labels) that occur less often.")
    ] = MINIMUM_COUNT,
) -> None:
    """See what the experts of a saved model do: loads by task, routing metrics, the tokens each one sees.

    gar diagnose runs/x

    gar diagnose runs/x --mixture other.yaml --out runs/x
    """
    loaded = load_run(run, mixture, device, data_dir, no_cache)
    diagnosis = diagnose_model(
        loaded.model,
        loaded.mixture,
        options=loaded.config.evaluation,
        cache=loaded.config.cache,
        top=top,
        minimum_count=minimum_count,
    )
    written = write_diagnosis(diagnosis, out) if out is not None else {}
    if output == Format.json:
        print(json.dumps(diagnosis, indent=2, ensure_ascii=False))
        return
    console = Console()
    show(console, diagnosis)
    for path in written.values():
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)


def show(console: Console, diagnosis: Mapping[str, Any]) -> None:
    """The diagnosis as tables for a terminal."""
    experts, unit = diagnosis["experts"], diagnosis["unit"]
    title = f"{diagnosis['mixture']}: {diagnosis['site']}, {experts} experts, {diagnosis['top_k']} per {unit}"
    console.print(title, style="bold", markup=False, highlight=False)
    for sentence in diagnosis["findings"]:
        console.print(sentence, style="yellow", markup=False, highlight=False)
    what = "tokens" if unit == "token" else "tasks and labels"
    _heading(console, f"Load by task and expert, % (uniform: {100 / experts:.1f})")
    for start in range(0, experts, COLUMNS):
        console.print(_loads(diagnosis, range(start, min(experts, start + COLUMNS))))
    _heading(console, "Routing")
    console.print(_metrics(diagnosis))
    _heading(console, f"Experts, with the {what} they see most (× over chance)")
    console.print(_experts(diagnosis, what))
    rare = f"{what} that occur {diagnosis['minimum_count']} times or more"
    if not any(diagnosis["seen"]):
        rare = f"none of the {rare} stands out for an expert"
    console.print(f" {rare}", style="dim", highlight=False)


def _loads(diagnosis: Mapping[str, Any], experts: Sequence[int]) -> Table:
    """Task by expert in percent, coloured by its ratio to the uniform share."""
    routing, accuracy = diagnosis["routing"], diagnosis["accuracy"]
    uniform = 1 / diagnosis["experts"]
    table = _table()
    table.add_column("task")
    table.add_column("accuracy", justify="right")
    for e in experts:
        table.add_column(str(e), justify="right", no_wrap=True)
    for name, load in routing["load_by_task"].items():
        cells = (_share(load[e], uniform) for e in experts)
        table.add_row(Text(name), f"{accuracy['tasks'][name]:.3f}", *cells)
    table.add_section()
    cells = (_share(routing["load"][e], uniform) for e in experts)
    table.add_row("all", f"{accuracy['macro']:.3f}", *cells, style="bold")
    return table


def _metrics(diagnosis: Mapping[str, Any]) -> Table:
    table = _table()
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("", style="dim")
    for metric in listed().values():
        if metric.path[0] == "routing":
            low, high = metric.range(len(diagnosis["accuracy"]["tasks"]), diagnosis["experts"])
            value = metric.text(metric.read(diagnosis))
            table.add_row(escape(metric.label), value, escape(metric.meaning.format(low=low, high=high)))
    return table


def _experts(diagnosis: Mapping[str, Any], what: str) -> Table:
    """Each expert's load, the task behind most of its gradient, and what it sees most."""
    table = _table()
    table.add_column("expert", justify="right")
    table.add_column("load, %", justify="right")
    table.add_column("gradient mostly of")
    table.add_column(what, overflow="fold", ratio=1)
    shares = gradient_shares(diagnosis["routing"]["gradient_norms"])
    for e, seen in enumerate(diagnosis["seen"]):
        task = max(shares, key=lambda name: shares[name][e])
        gradient = f"{escape(task)} {100 * shares[task][e]:.0f} %" if shares[task][e] else "none"
        listed = Text("  ").join(
            Text.assemble(seen_name(entry), (f" ×{entry['lift']:.1f}", "dim")) for entry in seen[:SHOWN]
        )
        load = f"{100 * diagnosis['routing']['load'][e]:.1f}"
        table.add_row(str(e), load, gradient, listed)
    return table


def _share(share: float, uniform: float) -> Text:
    """Bolder blue above the uniform share, dimmer below."""
    ratio = share / uniform
    style = "bold white on blue" if ratio >= 2 else "blue" if ratio >= 1.25 else "dim" if ratio < 0.5 else ""
    return Text(f"{100 * share:.1f}", style=style)


def _heading(console: Console, text: str) -> None:
    console.print(f"\n {text}", style="italic", markup=False, highlight=False)


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
