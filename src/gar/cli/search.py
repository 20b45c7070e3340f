"""``gar search``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gar.cli.options import (
    DataDirOption,
    DeviceOption,
    MixtureFilter,
    SettingFilter,
    option_overrides,
)
from gar.config import Config, load_tree, parse_overrides, set_key
from gar.data.load import resolve
from gar.errors import UserError, one_of, path_kind
from gar.methods import REFERENCE, Range
from gar.presets.catalogue import is_searched, resolve_config
from gar.runs.names import path_part
from gar.runs.stopping import StopSignals
from gar.sweeps.local import GpuUse, LocalExecutor, fitting_jobs
from gar.sweeps.progress import View
from gar.sweeps.search import Budget, Found, SearchError, Space, Wanted, space, sweeping
from gar.sweeps.search import search as search_methods
from gar.sweeps.store import SWEEP, hold
from gar.sweeps.suite import Suite, load_suite, shipped


def search(
    what: Annotated[
        str,
        typer.Argument(
            metavar="SUITE|FILE|MIXTURE|PRESET", help="A suite, or one configuration as for `gar train`."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Set in all candidates.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Method to search; may be repeated. Default: those of WHAT.")
    ] = None,
    setting: SettingFilter = None,
    mixture: MixtureFilter = None,
    out: Annotated[
        Path, typer.Option(help="Where candidates and choices go; start again there to go on.")
    ] = Path("search"),
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; default: what fills the GPUs, on a CPU 1.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    updates: Annotated[
        int | None,
        typer.Option(min=1, help="Updates of a candidate, single tasks too; default: the protocol's."),
    ] = None,
    candidates: Annotated[
        int | None,
        typer.Option(
            min=1, help="Candidates a method, spread over its ranges; default: the protocol's grids."
        ),
    ] = None,
    within: Annotated[
        list[str] | None,
        typer.Option(
            "--range", metavar="NAME=LOW,HIGH", help="Another range of a coordinate; may be repeated."
        ),
    ] = None,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
) -> None:
    """Search hyperparameters by the paper's protocol, Baseline first; the validation split is never used.

    gar search own.yaml --method gar --out search

    gar search paper_head --method gar --method stgc --jobs 4

    The choice of each method is OUT/<setting>/<mixture>/<method>/chosen.yaml, ready for `gar train`.
    """
    changes = {**parse_overrides(overrides or []), **option_overrides(device=device, data_dir=data_dir)}
    budget = Budget() if updates is None else Budget(updates=updates, single_task_updates=updates)
    comparisons = list(_comparisons(what, changes, method, setting or (), mixture or ()))
    names = dict.fromkeys([REFERENCE, *(name for each in comparisons for name in each.methods)])
    ranges = _ranges(within or [], [space(name) for name in names])
    budget = replace(budget, candidates=candidates, ranges=ranges)
    uses = {GpuUse.of(each.bases(name)) for each in comparisons for name in each.methods}
    console = Console()
    try:
        with (
            hold(out),
            LocalExecutor(jobs or fitting_jobs(uses), out / SWEEP) as executor,
            StopSignals() as stopping,
            View(0) as view,
        ):
            measure = sweeping(out, executor, stopping, view)
            for each, found in search_methods(comparisons, measure, out, seed=seed, budget=budget):
                path = f"{each.setting}/{each.mixture}/{found.method}"
                view.say(f"chosen for {path}: accuracy {found.score:.4f} on the probe")
                console.print(_table(path, found, ranges))
                console.print(f"gar train {out / path / 'chosen.yaml'}", soft_wrap=True)
    except SearchError as failure:
        Console(stderr=True).print(f"error: {failure}; start again to go on", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _comparisons(
    what: str,
    changes: dict[str, Any],
    methods: list[str] | None,
    settings: Sequence[str],
    mixtures: Sequence[str],
) -> Iterator[Wanted]:
    if not _is_suite(what):
        if settings or mixtures:
            raise UserError(f"--setting and --mixture choose from a suite, but {what} is one configuration")
        config = resolve_config(what, changes)
        name = path_part(resolve(config.mixture)[0])
        setting = Path(what).stem if Path(what).suffix else config.backbone.name.rstrip("/").split("/")[-1]
        own = methods or [config.method.name]
        yield Wanted(setting, name, own, lambda method: _with_method(config, method))
        return
    suite = load_suite(what).replace(changes)
    if suite.file.overrides:
        raise UserError(f"{what}: has overrides, which a search does not expand; expected a suite without")
    suite = suite.restricted(settings, mixtures)
    for setting, mixture in dict.fromkeys((setting, mixture) for setting, mixture, _ in suite.cells()):
        if not (wanted := methods):
            own = suite.methods(setting, mixture)
            wanted = [name for name in own if is_searched(name)]
            if passed := [name for name in own if not is_searched(name)]:
                print(f"{setting}/{mixture}: not searched, no ranges: {', '.join(passed)}", file=sys.stderr)
        yield Wanted(setting, mixture, wanted, _suite_bases(suite, setting, mixture))


def _is_suite(what: str) -> bool:
    if path_kind(what) == "file":
        return "settings" in load_tree(what)
    return what in shipped()


def _suite_bases(suite: Suite, setting: str, mixture: str) -> Callable[[str], dict[str, Any]]:
    return lambda method: suite.combination(setting, mixture, method).tree


def _with_method(config: Config, method: str) -> dict[str, Any]:
    tree = config.to_dict()
    set_key(tree, "method.name", method)
    return tree


def _ranges(texts: Sequence[str], spaces: Sequence[Space]) -> dict[str, Range]:
    """Ranges by coordinate, each on the scale that it has."""
    scales = {each.name: each.scale for where in spaces for each in where.coordinates}
    found: dict[str, Range] = {}
    for text in texts:
        name, _, limits = text.partition("=")
        if name not in scales:
            raise one_of("--range", name, scales)
        try:
            low, high = map(float, limits.split(","))
        except ValueError:
            raise UserError(f"--range {text}: expected {name}=LOW,HIGH") from None
        scale = scales[name]
        if not (math.isfinite(high) and low < high and (low > 0 or scale == "linear")):
            above = "0 < LOW" if scale == "log" else "LOW"
            raise UserError(f"--range {text}: the scale is {scale}; expected {above} < HIGH")
        found[name] = Range(low, high, scale)
    return found


def _table(path: str, found: Found, ranges: Mapping[str, Range]) -> Table:
    table = Table(title=path, title_justify="left")
    for heading in ("", "chosen", "range"):
        table.add_column(heading)
    where = space(found.method, ranges)
    limits = {c.name: f"{c.low:g} … {c.high:g}, {c.scale}" for c in where.coordinates}
    for name, value in found.values.items():
        table.add_row(name, f"{value:.3g}", limits.get(name, "from Baseline"))
    table.caption = f"macro accuracy {found.score:.4f} on the probe" + (
        f"; {len(found.problems)} candidates became non-finite" if found.problems else ""
    )
    return table
