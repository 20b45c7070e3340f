"""docs/results.md: its numbers against scipy, its words against its numbers, and what is not run."""

from __future__ import annotations

import csv
import gzip
import itertools
import math
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from gar.metrics import METRICS
from gar.report.evidence import (
    PAIRS,
    Evidence,
    gains,
    load,
    predictor,
    questions,
    verdict,
)
from gar.report.evidence_page import page
from gar.report.evidence_summary import summary
from gar.report.verdict import Paired, listing
from gar.sweeps.stored import HEAD, KEY, TRAJECTORY
from gar.sweeps.suite import load_suite

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "results.py"
CELL = ("frozen_top1", "six_complete")
TASKS = ["rte", "mrpc", "wic", "cola", "sst2", "cb"]

Line = dict[str, str]


def line(setting: str, mixture: str, method: str, seed: int, accuracy: float, **values: object) -> Line:
    """A stored line; metrics that are not given are 0.1."""
    facts = {
        "id": f"{setting}/{mixture}/{method}/seed-{seed}", "configuration": f"c-{method}", "data": "d",
        "name": method.split("-")[0], "gar": "0.2.0", "torch": "2.11.0", "device": "a made-up GPU",
        "updates": 2000,
        "learning_rate": 0.001, "clip": 1.0, "weight_decay": 0.01, "hyperparameters": "", "seconds": 36.0,
        **dict.fromkeys(METRICS, 0.1), "accuracy": accuracy, **values,
    }  # fmt: skip
    return {name: str(value) for name, value in facts.items()}


def part(stored: Line, name: str) -> str:
    """The mixture, method or seed in a line's id."""
    return stored["id"].split("/")[["mixture", "method", "seed"].index(name) + 1].removeprefix("seed-")


def cell_lines(
    shifts: Mapping[str, float], seeds: int = 5, cell: tuple[str, str] = CELL, first: int = 0
) -> list[Line]:
    rng = np.random.default_rng(3)
    common = rng.normal(0.6, 0.02, seeds)
    found = []
    for method, shift in shifts.items():
        for seed in range(seeds):
            accuracy = common[seed] + shift + rng.normal(0, 0.004)
            by_task = {f"accuracy.{task}": accuracy for task in TASKS}
            found.append(line(*cell, method, first + seed, accuracy, **by_task))
    return found


def pair_lines(gain: Callable[[list[str], float], float], seeds: int = 3) -> list[Line]:
    """Baseline and GAR in all pairs and triples; ``gain`` of the tasks and of the cosine between them."""
    rng, found = np.random.default_rng(5), []
    suite = load_suite(PAIRS)
    for mixture in suite.mixtures("pairs_top1"):
        cosine = rng.uniform(-0.5, 0.5)
        for seed in range(seeds):
            base = rng.normal(0.6, 0.01)
            both = {"task_cosine": cosine, **{n: rng.uniform() for n in ("observed_cosine", "nmi")}}
            found.append(line("pairs_top1", mixture, "baseline", seed, base, **both))
            more = gain(mixture.split("-"), cosine) + rng.normal(0, 0.001)
            found.append(line("pairs_top1", mixture, "gar", seed, base + more))
    return found


def text_of(lines: Iterable[Line], points: Iterable[Line] = ()) -> str:
    return page(Evidence(list(lines), list(points)))[0]


def section(text: str, name: str) -> str:
    return text.split(f"## {name}\n", 1)[1].split("\n## ", 1)[0]


def write(path: Path, lines: list[Line], columns: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys([*columns, *(name for each in lines for name in each)])
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(names), restval="")
        writer.writeheader()
        writer.writerows(lines)


# ---------------------------------------------------------------------- the repository's page


#: The command's function.
make_page = runpy.run_path(str(SCRIPT))["main"]


def test_the_page_is_what_the_stored_runs_give() -> None:
    subprocess.run([sys.executable, str(SCRIPT), "--check"], check=True)


def test_the_stored_runs_are_under_a_megabyte() -> None:
    assert sum(path.stat().st_size for path in (ROOT / "docs" / "results").glob("*.csv*")) < 1_000_000


def test_the_check_sees_a_changed_number_and_a_changed_word(tmp_path: Path) -> None:
    write(tmp_path / "results" / "a.csv", cell_lines({"baseline": 0.0, "gar": 0.02}), HEAD)
    with pytest.raises(SystemExit):
        make_page(check=True, docs=tmp_path)  # no page yet
    make_page(docs=tmp_path)
    make_page(check=True, docs=tmp_path)
    path = tmp_path / "results.md"
    written = path.read_text()
    path.write_text(written.replace("is better than", "is worse than"))
    with pytest.raises(SystemExit, match="run benchmarks"):
        make_page(check=True, docs=tmp_path)
    path.write_text(written)
    write(tmp_path / "results" / "a.csv", cell_lines({"baseline": 0.0, "gar": 0.01}), HEAD)
    with pytest.raises(SystemExit):
        make_page(check=True, docs=tmp_path)


def test_the_paragraph_of_other_pages_follows_the_stored_runs(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    write(docs / "results" / "a.csv", cell_lines({"baseline": 0.0, "gar": 0.02}), HEAD)
    readme = tmp_path / "README.md"
    readme.write_text("before\n")
    with pytest.raises(SystemExit, match="has no lines"):
        make_page(docs=docs)
    readme.write_text(
        "before\n\n<!-- results: written by benchmarks/results.py -->\nold\n<!-- end of results -->\nafter\n"
    )
    make_page(docs=docs)
    written = readme.read_text()
    assert "\nold\n" not in written
    assert (written[:7], written[-6:]) == ("before\n", "after\n")
    make_page(check=True, docs=docs)
    readme.write_text(written.replace("better", "worse"))
    with pytest.raises(SystemExit, match="README"):
        make_page(check=True, docs=docs)


def test_a_paragraph_of_the_results() -> None:
    assert summary(Evidence([], [])).startswith("No run of GAR beside Baseline is stored yet. Not run yet: ")
    second = ("frozen_top1", "six_reduced")
    lines = cell_lines({"baseline": 0.0, "gar": 0.02})
    lines += cell_lines({"baseline": 0.0, "gar": 0.0}, seeds=1, cell=second)
    evidence = Evidence(lines, [])
    found = evidence.difference("accuracy", CELL, "gar", "baseline")
    said = summary(evidence)
    assert said.startswith(
        "In two settings and mixtures, on frozen minilm, GAR at its searched or default coefficient is "
        "better than Baseline in one "
        f"(frozen_top1, six_complete: +{100 * found.mean:.2f} points, +{100 * found.low:.2f} to "
        f"+{100 * found.high:.2f}, five seeds), worse in none, and not told apart from it in none. "
        "Too few seeds to compare in one."
    )
    assert "trained minilm" in said.split("Not run yet: ")[1]
    assert "by itself" not in said
    lines += [*alone_lines(ONE), *together_lines(ONE)]

    def means(key: str) -> list[float]:
        """By task, of the runs whose id has ``key``, in which {} is the task."""
        own = {task: [e for e in lines if key.format(task) in e["id"]] for task in TASKS}
        return [float(np.mean([float(e[f"accuracy.{task}"]) for e in own[task]])) for task in TASKS]

    one, eight = means("alone_one/{}/"), means("alone_eight/{}/")
    aligned, usual = means("/raw-1/"), means("strong_top1/six_complete/baseline")
    rho = stats.spearmanr(np.subtract(one, eight), np.subtract(aligned, usual)).statistic
    assert f"by itself (Spearman {rho:+.2f} over six tasks)" in summary(Evidence(lines, []))
    opposite = together_lines({task: -shift for task, shift in ONE.items()})
    assert "by itself" not in summary(Evidence([*lines[: -len(opposite)], *opposite], []))


# ---------------------------------------------------------------------- numbers and words


def test_without_runs_everything_is_not_run() -> None:
    text = text_of([])
    assert "Nothing was run yet" in text
    assert not re.search(r"\b(better|worse) than\b", text)
    absent = section(text, "Not run")
    for name in ("frozen", "trained", "pairs", "roberta", "deberta", "torchjd"):
        assert f"evidence\\_{name}" in absent
    planned = {run.id for name in Evidence([], []).suites for run in load_suite(name).runs()}
    assert f"0 of {len(planned)} planned runs" in text


def test_differences_against_scipy() -> None:
    lines = cell_lines({"baseline": 0.0, "gar": 0.03, "stgc": -0.02})
    evidence = Evidence(lines, [])
    by = {
        m: [float(row["accuracy"]) for row in lines if part(row, "method") == m] for m in ("baseline", "gar")
    }
    reference = np.array(by["gar"]) - np.array(by["baseline"])
    low, high = stats.ttest_1samp(reference, 0).confidence_interval(0.95)
    found = evidence.difference("accuracy", CELL, "gar", "baseline")
    assert (found.mean, found.low, found.high) == pytest.approx((reference.mean(), low, high))
    text = text_of(lines)
    shown = section(text, "frozen_top1, six_complete")
    assert f"[+{100 * low:.2f}, +{100 * high:.2f}]" in shown.replace("\\", "")
    assert "STGC is worse than Baseline" in shown
    assert "1 better" in section(text, "In short")
    assert text == text_of(reversed(lines))


def test_a_difference_that_is_the_learning_rate_s() -> None:
    """A method that is nothing but its rate differs from Baseline, and not from itself switched off."""
    rng = np.random.default_rng(0)
    lines = cell_lines({"baseline": 0.0, "loadpen": 0.1}, cell=("frozen_top4", "bigbench_five"))
    for each in lines[5:]:
        off = float(each["accuracy"]) + rng.normal(0, 0.004)
        lines.append(line("rates_top4", "bigbench_five", "loadpen", int(part(each, "seed")), off))
    text = text_of(lines)
    assert "LoadPen is better than Baseline by" in section(text, "frozen_top4, bigbench_five")
    rates = section(text, "The learning rates alone").replace("\\", "")
    assert "no difference between LoadPen and Baseline's update at its learning rate" in rates
    values = [
        np.array([float(each["accuracy"]) for each in lines if each["id"].startswith(f"{cell}/")])
        for cell in ("frozen_top4/bigbench_five/loadpen", "rates_top4/bigbench_five/loadpen")
    ]
    low, high = stats.ttest_1samp(values[0] - values[1], 0).confidence_interval(0.95)
    assert f"[{100 * low:+.2f}, {100 * high:+.2f}]".replace("-", "−") in rates
    lines += cell_lines({"gar": 0.0}, cell=("frozen_top4", "bigbench_five"))
    short = section(text_of(lines), "In short").replace("\\", "")
    assert "learning rates ([below](#the-learning-rates-alone)): 1 not told apart." in short
    assert "Of their 1 differences from Baseline that are told apart, 1 are there" in short
    # A method that is more than its rate.
    lines += [line("rates_top1", "six_complete", "stgc", seed, 0.4 + 0.001 * seed) for seed in range(5)]
    lines += cell_lines({"baseline": 0.0, "stgc": 0.2}, cell=("frozen_top1", "six_complete"))
    short = section(text_of(lines), "In short").replace("\\", "")
    assert "1 better (STGC in frozen_top1, six_complete, +" in short
    assert "; STGC in frozen_top1, six_complete after Holm's correction for 2." in short
    assert "Of their 2 differences from Baseline that are told apart, 1 are there" in short


def holm_by_hand(ps: list[float]) -> list[float]:
    """Each p times how many are not smaller, and never less than a smaller one's."""
    adjusted, worst = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = worst
    return adjusted


def test_forms_of_gar_are_judged_all_together() -> None:
    """A p-value of few seeds that no other test shares is little; beside it stands what is left of it."""
    cell = ("top4", "six_complete")
    more = {"raw-1e-3": 0.0, "raw-1": 0.02, "unit-1": 0.02}
    lines = cell_lines({"baseline": 0.0, **more}, cell=cell)
    lines += cell_lines({"gar": 0.0, "baseline": 0.0})  # the page needs some run of GAR
    values = {
        name: np.array(
            [float(each["accuracy"]) for each in lines if each["id"].startswith(f"{'/'.join(cell)}/{name}/")]
        )
        for name in ("baseline", *more)
    }
    adjusted = holm_by_hand([stats.ttest_rel(values[name], values["baseline"]).pvalue for name in more])
    text = text_of(lines)
    table = section(text, "Forms of GAR")
    for name, p in zip(more, adjusted, strict=True):
        row = next(each for each in table.splitlines() if each.startswith(f"| {name} |"))
        assert row.split(" | ")[5] == f"{p:.2g}"
    left = sum(p < 0.05 for p in adjusted)
    assert ("none of these after" in table) == (left == 0)
    assert "Holm's correction for 3" in section(text, "In short")
    assert "## top4, six_complete" not in text
    # Two seeds give no p-value, and do not count among the tests.
    few = [each for each in lines if "unit-1" not in each["id"] or int(part(each, "seed")) < 2]
    assert "Holm's correction for 2" in section(text_of(few), "In short")


def test_fewer_experts_stand_beside_eight() -> None:
    eight = cell_lines({"baseline": 0.0, "raw-1": 0.01}, cell=("strong_top4", "six_reduced"), first=10)
    both = cell_lines({"raw-1": 0.0, "baseline": 0.03}, cell=("few_top4", "six_reduced"), first=10)
    few = [each for each in both if part(each, "method") == "baseline"]
    text = text_of([*eight, *few, *cell_lines({"gar": 0.0, "baseline": 0.0})])
    values = [
        np.array([float(e["accuracy"]) for e in found if "baseline" in e["id"]]) for found in (few, eight)
    ]
    low, high = stats.ttest_1samp(values[0] - values[1], 0).confidence_interval(0.95)
    rows = section(text, "Forms of GAR").splitlines()
    row = next(each for each in rows if each.startswith("|") and "few" in each)
    assert f"[{100 * low:+.2f}, {100 * high:+.2f}]".replace("-", "−") in row.replace("\\", "")


def alone_lines(one: Mapping[str, float], seeds: int = 5) -> list[Line]:
    """Each task by itself with eight experts and with one, ``one`` the difference."""
    rng, found = np.random.default_rng(7), []
    for task, shift in one.items():
        for seed in range(seeds):
            common = rng.normal(0.6, 0.02)
            for setting, more in (("alone_eight", 0.0), ("alone_one", shift)):
                accuracy = common + more + rng.normal(0, 0.004)
                own = {f"accuracy.{task}": accuracy}
                found.append(line(setting, task, "baseline", seed, accuracy, **own))
    return found


def together_lines(gains_of: Mapping[str, float], seeds: int = 5) -> list[Line]:
    """Baseline and GAR at coefficient 1 on the complete tasks, with each task's gain."""
    rng, found = np.random.default_rng(11), []
    for seed in range(10, 10 + seeds):
        for method, share in (("baseline", 0.0), ("raw-1", 1.0)):
            own = {f"accuracy.{t}": 0.6 + share * gain + rng.normal(0, 0.004) for t, gain in gains_of.items()}
            macro = float(np.mean(list(own.values())))
            found.append(line("strong_top1", "six_complete", method, seed, macro, **own))
    return found


def shows(row: str, a: list[float], b: list[float]) -> bool:
    """Whether a row of a table has scipy's interval of ``a - b``, paired, in points."""
    low, high = stats.ttest_rel(a, b).confidence_interval(0.95)
    return f"[{100 * low:+.2f}, {100 * high:+.2f}]".replace("-", "−") in row.replace("\\", "")


ONE = dict(zip(TASKS, (0.03, 0.02, 0.01, 0.0, -0.02, -0.05), strict=True))


def test_a_task_by_itself_stands_beside_its_mixture() -> None:
    """The words follow the numbers."""
    alone, together = alone_lines(ONE), together_lines(ONE)
    basis = cell_lines({"gar": 0.0, "baseline": 0.0})
    text = text_of([*basis, *alone, *together])
    table = section(text, "An expert to itself")
    for task in TASKS:
        row = next(each for each in table.splitlines() if each.startswith(f"| {task} |"))
        for lines, metric, names in (
            (alone, "accuracy", (f"alone_one/{task}/", f"alone_eight/{task}/")),
            (together, f"accuracy.{task}", ("/raw-1/", "/baseline/")),
        ):
            a, b = ([float(each[metric]) for each in lines if name in each["id"]] for name in names)
            assert shows(row, a, b)
    pairs = [
        [
            np.mean([float(e[metric]) for e in lines if a in e["id"]])
            - np.mean([float(e[metric]) for e in lines if b in e["id"]])
            for lines, metric, a, b in (
                (alone, "accuracy", f"alone_one/{task}/", f"alone_eight/{task}/"),
                (together, f"accuracy.{task}", "/raw-1/", "/baseline/"),
            )
        ]
        for task in TASKS
    ]
    rho = stats.spearmanr(*np.array(pairs).T).statistic
    assert rf"| strong\_top1 | raw-1 | 6 | {rho:+.2f} |" in table
    by_itself = {
        task: stats.ttest_rel(
            *(
                [float(e["accuracy"]) for e in alone if f"alone_{n}/{task}/" in e["id"]]
                for n in ("one", "eight")
            )
        )
        for task in TASKS
    }
    apart = {task: found for task, found in by_itself.items() if found.pvalue < 0.05}
    better = [task for task, found in apart.items() if found.statistic > 0]
    assert better
    assert [task for task in apart if task not in better] == ["sst2", "cb"]
    adjusted = dict(zip(TASKS, holm_by_hand([found.pvalue for found in by_itself.values()]), strict=True))
    left = [task for task in apart if adjusted[task] < 0.05]
    short = section(text, "In short")
    assert f"By itself, of 6 tasks {len(better)} {'is' if len(better) == 1 else 'are'} better (" in short
    assert " and 2 are worse (sst2 and cb) with one expert than with eight; " in short
    assert f"{listing(left)} after Holm's correction for 6." in short
    assert "In their mixtures 2 of those that are worse and 0 of the other 4 are worse" in table
    assert "the two differences go together (Spearman" in table
    assert "single tasks" not in text

    # The other way round nothing goes together.
    opposite = together_lines({task: -shift for task, shift in ONE.items()})
    table = section(text_of([*basis, *alone, *opposite]), "An expert to itself")
    assert "In their mixtures 0 of those that are worse and" in table
    assert "That the two differences go together is not shown" in table

    # Without the mixtures there is a table, and nothing is said.
    table = section(text_of([*basis, *alone]), "An expert to itself")
    assert sum(each.startswith("| ") for each in table.splitlines()) == 2 + len(TASKS)
    assert "By itself" not in table
    assert "Not run." in section(text_of(basis), "An expert to itself")


def test_forms_are_told_by_task() -> None:
    lines = together_lines(ONE)
    table = section(text_of([*lines, *cell_lines({"gar": 0.0, "baseline": 0.0})]), "Forms of GAR")
    for task in TASKS:
        name = f"accuracy.{task}"
        a, b = ([float(e[name]) for e in lines if part(e, "method") == m] for m in ("raw-1", "baseline"))
        assert shows(next(each for each in table.splitlines() if each.startswith(f"| {task} |")), a, b)


def test_cells_of_one_task_share_a_table() -> None:
    lines = [
        line("single_top1", task, method, seed, 0.5 + 0.01 * seed + more, **{f"accuracy.{task}": 0.5})
        for task in ("mrpc", "rte")
        for method, more in (("baseline", 0.0), ("gar", 0.001 * task.count("r")))
        for seed in range(3)
    ]
    text = text_of(lines)
    rows = section(text, "single_top1, single tasks")
    assert rows.count("| GAR |") == 2
    assert "## single_top1, mrpc" not in text
    assert section(text, "In short").count(r"single\_top1") >= 2


SEEDS = (0, 1, 2, 3, 4)


def test_words_follow_the_interval() -> None:
    assert "GAR is better" in verdict("GAR", Paired(0.01, 0.001, 0.02, SEEDS))
    assert "GAR is worse" in verdict("GAR", Paired(-0.01, -0.02, -0.001, SEEDS))
    for low, high in ((-0.001, 0.02), (0.0, 0.02), (-0.02, 0.0)):
        said = verdict("GAR", Paired((low + high) / 2, low, high, SEEDS))
        assert said.startswith("no difference")
        assert "better" not in said
    for equal in (Paired(0.01, 0.01, 0.01, SEEDS), Paired(0.01, 0.005, 0.015, SEEDS[:2])):
        assert verdict("GAR", equal).startswith("no difference")
    assert "one seed" in verdict("GAR", Paired.of({0: 0.5}, {0: 0.4}))
    assert "no seed in common" in verdict("GAR", Paired.of({0: 0.5}, {1: 0.4}))


def test_only_common_seeds_are_compared() -> None:
    both = cell_lines({"baseline": 0.0, "gar": 0.01})
    lines = [each for each in both if (part(each, "method"), part(each, "seed")) != ("gar", "0")]
    found = Evidence(lines, []).difference("accuracy", CELL, "gar", "baseline")
    assert len(found.seeds) == 4
    missing = section(text_of(lines), "Not run")
    # 10 seeds are planned in three mixtures; in one of them GAR has 4, Baseline 5
    row = next(each for each in missing.splitlines() if r"evidence\_frozen | frozen\_top1" in each)
    assert "GAR 26, " in row
    assert "Baseline 25" in row
    assert "| 210 | 9 |" in row


def test_what_belongs_to_no_suite_or_was_repeated_is_said() -> None:
    lines = cell_lines({"baseline": 0.0})
    foreign = line("elsewhere", "x", "gar", 0, 0.5)
    again = {**lines[0], "configuration": "other", "accuracy": "0.9"}
    evidence = Evidence([*lines, foreign, again], [])
    assert (evidence.foreign, evidence.repeated) == (1, 1)
    # A cell is one configuration: the one with most runs stays.
    assert evidence.values("accuracy", *CELL, "baseline")[0] == float(lines[0]["accuracy"])
    text = page(evidence)[0]
    assert "1 stored run does not count" in text
    assert "**5 runs differ from their suite" in text  # these have made-up digests
    assert "1 stored run belongs to no packaged suite" in text


def test_the_best_of_several_aggregators_is_said_to_be_picked() -> None:
    lines = cell_lines({"baseline": 0.0, "upgrad": 0.001, "mgda": -0.01})
    lines = [{**x, "name": "torchjd"} if part(x, "method") in ("upgrad", "mgda") else x for x in lines]
    assert "The best of 2 forms of TorchJD is upgrad; it was picked" in text_of(lines).replace("\\", "")


def test_coefficients_and_denominator() -> None:
    shifts = {"gar-0": 0.0, "gar-1e-3": 0.01, "gar-1e-3-numerator": -0.02, "gar-1e-2": 0.0}
    text, figures = page(Evidence(cell_lines(shifts, 10, ("sweep_top1", "six_complete")), []))
    shown = section(text, "Coefficient and denominator")
    assert "GAR without its denominator is worse than GAR" in shown
    assert "coefficients.svg" in figures
    assert "<svg" in figures["coefficients.svg"]
    assert "results/coefficients.svg" in shown


@pytest.mark.parametrize(("shift", "said"), [(0.02, "1 better. Where they"), (-0.02, "1 worse.\n")])
def test_what_collapse_costs_is_said(shift: float, said: str) -> None:
    shifts = {"gar-0": 0.0, "gar-1e-3-numerator": shift}
    lines = cell_lines(shifts, 10, ("sweep_top1", "six_complete"))
    used, spread = (
        [{**each, "utilization": share if "numerator" in each["id"] else "0.9"} for each in lines]
        for share in ("0.125", "0.9")
    )
    both = cell_lines({"baseline": 0.0, "gar": 0.0})
    text = text_of([*used, *both])
    assert said in section(text, "In short")
    assert "Fewer than a quarter of the experts are in use, and 1e-3-numerator is" in text
    assert "Fewer than" not in text_of([*spread, *both])


def test_the_paper_s_values_stand_beside_ours() -> None:
    text = text_of(cell_lines({"baseline": 0.0, "gar": 0.0077}))
    shown = section(text, "Beside the paper").replace("\\", "")
    assert re.search(r"\| \+0\.77 \| \[\+0\.(59|60), \+0\.94\] \|", shown)  # the paper's, top-1
    assert "No reproduction" in shown


def test_trajectories_end_with_the_run_itself() -> None:
    lines = cell_lines({"baseline": 0.0, "gar": 0.01}, 2)
    points = [
        {**{name: each[name] for name in KEY[:2]}, "update": str(update), **dict.fromkeys(METRICS, "0.5")}
        for each in lines
        for update in (500, 1000)
    ]
    text, figures = page(Evidence(lines, points))
    assert "trajectories.svg" in figures
    assert "results/trajectories.svg" in section(text, "Over training")
    assert "trajectories.svg" not in page(Evidence(lines, []))[1]


def test_balance_is_counted_by_intervals() -> None:
    lines = cell_lines({"baseline": 0.0, "switchaux": -0.02, "gar": 0.02})
    for each in lines:
        spread = 0.001 * int(part(each, "seed")) * (2 if part(each, "method") == "switchaux" else 1)
        each["load_variance"] = str((0.01 if part(each, "method") == "switchaux" else 0.05) + spread)
        each["nmi"] = str(
            (0.9 if part(each, "method") == "gar" else 0.1) + spread * (part(each, "method") != "baseline")
        )
    shown = section(text_of(lines), "Load balance, purity and accuracy")
    assert re.search(r"load variance lower .*\| 1 \| 0 \| 1 \| 0 \|", shown)
    assert "evidence" not in shown
    # The forms that align the most are counted by themselves.
    strong = ("strong_top1", "six_complete")
    aligned = cell_lines({"baseline": 0.0, "raw-1": 0.1}, cell=strong, first=10)
    for each in aligned:
        of = part(each, "method") == "raw-1"
        each["nmi"] = str(0.5 + of * (0.1 + 0.001 * int(part(each, "seed")) ** 2))
    shown = section(text_of([*lines, *aligned]), "Load balance, purity and accuracy").replace("\\", "")
    assert (
        "| compared methods | load variance lower than Baseline's, by its interval | 1 | 0 | 1 | 0 |" in shown
    )
    assert "| `evidence_strong` | NMI higher than Baseline's, by its interval | 1 | 1 | 0 | 0 |" in shown
    # SwitchAux's NMI is Baseline's plus a little for most seeds: no interval away from 0 but GAR's
    assert re.search(r"NMI higher .*\| [12] \| 1 \| [01] \| 0 \|", shown)


# ---------------------------------------------------------------------- when does alignment help


def test_a_planted_predictor_is_found_and_said() -> None:
    lines = pair_lines(lambda tasks, cosine: -0.02 * cosine)
    evidence = Evidence(lines, [])
    found = gains(evidence, "gar")
    assert len(found.mixtures) == 66
    assert found.tasks[0] == ["rte", "mrpc"]
    cosines = {part(x, "mixture"): float(x["task_cosine"]) for x in lines if part(x, "method") == "baseline"}
    assert found.predictors["task_cosine", None] == pytest.approx([cosines[m] for m in found.mixtures])
    first = questions(evidence, ["gar"])[0]
    assert (first.predictor, first.update) == ("task_cosine", None)
    assert first.answer.rho == pytest.approx(
        stats.spearmanr(found.predictors["task_cosine", None], found.gain).statistic
    )
    assert first.answer.high < 0
    assert predictor(evidence) == first
    text, figures = page(evidence)
    shown = section(text, "When does alignment help")
    assert "GAR gains more where tasks conflict more" in shown
    assert "66 mixtures, 3 seeds" in shown
    assert "conflict.svg" in figures


def test_no_relation_is_no_predictor() -> None:
    evidence = Evidence(pair_lines(lambda tasks, cosine: 0.001), [])
    assert predictor(evidence) is None
    shown = section(page(evidence)[0], "When does alignment help")
    assert "a correlation is not shown" in shown
    assert "Nothing measured under Baseline was found to predict" in shown


def test_the_opposite_of_what_was_expected_is_said_as_well() -> None:
    shown = section(text_of(pair_lines(lambda tasks, cosine: 0.02 * cosine)), "When does alignment help")
    assert "GAR gains more where tasks agree more" in shown
    assert "against the expectation" in shown


def test_a_value_on_the_way_may_be_the_predictor() -> None:
    lines = pair_lines(lambda tasks, cosine: 0.0)
    by_run = {
        (part(x, "mixture"), part(x, "seed")): float(x["accuracy"])
        for x in lines
        if part(x, "method") == "gar"
    }
    points = []
    for each in (x for x in lines if part(x, "method") == "baseline"):
        gain = by_run[part(each, "mixture"), part(each, "seed")] - float(each["accuracy"])
        values = {**dict.fromkeys(METRICS, "0.5"), "observed_cosine": str(gain)}
        points.append({**{name: each[name] for name in KEY[:2]}, "update": "250", **values})
    found = predictor(Evidence(lines, points))
    assert found is not None
    assert (found.predictor, found.update) == ("observed_cosine", 250)


def test_files_are_read_together(tmp_path: Path) -> None:
    lines = cell_lines({"baseline": 0.0, "gar": 0.01}, 2)
    write(tmp_path / "a.csv", lines[:2], HEAD)
    write(tmp_path / "b.csv", lines[2:], HEAD)
    point = {**{name: lines[0][name] for name in KEY[:2]}, "update": "5", "accuracy": "0.5"}
    write(tmp_path / "b.trajectories.csv", [point], TRAJECTORY)
    (tmp_path / "README.md").touch()
    evidence = load(tmp_path)
    assert len(evidence.runs) == 4
    assert list(evidence.points["update"]) == [5]
    assert math.isnan(
        evidence.difference("accuracy", ("frozen_top4", "six_complete"), "gar", "baseline").mean
    )
    assert page(evidence)[0] == text_of(itertools.chain(lines), [point])
    for name in ("a.csv", "b.trajectories.csv"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        (tmp_path / name).unlink()
    packed = load(tmp_path)
    assert packed.runs.equals(evidence.runs)
    assert packed.points.equals(evidence.points)
