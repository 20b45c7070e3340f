"""The paper's hyper-parameter search, candidate by candidate.

What it varies, between which limits and on which budget is data: the packaged ``paper/hpo.yaml``. The paper
leaves three things open; the choices here are

* order: coordinates are swept as ``hpo.yaml`` lists them, the learning rate first;
* start: a coordinate that was not swept yet stands in the middle of its range, on its own scale;
* nearby values: on each side of the current best one value, uniform on the coordinate's scale within one step
  of the eight-point grid, both on the inner side when the best is a limit. They depend on the search's seed,
  the method and the coordinate alone.

A tie goes to the candidate that comes first. The two seeds of every candidate are not among 0-4, those of the
final runs.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gar import config as configuration
from gar.config import set_key
from gar.data.load import resolve
from gar.errors import UserError, one_of
from gar.presets import paper
from gar.presets.catalogue import METHOD_FIELDS
from gar.runs.files import read_json, write_json
from gar.seeds import derive_seed
from gar.sweeps.suite import Tree, digest

Values = dict[str, float]

#: Coordinates that every method has, and the configuration keys behind them; a method's own coordinates are
#: in :data:`gar.presets.catalogue.METHOD_FIELDS`.
OPTIMIZER_KEYS = {
    "learning_rate": "optimizer.learning_rate",
    "grad_clip": "optimizer.clip",
    "weight_decay": "optimizer.weight_decay",
}
FIRST_SEED = 1000


@dataclass(frozen=True)
class Coordinate:
    """One searched quantity, its range and its scale (``log`` or ``linear``)."""

    name: str
    low: float
    high: float
    scale: str
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
    """What the search of one method varies, and the key of each coordinate."""

    method: str
    coordinates: tuple[Coordinate, ...]
    keys: Mapping[str, str]
    inherited: tuple[str, ...]
    """Coordinates whose value is Baseline's."""


def space(method: str) -> Space:
    """The search space of a method, from the packaged protocol."""
    protocol = paper.hpo()
    if method not in protocol["methods"]:
        raise one_of("--method", method, protocol["methods"])
    columns = {column: f"method.{name}" for name, column in METHOD_FIELDS[method].items()}
    coordinates = []
    for name in protocol["methods"][method]["free"]:
        entry = protocol["coordinates"][name]
        coordinates.append(Coordinate(name, entry["low"], entry["high"], entry["scale"], entry["candidates"]))
    inherited = [] if method == "baseline" else protocol["inherited_from_baseline"]
    keys = {**OPTIMIZER_KEYS, **columns}
    return Space(method, tuple(coordinates), keys, tuple(inherited))


@dataclass(frozen=True)
class Budget:
    """How a candidate is measured; the defaults are the protocol's."""

    updates: int = paper.hpo()["candidate_evaluation"]["multi_task_updates"]
    epochs: float = paper.hpo()["candidate_evaluation"]["single_task_epochs"]
    seeds: int = paper.hpo()["candidate_evaluation"]["seeds"]
    single_task_updates: int | None = None
    """In place of ``epochs``, to try a search out."""

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


@dataclass(frozen=True)
class Trial:
    """One candidate with one seed: what an evaluation has to run."""

    key: str
    values: Mapping[str, float]
    seed: int
    tree: Tree
    """The full configuration, search budget and seed included."""


@dataclass(frozen=True)
class Measured:
    """The macro accuracy of a trial on the probe, or why there is none (``reason``): it became non-finite."""

    trial: Trial
    accuracy: float | None
    reason: str | None = None


#: Measures trials, in any order; raising leaves what was measured so far in the store.
Evaluate = Callable[[Sequence[Trial]], Iterable[Measured]]


class Stopped(KeyboardInterrupt):
    """The search was interrupted; what is stored is used when it starts again."""


@dataclass
class Step:
    """One stage of a search: the candidates it compared, in order, and their scores (None: non-finite)."""

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
    steps: list[Step] = field(default_factory=list)
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


def search_method(
    base: Tree,
    evaluate: Evaluate,
    directory: Path,
    *,
    inherited: Mapping[str, float] | None = None,
    seed: int = 0,
    budget: Budget | None = None,
) -> Found:
    """Search one method: the coordinate-wise pass, then the local grid around its result.

    ``base`` is the full configuration with the method in it, ``inherited`` Baseline's chosen values. Every
    candidate is kept in ``directory/candidates`` under a digest of its configuration, and is not measured
    again; ``directory/chosen.yaml`` and ``search.json`` come last.
    """
    method = base["method"]["name"]
    where = space(method)
    missing = [name for name in where.inherited if name not in (inherited or {})]
    if missing:
        raise UserError(
            f"search {method}: {', '.join(missing)} come from Baseline, which has to be searched first"
        )
    locked = {name: (inherited or {})[name] for name in where.inherited}
    scorer = _Scorer(base, where, locked, evaluate, directory, seed, budget or Budget())
    current: Values = {coordinate.name: coordinate.middle for coordinate in where.coordinates}
    steps: list[Step] = []
    for coordinate in where.coordinates:
        tried = [{**current, coordinate.name: value} for value in coordinate.grid()]
        step = scorer.compare(coordinate.name, tried)
        steps.append(step)
        if (index := _best(step.scores)) is not None:
            current = tried[index]
    near = (
        (current[c.name], *c.nearby(current[c.name], seed, "search", "nearby", method))
        for c in where.coordinates
    )
    names = [coordinate.name for coordinate in where.coordinates]
    step = scorer.compare(
        "local", [dict(zip(names, point, strict=True)) for point in itertools.product(*near)]
    )
    steps.append(step)
    index = _best(step.scores)
    if index is None:
        raise UserError(f"search {method}: every candidate became non-finite; see {directory / 'candidates'}")
    values, score = step.candidates[index], step.scores[index]
    assert score is not None
    tree = _with_values(base, where, {**values, **locked})
    found = Found(method, {**values, **locked}, score, tree, steps, scorer.problems)
    _write(found, directory)
    return found


class _Scorer:
    """Scores candidates, from the store where they are there already."""

    def __init__(
        self,
        base: Tree,
        where: Space,
        locked: Values,
        evaluate: Evaluate,
        directory: Path,
        seed: int,
        budget: Budget,
    ) -> None:
        self.base, self.where, self.locked = base, where, locked
        self.evaluate, self.folder = evaluate, directory / "candidates"
        self.seeds = [FIRST_SEED + seed * budget.seeds + i for i in range(budget.seeds)]
        self.budget = budget
        self.problems: dict[str, str] = {}

    def compare(self, stage: str, candidates: list[Values]) -> Step:
        """Measure what is missing of the candidates, all in one batch."""
        trees = [
            self.budget.apply(_with_values(self.base, self.where, {**v, **self.locked})) for v in candidates
        ]
        keys = [_content_key(tree, self.seeds) for tree in trees]
        records = {
            key: self._read(key) or self._fresh(key, v) for key, v in zip(keys, candidates, strict=True)
        }
        missing = [
            Trial(key, records[key]["values"], seed, {**tree, "seed": seed})
            for key, tree in dict(zip(keys, trees, strict=True)).items()
            for seed in self.seeds
            if str(seed) not in records[key]["accuracy"]
        ]
        for measured in self.evaluate(missing) if missing else ():
            self._store(records[measured.trial.key], measured)
        short = [key for key in keys if len(records[key]["accuracy"]) < len(self.seeds)]
        if short:
            raise Stopped(
                f"search {self.where.method}: {len(set(short))} candidates of stage {stage} are open"
            )
        for key in keys:
            if records[key]["reasons"]:
                self.problems[key] = "; ".join(records[key]["reasons"].values())
        return Step(stage, candidates, [records[key]["score"] for key in keys], keys)

    def _fresh(self, key: str, values: Values) -> Tree:
        return {
            "key": key,
            "method": self.where.method,
            "values": {**values, **self.locked},
            "accuracy": {},
            "reasons": {},
            "score": None,
        }

    def _read(self, key: str) -> Tree | None:
        return read_json(self.folder / f"{key}.json")

    def _store(self, record: Tree, measured: Measured) -> None:
        seed = str(measured.trial.seed)
        record["accuracy"][seed] = measured.accuracy
        if measured.accuracy is None:
            record["reasons"][seed] = measured.reason or "non-finite"
        if len(record["accuracy"]) == len(self.seeds) and not record["reasons"]:
            record["score"] = sum(record["accuracy"].values()) / len(self.seeds)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / f"{record['key']}.json", record)


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


def _content_key(tree: Tree, seeds: Sequence[int]) -> str:
    content = json.dumps([digest(tree), list(seeds), paper.hpo()["candidate_evaluation"]["probe_fraction"]])
    return hashlib.blake2b(content.encode(), digest_size=12).hexdigest()


def _uniform(*stream: int | str) -> float:
    """A number in (0, 1) that depends on the named stream alone."""
    return (derive_seed(*stream) + 0.5) / 2**63


def _write(found: Found, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    values = ", ".join(f"{name} {value:.2g}" for name, value in found.values.items())
    head = f"# Chosen by `gar search`: {values}; macro accuracy {found.score:.4f} on the development probe.\n"
    body = yaml.safe_dump(found.tree, sort_keys=False, allow_unicode=True)
    working = directory / ".chosen.yaml.partial"
    working.write_text(head + body, encoding="utf-8")
    working.replace(directory / "chosen.yaml")
    write_json(directory / "search.json", found.report())


# ---------------------------------------------------------------------- a whole comparison


def search(
    bases: Callable[[str], Tree],
    methods: Iterable[str],
    evaluate: Callable[[Path], Evaluate],
    directory: Path,
    *,
    seed: int = 0,
    budget: Budget | None = None,
) -> Iterator[Found]:
    """Search several methods in one setting and mixture, Baseline first.

    ``bases(method)`` is a method's configuration, ``evaluate(directory)`` gives what measures the trials of
    the search in that directory. Each method has its own directory below ``directory``.
    """
    wanted = list(dict.fromkeys(methods))
    for method in wanted:
        space(method)
    inherited: Mapping[str, float] = {}
    for method in ["baseline", *(name for name in wanted if name != "baseline")]:
        folder = directory / method
        found = search_method(
            bases(method), evaluate(folder), folder, inherited=inherited, seed=seed, budget=budget
        )
        if method == "baseline":
            inherited = {name: found.values[name] for name in paper.hpo()["inherited_from_baseline"]}
        yield found
