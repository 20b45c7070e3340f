"""Training on several ranks against one process: gradients, weights, resume, failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any, ClassVar

import pytest
import torch
import yaml
from torch import Tensor, nn

from gar.benchmark.settings import Setting
from gar.cli import app
from gar.config import Config
from gar.distributed import Job, RankFailed, Ranks
from gar.errors import UserError
from gar.features.sources import make_sources
from gar.methods import GAR, REGISTRY, GroupWeights, Method, Share, Update, from_config
from gar.nn import expert_banks
from gar.runs.history import read_lines
from gar.training import Hooks, Interrupted, TrainingFailure, Updater, fill_gradients, train_from_config
from gar.training.updater import balanced
from support import tiny, tiny_runs
from support.ranks import Pool
from support.scripts import script
from support.tiny_runs import largest_difference, make_config, same_bits, weights
from support.waiting import until

SITES = ("lora_ffn", "full_ffn", "lora_head")
Named = dict[str, Tensor]


def job_of(ranks: Ranks) -> Job:
    return Job(ranks, Ranks(ranks.group))


def available(name: str) -> bool:
    """TorchJD is an extra."""
    return not (name == "torchjd" and from_config(name).check(CHOICES) is not None)


class _Choices:
    site, experts, top_k, groups = "lora_ffn", 3, 2, 5


CHOICES: Any = _Choices()
METHODS = [name for name in REGISTRY if available(name)]


# ---------------------------------------------------------------------- the gradients of one update


class Direct(Method):
    """A router loss of the groups' rows and of the router's own weights, state from all groups."""

    name: ClassVar[str] = "direct"

    @property
    def observes(self) -> frozenset[str]:
        return frozenset({"routing", "gradients"})

    def router_loss(self, update: Update) -> Tensor:
        (site,) = update.sites
        of_task = torch.zeros(update.task_count, len(update.losses), dtype=torch.float64)
        of_task[update.tasks, torch.arange(len(update.losses))] = update.losses
        aggregated = of_task @ (site.probabilities().T @ site.gradients()).square().sum(1).mean().expand(
            len(update.losses)
        )
        chosen = site.selections().double().sum(0) @ site.probabilities().sum(0)
        return aggregated.sum() + chosen + site.bank.router.weight.square().sum()

    def initial_state(self, model: nn.Module) -> dict[str, Tensor]:
        return {"chosen": torch.zeros(3)}


#: Every method, and what the options of GAR make of the rows.
VARIANTS: dict[str, Method] = {name: from_config(name) for name in METHODS} | {
    "gar_strong": GAR(coefficient=0.5, entropy_weight=0.1),
    "gar_unit": GAR(coefficient=0.5, gradients="unit", probabilities="softmax"),
    "gar_task": GAR(coefficient=0.5, gradients="task_scale", self_pairs=False),
    "gar_numerator": GAR(coefficient=0.5, objective="numerator_only"),
    "loadpen_strong": from_config({"name": "loadpen", "coefficient": 0.7}),
    "switchaux_strong": from_config({"name": "switchaux", "coefficient": 0.7}),
    "gar+simbal+switchaux": from_config("gar+simbal+switchaux"),
    "cagrad+zloss+switchaux": from_config(
        {"name": "cagrad", "with": {"zloss": {"coefficient": 0.7}, "switchaux": {"coefficient": 0.7}}}
    ),
    "direct": Direct(),
}
CASES = [
    (site, name, observation)
    for site in SITES
    for name in VARIANTS
    for observation in ("one_pass", "per_group")
    if not (site == "full_ffn" and name.startswith("stgc"))
]


def gradients(
    case: tuple[str, str, str], numbers: Sequence[Sequence[int]] | None = None, ranks: Ranks | None = None
) -> tuple[Named, Tensor]:
    """All gradients and the losses of one update; ``numbers`` are the groups of every rank."""
    site, name, observation = case
    model = tiny.make_model(site, dropout=0.3) if site == "lora_ffn" else tiny.make_model(site)
    batch = tiny.with_keep(model, tiny.make_batch())
    total = len(batch.sizes)
    own = range(total) if numbers is None or ranks is None else numbers[ranks.rank]
    share = None
    if numbers is not None and ranks is not None:
        sizes = [size for _, size in batch.sizes]
        share = Share(ranks, numbers, [task for task, _ in batch.sizes], sizes, len(tiny.CLASSES))

    def forward(part: tiny.Batch) -> tuple[Tensor, GroupWeights]:
        given = replace(part.weights(torch.float64, total), here=len(own))
        return given.grouping.mean(model(part)), given

    # Two passes where there is more than one group.
    cuts = [list(own)[:1], list(own)[1:]]
    parts = [merged(batch, cut) for cut in cuts if cut]
    parameters = list(model.parameters())
    torch.manual_seed(0)
    update = fill_gradients(
        VARIANTS[name],
        [partial(forward, part) for part in parts],
        parameters,
        [model],
        observation=observation,
        share=share,
    )
    return tiny.named_gradients(model), update.losses


def merged(batch: tiny.Batch, numbers: Sequence[int]) -> tiny.Batch:
    """These groups alone, numbered from 0."""
    rows = torch.cat([(batch.groups == m).nonzero().squeeze(1) for m in numbers])
    part = batch.rows(rows)
    local = {m: i for i, m in enumerate(numbers)}
    lists: dict[str, Any] = {key: [getattr(batch, key)[m] for m in numbers] for key in ("sizes", "v", "w")}
    return replace(part, groups=torch.tensor([local[m] for m in part.groups.tolist()]), **lists)


def _all_gradients(
    ranks: Ranks, cases: list[tuple[str, str, str]], numbers: list[list[int]]
) -> list[tuple[Named, Tensor]]:
    return [gradients(case, numbers, ranks) for case in cases]


@pytest.fixture(scope="module")
def alone() -> list[tuple[Named, Tensor]]:
    return [gradients(case) for case in CASES]


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([[0, 2, 4], [1, 3]], id="two"),
        pytest.param([[0, 1, 2, 3, 4], []], id="empty"),
        pytest.param([[2], [0, 1, 3], [4]], id="three"),
    ],
)
def test_the_gradients_of_every_method_are_those_of_one_process(
    workers: Pool, alone: list[tuple[Named, Tensor]], numbers: list[list[int]]
) -> None:
    # The slow path with the usual share alone.
    cases = {
        case: i for i, case in enumerate(CASES) if case[2] == "one_pass" or numbers == [[0, 2, 4], [1, 3]]
    }
    found = workers.run(len(numbers), _all_gradients, list(cases), numbers)
    for i, case in enumerate(cases):
        expected, losses = alone[cases[case]]
        mine, mine_losses = found[0][i]
        for other, other_losses in (of_rank[i] for of_rank in found[1:]):
            assert same_bits(other, mine), case
            assert torch.equal(other_losses, mine_losses), case
        torch.testing.assert_close(mine_losses, losses, rtol=1e-13, atol=1e-13)
        scale = max(float(grad.abs().max()) for grad in expected.values())
        for key, grad in expected.items():
            torch.testing.assert_close(mine[key], grad, rtol=1e-9, atol=1e-11 * scale, msg=f"{case}: {key}")


def _of_first_update(ranks: Ranks | None, configs: list[Config]) -> list[tuple[Named, Tensor]]:
    found = []
    for config in configs:
        model, mixture = tiny_runs.load(config, randomized=True)
        source, _ = make_sources(model, mixture, config.cache)
        names = [task.name for task in mixture.tasks]
        job = None if ranks is None else job_of(ranks)
        updater = Updater(model.train(), source, config, names, job=job)
        update = updater.gradients(updater.schedule.groups(0), 0)
        found.append((tiny.named_gradients(model), update.losses))
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_rows_of_examples_and_tokens_are_those_of_one_process(workers: Pool, world: Path, count: int) -> None:
    """Also of experts with biases, of ranks without a row, and of one without a group."""
    gar = {"method": {"name": "gar", "coefficient": 1.0, "gradients": "task_scale"}}
    units: list[dict[str, Any]] = [
        {"observation": {"unit": "token", "rows": 12}},
        {"observation": {"unit": "example"}, "max_tokens_per_pass": 40},
        {"observation": {"unit": "token"}, "experts__site": "full_ffn"},
        {"observation": {"unit": "token", "rows": 1}, "experts__dropout_mask": "per_expert"},
        {"observation": {"unit": "example"}, "mixture__group_size": 8, "experts__site": "full_ffn"},
    ]
    configs = [float64(world, **gar, **each) for each in units]
    found = workers.run(count, _of_first_update, configs)
    for i, (expected, losses) in enumerate(_of_first_update(None, configs)):
        mine, mine_losses = found[0][i]
        assert all(same_bits(other[i][0], mine) for other in found)
        torch.testing.assert_close(mine_losses, losses, rtol=1e-12, atol=1e-12)
        scale = max(float(grad.abs().max()) for grad in expected.values())
        for key, grad in expected.items():
            torch.testing.assert_close(mine[key], grad, rtol=1e-9, atol=1e-11 * scale, msg=f"{i}: {key}")


# ---------------------------------------------------------------------- weights after several updates


def float64(world: Path, **changes: Any) -> Config:
    return make_config(world, **{"backbone__dtype": "float64", "cache__enabled": False, **changes})


class Lifted(Method):
    """Lifts experts that all groups chose less than the mean: state that is changed after every step."""

    name: ClassVar[str] = "lifted_on_ranks"

    @property
    def observes(self) -> frozenset[str]:
        return frozenset({"routing"})

    def initial_state(self, model: nn.Module) -> dict[str, Tensor]:
        (bank,) = expert_banks(model)
        return {"bias": bank.router.add_selection_bias()}

    def after_step(self, update: Update) -> None:
        (site,) = update.sites
        chosen = site.selections().sum(0).double() * (1 + update.losses.sum())
        update.state["bias"].add_(0.1 * torch.sign(chosen.mean() - chosen))


def configs(world: Path) -> dict[str, Config]:
    """Every method at every site by both observations; passes of little; a trained backbone."""
    made = {
        f"{site} {name} {observation}": float64(
            world, experts__site=site, method__name=name, observation=observation
        )
        for site in SITES
        for name in METHODS
        for observation in ("one_pass", "per_group")
        if not (site == "full_ffn" and name.startswith("stgc"))
    }
    for name in METHODS:
        made[f"passes {name}"] = float64(world, method__name=name, max_tokens_per_pass=40)
    # One group a pass: the backbone's own dropout then depends on the group alone.
    trained = {"backbone__trainable": True, "max_tokens_per_pass": 1}
    for name in ("gar", "cagrad", "switchaux"):
        made[f"trained {name}"] = float64(world, method__name=name, **trained)
    # 22 groups in the one case, 2 in the other: more ranks than groups.
    made["single rows"] = float64(world, mixture__group_size=1)
    made["few groups"] = float64(world, mixture__group_size=8)
    made["own state"] = float64(world).model_copy(update={"method": Lifted()})
    return made


def updated(config: Config, job: Job | None, updates: int = 3) -> Named:
    """The weights after some updates of :class:`Updater`."""
    model, mixture = tiny_runs.load(config, randomized=True)
    source, *_ = make_sources(model, mixture, config.cache)
    updater = Updater(model.train(), source, config, ["mood", "nli"], job=job)
    for number in range(updates):
        updater.run(number)
    updater.check(updates)
    assert job is None or updater.sent > 0
    return weights(model)


def some(made: dict[str, Config], count: int) -> dict[str, Config]:
    """All of them on two ranks; on more what differs there."""
    return {name: config for name, config in made.items() if count == 2 or "_" not in name.split()[0]}


def _all_updated(ranks: Ranks, made: dict[str, Config], updates: int) -> dict[str, Named]:
    return {name: updated(config, job_of(ranks), updates) for name, config in made.items()}


@pytest.fixture(scope="module")
def one_process(world: Path) -> dict[str, Named]:
    return {name: updated(config, None) for name, config in configs(world).items()}


@pytest.mark.parametrize("count", [2, 3])
def test_the_weights_are_those_of_one_process(
    workers: Pool, world: Path, one_process: dict[str, Named], count: int
) -> None:
    chosen = some(configs(world), count)
    found = workers.run(count, _all_updated, chosen, 3)
    for name in chosen:
        expected = one_process[name]
        assert all(same_bits(other[name], found[0][name]) for other in found[1:]), name
        assert largest_difference(found[0][name], expected) < 1e-8, name


def test_ranks_have_the_same_bits_after_ten_updates_of_float32(workers: Pool, world: Path) -> None:
    made = {name: make_config(world, method__name=name) for name in ("gar", "cagrad")}
    made["bfloat16"] = make_config(world, precision="bfloat16")
    found = workers.run(2, _all_updated, made, 10)
    for name, config in made.items():
        assert same_bits(found[0][name], found[1][name])
        assert largest_difference(found[0][name], updated(config, None, 10)) < 0.05


def test_shares_are_balanced_and_deterministic() -> None:
    assert balanced([3, 3, 3, 3], 2) == [[0, 2], [1, 3]]
    assert balanced([1, 10, 1, 9, 1], 2) == [[1, 2], [0, 3, 4]]
    assert balanced([2, 2], 4) == [[0], [1], [], []]


# ---------------------------------------------------------------------- whole runs


def whole_run(config: Config, out: Path, job: Job | None, stop: int | None = None, **options: Any) -> Any:
    """A result; with ``stop`` a signal comes to one rank after that update."""

    def update(done: int, total: int, loss: float) -> None:
        if done == stop:
            os.kill(os.getpid(), signal.SIGINT)

    try:
        return train_from_config(config, out, hooks=Hooks(update=update), job=job, **options)
    except (UserError, TrainingFailure, Interrupted, RankFailed) as error:
        return type(error).__name__, str(error)


def _whole_run(ranks: Ranks, config: Config, out: Path, stop: int | None = None, **options: Any) -> Any:
    return whole_run(config, out, job_of(ranks), stop, **options)


def _resumed(ranks: Ranks, config: Config, out: Path) -> Any:
    return _whole_run(ranks, config, out, resume=True)


def saved(run: Path) -> Named:
    from safetensors.torch import load_file

    return load_file(next((run / "model").glob("*.safetensors")))


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (2, 3)])
def test_a_run_goes_on_with_other_ranks(
    workers: Pool, world: Path, tmp_path: Path, first: int, second: int
) -> None:
    config = float64(world, optimizer__updates=6)
    whole_run(config, tmp_path / "whole", None)
    out = tmp_path / "run"
    begun = (
        [whole_run(config, out, None, 3)] if first == 1 else workers.run(first, _whole_run, config, out, 3)
    )
    assert begun == [("Interrupted", "stopped after update 3 of 6")] * first
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["00000003"]
    results = (
        [whole_run(config, out, None, resume=True)]
        if second == 1
        else workers.run(second, _resumed, config, out)
    )
    assert {result["updates"] for result in results} == {6}
    assert largest_difference(saved(out), saved(tmp_path / "whole")) < 1e-8
    assert [line["update"] for line in read_lines(out / "history.jsonl")] == [1, 2, 3, 4, 5, 6]
    environment = json.loads((out / "environment.json").read_text())
    assert (environment["ranks"], environment["resumed"][0]["ranks"]) == (first, second)
    # A finished run is not trained again, whoever asks.
    assert workers.run(2, _resumed, config, out)[1]["accuracy"] == results[0]["accuracy"]


def test_what_is_wrong_is_wrong_for_all(workers: Pool, world: Path, tmp_path: Path) -> None:
    config = make_config(world, optimizer__learning_rate=1e30)
    (first, said), second = workers.run(2, _whole_run, config, tmp_path / "wild")
    assert first == "TrainingFailure"
    assert said.startswith("update 2: the loss of task")
    assert second == (first, said)
    failure = json.loads((tmp_path / "wild" / "failure.json").read_text())
    assert (failure["reason"], failure["update"]) == (said, 2)

    kept = make_config(world)
    whole_run(kept, tmp_path / "done", None)
    first, second = workers.run(2, _whole_run, kept, tmp_path / "done")
    assert first == ("UserError", f"{tmp_path}/done: holds a finished run; expected a new directory (--out)")
    assert second == ("UserError", f"rank 0: {first[1]}")


def _one_fails(ranks: Ranks, error: Exception | None) -> Any:
    job = job_of(ranks)

    def do() -> int:
        if ranks.rank == 1 and error is not None:
            raise error
        return ranks.rank

    try:
        return job.each(do), job.told(do), job.first(do), job.any(ranks.rank == 1), job.smallest(None)
    except (UserError, RankFailed, ZeroDivisionError) as failed:
        return type(failed).__name__, str(failed)


def test_an_error_of_one_rank_is_everyones(workers: Pool) -> None:
    assert workers.run(2, _one_fails, None) == [(0, 0, 0, True, None), (1, 0, None, True, None)]
    found = workers.run(2, _one_fails, UserError("own.csv: no such file"))
    assert found == [("UserError", "rank 1: own.csv: no such file"), ("UserError", "own.csv: no such file")]
    found = workers.run(2, _one_fails, ZeroDivisionError("x"))
    assert found == [("RankFailed", "rank 1: ZeroDivisionError: x"), ("ZeroDivisionError", "x")]


class Fragile(Updater):
    """Runs out of memory on one rank while a pass has more than some tokens."""

    most: ClassVar[int] = 60

    def group_losses(self, groups: Any, number: int, total: int) -> Any:
        width = max(int(self.source.lengths[g.task][g.examples].max()) for g in groups)
        if self.job.ranks.rank == 1 and sum(map(len, groups)) * width > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().group_losses(groups, number, total)


def _fragile(ranks: Ranks, config: Config) -> tuple[Named, int | None]:
    model, mixture = tiny_runs.load(config, randomized=True)
    source, *_ = make_sources(model, mixture, config.cache)
    updater = Fragile(model.train(), source, config, ["mood", "nli"], job=job_of(ranks))
    updater.run(0)
    return weights(model), updater.limit.tokens


def test_a_pass_that_fits_one_rank_alone_is_halved_on_all(workers: Pool, world: Path) -> None:
    config = float64(world, max_tokens_per_pass="auto")
    (first, tokens), (second, others) = workers.run(2, _fragile, config)
    assert tokens == others
    assert tokens is not None
    assert tokens <= 64
    assert same_bits(first, second)
    assert largest_difference(first, updated(config, None, 1)) < 1e-9


def _drifted(ranks: Ranks, config: Config) -> str:
    model, mixture = tiny_runs.load(config)
    source, *_ = make_sources(model, mixture, config.cache)
    updater = Updater(model.train(), source, config, ["mood", "nli"], job=job_of(ranks))
    updater.run(0)
    updater.check(1)
    if ranks.rank == 1:
        with torch.no_grad():
            updater.parameters[1].view(-1)[0] += 1e-6
    try:
        updater.check(1)
    except TrainingFailure as error:
        return str(error)
    return "nothing"


def test_ranks_that_drift_apart_are_noticed(workers: Pool, world: Path) -> None:
    for said in workers.run(2, _drifted, make_config(world)):
        assert said.startswith("update 1: ")
        assert "is not the same on all ranks" in said


def _own_run(ranks: Ranks, configs: Sequence[Config], out: Path) -> Any:
    return _whole_run(ranks, configs[ranks.rank], out)


def test_ranks_with_other_data_are_refused(workers: Pool, world: Path, tmp_path: Path) -> None:
    """As where one machine has an older copy of a file."""
    own, older = world / "nli-train.jsonl", tmp_path / "nli-train.jsonl"
    older.write_text("".join(f"{line}\n" for line in own.read_text().splitlines()[:-1]))
    tasks = tiny_runs.tree(world)["mixture"]["tasks"]
    configs = [
        make_config(world, mixture__tasks=[tasks[0], {**tasks[1], "train": str(path)}])
        for path in (own, older)
    ]
    said = "task nli: rank 1 has other examples than rank 0; expected the same data on all"
    assert workers.run(2, _own_run, configs, tmp_path / "out") == [("UserError", said)] * 2
    assert not (tmp_path / "out").exists()


class OwnFinish(Method):
    """Does what no sum over ranks would give."""

    name: ClassVar[str] = "own_finish"

    def finish(self, update: Update) -> None:
        for parameter in update.parameters:
            parameter.grad = None if parameter.grad is None else parameter.grad.sign()


def _refused(ranks: Ranks, config: Config) -> str:
    model, mixture = tiny_runs.load(config)
    source, *_ = make_sources(model, mixture, config.cache)
    config = config.model_copy(update={"method": OwnFinish()})
    with pytest.raises(UserError, match="method own_finish has its own backward or finish") as error:
        Updater(model, source, config, ["mood", "nli"], job=job_of(ranks))
    return str(error.value)


def test_a_method_that_may_not_spread_is_refused(workers: Pool, world: Path) -> None:
    assert len(set(workers.run(2, _refused, make_config(world)))) == 1


# ---------------------------------------------------------------------- the benchmark


def _benchmark(ranks: Ranks, features: str) -> Any:
    module = script("ranks.py")
    small = {"mixture.batch_size": 3, "mixture.group_size": 2, "experts.count": 3, "experts.top_k": 2}
    setting = Setting("tiny", "full_ffn", features, length=8, overrides=small)
    return module["measured"](setting, "gar", job_of(ranks), "cpu", 1, 2)


@pytest.mark.parametrize("features", ["cached", "trained"])
def test_the_script_of_the_ranks(workers: Pool, features: str) -> None:
    (alone,) = workers.run(1, _benchmark, features)
    for found in workers.run(2, _benchmark, features):
        assert found["same_bits"]
        assert 0 < found["lowest"] <= found["ms"] <= found["highest"]
        assert found["bytes"] > alone["bytes"] == 0


# ---------------------------------------------------------------------- the command


def command(*arguments: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "gar", "train", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(line, env=environment, stdout=PIPE, stderr=PIPE, text=True)


@pytest.fixture(scope="module")
def own(world: Path) -> str:
    path = world / "own.yaml"
    path.write_text(yaml.safe_dump(tiny_runs.tree(world, optimizer__updates=100_000, checkpoint__every=2)))
    return str(path)


#: Where updates are replayed as graphs that exchange: a run's end, or a lost rank, may leave one waiting.
ON_GPUS = ("device=cuda", "backbone.trainable=true", "cache.enabled=false")
GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs")


@pytest.mark.parametrize("changes", [(), pytest.param(ON_GPUS, marks=GPUS)], ids=["here", "gpus"])
def test_a_lost_rank_ends_the_job_with_its_reason(own: str, tmp_path: Path, changes: tuple[str, ...]) -> None:
    """Killed at a later update: what was complete is there, and one line says what happened."""
    out = tmp_path / "run"
    running = command(own, *changes, "--ranks", "2", "--out", str(out))
    try:
        until(lambda: running.poll() is not None or list((out / "checkpoints").glob("0*")), 120)
        assert running.poll() is None, running.communicate()
        victim = next(pid for pid in children(running.pid) if rank_of(pid) == "1")
        os.kill(victim, signal.SIGKILL)
        _, said = running.communicate(timeout=60)
    finally:
        running.kill()
    expected = f"rank 1 was lost: its process {victim} ended without a reason"
    assert said.splitlines() == [f"error: {expected}"]
    assert running.returncode == 1
    failure = json.loads((out / "failure.json").read_text())
    assert (failure["error"], failure["reason"]) == ("RankLost", expected)
    assert (out / failure["checkpoint"] / "state.json").is_file()


def _has_checkpoint(out: Path) -> bool:
    return any((out / "checkpoints").glob("0*"))


@GPUS
def test_captured_runs_end_as_launched_ones(own: str, tmp_path: Path) -> None:
    """And as one that was interrupted, and went on."""
    rows = []
    for name, stops, capture in (("launched", 1, False), ("captured", 1, True), ("resumed", 2, True)):
        out = tmp_path / name
        changes = [*ON_GPUS, "optimizer.updates=80", f"capture={capture}".lower(), "precision=float32"]
        for turn in range(stops):
            resume = ["--resume"] if turn else []
            running = command(own, *changes, "--out", str(out), "--ranks", "2", *resume)
            if stops > turn + 1:
                until(partial(_has_checkpoint, out), 120)
                running.send_signal(signal.SIGINT)
            _, said = running.communicate(timeout=120)
            assert running.returncode in ((0, 130) if stops > turn + 1 else (0,)), said
        rows.append(torch.tensor([line["loss"] for line in read_lines(out / "history.jsonl")]))
    launched, captured, resumed = rows
    torch.testing.assert_close(captured, launched, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(resumed, captured, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False)])
def test_the_first_rank_speaks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], rank: str, speaks: bool
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    assert app.run(["trian"]) == 2
    assert capfd.readouterr().err.startswith("error: unknown command 'trian'") == speaks
    assert app.run(["sweep", "--help"]) == 2
    assert ("gar sweep runs in one process" in capfd.readouterr().err) == speaks


@pytest.mark.slow
def test_a_mistake_is_one_line_and_exit_code_2(own: str, tmp_path: Path) -> None:
    running = command(own, "method.name=garr", "--ranks", "2", "--out", str(tmp_path / "run"))
    printed, said = running.communicate(timeout=120)
    assert (printed, running.returncode) == ("", 2)
    (line,) = said.splitlines()
    assert line.startswith(f"error: {own}: method.name: unknown name 'garr'")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_accelerate_launches_ranks(own: str, tmp_path: Path) -> None:
    """As docs/ranks.md writes it; each of its processes is a rank, without a GPU too."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    out, few = tmp_path / "run", ["optimizer.updates=2", "device=cpu"]
    done = subprocess.run(
        [*launch, "--main_process_port", "0", "-m", "gar", "train", own, *few, "--out", out],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads((out / "environment.json").read_text())["ranks"] == 2


def children(pid: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    if not listed.is_file():
        pytest.skip("needs /proc")
    own = [int(child) for child in listed.read_text().split()]
    return [*own, *(inner for child in own for inner in children(child))]


def rank_of(pid: int) -> str:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().partition("=")[::2] for entry in entries).get("RANK", "")
