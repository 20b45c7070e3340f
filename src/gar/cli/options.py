"""Arguments and options that verbs share, and the configuration they amount to."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from gar.config import Config, parse_overrides
from gar.errors import one_of, real_path
from gar.presets.catalogue import resolve_config


class Format(enum.StrEnum):
    """How a verb prints: for people, or for programs."""

    table = "table"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"


def format_option(*formats: Format) -> Any:
    """``--format`` with these formats; another one is refused with the nearest of them."""

    def chosen(name: str) -> Format:
        if name not in formats:
            raise one_of("--format", name, formats)
        return Format(name)

    return typer.Option(
        "--format", callback=chosen, metavar="|".join(formats), help="For people, or for programs."
    )


FormatOption = Annotated[str, format_option(Format.table, Format.json)]

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
SettingFilter = Annotated[
    list[str] | None, typer.Option(help="Only this setting of the suite; may be repeated.")
]
MixtureFilter = Annotated[
    list[str] | None, typer.Option(help="Only this mixture of the suite; may be repeated.")
]
NoCacheOption = Annotated[
    bool, typer.Option("--no-cache", help="Compute the frozen prefix anew for every batch.")
]


def option_overrides(
    seed: int | None = None, device: str | None = None, data_dir: Path | None = None, no_cache: bool = False
) -> dict[str, Any]:
    """Command-line options as the overrides they stand for; what the run's file keeps has absolute paths."""
    chosen: dict[str, Any] = {
        "seed": seed,
        "device": device,
        "data_dir": None if data_dir is None else str(real_path(data_dir)),
        "cache.enabled": False if no_cache else None,
    }
    return {key: value for key, value in chosen.items() if value is not None}


def configured(what: str, overrides: Iterable[str] | None = None, **options: Any) -> Config:
    """The configuration behind one word, with ``key=value`` arguments and then the options set."""
    return resolve_config(what, {**parse_overrides(overrides or ()), **option_overrides(**options)})
