"""The hyper-parameter search against the protocol of the paper, candidate by candidate."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from gar import config as configuration
from gar.data.probe import probe_mixture, probe_task
from gar.data.task import Mixture, Split, Task
from gar.errors import UserError
from gar.methods import Range
from gar.presets import paper
from gar.runs import State, find_runs, state_of
from gar.runs.directory import write_failure
from gar.runs.files import read_json
from gar.runs.names import FAILURE, RESULT
from gar.sweeps.executors import Event, Job
from gar.sweeps.local import LocalExecutor
from gar.sweeps.search import (
    CANDIDATES,
    Budget,
    Coordinate,
    Found,
    Measure,
    Search,
    SearchError,
    Stage,
    Stopped,
    Wanted,
    search,
    search_method,
    side_by_side,
    space,
    sweeping,
)
from gar.sweeps.store import hold
from gar.sweeps.suite import Combination, PlannedRun
from gar.sweeps.sweep import read_status
from support.sweeps import StandIn, fail, finish, quiet, tiny_base, write_result

Tree = dict[str, Any]
Objective = Callable[[PlannedRun], float | None]

RANGES = {  # from the paper's text
    "learning_rate": (2e-6, 5e-3, True),
    "grad_clip": (0.5, 2.0, False),
    "weight_decay": (0.0, 0.05, False),
    "cagrad_c": (0.1, 1.0, False),
    "lambda_align": (1e-5, 3e-2, True),
    "beta_stgc": (0.25, 4.0, True),
    "lambda_load": (1e-6, 1.1e-2, True),
    "alpha_switch": (1e-6, 1.3e-2, True),
}
FREE = {
    "baseline": ["learning_rate", "grad_clip", "weight_decay"],
    "cagrad": ["learning_rate", "cagrad_c"],
    "gar": ["learning_rate", "lambda_align"],
    "stgc": ["learning_rate", "beta_stgc"],
    "loadpen": ["learning_rate", "lambda_load"],
    "switchaux": ["learning_rate", "alpha_switch"],
    "stgc_load": ["learning_rate", "beta_stgc", "lambda_load"],
}
KEYS = {
    "learning_rate": "optimizer.learning_rate",
    "grad_clip": "optimizer.clip",
    "weight_decay": "optimizer.weight_decay",
    "cagrad_c": "method.c",
    "lambda_align": "method.coefficient",
    "beta_stgc": "method.coefficient",
    "lambda_load": "method.coefficient",
    "alpha_switch": "method.coefficient",
}


def base(method: str, **mixture: Any) -> Tree:
    tree = {
        "method": {"name": method},
        "mixture": {"name": "five", **mixture},
        "optimizer": {"updates": 2000},
    }
    return configuration.build(tree).to_dict()


def value(tree: Tree, dotted: str) -> Any:
    for part in dotted.split("."):
        tree = tree[part]
    return tree


def values_of(run: PlannedRun) -> dict[str, float]:
    """The searched values in a run's configuration."""
    tree, method = run.tree(), run.tree()["method"]["name"]
    return {name: value(tree, key_of(method, name)) for name in FREE[method]}


def key_of(method: str, name: str) -> str:
    return "method.load_coefficient" if (method, name) == ("stgc_load", "lambda_load") else KEYS[name]


class Recorder:
    """Runs stages by a function, and remembers the runs that it did."""

    def __init__(self, objective: Objective, out: Path, die_after: int | None = None) -> None:
        self.objective, self.out, self.die_after = objective, out, die_after
        self.done: list[PlannedRun] = []

    def __call__(self, stage: Stage) -> None:
        for run in stage.runs():
            if state_of(self.out / run.id) in (State.FINISHED, State.FAILED):
                continue
            if self.die_after is not None and len(self.done) >= self.die_after:
                raise Stopped("killed")
            self.done.append(run)
            if (accuracy := self.objective(run)) is None:
                write_failure(self.out / run.id, "TrainingFailure", "the loss is nan")
            else:
                write_result(self.out / run.id, accuracy)


def hill(method: str, best: dict[str, float]) -> Objective:
    """Highest at ``best``, on each coordinate's own scale; seeds differ by a constant."""

    def objective(run: PlannedRun) -> float:
        values = values_of(run)
        miss = sum((_position(n, values[n]) - _position(n, v)) ** 2 for n, v in best.items())
        return 0.9 - miss + 0.001 * (run.seed % 2)

    return objective


def _position(name: str, x: float) -> float:
    low, high, log = RANGES[name]
    return math.log(x / low) / math.log(high / low) if log else (x - low) / (high - low)


def run(method: str, objective: Objective, out: Path, **options: Any) -> tuple[Found, Recorder]:
    recorder = options.pop("recorder", None) or Recorder(objective, out)
    if method != "baseline":
        options.setdefault("inherited", {"grad_clip": 1.1, "weight_decay": 0.02})
    (found,) = alone(search_method(options.pop("tree", base(method)), out, **options), recorder)
    return found, recorder


def alone(search: Search, measure: Measure) -> list[Found]:
    return [found for _, found in side_by_side([search], measure)]


# ---------------------------------------------------------------------- the protocol


def test_ranges_and_scales_are_the_papers() -> None:
    for method, names in FREE.items():
        where = space(method)
        assert [c.name for c in where.coordinates] == names
        for coordinate in where.coordinates:
            low, high, log = RANGES[coordinate.name]
            assert (coordinate.low, coordinate.high, coordinate.scale == "log") == (low, high, log)
            expected = np.geomspace(low, high, 8) if log else np.linspace(low, high, 8)
            assert coordinate.grid() == pytest.approx(expected.tolist(), rel=1e-11, abs=1e-15)
        assert where.inherited == (() if method == "baseline" else ("grad_clip", "weight_decay"))


@pytest.mark.parametrize("method", FREE)
def test_every_candidate_is_the_protocols(method: str, tmp_path: Path) -> None:
    names = FREE[method]
    best = {
        name: Coordinate(name, *RANGES[name][:2], "log" if RANGES[name][2] else "linear", 8).at(0.4)
        for name in names
    }
    found, recorder = run(method, hill(method, best), tmp_path)
    d = len(names)
    stages = [step.stage for step in found.steps]
    assert stages == [*names, "local"]
    assert [len(step.candidates) for step in found.steps] == [8] * d + [3**d]
    nominal = sum(len(step.candidates) for step in found.steps)
    assert nominal == {"baseline": 51, "stgc_load": 51}.get(method, 25)

    # One pass: each coordinate on its grid, those before it at their best, those after it in the middle.
    current = {n: c.middle for n, c in zip(names, space(method).coordinates, strict=True)}
    for step, coordinate in zip(found.steps, space(method).coordinates, strict=False):
        assert step.candidates == [{**current, coordinate.name: v} for v in coordinate.grid()]
        top = max(step.scores)  # type: ignore[type-var]
        assert step.scores.index(top) == 3  # the grid's nearest point to 0.4 of the range
        current = step.candidates[3]

    # The local grid: the best, and two values at most one step away, in the range.
    local = found.steps[-1].candidates
    axes = [list(dict.fromkeys(candidate[name] for candidate in local)) for name in names]
    assert [tuple(c.values()) for c in local] == list(itertools.product(*axes))
    for name, axis in zip(names, axes, strict=True):
        assert len(axis) == 3
        assert axis[0] == current[name]
        assert axis[1] < axis[0] < axis[2]
        assert all(abs(_position(name, v) - _position(name, axis[0])) <= 1 / 7 + 1e-9 for v in axis)
        assert RANGES[name][0] <= axis[1]
        assert axis[2] <= RANGES[name][1]

    # The choice is the best of the local grid, by the mean over two seeds.
    scores = found.steps[-1].scores
    assert found.score == max(scores)  # type: ignore[type-var]
    assert {n: found.values[n] for n in names} == local[scores.index(found.score)]

    # What was run: 500 updates, both seeds of every distinct candidate once, the rest of the base as it was.
    distinct = {key for step in found.steps for key in step.keys}
    assert len(recorder.done) == 2 * len(distinct)
    assert {run.seed for run in recorder.done} == {1000, 1001}
    expected = {key: c for step in found.steps for key, c in zip(step.keys, step.candidates, strict=True)}
    for run_ in recorder.done:
        tree = run_.tree()
        assert run_.probe
        assert (tree["optimizer"]["updates"], tree["optimizer"]["epochs"]) == (500, None)
        assert (tree["optimizer"]["warmup"], tree["seed"]) == (0.1, run_.seed)
        assert values_of(run_) == expected[run_.id.split("/")[-2]]
        if method != "baseline":
            assert (tree["optimizer"]["clip"], tree["optimizer"]["weight_decay"]) == (1.1, 0.02)
    if method == "cagrad":
        assert all(r.tree()["method"]["inner_learning_rate"] == 0.1 for r in recorder.done)


def test_a_single_task_trains_for_one_epoch(tmp_path: Path) -> None:
    tree = base("gar", name=None, tasks=["rte"])
    _, recorder = run("gar", lambda t: 0.5, tmp_path, tree=tree)
    assert {r.tree()["optimizer"]["epochs"] for r in recorder.done} == {1}


def test_nearby_values_at_a_limit_are_inside_the_range() -> None:
    for name, (low, high, log) in RANGES.items():
        coordinate = Coordinate(name, low, high, "log" if log else "linear", 8)
        for seed in range(20):
            below = coordinate.nearby(low, seed)
            above = coordinate.nearby(high, seed)
            assert low < below[0] < below[1] <= coordinate.grid()[1] * (1 + 1e-9)
            assert coordinate.grid()[-2] * (1 - 1e-9) <= above[0] < above[1] < high


def test_ties_go_to_the_first_and_the_choice_is_ready_for_training(tmp_path: Path) -> None:
    found, _ = run("gar", lambda t: 0.5, tmp_path)
    assert found.steps[0].candidates[0]["learning_rate"] == found.values["learning_rate"] == 2e-6
    directory = tmp_path / "search" / "mixture" / "gar"
    chosen = configuration.load(directory / "chosen.yaml")
    assert chosen.optimizer.updates == 2000  # the final budget, not the search's
    assert (chosen.seed, chosen.preset) == (0, None)
    assert (chosen.optimizer.learning_rate, chosen.optimizer.clip) == (2e-6, 1.1)
    assert chosen.to_dict() == found.tree
    report = json.loads((directory / "search.json").read_text())
    assert report["chosen"]["values"] == found.values
    assert [len(step["candidates"]) for step in report["steps"]] == [8, 8, 9]


def test_baseline_comes_first_and_gives_clip_and_decay(tmp_path: Path) -> None:
    order: list[str] = []

    def objective(run: PlannedRun) -> float:
        method = run.tree()["method"]["name"]
        order.append(method)
        best = {"learning_rate": 1e-3} | (
            {"grad_clip": 1.6, "weight_decay": 0.04} if method == "baseline" else {}
        )
        return hill(method, best)(run) or 0.0

    measure = Recorder(objective, tmp_path)
    wanted = [Wanted("own", "five", ["gar", "stgc"], base)]
    found = {f.method: f for _, f in search(wanted, measure, tmp_path)}
    assert list(dict.fromkeys(order)) == ["baseline", "gar", "stgc"]
    for method in ("gar", "stgc"):
        for name in ("grad_clip", "weight_decay"):
            assert found[method].values[name] == found["baseline"].values[name]
        assert found[method].tree["optimizer"]["clip"] == found["baseline"].values["grad_clip"]
        assert found[method].values["learning_rate"] != found["baseline"].values["learning_rate"]
    with pytest.raises(UserError, match="come from Baseline"):
        alone(search_method(base("gar"), tmp_path / "x"), measure)
    with pytest.raises(UserError, match="did you mean 'stgc'"):
        list(search([Wanted("own", "five", ["stgcc"], base)], measure, tmp_path / "y"))


def test_searches_side_by_side_find_what_each_finds_alone(tmp_path: Path) -> None:
    """Two settings and three methods: Baselines first, the stages of all others in rounds."""

    def objective(run: PlannedRun) -> float:
        method = run.tree()["method"]["name"]
        return hill(method, {"learning_rate": {"gar": 1e-3, "stgc": 3e-3}.get(method, 5e-4)})(run) or 0.0

    rounds: list[set[str]] = []

    def measure(stage: Stage) -> None:
        rounds.append({run.id.partition("/.candidates")[0] for run in stage.runs()})
        names.append(stage.name)
        assert len({run.id for run in stage.runs()}) == len(list(stage.runs()))
        recorder(stage)

    recorder = Recorder(objective, tmp_path / "all")
    wanted = [Wanted(setting, "five", ["stgc", "baseline", "gar"], base) for setting in ("one", "two")]
    names: list[str] = []
    together = {(c.setting, f.method): f for c, f in search(wanted, measure, tmp_path / "all")}
    assert [len(each) for each in rounds] == [2] * 4 + [4] * 3  # three and two coordinates, then the grid
    assert rounds[0] == {"one/five/baseline", "two/five/baseline"}
    assert len(set(names)) == len(rounds)
    assert max(map(len, names)) < 80
    for setting in ("one", "two"):
        for method in ("baseline", "gar", "stgc"):
            where = tmp_path / f"{setting}-{method}"
            inherited = together[setting, "baseline"].values if method != "baseline" else None
            search_alone = search_method(base(method), where, setting, "five", inherited=inherited)
            assert alone(search_alone, Recorder(objective, where)) == [together[setting, method]]


# ---------------------------------------------------------------------- determinism, resuming, failures


def test_a_search_depends_on_its_seed_alone(tmp_path: Path) -> None:
    objective = hill("gar", {"learning_rate": 1e-3, "lambda_align": 1e-3})
    first, _ = run("gar", objective, tmp_path / "a")
    again, _ = run("gar", objective, tmp_path / "b")
    other, recorder = run("gar", objective, tmp_path / "c", seed=1)
    assert first == again
    where = "search/mixture/gar"
    for name in ("search.json", "chosen.yaml"):
        assert (tmp_path / "a" / where / name).read_bytes() == (tmp_path / "b" / where / name).read_bytes()
    assert [s.candidates for s in other.steps[:2]] == [s.candidates for s in first.steps[:2]]
    assert other.steps[2].candidates != first.steps[2].candidates
    assert {r.seed for r in recorder.done} == {1002, 1003}


@pytest.mark.parametrize("after", [0, 1, 7, 20, 33, 47])
def test_a_killed_search_goes_on_without_repeating_anything(after: int, tmp_path: Path) -> None:
    objective = hill("gar", {"learning_rate": 1e-3, "lambda_align": 1e-3})
    whole, everything = run("gar", objective, tmp_path / "whole")
    killed = Recorder(objective, tmp_path / "x", die_after=after)
    with pytest.raises(Stopped):
        run("gar", objective, tmp_path / "x", recorder=killed)
    assert not (tmp_path / "x/search/mixture/gar/chosen.yaml").exists()
    found, rest = run("gar", objective, tmp_path / "x")
    assert found == whole
    assert len(killed.done) + len(rest.done) == len(everything.done)
    assert not {r.id for r in killed.done} & {r.id for r in rest.done}
    _, nothing = run("gar", objective, tmp_path / "x")
    assert nothing.done == []


def test_another_base_is_another_search(tmp_path: Path) -> None:
    run("gar", lambda t: 0.5, tmp_path)
    _, moved = run("gar", lambda t: 0.5, tmp_path, tree={**base("gar"), "device": "cuda"})
    assert moved.done == []
    _, other = run(
        "gar",
        lambda t: 0.5,
        tmp_path,
        tree=configuration.build(base("gar")).override(["experts.count=4"]).to_dict(),
    )
    assert len(other.done) > 40


def test_non_finite_candidates_are_worst_and_reported(tmp_path: Path) -> None:
    """Everything above a learning rate explodes, for one of two seeds only."""

    def objective(run: PlannedRun) -> float | None:
        rate = values_of(run)["learning_rate"]
        return None if rate > 3e-4 and run.seed == 1001 else rate  # the higher the better

    found, _ = run("gar", objective, tmp_path)
    assert found.values["learning_rate"] <= 3e-4
    assert found.problems
    assert set(found.problems.values()) == {"the loss is nan"}
    report = json.loads((tmp_path / "search/mixture/gar/search.json").read_text())
    assert set(report["non_finite"]) == set(found.problems)
    scores = {c["key"]: c["score"] for step in report["steps"] for c in step["candidates"]}
    assert {key for key, score in scores.items() if score is None} == set(found.problems)
    with pytest.raises(UserError, match="every candidate became non-finite"):
        run("gar", lambda t: None, tmp_path / "none")


# ---------------------------------------------------------------------- the probe


def make_task(n: int, name: str = "mood") -> Task:
    texts = [f"text {i}" for i in range(n)]
    split = Split(texts, np.arange(n) % 2, [f"pair {i}" for i in range(n)])
    return Task(name, ("bad", "good"), split, Split(["SECRET"], np.array([1]), ["SECRET"]))


def test_the_probe_is_a_tenth_of_the_training_split() -> None:
    task = make_task(200)
    probed = probe_task(task)
    assert (len(probed.train), len(probed.validation)) == (180, 20)
    assert sorted([*probed.train.texts, *probed.validation.texts]) == sorted(task.train.texts)
    assert "SECRET" not in [*probed.train.texts, *probed.validation.texts]
    for split in (probed.train, probed.validation):
        indices = [int(text.split()[1]) for text in split.texts]
        assert indices == sorted(indices)
        assert split.labels.tolist() == [i % 2 for i in indices]
        assert split.pairs == [f"pair {i}" for i in indices]
    assert probe_task(task).validation.texts == probed.validation.texts
    assert probe_task(make_task(200, "other")).validation.texts != probed.validation.texts
    assert len(probe_task(make_task(3)).validation) == 1
    assert [t.name for t in probe_mixture(Mixture("m", (task,))).tasks] == ["mood"]
    with pytest.raises(UserError, match="needs two or more"):
        probe_task(make_task(1))


def stage(count: int, **changes: Any) -> Stage:
    tree = configuration.build(tiny_base()).override(changes).to_dict()
    combination = Combination("own", "mood+nli", f"gar/{CANDIDATES}/k", tree, {})
    return Stage("stage", [PlannedRun(combination, seed, probe=True) for seed in range(count)])


def test_candidates_run_on_the_probe_and_keep_no_models(tmp_path: Path) -> None:
    wild = {"optimizer.learning_rate": 1e30, "optimizer.clip": 1e30, "optimizer.updates": 20}
    view = quiet()
    with hold(tmp_path), LocalExecutor(1, tmp_path / "logs") as executor:
        measure = sweeping(tmp_path, executor, lambda: False, view)
        measure(stage(2))
        for run_ in stage(2).runs():
            result = read_json(tmp_path / run_.id / RESULT)
            assert result is not None
            assert result["mixture"] == "mood+nli (development probe)"
            assert result["examples"] == {"mood": [19, 2], "nli": [10, 1]}
            assert not (tmp_path / run_.id / "model").exists()
        shutil.rmtree(tmp_path / "own")
        measure(stage(1, **wild))  # non-finite: its own fault, and no failure of the search
        measure(stage(1, **wild))  # nor is it run again
    assert view.failed == 1
    assert find_runs([tmp_path]) == []  # reports do not take the probe's scores for results
    assert read_status(tmp_path).cells == {("own", "mood+nli"): Counter(failed=1)}


def test_other_failures_end_the_search_but_keep_what_is_measured(tmp_path: Path) -> None:
    def does(job: Job) -> Event:
        assert job.probe
        assert not job.keep_model
        return fail(job, "killed by SIGKILL") if job.id.endswith("seed-1") else finish(job)

    with hold(tmp_path):
        with pytest.raises(SearchError, match=r"1 runs failed; the first: own/.*seed-1: killed by SIGKILL"):
            sweeping(tmp_path, StandIn(does), lambda: False, quiet())(stage(3))
        again = StandIn(finish)
        sweeping(tmp_path, again, lambda: False, quiet())(stage(3))
        assert [name.rsplit("-", 1)[1] for name in again.seen] == ["1"]
        stopped = StandIn(finish)
        with pytest.raises(Stopped):
            sweeping(tmp_path, stopped, lambda: len(stopped.seen) > 1, quiet())(stage(6))
    assert not list(tmp_path.rglob(FAILURE))


def test_the_command_searches_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gar.cli import search as module
    from gar.cli.app import run as command_line

    class Quick(StandIn):
        def __init__(self, jobs: int, logs: Path) -> None:
            super().__init__(finish, jobs)

        def __enter__(self) -> Quick:
            return self

        def __exit__(self, *error: object) -> None:
            started.extend(self.seen)

    started: list[str] = []
    monkeypatch.setattr(module, "LocalExecutor", Quick)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tiny_base()))
    out = tmp_path / "out"
    arguments = ["search", str(tmp_path / "own.yaml"), "--method", "gar", "--out", str(out), "--jobs", "2"]
    assert command_line(arguments) == 0
    chosen = configuration.load(out / "own" / "mood+nli" / "gar" / "chosen.yaml")
    assert chosen.method.name == "gar"
    assert chosen.optimizer.updates == 3
    assert (out / "own" / "mood+nli" / "baseline" / "chosen.yaml").is_file()
    assert len(started) == len(set(started)) > 100
    started.clear()
    assert command_line(arguments) == 0
    assert started == []  # everything is there
    few = ["--candidates", "3", "--range", "learning_rate=1e-2,1e-1"]
    assert command_line([*arguments, *few]) == 0
    assert len(started) == 2 * 2 * 3
    chosen = configuration.load(out / "own" / "mood+nli" / "gar" / "chosen.yaml")
    assert 1e-2 < chosen.optimizer.learning_rate < 1e-1


def test_the_same_number_of_candidates_for_every_method(tmp_path: Path) -> None:
    """One stage, of the same learning rates for all, spread over each method's ranges."""
    ranges = {"learning_rate": Range(1e-3, 1e-1), "lambda_load": Range(1e-2, 1e-1)}
    budget = Budget(candidates=9, ranges=ranges)
    rates = []
    for method in ("baseline", "gar", "stgc_load"):
        found, recorder = run(method, lambda run: values_of(run)["learning_rate"], tmp_path, budget=budget)
        assert [(step.stage, len(step.candidates)) for step in found.steps] == [("spread", 9)]
        assert len(recorder.done) == 2 * 9
        candidates = found.steps[0].candidates
        rates.append([candidate["learning_rate"] for candidate in candidates])
        assert found.values["learning_rate"] == max(rates[-1])
        for coordinate in space(method, ranges).coordinates:
            values = [coordinate.position(candidate[coordinate.name]) for candidate in candidates]
            assert 0 < min(values) < max(values) < 1
            # Every third of a range is tried, whichever coordinate it is.
            assert {int(3 * value) for value in values} == {0, 1, 2}
            low, high, _ = ranges.get(coordinate.name, RANGES[coordinate.name])
            assert (coordinate.low, coordinate.high) == (low, high)
    assert rates[0] == rates[1] == rates[2]
    halves = [1e-3 * 100**position for position in (0.5, 0.25, 0.75, 0.125)]
    assert rates[0][:4] == pytest.approx(halves)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rat=1,2", "--range: unknown name 'learning_rat'"),
        ("learning_rate", "expected learning_rate=LOW,HIGH"),
        ("learning_rate=1,2,3", "expected learning_rate=LOW,HIGH"),
        ("learning_rate=0,1", "the scale is log; expected 0 < LOW < HIGH"),
        ("weight_decay=0.5,0.1", "the scale is linear; expected LOW < HIGH"),
        ("weight_decay=0,inf", "the scale is linear; expected LOW < HIGH"),
        ("zloss.coefficient=0,1", "--range: unknown name 'zloss.coefficient'"),
    ],
)
def test_a_wrong_range_is_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gar.cli.app import run as command_line

    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tiny_base()))
    arguments = ["search", str(tmp_path / "own.yaml"), "--method", "gar", "--range", text]
    assert command_line([*arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_budget_is_the_protocols() -> None:
    facts = paper.hpo()["candidate_evaluation"]
    assert (Budget().updates, Budget().epochs, Budget().seeds) == (500, 1, 2)
    assert facts["probe_fraction"] == 0.1
