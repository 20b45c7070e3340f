"""Results: grouping, endpoints, paired differences, and their agreement with the paper's arithmetic."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from gar.errors import UserError
from gar.metrics.catalogue import listed
from gar.presets import paper
from gar.report import Results, load
from gar.runs.state import State
from support.made_up_runs import TASKS, write_run, write_sweep

ACCURACIES = {  # (mixture, method, seed): macro accuracy
    ("five", "baseline"): {1: 0.60, 2: 0.62, 3: 0.61},
    ("six", "baseline"): {1: 0.70, 2: 0.71, 3: 0.69},
    ("five", "gar"): {1: 0.63, 2: 0.63, 3: 0.65},
    ("six", "gar"): {1: 0.71, 2: 0.73, 3: 0.72},
}


def write_table(root: Path, without: tuple[tuple[str, str, int], ...] = ()) -> Results:
    for (mixture, method), seeds in ACCURACIES.items():
        for seed, accuracy in seeds.items():
            if (mixture, method, seed) not in without:
                write_run(root, method, seed, mixture, accuracy=accuracy)
    return load(root)


def row_of(frame, **wanted):
    rows = [
        row for row in frame.to_dict("records") if all(row[key] == value for key, value in wanted.items())
    ]
    assert len(rows) == 1, rows
    return rows[0]


def test_endpoints_against_hand_computed_values(tmp_path):
    frame = write_table(tmp_path).endpoints()
    row = row_of(frame, scope="five", variant="GAR")
    values = [0.63, 0.63, 0.65]
    assert row["accuracy"] == pytest.approx(np.mean(values))
    assert row["accuracy_std"] == pytest.approx(np.std(values))
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert (row["accuracy_low"], row["accuracy_high"]) == pytest.approx((low, high))
    means = [(0.63 + 0.71) / 2, (0.63 + 0.73) / 2, (0.65 + 0.72) / 2]
    whole = row_of(frame, scope="mean of 2 mixtures", variant="GAR")
    assert whole["accuracy"] == pytest.approx(np.mean(means))
    assert whole["accuracy_std"] == pytest.approx(np.std(means))  # of the seeds' means, not mean of the stds
    assert whole["seed_list"] == "1 2 3"


def test_paired_differences_against_scipy(tmp_path):
    results = write_table(tmp_path)
    row = row_of(results.paired("accuracy", "gar", "baseline"), scope="mean of 2 mixtures")
    differences = [
        np.mean([ACCURACIES[m, "gar"][s] - ACCURACIES[m, "baseline"][s] for m in ("five", "six")])
        for s in (1, 2, 3)
    ]
    reference = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert row["mean"] == pytest.approx(np.mean(differences))
    assert (row["low"], row["high"]) == pytest.approx((reference.low, reference.high))
    assert list(row["differences"].values()) == pytest.approx(differences)
    assert row["note"] == ""
    turned = row_of(results.paired("accuracy", "baseline", "gar"), scope="mean of 2 mixtures")
    assert (turned["mean"], turned["low"]) == pytest.approx((-row["mean"], -row["high"]))


@pytest.mark.parametrize("metric", listed())
def test_every_metric_pairs(tmp_path, metric):
    results = write_table(tmp_path)
    values = {
        m: results.frame[results.frame["method"] == m].set_index(["mixture", "seed"])[metric]
        for m in ("gar", "baseline")
    }
    row = row_of(results.paired(metric), scope="five")
    expected = (values["gar"] - values["baseline"])["five"]
    assert row["mean"] == pytest.approx(expected.mean(), abs=1e-15)


def test_bins_of_task_counts(tmp_path):
    for mixture in TASKS:
        write_run(tmp_path, "gar", 1, mixture, accuracy=0.5)
    results = load(tmp_path)
    (setting,) = results.settings
    scopes = {scope.label: scope.mixtures for scope in results.scopes(setting)}
    assert scopes["5–6 tasks"] == ("five", "six")
    assert "7–8 tasks" not in scopes  # it would repeat seven_mrpc
    assert results.lone_bins(setting) == {"7–8 tasks": "seven_mrpc"}
    assert list(scopes)[-1] == "mean of 3 mixtures"


def test_one_seed_has_neither_spread_nor_interval(tmp_path):
    for method in ("baseline", "gar"):
        write_run(tmp_path, method, 7)
    results = load(tmp_path)
    assert results.endpoints()[["accuracy_std", "accuracy_low", "accuracy_high"]].isna().all(axis=None)
    row = row_of(results.paired())
    assert math.isnan(row["low"])
    assert row["note"] == "one seed: no interval"


def test_unpaired_seeds_are_refused_and_named(tmp_path):
    results = write_table(tmp_path, without=(("five", "baseline", 2),))
    row = row_of(results.paired(), scope="five")
    assert math.isnan(row["mean"])
    assert row["note"] == "not compared: Baseline lacks seed 2"
    row = row_of(results.paired(), scope="mean of 2 mixtures")
    assert row["note"] == "not compared: Baseline lacks five with seed 2"
    row = row_of(results.endpoints(), scope="mean of 2 mixtures", variant="Baseline")
    assert row["seeds"] == 0
    assert row["note"] == "not averaged: Baseline lacks five with seed 2"
    assert row_of(results.paired(), scope="six")["seeds"] == 3
    common = row_of(results.paired(common_seeds=True), scope="five")
    assert common["mean"] == pytest.approx((0.03 + 0.04) / 2)
    assert common["note"] == "over seeds 1, 3 only: Baseline lacks seed 2"


def test_seeds_without_overlap_are_never_compared(tmp_path):
    write_run(tmp_path, "baseline", 1)
    write_run(tmp_path, "gar", 2)
    for common in (False, True):
        row = row_of(load(tmp_path).paired(common_seeds=common))
        assert math.isnan(row["mean"])
        assert row["note"].startswith("not compared: GAR lacks seed 1")


def test_a_mixture_that_one_method_never_ran(tmp_path):
    write_run(tmp_path, "baseline", 1, "five")
    write_run(tmp_path, "baseline", 1, "six")
    write_run(tmp_path, "gar", 1, "five")
    frame = load(tmp_path).paired()
    assert row_of(frame, scope="five")["seeds"] == 1
    assert row_of(frame, scope="mean of 2 mixtures")["note"] == "not compared: GAR lacks six with seed 1"


def test_different_configurations_are_different_settings(tmp_path):
    write_run(tmp_path / "a", "gar", 1)
    write_run(tmp_path / "b", "gar", 1, tree={"optimizer": {"updates": 100}})
    write_run(tmp_path / "c", "gar", 1, tree={"experts": {"count": 4, "top_k": 2}})
    write_run(tmp_path / "d", "gar", 1, tree={"mixture": {"name": "five", "max_train_examples": 10}})
    results = load(tmp_path)
    assert results.settings == [
        "minilm frozen, lora_ffn, E4K2",
        "minilm frozen, lora_ffn, E8K4, mixture.max_train_examples=10, optimizer.updates=2000",
        "minilm frozen, lora_ffn, E8K4, mixture.max_train_examples=None, optimizer.updates=100",
        "minilm frozen, lora_ffn, E8K4, mixture.max_train_examples=None, optimizer.updates=2000",
    ]
    assert not results.notes


def test_where_a_run_was_made_does_not_matter(tmp_path):
    write_run(tmp_path / "a", "gar", 1)
    write_run(
        tmp_path / "b",
        "gar",
        2,
        tree={"device": "cuda", "evaluation": {"every": 50}, "checkpoint": {"every": 10}},
    )
    assert len(load(tmp_path).settings) == 1


def test_clip_may_differ_between_mixtures_but_not_inside_one(tmp_path):
    write_run(tmp_path, "gar", 1, "five", tree={"optimizer": {"clip": 0.8}})
    write_run(tmp_path, "gar", 1, "six", tree={"optimizer": {"clip": 1.1}})
    assert len(load(tmp_path).settings) == 1
    write_run(tmp_path, "gar", 2, "six", tree={"optimizer": {"clip": 0.8}})
    assert len(load(tmp_path).settings) == 2


@pytest.mark.parametrize("state", [State.FAILED, State.RUNNING])
def test_only_finished_runs_define_settings_and_variants(tmp_path, state):
    write_run(tmp_path, "gar", 1, "five", tree={"optimizer": {"clip": 0.8}})
    write_run(tmp_path, "gar", 1, "six", tree={"optimizer": {"clip": 1.1}})
    before = load(tmp_path)
    others = [
        write_run(tmp_path, "gar", 2, "six", tree={"optimizer": {"clip": 0.5}}, state=state),
        write_run(tmp_path, "gar", 3, "six", tree={"optimizer": {"clip": 1.1, "updates": 9}}, state=state),
        write_run(tmp_path, "gar", 4, "six", fields={"coefficient": 0.5}, state=state),
    ]
    results = load(tmp_path)
    assert results.settings == before.settings
    (setting,) = results.settings
    assert results.variants(setting) == ["GAR"]
    labels = {run.path: results.label(run) for run in results.problems}
    assert labels[others[0]] == (setting, "six", "GAR")
    assert labels[others[1]].setting.endswith(", optimizer.updates=9")
    assert labels[others[2]] == (setting, "six", "GAR λ=0.5")


def test_unfinished_runs_alone_are_named_among_themselves(tmp_path):
    for number, updates in enumerate((10, 20)):
        write_run(tmp_path, "gar", number, tree={"optimizer": {"updates": updates}}, state=State.FAILED)
    results = load(tmp_path)
    assert [results.label(run).setting.rsplit(", ", 1)[1] for run in results.runs] == [
        "optimizer.updates=10",
        "optimizer.updates=20",
    ]


def test_runs_on_splits_of_different_sizes_are_not_pooled(tmp_path):
    for seed, rows in ((1, 100), (2, 100), (3, 50)):
        path = write_run(tmp_path, "gar", seed) / "result.json"
        result = json.loads(path.read_text())
        path.write_text(json.dumps(result | {"examples": {"rte": [rows, 20]}}))
        if seed == 2:
            write_run(tmp_path, "gar", 9, state=State.FAILED)  # does not tell, and is like the others
            assert len(load(tmp_path).settings) == 1
    assert len(load(tmp_path).settings) > 1


def test_varied_coefficients_name_the_variants(tmp_path):
    for coefficient in (1e-3, 1e-2):
        write_run(tmp_path, "gar", 1, fields={"coefficient": coefficient})
    write_run(tmp_path, "baseline", 1)
    results = load(tmp_path)
    (setting,) = results.settings
    assert results.variants(setting) == ["Baseline", "GAR λ=0.001", "GAR λ=0.01"]
    assert len(results.paired("accuracy", "gar", "baseline")) == 2
    assert len(results.paired("accuracy", "GAR λ=0.01", "baseline")) == 1


def test_coefficients_chosen_per_mixture_are_one_variant(tmp_path):
    write_run(tmp_path, "gar", 1, "five", fields={"coefficient": 1e-3})
    write_run(tmp_path, "gar", 1, "six", fields={"coefficient": 1e-2})
    results = load(tmp_path)
    assert results.variants(results.settings[0]) == ["GAR"]


def test_a_repeated_seed_counts_once_and_is_noted(tmp_path):
    write_run(tmp_path / "a", "gar", 1, accuracy=0.5)
    write_run(tmp_path / "b", "gar", 1, accuracy=0.9)
    results = load(tmp_path)
    assert results.endpoints()["accuracy"].tolist() == pytest.approx([0.5])
    assert len(results.notes) == 1
    assert "different accuracies" in results.notes[0]


def write_own(path, seed, train, digest=None):
    """A run on a task of one's own, whose data environment.json tells by a digest."""
    tree = {"mixture": {"name": "mine", "tasks": [{"name": "mood", "train": train, "validation": "y.csv"}]}}
    run = write_run(path, "gar", seed, "mine", tree=tree, accuracy={"mood": 0.5})
    if digest is not None:
        file = run / "environment.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "data": {"mood": digest}}))


def seeds_by_mixture(results):
    (setting,) = results.settings
    return {name: list(results.cell(setting, name, "GAR")) for name in results.mixtures(setting)}


def test_own_data_are_told_apart_by_their_content(tmp_path):
    write_own(tmp_path, 1, "here.csv", "a")
    write_own(tmp_path, 2, "there.csv", "a")  # the same data elsewhere
    write_own(tmp_path, 3, "here.csv", "b")  # others in their place
    results = load(tmp_path)
    (setting,) = results.settings
    assert {
        mixture: list(results.cell(setting, mixture, "GAR")) for mixture in results.mixtures(setting)
    } == {
        "mine": [1, 2],
        "mine (2)": [3],
    }


def test_data_without_a_digest_are_told_apart_by_their_place(tmp_path):
    write_own(tmp_path, 1, "here.csv", "a")
    write_own(tmp_path, 2, "here.csv")  # of an older version
    write_own(tmp_path, 3, "there.csv")
    results = load(tmp_path)
    (setting,) = results.settings
    assert {
        mixture: list(results.cell(setting, mixture, "GAR")) for mixture in results.mixtures(setting)
    } == {
        "mine": [1, 2],
        "mine (2)": [3],
    }


def test_mixtures_of_one_name_with_other_tasks_are_kept_apart(tmp_path):
    mine = {"train": "x.csv", "validation": "y.csv"}
    for number, task in enumerate(("mood", "tone")):
        tree = {"mixture": {"name": "mine", "tasks": [{"name": task, **mine}]}}
        write_run(tmp_path / str(number), "gar", 1, "mine", tree=tree, accuracy={task: 0.5})
    results = load(tmp_path)
    assert results.mixtures(results.settings[0]) == ["mine", "mine (2)"]


def test_frame_has_a_row_a_run_in_any_state(tmp_path):
    results = load(write_sweep(tmp_path))
    frame = results.frame
    assert frame["state"].value_counts().to_dict() == {
        "finished": 42,
        "failed": 1,
        "unfinished": 1,
        "unreadable": 1,
    }
    assert repr(results).startswith("Results(42 finished, ")
    finished = frame[frame["state"] == "finished"]
    assert finished[[*listed(), "step_seconds", "learning_rate"]].notna().all(axis=None)
    assert frame["accuracy.anli"].notna().sum() == 21
    row = finished.iloc[0]
    stored = json.loads((Path(row["path"]) / "result.json").read_text())
    assert row["accuracy"] == stored["accuracy"]["macro"]
    assert row["gradient_mass_purity"] == stored["routing"]["gradient_mass_purity"]


def test_histories_hold_evaluations_and_the_end(tmp_path):
    results = load(write_sweep(tmp_path))
    table = results.histories
    one = table[(table["mixture"] == "six") & (table["variant"] == "GAR") & (table["seed"] == 1)]
    assert one["update"].tolist() == [500, 1000, 1500, 2000]
    assert len(table) == 42 * 4


def test_pareto_front_of_the_endpoints(tmp_path):
    frame = load(write_sweep(tmp_path)).endpoints()
    block = frame[frame["scope"] == "six"].to_dict("records")
    for row in block:
        dominated = any(
            other is not row
            and other["accuracy"] >= row["accuracy"]
            and other["gradient_mass_purity"] >= row["gradient_mass_purity"]
            and other["utilization"] >= row["utilization"]
            and other["load_variance"] <= row["load_variance"]
            for other in block
        )
        assert row["pareto"] != dominated


def test_collapse_is_said(tmp_path):
    path = write_run(tmp_path, "gar", 1)
    result = json.loads((path / "result.json").read_text())
    result["routing"]["load"] = [0.93, 0.07, 0, 0, 0, 0, 0, 0]
    (path / "result.json").write_text(json.dumps(result))
    ((run, said),) = load(path).collapses
    assert run.path == path
    assert said.startswith("expert 0 holds 93.0 % of the load; experts 2, 3, 4, 5, 6 and 7 are dead")


def test_mistakes_are_one_line(tmp_path):
    with pytest.raises(UserError, match="no run directories in"):
        load(tmp_path)
    write_run(tmp_path, "gar", 1)
    results = load([tmp_path])
    with pytest.raises(UserError, match=r"unknown method 'garr'.*did you mean 'gar'"):
        results.paired("accuracy", "garr")
    write_run(tmp_path, "baseline", 1)
    with pytest.raises(UserError, match=r"unknown metric 'acuracy'.*did you mean 'accuracy'"):
        load(tmp_path).paired("acuracy")
    with pytest.raises(UserError, match=r"unknown metric 'accuracy.rtee'.*did you mean 'accuracy.rte'"):
        load(tmp_path).paired("accuracy.rtee")
    assert load(tmp_path).paired("accuracy.rte")["seeds"].tolist() == [1]


def test_no_finished_run(tmp_path):
    write_run(tmp_path, "gar", 1, state="running")
    results = load(tmp_path)
    assert results.settings == []
    assert (len(results.endpoints()), len(results.comparisons()), len(results.histories)) == (0, 0, 0)
    assert [run.state for run in results.problems] == ["unfinished"]


@pytest.mark.parametrize(
    ("setting", "comparison", "estimate", "low", "high"),
    [  # literals of the paper's paired table
        ("roberta_frozen_lora_ffn", "gar-baseline", 1.141, 0.760, 1.523),
        ("roberta_frozen_lora_ffn", "gar-cagrad", 1.078, 0.632, 1.523),
        ("deberta_frozen_lora_ffn", "gar-baseline", 1.176, 0.687, 1.666),
    ],
)
def test_the_papers_paired_rows(tmp_path, setting, comparison, estimate, low, high):
    """Differences of the endpoint means agree; seeds with the implied spread give the printed interval."""
    printed = [row for row in paper.paired() if row[:4] == (setting, "five_mixtures", comparison, "acc")]
    assert [(float(p.estimate), float(p.ci_low), float(p.ci_high)) for p in printed] == [
        (estimate, low, high)
    ]
    a, b = comparison.split("-")
    gains = [
        100 * (float(paper.endpoint(setting, m, a)["acc"]) - float(paper.endpoint(setting, m, b)["acc"]))
        for m in ("five", "six", "seven_paws", "seven_mrpc", "eight")
    ]
    assert np.mean(gains) == pytest.approx(estimate, abs=0.01)

    shape = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    spread = (high - low) / 2 / stats.t.ppf(0.975, 4) * math.sqrt(5) / shape.std(ddof=1)
    for seed, step in enumerate(shape):
        write_run(tmp_path, b, seed, accuracy=0.6)
        write_run(tmp_path, a, seed, accuracy=0.6 + (estimate + spread * step) / 100)
    row = row_of(load(tmp_path).paired("accuracy", a, b))
    assert [100 * row[key] for key in ("mean", "low", "high")] == pytest.approx(
        [estimate, low, high], abs=6e-4
    )
