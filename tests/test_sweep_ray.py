"""Sweeps on Ray: against a stand-in for ray, and on a cluster of two nodes of which one is lost on the way.

The cluster needs the extra [ray].
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gar.config import build
from gar.errors import UserError
from gar.runs import State, state_of
from gar.runs.directory import checkpoints
from gar.runs.files import read_json
from gar.runs.names import CHECKPOINTS, DIAGNOSTICS, ENVIRONMENT, FAILURE, HISTORY, MODEL, RESULT
from gar.sweeps import _worker, store
from gar.sweeps.executors import Event
from gar.sweeps.ray import RayExecutor
from gar.sweeps.suite import Suite, load_suite
from gar.sweeps.sweep import make_plan, read_status, run_sweep
from gar.training import train_from_config
from support.fake_ray import FakeRay
from support.sweeps import directories, own_method, quiet, tiny_base, tiny_suite
from support.waiting import until

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")


@pytest.mark.skipif(HAS_RAY, reason="ray is installed")
def test_without_ray_the_error_names_the_extra() -> None:
    with pytest.raises(UserError, match=r"pip install 'gradient-aligned-routing\[ray\]'"):
        RayExecutor()


# ---------------------------------------------------------------------- a stand-in


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Every checkpoint is sent as soon as the next update is done."""
    found = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", found)
    monkeypatch.setattr(_worker, "PACE", 0.0)
    monkeypatch.setattr(_worker, "SHIPPING", 1e9)
    return found


def suite_of_one() -> Suite:
    return tiny_suite(8, set={"checkpoint.every": 2, "threads": 1})


def same_as_alone(suite: Suite, out: Path, alone: Path) -> None:
    (directory,) = directories(suite, out)
    expected = train_from_config(build(next(suite.runs()).tree()), alone)
    result = read_json(directory / RESULT)
    assert result is not None
    assert result["accuracy"] == expected["accuracy"]
    assert (directory / HISTORY).read_text() == (alone / HISTORY).read_text()
    assert (directory / DIAGNOSTICS).is_file()
    assert not (directory / CHECKPOINTS).exists()


def test_a_lost_run_goes_on_from_its_last_checkpoint_and_says_so(ray: FakeRay, tmp_path: Path) -> None:
    suite, out = suite_of_one(), tmp_path / "out"
    name = next(suite.runs()).id
    ray.lose = {(name, 0): 1, (name, 1): 1}
    events: list[Event] = []

    class Noted(RayExecutor):
        def events(self, timeout: float) -> list[Event]:
            events.extend(found := super().events(timeout))
            return found

    with Noted(jobs=1) as executor:
        outcome = run_sweep(make_plan(suite, out), executor, view=quiet())
    assert (outcome.finished, outcome.failed) == (1, 0)
    lost = [event.facts["checkpoint"] for event in events if event.kind == "lost"]
    assert lost == ["checkpoints/00000002", "checkpoints/00000004"]
    starts = [arguments[1] is not None for arguments in ray.submitted]
    assert starts == [False, True, True]  # with a checkpoint or not
    assert {"progress", "finished"} <= {event.kind for event in events}
    assert all(options.get("max_retries", 0) == 0 for options in ray.options)
    record = read_json(out / name / store.RECORD)
    assert record is not None
    assert record["attempts"] == 3
    assert record["seconds"] > max(event.facts.get("seconds", 0.0) for event in events)
    assert len((read_json(out / name / ENVIRONMENT) or {})["resumed"]) == 2
    assert (out / name / MODEL).is_dir()
    same_as_alone(suite, out, tmp_path / "alone")


def test_too_many_losses_are_a_failure_that_can_be_retried(ray: FakeRay, tmp_path: Path) -> None:
    suite, out = suite_of_one(), tmp_path / "out"
    name = next(suite.runs()).id
    ray.lose = {(name, 0): 1, (name, 1): 1}
    outcome = run_sweep(make_plan(suite, out), RayExecutor(jobs=1, retries=1), view=quiet())
    assert (outcome.finished, outcome.failed) == (0, 1)
    assert read_json(out / name / FAILURE) == {
        "error": "NodeDiedError",
        "reason": "its node died",
        "update": None,
        "checkpoint": "checkpoints/00000004",
    }
    ray.lose.clear()
    plan = make_plan(suite, out, retry_failed=True)
    assert run_sweep(plan, RayExecutor(jobs=1), view=quiet()).finished == 1
    assert not (out / name / FAILURE).exists()
    same_as_alone(suite, out, tmp_path / "alone")


def test_an_interrupted_sweep_goes_on_from_its_checkpoints(ray: FakeRay, tmp_path: Path) -> None:
    suite, out = suite_of_one(), tmp_path / "out"
    name = next(suite.runs()).id
    ray.interrupt = {(name, 0): 2}
    stopping = lambda: bool(ray.checkpoints)  # noqa: E731
    outcome = run_sweep(make_plan(suite, out), RayExecutor(jobs=1), view=quiet(), stopping=stopping)
    assert outcome.exit_code == 130
    assert state_of(out / name) is State.UNFINISHED
    (kept,) = checkpoints(out / name / CHECKPOINTS)
    assert int(kept.name) >= 4
    ray.interrupt.clear()
    assert run_sweep(make_plan(suite, out), RayExecutor(jobs=1), view=quiet()).finished == 1
    assert ray.submitted[-1][1] is not None
    same_as_alone(suite, out, tmp_path / "alone")


def test_a_failure_keeps_its_update(ray: FakeRay, tmp_path: Path) -> None:
    wild = {"optimizer.learning_rate": 1e30, "optimizer.clip": 1e30, "optimizer.updates": 20}
    suite = tiny_suite(set=wild)
    outcome = run_sweep(make_plan(suite, tmp_path), RayExecutor(jobs=1), view=quiet())
    (directory,) = directories(suite, tmp_path)
    assert outcome.failed == 1
    assert (read_json(directory / FAILURE) or {})["update"] >= 1


def test_plugins_travel_as_text_or_as_packages(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text(own_method(monkeypatch, "beside"))
    (tmp_path / "modules" / "gar_test_package").mkdir(parents=True)
    (tmp_path / "modules" / "gar_test_package" / "__init__.py").write_text("")
    (tmp_path / "modules" / "gar_test_module.py").write_text(own_method(monkeypatch, "single"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    names = ["beside", "gar_test_package", "gar_test_module"]
    tree = {"settings": {"own": {**tiny_base(), "plugins": names}}, "methods": ["beside"]}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(tree))
    suite = load_suite(tmp_path / "s.yaml")
    outcome = run_sweep(make_plan(suite, tmp_path / "out"), RayExecutor(jobs=1), view=quiet())
    assert outcome.finished == 1, read_status(tmp_path / "out").failures
    sent = ray.submitted[0][2]
    assert set(sent) == {str(tmp_path / "beside.py"), "gar_test_module"}
    assert "class Own" in sent["gar_test_module"]
    assert ray.options[-1]["runtime_env"]["py_modules"] == [str(tmp_path / "modules" / "gar_test_package")]
    assert set(ray.options[-1]["runtime_env"]["env_vars"]) >= {"OMP_NUM_THREADS"}


# ---------------------------------------------------------------------- a cluster


@pytest.fixture
def cluster() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 10**8})
    ray.init(address=found.address, log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


@needs_ray
@pytest.mark.filterwarnings("ignore")
def test_a_lost_node_costs_no_run(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = cluster.add_node(num_cpus=1, object_store_memory=10**8)
    cluster.wait_for_nodes()
    gone = tmp_path / "gone"
    (tmp_path / "beside.py").write_text(own_method(monkeypatch, "beside") + waits_for(gone))
    base = {**tiny_base(100), "checkpoint": {"every": 2, "pause": 0.0}, "plugins": ["beside"]}
    tree = {"settings": {"own": base}, "methods": ["baseline", "beside"], "seeds": 3}
    (tmp_path / "s.yaml").write_text(json.dumps(tree))
    suite, out = load_suite(tmp_path / "s.yaml"), tmp_path / "out"
    executor = LosesANode(cluster, second, gone)
    assert executor.free == 2
    outcome = run_sweep(make_plan(suite, out), executor, view=quiet(), keep_models=False)
    executor.close()
    assert executor.lost_while_busy == 2
    assert (outcome.finished, outcome.failed, outcome.exit_code) == (6, 0, 0)
    until(lambda: executor.free == 1)  # the cluster notices the loss by missing heartbeats
    attempts = []
    for run in suite.runs():
        result = read_json(out / run.id / RESULT)
        assert result is not None
        assert (result["method"], result["seed"], result["updates"]) == (
            run.tree()["method"]["name"],
            run.seed,
            100,
        )
        assert len((out / run.id / "history.jsonl").read_text().splitlines()) == 100
        assert (out / run.id / DIAGNOSTICS).is_file()
        assert not (out / run.id / MODEL).exists()
        assert not (out / run.id / CHECKPOINTS).exists()
        attempts.append((read_json(out / run.id / store.RECORD) or {})["attempts"])
    assert sorted(attempts) == [1, 1, 1, 1, 1, 2]
    (lost,) = executor.losses
    assert lost.facts["checkpoint"].startswith("checkpoints/0")
    assert make_plan(suite, out).remaining == 0


@needs_ray
@pytest.mark.filterwarnings("ignore")
def test_a_failure_comes_back_with_its_reason(cluster: Any, tmp_path: Path) -> None:
    suite = tiny_suite(set={"optimizer.learning_rate": 1e30, "optimizer.clip": 1e30, "optimizer.updates": 20})
    outcome = run_sweep(make_plan(suite, tmp_path), RayExecutor(), view=quiet())
    assert (outcome.finished, outcome.failed, outcome.exit_code) == (0, 1, 1)
    (reason,) = read_status(tmp_path).failures.values()
    assert "update" in reason


@needs_ray
@pytest.mark.filterwarnings("ignore")
def test_stopping_brings_the_checkpoints_home(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text(own_method(monkeypatch, "beside"))
    base = {**tiny_base(100_000), "plugins": ["beside"]}
    (tmp_path / "s.yaml").write_text(json.dumps({"settings": {"own": base}, "methods": ["beside"]}))
    suite, out = load_suite(tmp_path / "s.yaml"), tmp_path / "out"
    seen: list[str] = []

    class Noted(RayExecutor):
        def events(self, timeout: float) -> list[Event]:
            found = super().events(timeout)
            seen.extend(event.facts.get("stage", event.kind) for event in found)
            return found

    executor = Noted()
    plan = make_plan(suite, out)
    outcome = run_sweep(plan, executor, view=quiet(), stopping=lambda: "update" in seen)
    executor.close()
    assert outcome.exit_code == 130
    assert seen[-1] == "interrupted"
    (directory,) = directories(suite, out)
    assert state_of(directory) is State.UNFINISHED
    (kept,) = checkpoints(directory / CHECKPOINTS)
    assert int(kept.name) > 0


def waits_for(gone: Path) -> str:
    """Hooks of a method that stays in its fifth update until the file is there.

    The ones before are long enough for what they tell, and their checkpoint, to be sent.
    """
    return f"""
    def initial_state(self, model):
        import torch
        return {{"updates": torch.zeros((), dtype=torch.int64)}}

    def after_step(self, update):
        import pathlib, time
        update.state["updates"] += 1
        while not pathlib.Path({str(gone)!r}).exists():
            time.sleep(1.0)
            if update.state["updates"] < 5:
                break
"""


class LosesANode(RayExecutor):
    """Takes one node away, without a goodbye, once both nodes are in a run that waits for the file ``gone``.

    Of each of them a checkpoint has arrived, and neither can have ended, however late its news come here.
    """

    def __init__(self, cluster: Any, node: Any, gone: Path) -> None:
        super().__init__()
        self.cluster, self.node, self.gone, self.lost_while_busy = cluster, node, gone, 0
        self.losses: list[Event] = []

    def events(self, timeout: float) -> list[Event]:
        found = super().events(timeout)
        self.losses += [event for event in found if event.kind == "lost"]
        running = [attempt.job for attempt in self._running.values()]
        waiting = [job for job in running if job.config["method"]["name"] == "beside"]
        if self.node is not None and sum(bool(checkpoints(job.out / CHECKPOINTS)) for job in waiting) == 2:
            self.lost_while_busy = self.busy
            self.cluster.remove_node(self.node, allow_graceful=False)
            self.gone.touch()
            self.node = None
        return found
