"""The paper's hyper-parameter search, candidate by candidate.

What it varies, between which limits and on which budget is data: the packaged ``paper/hpo.yaml``. The paper
leaves three things open; the choices here are

* order: coordinates are swept as ``hpo.yaml`` lists them, the learning rate first;
* start: a coordinate that was not swept yet stands in the middle of its range, on its own scale;
* nearby values: on each side of the current best one value, uniform on the coordinate's scale within one step
  of the eight-point grid, both on the inner side when the best is a limit. They depend on the search's seed,
  the method and the coordinate alone.

With ``Budget.candidates`` there is one stage in place of all that: so many points of a Halton sequence in the
method's ranges, the same number for every method and the same learning rates.

A tie goes to the candidate that comes first. The two seeds of every candidate are not among 0-4, those of the
final runs.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from scipy.stats import qmc

from gar import config as configuration
from gar.config import set_key
from gar.data.load import resolve
from gar.errors import UserError
from gar.methods import REGISTRY, Range, check_name
from gar.presets import paper
from gar.presets.catalogue import is_searched, searched
from gar.runs import DamagedFile, State, read_result, state_of
from gar.runs.files import read_json, write_json, write_text
from gar.runs.names import FAILURE
from gar.seeds import derive_seed
from gar.sweeps.executors import Executor
from gar.sweeps.progress import View
from gar.sweeps.suite import CHECKPOINTING, Combination, PlannedRun, Tree
from gar.sweeps.sweep import Outcome, carry_out, make_plan

Values = dict[str, float]

FIRST_SEED = 1000
#: The folder of a method's candidates. Reports pass hidden folders over: scores on the probe are no results.
CANDIDATES = ".candidates"
#: Updates between the checkpoints of a candidate.
CHECKPOINT_EVERY = 100


@dataclass(frozen=True)
class Coordinate:
    """One searched quantity, its range and its scale (``log`` or ``linear``)."""

    name: str
    low: float
    high: float
    scale: Literal["log", "linear"]
    count: int

    def grid(self) -> list[float]:
        """``count`` values from ``low`` to ``high``, equally spaced on the scale.

        >>> Coordinate("c", 0.0, 0.7, "linear", 8).grid()
        [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
        """
        return [self.at(i / (self.count - 1)) for i in range(self.count)]

    @property
    def middle(self) -> float:
        return self.at(0.5)

    def at(self, position: float) -> float:
        """The value at a position in [0, 1] of the range. Rounded to 12 digits, the limits exact."""
        if position <= 0 or position >= 1:
            return self.high if position >= 1 else self.low
        if self.scale == "log":
            value = math.exp((1 - position) * math.log(self.low) + position * math.log(self.high))
        else:
            value = (1 - position) * self.low + position * self.high
        return float(f"{value:.12g}")

    def position(self, value: float) -> float:
        """The inverse of :meth:`at`."""
        if self.scale == "log":
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def nearby(self, best: float, *stream: int | str) -> tuple[float, float]:
        """Two values near ``best`` inside the range; ``stream`` names the random numbers used."""
        step, here = 1 / (self.count - 1), self.position(best)
        sides = [(max(0.0, here - step), here), (here, min(1.0, here + step))]
        inner = [side for side in sides if side[1] - side[0] > step * 1e-6]
        below, above = inner[0], inner[-1]
        values = [
            self.at(start + (stop - start) * _uniform(*stream, self.name, number))
            for number, (start, stop) in enumerate((below, above))
        ]
        return min(values), max(values)


@dataclass(frozen=True)
class Space:
    """What the search of one method varies, and the configuration key of each coordinate."""

    method: str
    coordinates: tuple[Coordinate, ...]
    keys: Mapping[str, str]
    inherited: tuple[str, ...]
    """Coordinates whose value is Baseline's."""


def space(method: str, ranges: Mapping[str, Range] | None = None) -> Space:
    """The search space of a method: from the packaged protocol, or from the ranges that a class declares.

    Methods that are joined by + are searched together: the learning rate, then what each has of its own.
    ``ranges`` take the place of those of these names, in the methods that have them.
    """
    protocol = paper.hpo()
    parts = check_name(method, "--method")
    if not is_searched(method):
        lacking = next(part for part in parts if not is_searched(part))
        raise UserError(
            f"--method {method}: {lacking} has no ranges to search in; expected some in its class"
        )
    coordinates: dict[str, Coordinate] = {}
    for part in parts:
        cls = REGISTRY[part]
        free = protocol["methods"].get(part, {"free": ["learning_rate"]})["free"]
        found = {name: protocol["coordinates"][name] for name in free}
        if part not in protocol["methods"]:
            common = {"candidates": found["learning_rate"]["candidates"]}
            found |= {f"{part}.{field}": {**own._asdict(), **common} for field, own in cls.ranges.items()}
        for name, entry in found.items():
            limits = (ranges or {}).get(name) or Range(entry["low"], entry["high"], entry["scale"])
            coordinates.setdefault(name, Coordinate(name, *limits, entry["candidates"]))
    inherited = [] if method == "baseline" else protocol["inherited_from_baseline"]
    keys = {column: key for key, column in searched(method).items()}
    return Space(method, tuple(coordinates.values()), keys, tuple(inherited))


@dataclass(frozen=True)
class Budget:
    """How a candidate is measured; the defaults are the protocol's."""

    updates: int = paper.hpo()["candidate_evaluation"]["multi_task_updates"]
    epochs: float = paper.hpo()["candidate_evaluation"]["single_task_epochs"]
    seeds: int = paper.hpo()["candidate_evaluation"]["seeds"]
    single_task_updates: int | None = None
    """In place of ``epochs``, to try a search out."""
    candidates: int | None = None
    """Every method's, spread over its ranges, in place of the protocol's grids."""
    ranges: Mapping[str, Range] = field(default_factory=dict)
    """In place of the protocol's and the methods' own, by coordinate."""

    def apply(self, tree: Tree) -> Tree:
        """A candidate's configuration: the search budget, no evaluation on the way."""
        tree = copy.deepcopy(tree)
        tasks = resolve(configuration.build(tree).mixture)[1]
        if len(tasks) == 1 and self.single_task_updates is None:
            tree["optimizer"]["epochs"] = self.epochs
        else:
            updates = self.updates if len(tasks) > 1 else self.single_task_updates
            tree["optimizer"] |= {"updates": updates, "epochs": None}
        tree["evaluation"]["every"] = 0
        return tree


class Stopped(KeyboardInterrupt):
    """The search was interrupted; what is finished is used when it starts again."""


class SearchError(RuntimeError):
    """A run failed for a reason that is not its candidate's: the search cannot judge it."""


@dataclass(frozen=True)
class Stage:
    """The runs of one stage of a search: every candidate with every seed."""

    name: str
    planned: Sequence[PlannedRun]

    def runs(self) -> Iterator[PlannedRun]:
        return iter(self.planned)


#: Runs a stage below the search's directory until every run is finished, or failed by its candidate's fault.
Measure = Callable[[Stage], None]


@dataclass
class Compared:
    """The candidates that a stage compared, in order, and their scores (None: non-finite)."""

    stage: str
    candidates: list[Values]
    scores: list[float | None]
    keys: list[str]


@dataclass
class Found:
    """The outcome of one method's search."""

    method: str
    values: Values
    score: float
    tree: Tree
    """The chosen configuration, with the final budget and seed of the base."""
    steps: list[Compared] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    """Non-finite candidates by key, with the reason."""

    def report(self) -> dict[str, Any]:
        """Everything but the configuration, for search.json."""
        steps = [
            {
                "stage": step.stage,
                "candidates": [
                    {"key": key, "values": values, "score": score}
                    for key, values, score in zip(step.keys, step.candidates, step.scores, strict=True)
                ],
            }
            for step in self.steps
        ]
        chosen = {"values": self.values, "score": self.score}
        return {"method": self.method, "chosen": chosen, "non_finite": self.problems, "steps": steps}


#: The search of one method: what has to be run next, stage by stage, and at the end what was found.
Search = Generator[Stage, None, Found]


def search_method(
    base: Tree,
    out: Path,
    setting: str = "search",
    mixture: str = "mixture",
    *,
    inherited: Mapping[str, float] | None = None,
    seed: int = 0,
    budget: Budget | None = None,
) -> Search:
    """Search one method: the coordinate-wise pass, then the local grid around its result.

    ``base`` is the full configuration with the method in it, ``inherited`` Baseline's chosen values. Yields
    every :class:`Stage`, whose runs have to be done before the next is asked for (see :func:`side_by_side`).
    They are kept in ``out/setting/mixture/method/.candidates`` under a digest of what they compute, and are
    not run again; ``chosen.yaml`` and ``search.json`` beside them come last.
    """
    method = base["method"]["name"]
    budget = budget or Budget()
    where = space(method, budget.ranges)
    missing = [name for name in where.inherited if name not in (inherited or {})]
    if missing:
        raise UserError(
            f"search {method}: {', '.join(missing)} come from Baseline, which has to be searched first"
        )
    locked = {name: (inherited or {})[name] for name in where.inherited}
    seeds = range(FIRST_SEED + seed * budget.seeds, FIRST_SEED + (seed + 1) * budget.seeds)
    scorer = _Scorer(base, where, locked, out, (setting, mixture), seeds, budget)
    if budget.candidates is None:
        steps = yield from _protocol(scorer, seed)
    else:
        compared = yield from scorer.compare("spread", spread(where, budget.candidates))
        steps = [compared]
    compared = steps[-1]
    directory = out / setting / mixture / method
    index = _best(compared.scores)
    if index is None:
        raise UserError(f"search {method}: every candidate became non-finite; see {directory / CANDIDATES}")
    values, score = compared.candidates[index], compared.scores[index]
    assert score is not None
    tree = _with_values(base, where, {**values, **locked})
    found = Found(method, {**values, **locked}, score, tree, steps, scorer.problems)
    _write(found, directory)
    return found


def spread(where: Space, count: int) -> list[Values]:
    """``count`` points of a space: of a Halton sequence, each coordinate on its own scale.

    The first coordinate's values depend on their number alone.

    >>> where = space("gar", {"learning_rate": Range(0, 1, "linear")})
    >>> [point["learning_rate"] for point in spread(where, 3)]
    [0.5, 0.25, 0.75]
    """
    drawn = qmc.Halton(len(where.coordinates), scramble=False).random(count + 1)[
        1:
    ]  # the first is the origin
    return [
        {each.name: each.at(float(at)) for each, at in zip(where.coordinates, point, strict=True)}
        for point in drawn
    ]


def _protocol(scorer: _Scorer, seed: int) -> Generator[Stage, None, list[Compared]]:
    """The coordinate-wise pass, then the local grid around its result."""
    where = scorer.where
    current: Values = {coordinate.name: coordinate.middle for coordinate in where.coordinates}
    steps: list[Compared] = []
    for coordinate in where.coordinates:
        tried = [{**current, coordinate.name: value} for value in coordinate.grid()]
        compared = yield from scorer.compare(coordinate.name, tried)
        steps.append(compared)
        if (index := _best(compared.scores)) is not None:
            current = tried[index]
    near = (
        (current[c.name], *c.nearby(current[c.name], seed, "search", "nearby", where.method))
        for c in where.coordinates
    )
    names = [coordinate.name for coordinate in where.coordinates]
    compared = yield from scorer.compare(
        "local", [dict(zip(names, point, strict=True)) for point in itertools.product(*near)]
    )
    return [*steps, compared]


@dataclass
class _Scorer:
    """Scores candidates by their runs, those that are there already included."""

    base: Tree
    where: Space
    locked: Values
    out: Path
    #: The setting and the mixture.
    place: tuple[str, str]
    seeds: Sequence[int]
    budget: Budget
    problems: dict[str, str] = field(default_factory=dict)

    def compare(self, stage: str, candidates: list[Values]) -> Generator[Stage, None, Compared]:
        """Ask for the candidates' runs, each once, and read their scores."""
        combinations = [self._combination(values) for values in candidates]
        runs = {c.id: [PlannedRun(c, seed, probe=True) for seed in self.seeds] for c in combinations}
        name = ",".join((*self.place, self.where.method, stage))
        yield Stage(name, [run for planned in runs.values() for run in planned])
        keys = [combination.method.rpartition("/")[2] for combination in combinations]
        scores = {key: self._score(key, runs[c.id]) for key, c in zip(keys, combinations, strict=True)}
        return Compared(stage, candidates, [scores[key] for key in keys], keys)

    def _combination(self, values: Values) -> Combination:
        tree = self.budget.apply(_with_values(self.base, self.where, {**values, **self.locked}))
        found = Combination(*self.place, "", tree, {**CHECKPOINTING, "checkpoint.every": CHECKPOINT_EVERY})
        content = [
            found.digest,
            found.data,
            list(self.seeds),
            paper.hpo()["candidate_evaluation"]["probe_fraction"],
        ]
        key = hashlib.blake2b(json.dumps(content).encode(), digest_size=12).hexdigest()
        return replace(found, method=f"{self.where.method}/{CANDIDATES}/{key}")

    def _score(self, key: str, runs: Sequence[PlannedRun]) -> float | None:
        """The mean accuracy over the seeds; none, and a problem noted, where one became non-finite."""
        accuracies, reasons = [], []
        for run in runs:
            directory = self.out / run.id
            if (reason := _non_finite(directory)) is not None:
                reasons.append(reason)
                continue
            try:
                accuracies.append(read_result(directory).accuracy.macro)
            except DamagedFile as error:
                raise UserError(f"{directory}: {error}; remove it to run it again") from None
        if reasons:
            self.problems[key] = "; ".join(reasons)
            return None
        return sum(accuracies) / len(accuracies)


def _non_finite(directory: Path) -> str | None:
    """The reason of a run that failed by its candidate's fault."""
    failure = read_json(directory / FAILURE) or {} if state_of(directory) is State.FAILED else {}
    return str(failure["reason"]) if failure.get("error") == "TrainingFailure" else None


def _best(scores: Sequence[float | None]) -> int | None:
    """The first index with the highest score; a non-finite candidate (None) is worse than any other."""
    finite = [(-score, index) for index, score in enumerate(scores) if score is not None]
    return min(finite)[1] if finite else None


def _with_values(base: Tree, where: Space, values: Mapping[str, float]) -> Tree:
    tree = copy.deepcopy(base)
    for name, value in values.items():
        set_key(tree, where.keys[name], value)
    tree["preset"] = None  # it is no longer the published row
    return configuration.build(tree, f"search {where.method}").to_dict()


def _uniform(*stream: int | str) -> float:
    """A number in (0, 1) that depends on the named stream alone."""
    return (derive_seed(*stream) + 0.5) / 2**63


def _write(found: Found, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    values = ", ".join(f"{name} {value:.2g}" for name, value in found.values.items())
    head = f"# Chosen by `gar search`: {values}; macro accuracy {found.score:.4f} on the development probe.\n"
    body = yaml.safe_dump(found.tree, sort_keys=False, allow_unicode=True)
    write_text(directory / "chosen.yaml", head + body)
    write_json(directory / "search.json", found.report())


# ---------------------------------------------------------------------- a whole comparison


@dataclass(frozen=True)
class Wanted:
    """The methods to search in one setting and mixture; ``bases(method)`` is a method's configuration."""

    setting: str
    mixture: str
    methods: Sequence[str]
    bases: Callable[[str], Tree]


def search(
    comparisons: Sequence[Wanted],
    measure: Measure,
    out: Path,
    *,
    seed: int = 0,
    budget: Budget | None = None,
) -> Iterator[tuple[Wanted, Found]]:
    """Search the methods of every comparison: all Baselines first, then all others, side by side.

    Each method has its own directory below ``out/setting/mixture``.
    """
    for method in (name for each in comparisons for name in each.methods):
        space(method)

    def searched(each: Wanted, method: str, inherited: Mapping[str, float]) -> Search:
        return search_method(
            each.bases(method), out, each.setting, each.mixture,
            inherited=inherited, seed=seed, budget=budget,
        )  # fmt: skip

    baselines: list[Mapping[str, float]] = [{} for _ in comparisons]
    first = [searched(each, "baseline", {}) for each in comparisons]
    for index, found in side_by_side(first, measure):
        names = paper.hpo()["inherited_from_baseline"]
        baselines[index] = {name: found.values[name] for name in names}
        yield comparisons[index], found
    others = [
        (each, searched(each, method, inherited))
        for each, inherited in zip(comparisons, baselines, strict=True)
        for method in dict.fromkeys(each.methods)
        if method != "baseline"
    ]
    for index, found in side_by_side([each for _, each in others], measure):
        yield others[index][0], found


def side_by_side(searches: Sequence[Search], measure: Measure) -> Iterator[tuple[int, Found]]:
    """Carry searches out together: their next stages are run as one, so that many workers have work.

    Yields a search's index and what it found as soon as it is through. No search sees another's scores, so
    each finds what it would find alone.
    """
    going = dict(enumerate(searches))
    while going:
        stages: list[Stage] = []
        for index, each in list(going.items()):
            try:
                stages.append(next(each))
            except StopIteration as end:
                del going[index]
                yield index, end.value
        if stages:
            measure(Stage(_together([stage.name for stage in stages]), [r for s in stages for r in s.runs()]))


def sweeping(out: Path, executor: Executor, stopping: Callable[[], bool], view: View) -> Measure:
    """Run stages as sweeps below ``out``, which the caller holds."""

    def measure(stage: Stage) -> None:
        for run in stage.runs():
            if _non_finite(out / run.id) is None:  # another failure is nobody's score: run it again
                (out / run.id / FAILURE).unlink(missing_ok=True)
        plan, outcome = make_plan(stage, out), Outcome()
        view.total += plan.remaining
        carry_out(plan, executor, outcome, keep_models=False, view=view, stopping=stopping)
        if stopping():
            raise Stopped("search stopped; start it again with the same arguments to go on")
        directories = {run.id: out / run.id for run in stage.runs()}
        failures = [
            f"{name}: {(read_json(directory / FAILURE) or {}).get('reason')}"
            for name, directory in directories.items()
            if state_of(directory) is not State.FINISHED and _non_finite(directory) is None
        ]
        if failures:
            raise SearchError(f"{len(failures)} runs failed; the first: {failures[0]}")

    return measure


def _together(names: Sequence[str]) -> str:
    """One name for stages that run together. Files are called by it: its length does not grow with them."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]}+{len(names) - 1}-{hashlib.sha256('+'.join(names).encode()).hexdigest()[:8]}"
