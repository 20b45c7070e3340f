"""``gar bench``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from gar.cli.options import DeviceOption
from gar.errors import one_of
from gar.runs.environment import resolve_device
from gar.training.benchmark import ARCHITECTURES, machine, step_table

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure update times on this machine; prints Markdown tables.",
)


@app.callback()
def _bench() -> None: ...


@app.command()
def step(
    model: Annotated[
        list[str] | None, typer.Option(help="Architectures; default: minilm and roberta-base.")
    ] = None,
    length: Annotated[int, typer.Option(help="Longest text in tokens (random, from half of it).")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed updates per line, after one warm-up.")] = 5,
    device: DeviceOption = None,
) -> None:
    """Update time of Baseline, GAR one_pass and GAR per_group, cached and uncached, as ratios to Baseline."""
    names = model or ["minilm", "facebookai/roberta-base"]
    for name in names:
        if name.lower() not in ARCHITECTURES:
            raise one_of("--model", name, ARCHITECTURES)
    where = resolve_device(device or "auto")
    print_line = Console(soft_wrap=True, highlight=False, markup=False).print
    print_line(
        f"Five tasks, batches of 32, groups of 8, up to {length} tokens; {repeats} updates a line. "
        f"{machine(where)}.\n"
    )
    print_line("| model | features | method | ms per update (fastest to slowest) | ratio to Baseline |")
    print_line("|---|---|---|---|---|")
    for name, kind, timings in step_table(names, where, length, repeats):
        for timing in timings:
            ratio = timing.seconds / timings[0].seconds
            spread = f"{timing.seconds * 1e3:.1f} ({timing.fastest * 1e3:.1f} to {timing.slowest * 1e3:.1f})"
            print_line(f"| {name} | {kind} | {timing.name} | {spread} | {ratio:.2f} |")
