"""One update of every preset at full model size with random weights: finite, step time, peak memory."""

from __future__ import annotations

import fnmatch
import gc
from typing import Annotated

import torch
import typer
from transformers import PreTrainedModel

from gar import presets
from gar.cli.options import DeviceOption
from gar.config import CacheConfig, Config
from gar.data.load import resolve
from gar.features import RawSource
from gar.runs.environment import resolve_device
from gar.training.benchmark import Stepper, Timing, machine, measure, synthetic_model, synthetic_splits


def main(
    pattern: Annotated[str, typer.Argument(help="Which presets, e.g. 'paper/roberta_head/*'.")] = "paper/*",
    repeats: Annotated[int, typer.Option(min=1, help="Timed updates per preset.")] = 1,
    warmup: Annotated[int, typer.Option(min=0, help="Updates before them.")] = 1,
    device: DeviceOption = None,
) -> None:
    """One update of every preset at full model size with random weights: finite, step time, peak memory."""
    where = resolve_device(device or "auto")
    print(f"{machine(where)}\n\n| preset | seconds per update | peak GiB | finite |\n|---|---|---|---|")
    kept: dict[object, PreTrainedModel] = {}
    for name in fnmatch.filter(presets.names(), pattern):
        config = presets.find(name).config()
        # Experts that replace the FFN change the backbone; all others can share one.
        key = (config.backbone, config.experts.site) if config.experts.site != "full_ffn" else name
        if key not in kept:
            kept.clear()
        timing, kept[key] = one_update(config, where, repeats, warmup, kept.get(key))
        peak = "" if timing.peak_gib is None else f"{timing.peak_gib:.2f}"
        print(f"| {name} | {timing.seconds:.3f} | {peak} | {'yes' if timing.finite else 'NO'} |", flush=True)
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()


def one_update(
    config: Config, device: torch.device, repeats: int, warmup: int, backbone: PreTrainedModel | None
) -> tuple[Timing, PreTrainedModel]:
    """Step time and peak memory, uncached, and the backbone, which saves the next preset its making."""
    classes = [len(entry.labels or ()) or 2 for entry in resolve(config.mixture)[1]]
    model = synthetic_model(config, classes, device, backbone)
    splits = synthetic_splits(classes, 2 * config.mixture.batch_size, config.backbone.max_length, config.seed)
    source = RawSource(model, splits, CacheConfig())
    stepper = Stepper(config, model, source, config.method, config.observation)
    (timing,) = measure({str(config.preset): stepper}, repeats, warmup)
    return timing, model.backbone


if __name__ == "__main__":
    typer.run(main)
