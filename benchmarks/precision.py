"""How far group gradients are from those in float64, in every precision: random weights, random tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import mean
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from gar.benchmark.models import synthetic_model, synthetic_splits
from gar.benchmark.report import machine_line
from gar.cli.options import DeviceOption
from gar.config import CacheConfig, Config
from gar.features import RawSource
from gar.precision import PRECISIONS, precision_on
from gar.runs.environment import resolve_device
from gar.training import Updater

SITES = ("lora_ffn", "full_ffn")
CLASSES = [2] * 5


def main(
    model: Annotated[str, typer.Option(help="Architecture; see gar bench step.")] = "minilm",
    length: Annotated[int, typer.Option(help="Longest text in tokens.")] = 128,
    device: DeviceOption = None,
) -> None:
    """How far group gradients are from those in float64, in every precision: random weights and tokens."""
    where = resolve_device(device or "auto")
    print(f"{model}, five tasks, batches of 32, groups of 8, up to {length} tokens. {machine_line(where)}.\n")
    print("| site | precision | group gradients, mean (largest) | router's gradient | other experts |")
    print("|---|---|---|---|---|")
    for site in SITES:
        base = Config.model_validate(
            {
                "backbone": {"name": model, "max_length": length, "trainable": True},
                "experts": {"site": site, "dropout": 0.0},
                "method": {"name": "gar", "coefficient": 1.0},
                "max_tokens_per_pass": None,
            }
        )
        for line in lines(base, where):
            print(f"| {site} | {line} |", flush=True)


def lines(base: Config, device: torch.device) -> Iterator[str]:
    """The cells of the lines of a site."""
    weights = synthetic_model(base, CLASSES, device).state_dict()
    random = torch.Generator(device).manual_seed(1)
    for name, value in weights.items():
        if ".experts." in name:  # no two experts alike, none zero
            value.add_(0.02 * torch.randn(value.shape, generator=random, device=device))
    rows, router, selected = measured(base.override({"backbone.dtype": "float64"}), weights, device)
    for name in PRECISIONS:
        if (found := precision_on(device, name)) != name:
            yield f"{name} | computes as {found} here | |"
            continue
        mine, own, chosen = measured(base.override({"precision": name}), weights, device)
        errors = ((mine - rows).norm(dim=1) / rows.norm(dim=1)).tolist()
        other = float((chosen & ~selected).sum() / selected.sum())
        off = float((own - router).norm() / router.norm())
        yield f"{name} | {mean(errors):.1e} ({max(errors):.1e}) | {off:.1e} | {100 * other:.2f} %"


def measured(
    config: Config, weights: Mapping[str, Tensor], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one update: group gradients [M, d] and the router's gradient, and the selected experts."""
    model = synthetic_model(config, CLASSES, device)
    model.load_state_dict(weights)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    splits = synthetic_splits(CLASSES, 64, config.backbone.max_length, config.seed)
    updater = Updater(model.train(), RawSource(model, splits, CacheConfig()), config, list(model.tasks))
    update = updater.gradients(updater.schedule.groups(0), 0)
    (site,) = update.sites
    router = model.bank.router.weight.grad
    assert router is not None
    selected = torch.cat([part.routing.selected.flatten(0, 1) for part in site.parts])
    return site.gradients().double(), router.double(), selected


if __name__ == "__main__":
    typer.run(main)
