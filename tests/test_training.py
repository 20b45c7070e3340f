"""One update and the loop: against a slow float64 twin, across methods, memory limits and observations."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gar.config import Config
from gar.data import Mixture
from gar.data.batches import Group, Updates
from gar.data.tokenize import TokenizedSplit
from gar.errors import UserError
from gar.features.sources import make_sources, tokenized
from gar.methods import REGISTRY, Method, MethodState, Pass, Update, from_config
from gar.model.multitask import MultiTaskModel
from gar.nn import expert_banks
from gar.runs.history import History, read_lines
from gar.training import (
    Hooks,
    Interrupted,
    TrainingFailure,
    Updater,
    checkpoint,
    fit,
    train,
    train_from_config,
)
from gar.training import updater as module
from gar.training.checkpoint import state_tensors
from gar.training.gradients import total_norm
from gar.training.updater import Outcome, dropout_mask, warmup_factor
from support import oracles, tiny_runs
from support.tiny_runs import METHODS, largest_difference, make_config, same_bits, weights
from support.twins import ModelTwin

NAMES = ["mood", "nli"]
Gradients = dict[str, Tensor]


def float64(world: Path, **changes: Any) -> Config:
    changes = {"backbone__dtype": "float64", "cache__enabled": False, **changes}
    return make_config(world, **changes)


def schedule_of(mixture: Mixture, seed: int = 0) -> Updates:
    sizes = [len(task.train) for task in mixture.tasks]
    return Updates(NAMES, sizes, mixture.batch_size, mixture.group_size, seed)


def updater_of(config: Config, randomized: bool = False, dropout: bool = True) -> Updater:
    """``dropout=False`` takes that of the backbone away."""
    model, mixture = tiny_runs.load(config, randomized)
    for module_ in [] if dropout else model.modules():
        if isinstance(module_, nn.Dropout):
            module_.p = 0.0
    source, _ = make_sources(model, mixture, config.cache)
    return Updater(model.train(), source, config, NAMES)


def one_update(
    config: Config, number: int = 0, randomized: bool = True, dropout: bool = True
) -> tuple[Tensor, Gradients]:
    """Group losses and all gradients of one update."""
    updater = updater_of(config, randomized, dropout)
    update = updater.gradients(updater.schedule.groups(number), number)
    parameters = updater.model.named_parameters()
    return update.losses, {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def trained(config: Config, **options: Any) -> tuple[MultiTaskModel, dict[str, Any]]:
    model, mixture = tiny_runs.load(config)
    return model, fit(model, mixture, config, **options)


# ---------------------------------------------------------------------- the twin


class TrainedTwin(ModelTwin):
    """The training of a frozen backbone with LoRA experts in the final FFN, written from the specification.

    Batches come from ``Updates`` and dropout masks from ``dropout_mask``, which have tests of their own.
    """

    def __init__(self, model: MultiTaskModel, mixture: Mixture, config: Config) -> None:
        super().__init__(model)
        self.config, self.mixture = config, mixture
        self.parameters = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.tokens = tokenized(model, [task.train for task in mixture.tasks])
        self.schedule = schedule_of(mixture, config.seed)
        self.states = [
            [self._state(split, example) for example in range(len(split))] for split in self.tokens
        ]

    def _state(self, split: TokenizedSplit, example: int) -> tuple[Tensor, Tensor]:
        ids, _, types = self.model.tokens([(split, np.array([example]))])
        return self.read(ids, types)

    def update(self, number: int, total: int, warmup: str) -> None:
        groups = self.schedule.groups(number)
        listed = [(group.task, len(group)) for group in groups]
        keep = [self._keep(group, number) for group in groups]
        losses, probabilities = self._forward(groups, keep)
        loss = oracles.task_loss(losses, oracles.task_weights(listed))
        grads = self._gradients(loss)
        if self.config.method.name == "gar":
            shapes = {slot: tuple(shape) for slot, shape in self.bank.experts.template().items()}
            observed = oracles.template_gradients(lambda c: self._forward(groups, keep, c)[0], shapes)
            coefficient = self.config.method.to_config()["coefficient"]
            aligned = coefficient * oracles.alignment_loss(probabilities, observed)
            for name, grad in self._gradients(aligned).items():
                if "router" in name:
                    grads[name] = grads[name] + grad
        clipped = oracles.clip_global(list(grads.values()), self.config.optimizer.clip, slack=1e-6)
        rate = self.config.optimizer.learning_rate * oracles.warmup_factor(number, total, warmup)
        for name, grad in zip(grads, clipped, strict=True):
            changed, self.first[name], self.second[name] = oracles.adamw_step(
                self.parameters[name].detach(),
                grad,
                self.first[name],
                self.second[name],
                number + 1,
                rate,
                self.config.optimizer.weight_decay,
            )
            self.parameters[name] = changed.requires_grad_()
        self.norm = oracles.global_norm(list(grads.values()))

    def _gradients(self, loss: Tensor) -> Gradients:
        found = torch.autograd.grad(
            loss, list(self.parameters.values()), retain_graph=True, materialize_grads=True
        )
        return dict(zip(self.parameters, found, strict=True))

    def _keep(self, group: Group, number: int) -> Tensor:
        self.model.train()
        lengths = [split.lengths for split in self.tokens]
        keep = dropout_mask(self.model, lengths, [group], number, self.config.seed)
        assert keep is not None
        return keep

    def _forward(
        self, groups: Sequence[Group], keep: list[Tensor], change: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Group losses [M], and group probabilities [M, E] from detached routing inputs."""
        losses: list[Tensor] = []
        rows: list[Tensor] = []
        for group, masks in zip(groups, keep, strict=True):
            labels = self.mixture.tasks[group.task].train.labels
            own = []
            for mask, example in zip(masks, group.examples, strict=True):
                x, base = self.states[group.task][example]
                label = int(labels[example])
                own.append(self.example(NAMES[group.task], x, base, label, change, mask[: len(x)]))
            losses.append(torch.stack([example.loss for example in own]).mean())
            rows.append(torch.stack([example.q for example in own]).mean(0))
        return torch.stack(losses), torch.stack(rows)


@pytest.mark.parametrize("method", ["baseline", "gar"])
def test_five_updates_equal_the_slow_twin(world: Path, method: str) -> None:
    """Weights, clip, warm-up, AdamW, dropout: everything between batches and new parameters."""
    chosen: dict[str, Any] = {"name": method} | ({"coefficient": 5.0} if method == "gar" else {})
    config = float64(world, method=chosen, optimizer__warmup=0.5, optimizer__clip=0.5)
    model, mixture = tiny_runs.load(config)
    twin = TrainedTwin(model, mixture, config)
    started = weights(model)
    norms = []
    for number in range(5):
        twin.update(number, 5, "0.5")
        norms.append(twin.norm)
    history = History(None)
    lines: list[dict[str, Any]] = []
    history._add = lines.append  # type: ignore[method-assign, assignment]
    fit(model, mixture, config, history=history)
    found = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    expected = {name: p.detach() for name, p in twin.parameters.items()}
    assert largest_difference(found, expected) < 1e-10
    assert [line["gradient_norm"] for line in lines] == pytest.approx(norms, rel=1e-9)
    assert min(norms) < 0.5 < max(norms), "the clip acts in some updates and not in others"
    assert largest_difference(found, {name: started[name] for name in found}) > 1e-3


def test_gar_changes_the_router_alone_in_one_update(world: Path) -> None:
    _, plain = one_update(float64(world))
    _, aligned = one_update(float64(world, method={"name": "gar", "coefficient": 1.0}))
    changed = {name for name in plain if not torch.equal(plain[name], aligned[name])}
    assert changed == {"bank.router.weight", "bank.router.bias"}


@pytest.mark.parametrize("total", [1, 5, 10, 70, 2000])
def test_warmup_is_that_of_the_specification(total: int) -> None:
    found = [warmup_factor(u, total, 0.1) for u in range(min(total, 300))]
    assert found == pytest.approx(
        [oracles.warmup_factor(u, total) for u in range(min(total, 300))], abs=1e-15
    )


class HeadsOnly(Method):
    """A toy method whose backward reaches the heads alone."""

    name: ClassVar[str] = "heads_only"

    def backward(self, pass_: Pass) -> None:
        heads = [p for p in pass_.parameters if p.shape[0] in (2, 3) and p.dim() <= 2 and p.shape[-1] != 2]
        grads = torch.autograd.grad(pass_.task_loss, heads, allow_unused=True)
        for parameter, grad in zip(heads, grads, strict=True):
            parameter.grad = grad


def test_every_weight_decays_whatever_the_method_reaches(world: Path) -> None:
    """AdamW passes over parameters without gradient; its moments must not depend on the method."""
    _, grads = one_update(make_config(world, method=HeadsOnly()))
    model, _ = tiny_runs.load(make_config(world))
    assert list(grads) == [name for name, p in model.named_parameters() if p.requires_grad]
    assert not grads["bank.experts.A"].any()
    assert grads["heads.task_mood.weight"].any()


# ---------------------------------------------------------------------- pairing


def keeps_of(world: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[list[Any], Tensor]:
    """What two updates drew: examples and expert dropout mask of every group; and the first losses."""
    drawn: list[Any] = []
    first: list[Tensor] = []
    original, original_run = dropout_mask, Updater.run

    def watched(
        model: MultiTaskModel, lengths: Any, groups: Sequence[Group], number: int, seed: int, width: int
    ) -> Tensor | None:
        for group in groups:
            keep = original(model, lengths, [group], number, seed)
            drawn.append((number, group.number, group.examples.tolist(), None if keep is None else keep))
        return original(model, lengths, groups, number, seed, width)

    def noting(updater: Updater, number: int) -> Outcome:
        outcome = original_run(updater, number)
        first.append(torch.tensor(outcome.losses, dtype=torch.float64))
        return outcome

    monkeypatch.setattr(module, "dropout_mask", watched)
    monkeypatch.setattr(Updater, "run", noting)
    trained(float64(world, optimizer__updates=2, **changes))
    monkeypatch.undo()
    return drawn, first[0]


@pytest.mark.parametrize("trainable", [False, True])
def test_every_method_sees_the_same_weights_batches_and_dropout(
    world: Path, monkeypatch: pytest.MonkeyPatch, trainable: bool
) -> None:
    changes: dict[str, Any] = {"backbone__trainable": trainable}
    start = weights(tiny_runs.load(float64(world, **changes))[0])
    drawn, losses = keeps_of(world, monkeypatch, **changes)
    assert {number for number, *_ in drawn} == {0, 1}
    for name in METHODS:
        config = float64(world, method__name=name, **changes)
        assert same_bits(start, weights(tiny_runs.load(config)[0])), name
        other, found = keeps_of(world, monkeypatch, method__name=name, **changes)
        assert len(drawn) == len(other)
        for mine, theirs in zip(drawn, other, strict=True):
            assert mine[:3] == theirs[:3], name
            assert torch.equal(mine[3], theirs[3]), name
        assert torch.equal(losses, found), name


@pytest.mark.parametrize("site", ["lora_head", "full_ffn"])
@pytest.mark.parametrize("limit", [None, 60])
def test_methods_share_the_dropout_of_a_trained_backbone_under_one_split(
    world: Path, site: str, limit: int | None
) -> None:
    """Losses after an update hang on every mask of the backbone; other splits and updates have others."""
    changes: dict[str, Any] = {"backbone__trainable": True, "experts__site": site, "experts__dropout": 0.0}

    def losses(number: int = 0, limit: int | None = limit, **more: Any) -> Tensor:
        config = float64(world, max_tokens_per_pass=limit, **changes, **more)
        return one_update(config, number, randomized=False)[0]

    expected = losses(method__name="baseline")
    for name in METHODS:
        if site == "full_ffn" and name.startswith("stgc"):
            continue
        assert torch.equal(losses(method__name=name), expected), name
        assert torch.equal(losses(1, method__name=name), losses(1, method__name="baseline")), name
    assert not torch.allclose(losses(limit=1), expected, rtol=1e-3)
    assert not torch.allclose(losses(seed=1), expected, rtol=1e-3)


def test_another_seed_draws_another_start_order_and_dropout(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the pairing test, with the backbone's own dropout as the only thing left to differ."""
    drawn, losses = keeps_of(world, monkeypatch, backbone__trainable=True)
    other, found = keeps_of(world, monkeypatch, backbone__trainable=True, seed=1)
    assert not torch.equal(losses, found)
    assert [entry[2] for entry in drawn] != [entry[2] for entry in other]
    monkeypatch.setattr(module, "derive_seed", lambda *parts: hash(parts[2:]) + 1)
    _, moved = keeps_of(world, monkeypatch, backbone__trainable=True)
    assert not torch.equal(losses, moved)


def test_every_pass_of_every_update_has_a_stream_of_its_own(world: Path) -> None:
    """For the dropout of a trained backbone; afterwards torch's generator is as it was."""

    def drawn(number: int, first: int, **changes: Any) -> float:
        updater = updater_of(make_config(world, backbone__trainable=True, **changes))
        with updater.backbone_stream(number, first):
            return float(torch.rand(()))

    torch.manual_seed(3)
    before = torch.get_rng_state()
    streams = {drawn(number, first) for number in (0, 1) for first in (0, 3)} | {drawn(0, 0, seed=1)}
    assert len(streams) == 5
    assert drawn(1, 3) in streams
    assert drawn(1, 3, method__name="gar") in streams
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mask", ["shared", "per_expert"])
def test_the_dropout_mask_has_its_rate_and_is_new_in_every_update(world: Path, mask: str) -> None:
    config = make_config(world, experts__dropout=0.3, experts__dropout_mask=mask)
    model, mixture = tiny_runs.load(config)
    lengths = [split.lengths for split in tokenized(model, [task.train for task in mixture.tasks])]
    groups = schedule_of(mixture).groups(0)
    model.train()
    keep = dropout_mask(model, lengths, groups[:1], 0, 0)
    assert keep is not None
    assert float(keep.double().mean()) == pytest.approx(0.7, abs=0.05)
    for other in (
        dropout_mask(model, lengths, groups[:1], 1, 0),
        dropout_mask(model, lengths, groups[:1], 0, 1),
    ):
        assert other is not None
        assert not torch.equal(keep, other)
    model.eval()
    assert dropout_mask(model, lengths, groups, 0, 0) is None


@pytest.mark.parametrize("changes", [{}, {"backbone__trainable": True}, {"experts__site": "lora_head"}])
def test_coefficient_zero_is_baseline_to_the_last_bit(
    world: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    runs = []
    for n, method in enumerate(({"name": "baseline"}, {"name": "gar", "coefficient": 0})):
        config = make_config(world, method=method, optimizer__updates=7, **changes)
        model, result = trained(config, history=History(tmp_path / f"{n}.jsonl"))
        runs.append((weights(model), (tmp_path / f"{n}.jsonl").read_bytes(), result["accuracy"]))
    assert same_bits(runs[0][0], runs[1][0])
    assert runs[0][1:] == runs[1][1:]
    model, _ = trained(make_config(world, method={"name": "gar", "coefficient": 1.0}, **changes))
    assert not same_bits(runs[0][0], weights(model))


# ---------------------------------------------------------------------- passes and observations


def assert_same_update(found: tuple[Tensor, Gradients], expected: tuple[Tensor, Gradients]) -> None:
    assert torch.allclose(found[0], expected[0], rtol=0, atol=1e-10)
    assert largest_difference(found[1], expected[1]) < 1e-10


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("site", ["lora_ffn", "lora_head"])
def test_an_update_does_not_depend_on_its_passes(
    world: Path, monkeypatch: pytest.MonkeyPatch, method: str, site: str
) -> None:
    changes: dict[str, Any] = {"method__name": method, "experts__site": site}
    expected = one_update(float64(world, **changes))
    assert min(float(grad.abs().max()) for grad in expected[1].values()) > 0
    for limit in (1, 60, 10**6):
        assert_same_update(one_update(float64(world, max_tokens_per_pass=limit, **changes)), expected)
    for cost in (0, 10**9):
        monkeypatch.setattr(module, "PASS_COST", {"cpu": cost})
        assert_same_update(one_update(float64(world, **changes)), expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_trainable_backbone_does_not_depend_on_passes_either(world: Path, method: str) -> None:
    """But for its dropout: one pass is one group a pass without it."""
    changes: dict[str, Any] = {"method__name": method, "backbone__trainable": True}
    expected = one_update(float64(world, **changes), dropout=False)
    assert any(name.startswith("backbone.embeddings") for name in expected[1])
    for limit in (1, 60):
        found = one_update(float64(world, max_tokens_per_pass=limit, **changes), dropout=False)
        assert_same_update(found, expected)
    checkpointed = float64(world, backbone__gradient_checkpointing=True, **changes)
    assert_same_update(one_update(checkpointed), one_update(float64(world, **changes)))


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_full_ffn_does_not_depend_on_passes(world: Path, trainable: bool, top_k: int) -> None:
    changes: dict[str, Any] = {
        "experts__site": "full_ffn",
        "experts__top_k": top_k,
        "method": {"name": "gar", "coefficient": 1.0},
        "backbone__trainable": trainable,
    }
    expected = one_update(float64(world, **changes), dropout=False)
    found = one_update(float64(world, max_tokens_per_pass=1, **changes), dropout=False)
    assert_same_update(found, expected)


def test_a_trained_backbone_takes_all_groups_in_one_pass(world: Path) -> None:
    updater = updater_of(make_config(world, backbone__trainable=True, method__name="gar"))
    groups = updater.schedule.groups(0)
    assert len(groups) > 4
    assert len(updater.gradients(groups, 0).passes) == 1


@pytest.mark.parametrize("changes", [{}, {"backbone__trainable": True}, {"experts__site": "full_ffn"}])
def test_training_on_either_observation_path_is_the_same(world: Path, changes: dict[str, Any]) -> None:
    method = {"name": "gar", "coefficient": 1.0}
    one_pass, _ = trained(float64(world, method=method, **changes))
    per_group, _ = trained(float64(world, method=method, observation="per_group", **changes))
    assert largest_difference(weights(one_pass), weights(per_group)) < 1e-9


def test_evaluating_in_between_changes_nothing(world: Path, tmp_path: Path) -> None:
    quiet, _ = trained(make_config(world, method__name="gar"))
    path = tmp_path / "history.jsonl"
    measured, result = trained(
        make_config(world, method__name="gar", evaluation__every=2), history=History(path)
    )
    assert same_bits(weights(quiet), weights(measured))
    assert [line["update"] for line in read_lines(path) if "evaluation" in line] == [2, 4]
    assert set(read_lines(path)[2]["evaluation"]) == {"accuracy", "routing"}
    assert result["updates"] == 5


# ---------------------------------------------------------------------- budgets and failures


def test_epochs_count_the_largest_task(world: Path) -> None:
    _, result = trained(make_config(world, optimizer__epochs=2))
    assert result["updates"] == 2 * 3  # 21 examples in batches of 8
    _, result = trained(make_config(world, optimizer__epochs=0.4))
    assert result["updates"] == 1


def test_features_and_updates_are_counted_once_through(world: Path, tmp_path: Path) -> None:
    features: list[tuple[int, int]] = []
    seen: list[tuple[int, int, float]] = []
    hooks = Hooks(features=lambda *n: features.append(n), update=lambda *n: seen.append(n))
    trained(make_config(world, cache__directory=str(tmp_path)), hooks=hooks)
    assert {total for _, total in features} == {21 + 11 + 12 + 9}
    counts = [done for done, _ in features]
    assert counts == sorted(counts)
    assert counts[-1] == 53
    assert [line[:2] for line in seen] == [(n, 5) for n in range(1, 6)]


@pytest.mark.parametrize("method", ["baseline", "gar", "cagrad"])
@pytest.mark.parametrize("trainable", [False, True])
def test_a_non_finite_loss_names_update_task_and_group(world: Path, method: str, trainable: bool) -> None:
    config = make_config(
        world, optimizer__learning_rate=1e30, method__name=method, backbone__trainable=trainable
    )
    with pytest.raises(
        TrainingFailure, match=r"^update 2: the loss of task mood, group 0 is (nan|inf)"
    ) as failure:
        trained(config)
    assert failure.value.update == 2


def test_weights_that_are_no_longer_finite_are_not_measured(world: Path) -> None:
    config = make_config(world, optimizer__learning_rate=float("inf"), optimizer__updates=1)
    with pytest.raises(TrainingFailure, match=r"^update 1: .* is no longer finite"):
        trained(config)


def test_a_non_finite_gradient_names_update_task_and_group(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finite loss whose derivative is not: one example's loss has an infinite slope at its value."""

    class Cliff(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Tensor) -> Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * torch.inf

    original = Updater.group_losses
    broken = 4  # the second group of nli

    def watched(updater: Updater, groups: Any, number: int, total: int) -> Any:
        losses, of_groups = original(updater, groups, number, total)
        rows = list(losses.unbind())
        for n, group in enumerate(groups):
            if number == 2 and group.number == broken:
                rows[n] = Cliff.apply(rows[n])
        return torch.stack(rows), of_groups

    monkeypatch.setattr(Updater, "group_losses", watched)
    with pytest.raises(TrainingFailure, match=r"^update 3: the gradient of task nli, group 4 is not finite"):
        trained(make_config(world))


def test_a_group_is_blamed_only_for_its_own_gradient(world: Path) -> None:
    updater = updater_of(make_config(world))
    groups = updater.schedule.groups(0)
    assert updater.broken_group(groups, 0) is None
    with torch.no_grad():
        updater.model.heads["task_nli"].weight.fill_(torch.nan)
    found = updater.broken_group(groups, 0)
    assert found is not None
    assert NAMES[found.task] == "nli"


# ---------------------------------------------------------------------- one update, and what methods keep


def test_the_loop_runs_the_updater(world: Path) -> None:
    config = make_config(world, method__name="gar", optimizer__warmup=0.5)
    by_loop, _ = trained(config)
    updater = updater_of(config)
    assert updater.total == 5
    outcomes = [updater.run(number) for number in range(5)]
    assert same_bits(weights(by_loop), weights(updater.model))
    rates = [config.optimizer.learning_rate * oracles.warmup_factor(n, 5, "0.5") for n in range(5)]
    assert [outcome.learning_rate for outcome in outcomes] == pytest.approx(rates, rel=1e-15)
    groups = updater.schedule.groups(4)
    assert len(outcomes[4].losses) == len(groups)
    weighted = sum(g.task_weight * loss for g, loss in zip(groups, outcomes[4].losses, strict=True))
    assert sum(outcomes[4].tasks.values()) / 2 == pytest.approx(weighted, rel=1e-12)


def test_the_norm_of_float32_gradients_has_the_digits_of_float64() -> None:
    """On a CPU: a float32 sum of this length is off in the sixth digit, elsewhere with other threads."""
    parts = [1e-3 * torch.randn(shape) for shape in ((300, 1000), (7,), (2, 3, 5))]
    expected = float(torch.cat([part.double().flatten() for part in parts]).norm())
    assert float(total_norm(parts)) == pytest.approx(expected, rel=1e-14)


class Balanced(Method):
    """A toy of loss-free balancing: a running load, and a bias that lifts what it finds too rarely chosen."""

    name: ClassVar[str] = "balanced"
    speed: float = 0.05

    @property
    def observes(self) -> frozenset[str]:
        return frozenset({"routing"})

    def initial_state(self, model: nn.Module) -> MethodState:
        (bank,) = expert_banks(model)
        bias = bank.router.add_selection_bias()
        return {"load": torch.rand_like(bias), "bias": bias, "updates": torch.zeros((), dtype=torch.int64)}

    def after_step(self, update: Update) -> None:
        assert not torch.is_grad_enabled()
        load, bias = update.state["load"], update.state["bias"]
        (site,) = update.sites
        counts = site.selections().sum(0).to(load.dtype)
        load.mul_(0.7).add_(0.3 * counts / counts.sum())
        bias.add_(self.speed * (load.mean() - load).sign())
        update.state["updates"].add_(1)


class Remembering(Method):
    """Keeps a module: the mean of the heads' weights over the updates, after the step."""

    name: ClassVar[str] = "remembering"

    def initial_state(self, model: nn.Module) -> MethodState:
        assert isinstance(model, MultiTaskModel)
        kept = nn.ModuleDict({"head": nn.Linear(32, 3)})
        kept.register_buffer("updates", torch.zeros(()))
        return kept

    def after_step(self, update: Update) -> None:
        kept, head = update.state, update.passes[0].parameters[-2]
        kept.updates += 1
        kept["head"].weight += (head - kept["head"].weight) / kept.updates


@pytest.fixture
def own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (Balanced, Remembering):
        monkeypatch.setitem(REGISTRY, cls.name, cls)


def interrupted(config: Config, out: Path, after: int) -> None:
    def stop(done: int, total: int, loss: float) -> None:
        if done == after:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        train_from_config(config, out, hooks=Hooks(update=stop))


def watched_states(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The method's state after every update, as copies."""
    seen: list[dict[str, Tensor]] = []
    original = Updater.run

    def run(updater: Updater, number: int) -> Outcome:
        outcome = original(updater, number)
        seen.append({name: t.detach().clone() for name, t in state_tensors(updater.state).items()})
        return outcome

    monkeypatch.setattr(Updater, "run", run)
    return seen


@pytest.mark.parametrize("name", ["balanced", "remembering"])
def test_what_a_method_keeps_survives_a_resume_to_the_last_bit(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_methods: None, name: str
) -> None:
    config = make_config(world, method__name=name, optimizer__updates=6, checkpoint__every=2)
    states = watched_states(monkeypatch)
    result = train_from_config(config, tmp_path / "whole")
    whole = states.copy()
    assert len(whole) == 6
    assert not any(torch.equal(whole[0][key], whole[-1][key]) for key in whole[0] if "head.bias" not in key)
    states.clear()
    out = tmp_path / "run"
    interrupted(config, out, after=3)
    assert (out / "checkpoints" / "00000003" / checkpoint.METHOD).is_file()
    said: list[str] = []
    resumed = train_from_config(config, out, resume=True, hooks=Hooks(message=said.append))
    assert not said
    assert len(states) == 6
    for mine, theirs in zip(states, whole, strict=True):
        assert same_bits(mine, theirs)
    assert {k: v for k, v in resumed.items() if k != "timing"} == {
        k: v for k, v in result.items() if k != "timing"
    }
    for file in ("history.jsonl", "model/model.safetensors"):
        assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_a_selection_bias_belongs_to_the_model(world: Path, tmp_path: Path, own_methods: None) -> None:
    """It changes what is chosen in training and afterwards; a saved model brings it along."""
    config = make_config(world, method={"name": "balanced", "speed": 0.5})
    train_from_config(config, tmp_path / "run")
    loaded = MultiTaskModel.from_pretrained(tmp_path / "run" / "model")
    model, _ = trained(config)
    bias = loaded.bank.router.selection_bias
    assert bias is not None
    assert bias.abs().max() > 0.4
    other = model.bank.router.selection_bias
    assert other is not None
    assert torch.equal(bias, other)
    texts = ["w1 w2", "w25 w11 w3"]
    found = loaded.predict_probabilities("mood", texts)
    assert torch.equal(found, model.predict_probabilities("mood", texts))
    with torch.no_grad():
        bias.copy_(torch.tensor([-100.0, 0.0, 100.0]))
    assert not torch.equal(found, loaded.predict_probabilities("mood", texts))
    with_none, _ = trained(make_config(world, method={"name": "balanced", "speed": 0.0}))
    assert same_bits(
        weights(trained(make_config(world, method__name="baseline"))[0]),
        {name: t for name, t in weights(with_none).items() if "selection_bias" not in name},
    )


def test_the_start_of_a_state_depends_on_the_seed_alone(world: Path, own_methods: None) -> None:
    def start(seed: int) -> Tensor:
        torch.rand(3)
        state = updater_of(make_config(world, method__name="balanced", seed=seed)).state
        assert isinstance(state, dict)
        return state["load"]

    assert torch.equal(start(1), start(1))
    assert not torch.equal(start(1), start(2))


def test_a_checkpoint_of_a_method_without_state_has_no_file_for_it(world: Path, tmp_path: Path) -> None:
    interrupted(make_config(world, method__name="gar"), tmp_path, after=2)
    (found,) = (tmp_path / "checkpoints").iterdir()
    assert {path.name for path in found.iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    }


@pytest.mark.parametrize("how", ["flip", "remove", "another shape"])
def test_a_damaged_or_foreign_state_is_passed_over_with_a_line(
    world: Path, tmp_path: Path, own_methods: None, how: str
) -> None:
    config = make_config(world, method__name="balanced", optimizer__updates=6, checkpoint__every=2)
    train_from_config(config, tmp_path / "whole")
    out = tmp_path / "run"
    interrupted(config, out, after=4)
    path = out / "checkpoints" / "00000004" / checkpoint.METHOD
    if how == "flip":
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    elif how == "remove":
        path.unlink()
    else:
        updater = updater_of(config)
        state = {"load": torch.zeros(4)}
        checkpoint.save(path.parent.parent, 4, updater.model, updater.optimizer, {"seconds": 1.0}, 2, state)
    said: list[str] = []
    train_from_config(config, out, resume=True, hooks=Hooks(message=said.append))
    (line,) = said
    assert line.startswith(f"checkpoint {path.parent} is damaged (")
    assert line.endswith("); trying the one before it")
    assert checkpoint.METHOD in line
    for file in ("history.jsonl", "model/model.safetensors"):
        assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_a_state_that_is_no_longer_finite_is_not_kept(world: Path, own_methods: None) -> None:
    config = make_config(world, method={"name": "balanced", "speed": 1e39}, optimizer__updates=1)
    with pytest.raises(TrainingFailure, match=r"^update 1: .*bias is no longer finite"):
        trained(config)


def test_groups_know_their_task_in_a_run(world: Path) -> None:
    updater = updater_of(make_config(world, method__name="gar", max_tokens_per_pass=60))
    groups = updater.schedule.groups(0)
    update = updater.gradients(groups, 0)
    assert len(update.passes) > 1
    assert update.tasks.tolist() == [group.task for group in groups]
    assert update.task_count == 2


# ---------------------------------------------------------------------- from Python


def test_train_takes_options_of_the_optimizer_and_the_run(world: Path) -> None:
    config = make_config(world)
    model, mixture = tiny_runs.load(config)
    cache = {"directory": config.cache.directory}
    result = train(model, mixture, from_config("gar"), updates=3, seed=4, cache=cache, device="cpu")
    assert (result["method"], result["updates"], result["seed"], result["mixture"]) == ("gar", 3, 4, "tiny")
    assert result["examples"] == {"mood": [21, 12], "nli": [11, 9]}
    with pytest.raises(UserError, match="unknown option 'updats'; did you mean 'updates'"):
        train(model, mixture, updats=3)
    with pytest.raises(TypeError, match="either config= or method"):
        train(model, mixture, config=config, updates=3)


def test_train_gives_what_the_configuration_gives(world: Path) -> None:
    config = make_config(world, method__name="gar")
    by_config, _ = trained(config)
    model, mixture = tiny_runs.load(config)
    cache = {"directory": config.cache.directory}
    train(model, mixture, from_config("gar"), updates=5, learning_rate=1e-2, cache=cache, device="cpu")
    assert same_bits(weights(by_config), weights(model))
