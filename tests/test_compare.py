"""gar compare: verdicts and recommendation on numbers, the selection part, and whole comparisons."""

from __future__ import annotations

import csv
import importlib
import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from gar import config as configuration
from gar.cli.app import run as command_line
from gar.comparison import Comparison, Kind, Stopped, compare, judge, recommend
from gar.comparison.alone import TasksAlone
from gar.comparison.arms import make_arms
from gar.comparison.compare import point
from gar.comparison.estimate import Estimate, Prepared, makespan
from gar.comparison.outcome import failure_lines, recommendation_lines
from gar.data import load_mixture, selection_mixture
from gar.errors import UserError
from gar.evaluation import load_model
from gar.metrics import METRICS
from gar.report.comparison import Line
from gar.report.verdict import LEAST_SEEDS, Paired
from gar.runs.files import read_json
from gar.runs.names import MODEL, RESULT
from gar.sweeps._worker import run_job
from gar.sweeps.executors import Event, Job
from gar.sweeps.progress import View
from gar.sweeps.search import Budget
from gar.training import Shared, train_from_config
from support.pages import read
from support.sweeps import StandIn, fail, finish, tiny_base, tiny_world
from support.tiny_runs import make_world, tree

MODULE = importlib.import_module("gar.comparison.compare")  # the room's ``compare`` is the function
LABELS = {"baseline": "Baseline", "gar": "GAR", "switchaux": "SwitchAux"}
ACCURACIES = st.lists(st.integers(0, 40).map(lambda n: n / 40), min_size=2, max_size=7)

# ---------------------------------------------------------------------- verdicts


def paired(a: list[float], b: list[float]) -> Paired:
    """Mean and interval by scipy, the other way round."""
    found = stats.ttest_rel(a, b).confidence_interval(0.95)
    mean = sum(x - y for x, y in zip(a, b, strict=True)) / len(a)
    return Paired(mean, float(found.low), float(found.high), tuple(range(len(a))))


@given(ACCURACIES, st.randoms(use_true_random=False))
def test_a_verdict_claims_what_its_interval_shows(base: list[float], numbers: Any) -> None:
    other = [b + numbers.choice([-0.05, -0.02, 0.0, 0.01, 0.03, 0.04]) for b in base]
    differences = [x - y for x, y in zip(other, base, strict=True)]
    if max(differences) - min(differences) < 1e-9:
        return  # below
    found = paired(other, base)
    verdict = judge("gar", "GAR", found)
    if len(base) < LEAST_SEEDS:
        assert verdict.kind is Kind.UNTOLD
        assert "too few to judge by" in verdict.text
        return
    low, high = 100 * found.low, 100 * found.high
    expected = Kind.BETTER if low > 1e-7 else Kind.WORSE if high < -1e-7 else Kind.OPEN
    assert verdict.kind == expected
    told = [float(x.replace("−", "-")) for x in re.findall(r"[+−]?\d+\.\d+(?:e-\d+)?", verdict.text)]
    if expected is Kind.OPEN:  # excluded is what lies outside of the interval, on either side
        wanted = [100 * found.mean, low, high, high, -low]
    else:
        wanted = [abs(100 * found.mean), *sorted((abs(low), abs(high)))]
    assert told == pytest.approx(wanted, abs=0.00501)


def test_the_sentences() -> None:
    better = judge("gar", "GAR", Paired(0.0093, 0.0032, 0.0163, (0, 1, 2, 3, 4)))
    assert (
        better.text == "GAR is better than Baseline by 0.93 points (95 % interval 0.32 to 1.63, five seeds)."
    )
    worse = judge("gar", "GAR", Paired(-0.0093, -0.0163, -0.0032, (0, 1, 2)))
    assert (
        worse.text == "GAR is worse than Baseline by 0.93 points (95 % interval 0.32 to 1.63, three seeds)."
    )
    undecided = judge("gar", "GAR", Paired(0.002, -0.004, 0.008, (0, 1, 2)))
    assert undecided.text == (
        "No difference between GAR and Baseline was found (+0.20 points, 95 % interval −0.40 to +0.80, three "
        "seeds); gains of more than 0.80 points and losses of more than 0.40 can be excluded at that level."
    )


def test_nothing_is_claimed_without_an_interval() -> None:
    nan = math.nan
    assert judge("gar", "GAR", None).kind is Kind.UNTOLD
    one = judge("gar", "GAR", Paired(0.3, nan, nan, (0,)))
    assert one.kind is Kind.UNTOLD
    assert "cannot compare" in one.text
    assert "30" not in one.text
    same = judge("gar", "GAR", Paired(0.0, 0.0, 0.0, (0, 1)))
    assert (same.kind, same.text) == (
        Kind.SAME, "GAR and Baseline have the same accuracy in each of two seeds."
    )  # fmt: skip
    # Two seeds with the same difference, as happens on few examples: an interval of width 0 is no evidence.
    shifted = [0.72 - 0.70, 0.74 - 0.72]
    equal = judge("gar", "GAR", Paired(0.02, min(shifted), max(shifted), (0, 1)))
    assert equal.kind is Kind.UNTOLD
    assert "without any spread" in equal.text


# ---------------------------------------------------------------------- the recommendation


def by_seed(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def test_the_best_of_those_that_are_better_is_recommended() -> None:
    accuracies = {
        "baseline": by_seed(0.50, 0.52, 0.48),
        "gar": by_seed(0.52, 0.541, 0.499),  # +2, its spread is small
        "stgc": by_seed(0.90, 0.52, 0.30),  # the highest mean, and an interval that holds 0
        "switchaux": by_seed(0.53, 0.551, 0.509),  # +3
    }
    labels = {name: name for name in accuracies}
    found = recommend(accuracies, range(3), labels, "baseline")
    assert found is not None
    assert (found.method, found.seed, found.accuracy) == ("switchaux", 1, 0.551)
    assert "better than baseline there by 3.00 points" in found.reason
    del accuracies["switchaux"][2]  # a run that failed
    found = recommend(accuracies, range(3), labels)
    assert found is not None
    assert found.method == "gar"


def test_baseline_is_recommended_where_nothing_is_better() -> None:
    base = by_seed(0.5, 0.6, 0.6)
    for other in (by_seed(0.6, 0.55, 0.65), by_seed(0.6, 0.7, 0.7), by_seed(0.4, 0.3, 0.3)):
        found = recommend({"baseline": base, "gar": other}, range(3), LABELS)
        assert found is not None
        assert (found.method, found.seed) == ("baseline", 1)  # the first of its best
        assert "no other method" in found.reason
    alone = recommend({"baseline": by_seed(0.5), "gar": by_seed(0.9)}, range(1), LABELS)
    assert alone is not None
    assert (alone.method, alone.reason) == (
        "baseline",
        "fewer than three seeds cannot show that another method is better",
    )
    assert recommend({"gar": by_seed(0.5, 0.6)}, range(2), LABELS) is None
    nothing = recommend({"baseline": base}, range(3), LABELS)
    assert nothing is not None
    assert nothing.reason == "there is no other method to choose"
    short = recommend({"baseline": base, "gar": by_seed(0.9, 0.9)}, range(3), LABELS)
    assert short is not None
    assert "no other method has all its runs; not judged, since runs are missing" in short.reason


@given(st.lists(st.lists(st.integers(0, 60), min_size=3, max_size=3), min_size=2, max_size=4))
def test_the_rule_against_a_slow_twin(counts: list[list[int]]) -> None:
    names = ["baseline", "gar", "stgc", "loadpen"][: len(counts)]
    accuracies = {name: by_seed(*(n / 60 for n in own)) for name, own in zip(names, counts, strict=True)}
    best, mean = "baseline", -1.0
    level = 1 - 0.05 / (len(names) - 1)
    for name in names[1:]:
        a, b = list(accuracies[name].values()), list(accuracies["baseline"].values())
        spread = {x - y for x, y in zip(counts[names.index(name)], counts[0], strict=True)}
        if len(spread) > 1 and stats.ttest_rel(a, b).confidence_interval(level).low > 0 and np.mean(a) > mean:
            best, mean = name, float(np.mean(a))
    found = recommend(accuracies, range(3), {name: name for name in names})
    assert found is not None
    assert found.method == best
    assert found.seed == int(np.argmax(list(accuracies[best].values())))


# ---------------------------------------------------------------------- the selection part


def test_off_it_is_not_there() -> None:
    tree_ = configuration.Config().to_dict()
    assert "selection" not in tree_["evaluation"]  # as before the key: digests and files stay
    on = configuration.build(tree_).override(["evaluation.selection=0.25"])
    assert configuration.build(on.to_dict()).evaluation.selection == 0.25
    assert configuration.digest(on.to_dict()) != configuration.digest(tree_)
    with pytest.raises(UserError, match=r"evaluation\.selection is 1"):
        configuration.build(tree_).override(["evaluation.selection=1"])


def test_a_run_trains_on_the_rest_and_is_measured_on_the_part(tmp_path: Path) -> None:
    config = configuration.build(tiny_base()).override(["evaluation.selection=0.3", "optimizer.updates=8"])
    whole = load_mixture(config.mixture)
    rest, held = selection_mixture(whole, 0.3)
    assert held is not None
    for before, left, kept in zip(whole.tasks, rest.tasks, held.tasks, strict=True):
        texts = [[*zip(s.texts, s.pairs or s.texts, s.labels, strict=True)] for s in (
            before.train, left.train, kept.validation
        )]  # fmt: skip
        assert sorted(texts[0]) == sorted(texts[1] + texts[2])
        assert len(kept.validation) == round(0.3 * len(before.train))
        assert left.validation is before.validation
    result = train_from_config(config, tmp_path / "alone")
    assert result["examples"] == {t.name: [len(t.train), len(t.validation)] for t in rest.tasks}
    model = load_model(tmp_path / "alone")
    shares = {}
    for task in held.tasks:
        columns = [task.validation.texts, *([task.validation.pairs] if task.validation.pairs else [])]
        right = [
            prediction.label == task.labels[label]
            for prediction, label in zip(
                model.predict(task.name, *columns), task.validation.labels, strict=True
            )
        ]
        shares[task.name] = sum(right) / len(right)
    assert result["accuracy"]["selection"]["tasks"] == pytest.approx(shares)
    assert result["accuracy"]["selection"]["macro"] == pytest.approx(np.mean(list(shares.values())))
    shared = Shared()
    for name in ("first", "second"):  # in a worker, with the bits of the run alone
        again = train_from_config(config, tmp_path / name, shared=shared)
        assert again["accuracy"] == result["accuracy"]
    probed = train_from_config(config, tmp_path / "probe", shared=shared, probe=True)
    assert "selection" not in probed["accuracy"]
    assert probed["examples"]["mood"] == [13, 2]  # 21, of which 6 are held out, of the rest a tenth
    assert train_from_config(config, tmp_path / "probe-alone", probe=True)["accuracy"] == probed["accuracy"]


# ---------------------------------------------------------------------- whole comparisons


class Inline(StandIn):
    """Runs jobs in this process; ``does`` may end one otherwise."""

    started: list[str]

    def __init__(self, jobs: int, logs: Path, does: Callable[[Job], Event | None] = lambda job: None) -> None:
        self.shared, self.instead = Shared(), does
        super().__init__(self._run, 1)

    def _run(self, job: Job) -> Event:
        if (event := self.instead(job)) is not None:
            return event
        outcome = run_job(job, shared=self.shared)
        return Event(job, outcome.pop("kind"), outcome)

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *error: object) -> None:
        Inline.started += self.seen


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Inline.started = []
    monkeypatch.setattr(MODULE, "LocalExecutor", Inline)
    return Inline.started


def tiny(world: Path | None = None, updates: int = 3, **changes: Any) -> configuration.Config:
    if world is None:
        return configuration.build({**tiny_base(updates), **changes})
    base = tree(world, optimizer={"updates": updates, "learning_rate": 1e-3})
    del base["mixture"]["name"]
    return configuration.build({**base, **changes})


def quietly(what: Any, *arguments: Any, **options: Any) -> tuple[Comparison, str]:
    """The comparison, and what was told on the way."""
    told = io.StringIO()
    console = Console(file=told, width=200)
    return compare(what, *arguments, console=console, **options), told.getvalue()


def results_of(out: Path) -> dict[str, list[dict[str, Any]]]:
    """All result.json by method, in order of seeds, read without the package."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(out.glob(f"comparison/*/*/seed-*/{RESULT}")):
        found.setdefault(path.parts[-3], []).append(json.loads(path.read_text()))
    return found


def test_a_comparison_from_its_files(tmp_path: Path, inline: list[str]) -> None:
    out = tmp_path / "out"
    comparison, told = quietly(tiny(updates=12), ["gar", "switchaux"], 3, out)
    assert comparison.exit_code == 0
    assert comparison.arms.methods == ["baseline", "gar", "switchaux"]
    assert len(inline) == 9
    assert "9 runs" in told
    assert "estimate: about" in told
    assert "left" in told
    runs = results_of(out)

    with (out / "compare.csv").open(newline="") as file:
        rows = {(row["metric"], row["method"]): row for row in csv.DictReader(file)}
    routing = {
        "load_variance", "utilization", "effective_experts", "gradient_mass_purity", "purity_above_floor",
        "nmi", "intra_expert_coherence",
    }  # fmt: skip
    assert {metric for metric, _ in rows} == {"accuracy", "accuracy.mood", "accuracy.nli", *routing}
    for (metric, method), row in rows.items():

        def value(result: Mapping[str, Any], metric: str = metric) -> float:
            if metric == "accuracy":
                return float(result["accuracy"]["macro"])
            if metric.startswith("accuracy."):
                return float(result["accuracy"]["tasks"][metric.partition(".")[2]])
            return float(result["routing"][metric])

        mine, base = ([value(result) for result in runs[name]] for name in (method, "baseline"))
        assert float(row["mean"]) == pytest.approx(np.mean(mine), abs=1e-12)
        if method == "baseline":
            assert row["difference"] == ""
            continue
        assert row["seeds"] == "0 1 2"
        assert float(row["difference"]) == pytest.approx(np.mean(np.subtract(mine, base)), abs=1e-12)
        if np.ptp(np.subtract(mine, base)) > 1e-12:
            interval = stats.ttest_rel(mine, base).confidence_interval(0.95)
            assert float(row["low"]) == pytest.approx(interval.low, abs=1e-12)
            assert float(row["high"]) == pytest.approx(interval.high, abs=1e-12)

    whole = load_mixture(tiny().mixture)
    for task in whole.tasks:
        most = np.bincount(task.validation.labels).max() / len(task.validation)
        assert float(rows[f"accuracy.{task.name}", "gar"]["majority"]) == pytest.approx(most)

    page_text = (out / "compare.html").read_text()
    page = read(page_text)
    assert page_text.index('id="experts"') < page_text.index('id="compare"') < page_text.index("Verdict</h3>")
    assert page_text.index("Verdict</h3>") < page_text.index("Recommended model</h3>")
    assert page_text.count("<svg") >= 2
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert page.tables["compare"][0] == [
        "", "majority class", "Baseline", "GAR", "GAR − Baseline", "SwitchAux", "SwitchAux − Baseline"
    ]  # fmt: skip
    assert len(page.tables["compare"]) == 1 + 3 + 7
    assert "seed 0, a row a method" in page_text
    markdown = (out / "compare.md").read_text()
    for verdict in comparison.verdicts:
        assert verdict.text in page_text
        assert verdict.text in markdown.replace("\\", "")
    for drawing in re.findall(r"\((figures/[^)]+)\)", markdown):
        assert (out / drawing).is_file()

    stored = json.loads((out / "compare.json").read_text())
    assert stored["seeds"] == [0, 1, 2]
    assert [v["text"] for v in stored["verdicts"]] == [v.text for v in comparison.verdicts]
    recommended = comparison.recommended
    assert recommended is not None
    selection = {m: [r["accuracy"]["selection"]["macro"] for r in found] for m, found in runs.items()}
    assert {m: list(found.values()) for m, found in comparison.selection.items()} == selection
    assert recommended.choice.accuracy == max(selection[recommended.choice.method])
    assert (out / stored["recommended"]["run"]) == recommended.run
    assert (out / "recommended").resolve() == recommended.run.resolve()
    assert not os.readlink(out / "recommended").startswith("/")
    command = recommended.command.split()
    assert command[:2] == ["gar", "predict"]
    assert command_line(["predict", str(out / "recommended"), "w1 w2", "--task", "mood"]) == 0
    assert any(recommended.command in line for line in recommendation_lines(comparison))


def test_it_goes_on_and_names_what_differs(
    tmp_path: Path, inline: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, world = tmp_path / "out", make_world(tmp_path / "world")
    first, _ = quietly(tiny(world), ["gar"], 2, out)
    assert len(inline) == 4
    inline.clear()
    again, told = quietly(tiny(world), ["gar"], 2, out)
    assert inline == []
    assert "Nothing is left" in told
    assert again.lines == first.lines
    assert again.verdicts == first.verdicts
    with pytest.raises(
        UserError, match=r"optimizer\.updates: 3, found 4; expected the same, or another --out"
    ):
        quietly(tiny(world, 4), ["gar"], 2, out)
    with pytest.raises(UserError, match=r"method\.coefficient: 0\.001, found 0\.5"):
        quietly(tiny(world, method={"name": "gar", "coefficient": 0.5}), ["gar"], 2, out)
    with pytest.raises(UserError, match=r"made without --search, found with --search of 5 updates"):
        quietly(tiny(world), ["gar"], 2, out, search=Budget(updates=5))
    more, told = quietly(tiny(world), ["switchaux", "gar"], 3, out)
    assert (
        "methods were baseline, gar and are baseline, switchaux, gar; seeds were 0, 1 and are 0, 1, 2" in told
    )
    assert len(inline) == 5
    assert len(more.arms) == 9
    inline.clear()
    (world / "mood-train.csv").write_text((world / "mood-train.csv").read_text() + "w1 w2,good\n")
    with pytest.raises(UserError, match=r"other data \(the examples of task mood"):
        quietly(tiny(world), ["gar"], 2, out)
    assert inline == []


def test_an_interrupted_one_keeps_what_is_finished(
    tmp_path: Path, inline: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient:
        def __enter__(self) -> Callable[[], bool]:
            return lambda: len(list(tmp_path.rglob(RESULT))) >= 2

        def __exit__(self, *error: object) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(MODULE, "StopSignals", Impatient)
        with pytest.raises(Stopped, match="start again with the same arguments"):
            quietly(tiny(), ["gar"], 3, tmp_path)
    assert not (tmp_path / "compare.html").exists()
    done = set(tmp_path.rglob(RESULT))
    assert {path.parent.name for path in done} == {"seed-0"}  # whole pairs first
    inline.clear()
    quietly(tiny(), ["gar"], 3, tmp_path)
    assert len(inline) == 6 - len(done)


def test_the_validation_split_has_no_part_in_the_choice(tmp_path: Path) -> None:
    chosen, means = [], []
    for name in ("as-it-is", "permuted"):
        world = make_world(tmp_path / name)
        if name == "permuted":
            lines = (world / "mood-dev.csv").read_text().splitlines()
            texts = [line.rpartition(",")[0] for line in lines[1:]]
            labels = [line.rpartition(",")[2] for line in lines[1:]]
            moved = [f"{text},{label}" for text, label in zip(texts, labels[1:] + labels[:1], strict=True)]
            assert moved != lines[1:]
            (world / "mood-dev.csv").write_text("\n".join([lines[0], *moved]) + "\n")
        config = configuration.build(tree(world, optimizer={"updates": 10, "learning_rate": 1e-2}))
        comparison, _ = quietly(config, ["gar"], 2, tmp_path / f"{name}-out")
        assert comparison.recommended is not None
        chosen.append((comparison.recommended.choice, comparison.selection))
        means.append(comparison.lines[0].means)
    assert means[0] != means[1]
    assert chosen[0] == chosen[1]


def test_failed_runs_are_named_and_the_rest_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: list[str]
) -> None:
    def refuse(job: Job) -> Event | None:
        bad = ("/gar/" in job.id and not job.id.endswith("seed-1")) or "/switchaux/seed-2" in job.id
        return fail(job, "no [luck] at all") if bad else None

    monkeypatch.setattr(MODULE, "LocalExecutor", lambda jobs, logs: Inline(jobs, logs, refuse))
    comparison, _ = quietly(tiny(updates=6), None, 3, tmp_path)
    assert comparison.exit_code == 1
    assert len(comparison.failures) == 3
    gar, switch = comparison.verdicts
    assert gar.kind is Kind.UNTOLD
    assert "one seed in common" in gar.text
    assert switch.difference is not None
    assert switch.difference.seeds == (0, 1)
    assert comparison.recommended is not None
    assert comparison.recommended.choice.method == "baseline"
    text = (tmp_path / "compare.html").read_text()
    assert "GAR: 2 of 3 runs failed; seed 0: Broken: no [luck] at all" in text
    assert "may flatter the method" in text
    assert "seed 1, a row a method" in text  # the first that all have
    inline.clear()
    assert quietly(tiny(updates=6), None, 3, tmp_path)[0].exit_code == 1  # failed ones stay
    assert inline == []
    monkeypatch.setattr(MODULE, "LocalExecutor", Inline)
    assert quietly(tiny(updates=6), None, 3, tmp_path, retry_failed=True)[0].exit_code == 0
    assert len(inline) == 3


def test_without_any_result_there_is_a_page_and_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "LocalExecutor", lambda jobs, logs: Inline(jobs, logs, fail))
    comparison, _ = quietly(tiny(), ["gar"], 2, tmp_path)
    assert comparison.exit_code == 1
    assert comparison.lines == []
    assert comparison.recommended is None
    assert [v.kind for v in comparison.verdicts] == [Kind.UNTOLD]
    assert "No model is recommended" in recommendation_lines(comparison)[0]
    read((tmp_path / "compare.html").read_text())
    assert json.loads((tmp_path / "compare.json").read_text())["recommended"] is None


def test_one_seed_compares_nothing(tmp_path: Path) -> None:
    comparison, told = quietly(tiny(), ["gar"], [4], tmp_path)
    assert "One seed cannot compare methods" in told
    (verdict,) = comparison.verdicts
    assert verdict.kind is Kind.UNTOLD
    assert comparison.recommended is not None
    assert comparison.recommended.choice.method == "baseline"
    page = read((tmp_path / "compare.html").read_text())
    assert {row[4] for row in page.tables["compare"][1:]} == {"–"}


def test_each_task_by_itself(tmp_path: Path, inline: list[str]) -> None:
    """Against result.json of its runs, read without the package; one epoch of the mixture is one for each."""
    config = tiny(optimizer={"epochs": 4, "learning_rate": 0.05})
    comparison, told = quietly(config, ["gar"], 3, tmp_path, alone=True)
    assert len(inline) == 6 + 2 * 2 * 3
    assert "12 runs of a task by itself" in told
    count, kinds = config.experts.count, dict[str, str]()
    assert comparison.beside is not None
    with (tmp_path / "alone.csv").open(newline="") as file:
        rows = {(row["metric"], row["method"]): row for row in csv.DictReader(file)}
    for task in ("mood", "nli"):
        found: dict[str, list[float]] = {}
        for setting, experts in (("all_experts", count), ("one_expert", 1)):
            for seed in range(3):
                run = tmp_path / "alone" / setting / task / "baseline" / f"seed-{seed}"
                own = yaml.safe_load((run / "config.yaml").read_text())
                assert own["experts"]["count"] == experts
                assert own["optimizer"]["updates"] == len((run / "history.jsonl").read_text().splitlines())
                result = json.loads((run / RESULT).read_text())
                assert result["accuracy"]["tasks"].keys() == {task}
                found.setdefault(setting, []).append(result["accuracy"]["tasks"][task])
        row = rows[f"accuracy.{task}", "one_expert"]
        gains = np.subtract(found["one_expert"], found["all_experts"])
        assert float(row["mean"]) == pytest.approx(np.mean(found["one_expert"]))
        assert float(row["difference"]) == pytest.approx(gains.mean())
        interval = stats.ttest_1samp(gains, 0).confidence_interval(0.95)
        varied = np.ptp(gains) > 1e-12
        if varied:
            assert float(row["low"]) == pytest.approx(interval.low)
        side = int(interval.low > 0) - int(interval.high < 0) if varied else 0
        kinds[task] = {1: "better", -1: "worse", 0: "not told apart"}[side]
    said = f"By itself, with one expert in the place of {count}: "
    for what in ("better", "worse", "not told apart"):
        if tasks := [task for task, kind in kinds.items() if kind == what]:
            said += f"{'' if said.endswith(': ') else '; '}{what} on {' and '.join(tasks)}"
    assert comparison.beside.said[0] == f"{said}."
    for name in ("compare.html", "compare.md"):
        assert f"{said}." in (tmp_path / name).read_text()
    assert json.loads((tmp_path / "compare.json").read_text())["alone"]["text"] == f"{said}."
    (mood,) = (tmp_path / "comparison").glob("*/baseline/seed-0/config.yaml")
    updates = yaml.safe_load(mood.read_text())["optimizer"]
    assert updates["epochs"] == 4
    of_mixture = len((mood.parent / "history.jsonl").read_text().splitlines())
    assert own["optimizer"]["updates"] == of_mixture

    inline.clear()
    again, told = quietly(config, ["gar"], 3, tmp_path, alone=True)
    assert inline == []
    assert "Nothing is left" in told
    assert again.beside == comparison.beside
    without, _ = quietly(config, ["gar"], 3, tmp_path)
    assert without.beside is None
    assert json.loads((tmp_path / "compare.json").read_text())["alone"] is None


def test_what_one_expert_does_is_said_of_every_task() -> None:
    lines = [
        Line(f"accuracy.{n}", n, METRICS["accuracy"], 0.5, {}, {"one_expert": found} if found else {})
        for n, found in {
            "a": paired([0.6, 0.7, 0.8], [0.5, 0.61, 0.7]),
            "b": paired([0.5, 0.61, 0.7], [0.6, 0.7, 0.8]),
            "c": paired([0.6, 0.5, 0.7], [0.5, 0.7, 0.6]),
            "d": paired([0.6, 0.7], [0.5, 0.61]),  # two seeds
            "e": None,  # no run has finished
        }.items()
    ]
    said = TasksAlone({}, (0, 1, 2), 8).sentence(lines)
    assert said == (
        "By itself, with one expert in the place of 8: better on a; worse on b; not told apart on c, d and e."
    )


def test_tasks_by_themselves_run_where_their_time_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update of Baseline that fails when it is timed is left to its runs."""

    def timed(model: Any, source: Any, config: configuration.Config) -> float | None:
        return None if config.method.name == "baseline" else 0.01

    monkeypatch.setattr("gar.comparison.estimate._update_seconds", timed)
    comparison, told = quietly(tiny(), ["gar"], 1, tmp_path, alone=True)
    assert "estimate: unknown" in told
    assert comparison.exit_code == 0
    assert comparison.beside is not None
    assert all(set(line.means) == {"all_experts", "one_expert"} for line in comparison.beside.lines)


def test_a_failed_task_by_itself_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: Job) -> Event | None:
        return fail(job, "no luck") if "one_expert/nli" in job.id else None

    monkeypatch.setattr(MODULE, "LocalExecutor", lambda jobs, logs: Inline(jobs, logs, refuse))
    comparison, _ = quietly(tiny(), ["gar"], 3, tmp_path, alone=True)
    assert comparison.exit_code == 1
    (line,) = failure_lines(comparison)
    assert line == "3 runs of a task by itself failed; alone/one_expert/nli/baseline/seed-0: Broken: no luck"
    assert comparison.beside is not None
    mood, nli = comparison.beside.lines
    assert mood.differences["one_expert"].seeds == (0, 1, 2)
    assert "one_expert" not in nli.means
    assert not nli.differences


def test_the_search_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: list[str]) -> None:
    def quick(job: Job) -> Event | None:
        if not job.probe:
            return None
        rate = job.config["optimizer"]["learning_rate"]
        event = finish(job)
        stored = read_json(job.out / RESULT)
        assert stored is not None
        assert job.config["evaluation"]["selection"] == 0.1
        assert job.config["optimizer"]["updates"] == 2
        return Event(job, "finished", {**event.facts, "accuracy": rate})

    monkeypatch.setattr(MODULE, "LocalExecutor", lambda jobs, logs: Inline(jobs, logs, quick))
    comparison, told = quietly(tiny(), ["gar"], 2, tmp_path, search=Budget(updates=2), alone=True)
    assert "short runs of the search" in told
    assert "chosen for baseline" in told
    trees = comparison.arms.trees
    assert trees["gar"]["optimizer"]["learning_rate"] == 2e-6  # all scores are equal: the first of the grid
    assert trees["gar"]["optimizer"]["updates"] == 3
    assert comparison.exit_code == 0
    stored = configuration.load(tmp_path / "comparison/mood+nli/gar/seed-0/config.yaml")
    assert stored.optimizer.learning_rate == 2e-6
    assert stored.method.to_config()["coefficient"] == 1e-5
    alone = configuration.load(tmp_path / "alone/one_expert/nli/baseline/seed-1/config.yaml")
    # Baseline's chosen values, for each task.
    assert alone.optimizer == configuration.build(trees["baseline"]).optimizer
    inline.clear()
    quietly(tiny(), ["gar"], 2, tmp_path, search=Budget(updates=2), alone=True)
    assert inline == []


# ---------------------------------------------------------------------- the command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tiny_base()))
    own, out = str(tmp_path / "own.yaml"), str(tmp_path / "out")
    arguments = ["compare", own, "--methods", "Baseline, gar,switchaux", "--seeds", "0,3", "--out", out]
    assert command_line(arguments) == 0
    printed = capsys.readouterr().out
    assert "Baseline" in printed
    assert re.search(r"mood +\d+\.\d\d +\d+\.\d\d", printed)
    assert "[95 % interval]" in printed
    assert f"Use it: gar predict {out}/recommended" in printed
    assert f"Page: {out}/compare.html" in printed
    table = printed.split("- Intervals")[0]
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--methods", "baselin"], "did you mean 'baseline'"),
        (["--seeds", "0"], "expected a count of 1 or more"),
        (["--seeds", "1,1"], "distinct seeds"),
        (["--seeds", "many"], "expected a count, or numbers with commas"),
        (["seed=3"], "a comparison has its own seeds"),
        (["optimiser.updates=3"], "did you mean 'optimizer'"),
        (["experts.site=lora_head", "--methods", "stgc", "experts.site=full_ffn"], "stgc"),
        (["--search-updates", "5"], "expected --search beside it"),
        (["--alone", "experts.count=1", "experts.top_k=1"], "expected experts.count of 2 or more"),
        (["--alone", "mixture.name=planted", "mixture.tasks=[]"], "expected registered tasks or your own"),
        (["mixture.name=fiv", "mixture.tasks=[]"], "did you mean 'five'"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tiny_base()))
    out = tmp_path / "out"
    assert command_line(["compare", str(tmp_path / "own.yaml"), *arguments, "--out", str(out)]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert expected in told[-1]
    assert not out.exists()


def test_bad_data_is_said_before_anything_runs(tmp_path: Path, inline: list[str]) -> None:
    world = make_world(tmp_path / "world")
    (world / "mood-train.csv").write_text("review,label\nw1,good\n,bad\n")
    with pytest.raises(UserError, match="mood-train"):
        quietly(tiny(world), ["gar"], 2, tmp_path / "out")
    (tmp_path / "suite.yaml").write_text("settings: {a: {}}\n")
    with pytest.raises(UserError, match="is a suite, for gar sweep"):
        quietly(tmp_path / "suite.yaml", ["gar"], 2, tmp_path / "out")
    assert inline == []


# ---------------------------------------------------------------------- the pointer, time


def test_the_pointer_is_relative_or_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / "runs" / name / MODEL).mkdir(parents=True)
        (tmp_path / "runs" / name / MODEL / "config.json").write_text(name)
    link, runs = tmp_path / "recommended", tmp_path / "runs"

    def content() -> str:
        return (link / MODEL / "config.json").read_text()

    def refused(*arguments: Any, **options: Any) -> None:
        raise OSError("no links here")

    for name, copied in itertools.product("ab", (False, True, True, False)):
        with monkeypatch.context() as patch:
            if copied:
                patch.setattr(os, "symlink", refused)
            point(link, runs / name)
        assert content() == name
        assert link.is_symlink() != copied
    tmp_path.rename(tmp_path.with_name("moved"))
    assert (tmp_path.with_name("moved") / "recommended" / MODEL / "config.json").read_text() == "b"
    tmp_path.with_name("moved").rename(tmp_path)
    link.unlink()
    link.mkdir()
    (link / "mine.txt").write_text("keep me")
    with pytest.raises(UserError, match="holds other files"):
        point(link, runs / "a")
    assert (link / "mine.txt").read_text() == "keep me"


@given(st.lists(st.integers(1, 9).map(float), min_size=1, max_size=8), st.integers(1, 4))
def test_the_last_run_ends_when_places_are_filled_in_turn(lengths: list[float], jobs: int) -> None:
    busy: list[float] = []
    clock, waiting = 0.0, list(lengths)
    while waiting or busy:
        while waiting and len(busy) < jobs:
            busy.append(clock + waiting.pop(0))
        clock = min(busy)
        busy.remove(clock)
    assert makespan(lengths, jobs) == pytest.approx(clock)


def test_an_estimate_times_what_runs() -> None:
    arms = make_arms(tiny(updates=40), "own", ["gar", "cagrad"], 2)
    prepared = Prepared(arms)
    prepared.compute_features()
    assert prepared.absent == []
    found = prepared.estimate(1)
    assert found.runs.keys() == found.update.keys() == {"baseline", "gar", "cagrad"}
    for method, seconds in found.runs.items():
        assert seconds == pytest.approx(found.around + 40 * found.update[method])
    assert found.features == 0
    total = found.total(["gar", "gar", "baseline"], 1)
    assert total == pytest.approx(found.start + 2 * found.runs["gar"] + found.runs["baseline"])
    assert Estimate(runs={"gar": 1.0}).total(["gar", "stgc"], 1) is None
    assert Estimate().total([], 1) == 0


def test_the_time_left_is_told_from_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("gar.sweeps.progress.time.monotonic", lambda: clock[0])
    told = io.StringIO()
    jobs = [Job(name, {}, tmp_path) for name in ("short", "long")]
    view = View(2, 0, Console(file=told), expected={"short": 10.0, "long": 30.0}, guess=40.0)
    assert view.left() == 40
    clock[0] = 4.0
    view.follow(Event(jobs[0], "started"))
    assert view.left() == 36  # nothing is done: the guess
    view.follow(Event(jobs[0], "progress", {"stage": "update", "done": 5, "total": 10, "loss": 0.1}))
    assert view.share() == pytest.approx(5 / 40)
    assert view.left() == pytest.approx(1 / 8 * 28 + 7 / 8 * 36)
    clock[0] = 20.0
    view.follow(Event(jobs[0], "finished", {"accuracy": 0.5, "seconds": 20.0}))
    assert view.left() == pytest.approx(1 / 4 * 60 + 3 / 4 * 20)
    assert "[1/2] finished short in 20 s, accuracy 0.5000; about 30 s left" in told.getvalue()
    clock[0] = 60.0
    view.follow(Event(jobs[1], "progress", {"stage": "update", "done": 9, "total": 10, "loss": 0.1}))
    assert re.search(r"9\d % done; about \d s left", told.getvalue())
    view.follow(Event(jobs[1], "failed", {"reason": "no luck"}))
    assert view.left() is None
    plain = View(2, 0, Console(file=told))
    assert plain.left() is None
    assert tiny_world().is_dir()
