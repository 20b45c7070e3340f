"""Gates and the router against their definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import gar
from gar.routing import Router, mean_over_tokens, select
from support import oracles

LOGITS = {
    "units": torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    "tokens": torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
    "large": 300 * torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)),
    "one unit": torch.tensor([0.5, -2.0, 3.0, 1.0, 0.0], dtype=torch.float64),
    "one expert": torch.randn(4, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(4)),
}


def jacobians(function: Any, logits: Tensor) -> Tensor:
    """[..., E, E]: the derivative of each row's gates by its own logits."""
    rows = logits.reshape(-1, logits.shape[-1])
    return torch.stack([torch.autograd.functional.jacobian(function, row) for row in rows])


@pytest.mark.parametrize("name", list(LOGITS))
@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_masked_softmax_equals_the_oracle(name: str, k: int) -> None:
    z = LOGITS[name]
    k = min(k, z.shape[-1])
    gates = gar.masked_softmax(z, k)
    torch.testing.assert_close(gates, oracles.masked_softmax(z, k), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gates.sum(-1), torch.ones_like(gates[..., 0]), rtol=1e-14, atol=0)
    assert torch.equal(gates == 0, ~oracles.selected(z, k)) or name == "large"
    assert ((gates == 0) | oracles.selected(z, k)).all()
    assert torch.equal(select(z, k), oracles.selected(z, k))
    torch.testing.assert_close(
        jacobians(lambda row: gar.masked_softmax(row, k), z),
        jacobians(lambda row: oracles.masked_softmax(row, k), z),
        rtol=1e-12,
        atol=1e-14,
    )
    same32 = gar.masked_softmax(z.float(), k)
    torch.testing.assert_close(same32.double(), gates, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", list(LOGITS))
def test_straight_through_is_one_hot_with_the_full_jacobian(name: str, dtype: torch.dtype) -> None:
    z = LOGITS[name].to(dtype)
    gates = gar.straight_through(z)
    hard = functional.one_hot(z.argmax(-1), z.shape[-1]).to(dtype)
    assert torch.equal(gates, hard), "one-hot to the last bit"
    assert torch.equal(gates.double(), oracles.straight_through_gate(z))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    full = jacobians(lambda row: row.softmax(-1), z)
    torch.testing.assert_close(jacobians(gar.straight_through, z), full, rtol=tolerance, atol=tolerance)
    if name == "units":
        assert full.abs().amax(dim=(1, 2)).min() > 1e-2, "a vanishing Jacobian would test nothing"


@pytest.mark.parametrize("k", [1, 2, 3])
def test_ties_still_select_k(k: int) -> None:
    z = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 2.0, 2.0]])
    assert select(z, k).sum(-1).tolist() == [k, k]
    torch.testing.assert_close(gar.masked_softmax(z, k).sum(-1), torch.ones(2))
    assert sorted(gar.masked_softmax(z, k)[0].unique().tolist()) == pytest.approx([0.0, 1 / k])


@pytest.mark.parametrize("k", [1, 2, 4])
def test_router_routing(k: int) -> None:
    router = Router(6, 4, k).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    routing = router(x)
    logits = x @ router.weight.T + router.bias
    torch.testing.assert_close(routing.logits, logits, rtol=1e-12, atol=1e-14)
    gates = oracles.straight_through_gate(logits) if k == 1 else oracles.masked_softmax(logits, k)
    torch.testing.assert_close(routing.gates, gates, rtol=1e-12, atol=1e-14)
    assert torch.equal(routing.selected, oracles.selected(logits, k))
    assert routing.mask is None


@pytest.mark.parametrize("k", [1, 2, 4])
def test_mask_zeroes_gates_and_selection(k: int) -> None:
    router = Router(6, 4, k)
    x, mask = torch.randn(3, 5, 6), torch.rand(3, 5) > 0.4
    mask[:, 0] = True
    routing, free = router(x, mask), router(x)
    assert (routing.gates[~mask] == 0).all()
    assert not routing.selected[~mask].any()
    assert torch.equal(routing.gates[mask], free.gates[mask])
    assert torch.equal(routing.selected[mask], free.selected[mask])
    assert (routing.selected[mask].sum(-1) == k).all()
    assert routing.mask is not None
    assert torch.equal(routing.mask, mask)
    torch.testing.assert_close(
        routing.example_gates().double(), oracles.masked_mean(free.gates.detach(), mask), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(router(x, mask.long()).gates, routing.gates), "an integer mask works too"
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad((router(x, mask).gates * torch.randn(3, 5, 4)).sum(), x)
    assert (grad[~mask] == 0).all()
    assert (grad[mask] != 0).any()
    assert torch.isfinite(grad).all()


def test_mean_over_tokens() -> None:
    values, mask = torch.randn(3, 5, 2, dtype=torch.float64), torch.rand(3, 5) > 0.5
    mask[:, 2] = True
    torch.testing.assert_close(mean_over_tokens(values, mask), oracles.masked_mean(values, mask))
    torch.testing.assert_close(mean_over_tokens(values, None), values.mean(1))
    assert mean_over_tokens(values[0], None) is not None
    assert torch.equal(mean_over_tokens(values[0], None), values[0])
    nothing = torch.zeros(3, 5, dtype=torch.bool)
    assert (mean_over_tokens(values, nothing) == 0).all()


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_router_computes_in_float32_under_autocast(weights: torch.dtype) -> None:
    router = Router(64, 4, 2).to(weights)
    x = torch.randn(50, 64)
    exact = x.double() @ router.weight.double().T + router.bias.double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = router(x)
        low = functional.linear(x, router.weight, router.bias)
    assert routing.logits.dtype == routing.gates.dtype == torch.float32
    torch.testing.assert_close(routing.logits.double(), exact, rtol=1e-5, atol=1e-6)
    assert (low.double() - exact).abs().max() > 1e-4, "autocast would have shown"
    assert router(x.bfloat16()).logits.dtype == torch.float32


@pytest.mark.parametrize(("experts", "k"), [(8, 4), (8, 1), (4, 2)])
def test_routing_is_not_degenerate_at_initialisation(experts: int, k: int) -> None:
    router = Router(64, experts, k)
    assert (router.bias == 0).all()
    assert float(Router(4000, 8, 4).weight.detach().std()) == pytest.approx(0.02, rel=0.03)
    load = router(torch.randn(500, 64)).selected.float().mean(0)
    assert load.min() > 0.0
    assert load.max() < 1.0
    assert load[:k].sum() < 0.9 * k, "not everything on experts 0, ..., k-1"


@pytest.mark.parametrize("k", [0, 5, -1])
def test_top_k_must_fit(k: int) -> None:
    with pytest.raises(
        ValueError, match=rf"top_k must be between 1 and the number of experts \(4\), got {k}"
    ):
        Router(6, 4, k)


def test_a_single_expert_has_gate_one_and_no_router_gradient() -> None:
    router = Router(6, 1, 1)
    routing = router(torch.randn(5, 6))
    assert torch.equal(routing.gates, torch.ones(5, 1))
    (grad,) = torch.autograd.grad(routing.gates.sum() * 3, router.weight)
    assert (grad == 0).all()


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_a_selection_bias_chooses_and_does_nothing_else(top_k: int) -> None:
    torch.manual_seed(0)
    router = Router(6, 5, top_k).double()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    plain = router(x)
    assert "selection_bias" not in router.state_dict()
    bias = router.add_selection_bias()
    assert bias.dtype == torch.float64
    assert torch.equal(router(x).gates, plain.gates), "zeros change nothing"
    with torch.no_grad():
        bias.copy_(torch.tensor([0.0, 3.0, 0.0, -3.0, 0.1]))
    assert router.add_selection_bias() is bias, "asked for twice, it is the same one"
    found = router(x)
    assert torch.equal(found.logits, plain.logits)
    assert torch.equal(found.selected, oracles.selected(plain.logits + bias, top_k))
    hidden = plain.logits.masked_fill(~found.selected, float("-inf")).softmax(-1)
    torch.testing.assert_close(found.gates, hidden if top_k > 1 else found.selected.double())
    if top_k < 5:
        assert not torch.equal(found.selected, plain.selected)
    found.gates[..., 0].sum().backward()
    assert router.weight.grad is not None
    assert bias.grad is None
    assert "selection_bias" in router.state_dict()
    assert {name for name, _ in router.named_parameters()} == {"weight", "bias"}
