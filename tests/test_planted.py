"""Planted mixtures: texts and rules, how recovery is measured, the suites, a whole run, its report."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

import gar
from gar import metrics
from gar.cli.app import run
from gar.config import CATEGORIES, PARTS, TEXTS, TOPICS, Config, MixtureConfig, build
from gar.data import Mixture, Task, identity, load, load_mixture, overlap, planted
from gar.data._planted import words
from gar.data.load import resolve
from gar.errors import UserError
from gar.evaluation import evaluate
from gar.methods import REGISTRY
from gar.report import planted as shown
from gar.runs.names import RESULT
from gar.runs.result import replace_json
from gar.sweeps.suite import build_suite, load_suite
from gar.training import Shared, train_from_config
from support.tiny_runs import make_world, tree

STRENGTHS = [i / PARTS for i in range(PARTS + 1)]
#: The digest of planted(2, 1) with eight examples a split.
FIRST = "b070f61fa33003b313335f2667d62e05"


def rule(task: Task) -> dict[str, int]:
    """The task's label for each category, read from its examples; a category with two labels is noise."""
    category = {thing: name for name, things in words().categories.items() for thing in things}
    found: dict[str, int] = {}
    for split in (task.train, task.validation):
        for text, label in zip(split.texts, split.labels.tolist(), strict=True):
            thing = text.removesuffix(".").split()[-1]
            assert found.setdefault(category[thing], label) == label, text
    return found


# ---------------------------------------------------------------------- texts and rules


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("clusters", [1, 2, 3, 4, 5, 6])
def test_clusters_disagree_on_exactly_this_share_and_tasks_of_one_agree(
    clusters: int, strength: float
) -> None:
    sizes = {"train_examples": 4 * 60, "validation_examples": 4 * 60}
    mixture = planted(clusters, 2, strength, **sizes)
    truth = mixture.clusters
    assert truth is not None
    assert sorted(truth.values()) == [c for c in range(clusters) for _ in range(2)]
    for a, b in itertools.combinations(mixture.tasks, 2):
        first, second = rule(a), rule(b)
        assert first.keys() == second.keys()
        category = {thing: name for name, things in words().categories.items() for thing in things}
        for split in (a.train, a.validation):
            names = [category[text.removesuffix(".").split()[-1]] for text in split.texts]
            share = Fraction(sum(first[name] != second[name] for name in names), len(names))
            assert share == (0 if truth[a.name] == truth[b.name] else Fraction(strength))


@pytest.mark.parametrize("clusters", [1, 2, 3, 6])
def test_labels_are_balanced_and_splits_have_no_text_in_common(clusters: int) -> None:
    mixture = planted(clusters, 3, 0.5, **{"train_examples": 240, "validation_examples": 240})
    mixture.check()
    classes = max(2, clusters)
    for task in mixture.tasks:
        assert len(task.labels) == classes
        assert overlap(task) == 0
        for split in (task.train, task.validation):
            assert len(set(split.texts)) == len(split) == 240
            assert set(Counter(split.labels.tolist()).values()) == {240 // classes}
            # A probe that reads the first examples sees several labels.
            assert len(set(split.labels[:16].tolist())) > 1


def test_texts_tell_the_task_and_not_the_cluster() -> None:
    calm, fight = planted(3, 2, 0.0), planted(3, 2, 1.0)
    for a, b in zip(calm.tasks, fight.tasks, strict=True):
        assert a.train.texts == b.train.texts  # the rule changes labels alone
        assert all(text.lower().startswith(f"{a.name} notes: ") for text in a.train.texts)
    # The same topic in another cluster has the same texts.
    topics = {task.name: set(task.train.texts) for task in planted(3, 2).tasks}
    others = {task.name: set(task.train.texts) for task in planted(3, 4).tasks}
    assert topics.keys() <= others.keys()
    assert all(topics[name] == others[name] for name in topics)
    moved = {name for name, cluster in (planted(3, 2).clusters or {}).items()
             if (planted(3, 4).clusters or {})[name] != cluster}  # fmt: skip
    assert moved


def test_the_same_arguments_give_the_same_texts_and_seeds_differ() -> None:
    assert planted(seed=3).fingerprint() == planted(seed=3).fingerprint()
    # Not only here: the digest of the first version.
    assert planted(2, 1, train_examples=8, validation_examples=8).fingerprint() == FIRST
    others = [planted(seed=seed) for seed in range(4)]
    assert len({mixture.fingerprint() for mixture in others}) == 4
    assert len({tuple(task.name for task in mixture.tasks) for mixture in others}) == 4


def test_there_are_words_for_all_that_the_configuration_allows() -> None:
    known = words()
    assert (len(known.categories), len(known.topics)) == (CATEGORIES, TOPICS)
    things = [thing for group in known.categories.values() for thing in group]
    assert len(set(things)) == len(things)  # a thing has one category
    for who in known.topics.values():
        for group in known.categories.values():
            assert len(known.times) * len(who) * len(known.verbs) * len(group) == TEXTS
    largest = planted(6, 4, train_examples=24 * 288, validation_examples=24 * 288)
    assert all(len(set(t.train.texts + t.validation.texts)) == 24 * TEXTS for t in largest.tasks[:2])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"clusters": 7}, "planted.clusters is 7; input should be less than or equal to 6"),
        ({"clusters": 5, "tasks_per_cluster": 5}, "is 25; expected 24 or less"),
        ({"strength": 0.3}, "strength is 0.3; expected one of 0, 0.25, 0.5, 0.75, 1"),
        ({"strength": 1.5}, "planted.strength is 1.5"),
        ({"clusters": 3, "train_examples": 100}, "expected a multiple of 12, as many for each of 12"),
        ({"validation_examples": 1}, "e.g. 24"),
        ({"train_examples": 24 * 576, "validation_examples": 24}, "need 577 texts of a category"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        planted(**arguments)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- configuration


def test_a_mixture_section_names_what_python_makes() -> None:
    section = {"clusters": 2, "tasks_per_cluster": 3, "strength": 0.25, "seed": 5}
    config = build({"mixture": {"planted": section, "batch_size": 4}})
    made = planted(2, 3, 0.25, seed=5, batch_size=4)
    loaded = load_mixture(config.mixture)
    assert loaded.fingerprint() == made.fingerprint()
    assert loaded.name == made.name == "planted"
    assert (loaded.clusters, loaded.batch_size) == (made.clusters, 4)
    named = load_mixture(MixtureConfig.model_validate({"name": "mine", "planted": section, "batch_size": 4}))
    assert (named.name, named.fingerprint()) == ("mine", made.fingerprint())
    assert load("Planted").fingerprint() == planted().fingerprint()
    assert (
        build({"mixture": "planted"}).mixture
        == build({"mixture": {"planted": {}, "name": "planted"}}).mixture
    )
    assert build(config.to_dict()) == config
    stronger = config.override(["mixture.planted.strength=1"]).mixture
    assert stronger.planted is not None
    assert stronger.planted.strength == 1
    assert "planted" not in config.override(["mixture=five"]).to_dict()["mixture"]
    digests = identity(config.mixture)
    assert list(digests) == [task.name for task in made.tasks]
    assert len(set(digests.values())) == 6
    assert identity(stronger) != digests


def test_runs_of_before_keep_their_digest() -> None:
    assert "planted" not in Config().to_dict()["mixture"]


@pytest.mark.parametrize(
    ("mixture", "said"),
    [
        ({"planted": {}, "tasks": ["rte"]}, "both tasks and planted"),
        ({"planted": {}, "name": "five"}, "'five' is a registered mixture with its own tasks"),
    ],
)
def test_planted_beside_other_tasks_is_refused(mixture: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve(MixtureConfig.model_validate(mixture))


def test_the_data_commands_see_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "ls", "--format", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)["mixtures"]["planted"]
    assert listed == [task.name for task in planted().tasks]
    world = make_world(tmp_path / "world")
    backbone = f"backbone.name={world / 'bert'}"
    assert run(["data", "check", "planted", backbone, "mixture.planted.clusters=2", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["tasks"]) == 4
    assert all(task["overlap"] == 0 for task in found["tasks"])
    small = ["mixture.planted.clusters=1", "mixture.planted.tasks_per_cluster=1"]
    assert run(["data", "export", "planted", "--out", str(tmp_path / "files"), *small]) == 0
    (task,) = planted(1, 1).tasks
    files = {key: str(tmp_path / "files" / task.name / f"{key}.jsonl.gz") for key in ("train", "validation")}
    own = load([gar.config.TaskConfig(name=task.name, **files)])
    assert own.tasks[0].fingerprint() == task.fingerprint()


# ---------------------------------------------------------------------- recovery


def slow_recovery(experts: list[int], clusters: list[int]) -> float:
    """The adjusted Rand index from its definition: pairs of tasks, one by one."""
    pairs = list(itertools.combinations(range(len(experts)), 2))
    same_expert = [experts[i] == experts[j] for i, j in pairs]
    same_cluster = [clusters[i] == clusters[j] for i, j in pairs]
    if len(set(experts)) == 1 or len(set(clusters)) == 1:
        return 0.0  # nothing can be learnt
    both = sum(e and c for e, c in zip(same_expert, same_cluster, strict=True))
    chance = Fraction(sum(same_expert) * sum(same_cluster), len(pairs))
    possible = Fraction(sum(same_expert) + sum(same_cluster), 2) - chance
    return float((both - chance) / possible) if possible else 1.0


assignments = st.integers(2, 9).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 4), min_size=n, max_size=n),
        st.lists(st.integers(0, 4), min_size=n, max_size=n),
    )
)


def shares_of(experts: list[int], rng: np.random.Generator, count: int = 5) -> Any:
    shares = rng.dirichlet(np.ones(count), len(experts))
    for t, e in enumerate(experts):
        shares[t, e] += 1.0
    return shares


@given(assignments, st.integers(0, 99))
def test_recovery_is_that_of_plain_loops_and_knows_no_order(
    found: tuple[list[int], list[int]], seed: int
) -> None:
    experts, clusters = found
    rng = np.random.default_rng(seed)
    shares = shares_of(experts, rng)
    value = metrics.recovery(shares, clusters)
    assert value == pytest.approx(slow_recovery(experts, clusters), abs=1e-12)
    order, names, columns = rng.permutation(len(experts)), rng.permutation(5), rng.permutation(5)
    renamed = [int(names[clusters[t]]) for t in order]
    assert metrics.recovery(torch.from_numpy(shares[order][:, columns]), renamed) == pytest.approx(value)
    assert metrics.recovery_ceiling(clusters, 5) >= value - 1e-12


def slow_mixing(shares: Any, clusters: list[int]) -> float:
    total = wrong = 0.0
    for e in range(shares.shape[1]):
        mass = sum(float(row[e]) for row in shares)
        for t, row in enumerate(shares):
            own = sum(float(r[e]) for r, c in zip(shares, clusters, strict=True) if c == clusters[t])
            total += float(row[e])
            wrong += float(row[e]) * (1 - own / mass)
    return wrong / total


@given(assignments, st.integers(0, 99))
def test_mixing_is_that_of_plain_loops(found: tuple[list[int], list[int]], seed: int) -> None:
    shares = shares_of(found[0], np.random.default_rng(seed))
    value = metrics.cluster_mixing(shares, found[1])
    assert value == pytest.approx(slow_mixing(shares, found[1]), abs=1e-12)
    assert value == pytest.approx(metrics.cluster_mixing(7 * shares, found[1]))
    assert 0 <= value <= 1 - 1 / len(set(found[1])) + 1 - 1 / len(found[1])


def partitions(n: int, most: int) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for _ in range(n):
        found = [[*p, e] for p in found for e in range(min(most, max(p, default=-1) + 2))]
    return found


@pytest.mark.parametrize("clusters", [[0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 1, 1, 1],
                                      [0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 1, 1, 2, 2, 3, 3]])  # fmt: skip
def test_the_ceiling_is_the_best_of_all_assignments(clusters: list[int]) -> None:
    for experts in range(1, len(clusters) + 1):
        best = max(slow_recovery(p, clusters) for p in partitions(len(clusters), experts))
        assert metrics.recovery_ceiling(clusters, experts) == pytest.approx(best)


def test_degenerate_groupings_have_a_value() -> None:
    even = np.full((4, 3), 1 / 3)  # all to the first expert
    assert metrics.main_expert(even).tolist() == [0, 0, 0, 0]
    assert metrics.recovery(even, [0, 0, 1, 1]) == metrics.recovery_chance(even, [0, 0, 1, 1]) == 0
    assert metrics.cluster_mixing(even, [0, 0, 1, 1]) == pytest.approx(0.5)
    own = np.eye(4)
    assert (
        metrics.recovery(own, [0, 0, 0, 0]) == 0 == metrics.recovery_ceiling([0, 0, 0, 0], 4)
    )  # one cluster
    assert metrics.cluster_mixing(own, [0, 0, 0, 0]) == 0
    assert (
        metrics.recovery(own, [0, 1, 2, 3]) == 1 == metrics.recovery_ceiling([0, 1, 2, 3], 4)
    )  # a task each
    assert metrics.recovery_ceiling([0, 1, 2, 3], 3) == 0
    assert metrics.recovery([[1.0, 0.0]], [0]) == 0  # one task
    assert metrics.recovery(own[:, :1] + 1, [0, 0, 1, 1]) == 0 == metrics.recovery_ceiling([0, 0, 1, 1], 1)
    with pytest.raises(ValueError, match="a cluster for each task"):
        metrics.recovery(own, [0, 1])


def test_chance_is_exceeded_once_in_twenty_times() -> None:
    clusters, rng = [c for c in range(4) for _ in range(3)], random.Random(0)
    experts = [e for e in range(3) for _ in range(4)]
    chance = metrics.recovery_chance(np.eye(3)[experts], clusters)
    values = []
    for _ in range(4000):
        rng.shuffle(experts)
        values.append(slow_recovery(experts, clusters))
    assert abs(sum(values) / len(values)) < 0.01
    assert sum(value > chance for value in values) / len(values) < 0.06


# ---------------------------------------------------------------------- suites


def test_the_suite_has_all_methods_alike_and_the_variants_share_its_runs() -> None:
    main_suite = {run.id: run.tree() for run in load_suite("planted").runs()}
    assert len(main_suite) == 35
    sections = [{k: v for k, v in t.items() if k not in ("method", "seed")} for t in main_suite.values()]
    assert all(section == sections[0] for section in sections)
    assert len({json.dumps(t["method"]) for t in main_suite.values()}) == 7
    main_suite |= {run.id: run.tree() for run in load_suite("planted_top2").runs()}
    for name in ("planted_strength", "planted_experts", "planted_coefficient"):
        trees = {run.id: run.tree() for run in load_suite(name).runs()}
        common = trees.keys() & main_suite.keys()
        assert len(common) >= 2 * 5 * 5
        assert all(trees[run] == main_suite[run] for run in common)


def test_the_suite_of_all_methods_has_all_and_shares_the_others_runs() -> None:
    trees = {run.id: run.tree() for run in load_suite("planted_methods").runs()}
    names = {tree["method"]["name"] for tree in trees.values()}
    assert names == set(REGISTRY) - {"torchjd"}, "which needs a package of its own"
    five = {run.id: run.tree() for run in load_suite("planted").runs()}
    assert five.items() <= trees.items()


# ---------------------------------------------------------------------- a whole run


def test_runs_tell_recovery_and_the_report_shows_it(tmp_path: Path) -> None:
    world = make_world(tmp_path / "world")
    base = tree(world, experts__site="lora_head", experts__top_k=1, optimizer__updates=2)
    base["mixture"] = {"batch_size": 4, "group_size": 2}
    section = {"clusters": 2, "tasks_per_cluster": 2, "train_examples": 16, "validation_examples": 16}
    suite = {
        "settings": {"tiny": base},
        "mixtures": {f"s{s}": {"planted": {**section, "strength": s}} for s in (0, 1)},
        "methods": {
            "baseline": "baseline",
            "gar": "gar",
            "gar-0.1": {"name": "gar", "coefficient": 0.1},
        },
        "seeds": 2,
    }
    shared = Shared()
    for number, planned in enumerate(build_suite(suite, "own", tmp_path).runs()):
        directory = tmp_path / "runs" / planned.id
        train_from_config(build(planned.tree()), directory, shared=shared)
        result = json.loads((directory / RESULT).read_text(encoding="utf-8"))
        result["routing"]["recovery"] += number**2 / 1000  # two updates alone change it nowhere
        replace_json(directory / RESULT, result)
    results = gar.results(tmp_path / "runs")
    first = results.cell(results.settings[0], "s1", results.variants(results.settings[0])[0])[0]
    routing = first.result["routing"]
    assert routing["recovery_ceiling"] == 1
    assert -0.5 <= routing["recovery"] <= 1
    assert 0 <= routing["cluster_mixing"] <= 1
    assert results.settings == [results.settings[0]]  # strengths are mixtures of one setting
    table = shown.frame(results)
    assert len(table) == 12
    assert set(table["strength"]) == {0, 1}
    (family,) = shown.families(table)
    assert [len(shown.lines(family, axis)) for axis in shown.AXES] == [2, 0, 1]
    figure = shown.figure(family)
    assert figure is not None
    assert len(figure.axes) >= 6
    written = gar.report.write(results, tmp_path / "report")
    page = written["report.md"].read_text(encoding="utf-8")
    assert "## Known groups of tasks" in page
    assert "recovery by chance" in page
    assert written["figures/planted-1-figure.svg"].is_file()
    assert "Known groups" in written["report.html"].read_text(encoding="utf-8")
    paired = pd.read_csv(written["paired.csv"])
    paired = paired[(paired["metric"] == "recovery") & (paired["b"] == "Baseline")].set_index(["scope", "a"])
    for (strength, coefficient), cell in table[table["method"] == "gar"].groupby(["strength", "coefficient"]):
        base = table[(table["method"] == "baseline") & (table["strength"] == strength)]
        found = cell.set_index("seed")["recovery"] - base.set_index("seed")["recovery"]
        row = paired.loc[f"s{strength:g}", f"GAR λ={coefficient:g}"]
        assert row["mean"] == pytest.approx(found.mean())
        assert json.loads(row["differences"]) == pytest.approx({str(s): d for s, d in found.items()})
    assert (paired["mean"].abs() > 0).all()


def test_a_mixture_without_a_truth_has_no_recovery(tmp_path: Path) -> None:
    world = make_world(tmp_path / "world")
    config = build(tree(world))
    mixture = load_mixture(config.mixture)
    assert mixture.clusters is None
    model = gar.MultiTaskModel.from_pretrained(config.backbone, mixture.tasks, config.experts)
    routing = evaluate(model, mixture)["routing"]
    assert not {"recovery", "recovery_chance", "recovery_ceiling", "cluster_mixing"} & routing.keys()
    assert np.isnan(metrics.METRICS["recovery"].read({"routing": routing}))


def test_recovery_is_that_of_the_tasks_mean_gates(tmp_path: Path) -> None:
    """From the evaluation's own loads: at FFN sites these are the mean gates."""
    world = make_world(tmp_path / "world")
    config = build(tree(world))
    mixture: Mixture = planted(2, 2, train_examples=8, validation_examples=16)
    model = gar.MultiTaskModel.from_pretrained(config.backbone, mixture.tasks, config.experts)
    routing = evaluate(model, mixture)["routing"]
    rows = list(routing["load_by_task"].values())
    experts = [row.index(max(row)) for row in rows]
    truth = list((mixture.clusters or {}).values())
    assert routing["recovery"] == pytest.approx(slow_recovery(experts, truth))
    assert routing["cluster_mixing"] == pytest.approx(slow_mixing(np.array(rows), truth))


def test_chosen_hyper_parameters_are_compared_by_seed_and_holm() -> None:
    """Against paired t-tests by hand."""
    generator = np.random.default_rng(0)
    recovery = {name: generator.random(6) for name in ("baseline", "gar", "zloss", "stgc")}
    recovery["stgc"] = recovery["baseline"]  # no difference has no p-value
    lines = [
        {
            **{"site": "lora_head", "top_k": 1, "clusters": 6, "tasks_per_cluster": 2, "data_seed": 0},
            **{"updates": 3, "strength": 1.0, "experts": 6, "method": name, "default": False, "seed": seed},
            "name": gar.methods.label_of(name) + (" (coefficient=0.3)" if name != "baseline" else ""),
            **{"coefficient": 0.3, "learning_rate": 0.0123, "accuracy": 0.5 + 0.3 * value},
            **dict.fromkeys(shown.MEASURED[3:], 0.5),
            **{"cluster_mixing": 0.4, "recovery": value},
        }
        for name, values in recovery.items()
        for seed, value in reversed(list(enumerate(values)))
    ]
    table = shown.tuned(pd.DataFrame(lines, columns=shown.COLUMNS))
    cells = [dict(zip(row.contents, [cell.text for cell in row.cells], strict=True)) for row in table.rows]
    rows = {own["method"]: own for own in cells}
    assert rows["GAR"]["chosen"] == "learning_rate=0.0123, coefficient=0.3"
    assert rows["Baseline"]["chosen"] == "learning_rate=0.0123"
    p = [float(ttest_rel(recovery[name], recovery["baseline"]).pvalue) for name in ("gar", "zloss")]
    small, large = sorted(p)
    expected = {small: min(1, 2 * small), large: max(large, min(1, 2 * small))}
    for label, value in zip(("GAR", "z-loss"), p, strict=True):
        assert rows[label]["recovery (ARI): p, Holm"] == f"{expected[value]:.2g}"
    assert rows["STGC"]["recovery (ARI): p, Holm"] == rows["Baseline"]["recovery (ARI): p, Holm"] == "–"
    difference = float(np.mean(recovery["gar"] - recovery["baseline"]))
    assert rows["GAR"]["recovery (ARI) − Baseline"] == f"{difference:+.3f}".replace("-", "−")
    assert "for 3 methods" in table.notes[0]


# ---------------------------------------------------------------------- the page


def test_the_pages_tables_are_made_from_the_stored_runs() -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "planted.py"
    if not script.is_file():
        pytest.skip("not a source checkout")
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert not done.returncode, done.stderr
