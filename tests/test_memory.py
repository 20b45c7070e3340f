"""How many tokens a pass takes: ``auto``, running out of memory, and what a resumed run keeps to."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gar.benchmark.models import synthetic_model, synthetic_splits
from gar.config import CacheConfig, Config, build
from gar.data.batches import Group
from gar.errors import UserError
from gar.features.sources import RawSource, make_sources
from gar.methods import REGISTRY, GroupWeights
from gar.runs.history import read_lines
from gar.training import Hooks, Interrupted, OutOfMemory, Updater, train_from_config
from gar.training import memory as module
from gar.training.gradients import fill_gradients
from gar.training.memory import PassLimit, fitting_tokens, longest_group, power_of_two_below, whole_update
from support import tiny_runs
from support.tiny_backbones import KINDS, SITES, Directories, make_model, make_splits
from support.tiny_runs import make_config, same_bits, weights

NAMES = ["mood", "nli"]
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return Directories(tmp_path_factory.mktemp("backbones"))


def trained_config(world: Path, **changes: Any) -> Config:
    return make_config(world, **{"backbone__trainable": True, "optimizer__updates": 4, **changes})


def updater_of(config: Config, limit: PassLimit | None = None) -> Updater:
    model, mixture = tiny_runs.load(config)
    source, _ = make_sources(model.to(config.device), mixture, config.cache)
    return Updater(model.train(), source, config, NAMES, limit)


def padded_tokens(updater: Updater, groups: Sequence[Group]) -> int:
    widths = [int(updater.source.lengths[g.task][g.examples].max()) for g in groups]
    return sum(len(group) for group in groups) * max(widths)


def scarce(
    monkeypatch: pytest.MonkeyPatch, capacity: int, when: Callable[[int], bool] = lambda number: True
) -> list[int]:
    """Passes of more padded tokens than ``capacity`` run out of memory; returns the tokens of all passes."""
    original, seen = Updater.group_losses, []

    def limited(
        updater: Updater, groups: Sequence[Group], number: int, total: int
    ) -> tuple[Tensor, GroupWeights]:
        seen.append(padded_tokens(updater, groups))
        if seen[-1] > capacity and when(number):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")
        return original(updater, groups, number, total)

    monkeypatch.setattr(Updater, "group_losses", limited)
    return seen


def facts(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "environment.json").read_text())
    return found


# ---------------------------------------------------------------------- the key


@pytest.mark.parametrize("value", [0, -3, "x", True, 2.5, [1]])
def test_what_is_no_number_of_tokens_is_refused(world: Path, value: Any) -> None:
    with pytest.raises(UserError, match=r"max_tokens_per_pass is .*; expected auto, a number of tokens") as e:
        make_config(world, max_tokens_per_pass=value)
    assert repr(value) in str(e.value)


@pytest.mark.parametrize(("trainable", "tokens"), [(False, None), (True, module.TOKENS_ELSEWHERE)])
def test_auto_is_the_default_and_is_recorded(
    world: Path, tmp_path: Path, trainable: bool, tokens: int | None
) -> None:
    config = make_config(world, backbone__trainable=trainable, optimizer__updates=1)
    assert config.max_tokens_per_pass == "auto"
    said: list[str] = []
    train_from_config(config, tmp_path / "run", hooks=Hooks(message=said.append))
    found = facts(tmp_path / "run")
    assert (found["max_tokens_per_pass"], found["place"]["max_tokens_per_pass"]) == (tokens, "auto")
    assert found["precision"] == "float32"
    assert not said


# ---------------------------------------------------------------------- out of memory


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("method", ["baseline", "gar"])
def test_a_first_update_that_does_not_fit_is_split(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, trainable: bool
) -> None:
    """It ends with the bits of a run whose limit was that number from the start."""
    config = trained_config(
        world, method__name=method, backbone__trainable=trainable, cache__enabled=False, optimizer__updates=2
    )
    said: list[str] = []
    seen = scarce(monkeypatch, 130, lambda number: number == 0)
    train_from_config(config, tmp_path / "run", hooks=Hooks(message=said.append))
    monkeypatch.undo()
    tokens = facts(tmp_path / "run")["max_tokens_per_pass"]
    assert tokens <= 128
    assert max(seen) > 130
    assert len(said) == len([tokens_ for tokens_ in seen if tokens_ > 130])
    assert said[-1].startswith("max_tokens_per_pass: a pass of ")
    assert said[-1].endswith(
        f"does not fit (CUDA out of memory. Tried to allocate 2.00 GiB); the first update is tried again "
        f"with {tokens}"
    )
    again = config.model_copy(update={"max_tokens_per_pass": tokens})
    train_from_config(again, tmp_path / "again")
    for file in ("history.jsonl", "model/model.safetensors"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_a_number_is_taken_at_its_word(world: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scarce(monkeypatch, 50)
    for limit in (100, None):
        with pytest.raises(OutOfMemory, match=r"^update 1: out of memory on cpu \(CUDA out of memory"):
            train_from_config(trained_config(world, max_tokens_per_pass=limit), tmp_path / str(limit))


def test_one_group_that_does_not_fit_ends_the_run(
    world: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = scarce(monkeypatch, 1)
    expected = (
        r"^update 1: out of memory on cpu .*; expected more free memory, or a smaller max_tokens_per_pass "
        r"\(\d+ now\); where one group does not fit, a smaller mixture.group_size or "
        r"backbone.gradient_checkpointing: true$"
    )
    with pytest.raises(OutOfMemory, match=expected):
        train_from_config(trained_config(world), tmp_path / "run")
    assert len(seen) < 12, "every attempt halves the limit"
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (failure["error"], failure["update"]) == ("OutOfMemory", 1)


def test_a_later_update_that_does_not_fit_leaves_the_checkpoint(
    world: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = trained_config(world, checkpoint__every=2, method__name="gar")
    train_from_config(config, tmp_path / "whole")
    scarce(monkeypatch, 1, lambda number: number == 3)
    said: list[str] = []
    with pytest.raises(
        OutOfMemory,
        match=r"^update 4: out of memory .* smaller max_tokens_per_pass \(2048 now\) in a new run;",
    ) as error:
        train_from_config(config, tmp_path / "run", hooks=Hooks(message=said.append))
    assert error.value.update == 4
    assert not said
    monkeypatch.undo()
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (failure["error"], failure["update"], failure["checkpoint"]) == (
        "OutOfMemory",
        4,
        "checkpoints/00000002",
    )
    train_from_config(config, tmp_path / "run", resume=True)
    for file in ("history.jsonl", "model/model.safetensors"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


# ---------------------------------------------------------------------- what fits


class Memory:
    """A GPU's memory in the place of torch's: every padded token of a pass takes so much, a pass so much."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, token: int, fixed: int) -> None:
        self.free, self.token, self.fixed, self.peak = free, token, fixed, 0
        self.methods: set[str] = set()
        original, fill = Updater.group_losses, fill_gradients

        def losses(updater: Updater, groups: Sequence[Group], number: int, total: int) -> Any:
            self.peak = 700 + self.fixed + self.token * padded_tokens(updater, groups)
            return original(updater, groups, number, total)

        def watched(method: Any, *args: Any, **options: Any) -> Any:
            self.methods.add(method.name)
            return fill(method, *args, **options)

        monkeypatch.setattr(Updater, "group_losses", losses)
        monkeypatch.setattr(module, "fill_gradients", watched)
        for name, value in {
            "reset_peak_memory_stats": lambda device: None,
            "memory_allocated": lambda device: 700,
            "max_memory_allocated": lambda device: self.peak,
            "memory_reserved": lambda device: 1000,
            "mem_get_info": lambda device: (self.free - 300, 10**12),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_auto_is_the_largest_power_of_two_that_takes_half_of_what_is_free(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = updater_of(trained_config(world))
    size = sum(p.nbytes for p in updater.parameters)
    token, fixed = 1000, 5000
    for tokens in (64, 128):
        free = 2 * token * tokens + 2 * size + fixed
        memory = Memory(monkeypatch, free, token, fixed)
        assert fitting_tokens(updater) == tokens
        memory.free -= 3 * token
        assert fitting_tokens(updater) == tokens // 2
        assert memory.methods == {"gar"}, "whatever the run's method"
        monkeypatch.undo()


def test_auto_is_the_same_for_every_method(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(monkeypatch, 2 * 10**6, 10_000, 0)
    names = [name for name, cls in REGISTRY.items() if name != "torchjd"]
    found = {fitting_tokens(updater_of(trained_config(world, method__name=name))) for name in names}
    assert len(found) == 1


def test_auto_ends_at_a_whole_update_and_begins_at_a_group(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = updater_of(trained_config(world))
    whole, group = whole_update(updater), longest_group(updater)
    assert whole == 16 * 21, "the longest text has 21 tokens"
    assert len(group) == 3
    largest = max(padded_tokens(updater, updater.schedule.groups(number)) for number in range(20))
    assert largest <= whole
    Memory(monkeypatch, 10**15, 1000, 0)
    assert fitting_tokens(updater) == 512, "the least power of two that holds it"
    monkeypatch.undo()
    Memory(monkeypatch, 0, 1000, 0)
    tokens = padded_tokens(updater, [group])
    assert fitting_tokens(updater) == power_of_two_below(tokens + 1) <= tokens


def test_measuring_that_runs_out_of_memory_leaves_it_to_the_update(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = updater_of(trained_config(world))
    tokens = padded_tokens(updater, [longest_group(updater)])
    Memory(monkeypatch, 10**12, 1000, 0)
    scarce(monkeypatch, tokens)
    assert tokens <= fitting_tokens(updater) < 2 * tokens
    assert all(p.grad is None for p in updater.parameters)


def test_measuring_changes_nothing(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = trained_config(world, method__name="gar")
    plain, measured = updater_of(config), updater_of(config)
    Memory(monkeypatch, 10**12, 1000, 0)
    state = torch.get_rng_state()
    fitting_tokens(measured)
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.undo()
    for updater in (plain, measured):
        for number in range(3):
            updater.run(number)
    assert same_bits(weights(plain.model), weights(measured.model))


@GPU
def test_a_gpu_that_runs_out_of_memory() -> None:
    """A process that gets too small a share of it: ``auto`` cannot know, and finds a split that fits."""
    device, classes = torch.device("cuda"), [2] * 5

    def updater_with(key: Any, said: list[str]) -> Updater:
        tree = {"backbone": {"trainable": True}, "method": {"name": "gar"}, "max_tokens_per_pass": key}
        config = build(tree)
        model = synthetic_model(config, classes, device).train()
        source = RawSource(model, synthetic_splits(classes, 64, 128, 0), CacheConfig())
        return Updater(model, source, config, list(model.tasks), PassLimit(key, said.append))

    said: list[str] = []
    updater = updater_with("auto", said)
    fits = fitting_tokens(updater)
    assert fits == 1 << (whole_update(updater) - 1).bit_length(), "this GPU has room for a whole update"
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**31) / total)
    try:
        outcomes = list(updater.limit.explaining(updater.block(0, 3), 0, updater.model))
        assert len(outcomes) == 3
        assert said
        assert 1024 <= (updater.limit.tokens or 0) < fits
        del updater
        module.release_memory()
        whole = updater_with(None, [])
        with pytest.raises(OutOfMemory, match=r"^update 1: out of memory on cuda:0 \(CUDA out of memory"):
            list(whole.limit.explaining(whole.block(0, 3), 0, whole.model))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# ---------------------------------------------------------------------- resume


def interrupted(config: Config, out: Path, after: int) -> None:
    def stop(done: int, total: int, loss: float) -> None:
        if done == after:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        train_from_config(config, out, hooks=Hooks(update=stop))


def test_a_resumed_run_takes_over_what_auto_was(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trained_config(world)
    monkeypatch.setattr(module, "TOKENS_ELSEWHERE", 100)
    train_from_config(config, tmp_path / "whole")
    interrupted(config, tmp_path / "run", after=2)
    monkeypatch.setattr(module, "TOKENS_ELSEWHERE", 200)
    said: list[str] = []
    train_from_config(config, tmp_path / "run", resume=True, hooks=Hooks(message=said.append))
    assert not said
    for file in ("history.jsonl", "model/model.safetensors"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert facts(tmp_path / "run")["max_tokens_per_pass"] == 100


@pytest.mark.parametrize("before", ["auto", 100, None])
def test_dropout_keeps_a_run_to_its_split(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Any
) -> None:
    monkeypatch.setattr(module, "TOKENS_ELSEWHERE", 100)
    out = tmp_path / "run"
    interrupted(trained_config(world, max_tokens_per_pass=before), out, after=2)
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    told, said = ("a whole update", "null") if before is None else ("100 padded tokens", "100")
    expected = (
        f"the run to resume has passes of at most {told}, found max_tokens_per_pass: 50; expected {said} or "
        "auto: the dropout of a trained backbone depends on the split"
    )
    with pytest.raises(UserError, match=expected):
        train_from_config(trained_config(world, max_tokens_per_pass=50), out, resume=True)
    assert {path: path.read_bytes() for path in files} == files, "nothing was touched"
    same = None if before is None else 100
    for config in (trained_config(world, max_tokens_per_pass=same), trained_config(world)):
        train_from_config(config, out, resume=True)


@pytest.mark.parametrize("why", ["frozen", "no checkpoint"])
def test_elsewhere_another_split_is_another_place(world: Path, tmp_path: Path, why: str) -> None:
    changes: dict[str, Any] = {"backbone__trainable": why != "frozen"}
    out = tmp_path / "run"
    said: list[str] = []
    config = trained_config(world, max_tokens_per_pass=100, **changes)
    interrupted(config, out, after=2)
    if why == "no checkpoint":
        for path in sorted((out / "checkpoints").rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    other = trained_config(world, max_tokens_per_pass=50, **changes)
    train_from_config(other, out, resume=True, hooks=Hooks(message=said.append))
    assert any("max_tokens_per_pass was 100 and is 50" in line for line in said)
    assert [line["update"] for line in read_lines(out / "history.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("kind", KINDS)
def test_whether_a_backbone_has_dropout_is_known(directories: Directories, kind: str, site: str) -> None:
    """Two training forwards differ exactly where the model says so."""

    def draws(trainable: bool, dropout: bool) -> bool:
        model = make_model(directories[kind], site, trainable, dropout=0.0)
        for module_ in model.modules() if not dropout else ():
            if isinstance(module_, nn.Dropout):
                module_.p = 0.0
            if isinstance(getattr(module_, "attention_dropout", None), float):
                setattr(module_, "attention_dropout", 0.0)  # noqa: B010
        tokens = model.train().tokens([(make_splits(model)[0], make_splits(model)[0].labels * 0)])
        with torch.no_grad():
            states = [model.prefix(*tokens) for _ in range(2)]
            outputs = [model.suffix(state, [("first", 5)]).logits[0] for state in states]
        differ = not torch.equal(outputs[0], outputs[1])
        assert model.draws_by_pass == differ
        return differ

    assert draws(True, True)
    assert not draws(True, False)
    assert not draws(False, True)
