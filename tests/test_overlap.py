"""Sums over ranks that begin during the backward against those that begin after it."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from gar.config import Config
from gar.distributed import Job, RankLost, Ranks, exchange, sum_gradients
from gar.distributed.overlap import OverlappedSum
from gar.features.sources import make_sources
from gar.training import Updater
from support import tiny, tiny_runs
from support.ranks import Pool
from support.tiny_runs import make_config, same_bits

Named = dict[str, Tensor]


class Told(Ranks):
    """Ranks that write down every bucket they send."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks.group)
        self.events: list[str] = []

    def turn(self, x: Tensor) -> Tensor:
        self.events.append(f"sent {x.numel()}")
        return super().turn(x)

    def gather(self, x: Tensor) -> Tensor:
        if self.count == 2:  # with more, what follows a turn
            self.events.append(f"sent {x.numel()}")
        return super().gather(x)


class Net(nn.Module):
    """Layers of 3, 4, 5 and 6 outputs in a row, a branch that not every pass takes, and an unused weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(i, i + 1, bias=False) for i in range(2, 6))
        self.branch, self.unused = nn.Linear(6, 6), nn.Parameter(torch.ones(9))

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.branch(x) if branch else x).square().sum()


#: Of every update what the passes of every rank are: whether they take the branch.
Plan = Sequence[Sequence[Sequence[bool]]]
PLANS: dict[str, Plan] = {
    "one pass": [[[True], [True]]] * 3,
    "several passes": [[[True, True], [True, True, True]]] * 3,
    "an empty rank": [[[True], [True]], [[True, True], []], [[], [True]], [[True], [True]]],
    "empty at first": [[[True], []], [[True], [True]], [[], [True]]],
    "unused on one": [[[True], [False]], [[True, False], [False]], [[False], [True]]],
    "unused on all": [[[False], [False]]] * 2 + [[[False, True], [True]]],
    "unused later": [[[True], [True]], [[True, False], [False]], [[False], [False]], [[True], [True]]],
    "three": [[[True], [], [True, True]], [[False], [True], [True]], [[], [True], []]],
}


def _planned(ranks: Ranks, plan: Plan, limit: int) -> Any:
    """Gradients of every update by both ways, and what happened when."""
    told = Told(ranks)
    net = Net().train()
    sums = OverlappedSum(list(net.parameters()), told, limit)
    for number, layer in enumerate(net.layers):
        assert isinstance(layer.weight, Tensor)
        layer.weight.register_hook(lambda grad, number=number: told.events.append(f"layer {number}"))
    plain = copy.deepcopy(net)
    found = []
    for number, of_ranks in enumerate(plan):
        own = of_ranks[ranks.rank]
        random = torch.Generator().manual_seed(10 * number + ranks.rank)
        inputs = torch.randn(len(own), 5, 2, generator=random)
        net.zero_grad()
        plain.zero_grad()
        told.events.append("update")
        sums.begin()
        for place, (x, branch) in enumerate(zip(inputs, own, strict=True), 1):
            loss = net(x, branch)
            if place < len(own):
                loss.backward()
                continue
            with sums.listening():
                loss.backward()
            told.events.append("over")
        sums.rest()
        summed = sums.end()
        assert summed == set(net.parameters())
        for x, branch in zip(inputs, own, strict=True):
            plain(x, branch).backward()
        sum_gradients(list(plain.parameters()), ranks)
        mine = {name: p.grad for name, p in net.named_parameters()}
        theirs = {
            name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.named_parameters()
        }
        found.append((mine, theirs))
    return found, told.events, told.bytes


def updates_of(events: list[str]) -> list[list[str]]:
    """Events of every update."""
    starts = [i for i, event in enumerate(events) if event == "update"]
    return [events[i + 1 : j] for i, j in zip(starts, [*starts[1:], len(events)], strict=True)]


@pytest.mark.parametrize("limit", [1, 150, 2**20])
@pytest.mark.parametrize("name", PLANS)
def test_sums_are_those_of_an_exchange_after_the_backward(workers: Pool, name: str, limit: int) -> None:
    plan = PLANS[name]
    found = workers.run(len(plan[0]), _planned, plan, limit)
    sent = [[event for event in events if event.startswith("sent")] for _, events, _ in found]
    assert all(other == sent[0] for other in sent), "one order on all ranks"
    for gradients, _, _ in found:
        for number, (mine, theirs) in enumerate(gradients):
            assert same_bits(mine, theirs), number
            assert same_bits(mine, found[0][0][number][0])
    # Every weight goes once an update: of two ranks as it is, else in two exchanges.
    size = sum(p.numel() for p in Net().parameters())
    count = len(found)
    assert found[0][2] >= len(plan) * 2 * 4 * size * (count - 1) / count


def test_buckets_begin_while_the_backward_runs(workers: Pool) -> None:
    # The branch first, whose weight and bias have 36 and 6 numbers; then the layers from the last on.
    for found in workers.run(2, _planned, PLANS["several passes"], 1):
        first, second, third = updates_of(found[1])
        assert first[:5] == ["layer 3", "layer 2", "layer 1", "layer 0", "layer 3"]
        late = first[first.index("over") :]
        assert len(late) == 8, "of the first update no bucket begins before all passes are over"
        assert not any(event.startswith("sent") for event in first[: -len(late)])
        for events in (second, third):
            last = events[-12:]
            assert not any(event.startswith("sent") for event in events[:-12]), "earlier passes send nothing"
            assert sorted(last[:2]) == ["sent 36", "sent 6"]
            layers = ["layer 3", "sent 30", "layer 2", "sent 20", "layer 1", "sent 12", "layer 0", "sent 6"]
            assert last[2:] == [*layers, "over", "sent 9"], "what no pass reaches goes last"


def test_what_a_rank_does_not_reach_holds_up_no_other(workers: Pool) -> None:
    for rank, found in enumerate(workers.run(2, _planned, PLANS["unused on one"], 1)):
        second = updates_of(found[1])[1]
        assert second[second.index("over") - 8 : second.index("over")] == [
            *("layer 3", "sent 30", "layer 2", "sent 20", "layer 1", "sent 12", "layer 0", "sent 6")
        ], rank
        assert sorted(second[second.index("over") + 1 :]) == ["sent 36", "sent 6", "sent 9"]


def _two_layers() -> tuple[nn.Linear, nn.Linear, list[nn.Parameter]]:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    return first, second, [*first.parameters(), *second.parameters()]


def _not_early(ranks: Ranks) -> list[str]:
    """A later update that must not begin early either."""
    told = Told(ranks)
    first, second, parameters = _two_layers()
    sums = OverlappedSum(parameters, told, 1)
    for early in (True, False, True):
        told.events.append("update")
        sums.begin(early)
        with sums.listening():
            second(first(torch.ones(1, 3))).sum().backward()
        told.events.append("over")
        sums.rest()
        assert sums.end() == set(parameters)
    return told.events


def test_an_update_may_wait_for_its_passes(workers: Pool) -> None:
    late, early = ["over", "sent 9", "sent 9"], ["sent 9", "sent 9", "over"]
    assert [updates_of(events) for events in workers.run(2, _not_early)] == [[late, late, early]] * 2


class Inner(torch.autograd.Function):
    """Has a backward of its own, as reentrant checkpoints do: its weight's gradient comes in two parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        with torch.no_grad():
            result: Tensor = layer(x)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grads[0])
        assert x.grad is not None
        return x.grad, None


def _unfit(ranks: Ranks, how: str) -> Any:
    """Whose gradient is not whole when it comes: which parameters are summed, and what a later one says."""
    told = Told(ranks)
    first, second, parameters = _two_layers()
    sums = OverlappedSum(parameters, told, 1)
    found: list[list[bool]] = []
    gradients: list[list[Tensor]] = []
    for number in range(2 if how == "later" else 3):
        for parameter in parameters:
            parameter.grad = None
        sums.begin()
        x = torch.full((1, 3), 1.0 + ranks.rank, requires_grad=True)
        with sums.listening():
            if how == "twice":
                Inner.apply(Inner.apply(first(x), second), second).sum().backward()
            else:
                second(first(x)).sum().backward()
        sums.rest()
        if (how == "after" or (how == "later" and number == 1)) and ranks.rank == 0:
            second.weight.square().sum().backward()
        try:
            summed = sums.end()
        except RuntimeError as error:
            return found, gradients, str(error)
        found.append([parameter in summed for parameter in parameters])
        sum_gradients([parameter for parameter in parameters if parameter not in summed], ranks)
        gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
    return found, gradients, None


@pytest.mark.parametrize("how", ["twice", "after"])
def test_a_gradient_that_is_not_whole_when_it_comes_is_left_out(workers: Pool, how: str) -> None:
    (found, gradients, error), other = workers.run(2, _unfit, how)
    assert error is None
    assert other[0] == found == [[True, False]] * 3, "also where another rank alone adds to it"
    for mine, theirs in zip(gradients, other[1], strict=True):
        assert all(map(torch.equal, mine, theirs))
        assert all(map(torch.equal, mine, gradients[0]))


def test_a_gradient_that_changes_after_its_sum_began_is_an_error(workers: Pool) -> None:
    (found, _, error), other = workers.run(2, _unfit, "later")
    assert found == [[True, True]]
    assert error.startswith("a gradient changed after its sum over ranks had begun; expected one backward")
    assert other[0] == [[True, True]] * 2, "the others learn of it as of any error"


class Lost(Ranks):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks.group)

    def gather(self, x: Tensor) -> Tensor:
        raise RankLost("another rank does not answer (closed)")


def _lost(ranks: Ranks) -> tuple[str, bool]:
    first, second, parameters = _two_layers()
    sums = OverlappedSum(parameters, ranks, 1)
    sums.begin()
    with sums.listening():
        second(first(torch.ones(1, 3))).sum().backward()
    sums.rest()
    sums.end()
    sums.begin()
    sums.ranks = Lost(ranks)
    over = False
    try:
        with sums.listening():
            second(first(torch.ones(1, 3))).sum().backward()
            over = True
    except RankLost as error:
        return str(error), over
    return "nothing", over


def test_a_lost_rank_shows_in_the_backward(workers: Pool) -> None:
    assert workers.run(2, _lost) == [("another rank does not answer (closed)", False)] * 2


def _forgotten(ranks: Ranks) -> list[int]:
    _, _, parameters = _two_layers()

    def count() -> int:
        hooks: Any = [parameter._post_accumulate_grad_hooks or {} for parameter in parameters]
        return sum(map(len, hooks))

    sums = OverlappedSum(parameters, ranks)
    during = count()
    del sums
    gc.collect()
    return [during, count()]


def test_nothing_stays_at_the_parameters(workers: Pool) -> None:
    assert workers.run(2, _forgotten) == [[2, 0]] * 2


# ---------------------------------------------------------------------- updates of a run


def configs(world: Path) -> dict[str, Config]:
    gar = {"name": "gar", "coefficient": 1.0}
    trained = {"backbone__trainable": True}
    made: dict[str, dict[str, Any]] = {
        "gar": {**trained, "method": gar},
        "baseline": {**trained, "method__name": "baseline"},
        "combined": {**trained, "method__name": "gar+simbal+switchaux"},
        "terms": {**trained, "method__name": "stgc"},
        "passes": {**trained, "method": gar, "max_tokens_per_pass": 40},
        "full": {**trained, "method": gar, "experts__site": "full_ffn", "max_tokens_per_pass": 40},
        "head": {**trained, "method": gar, "experts__site": "lora_head"},
        "few groups": {**trained, "method": gar, "mixture__group_size": 8},
        "frozen": {"method": gar, "max_tokens_per_pass": 40},
        "per group": {**trained, "method": gar, "observation": "per_group"},
        "tokens": {**trained, "method": gar, "observation": {"unit": "token"}},
        "checkpointed": {**trained, "backbone__gradient_checkpointing": True},
        "bfloat16": {**trained, "method": gar, "precision": "bfloat16"},
    }
    return {name: make_config(world, **changes) for name, changes in made.items()}


def _updates(ranks: Ranks, config: Config, overlapped: bool) -> tuple[list[Named], list[str], list[int]]:
    """Gradients of four updates with their steps between and of the first one again, what went when, and
    bytes sent.
    """
    model, mixture = tiny_runs.load(config, randomized=True)
    source, *_ = make_sources(model, mixture, config.cache)
    told = Told(ranks)
    job = Job(told, Ranks(ranks.group))
    updater = Updater(model.train(), source, config, ["mood", "nli"], job=job)
    assert updater.overlapped is not None
    if overlapped:
        updater.overlapped = OverlappedSum(updater.overlapped.parameters, told, 2000)
    else:
        updater.overlapped = None
    found, sent = [], []
    fill = updater.method.finish

    def finish(update: Any) -> None:
        told.events.append("finish")
        fill(update)

    object.__setattr__(updater.method, "finish", finish)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: told.events.append("made"))
    for number in range(4):
        told.events.append("update")
        updater.run(number)
        found.append(tiny.named_gradients(model))
        sent.append(told.bytes)
    updater.check(4)
    told.events.append("update")
    updater.gradients(updater.schedule.groups(0), 0)
    found.append(tiny.named_gradients(model))
    return found, told.events, sent


NAMES = (
    "gar", "baseline", "combined", "terms", "passes", "full", "head", "few groups", "frozen", "per group",
    "tokens", "checkpointed", "bfloat16",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_updates_have_the_same_bits(workers: Pool, world: Path, name: str) -> None:
    config = configs(world)[name]
    # Of three ranks one has no group of two.
    count = 3 if name == "few groups" else 2
    early = workers.run(count, _updates, config, True)
    late = workers.run(count, _updates, config, False)
    sent = [[event for event in events if event.startswith("sent")] for _, events, _ in early]
    assert all(other == sent[0] for other in sent)
    for (mine, events, _), (theirs, _, _) in zip(early, late, strict=True):
        for number in range(5):
            assert same_bits(mine[number], theirs[number]), number
            assert same_bits(mine[number], early[0][0][number]), number
        for number, of in enumerate(updates_of(events)):
            begin = next(place for place, event in enumerate(of) if event.startswith("sent"))
            end = of.index("finish")
            if number in (0, 4):
                assert begin > end or "made" not in of[begin:end], "an update 0 may have to be tried again"
            elif "made" in of[:end] and name != "frozen":
                assert "made" in of[begin:end], "the backward goes on"
            else:  # a rank without groups, or parameters that take one bucket
                assert begin < end
    assert early[0][2][-1] == pytest.approx(late[0][2][-1], rel=0.05)


def _of_method(ranks: Ranks, config: Config) -> bool:
    model, mixture = tiny_runs.load(config)
    source, *_ = make_sources(model, mixture, config.cache)
    job = Job(ranks, Ranks(ranks.group))
    return Updater(model, source, config, ["mood", "nli"], job=job).overlapped is not None


def test_one_rank_and_methods_with_their_own_backward_go_without(workers: Pool, world: Path) -> None:
    assert workers.run(1, _of_method, make_config(world)) == [False]
    for name, expected in {"gar": True, "cagrad": False, "cagrad+zloss": False}.items():
        assert workers.run(2, _of_method, make_config(world, method__name=name)) == [expected] * 2, name


def _left_out(ranks: Ranks, config: Config) -> tuple[set[str], set[str]]:
    """Names of trained parameters that are summed after the passes, and of all."""
    model, mixture = tiny_runs.load(config)
    source, *_ = make_sources(model, mixture, config.cache)
    job = Job(ranks, Ranks(ranks.group))
    updater = Updater(model, source, config, ["mood", "nli"], job=job)
    assert updater.overlapped is not None
    early = set(updater.overlapped.parameters)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name for name, p in trained.items() if p not in early}, set(trained)


@pytest.mark.parametrize("site", ["lora_ffn", "lora_head"])
def test_routers_and_the_heads_of_tasks_are_summed_after_the_passes(
    workers: Pool, world: Path, site: str
) -> None:
    (left, trained), _ = workers.run(2, _left_out, make_config(world, experts__site=site))
    parts = ("router", "heads") if site == "lora_ffn" else ("router",)
    assert left == {name for name in trained if any(part in name.split(".") for part in parts)}
    assert all(any(part in name.split(".") for name in left) for part in parts)
    assert left != trained


def _with_vocabulary(ranks: Ranks, config: Config, rows: int) -> tuple[list[Named], set[str], int]:
    """Gradients of three updates where matrices of ``rows`` rows and more are embeddings; bytes sent."""
    before, exchange.VOCABULARY = exchange.VOCABULARY, rows
    try:
        left, _ = _left_out(ranks, config)
        model, mixture = tiny_runs.load(config, randomized=True)
        source, *_ = make_sources(model, mixture, config.cache)
        updater = Updater(model.train(), source, config, ["mood", "nli"], job=Job(ranks, Ranks(ranks.group)))
        found = []
        for number in range(3):
            updater.run(number)
            found.append(tiny.named_gradients(model))
        return found, left, ranks.bytes
    finally:
        exchange.VOCABULARY = before


def test_word_embeddings_are_sent_by_their_rows(workers: Pool, world: Path) -> None:
    few = {"mixture__batch_size": 1, "mixture__group_size": 1}  # texts, so that not all words occur
    config = make_config(world, backbone__trainable=True, method={"name": "gar", "coefficient": 1.0}, **few)
    name = "backbone.embeddings.word_embeddings.weight"
    size = len(dict(tiny_runs.load(config)[0].named_parameters())[name])
    by_rows = workers.run(2, _with_vocabulary, config, size)
    whole = workers.run(2, _with_vocabulary, config, size + 1)
    for (mine, left, sent), (theirs, all_left, all_sent) in zip(by_rows, whole, strict=True):
        assert left - all_left == {name}
        for number in range(3):
            assert same_bits(mine[number], theirs[number])
        assert sent < all_sent


# ---------------------------------------------------------------------- a rank that ends during it

DYING = """
import os, signal
from typing import ClassVar
from gar.methods import Method, register

calls = []

@register
class Dying(Method):
    name: ClassVar[str] = "dying"

    def terms(self, pass_):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 4:
            pass_.losses.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        return None
"""


def test_a_rank_that_ends_in_its_backward_ends_the_job_with_its_reason(world: Path, tmp_path: Path) -> None:
    """The other one waits for it inside of its own backward."""
    (tmp_path / "dying_method.py").write_text(DYING)
    changes = {"backbone__trainable": True, "checkpoint__every": 2, "optimizer__updates": 100}
    tree = tiny_runs.tree(world, plugins=["dying_method"], method__name="dying", **changes)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tree))
    line = [sys.executable, "-m", "gar", "train", str(tmp_path / "own.yaml"), "--ranks", "2"]
    done = subprocess.run(
        [*line, "--out", str(tmp_path / "run")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: rank 1 was lost: its process ")
    assert done.returncode == 1
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (failure["error"], f"error: {failure['reason']}") == ("RankLost", said)
    assert (tmp_path / "run" / failure["checkpoint"] / "state.json").is_file()
