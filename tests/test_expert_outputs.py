"""What each expert makes of its unit, and the method that reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gar
from gar.errors import UserError
from gar.methods import GAR, Baseline, OrthogonalityVariance
from gar.methods.ortho_variance import overlap
from gar.nn import Experts, RoutedExperts, RoutedFFN, RoutedLoRA, expert_banks
from gar.observation import Observed
from gar.routing import Router
from support import oracles
from support.tiny import (
    Batch,
    Gradients,
    make_batch,
    make_model,
    randomize,
    run_passes,
    twin_experts,
    update_gradients,
    with_keep,
)
from support.tiny_moe import tiny_moe

D = 5
BANKS: dict[str, Callable[[], RoutedExperts]] = {
    "lora": lambda: RoutedLoRA(D, 3, experts=4, rank=2, top_k=2, alpha=3.0),
    "lora dropout": lambda: RoutedLoRA(D, 3, experts=4, rank=2, top_k=3, dropout=0.4),
    "lora per expert": lambda: RoutedLoRA(
        D, 3, experts=3, rank=2, top_k=2, dropout=0.4, dropout_mask="per_expert"
    ),
    "lora top-1": lambda: RoutedLoRA(D, 3, experts=4, rank=2, top_k=1),
    "lora one": lambda: RoutedLoRA(D, 3, experts=1, rank=2, top_k=1),
    "ffn": lambda: RoutedFFN(D, 4, experts=4, top_k=2, activation=torch.tanh),
    "ffn gated": lambda: RoutedFFN(D, 4, experts=3, top_k=3, gated=True, bias=False, activation=torch.tanh),
    "ffn top-1": lambda: RoutedFFN(D, 4, experts=4, top_k=1, activation=torch.tanh),
}


def seen_by(bank: RoutedExperts, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Observed]:
    """The bank's output, and the observation, inside of which nothing was back-propagated."""
    with gar.observe(bank, outputs=True) as observed:
        torch.manual_seed(3)  # of the dropout
        output, _ = bank(x, mask)
    return output, observed


@pytest.mark.parametrize("units", [(7,), (3, 4)], ids=["examples", "tokens"])
@pytest.mark.parametrize("name", list(BANKS))
def test_gated_outputs_add_up_to_the_forward(name: str, units: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    bank = BANKS[name]().double()
    randomize(bank)
    x = torch.randn(*units, D, dtype=torch.float64)
    mask = torch.rand(units) > 0.3 if len(units) > 1 else None
    output, observed = seen_by(bank, x, mask)
    routing, found = observed.site.routing, observed.site.expert_outputs()
    k = bank.router.top_k
    assert found.shape == (*units, k, output.shape[-1])
    gates = torch.zeros(*units, k, dtype=torch.float64)
    for at in torch.cartesian_prod(*map(torch.arange, units)).reshape(-1, len(units)).tolist():
        chosen = routing.selected[tuple(at)].nonzero().flatten()  # in the order of experts
        gates[tuple(at)][: len(chosen)] = routing.gates[tuple(at)][chosen]
        if not len(chosen):
            assert not found[tuple(at)].any(), "padding has no outputs"
    torch.testing.assert_close((gates.unsqueeze(-1) * found).sum(-2), output)


@pytest.mark.parametrize("name", ["lora", "lora top-1", "ffn", "ffn gated"])
def test_each_output_and_its_gradient_is_that_of_its_expert_alone(name: str) -> None:
    torch.manual_seed(1)
    bank = BANKS[name]().double()
    randomize(bank)
    x = torch.randn(6, D, dtype=torch.float64, requires_grad=True)
    _, observed = seen_by(bank, x, None)
    found, k = observed.site.expert_outputs(), bank.router.top_k
    weight = torch.randn_like(found)
    slots = {slot: getattr(bank.experts, slot) for slot in bank.experts.slots}
    twins = {slot: value.detach().clone().requires_grad_() for slot, value in slots.items()}
    expected = torch.zeros(6, k, found.shape[-1], dtype=torch.float64)
    for e in range(bank.experts.count):
        gate = torch.zeros(6, bank.experts.count, dtype=torch.float64)
        gate[:, e] = 1
        alone = twin_experts(bank, twins, x.detach(), gate)
        for i in range(6):
            chosen = observed.site.routing.selected[i].nonzero().flatten().tolist()
            if e in chosen:
                expected = expected.index_put(
                    (torch.tensor(i), torch.tensor(chosen.index(e))), alone[i], accumulate=True
                )
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad((weight * found).sum(), [*slots.values()])
    for grad, own in zip(
        grads, torch.autograd.grad((weight * expected).sum(), [*twins.values()]), strict=True
    ):
        torch.testing.assert_close(grad, own)
    assert not torch.autograd.grad(found.sum(), [x], allow_unused=True)[0], "inputs are constants"


def test_they_are_captured_only_where_they_are_asked_for() -> None:
    bank = BANKS["lora"]()
    with gar.observe(bank, gradients=False) as observed:
        assert not bank.experts._forward_hooks
        bank(torch.randn(2, D))
    with pytest.raises(RuntimeError, match=r"observe\(\.\.\., outputs=False\)"):
        observed.site.expert_outputs()
    assert GAR().observes == {"routing", "gradients"}


class Sum(Experts):
    """Experts of a user's own, which have no outputs apart."""

    slots = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.count, self.scale = 2, torch.nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, gates: Tensor, active: Tensor, each: int | None = None) -> Tensor:
        return x * (gates @ self.scale).unsqueeze(-1)


def test_where_there_are_none_it_is_one_clear_line() -> None:
    _, observed = seen_by(RoutedExperts(Router(D, 2, 2), Sum()), torch.randn(3, D), None)
    with pytest.raises(UserError, match=r"Sum gives its gated sum alone; expected experts with outputs"):
        observed.site.expert_outputs()
    with (
        pytest.raises(UserError, match="outputs of single experts are not read from layers of transformers"),
        gar.observe(tiny_moe("olmoe"), outputs=True),
    ):
        pass


# --------------------------------------------------------------------------------------------------
# The method
# --------------------------------------------------------------------------------------------------


def test_the_terms_at_their_extremes() -> None:
    y = torch.zeros(2, 2, 3, dtype=torch.float64)
    y[0, 0, 0], y[0, 1, 1] = 2, 5  # orthogonal
    y[1, :, 0] = torch.tensor([2.0, -5.0])  # along one line
    assert overlap(y).tolist() == [0, (4 + 25) / 2]
    both, groups = torch.ones(2, 2, dtype=torch.bool), [0, 1]
    assert float(oracles.overlap(y, both, groups, [0.5, 0.5])) == pytest.approx(14.5 / 2)
    assert overlap(y[:, :1]).tolist() == [0, 0], "one expert has no pair"
    assert overlap(torch.zeros(3, 0, 2, 4)).shape == (3, 0)
    assert float(oracles.score_variance(torch.zeros(4, 8))) == pytest.approx(0)
    assert float(oracles.score_variance(torch.tensor([[200.0, 0, 0, 0]]))) == pytest.approx(3 / 16)
    assert float(oracles.score_variance(torch.zeros(4, 1))) == 0


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_overlap_of_any_size(scale: float) -> None:
    y = torch.randn(4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(overlap(scale * y), scale**2 * overlap(y))
    y = (scale * y).requires_grad_()
    assert torch.autograd.gradcheck(lambda y: overlap(y / scale), [y], eps=1e-6 * scale)
    turned, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
    torch.testing.assert_close(overlap(y @ turned), overlap(y))
    torch.testing.assert_close(overlap(y[:, [2, 0, 1]]), overlap(y))


def added(site: str, batch: Batch | None = None, zero: bool = False, **options: Any) -> Gradients:
    """What both terms add to Baseline's gradients."""
    model = make_model(site, **options)
    if zero:
        torch.nn.init.zeros_(model.bank.experts.get_parameter("B"))
    batch = with_keep(model, batch or make_batch())
    method = OrthogonalityVariance(coefficient=0.5, variance_coefficient=0.5)
    found, plain = update_gradients(model, batch, method), update_gradients(model, batch, Baseline())
    return {name: grad - plain[name] for name, grad in found.items()}


@pytest.mark.parametrize("site", ["lora_ffn", "full_ffn", "lora_head"])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_what_it_reaches(site: str, top_k: int) -> None:
    """The router, and for two experts or more the experts; never what lies below."""
    moved = {name for name, grad in added(site, top_k=top_k).items() if grad.any()}
    bank = "head.deltas" if site == "lora_head" else "experts"
    assert f"{bank}.router.weight" in moved
    assert {name for name in moved if "router" not in name} <= {
        f"{bank}.experts.{slot}" for slot in ("A", "B", "W1", "W2", "b1", "b2")
    }
    assert any(".experts." in f".{name}" and "router" not in name for name in moved) == (top_k > 1)


def test_degenerate_updates_are_finite() -> None:
    """One expert, one token, outputs that are all zero."""
    one = {name: grad for name, grad in added("lora_ffn", experts=1, top_k=1).items() if grad.any()}
    assert not one, "one expert: no pair and no variance"
    token = replace(make_batch((1, 1), group_size=1, length=1))
    for grads in (added("lora_ffn", token), added("lora_ffn", zero=True), added("lora_head", zero=True)):
        assert all(torch.isfinite(grad).all() for grad in grads.values())
    assert not added("lora_ffn", zero=True)["experts.experts.A"].any(), "adapters begin at zero outputs"


def test_one_coefficient_alone() -> None:
    model, batch = make_model("lora_ffn"), make_batch()
    variance = OrthogonalityVariance(coefficient=0, variance_coefficient=0.5)
    overlapping = OrthogonalityVariance(coefficient=0.5, variance_coefficient=0)
    assert variance.observes == {"routing"}, "outputs are not computed for the variance"
    plain, found = update_gradients(model, batch, Baseline()), update_gradients(model, batch, variance)
    assert {name for name in plain if not torch.equal(found[name], plain[name])} == {
        "experts.router.weight",
        "experts.router.bias",
    }
    assert overlapping.router_loss(run_passes(model, model, batch, overlapping)) is None
    assert len(expert_banks(model)) == 1
