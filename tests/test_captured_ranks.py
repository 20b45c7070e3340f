"""Blocks of updates on several ranks against updates one by one there: on a CPU, so without graphs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gar.config import Config
from gar.distributed import Job, Ranks, exchange, sum_tensors
from gar.errors import UserError
from gar.features.sources import RawSource, make_sources
from gar.methods import REGISTRY
from gar.training import captured as captured_module
from gar.training.captured_backbone import CapturedBackbone, updates_of
from gar.training.updater import Outcome, TrainingFailure, Updater
from support import tiny_runs
from support.ranks import Pool, pool
from support.tiny_runs import largest_difference, make_config, same_bits, weights

GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs")
NAMES = ["mood", "nli"]
METHODS = (*(name for name, cls in REGISTRY.items() if cls.capturable), "gar+switchaux+loss_free")
Named = dict[str, Tensor]
#: Outcomes as numbers, weights, and bytes sent.
Trained = tuple[Tensor, Named, int]


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with pool(3) as started:
        yield started


@pytest.fixture(scope="module")
def gpus() -> Iterator[Pool]:
    with pool(2, "cpu:gloo,cuda:nccl") as started:
        yield started


def config_of(world: Path, **changes: Any) -> Config:
    fixed = {
        "backbone__trainable": True,
        "backbone__dtype": "float64",
        "experts__dropout": 0.3,
        "optimizer__learning_rate": 2.0**-9,  # a power of two: blocks keep the rate in float32
        "optimizer__warmup": 0.0,
        "optimizer__updates": 12,
        "max_tokens_per_pass": None,
    }
    return make_config(world, **fixed | changes)


def made(config: Config, ranks: Ranks | None) -> tuple[Updater, CapturedBackbone]:
    model, mixture = tiny_runs.load(config, randomized=True)
    model.to(config.device)
    source, _ = make_sources(model, mixture, config.cache)
    job = None if ranks is None else Job(ranks, Ranks(ranks.group))
    updater = Updater(model.train(), source, config, NAMES, job=job)
    for group in updater.optimizer.param_groups:  # as on a GPU, where the step can be told to change nothing
        group.update(fused=True, foreach=False)
    assert isinstance(source, RawSource)
    return updater, CapturedBackbone(updater, source, graphs=config.device == "cuda")


def flat(outcomes: Sequence[Outcome]) -> Tensor:
    rows = ([*o.losses, *o.tasks.values(), o.gradient_norm, o.learning_rate] for o in outcomes)
    return torch.tensor(list(itertools.chain(*rows)), dtype=torch.float64)


def one_by_one(ranks: Ranks | None, config: Config, count: int = 12) -> Trained:
    updater, _ = made(config, ranks)
    outcomes = list(updater.block(0, count))
    return flat(outcomes), weights(updater.model), updater.sent


def in_blocks(ranks: Ranks | None, config: Config, count: int = 12) -> Trained:
    updater, captured = made(config, ranks)
    with mock.patch.object(captured_module, "BLOCK", 5):
        outcomes = [*captured.block(0, 7), *captured.block(7, count)]
    return flat(outcomes), weights(updater.model), updater.sent


def _both(ranks: Ranks, configs: Sequence[Config]) -> list[tuple[Trained, Trained]]:
    return [(one_by_one(ranks, config), in_blocks(ranks, config)) for config in configs]


def assert_alike(found: Sequence[tuple[Trained, Trained]], alone: Trained | None = None) -> None:
    """Of every rank both ways; ``alone`` is one process."""
    (expected, plain, sent), _ = found[0]
    for _, (told, mine, sends) in found:
        torch.testing.assert_close(told, expected, rtol=1e-10, atol=1e-10)
        assert same_bits(mine, found[0][1][1])
        assert largest_difference(mine, plain) < 1e-10
        assert sends > 0
    assert found[0][1][2] == sent
    if alone is not None:
        torch.testing.assert_close(expected, alone[0], rtol=1e-8, atol=1e-8)
        assert largest_difference(plain, alone[1]) < 1e-8


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("site", ["lora_ffn", "full_ffn", "lora_head"])
def test_blocks_are_the_updates_one_by_one(workers: Pool, world: Path, site: str, count: int) -> None:
    """Every method, with the backbone's dropout and the experts', short last batches and several widths."""
    names = METHODS if (count, site) == (2, "lora_ffn") else ("gar", "cagrad")
    configs = [config_of(world, method__name=name, experts__site=site) for name in names]
    found = workers.run(count, _both, configs)
    for i in range(len(configs)):
        assert_alike([of_rank[i] for of_rank in found])


@pytest.mark.parametrize(
    ("count", "changes", "like_one"),
    [
        pytest.param(2, {"max_tokens_per_pass": 1}, True, id="a pass a group"),
        pytest.param(2, {"max_tokens_per_pass": 60}, False, id="several passes"),
        pytest.param(
            3, {"mixture__group_size": 8, "max_tokens_per_pass": 1}, True, id="ranks without groups"
        ),
        pytest.param(2, {"mixture__group_size": 1}, False, id="groups of one"),
        pytest.param(2, {"backbone__trainable": False, "cache__enabled": False}, True, id="frozen"),
        pytest.param(2, {"experts__dropout": 0.0, "observation": "per_group"}, False, id="per group"),
    ],
)
def test_shares_of_every_kind(
    workers: Pool, world: Path, count: int, changes: dict[str, Any], like_one: bool
) -> None:
    """Where the dropout of the backbone does not depend on the passes, one process does the same."""
    changes = {"method": {"name": "gar", "coefficient": 1.0}, **changes}
    config = config_of(world, **changes)
    found = workers.run(count, _both, [config])
    alone = one_by_one(None, config) if like_one else None
    assert_alike([of_rank[0] for of_rank in found], alone=alone)


def _with_a_vocabulary(ranks: Ranks, config: Config, most: int | None) -> tuple[Trained, Trained, int]:
    """The embedding counts as a vocabulary's; in blocks, and how many updates were made one by one there."""
    with mock.patch.object(exchange, "VOCABULARY", 12):
        plain = one_by_one(ranks, config)
        bound = mock.patch.object(CapturedBackbone, "_most_rows", return_value=most)
        counted = mock.patch.object(Updater, "run", autospec=True, side_effect=Updater.run)
        with nullcontext() if most is None else bound, counted as run:
            found = in_blocks(ranks, config)
    return plain, found, run.call_count


def test_rows_of_an_embedding_travel_without_being_counted(workers: Pool, world: Path) -> None:
    """As many travel as there can be; with too small a bound the update is repeated."""
    config = config_of(world, method={"name": "gar", "coefficient": 1.0})
    vocabulary = len(tiny_runs.load(config)[0].tokenizer)
    for most, repeated in ((None, 0), (vocabulary, 0), (vocabulary // 2 - 1, None), (2, 11)):
        found = workers.run(2, _with_a_vocabulary, config, most)
        for plain, (told, mine, _), runs in found:
            torch.testing.assert_close(told, plain[0], rtol=1e-10, atol=1e-10)
            assert largest_difference(mine, plain[1]) < 1e-10
            assert same_bits(mine, found[0][1][1])
            assert repeated is None or runs == 1 + repeated


def _summed(ranks: Ranks, most: int | None) -> tuple[Tensor, int]:
    x = torch.zeros(100, 3)
    x[5 + ranks.rank] = 1.0 + ranks.rank
    x[50] = 7.0
    with mock.patch.object(exchange, "VOCABULARY", 50):
        sum_tensors([x], ranks, most_rows=None if most is None else [most])
    return x, ranks.bytes


def test_most_rows(workers: Pool) -> None:
    expected = torch.zeros(100, 3)
    expected[5], expected[6], expected[50] = 1.0, 2.0, 14.0
    asked = workers.run(2, _summed, None)
    sent = [workers.run(2, _summed, most) for most in (3, 10, 60)]
    for found in (asked, *sent):
        assert all(torch.equal(x, expected) for x, _ in found)
    mask = 100
    assert [found[0][1] for found in (asked, *sent)] == [mask + 36, mask + 36, mask + 120, 1200]
    for x, _ in workers.run(2, _summed, 2):
        assert x[0].isnan().all()


class Asked(TorchDispatchMode):
    """Refuses what would wait for a GPU, or bring something to it: neither can be captured."""

    REFUSED = frozenset({
        "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "_unique2",
        "lift_fresh", "unique_consecutive",
    })  # fmt: skip

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket._qualified_op_name.split("::")[1]
        assert name not in self.REFUSED, name
        return function(*args, **(kwargs or {}))


def _asks(ranks: Ranks, config: Config) -> list[str]:
    """What the second and later updates of a shape ask the device, by number."""
    found = []
    with mock.patch.object(exchange, "VOCABULARY", 12):
        _, captured = made(config, ranks)
    launch = captured._update

    def watched(shape: Any) -> None:
        if shape not in captured._sent:  # the first time
            return launch(shape)
        try:
            with Asked():
                launch(shape)
        except AssertionError as error:
            found.append(str(error))
            raise
        return None

    few = mock.patch.object(exchange, "VOCABULARY", 12)
    with few, mock.patch.object(captured, "_update", watched), suppress(AssertionError):
        list(captured.block(0, 12))
    return found


def test_an_update_of_a_known_shape_asks_the_device_nothing(workers: Pool, world: Path) -> None:
    """One such question, and no graph can be captured of it."""
    batches = {"mixture__batch_size": 8, "mixture__group_size": 4}
    methods: list[Any] = ["baseline", {"name": "gar", "gradients": "unit"}, "gar+zloss+simbal"]
    for method in methods:  # one_hot, which some read, asks a CPU and no GPU
        assert workers.run(2, _asks, config_of(world, method=method, **batches)) == [[], []], method
    # The control: embeddings whose rows are counted.
    with pytest.raises(AssertionError):
        assert workers.run(2, _counted, config_of(world, method="gar", **batches)) == [[], []]


def _counted(ranks: Ranks, config: Config) -> list[str]:
    with mock.patch.object(CapturedBackbone, "_most_rows", return_value=None):
        return _asks(ranks, config)


def _broken(ranks: Ranks, config: Config, number: int) -> tuple[str, int, bool]:
    """A learning rate at which nothing is finite from an update on."""
    updater, captured = made(config, ranks)
    list(captured.block(0, number))
    with torch.no_grad():
        updater.parameters[0].view(-1)[0] = math.nan
    before = weights(updater.model)
    try:
        list(captured.block(number, 12))
    except TrainingFailure as failure:
        after = weights(updater.model)
        same = all(torch.equal(a.nan_to_num(), after[key].nan_to_num()) for key, a in before.items())
        return str(failure), failure.update, same
    return "nothing", 0, False


def test_what_is_not_finite_is_said_by_all_ranks_and_changes_nothing(workers: Pool, world: Path) -> None:
    first, second = workers.run(2, _broken, config_of(world), 4)
    assert first == second
    said, update, same = first
    assert "the loss of task" in said
    assert (update, same) == (5, True)


def _chosen(ranks: Ranks, config: Config) -> bool:
    updater, _ = made(config, ranks)
    return updates_of(updater) is updater


def _replayed(ranks: Ranks, config: Config) -> tuple[Trained, Trained, int]:
    updater, captured = made(config, ranks)
    outcomes = list(captured.block(0, 40))
    found = flat(outcomes), weights(updater.model), updater.sent
    return one_by_one(ranks, config, 40), found, captured.captured


@GPUS
@pytest.mark.parametrize("method", ["baseline", "gar", "switchaux"])
def test_graphs_that_exchange(gpus: Pool, world: Path, method: str) -> None:
    # Few shapes, which most updates replay.
    batches = {"mixture__batch_size": 4, "mixture__group_size": 4, "optimizer__updates": 40}
    config = config_of(world, method__name=method, device="cuda", **batches)
    found = gpus.run(2, _replayed, config)
    assert_alike([of_rank[:2] for of_rank in found])
    assert all(0 < graphs < 10 for *_, graphs in found)


def _failing(ranks: Ranks, config: Config) -> str:
    """What a rank says where the capture of another one fails, or its own."""
    _, captured = made(config, ranks)
    update = captured._update

    def asking(shape: Any) -> None:
        update(shape)
        if ranks.rank and torch.cuda.is_current_stream_capturing():
            captured._line.item()

    with mock.patch.object(captured, "_update", asking), pytest.raises(UserError) as error:
        list(captured.block(0, 40))
    return str(error.value)


@GPUS
def test_a_capture_that_fails_on_one_rank_ends_all(world: Path) -> None:
    batches = {"mixture__batch_size": 4, "mixture__group_size": 4, "optimizer__updates": 40}
    # NCCL does not let go of a graph that never was.
    with pool(2, "cpu:gloo,cuda:nccl", patience=2) as lost:
        first, second = lost.run(2, _failing, config_of(world, device="cuda", **batches))
    assert first == "updates cannot be captured (on another rank); expected capture=false here"
    assert second.startswith("updates cannot be captured (")
    assert second != first


def test_not_on_a_cpu(workers: Pool, world: Path) -> None:
    assert workers.run(2, _chosen, config_of(world)) == [True, True]
