"""``gar presets``: the named configurations."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from gar.cli.options import Format, FormatOption
from gar.errors import UserError
from gar.presets import catalogue as presets
from gar.presets.catalogue import Preset

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="The paper's configurations, and our own, as named presets.",
)


@app.command("ls")
def list_presets(
    pattern: Annotated[
        str | None, typer.Argument(help="Part of a name, or a glob such as 'paper/*/five/gar'.")
    ] = None,
    output: FormatOption = Format.table,
) -> None:
    """List presets."""
    found = [presets.find(name) for name in presets.names(pattern)]
    if pattern is not None and not found:
        raise UserError(f"no preset matches {pattern!r}; `gar presets ls` lists all")
    if output == Format.json:
        print(json.dumps([_summary(preset) for preset in found], indent=2))
        return
    width = max((len(preset.name) for preset in found), default=0)
    for preset in found:  # plain lines, so that grep sees whole names
        print(f"{preset.name:<{width}}  {_in_short(preset)}")


@app.command()
def show(name: Annotated[str, typer.Argument(help="A preset.")]) -> None:
    """Print the full configuration, and what it chooses where the paper says nothing."""
    print(presets.find(name).to_yaml(), end="")


@app.command()
def cp(
    name: Annotated[str, typer.Argument(help="A preset.")],
    file: Annotated[Path, typer.Argument(help="The YAML file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a preset as a file of your own, for `gar train FILE`."""
    print(presets.write(presets.find(name), file, force))


@app.command()
def validate(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME_OR_FILE]...", help="Presets or YAML files; default: all presets."),
    ] = None,
) -> None:
    """Build and check configurations without reading any data."""
    problems = []
    chosen = what or presets.names()
    for name in chosen:
        try:
            presets.check(name)
        except UserError as error:
            problems.append(str(error) if name in str(error) else f"{name}: {error}")
    print(f"{len(chosen) - len(problems)} valid, {len(problems)} invalid")
    if problems:
        for problem in problems[:-1]:
            print(f"error: {problem}", file=sys.stderr)
        raise UserError(problems[-1])


def _in_short(preset: Preset) -> str:
    config = preset.config()
    backbone, experts, optimizer = config.backbone, config.experts, config.optimizer
    length = f"{optimizer.updates} updates" if optimizer.epochs is None else f"{optimizer.epochs:g} epochs"
    state = "trainable" if backbone.trainable else "frozen"
    return f"{backbone.name} {state}, {experts.site} E{experts.count}K{experts.top_k}, {length}"


def _summary(preset: Preset) -> dict[str, object]:
    return {
        "name": preset.name,
        "setting": preset.setting,
        "subject": preset.subject,
        "method": preset.method,
        "origin": preset.origin,
    }
