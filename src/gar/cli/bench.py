"""``gar bench``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from gar.benchmark.models import SIZES
from gar.benchmark.others import REFERENCE, other_lines
from gar.benchmark.report import Line, Report, command, machine
from gar.benchmark.settings import FEATURES, METHODS, USUAL, WORKLOADS, Setting
from gar.benchmark.step import CAPTURE, step_lines
from gar.benchmark.sweep import sweep_lines
from gar.benchmark.timing import Plan
from gar.cli.options import DeviceOption, Overrides
from gar.config import parse_overrides
from gar.errors import one_of, real_path
from gar.model.sites import SITES
from gar.precision import PRECISIONS
from gar.runs.environment import computing_threads, resolve_device
from gar.sweeps.executors import available_cores

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure update times on this machine, on random weights and tokens; prints Markdown tables.",
)

Names = list[str] | None
ModelOption = Annotated[Names, typer.Option(help=f"{', '.join(SIZES)}; default: minilm.")]
SiteOption = Annotated[Names, typer.Option(help=f"{', '.join(SITES)}; default: lora_ffn.")]
PrecisionOption = Annotated[Names, typer.Option(help=f"{', '.join(PRECISIONS)}; default: float32.")]
WorkloadOption = Annotated[
    str, typer.Option(metavar="|".join(WORKLOADS), help="The paper's five tasks at once, or its single task.")
]
LengthOption = Annotated[int, typer.Option(min=8, help="Longest text in tokens (random, from half of it).")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Timings a line, after a warm-up.")]
UpdatesOption = Annotated[
    int | None, typer.Option(min=1, help="Updates a timing; default: 1, on a GPU 5, of captured ones 64.")
]
OutOption = Annotated[Path | None, typer.Option(help="Also into a file, .json or .csv.")]


@app.callback()
def _bench() -> None: ...


@app.command()
def step(
    overrides: Overrides = None,
    model: ModelOption = None,
    site: SiteOption = None,
    method: Annotated[
        Names, typer.Option(help=f"{', '.join(METHODS)}; default: baseline, gar, cagrad.")
    ] = None,
    precision: PrecisionOption = None,
    features: Annotated[
        Names, typer.Option(help=f"{', '.join(FEATURES)} (backbone); default: cached, uncached.")
    ] = None,
    capture: Annotated[
        Names, typer.Option(help="on, off: cached updates replayed on a GPU, or launched; default: on.")
    ] = None,
    workload: WorkloadOption = "five",
    length: LengthOption = 64,
    repeats: RepeatsOption = 5,
    updates: UpdatesOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Time whole updates of the shipped loop.

    Options of names may be repeated; every combination is a line, and the methods of one setting take turns.

    gar bench step --model roberta-base --features trained --site full_ffn --method baseline --method gar
    """
    where = resolve_device(device or "auto")
    kinds = features or ["cached", "uncached"]
    settings = _settings(overrides, length, workload, model, site, kinds, precision)
    methods = _chosen("--method", method or list(USUAL), METHODS)
    captures = _chosen("--capture", capture or ["on"], CAPTURE)
    plan = Plan(repeats, updates)
    columns = ["ms", "ratio", *_device_columns(where), "paper"]
    with computing_threads(settings[0].config().threads):
        report = _report(settings[0], where, _times(plan), columns, "Baseline")
        lines = step_lines(settings, methods, where, plan, captures)
        _print(report, [*settings[0].labels, "method"], lines, out)


@app.command()
def others(
    overrides: Overrides = None,
    model: ModelOption = None,
    site: SiteOption = None,
    precision: PrecisionOption = None,
    features: Annotated[
        Names, typer.Option(help=f"{', '.join(FEATURES)} (backbone); default: uncached.")
    ] = None,
    workload: WorkloadOption = "five",
    length: LengthOption = 64,
    repeats: RepeatsOption = 3,
    updates: UpdatesOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Time updates beside the paper's way, TorchJD's engine, and transformers' Trainer with PEFT's LoRA."""
    where = resolve_device(device or "auto")
    settings = _settings(overrides, length, workload, model, site, features or ["uncached"], precision)
    plan = Plan(repeats, updates)
    columns = ["ms", "ratio", *_device_columns(where)]
    with computing_threads(settings[0].config().threads):
        report = _report(settings[0], where, _times(plan), columns, REFERENCE)
        _print(report, [*settings[0].labels, "update"], other_lines(settings, where, plan), out)


@app.command()
def sweep(
    overrides: Overrides = None,
    model: Annotated[str, typer.Option(help=", ".join(SIZES))] = "minilm",
    site: Annotated[str, typer.Option(help=", ".join(SITES))] = "lora_ffn",
    method: Annotated[str, typer.Option(help=", ".join(METHODS))] = "gar",
    precision: Annotated[str, typer.Option(help=", ".join(PRECISIONS))] = "float32",
    jobs: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Processes at the same time; default: 1 to 4, on a CPU to its cores."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Length of a timed stretch.")] = 3.0,
    workload: WorkloadOption = "five",
    length: LengthOption = 64,
    repeats: RepeatsOption = 3,
    updates: UpdatesOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
) -> None:
    """Count updates per second of several processes on one device, each on cached features."""
    where = resolve_device(device or "auto")
    [setting] = _settings(overrides, length, workload, [model], [site], ["cached"], [precision])
    [method] = _chosen("--method", [method], METHODS)
    setting.config(method)
    most = 4 if where.type == "cuda" else min(4, available_cores())
    counts = sorted(set(jobs or range(1, most + 1)))
    plan = Plan(repeats, updates)
    how = f"{repeats} times {seconds:g} seconds a line"
    report = _report(setting, where, how, ["per_second", "ratio"], "one job")
    lines = sweep_lines(setting, method, counts, where, plan, seconds)
    _print(report, [*setting.labels, "method", "jobs"], lines, out)


def _settings(
    overrides: Sequence[str] | None,
    length: int,
    workload: str,
    models: Sequence[str] | None,
    sites: Sequence[str] | None,
    features: Sequence[str],
    precisions: Sequence[str] | None,
) -> list[Setting]:
    """Every combination, each a configuration that can be."""
    [workload] = _chosen("--workload", [workload], WORKLOADS)
    short = [name.rpartition("/")[2] for name in models or ["minilm"]]  # of a hub id
    settings = [
        Setting(*choice, workload, length, parse_overrides(overrides or ()))
        for choice in product(
            _chosen("--model", short, SIZES),
            _chosen("--site", sites or ["lora_ffn"], SITES),
            _chosen("--features", features, FEATURES),
            _chosen("--precision", precisions or ["float32"], PRECISIONS),
        )
    ]
    for setting in settings:
        setting.config()
    return settings


def _chosen(option: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    """The names, each once; an unknown one is refused with the nearest."""
    known = list(known)
    chosen = list(dict.fromkeys(name.lower() for name in names))
    for name in chosen:
        if name not in known:
            raise one_of(option, name, known)
    return chosen


def _times(plan: Plan) -> str:
    return f"timings a line: {plan.repeats}" + (f" of {plan.updates} updates" if plan.updates else "")


def _device_columns(device: torch.device) -> list[str]:
    return ["kernels", "device_ms", "peak_gib", "peak_ratio"] if device.type == "cuda" else []


def _report(
    setting: Setting, device: torch.device, how: str, columns: Sequence[str], reference: str
) -> Report:
    config = setting.config()
    tasks = "five tasks" if setting.workload == "five" else "one task"
    experts = f"E{config.experts.count}K{config.experts.top_k}"
    return Report(
        command=command("gar", sys.argv[1:]),
        note=f"An update: {tasks}, {config.mixture.batch_size} examples each, groups of "
        f"{config.mixture.group_size}, {experts}, up to {setting.length} tokens; {how}.",
        machine=machine(device),
        reference=reference,
        columns=tuple(columns),
    )


def _print(report: Report, labels: Sequence[str], lines: Iterator[list[Line]], out: Path | None) -> None:
    """The table as it grows, and with it the file."""
    if out is not None:
        out = real_path(out)
        report.write(out)  # now, not after all that was measured
    line = Console(soft_wrap=True, highlight=False, markup=False).print
    line(f"{report.heading()}\n\n{report.header(labels)}")
    for measured in lines:
        for each in measured:
            line(report.row(each))
        report.lines += measured
        if out is not None:
            report.write(out)
