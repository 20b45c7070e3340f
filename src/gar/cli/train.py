"""``gar train``."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gar.cli.app import several_ranks
from gar.cli.common import progress_hooks, result_table
from gar.cli.options import DataDirOption, DeviceOption, NoCacheOption, Overrides, SeedOption, configured
from gar.data import load_mixture, majority_shares
from gar.distributed import joined, launch
from gar.errors import UserError
from gar.runs.directory import claimed
from gar.runs.names import CONFIG, path_part
from gar.training import Hooks, train_from_config


def train(
    what: Annotated[
        str, typer.Argument(metavar="FILE|MIXTURE|PRESET", help="A YAML file, a mixture or a preset.")
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; default runs/<mixture>-<method>-<seed>-<time>.")
    ] = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    data_dir: DataDirOption = None,
    no_cache: NoCacheOption = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run in --out.")] = False,
    ranks: Annotated[
        int, typer.Option(min=1, help="Processes that train together on this machine, a GPU each.")
    ] = 1,
) -> None:
    """Train one multi-task model and measure it.

    gar train own.yaml method.name=gar --seed 1 --out runs/x

    gar train five optimizer.updates=500 --data-dir data

    gar train paper/roberta_head/five/gar

    gar train own.yaml --ranks 2 (or torchrun --nproc-per-node 2 -m gar train own.yaml)
    """
    if ranks > 1 and not several_ranks():
        raise typer.Exit(launch([sys.executable, "-m", "gar", *sys.argv[1:]], ranks))
    options = {"seed": seed, "device": device, "data_dir": data_dir, "no_cache": no_cache}
    with ExitStack() as stack:
        job = stack.enter_context(joined())
        config = job.each(lambda: configured(what, overrides, **options))
        if out is None:
            if resume:
                raise UserError("--resume: which run? name its directory with --out")
            stem = path_part(config.mixture.name or Path(what).stem)
            name = f"{stem}-{config.method.name}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
            out = job.told(lambda: stack.enter_context(claimed(Path("runs") / name)))
        with progress_hooks(config.method.name) if job.is_first else nullcontext(Hooks()) as hooks:
            if resume and not (out / CONFIG).is_file():
                hooks.message(f"{out}: no run to continue; a new one starts")
            result = train_from_config(config, out, resume=resume, hooks=hooks, job=job)
        if not job.is_first:
            return
    mixture = load_mixture(config.mixture, data_dir=config.data_dir, cache_dir=config.cache.directory)
    console = Console()
    console.print(result_table([result], majority_shares(mixture), f"{mixture.name}, seed {config.seed}"))
    for note in mixture.notes:
        console.print("note:", note, style="dim", markup=False)
    console.print(f"run directory: {out}", markup=False, soft_wrap=True)
