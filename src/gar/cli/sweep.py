"""``gar sweep``: run a suite, see how far it is, list the packaged ones."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from gar.cli.options import (
    DataDirOption,
    DeviceOption,
    Format,
    FormatOption,
    MixtureFilter,
    SettingFilter,
    option_overrides,
)
from gar.runs import State
from gar.sweeps.executors import available_cores
from gar.sweeps.local import LocalExecutor, fitting_jobs
from gar.sweeps.progress import duration
from gar.sweeps.ray import RayExecutor
from gar.sweeps.store import SWEEP
from gar.sweeps.stored import Store, collect
from gar.sweeps.suite import Suite, load_suite, shipped
from gar.sweeps.sweep import Plan, Status, make_plan, read_status, run_sweep


class RunByDefault(TyperGroup):
    """`gar sweep SUITE` is `gar sweep run SUITE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


#: What a plan knows of runs, and what a status does.
PLANNED = (State.FINISHED, State.FAILED, State.UNFINISHED, State.NEW)
SHOWN = (State.FINISHED, State.RUNNING, State.FAILED, State.UNFINISHED, State.NEW)

app = typer.Typer(
    cls=RunByDefault,
    add_completion=False,
    no_args_is_help=True,
    help="Run a suite: settings x mixtures x methods x seeds.",
)


class Where(enum.StrEnum):
    local = "local"
    ray = "ray"


@app.command()
def run(
    suite: Annotated[
        str, typer.Argument(metavar="SUITE", help="A YAML file or a packaged suite (`gar sweep ls`).")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Set in all runs, e.g. optimizer.updates=500."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of all runs; start again there to go on.")] = Path(
        "runs"
    ),
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; default: what fills the GPUs, on a CPU 1.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan and an estimate.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed runs again.")] = False,
    chosen: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Take the hyper-parameters that `gar search` chose, from its --out."
        ),
    ] = None,
    store_file: Annotated[
        Path | None,
        typer.Option(
            "--store",
            metavar="FILE.csv",
            help="Keep a line of every finished run there; runs that it has already are not run again.",
        ),
    ] = None,
    setting: SettingFilter = None,
    mixture: MixtureFilter = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Only runs with this method of the suite; may be repeated.")
    ] = None,
    no_models: Annotated[
        bool, typer.Option("--no-models", help="Keep results, not the trained models.")
    ] = False,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
    executor: Annotated[
        Where, typer.Option(help="Processes of this machine, or a Ray cluster.")
    ] = Where.local,
    address: Annotated[str, typer.Option(help="Ray: the cluster; `local` starts one.")] = "auto",
    cpus: Annotated[float, typer.Option(help="Ray: cores of a run.")] = 1,
    gpus: Annotated[float, typer.Option(help="Ray: GPUs of a run; 0.25 puts four runs on one.")] = 0,
    retries: Annotated[int, typer.Option(help="Ray: starts after a lost node.")] = 3,
) -> None:
    """Run every run of a suite that is not finished.

    gar sweep paper_head --out runs --dry-run

    gar sweep own_suite.yaml --out runs --jobs 4

    Exit code: 0 all finished, 1 some failed, 130 interrupted after checkpoints.
    """
    options = option_overrides(device=device, data_dir=data_dir)
    found = load_suite(suite, overrides or []).replace(options)
    if setting or mixture or method:
        found = found.restricted(setting or (), mixture or (), method or ())
    if chosen is not None:
        found = found.with_chosen(chosen)
    keep = None if store_file is None else Store(store_file)
    plan = make_plan(found, out, retry_failed, keep)
    console = Console(stderr=not dry_run)
    here = jobs or (1 if executor is Where.ray else fitting_jobs(plan.uses))
    _show_plan(console, found, plan, here)
    if dry_run:
        return
    where = (
        RayExecutor(address, jobs=jobs, cpus=cpus, gpus=gpus, retries=retries)
        if executor is Where.ray
        else LocalExecutor(here, out / SWEEP)
    )
    with where:
        outcome = run_sweep(plan, where, keep_models=not no_models)
    left = plan.total - outcome.finished - outcome.failed
    line = f"{outcome.finished} finished, {outcome.failed} failed" + (f", {left} to do" if left else "")
    print(f"{out}: {line}" + ("; start again to go on" if outcome.interrupted else ""))
    if outcome.failed and not outcome.interrupted:
        print(f"gar sweep status {out} gives the reasons; --retry-failed runs them again", file=sys.stderr)
    raise typer.Exit(outcome.exit_code)


@app.command()
def status(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The --out directory of a sweep.")],
    output: FormatOption = Format.table,
) -> None:
    """Show what is finished, running, failed and to do."""
    found = read_status(directory)
    if output == Format.json:
        print(json.dumps(_status_tree(found), indent=2))
    else:
        _show_status(Console(), found)


@app.command("collect")
def collect_runs(
    sources: Annotated[
        list[Path], typer.Argument(metavar="DIR|FILE.csv...", help="Directories of sweeps, or stored files.")
    ],
    store_file: Annotated[
        Path, typer.Option("--store", metavar="FILE.csv", help="Where the lines go, beside those it has.")
    ],
) -> None:
    """Keep a line of every finished run below directories, and the lines of other such files, in one file."""
    keep = Store(store_file)
    new = collect(sources, keep)
    print(f"{store_file}: {len(keep.lines)} run{'s' * (len(keep.lines) != 1)}, {new} of them new")


@app.command("ls")
def list_suites() -> None:
    """List the packaged suites."""
    table = Table("suite", "runs", "")
    for name in shipped():
        found = load_suite(name)
        table.add_row(name, str(len(found)), found.file.title)
    Console().print(table)


def _show_plan(console: Console, suite: Suite, plan: Plan, jobs: int) -> None:
    table = Table(title=suite.file.title or suite.name, title_justify="left")
    for heading in ("setting", "mixture"):
        table.add_column(heading, overflow="fold")
    for heading in ("runs", *PLANNED):
        table.add_column(heading, justify="right")
    for (setting, mixture), states in plan.cells.items():
        table.add_row(setting, mixture, str(states.total()), *(str(states[s] or "") for s in PLANNED))
    console.print(table)
    for name, reason in plan.refused.items():
        console.print(f"will fail: {name}: {reason}", style="yellow", markup=False, soft_wrap=True)
    seconds, unknown = plan.estimate(jobs)
    known = plan.remaining - unknown
    told = []
    if known:
        told.append(
            f"about {duration(seconds)} for {known} runs, {jobs} at a time, as long as like ones took"
        )
    if unknown:
        told.append(f"unknown for {unknown} runs, no run of their setting has finished")
    console.print(
        f"{plan.total} runs, {plan.remaining} to do in {plan.out}; "
        f"estimate: {'; '.join(told) or 'nothing to do'} ({available_cores()} cores here)",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _show_status(console: Console, found: Status) -> None:
    table = Table("setting", "mixture", *SHOWN)
    for (setting, mixture), counts in found.cells.items():
        table.add_row(setting, mixture, *(str(counts[state] or "") for state in SHOWN))
    console.print(table)
    for name, facts in found.running.items():
        how = f"{facts['stage']} {facts['done']}/{facts['total']}" if "done" in facts else str(facts["stage"])
        console.print(f"running {name}: {how}", markup=False, soft_wrap=True)
    for name, reason in found.failures.items():
        console.print(f"failed {name}: {reason}", style="red", markup=False, soft_wrap=True)


def _status_tree(found: Status) -> dict[str, Any]:
    cells = [{"setting": s, "mixture": m, **counts} for (s, m), counts in found.cells.items()]
    return {"cells": cells, "running": found.running, "failures": found.failures}
