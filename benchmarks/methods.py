"""A short real run of every site, gate and method: first and last loss, step time, peak memory."""

from __future__ import annotations

import itertools
from typing import Annotated

import torch
import typer

from gar.cli.options import DataDirOption, DeviceOption, Overrides, configured
from gar.config import Config
from gar.data import Mixture, load_mixture
from gar.errors import UserError
from gar.methods import REGISTRY
from gar.model import MultiTaskModel
from gar.runs.environment import resolve_device
from gar.training import Hooks, TrainingFailure, train
from gar.training.benchmark import machine

SITES = ("lora_ffn", "full_ffn", "lora_head")


def main(
    what: Annotated[str, typer.Argument(metavar="FILE|MIXTURE", help="A YAML file, mixture or task.")],
    overrides: Overrides = None,
    updates: Annotated[int, typer.Option(min=2, help="Length of each run.")] = 20,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
) -> None:
    """A short real run of every site, gate and method: first and last loss, step time, peak memory."""
    config = configured(what, overrides, data_dir=data_dir)
    mixture = load_mixture(config.mixture, data_dir=config.data_dir, cache_dir=config.cache.directory)
    where = resolve_device(device or "auto")
    print(f"{config.backbone.name} on {mixture.name}, {updates} updates. {machine(where)}.\n")
    print("| site | top-k | method | loss, first to last update | ms per update | peak GiB |")
    print("|---|---|---|---|---|---|")
    for site, top_k, method in itertools.product(SITES, (4, 1), REGISTRY):
        measured = short_run(config, mixture, where, updates, site, top_k, method)
        print(f"| {site} | {top_k} | {method} | {measured} |", flush=True)


def short_run(
    base: Config, mixture: Mixture, device: torch.device, updates: int, site: str, top_k: int, method: str
) -> str:
    """The last three cells of a line; ``lora_ffn`` backbones stay frozen."""
    changes = {
        "backbone.trainable": site != "lora_ffn",
        "experts.site": site,
        "experts.top_k": top_k,
        "method.name": method,
        "optimizer.updates": updates,
        "optimizer.learning_rate": 1e-3 if site == "lora_ffn" else 5e-5,
        "device": str(device),
    }
    try:
        config = base.override(changes)
    except UserError as refusal:
        return f"{str(refusal).partition(': ')[2]} | | "
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model = MultiTaskModel.from_pretrained(config.backbone, mixture.tasks, config.experts, seed=config.seed)
    losses: list[float] = []
    hooks = Hooks(update=lambda done, total, loss: losses.append(loss))
    try:
        result = train(model, mixture, config=config, hooks=hooks)
    except TrainingFailure as failure:
        return f"{failure} | | "
    milliseconds = f"{result['timing']['step_seconds_mean'] * 1e3:.1f}"
    peak = f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f}" if device.type == "cuda" else ""
    return f"{losses[0]:.4f} to {losses[-1]:.4f} | {milliseconds} | {peak}"


if __name__ == "__main__":
    typer.run(main)
