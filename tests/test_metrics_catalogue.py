"""The one catalogue of metrics: bounds, result.json, and a metric of one's own in every table and figure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import gar
from gar.cli.app import run as gar_command
from gar.errors import UserError
from gar.methods import REGISTRY
from gar.metrics import METRICS, OBJECTIVES, Measured, Metric, register, summarize
from gar.metrics.catalogue import listed
from gar.presets import paper
from gar.report import figures, write
from gar.report.results import load
from support.made_up_runs import write_run
from support.pages import read
from support.tiny_runs import make_world, tree

#: The numbers of result.json's routing section, in its order.
NUMBERS = [
    "load_variance", "utilization", "effective_experts", "gradient_mass_purity", "gradient_mass_floor",
    "live_gradient_mass_purity", "purity_above_floor", "structure_purity", "structure_purity_floor", "nmi",
    "ari", "entropy", "normalized_entropy", "intra_expert_coherence", "inter_expert_similarity",
    "task_cosine", "observed_cosine", "task_conflict",
]  # fmt: skip
PLUGIN = """
from typing import ClassVar

from gar.methods import Method
from gar.methods import register as register_method
from gar.metrics import Metric, register


def top_share(measured):
    return float(measured.load.max())


register(Metric("top_share", "largest load", top_share, better=-1, bounds=(0, 1), meaning="up to {high:.0f}"))


@register_method
class Mine(Method):
    name: ClassVar[str] = "mine"
    label: ClassVar[str] = "My method"
    style: ClassVar[tuple[str, str]] = ("#123456", "d")
"""


@pytest.fixture
def restored() -> Iterator[None]:
    """What a test registers is gone after it."""
    metrics, methods = dict(METRICS), dict(REGISTRY)
    yield
    METRICS.clear()
    METRICS.update(metrics)
    REGISTRY.clear()
    REGISTRY.update(methods)


def measured(seed: int, tasks: int, experts: int, examples: int = 5) -> Measured:
    rng = np.random.default_rng(seed)
    gates = rng.dirichlet(np.full(experts, 0.5), examples)
    gradients = rng.normal(size=(tasks, experts, 3)) * rng.integers(0, 2, (tasks, experts, 1))
    means = gradients.mean(0)
    return Measured(
        load=gates.mean(0),
        counts=rng.integers(0, 4, (tasks, experts)),
        gates=gates,
        norms=np.linalg.norm(gradients, axis=2),
        by_expert=np.einsum("ted,sed->ets", gradients, gradients),
        between=means @ means.T,
        observed=gradients.sum(1) @ gradients.sum(1).T,
    )


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5))
def test_every_value_lies_in_its_bounds(seed: int, tasks: int, experts: int) -> None:
    values = summarize(measured(seed, tasks, experts))
    assert list(values) == NUMBERS
    for name, value in values.items():
        low, high = METRICS[name].range(tasks, experts)
        assert low - 1e-12 <= value <= high + 1e-12, name


def test_bounds_are_reached() -> None:
    assert METRICS["load_variance"].range(2, 4) == (0, gar.metrics.load_variance([1, 0, 0, 0]))
    assert METRICS["entropy"].range(2, 4)[1] == pytest.approx(gar.metrics.routing_entropy([[0.25] * 4]))
    opposite = [[[1.0]], [[-1.0]]]  # [T, E, d]
    assert METRICS["intra_expert_coherence"].range(2, 1)[0] == gar.metrics.intra_expert_coherence(opposite)


def test_columns_of_the_papers_tables() -> None:
    for metric in METRICS.values():
        if metric.paper == "norm_routing_entropy":  # the table of the paper's metrics names what is divided
            assert paper.METRICS[metric.paper] == "routing.entropy"
        elif metric.paper:
            assert paper.METRICS[metric.paper] == ".".join(metric.path)
    assert {METRICS[name].paper for name in OBJECTIVES.values()} == {"acc", "purity", "util", "lvar"}


@pytest.mark.parametrize("value", [None, "high", True, [0.5], math.nan])
def test_what_is_no_number_reads_and_shows_as_a_dash(value: object) -> None:
    metric = METRICS["nmi"]
    assert metric.text(metric.read({"routing": {"nmi": value}})) == "–"
    assert metric.text(metric.read({"routing": None})) == "–"


def test_text_has_sign_scale_and_no_negative_zero() -> None:
    accuracy = METRICS["accuracy"]
    assert [accuracy.text(v) for v in (0.61, -0.00001, math.nan)] == ["61.00", "0.00", "–"]
    assert accuracy.text(-0.0123, sign=True) == "−1.23"


def test_an_interval_s_end_keeps_its_side_of_zero() -> None:
    """The number printed is on the side of the number meant, to within half a unit of its last digit."""
    recovery, accuracy = METRICS["recovery"], METRICS["accuracy"]
    for metric in (recovery, accuracy):
        for exponent in range(-8, 1):
            for first in (1.0, 2.6, 4.999, 5.0, 9.6, 9.999):
                for value in (first * 10.0**exponent, -first * 10.0**exponent):
                    shown = metric.bound(value, sign=True)
                    digits = len(shown.partition(".")[2])
                    number = float(shown.replace("−", "-"))
                    assert number * value > 0, (metric.name, value, shown)
                    assert shown[0] == "−+"[value > 0]
                    assert number == pytest.approx(metric.scale * value, abs=0.5001 * 10.0**-digits)
                    if round(metric.scale * value, metric.digits):
                        assert shown == metric.text(value, sign=True)
    assert [recovery.bound(v, True) for v in (0.0, -0.0, 1e-10, -1e-17, math.nan)] == ["+0.000"] * 4 + ["–"]
    assert [recovery.bound(v) for v in (0.00026, -0.00026, 0.0)] == ["0.0003", "−0.0003", "0.000"]


def test_an_older_result_tells_its_normalized_entropy() -> None:
    metric = METRICS["normalized_entropy"]
    assert metric.read({"routing": {"entropy": 1.0, "load": [0.25] * 4}}) == 1 / math.log(4)
    assert metric.read({"routing": {"entropy": 0.0, "load": [1.0]}}) == 0.0
    assert math.isnan(metric.read({"routing": {"entropy": 1.0}}))


@pytest.mark.parametrize("name", ["nmi", "load", "gradient_norms", "accuracy", "a b", ""])
def test_names_of_the_package_are_refused(name: str) -> None:
    before = dict(METRICS)
    with pytest.raises(ValueError, match="expected one of its own"):
        register(Metric(name, "mine", lambda m: 0.0))
    assert before == METRICS


def test_a_computed_metric_has_its_place() -> None:
    with pytest.raises(ValueError, match="top: what is computed is written under routing"):
        Metric("top", "top", lambda m: 0.0, where="accuracy.extra.top")


@pytest.mark.usefixtures("restored")
def test_a_value_that_is_not_finite_is_left_out_and_said() -> None:
    register(Metric("broken", "broken", lambda m: math.nan))
    with pytest.warns(UserWarning, match="metric broken is nan; it is left out of the result"):
        assert list(summarize(measured(0, 2, 3))) == NUMBERS


@pytest.mark.usefixtures("restored")
def test_a_metric_and_a_method_of_ones_own_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    world = make_world(tmp_path / "world")
    plugin = tmp_path / "my_plugin.py"
    plugin.write_text(PLUGIN, encoding="utf-8")
    for method in ("baseline", "mine"):
        own = tree(world, method__name=method, evaluation__every=2, plugins=[str(plugin)])
        (tmp_path / f"{method}.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
        assert (
            gar_command(["train", str(tmp_path / f"{method}.yaml"), "--out", str(tmp_path / "runs" / method)])
            == 0
        )
    path = tmp_path / "runs" / "mine" / "result.json"
    routing = json.loads(path.read_text())["routing"]
    assert routing["top_share"] == max(routing["load"])
    assert [key for key in routing if key in (*NUMBERS, "top_share")] == [*NUMBERS, "top_share"]

    capsys.readouterr()
    assert gar_command(["diagnose", str(path.parent), "--device", "cpu"]) == 0
    assert f"largest load {routing['top_share']:.4f} up to 1" in " ".join(capsys.readouterr().out.split())

    # A run from before the metric: no value, a dash, and it is in no trajectory of its own.
    older = tmp_path / "runs" / "mine-older"
    own = tree(world, method__name="mine", evaluation__every=2, plugins=[str(plugin)], experts__count=2)
    monkeypatch.delitem(METRICS, "top_share")
    (tmp_path / "older.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
    assert gar_command(["train", str(tmp_path / "older.yaml"), "--out", str(older)]) == 0
    monkeypatch.undo()
    assert "top_share" in METRICS

    results = load(tmp_path / "runs")
    files = write(results, tmp_path / "report")
    tables = read(files["report.html"].read_text(encoding="utf-8")).tables
    shown: dict[tuple[int, str], str] = {}
    for number in (1, 2):
        heading, *rows = tables[f"s{number}-further"]
        shown |= {(number, row[1]): row[heading.index("largest load ↓")] for row in rows}
    assert shown.pop((1, "My method")) == "–"
    assert shown[2, "My method"] == f"{routing['top_share']:.4f}"
    assert len(shown) == 2
    assert "s2-paired-top_share" in tables
    assert "s1-paired-top_share" not in tables
    new, old = results.settings[1], results.settings[0]
    panels = figures.trajectories(results, new).axes
    titles = [axes.get_title(loc="left") for axes in panels]
    assert "largest load (↓ better)" in titles
    assert {line.get_color() for line in panels[0].lines} == {"#123456", "#1b1f24"}
    assert "largest load (↓ better)" not in [
        a.get_title(loc="left") for a in figures.trajectories(results, old).axes
    ]
    assert figures.paired_gains(results, new, "top_share").axes


@pytest.mark.usefixtures("restored")
def test_a_metric_that_reads_what_the_result_has(tmp_path: Path) -> None:
    register(Metric("first_task", "first task", where="accuracy.tasks.qnli", digits=2, scale=100, unit="%"))
    write_run(tmp_path, "gar", 1, accuracy={"qnli": 0.75, "rte": 0.5})
    assert load(tmp_path).endpoints()["first_task"].tolist() == [0.75]


#: What an older result can tell of its tables.
RECOVERED = [name for name, metric in METRICS.items() if metric.recover and name != "normalized_entropy"]


def test_an_older_result_tells_what_its_tables_hold() -> None:
    seen = measured(3, 3, 4)
    tables = {"gradient_norms": seen.norms, "counts": seen.counts}
    older = {"load": seen.load.tolist()} | {
        key: {str(t): row.tolist() for t, row in enumerate(rows)} for key, rows in tables.items()
    }
    assert len(RECOVERED) == 5
    for name in RECOVERED:
        assert METRICS[name].read({"routing": older}) == pytest.approx(summarize(seen)[name], rel=1e-12)
        assert math.isnan(METRICS[name].read({"routing": {}}))


@pytest.mark.parametrize("name", [name for name in listed() if name not in ("accuracy", *RECOVERED)])
def test_a_result_without_a_metric_is_shown_with_a_dash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for method in ("baseline", "gar"):
        path = write_run(tmp_path, method, 1, evaluations=(500,)) / "result.json"
        result = json.loads(path.read_text())
        del result["routing"][name], result["routing"]["entropy"]
        path.write_text(json.dumps(result))
    assert gar_command(["report", str(tmp_path), "--out", str(tmp_path / "report")]) == 0
    tables = read((tmp_path / "report" / "report.html").read_text(encoding="utf-8")).tables
    heading = f"{METRICS[name].label} {METRICS[name].arrow}".strip()
    (found,) = (
        table
        for key, table in tables.items()
        if key in ("s1-endpoints", "s1-further") and heading in table[0]
    )
    assert {row[found[0].index(heading)] for row in found[1:]} == {"–"}
    with pytest.raises(UserError, match="unknown metric"):
        load(tmp_path).paired("top_share")
