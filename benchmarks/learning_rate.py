"""One learning rate for all methods of a comparison: Baseline's best on a part of the training splits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer

from gar.cli.options import DataDirOption, DeviceOption, Overrides, configured
from gar.sweeps.search import FIRST_SEED
from gar.training import Shared, train_from_config

RATES = (3e-4, 1e-3, 3e-3, 1e-2)


def main(
    what: Annotated[str, typer.Argument(metavar="FILE|PRESET", help="The comparison's configuration.")],
    overrides: Overrides = None,
    rate: Annotated[list[float] | None, typer.Option(help=f"May be repeated; default: {RATES}.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of a rate; none of them is a final run's.")] = 2,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
) -> None:
    """Baseline's macro accuracy on 10 % of the training splits, after training on the rest, for some rates.

    Neither a validation split nor another method has a part in it.
    """
    config = configured(what, overrides, data_dir=data_dir, device=device)
    config = config.override({"method.name": "baseline"})
    shared, scores = Shared(), {}
    print("| learning rate | macro accuracy on the probe | of each seed |\n|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="gar-learning-rate-") as scratch:
        for value in rate or RATES:
            found = []
            for seed in range(FIRST_SEED, FIRST_SEED + seeds):
                run = config.override({"optimizer.learning_rate": value, "seed": seed})
                result = train_from_config(run, Path(scratch) / f"{value}-{seed}", shared=shared, probe=True)
                found.append(result["accuracy"]["macro"])
            scores[value] = mean(found)
            cells = ", ".join(f"{accuracy:.4f}" for accuracy in found)
            print(f"| {value:g} | {scores[value]:.4f} | {cells} |", flush=True)
    print(f"\nbest: {max(scores, key=lambda value: scores[value]):g}")


if __name__ == "__main__":
    typer.run(main)
