"""Figures of what single experts do: their load, which tasks they serve, and which tasks conflict in them.

Experts of different seeds do not correspond, so but for sorted loads these show one run, never a mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, TwoSlopeNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from gar.evaluation.findings import Conflict, conflicts
from gar.metrics import expert_cosines, gradient_mass_shares, task_preference
from gar.metrics.load import DEAD_SHARE
from gar.report import _grouping as grouping
from gar.report._choose import NothingToDraw, looks, mixture_of, runs_with
from gar.report._style import INK, Drawing, Panels, dress, plain, title
from gar.report.results import Results
from gar.runs.reading import Run

Colors = NDArray[np.float64]
"""[T, E, 4]: the cells of a heatmap."""
Routing = Mapping[str, Any]
"""The routing section of a result, an evaluation or a diagnosis."""

#: Above, cells of a heatmap have no lines around them, and not every expert has its number.
MANY = 24
#: Cells above this number are one picture instead of a shape each, and keep no states.
DRAWN_CELLS = 1000
#: The colours of log2 P(e|t)/P(e) end at a quarter and at four times.
REACH = 2.0
#: Of the states over training a heatmap keeps so many, evenly apart, the last one among them.
STATES = 12
#: Experts of one model in the figure of conflicts, and tasks up to which its cells have numbers.
EXPERTS, NUMBERED = 4, 12
NEVER, IDLE = "#000000", "#bdbdbd"
# Without their darkest ends: black stands apart, and numbers can be read on them.
PREFERENCE = ListedColormap(matplotlib.colormaps["PuOr_r"](np.linspace(0.1, 0.9, 255)), "preference")
COSINE = ListedColormap(matplotlib.colormaps["RdBu"](np.linspace(0.1, 0.9, 255)), "cosine")
SHARE = ListedColormap(matplotlib.colormaps["Greens"](np.linspace(0.0, 0.9, 255)), "share")


def loads(results: Results, setting: str | None = None, mixture: str | None = None) -> Figure:
    """Load of each expert, sorted within a run since experts of different seeds do not correspond."""
    setting, mixture = mixture_of(results, setting, mixture)
    sorted_loads = {}
    for variant, runs in runs_with(results, setting, mixture, "load").items():
        sorted_loads[variant] = np.sort([run.result["routing"]["load"] for run in runs])[:, ::-1]
    if not sorted_loads:
        raise NothingToDraw("the results hold no loads")
    look = looks(results, setting)
    panels = Panels(len(sorted_loads), 4, 2.75, 2.1, sharey=True)
    for axes, (variant, found) in zip(panels.axes, sorted_loads.items(), strict=True):
        seeds, experts = found.shape
        ranks, uniform = np.arange(1, experts + 1), 1 / experts
        axes.bar(ranks, found.mean(0), color=look[variant]["color"], alpha=0.55, width=0.75)
        axes.plot(np.tile(ranks, seeds), found.ravel(), linestyle="none", marker=".", markersize=4, color=INK)
        axes.axhline(uniform, color=INK, linestyle="--", linewidth=1)
        axes.text(0.99, uniform, "uniform", transform=axes.get_yaxis_transform(), ha="right", va="bottom",
                  fontsize=7, color=INK)  # fmt: skip
        title(axes, f"{variant}, {'1 seed' if seeds == 1 else f'mean of {seeds} seeds'}", "expert, by load")
        axes.set_xticks(ranks)
        axes.set_ylabel("share of load", fontsize=8)
        axes.tick_params(labelleft=True)
        axes.grid(visible=False, axis="x")
    panels.axes[0].set_ylim(0, 1.08 * max(float(found.max()) for found in sorted_loads.values()))
    return panels.figure


def task_expert_heatmap(
    results: Results,
    setting: str | None = None,
    mixture: str | None = None,
    seed: int | None = None,
    variants: Sequence[str] | None = None,
) -> Figure:
    """Which tasks an expert serves, and whose gradients it receives, in one seed; a row a variant.

    Left ``log2 P(e|t) / P(e)``: how much more of a task goes to an expert than of all; its colours end at a
    quarter and at four times, and an expert that a task never goes to is black. Beside it each task's share
    of the expert's gradient mass. Experts are ordered by the task that prefers them most and keep their
    numbers. ``variants`` are Baseline and the most accurate GAR (:meth:`Results.compared`) unless named; the
    seed is the first that all of them have. In the report's page a slider leads over the evaluations.
    """
    setting, mixture = mixture_of(results, setting, mixture)
    wanted = results.compared(setting) if variants is None else list(variants)
    models = _models(results, setting, mixture, seed, wanted, "load_by_task")
    if not models:
        raise NothingToDraw("the results hold no loads by task")
    return _specialisation(*_courses(models, "load_by_task", "gradient_norms"))


def load_heatmap(diagnosis: Mapping[str, Any]) -> Figure:
    """:func:`task_expert_heatmap` of what :func:`gar.diagnose` returns, or of a result.json."""
    return _specialisation({str(diagnosis.get("mixture") or "the model"): [diagnosis["routing"]]})


def _models(
    results: Results, setting: str, mixture: str, seed: int | None, variants: Sequence[str], key: str
) -> dict[str, Run]:
    """One run of each variant that has this under ``routing``, by a name that tells the seed.

    The seed is the given one, the first that all have, or where there is none each one's first.
    """
    found = runs_with(results, setting, mixture, key)
    by_seed = {v: {grouping.seed_of(run): run for run in found[v]} for v in variants if v in found}
    if not by_seed:
        return {}
    common = sorted(set.intersection(*map(set, by_seed.values())))
    wanted = seed if seed is not None else common[0] if common else None
    chosen = {}
    for variant, runs in by_seed.items():
        number = min(runs) if wanted is None else wanted
        if number in runs:
            chosen[f"{variant}, seed {number}"] = runs[number]
    return chosen


def _courses(models: Mapping[str, Run], *keys: str) -> tuple[dict[str, list[Routing]], list[int]]:
    """The routing of each model over training, the final one last, and the updates that all of them have.

    Only evaluations that have these tables of ``routing`` as the result has them; no updates where the runs
    are of unlike length, since none says where both are.
    """
    courses = [{u: found["routing"] for u, found in run.evaluations} for run in models.values()]
    common = sorted(set.intersection(*map(set, courses)))
    if {max(course) for course in courses} != set(common[-1:]):
        common = []
    kept = [
        update
        for update in common
        if all(
            _complete(course[update], run, keys) for course, run in zip(courses, models.values(), strict=True)
        )
    ]
    places = np.linspace(0, len(kept) - 1, min(STATES, len(kept))).round().astype(int)
    kept = [kept[place] for place in places]
    return {
        name: [*(course[update] for update in kept[:-1]), run.result["routing"]]
        for (name, run), course in zip(models.items(), courses, strict=True)
    }, kept


def _complete(routing: Routing, run: Run, keys: Sequence[str]) -> bool:
    """Whether an evaluation has the tables of the run's result, for the same tasks and experts."""
    final = run.result["routing"]
    same = [key for key in keys if isinstance(final.get(key), Mapping)]
    return (
        all(list(routing.get(key) or ()) == list(final[key]) for key in same)
        and all(len(routing.get(key) or ()) == len(final.get(key) or ()) for key in keys)
        and len(routing.get("load") or ()) == len(final["load"])
    )


def _specialisation(named: Mapping[str, Sequence[Routing]], updates: Sequence[int] = ()) -> Figure:
    """A row of heatmaps for each name; of its states the last is drawn and the others are kept."""
    tasks = max(len(states[-1]["load_by_task"]) for states in named.values())
    panels = Panels(3 * len(named), 3, 3.5, max(2.0, 0.95 + 0.24 * tasks))
    rows = zip(*(iter(panels.axes),) * 3, strict=True)
    for number, ((left, right, key), (name, states)) in enumerate(zip(rows, named.items(), strict=True)):
        final = states[-1]
        order = _order(final)
        for axes, what, colors in (
            (left, "log₂ P(e|t) / P(e)", [_preferences(state)[:, order] for state in states]),
            (right, "share of gradient", [_mass_shares(state)[:, order] for state in states]),
        ):
            cells = _cells(axes, colors[-1], order, list(final["load_by_task"]))
            title(axes, f"{name}: {what}", "expert")
            if cells is not None and len(states) > 1:
                cells.set_gid(f"cells:{number}:{int(axes is right)}")
                panels.figure.states[cells.get_gid()] = [_hex(state) for state in colors]
        key.set_axis_off()
        if number == 0:
            _key(key)
    panels.figure.updates = list(updates) if panels.figure.states else []
    return panels.figure


def _order(routing: Routing) -> NDArray[np.intp]:
    """Experts by the task that prefers them most, idle ones last."""
    table = task_preference(list(routing["load_by_task"].values()), routing["load"])
    return np.lexsort((-table.max(0), table.argmax(0), _idle(routing)))


def _idle(routing: Routing) -> NDArray[np.bool_]:
    load = np.asarray(routing["load"], float)
    return load < DEAD_SHARE / len(load)


def _preferences(routing: Routing) -> Colors:
    """The colours of ``log2 P(e|t) / P(e)``."""
    table = task_preference(list(routing["load_by_task"].values()), routing["load"])
    colors = PREFERENCE((np.clip(table, -REACH, REACH) + REACH) / (2 * REACH))
    colors[np.isneginf(table)] = matplotlib.colors.to_rgba(NEVER)
    colors[:, _idle(routing)] = matplotlib.colors.to_rgba(IDLE)
    return np.asarray(colors)


def _mass_shares(routing: Routing) -> Colors:
    """The colours of the tasks' shares of each expert's gradient mass; idle without any."""
    norms = routing.get("gradient_norms")
    if not norms:  # of a version that did not store them
        return np.broadcast_to(
            matplotlib.colors.to_rgba(IDLE), (len(routing["load_by_task"]), len(routing["load"]), 4)
        )
    shares = gradient_mass_shares(list(norms.values()))
    colors = SHARE(np.sqrt(shares))
    colors[:, shares.sum(0) == 0] = matplotlib.colors.to_rgba(IDLE)
    return np.asarray(colors)


def _hex(colors: Colors) -> list[str]:
    return [to_hex(color) for color in colors.reshape(-1, 4)]


def _cells(axes: Axes, colors: Colors, order: Sequence[int] | NDArray[np.intp], tasks: Sequence[str]) -> Any:
    """Draw a heatmap with numbered experts and named tasks; None where the cells are too many to keep."""
    rows, experts = colors.shape[:2]
    few, drawn = experts <= MANY, rows * experts <= DRAWN_CELLS
    lines = {"edgecolors": INK, "linewidth": 0.2} if few else {"rasterized": not drawn}
    mesh = axes.pcolormesh(colors, **lines)
    axes.grid(visible=False)
    places = np.arange(experts)[:: 1 if few else -(-experts // 12)]
    axes.set_xticks(places + 0.5, [str(order[at]) for at in places])
    axes.set_yticks(np.arange(rows) + 0.5, list(map(plain, shortened(tasks, 22))))
    axes.invert_yaxis()
    return mesh if drawn else None


def _key(axes: Axes) -> None:
    """What the colours mean."""

    def patches(entries: Sequence[tuple[str, Any]]) -> list[Patch]:
        return [Patch(facecolor=color, edgecolor=INK, linewidth=0.3, label=label) for label, color in entries]

    options: dict[str, Any] = {
        "frameon": False, "labelcolor": INK, "fontsize": 8, "title_fontsize": 8, "alignment": "left",
        "borderaxespad": 0.0, "handlelength": 1.2,
    }  # fmt: skip
    words = ("−2 or less: a quarter", "−1: half", "0: no preference", "1: twice", "2 or more: four times")
    levels = [(word, PREFERENCE(place)) for word, place in zip(words, np.linspace(0, 1, 5), strict=True)]
    extra = [("never sent there", NEVER), ("without load or gradient", IDLE)]
    first = axes.legend(
        handles=patches([*levels[::-1], *extra]), title="log₂ P(e|t) / P(e)", loc="upper left", **options
    )
    axes.add_artist(first)
    shares = [(f"{100 * share:.0f} %", SHARE(share**0.5)) for share in (1.0, 0.5, 0.25, 0.1, 0.0)]
    second = axes.legend(handles=patches(shares), title="share of the\nexpert’s gradient", loc="upper left",
                         bbox_to_anchor=(0.62, 1.0), **options)  # fmt: skip
    for legend in (first, second):
        legend.get_title().set_color(INK)


def signed(value: float) -> str:
    """Two decimals and a sign.

    >>> signed(-0.401), signed(-0.001)
    ('−0.40', '+0.00')
    """
    return f"{value:+z.2f}".replace("-", "−")


def shortened(names: Sequence[str], length: int) -> list[str]:
    """The names cut to this length, or as they are where that would make two alike.

    >>> shortened(["logical deduction", "rte"], 8), shortened(["task one", "task two"], 4)
    (['logical…', 'rte'], ['task one', 'task two'])
    """
    cut = [name if len(name) <= length else f"{name[: length - 1]}…" for name in names]
    return cut if len(set(cut)) == len(set(names)) else list(names)


def conflict(
    results: Results,
    setting: str | None = None,
    mixture: str | None = None,
    seed: int | None = None,
    variants: Sequence[str] | None = None,
    experts: int = EXPERTS,
) -> Figure:
    """Cosines between the tasks' gradients within an expert, of one seed, the variants side by side.

    Of every variant the ``experts`` with the lowest cosine, the lowest first; experts without load, and those
    that receive the gradient of one task alone, have no conflict and are left out. ``variants`` and the seed
    are chosen as in :func:`task_expert_heatmap`, and in the report's page a slider leads over the evaluations
    of the same experts; titles are of the last one.
    """
    setting, mixture = mixture_of(results, setting, mixture)
    wanted = results.compared(setting) if variants is None else list(variants)
    models = _models(results, setting, mixture, seed, wanted, "gradient_grams")
    if not models:
        raise NothingToDraw("the results hold no inner products of gradients (versions before 0.2)")
    return _conflicts(*_courses(models, "load_by_task", "gradient_grams"), experts=experts)


def conflict_matrices(diagnosis: Mapping[str, Any], experts: int = EXPERTS) -> Figure:
    """:func:`conflict` of what :func:`gar.diagnose` returns, or of a result.json."""
    return _conflicts({"": [diagnosis["routing"]]}, [], experts)


def _conflicts(courses: Mapping[str, Sequence[Routing]], updates: Sequence[int], experts: int) -> Figure:
    """The experts are those of the last state, which is drawn; the others are kept."""
    named = {name: states[-1] for name, states in courses.items()}
    found = {name: conflicts(routing)[:experts] for name, routing in named.items()}
    ranks = list(zip_longest(*([(name, at) for at in found[name]] for name in named)))
    if not ranks:
        raise NothingToDraw("no expert receives the gradients of two tasks")
    tasks = max(len(routing["load_by_task"]) for routing in named.values())
    words = [shortened(list(routing["load_by_task"]), 14) for routing in named.values()]
    names = max(len(name) for found in words for name in found)
    shown = [entry for rank in ranks for entry in rank]
    panels = Panels(len(shown), 4, 2.75, 0.9 + 0.075 * names + 0.22 * max(tasks - 1, 3))
    for number, (axes, entry) in enumerate(zip(panels.axes, shown, strict=True)):
        if entry is None:  # this one has fewer such experts
            axes.set_axis_off()
        else:
            _matrix(axes, courses[entry[0]], *entry, figure=panels.figure, number=number)
    panels.figure.updates = list(updates) if panels.figure.states else []
    return panels.figure


def _matrix(
    axes: Axes, states: Sequence[Routing], name: str, lowest: Conflict, *, figure: Drawing, number: int
) -> None:
    """The cosines below the diagonal; tasks without a gradient here are grey."""
    routing = states[-1]
    tasks = list(routing["load_by_task"])
    cosines = expert_cosines(gram=[state["gradient_grams"][lowest.expert] for state in states])
    present = np.diagonal(cosines, axis1=1, axis2=2) > 0
    both = present[:, :, None] & present[:, None, :]
    told = np.tri(len(tasks), k=-1, dtype=bool)
    colors = COSINE((cosines + 1) / 2)
    colors[~both] = matplotlib.colors.to_rgba(IDLE)
    colors[:, ~told] = 0
    cells = axes.pcolormesh(colors[-1, 1:, :-1], edgecolors="none")
    keep = len(states) > 1 and len(tasks) <= NUMBERED
    if keep:
        cells.set_gid(f"cells:{number}")
        figure.states[f"cells:{number}"] = [_hex(state[told]) for state in colors]
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for i, j in zip(*np.nonzero(told & both[-1]), strict=True):
        if len(tasks) > NUMBERED:
            break
        texts = [
            _cosine(value) if shown else ""
            for value, shown in zip(cosines[:, i, j], both[:, i, j], strict=True)
        ]
        at = axes.text(j + 0.5, i - 0.5, texts[-1], ha="center", va="center", fontsize=7,
                       color="white" if abs(cosines[-1, i, j]) > 0.7 else "black")  # fmt: skip
        at.set_in_layout(False)
        if keep:
            at.set_gid(f"words:{number}:{i}:{j}")
            figure.words[f"words:{number}:{i}:{j}"] = texts
    labels = list(map(plain, shortened(tasks, 14)))
    axes.set_xticks(np.arange(len(tasks) - 1) + 0.5, labels[:-1], rotation=90)
    axes.set_yticks(np.arange(len(tasks) - 1) + 0.5, labels[1:])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    share = f"{100 * routing['load'][lowest.expert]:.0f} % of the load"
    lines = [
        f"expert {lowest.expert}, {share}:",
        f"{lowest.first} against {lowest.second} {signed(lowest.cosine)}",
    ]
    title(axes, [name, *lines] if name else lines, "")


def _cosine(value: float) -> str:
    """Short enough for a cell.

    >>> _cosine(-0.401), _cosine(1.0)
    ('−.40', '+1')
    """
    return signed(value).replace("0.", ".") if abs(value) < 0.995 else signed(value)[:2]


def heatmaps(
    tables: Mapping[str, Mapping[str, Sequence[float]]], columns: int, row: str = "task", least: int = 0
) -> Figure:
    """One panel for each ``{title: {row: [E]}}`` with one colour scale, which turns at the uniform share.

    There is room for ``least`` rows.
    """
    arrays = {name: np.asarray(list(by_task.values()), float) for name, by_task in tables.items()}
    tasks, experts = next(iter(arrays.values())).shape
    panels = Panels(len(tables), columns, 3.6, 0.9 + 0.24 * max(tasks, least))
    few = experts <= MANY
    uniform, top = 1 / experts, max(float(table.max()) for table in arrays.values())
    norm = TwoSlopeNorm(uniform, 0, max(top, uniform * 1.01) if experts > 1 else 2)
    for axes, (name, table) in zip(panels.axes, arrays.items(), strict=True):
        order = np.lexsort((-table.max(0), table.argmax(0)))
        lines = {"edgecolors": INK, "linewidth": 0.2} if few else {"rasterized": True}
        axes.pcolormesh(table[:, order], cmap="PuOr_r", norm=norm, **lines)
        axes.grid(visible=False)
        places = np.arange(experts)[:: 1 if few else -(-experts // 12)]
        axes.set_xticks(places + 0.5, [str(order[at]) for at in places])
        axes.set_yticks(np.arange(tasks) + 0.5, [plain(str(task)) for task in tables[name]])
        axes.invert_yaxis()
        title(axes, name, "expert")
    bar = panels.figure.colorbar(ScalarMappable(norm, "PuOr_r"), ax=panels.axes + panels.spare, fraction=0.03)
    dress(bar.ax)
    bar.ax.grid(visible=False)
    bar.ax.axhline(uniform, color="black", linewidth=1.5)  # on white whatever the page is
    bar.set_label(f"share of {row}'s load\n(line: uniform {uniform:.3f})", fontsize=8, color=INK)
    return panels.figure
