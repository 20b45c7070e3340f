"""Evaluation against a slow float64 twin written from the specification alone (section 6)."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from torch import Tensor

import gar
from gar.config import CacheConfig, EvaluationConfig, build
from gar.data import Mixture, Split, Task
from gar.errors import UserError
from gar.evaluation.measure import EvaluationFailure, _grams, _together, evaluate
from gar.model.multitask import MultiTaskModel
from gar.runs.history import History, read_lines
from gar.training.loop import fit
from support.tiny_backbones import SITES, WORDS, Directories, make_model, scatter_weights
from support.twins import Example, ModelTwin

UNCACHED = CacheConfig(enabled=False)
PLACES = [("lora_ffn", False), ("full_ffn", True), ("lora_head", True)]
LABELS = {"first": ("no", "yes"), "second": ("low", "middle", "high"), "third": ("off", "on")}
TEXT = {"first": ("text",), "second": ("question", "answer"), "third": ("text",)}
EXTRA = {"first": ("f1", "mcc")}
SIZES = {"first": 11, "second": 7, "third": 5}  # batches of 4 in groups of 3: 3 + 1, and short last ones
PROBE = 5  # reached within the second batch, so eight examples are taken


def make_mixture(*names: str, batch_size: int = 4, group_size: int = 3) -> Mixture:
    rng = np.random.default_rng(7)

    def texts(count: int) -> list[str]:
        return [" ".join(rng.choice(WORDS, rng.integers(1, 9))) for _ in range(count)]

    def a_split(name: str, count: int) -> Split:
        labels = rng.integers(0, len(LABELS[name]), count)
        return Split(texts(count), labels, texts(count) if len(TEXT[name]) == 2 else None)

    tasks = [
        Task(
            n, LABELS[n], a_split(n, 9), a_split(n, SIZES[n]), TEXT[n], ("f1", "mcc") if n == "first" else ()
        )
        for n in names
    ]
    return Mixture("tiny", tuple(tasks), batch_size, group_size)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Directories(tmp_path_factory.mktemp("backbones"))["bert"]


def model_for(directory: str, mixture: Mixture, **options: Any) -> MultiTaskModel:
    model = make_model(directory, tasks=mixture.tasks, **options)
    scatter_weights(model)
    return model


# --------------------------------------------------------------------------------------------------
# The twin
# --------------------------------------------------------------------------------------------------


def measured(twin: ModelTwin, task: Task, n: int) -> Example:
    """One validation example, tokenized alone."""
    split, tokenizer = task.validation, twin.model.tokenizer
    encoded = tokenizer(split.texts[n], *([] if split.pairs is None else [split.pairs[n]]))
    types = None if split.pairs is None else torch.tensor([encoded["token_type_ids"]])
    return twin.example(
        task.name, *twin.read(torch.tensor([encoded["input_ids"]]), types), int(split.labels[n])
    )


def probe(twin: ModelTwin, mixture: Mixture, task: Task, examples: int) -> Tensor:
    """``g_te`` of one task, [E, d], by one autograd call a group."""
    size = len(task.validation)
    groups: list[list[int]] = []
    taken = start = 0
    while start < size and taken < examples:
        batch = list(range(start, min(size, start + mixture.batch_size)))
        groups += [batch[i : i + mixture.group_size] for i in range(0, len(batch), mixture.group_size)]
        taken, start = taken + len(batch), start + len(batch)
    slots = list(twin.slots().values())
    rows = []
    for group in groups:
        loss = torch.stack([measured(twin, task, n).loss for n in group]).sum() / len(group)
        grads = torch.autograd.grad(loss, slots, materialize_grads=True)
        rows.append(torch.cat([grad.flatten(1) for grad in grads], dim=1))
    return torch.stack(rows).mean(0)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    lengths = math.sqrt(a @ a) * math.sqrt(b @ b)
    return float(a @ b) / lengths if lengths > 0 else 0.0


def expected_sections(model: MultiTaskModel, mixture: Mixture, probe_examples: int) -> dict[str, Any]:
    """Section 6 by loops over examples, experts and tasks."""
    twin, tasks = ModelTwin(model), mixture.tasks
    E, T = twin.bank.experts.count, len(tasks)
    seen = {task.name: [measured(twin, task, n) for n in range(len(task.validation))] for task in tasks}
    accuracy = {
        t.name: sum(
            int(m.logits.argmax()) == int(y) for m, y in zip(seen[t.name], t.validation.labels, strict=True)
        )
        / len(t.validation)
        for t in tasks
    }
    counts = np.array([sum(m.chosen.numpy() for m in seen[t.name]) for t in tasks])
    gates = {name: np.array([m.q.detach().numpy() for m in found]) for name, found in seen.items()}
    pooled = np.concatenate(list(gates.values()))
    if model.site.unit == "token":
        load, by_task = pooled.mean(0), {name: q.mean(0) for name, q in gates.items()}
    else:
        load = counts.sum(0) / counts.sum()
        by_task = {t.name: row / row.sum() for t, row in zip(tasks, counts, strict=True)}
    entropy = np.mean([-sum(p * math.log(p) for p in q if p > 0) for q in pooled])
    g = np.array([probe(twin, mixture, task, probe_examples).numpy() for task in tasks])
    norms = np.array([[math.sqrt(g[t, e] @ g[t, e]) for e in range(E)] for t in range(T)])
    purity = [norms[:, e].max() / norms[:, e].sum() if norms[:, e].sum() > 1e-12 else 0.0 for e in range(E)]
    intra = [
        np.mean([cosine(g[i, e], g[j, e]) for i, j in combinations(range(T), 2)]) if T > 1 else 0.0
        for e in range(E)
    ]
    bar = g.mean(0)
    inter = np.mean([cosine(bar[i], bar[j]) for i, j in combinations(range(E), 2)]) if E > 1 else 0.0
    floor = max(sum(row) for row in norms) / np.sum(norms)
    used = [share for share in purity if share > 0]
    live = sum(used) / len(used)
    whole, observed = [g[t].ravel() for t in range(T)], [sum(g[t]) for t in range(T)]
    pairs = list(combinations(range(T), 2))
    events = [(t, e) for t in range(T) for e in range(E) for _ in range(counts[t, e])]
    by, to = [t for t, _ in events], [e for _, e in events]
    trivial = T == 1 or len(set(to)) == 1
    routing = {
        "load": load,
        "load_variance": sum((share - 1 / E) ** 2 for share in load) / E,
        "utilization": sum(share >= 1 / (2 * E) for share in load) / E,
        "effective_experts": math.exp(-sum(share * math.log(share) for share in load if share > 0)) / E,
        "gradient_mass_purity": np.mean(purity),
        "gradient_mass_floor": floor,
        "live_gradient_mass_purity": live,
        "purity_above_floor": (live - floor) / (1 - floor) if 0 < floor < 1 else 0.0,
        "structure_purity": sum(counts[:, e].max() for e in range(E)) / counts.sum(),
        "structure_purity_floor": max(sum(row) for row in counts) / counts.sum(),
        "nmi": 0.0 if trivial else normalized_mutual_info_score(by, to),
        "ari": 0.0 if trivial else adjusted_rand_score(by, to),
        "entropy": entropy,
        "normalized_entropy": entropy / math.log(E) if E > 1 else 0.0,
        "intra_expert_coherence": sum(intra) / len(intra),
        "inter_expert_similarity": inter,
        "task_cosine": np.mean([cosine(whole[i], whole[j]) for i, j in pairs]) if pairs else 0.0,
        "observed_cosine": np.mean([cosine(observed[i], observed[j]) for i, j in pairs]) if pairs else 0.0,
        "task_conflict": np.mean([float(whole[i] @ whole[j] < 0) for i, j in pairs]) if pairs else 0.0,
        "load_by_task": by_task,
        "counts": {t.name: row for t, row in zip(tasks, counts, strict=True)},
        "gradient_norms": {t.name: row for t, row in zip(tasks, norms, strict=True)},
        "task_cosines": {t.name: [cosine(a, b) for b in whole] for t, a in zip(tasks, whole, strict=True)},
        "gradient_grams": [[[g[i, e] @ g[j, e] for j in range(T)] for i in range(T)] for e in range(E)],
    }
    return {"accuracy": {"macro": sum(accuracy.values()) / T, "tasks": accuracy}, "routing": routing}


def assert_sections(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert found["accuracy"]["tasks"] == pytest.approx(expected["accuracy"]["tasks"])
    assert found["accuracy"]["macro"] == pytest.approx(expected["accuracy"]["macro"])
    assert found["routing"].keys() == expected["routing"].keys()
    for key, value in expected["routing"].items():
        mine = found["routing"][key]
        if isinstance(value, dict):
            assert mine.keys() == value.keys(), key
            for name in value:
                np.testing.assert_allclose(mine[name], value[name], tolerance, tolerance, err_msg=key)
        else:
            np.testing.assert_allclose(mine, value, tolerance, tolerance, err_msg=key)


# --------------------------------------------------------------------------------------------------
# Agreement
# --------------------------------------------------------------------------------------------------


def measure(model: MultiTaskModel, mixture: Mixture, **options: Any) -> dict[str, Any]:
    chosen = EvaluationConfig(**{"probe_examples": PROBE, "batch_tokens": 40, **options})
    return evaluate(model, mixture, options=chosen, cache=UNCACHED)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("site", SITES)
def test_agrees_with_the_twin(directory: str, site: str, top_k: int) -> None:
    mixture = make_mixture("first", "second", "third")
    model = model_for(directory, mixture, site=site, count=4, top_k=top_k, dropout=0.3)
    expected = expected_sections(model, mixture, PROBE)
    assert np.ptp(expected["routing"]["load"]) > 0.05  # routing that a swapped axis or task would change
    assert_sections(measure(model, mixture), expected, 1e-9)


@pytest.mark.parametrize("site", SITES)
def test_one_task_one_expert_and_a_dead_one(directory: str, site: str) -> None:
    alone = make_mixture("second")
    model = model_for(directory, alone, site=site, count=3, top_k=2)
    assert_sections(measure(model, alone), expected_sections(model, alone, PROBE), 1e-9)

    both = make_mixture("first", "second")
    single = model_for(directory, both, site=site, count=1, top_k=1)
    found = measure(single, both)
    assert_sections(found, expected_sections(single, both, PROBE), 1e-9)
    assert (found["routing"]["load"], found["routing"]["normalized_entropy"]) == ([1.0], 0.0)

    dead = model_for(directory, both, site=site, count=3, top_k=1)
    with torch.no_grad():
        dead.bank.router.bias[1] = -1e3
    found = measure(dead, both)
    assert_sections(found, expected_sections(dead, both, PROBE), 1e-9)
    assert found["routing"]["load"][1] == 0
    assert found["routing"]["gradient_norms"]["first"][1] == 0
    assert found["routing"]["gradient_mass_purity"] < 2 / 3  # the dead expert stays in the mean as 0


def test_trainable_backbone_float32_and_the_task_metrics(directory: str) -> None:
    mixture = make_mixture("first", "second")
    model = model_for(directory, mixture, site="full_ffn", trainable=True, dtype="float32")
    found = measure(model, mixture)
    twin = model_for(directory, mixture, site="full_ffn", trainable=True, dtype="float64")
    twin.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    assert_sections(found, expected_sections(twin.eval(), mixture, PROBE), 2e-4)
    slow = ModelTwin(twin)
    answers = [measured(slow, mixture.tasks[0], n).answer for n in range(SIZES["first"])]
    labels = mixture.tasks[0].validation.labels
    assert found["accuracy"]["extra"] == {
        "first_f1": gar.metrics.f1(answers, labels),
        "first_mcc": gar.metrics.matthews_correlation(answers, labels),
    }


@pytest.mark.parametrize(("examples", "taken"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 11), (1000, 11)])
def test_probe_stops_between_whole_batches(directory: str, examples: int, taken: int) -> None:
    mixture = make_mixture("first")
    model = model_for(directory, mixture)
    norms = measure(model, mixture, probe_examples=examples)["routing"]["gradient_norms"]
    split = mixture.tasks[0].validation.select(range(taken))
    shorter = Mixture("tiny", (Task("first", LABELS["first"], split, split),), 4, 3)
    assert norms == measure(model, shorter, probe_examples=1000)["routing"]["gradient_norms"]


def test_the_third_logit_of_a_binary_task_counts_as_wrong(directory: str) -> None:
    """The specification's argmax is over the whole shared head, where ``predict`` answers with a label."""
    mixture = make_mixture("first", "second")
    model = model_for(directory, mixture, site="lora_head")
    before = measure(model, mixture)["accuracy"]["tasks"]["first"]
    assert before > 0
    split = mixture.tasks[0].validation
    answers = model.predict("first", split.texts)
    assert (
        np.mean([LABELS["first"].index(a.label) == y for a, y in zip(answers, split.labels, strict=True)]) > 0
    )
    with torch.no_grad():
        model.bank.router.weight.zero_()  # the raised logit must decide alone
        model.get_parameter("head.base.bias")[2] += 200
    found = measure(model, mixture)["accuracy"]
    assert found["tasks"]["first"] == 0
    assert found["extra"]["first_f1"] == 0
    assert {answer.label for answer in model.predict("first", split.texts)} <= {*LABELS["first"]}
    assert found["tasks"]["second"] == np.mean(mixture.tasks[1].validation.labels == 2)


def test_batches_of_the_forward_do_not_matter(directory: str) -> None:
    mixture = make_mixture("first", "second")
    model = model_for(directory, mixture)
    small, large = (measure(model, mixture, batch_tokens=tokens) for tokens in (1, 10_000))
    assert_sections(small, large, 1e-12)


@pytest.mark.parametrize("tokens", [0, 12, 30, 1000])
def test_batches_of_the_probe_go_together_as_long_as_they_fit(tokens: int) -> None:
    rng = np.random.default_rng(0)
    batches = [rng.integers(1, 9, rng.integers(1, 4)) for _ in range(20)]
    spans = list(_together(batches, tokens))
    assert [i for first, stop in spans for i in range(first, stop)] == list(range(20))

    def padded(first: int, stop: int) -> int:
        lengths = np.concatenate(batches[first:stop])
        return len(lengths) * int(lengths.max())

    assert all(stop - first == 1 or padded(first, stop) <= tokens for first, stop in spans)
    assert all(padded(first, stop + 1) > tokens for first, stop in spans if stop < 20)


def test_gram_matrices_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [torch.randn(3, 10, dtype=torch.float64) for _ in range(2)]
    monkeypatch.setattr("gar.evaluation.measure.BLOCK", 4)
    probe = _grams(gradients)
    stacked = torch.stack(gradients)
    np.testing.assert_allclose(probe.norms, stacked.norm(dim=-1), 1e-12)
    np.testing.assert_allclose(probe.by_expert[1], stacked[:, 1] @ stacked[:, 1].T, 1e-12)
    np.testing.assert_allclose(probe.between, stacked.mean(0) @ stacked.mean(0).T, 1e-12)


# --------------------------------------------------------------------------------------------------
# It only looks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("site", "trainable"), [("lora_ffn", False), ("full_ffn", True), ("lora_head", True)]
)
def test_leaves_no_trace(directory: str, site: str, trainable: bool, training: bool) -> None:
    mixture = make_mixture("first", "second")
    model = model_for(directory, mixture, site=site, trainable=trainable).train(training)
    for parameter in model.trainable_parameters()[::2]:
        parameter.grad = torch.full_like(parameter, 0.5)
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random, numpy_random = torch.get_rng_state(), np.random.get_state(legacy=True)[1].copy()
    measure(model, mixture)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert (np.random.get_state(legacy=True)[1] == numpy_random).all()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for i, parameter in enumerate(model.trainable_parameters()):
        assert (parameter.grad is None) if i % 2 else bool((parameter.grad == 0.5).all())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


@pytest.mark.parametrize("method", ["baseline", "gar"])
@pytest.mark.parametrize(
    ("site", "trainable"), [("lora_ffn", False), ("full_ffn", True), ("lora_head", True)]
)
def test_evaluating_between_updates_changes_nothing(
    directory: str, site: str, trainable: bool, method: str, tmp_path: Any
) -> None:
    mixture = make_mixture("first", "second")
    weights, losses = [], []
    for every in (0, 1):
        tree = {"method": {"name": method}, "optimizer": {"updates": 4, "learning_rate": 0.01}, "seed": 3}
        config = build({**tree, "evaluation": {"every": every}, "cache": {"enabled": False}})
        model = model_for(directory, mixture, site=site, trainable=trainable, dropout=0.2, dtype="float32")
        torch.manual_seed(11)
        history = History(tmp_path / f"{every}.jsonl")
        fit(model, mixture, config, history=history)
        weights.append(model.state_dict())
        losses.append([line for line in read_lines(tmp_path / f"{every}.jsonl") if "loss" in line])
    assert losses[0] == losses[1]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_trajectories_hold_a_panel_a_metric(directory: str, tmp_path: Any) -> None:
    from gar.metrics.catalogue import listed
    from gar.report import figures

    mixture = make_mixture("first", "second")
    for seed in (0, 1):
        model = model_for(directory, mixture, dtype="float32")
        options: dict[str, Any] = {"evaluation": {"every": 2}, "cache": {"enabled": False}, "seed": seed}
        gar.train(model, mixture, gar.methods.Baseline(), updates=6, out=tmp_path / f"{seed}", **options)
    results = gar.results(tmp_path)
    table = results.histories
    assert sorted(table["update"]) == [2, 2, 4, 4, 6, 6]
    assert np.isfinite(table[list(listed())].to_numpy(float)).all()
    panels = figures.trajectories(results)
    assert sum(bool(axes.lines) for axes in panels.axes) == 5  # the loss, and four of the catalogue
    every = figures.trajectories(results, metrics=list(listed()))
    assert sum(bool(axes.lines) for axes in every.axes) == len(listed())
    with pytest.raises(gar.UserError, match="did you mean 'nmi'"):
        figures.trajectories(results, metrics=["nmj"])


# --------------------------------------------------------------------------------------------------
# Refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("site", SITES)
def test_a_diverged_model_is_said_to_be_one(directory: str, site: str, value: float) -> None:
    mixture = make_mixture("first", "second")
    model = model_for(directory, mixture, site=site)
    with torch.no_grad():
        model.bank.router.weight.fill_(value)
    with pytest.raises(EvaluationFailure, match="task first are not finite: the model has diverged"):
        measure(model, mixture)


def test_gradients_that_overflow_are_said(directory: str) -> None:
    mixture = make_mixture("first")
    model = model_for(directory, mixture, dtype="float32")
    with torch.no_grad():
        model.bank.experts.A.mul_(1e30)
        model.bank.experts.B.mul_(1e-32)
        model.heads["task_first"].weight.mul_(1e12)
    with pytest.raises(EvaluationFailure, match="expert gradients of task first are not finite"):
        measure(model, mixture)


def test_a_task_without_a_head_is_refused(directory: str) -> None:
    model = model_for(directory, make_mixture("first"))
    with pytest.raises(UserError, match="task: unknown name 'third'"):
        measure(model, make_mixture("first", "third"))


def test_may_be_the_first_import() -> None:
    subprocess.run(
        [sys.executable, "-c", "import gar.evaluation.diagnosis"], check=True
    )  # evaluation first, then training
