"""A short real run of every site, gate and method: first and last loss, step time, peak memory."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from gar.benchmark.report import Line, Report, Spread, command, machine
from gar.cli.options import DataDirOption, DeviceOption, Overrides, configured
from gar.config import Config
from gar.data import Mixture, load_mixture
from gar.errors import UserError
from gar.methods import REGISTRY
from gar.model import MultiTaskModel
from gar.runs.environment import resolve_device
from gar.training import Hooks, TrainingFailure, train

SITES = ("lora_ffn", "full_ffn", "lora_head")
LABELS, LOSS = ("site", "top-k", "method"), "loss, first to last update"


def main(
    what: Annotated[str, typer.Argument(metavar="FILE|MIXTURE", help="A YAML file, mixture or task.")],
    overrides: Overrides = None,
    updates: Annotated[int, typer.Option(min=2, help="Length of each run.")] = 20,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
    out: Annotated[Path | None, typer.Option(help="Also into a file, .json or .csv.")] = None,
) -> None:
    """A short real run of every site, gate and method: first and last loss, step time, peak memory."""
    config = configured(what, overrides, data_dir=data_dir)
    mixture = load_mixture(config.mixture, data_dir=config.data_dir, cache_dir=config.cache.directory)
    where = resolve_device(device or "auto")
    report = Report(
        command=command("python benchmarks/methods.py", sys.argv[1:]),
        note=f"{config.backbone.name} on {mixture.name}, {updates} updates a line; "
        "the backbone trains except under lora_ffn.",
        machine=machine(where),
        reference="",
        columns=("ms", "peak_gib") if where.type == "cuda" else ("ms",),
    )
    print(f"{report.heading()}\n\n{report.header([*LABELS, LOSS])}", flush=True)
    for site, top_k, method in itertools.product(SITES, (4, 1), REGISTRY):
        report.lines.append(short_run(config, mixture, where, updates, site, top_k, method))
        print(report.row(report.lines[-1]), flush=True)
        if out is not None:
            report.write(out)


def short_run(
    base: Config, mixture: Mixture, device: torch.device, updates: int, site: str, top_k: int, method: str
) -> Line:
    """One short run; ``lora_ffn`` backbones stay frozen. The time is the run's mean."""
    changes = {
        "backbone.trainable": site != "lora_ffn",
        "experts.site": site,
        "experts.top_k": top_k,
        "method.name": method,
        "optimizer.updates": updates,
        "optimizer.learning_rate": 1e-3 if site == "lora_ffn" else 5e-5,
        "device": str(device),
    }
    labels = dict(zip(LABELS, (site, str(top_k), method), strict=True)) | {LOSS: ""}
    losses: list[float] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        config = base.override(changes)
        model = MultiTaskModel.from_pretrained(
            config.backbone, mixture.tasks, config.experts, precision=config.precision, seed=config.seed
        )
        hooks = Hooks(update=lambda done, total, loss: losses.append(loss))
        result = train(model, mixture, config=config, hooks=hooks)
    except (UserError, TrainingFailure) as problem:
        return Line(labels=labels, problem=str(problem).removeprefix("configuration: "))
    return Line(
        labels=labels | {LOSS: f"{losses[0]:.4f} to {losses[-1]:.4f}"},
        ms=Spread.of([result["timing"]["step_seconds_mean"] * 1e3]),
        peak_gib=torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
    )


if __name__ == "__main__":
    typer.run(main)
