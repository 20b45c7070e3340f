"""A sweep on a Ray cluster of two nodes, one of which is lost on the way. Needs the extra [ray]."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gar.errors import UserError
from gar.runs.files import read_json
from gar.runs.names import RESULT
from gar.sweeps.executors import Event, RayExecutor
from gar.sweeps.sweep import make_plan, read_status, run_sweep
from support.sweeps import quiet, tiny_suite

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")


@pytest.mark.skipif(HAS_RAY, reason="ray is installed")
def test_without_ray_the_error_names_the_extra() -> None:
    with pytest.raises(UserError, match=r"pip install 'gradient-aligned-routing\[ray\]'"):
        RayExecutor()


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
def test_a_lost_node_costs_no_run(cluster: Any, tmp_path: Path) -> None:
    second = cluster.add_node(num_cpus=1, object_store_memory=10**8)
    cluster.wait_for_nodes()
    suite = tiny_suite(updates=1500, methods=["baseline", "gar"], seeds=3)
    executor = LosesANode(cluster, second)
    assert executor.free == 2
    outcome = run_sweep(make_plan(suite, tmp_path), executor, view=quiet(), keep_models=False)
    executor.close()
    assert executor.lost_while_busy == 2
    assert (outcome.finished, outcome.failed, outcome.exit_code) == (6, 0, 0)
    deadline = time.monotonic() + 60
    while executor.free != 1:  # the cluster notices the loss by missing heartbeats
        assert time.monotonic() < deadline
        time.sleep(0.5)
    for run in suite.runs():
        result = read_json(tmp_path / run.id / RESULT)
        assert result is not None
        assert (result["method"], result["seed"], result["updates"]) == (
            run.tree()["method"]["name"],
            run.seed,
            1500,
        )
        assert len((tmp_path / run.id / "history.jsonl").read_text().splitlines()) == 1500
        assert not (tmp_path / run.id / "model").exists()
    assert make_plan(suite, tmp_path).remaining == 0


@needs_ray
@pytest.mark.filterwarnings("ignore")
def test_a_failure_comes_back_with_its_reason(cluster: Any, tmp_path: Path) -> None:
    suite = tiny_suite(set={"optimizer.learning_rate": 1e30, "optimizer.clip": 1e30, "optimizer.updates": 20})
    outcome = run_sweep(make_plan(suite, tmp_path), RayExecutor(), view=quiet())
    assert (outcome.finished, outcome.failed, outcome.exit_code) == (0, 1, 1)
    (reason,) = read_status(tmp_path).failures.values()
    assert "update" in reason


class LosesANode(RayExecutor):
    """Takes one node away, without a goodbye, when the first run has finished and both nodes are at work."""

    def __init__(self, cluster: Any, node: Any) -> None:
        super().__init__()
        self.cluster, self.node, self.lost_while_busy = cluster, node, 0

    def events(self, timeout: float) -> list[Event]:
        found = super().events(timeout)
        if self.node is not None and self.seen_finished and self.busy == 2:
            self.lost_while_busy = self.busy
            self.cluster.remove_node(self.node, allow_graceful=False)
            self.node = None
        self.seen_finished = self.seen_finished or any(event.kind == "finished" for event in found)
        return found

    seen_finished = False
