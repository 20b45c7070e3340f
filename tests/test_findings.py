"""Sentences about a diagnosis: their numbers against loops, and when each is said."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import normalized_mutual_info_score

from gar.evaluation import findings
from gar.evaluation.findings import conflicts, lowest_cosine
from gar.metrics import Measured, shuffled_information, summarize


def result(
    counts: Any, gradients: Any, accuracy: dict[str, float] | None = None, chance: float | None = None
) -> dict[str, Any]:
    """A diagnosis of these selections [T, E] and gradients [T, E, d]."""
    chosen, g = np.asarray(counts), np.asarray(gradients, float)
    load = chosen.sum(0) / chosen.sum()
    grams = np.einsum("ted,sed->ets", g, g)
    seen = Measured(
        load, chosen, chosen / np.maximum(chosen.sum(1, keepdims=True), 1),
        np.sqrt(np.einsum("ett->te", grams)), grams, g.mean(0) @ g.mean(0).T, g.sum(1) @ g.sum(1).T,
    )  # fmt: skip
    names = ["rte", "cb", "cola", "wic"][: len(chosen)]
    routing = {
        "load": load.tolist(),
        **summarize(seen),
        "load_by_task": dict(zip(names, chosen.tolist(), strict=True)),
        "gradient_grams": grams.tolist(),
    }
    found = {"routing": routing, "accuracy": {"tasks": accuracy or dict.fromkeys(names, 0.9)}}
    return found if chance is None else {**found, "chance": {"nmi": chance}}


EVEN = [[25, 25, 25, 25], [25, 25, 25, 25]]
APART = [[50, 50, 0, 0], [0, 0, 50, 50]]


def gradients(*cosines: float) -> np.ndarray:
    """Of two tasks [2, E, 2], with these cosines within the experts."""
    return np.array([[[1.0, 0.0] for _ in cosines], [[2 * c, 2 * np.sqrt(1 - c * c)] for c in cosines]])


def test_balanced_and_not_specialised_with_its_conflict() -> None:
    first, second, *rest = findings(result(EVEN, gradients(0.5, 0.1, -0.4, -0.2), chance=0.002))
    assert first == (
        "Balanced, not specialised: 4.0 of 4 experts in effect, routing says 0.0 % about the task, with "
        "shuffled tasks up to 0.2 %; purity 0.0000 above the floor of an equal mix."
    )
    assert second == (
        "Strongest conflict: rte against cb in expert 2, which has 25 % of the load "
        "(gradient cosine −0.4000)."
    )
    assert len(rest) == 1
    assert "gar compare" in rest[0]


def test_specialised() -> None:
    apart = np.array([[[1.0], [1.0], [0.0], [0.0]], [[0.0], [0.0], [1.0], [1.0]]])
    (first,) = findings(result(APART, apart))  # no expert has two tasks' gradients: nothing about conflict
    assert first.startswith("Balanced, specialised: 4.0 of 4 experts in effect, routing says 66.7 % about")
    assert "shuffled" not in first
    assert "purity 1.0000 above" in first


@pytest.mark.parametrize(("nmi", "kind"), [(0.049, "not"), (0.05, "weakly"), (0.29, "weakly"), (0.3, "")])
def test_the_words_turn_at_their_thresholds(nmi: float, kind: str) -> None:
    tree = result(EVEN, gradients(0, 0, 0, 0))
    tree["routing"]["nmi"] = nmi
    said = findings(tree)
    assert f"Balanced, {kind} specialised".replace("  ", " ") in said[0]
    assert ("gar compare" in said[-1]) == (nmi < 0.05)


def test_uneven_and_collapsed_loads() -> None:
    counts = [[94, 2, 2, 2], [94, 2, 2, 2]]
    first, second, *_ = findings(result(counts, gradients(0.2, 0, 0, 0)))
    assert first.startswith("Unevenly used, not specialised: 1.3 of 4 experts in effect")
    assert second == "Expert 0 holds 94.0 % of the load."


def test_no_conflict_and_what_is_passed_over() -> None:
    dead = [[50, 50, 0, 0], [50, 50, 0, 0]]
    tree = result(dead, gradients(0.3, -0.04, -0.9, -1))  # the last two experts are dead
    assert "No two tasks pull an expert apart; the lowest gradient cosine is −0.0400" in " ".join(
        findings(tree)
    )
    silent = gradients(-0.9, 0.5, 0.5, 0.5)
    silent[1, 0] = 0.0  # a task without gradient in expert 0
    found = lowest_cosine(result(EVEN, silent)["routing"])
    assert found is not None
    assert (found.expert, round(found.cosine, 9)) == (1, 0.5)


def test_every_expert_has_its_conflict_the_lowest_first() -> None:
    found = conflicts(result(EVEN, gradients(0.5, -0.1, -0.4, 0.2))["routing"])
    assert [(c.expert, round(c.cosine, 9)) for c in found] == [(2, -0.4), (1, -0.1), (3, 0.2), (0, 0.5)]
    dead = conflicts(result([[50, 0, 25, 25]] * 2, gradients(0.5, -0.1, -0.4, 0.2))["routing"])
    assert [c.expert for c in dead] == [2, 3, 0]


def test_one_task_and_older_results() -> None:
    (only,) = findings(result([[1, 1]], np.ones((1, 2, 1))))
    assert only == "Balanced: 2.0 of 2 experts in effect; with one task there is nothing to specialise in."
    tree = result(EVEN, gradients(-1, -1, -1, -1))
    del tree["routing"]["gradient_grams"]
    assert not any("conflict" in sentence for sentence in findings(tree))


def test_tasks_below_the_majority_class() -> None:
    tree = result(EVEN, gradients(0, 0, 0, 0), {"rte": 0.55, "cb": 0.7})
    assert not any("majority" in sentence for sentence in findings(tree, {"rte": 0.5, "cb": 0.6}))
    said = findings(tree, {"rte": 0.55, "cb": 0.6})
    assert any(sentence.startswith("Not above the majority class: rte;") for sentence in said)


@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 5))
def test_the_lowest_cosine_against_loops(seed: int, tasks: int, experts: int) -> None:
    rng = np.random.default_rng(seed)
    g = rng.normal(size=(tasks, experts, 3)) * rng.integers(0, 2, (tasks, experts, 1))
    counts = rng.integers(0, 3, (tasks, experts)) + np.eye(tasks, experts, dtype=int)
    routing = result(counts, g)["routing"]
    found = lowest_cosine(routing)
    slow = [
        g[i, e] @ g[j, e] / np.sqrt((g[i, e] @ g[i, e]) * (g[j, e] @ g[j, e]))
        for e in range(experts)
        for i in range(tasks)
        for j in range(i)
        if routing["load"][e] >= 0.01 / experts and g[i, e].any() and g[j, e].any()
    ]
    assert (found is None) == (not slow)
    if found is not None:
        assert found.cosine == pytest.approx(min(slow), abs=1e-12)
        assert re.fullmatch("rte|cb|cola|wic", found.first)


# ---------------------------------------------------------------------- what chance reaches


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_shuffled_information_against_labels(seed: int, tasks: int, experts: int, draws: int) -> None:
    """The same permutations, events written out, scikit-learn's score."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.concatenate([np.arange(tasks), rng.integers(0, tasks, 9)]))
    selections = rng.integers(0, 3, (len(labels), experts))
    permutations, best = np.random.default_rng(5), 0.0
    for _ in range(draws):
        order, ordered = permutations.permutation(len(labels)), np.sort(labels)
        by, to = [], []
        for task, n in zip(ordered, order, strict=True):
            for e in range(experts):
                by += [task] * selections[n, e]
                to += [e] * selections[n, e]
        if len(set(by)) > 1 and len(set(to)) > 1:
            best = max(best, normalized_mutual_info_score(by, to))
    assert shuffled_information(selections, labels, draws, 5) == pytest.approx(best, abs=1e-12)


def test_unrelated_routing_exceeds_its_shuffles_once_in_twenty() -> None:
    """Texts of 30 tokens that agree: events are far from independent, examples are not."""
    above = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        selections = 30 * np.eye(4, dtype=int)[rng.integers(0, 4, 60)]
        labels = np.arange(60) % 3
        counts = np.array([selections[labels == t].sum(0) for t in range(3)])
        own = summarize(
            Measured(
                counts.sum(0) / counts.sum(),
                counts,
                counts / counts.sum(1, keepdims=True),
                np.ones((3, 4)),
                np.zeros((4, 3, 3)),
                np.zeros((4, 4)),
                np.zeros((3, 3)),
            )
        )
        above += own["nmi"] > shuffled_information(selections, labels, seed=seed)
    assert above <= 22  # 10 expected; more than 22 has probability 2e-4, and the seeds are fixed


@pytest.mark.parametrize(
    ("selections", "tasks", "draws"), [([1, 2], [0, 1], 3), ([[1], [2]], [0], 3), ([[1], [2]], [0, 1], 0)]
)
def test_what_makes_no_sense_is_refused(selections: Any, tasks: Any, draws: int) -> None:
    with pytest.raises(ValueError, match=r"expected selections \[N, E\]"):
        shuffled_information(selections, tasks, draws)
