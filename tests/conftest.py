"""Every test starts from the same random state, and draws the same examples every time."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from support import tiny_runs
from support.ranks import Pool, pool

# A shell starts background jobs with SIGINT ignored; tests of interruption expect it as in a terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A failing example must not come and go between runs, nor a slow machine fail a test.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

#: Modules that compare floating-point results, and so run with other threads and instruction sets as well.
NUMERICS = {
    "test_backbones", "test_batches", "test_cache", "test_diagnose", "test_evaluation", "test_methods",
    "test_metrics_association", "test_metrics_gradient", "test_metrics_load", "test_metrics_statistics",
    "test_model", "test_nn", "test_objective", "test_observation", "test_oracles", "test_reproducibility",
    "test_routing", "test_runs", "test_sweep", "test_theory", "test_training", "test_whole_gradients",
}  # fmt: skip


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m numerics`` no module without such a test is imported."""
    if config.option.markexpr != "numerics" or collection_path.suffix != ".py":
        return None
    has = collection_path.stem in NUMERICS or "mark.numerics" in collection_path.read_text(encoding="utf-8")
    return None if has else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        module = getattr(item, "module", None)
        if module is not None and module.__name__.rpartition(".")[2] in NUMERICS:
            item.add_marker(pytest.mark.numerics)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny backbone and the files of two tasks."""
    return tiny_runs.make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with pool(3) as found:
        yield found
