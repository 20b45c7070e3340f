"""The stored runs of the packaged evidence suites: what is paired, and what predicts a gain.

Stored lines (:mod:`gar.sweeps.stored`) are all that is read; :mod:`gar.report.evidence_page` writes about it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd

from gar.config import MixtureConfig
from gar.data.load import resolve
from gar.methods import COMPARED, PROPOSED, REFERENCE, label_of
from gar.metrics import METRICS, Prediction, holm, predicts
from gar.report.verdict import POINTS, Paired
from gar.sweeps.stored import HEAD, TRAJECTORY, follows, is_store, read_lines, read_points
from gar.sweeps.suite import Suite, load_suite, shipped

PREFIX = "evidence_"
#: What a comparison sets beside Baseline.
OTHERS = tuple(name for name in COMPARED if name != REFERENCE)
#: The suite of "when does alignment help", and those of the coefficient and of the denominator.
PAIRS, COEFFICIENTS, DENOMINATOR = "evidence_pairs", "evidence_coefficients", "evidence_denominator"
RATES = "evidence_rates"
#: Forms of GAR: many on few seeds, then few on other seeds and mixtures; Baseline with fewer experts beside
#: them, and each task by itself with all experts and with one.
FORMS, FEW, ALONE = ("evidence_top4", "evidence_strong"), "evidence_few", "evidence_alone"
#: What an interval says; the first two are findings.
KINDS = ("better", "worse", "not told apart", "not compared")
APART = (PAIRS, COEFFICIENTS, DENOMINATOR, RATES, *FORMS, FEW, ALONE)
#: What may tell beforehand where alignment helps, all of Baseline's runs; the first is the one asked about.
PREDICTORS = ("task_cosine", "observed_cosine", "task_conflict", "intra_expert_coherence", "nmi")

Cell = tuple[str, str]
PLACES = ("setting", "mixture", "method", "seed")


class Evidence:
    """The stored lines of the packaged suites' runs, numbers as numbers; see :func:`load`."""

    def __init__(self, lines: Sequence[Mapping[str, str]], points: Sequence[Mapping[str, str]]) -> None:
        self.suites = {name: load_suite(name) for name in shipped() if name.startswith(PREFIX)}
        planned = {run.id: run.combination for suite in self.suites.values() for run in suite.runs()}
        known = [line for line in lines if line["id"] in planned]
        # A cell is one configuration on one data: the suite's own, else the one with the most runs.
        kinds_of: dict[str, dict[tuple[str, str], list[Mapping[str, str]]]] = {}
        for line in known:
            kinds_of.setdefault(planned[line["id"]].id, {}).setdefault(
                (line["configuration"], line["data"]), []
            ).append(line)
        chosen = [
            max(kinds.values(), key=lambda own: (follows(own[0], planned[own[0]["id"]]), len(own)))
            for kinds in kinds_of.values()
        ]
        last = {line["id"]: line for own in chosen for line in own}  # a repeated run counts once, the last
        self.repeated, self.foreign = len(known) - len(last), len(lines) - len(known)
        kinds = {(planned[line["id"]].id, line["configuration"]): line for line in last.values()}
        other = {key for key, line in kinds.items() if not follows(line, planned[line["id"]])}
        self.deviating = sum(
            (planned[line["id"]].id, line["configuration"]) in other for line in last.values()
        )
        """Runs that differ from their suite in more than hyper-parameters: in length, sample, backbone."""
        self.runs = _frame([{**line, **_places(line["id"])} for line in last.values()], (*PLACES, *HEAD))
        kept = {(line["id"], line["configuration"]) for line in last.values()}
        inside = [point for point in points if (point["id"], point["configuration"]) in kept]
        self.points = _frame(inside, TRAJECTORY)
        self.stored = set(last)
        self.asked: dict[str, list[Question]] = {}
        """What :func:`questions` found, by method."""

    @cached_property
    def _cells(self) -> dict[tuple[str, str, str], pd.DataFrame]:
        groups = self.runs.groupby(["setting", "mixture", "method"]) if len(self.runs) else ()
        return {key: rows.set_index("seed").sort_index() for key, rows in groups}

    def rows(self, setting: str, mixture: str, method: str) -> pd.DataFrame:
        """The runs of a cell by seed."""
        found = self._cells.get((setting, mixture, method))
        return self.runs[:0].set_index("seed") if found is None else found

    def values(self, metric: str, *cell: str) -> dict[int, float]:
        """A metric by seed, where it is known."""
        rows = self.rows(*cell)
        found = rows[metric].dropna() if metric in rows else ()
        return {int(seed): float(value) for seed, value in dict(found).items()}

    def difference(self, metric: str, cell: Cell, a: str, b: str) -> Paired:
        """``a - b`` over the seeds that both methods have."""
        return Paired.of(self.values(metric, *cell, a), self.values(metric, *cell, b))

    def cells(self, suites: Iterable[str]) -> Iterator[Cell]:
        """Settings and mixtures of these suites that have a run, each once."""
        plans = (self.suites[name].cells() for name in suites)
        for cell in dict.fromkeys(cell[:2] for plan in plans for cell in plan):
            if any(key[:2] == cell for key in self._cells):
                yield cell

    def methods(self, cell: Cell) -> list[str]:
        """The methods with runs in a cell, in the suites' order."""
        planned = dict.fromkeys(
            m for suite in self.suites.values() for s, x, m in suite.cells() if (s, x) == cell
        )
        return [method for method in planned if (*cell, method) in self._cells]


def load(directory: Path) -> Evidence:
    """The lines of all stored files in a directory."""
    files = sorted(path for path in directory.glob("*") if is_store(path))
    lines = [line for path in files for line in read_lines(path, HEAD)]
    return Evidence(lines, [line for path in files for line in read_points(path)])


def _places(run_id: str) -> dict[str, str]:
    """The parts of a run's id."""
    *parts, seed = run_id.split("/")
    return dict(zip(PLACES, (*parts, seed.removeprefix("seed-")), strict=True))


def _frame(lines: Sequence[Mapping[str, str]], columns: Iterable[str]) -> pd.DataFrame:
    frame = pd.DataFrame(lines, columns=None if lines else [*columns, *METRICS])
    for name in frame:
        if name in METRICS or str(name).startswith(("accuracy.", "extra.")) or name in (
            "seed", "update", "updates", "learning_rate", "clip", "weight_decay", "seconds",
        ):  # fmt: skip
            frame[name] = pd.to_numeric(frame[name])
    return frame


def label(method: str) -> str:
    """The label of a registered method, else the suite's name for it."""
    return label_of(method)


def kind(found: Paired) -> str:
    """Which of :data:`KINDS` a difference is."""
    if math.isnan(found.low):
        return KINDS[3]
    return KINDS[0] if found.side > 0 else KINDS[1] if found.side < 0 else KINDS[2]


def verdict(name: str, found: Paired, other: str = "Baseline") -> str:
    """A difference in accuracy in words; never a winner that the interval does not carry.

    >>> verdict("GAR", Paired(0.009, 0.003, 0.016, (0, 1, 2, 3, 4)))
    'GAR is better than Baseline by 0.90 points (95 % interval +0.30 to +1.60, 5 seeds)'
    >>> verdict("GAR", Paired(0.001, -0.006, 0.008, (0, 1, 2, 3, 4)))
    'no difference between GAR and Baseline is shown (+0.10 points, 95 % interval −0.60 to +0.80, 5 seeds)'
    """
    if not found.seeds:
        return f"{name} and {other} have no seed in common"
    if math.isnan(found.low):
        return f"one seed says nothing of {name} and {other}"
    low, high = POINTS.bound(found.low, True), POINTS.bound(found.high, True)
    known = f"95 % interval {low} to {high}, {len(found.seeds)} seeds"
    if found.side:
        word = "better" if found.side > 0 else "worse"
        return f"{name} is {word} than {other} by {POINTS.bound(abs(found.mean))} points ({known})"
    return (
        f"no difference between {name} and {other} is shown ({POINTS.text(found.mean, True)} points, {known})"
    )


# ---------------------------------------------------------------------- when does alignment help


@dataclass(frozen=True)
class Question:
    """Whether a metric of Baseline at an update (None: the end) goes with a method's gain over mixtures."""

    predictor: str
    update: int | None
    method: str
    answer: Prediction

    @property
    def when(self) -> str:
        return "at the end" if self.update is None else f"after {self.update} updates"


@dataclass(frozen=True)
class Gains:
    """The mean paired gain of a method over Baseline in every mixture, and Baseline's metrics there."""

    method: str
    mixtures: list[str]
    tasks: list[list[str]]
    gain: list[float]
    seeds: list[int]
    predictors: dict[tuple[str, int | None], list[float]]


def gains(evidence: Evidence, method: str) -> Gains:
    """Of the mixtures of the suite of pairs in which the method and Baseline have common seeds."""
    suite = evidence.suites[PAIRS]
    found = Gains(method, [], [], [], [], {})
    updates: list[int | None] = [*sorted(_updates(evidence)), None]
    wanted = [(name, update) for name in PREDICTORS for update in updates]
    columns: dict[tuple[str, int | None], list[float]] = {key: [] for key in wanted}
    by_id = dict(iter(evidence.points.groupby("id"))) if len(evidence.points) else {}
    for cell in evidence.cells([PAIRS]):
        difference = evidence.difference("accuracy", cell, method, REFERENCE)
        if not difference.seeds:
            continue
        found.mixtures.append(cell[1])
        found.tasks.append(_tasks(suite, cell))
        found.gain.append(difference.mean)
        found.seeds.append(len(difference.seeds))
        rows = evidence.rows(*cell, REFERENCE)
        points = pd.concat([by_id[i] for i in rows["id"] if i in by_id] or [evidence.points])
        for name, update in wanted:
            values = rows[name] if update is None else points.loc[points["update"] == update, name]
            columns[name, update].append(fmean(values.dropna()) if values.notna().any() else math.nan)
    known = {key: values for key, values in columns.items() if values and np.isfinite(values).all()}
    found.predictors.update(known)
    return found


def questions(evidence: Evidence, methods: Iterable[str] = OTHERS) -> list[Question]:
    """Every predictor at every time against every method's gain; the question asked beforehand is the first.

    Asked beforehand is whether ``task_cosine`` of Baseline's finished runs goes with GAR's gain. All others
    explore, and their p-values are to be adjusted for their number.
    """
    asked = []
    for method in methods:
        if method in evidence.asked:
            asked += evidence.asked[method]
            continue
        mine = evidence.asked[method] = []
        found = gains(evidence, method)
        order = sorted(found.predictors, key=lambda key: (PREDICTORS.index(key[0]), -(key[1] or math.inf)))
        for name, update in order:
            answer = predicts(found.predictors[name, update], found.gain, found.tasks)
            mine.append(Question(name, update, method, answer))
        asked += mine
    return asked


def asked_beforehand(evidence: Evidence) -> Question | None:
    """The one question that was asked before looking; None where it was not measured."""
    for question in questions(evidence, [PROPOSED]):
        if (question.predictor, question.update) == (PREDICTORS[0], None):
            return None if math.isnan(question.answer.rho) else question
    return None


def predictor(evidence: Evidence) -> Question | None:
    """What under Baseline predicts GAR's gain, as far as the evidence carries it: for `compare`, `diagnose`.

    The question asked beforehand if its interval, over tasks, lies on one side of 0; else the strongest
    explored one whose adjusted p-value is below 0.05 as well; else None: then nothing is to be said.
    """
    asked = [question for question in questions(evidence, [PROPOSED]) if not math.isnan(question.answer.rho)]
    beforehand = asked_beforehand(evidence)
    if beforehand is not None and beforehand.answer.found:
        return beforehand
    adjusted = holm([question.answer.p for question in asked])
    carried = [q for q, p in zip(asked, adjusted, strict=True) if q.answer.found and p < 0.05]
    return max(carried, key=lambda question: abs(question.answer.rho), default=None)


def _tasks(suite: Suite, cell: Cell) -> list[str]:
    method = suite.methods(*cell)[0]
    section = suite.combination(*cell, method).tree["mixture"]
    return [entry.name for entry in resolve(MixtureConfig.model_validate(section))[1]]


def _updates(evidence: Evidence) -> set[int]:
    settings = tuple(f"{setting}/" for setting in evidence.suites[PAIRS].file.settings)
    inside = evidence.points["id"].astype(str).str.startswith(settings)
    return {int(update) for update in evidence.points.loc[inside, "update"]}
