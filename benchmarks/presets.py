"""Updates of the paper's presets at full model size, uncached, on random weights: time and peak memory."""

from __future__ import annotations

import fnmatch
import gc
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import PreTrainedModel

from gar import presets
from gar.benchmark.models import synthetic_model, synthetic_splits
from gar.benchmark.report import Line, Report, command, compared, machine
from gar.benchmark.timing import Plan, Runner, Shipped, measure
from gar.cli.options import DeviceOption
from gar.config import CacheConfig, Config
from gar.data.load import resolve
from gar.errors import UserError
from gar.features import RawSource
from gar.model import MultiTaskModel
from gar.runs.environment import resolve_device


def main(
    patterns: Annotated[
        list[str] | None, typer.Argument(help="Which presets; default: the largest of every setting.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed updates per preset.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Updates before them.")] = 1,
    device: DeviceOption = None,
    out: Annotated[Path | None, typer.Option(help="Also into a file, .json or .csv.")] = None,
) -> None:
    """Updates of the paper's presets at full model size, uncached, on random weights and tokens."""
    where = resolve_device(device or "auto")
    report = Report(
        command=command("python benchmarks/presets.py", sys.argv[1:]),
        note="An update of a preset, uncached, texts between half of its maximum length and all of it; "
        f"{repeats} updates a line after {warmup}.",
        machine=machine(where),
        reference="",
        columns=("ms", "peak_gib") if where.type == "cuda" else ("ms",),
    )
    print(f"{report.heading()}\n\n{report.header(['setting', 'subject', 'method'])}", flush=True)
    kept: dict[object, PreTrainedModel] = {}
    for name in chosen(patterns or ["paper/*/eight/*", "paper/*/MRPC/*"]):
        config = presets.find(name).config()
        # Experts that replace the FFN change the backbone; all others can share one.
        key = (config.backbone, config.experts.site) if config.experts.site != "full_ffn" else name
        if key not in kept:
            kept.clear()
        line, backbone = one_preset(name, config, where, Plan(repeats, 1, warmup), kept.get(key))
        if backbone is not None:
            kept[key] = backbone
        report.lines.append(line)
        print(report.row(line), flush=True)
        if out is not None:
            report.write(out)
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()


def chosen(patterns: list[str]) -> list[str]:
    """The presets that match, in the catalogue's order."""
    found = [name for name in presets.names() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    if not found:
        raise UserError(f"no preset matches {' or '.join(patterns)}; `gar presets ls` lists them")
    return found


def one_preset(
    name: str, config: Config, device: torch.device, plan: Plan, backbone: PreTrainedModel | None
) -> tuple[Line, PreTrainedModel | None]:
    """Its line, and the backbone, which saves the next preset its making; None where it could not be made."""
    classes = [len(entry.labels or ()) or 2 for entry in resolve(config.mixture)[1]]
    models: list[MultiTaskModel] = []

    def prepare() -> MultiTaskModel:
        models.append(synthetic_model(config, classes, device, backbone))
        return models[0]

    def make(model: MultiTaskModel) -> Runner:
        length, examples = config.backbone.max_length, 2 * config.mixture.batch_size
        splits = synthetic_splits(classes, examples, length, config.seed)
        return Shipped(model, RawSource(model, splits, CacheConfig()), config)

    preset = presets.find(name)
    labels = {"setting": preset.setting, "subject": preset.subject, "method": preset.method}
    found = measure(prepare, {name: make}, device, plan)
    (line,) = compared(found, {name: labels}, reference=name)
    return line, models[0].backbone if models else None


if __name__ == "__main__":
    typer.run(main)
