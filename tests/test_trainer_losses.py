"""Router losses by name in the trainers: the classes of gar.methods at OLMoE's routers, and plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

import gar
from gar.integrations import GARArguments
from gar.integrations._terms import able
from gar.methods import REGISTRY, RouterTerm, register
from support.tiny import relative_error
from support.tiny_training import Gradients, examples_of, gradients, make, olmoe, slow_losses

TOP_K = 2
LOSSES: dict[str, list[str]] = {
    "zloss": ["zloss=0.3"],
    "global balance": ["global_balance=0.5"],
    "simbal": ["simbal=0.2"],
    "all": ["zloss=0.3", "global_balance=0.5", "simbal=0.2"],
}


@pytest.mark.numerics
@pytest.mark.parametrize("sizes", [(8, 1), (4, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("name", list(LOSSES))
def test_a_router_gets_the_losses_of_the_whole_update(
    name: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    """And every other parameter what the plain trainer gives it, to the bit."""
    batches = {"rows": sizes[0], "steps": sizes[1]}
    plain = gradients(make(tmp_path / "plain", trainer=transformers.Trainer, sizes=batches))
    trainer = make(tmp_path / "ours", sizes=batches, coefficient=0.0, router_losses=LOSSES[name])
    examples = examples_of(trainer, 8)
    found, expected = gradients(trainer), slow_losses(LOSSES[name], examples)[1]
    for key, grad in found.items():
        if key in expected:
            assert relative_error(grad - plain[key], expected[key]) < 1e-5
            assert float(expected[key].norm()) > 1e-4
        else:
            assert torch.equal(grad, plain[key])


def test_a_copy_that_peft_trains_gets_them(tmp_path: Path) -> None:
    """simbal reads the weights: those of the copy, beside which the original stands still."""

    def found(**options: Any) -> Gradients:
        config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"])
        return gradients(make(tmp_path, peft.get_peft_model(olmoe(), config), coefficient=0.0, **options))

    plain, ours = found(), found(router_losses=LOSSES["all"])
    expected = gradients(make(tmp_path, coefficient=0.0, router_losses=LOSSES["all"]))
    without = gradients(make(tmp_path, coefficient=0.0))
    for layer in range(2):
        theirs = f"base_model.model.model.layers.{layer}.mlp.gate.modules_to_save.default.weight"
        name = f"model.layers.{layer}.mlp.gate.weight"
        assert relative_error(ours[theirs] - plain[theirs], expected[name] - without[name]) < 1e-5


def test_an_adapter_on_the_router_has_no_single_weight(tmp_path: Path) -> None:
    config = peft.LoraConfig(target_parameters=["mlp.gate.weight"], target_modules=["q_proj"])
    trainer = make(
        tmp_path, peft.get_peft_model(olmoe(), config), coefficient=0.0, router_losses=LOSSES["simbal"]
    )
    with pytest.raises(gar.UserError, match="needs one, without an adapter beside it"):
        trainer.train()


def test_beside_the_objective_and_the_balance_loss_they_add_up(tmp_path: Path) -> None:
    def added(**options: Any) -> Gradients:
        found = gradients(make(tmp_path, sizes={"rows": 4, "steps": 2}, **options))
        return {name: grad for name, grad in found.items() if ".gate." in name}

    nothing = added(coefficient=0.0)
    objective = {"coefficient": 2.0, "balance_coefficient": 0.3, "group_size": 2}
    apart = added(**objective), added(coefficient=0.0, router_losses=LOSSES["all"])
    together = added(**objective, router_losses=LOSSES["all"])
    for name, grad in together.items():
        expected = apart[0][name] + apart[1][name] - 2 * nothing[name]
        assert relative_error(grad - nothing[name], expected) < 1e-6
    assert relative_error(apart[0][name], together[name]) > 1e-3


def test_global_balance_is_the_balance_loss_over_k(tmp_path: Path) -> None:
    """The two formulas differ in whether the shares of selections sum to 1 or to k."""
    ours = gradients(make(tmp_path, coefficient=0.0, router_losses=[f"global_balance={TOP_K * 0.25}"]))
    theirs = gradients(make(tmp_path, coefficient=0.0, balance_coefficient=0.25))
    for name, grad in theirs.items():
        assert relative_error(ours[name], grad) < 1e-6


@pytest.mark.parametrize("statistics", ["mean", "off"])
def test_coefficient_zero_is_the_plain_trainer_to_the_bit(statistics: str, tmp_path: Path) -> None:
    def state(**options: Any) -> Gradients:
        trainer = make(tmp_path, sizes={"rows": 4, "steps": 2}, **options)
        trainer.train()
        return dict(trainer.model.state_dict())

    plain = state(trainer=transformers.Trainer)
    losses = [f"{name}=0" for name in able()]
    ours = state(coefficient=0.0, router_losses=losses, statistics=statistics)
    assert all(torch.equal(ours[name], value) for name, value in plain.items())
    assert not GARArguments(coefficient=0.0, router_losses=losses, statistics="off").observes


def test_the_value_is_logged_and_a_scaler_undone(tmp_path: Path) -> None:
    options = {"coefficient": 0.0, "router_losses": ["simbal=0.2", "zloss=0.3"]}
    found = gradients(make(tmp_path, **options))
    scaled = make(tmp_path, **options)
    scaled.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for name, grad in gradients(scaled).items():
        assert relative_error(grad / 2**12, found[name]) < 1e-6
    trainer = make(tmp_path, sizes={"updates": 1}, **options)
    examples = examples_of(trainer, 8)
    trainer.train()
    logged = next(log["gar/router_loss"] for log in trainer.state.log_history if "gar/router_loss" in log)
    assert logged == pytest.approx(slow_losses(["simbal=0.2", "zloss=0.3"], examples)[0], rel=1e-5)


def test_what_the_trainers_can_take_says_the_class(tmp_path: Path) -> None:
    assert able() == ["zloss", "global_balance", "simbal"]
    before = dict(REGISTRY)
    try:

        @register
        class Sharp(RouterTerm):
            """Of a user's own."""

            name = "sharp"
            reads = frozenset({"units"})

            def at(self, site: Any, update: Any) -> Tensor:
                entropy = site.unit_sums(lambda r: -(r.logits.softmax(-1) * r.logits.log_softmax(-1)).sum(-1))
                return entropy.sum() / site.unit_count()

        assert "sharp" in able()
        ours = gradients(make(tmp_path, coefficient=0.0, router_losses=["sharp=0.5"]))
        plain = gradients(make(tmp_path, coefficient=0.0))
        moved = {name for name, grad in ours.items() if not torch.equal(grad, plain[name])}
        assert moved == {name for name in ours if ".gate." in name}
    finally:
        REGISTRY.clear()
        REGISTRY.update(before)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (["zlos"], r"GARArguments\.router_losses: unknown name 'zlos'.*did you mean 'zloss'"),
        (["loss_free"], "loss_free is no loss of a router's logits or weights alone; expected one of zloss"),
        (["gar=1"], "gar is no loss of a router's logits or weights alone"),
        (["task_information"], "task_information is no loss"),
        (["zloss=high"], "'zloss=high'; expected zloss=COEFFICIENT"),
        (["zloss=-1"], r"GARArguments\.router_losses has 'zloss=-1'; expected a finite coefficient of 0"),
        ("zloss", r"GARArguments\.router_losses is 'zloss'; expected a list"),
        (["zloss", "zloss=1"], "has zloss twice"),
    ],
    ids=str,
)
def test_what_is_none_is_one_clear_line(losses: Any, said: str) -> None:
    with pytest.raises(gar.UserError, match=said) as caught:
        GARArguments(router_losses=losses)
    assert "\n" not in str(caught.value)


def test_a_command_line_has_them() -> None:
    (options,) = transformers.HfArgumentParser(GARArguments).parse_args_into_dataclasses(
        ["--router_losses", "zloss=1e-3", "simbal"]
    )
    assert [(type(term).name, term.coefficient) for term in options.terms] == [
        ("zloss", 1e-3),
        ("simbal", 1e-3),
    ]
