"""Expert banks against slow loops over units and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gar.nn import RoutedExperts, RoutedFFN, RoutedHead, RoutedLoRA, expert_banks
from support import oracles
from support.tiny import randomize, twin_experts, twin_gates

TOLERANCES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
IDS = ["float64", "float32"]
BANKS: dict[str, tuple[type[RoutedExperts], dict[str, Any]]] = {
    "lora": (
        RoutedLoRA,
        {"in_features": 5, "out_features": 3, "experts": 4, "top_k": 2, "rank": 2, "alpha": 3.0},
    ),
    "lora top-1": (RoutedLoRA, {"in_features": 5, "out_features": 3, "experts": 4, "top_k": 1, "rank": 2}),
    "lora all": (RoutedLoRA, {"in_features": 5, "out_features": 3, "experts": 4, "top_k": 4, "rank": 1}),
    "lora one": (RoutedLoRA, {"in_features": 5, "out_features": 3, "experts": 1, "top_k": 1, "rank": 3}),
    "ffn": (RoutedFFN, {"features": 5, "hidden": 6, "experts": 4, "top_k": 2}),
    "ffn top-1": (RoutedFFN, {"features": 5, "hidden": 6, "experts": 4, "top_k": 1}),
    "ffn gated": (
        RoutedFFN,
        {"features": 5, "hidden": 6, "experts": 4, "top_k": 2, "gated": True, "activation": functional.silu},
    ),
    "ffn gated without bias": (
        RoutedFFN,
        {"features": 5, "hidden": 6, "experts": 3, "top_k": 1, "gated": True, "bias": False},
    ),
    "ffn without bias": (RoutedFFN, {"features": 5, "hidden": 6, "experts": 4, "top_k": 3, "bias": False}),
}


def build(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> RoutedExperts:
    cls, options = BANKS[name]
    bank = cls(**{**options, **more}).to(dtype)
    randomize(bank)
    return bank


def leaves(bank: RoutedExperts) -> dict[str, Tensor]:
    return {name: p.detach().double().requires_grad_() for name, p in bank.named_parameters()}


def twin(bank: RoutedExperts, p: dict[str, Tensor], x: Tensor, keep: Tensor | None = None) -> Tensor:
    """The bank's output on units [N, d] from the parameters ``p`` alone."""
    gates = twin_gates(x @ p["router.weight"].T + p["router.bias"], bank.router.top_k)
    return twin_experts(bank, {slot: p[f"experts.{slot}"] for slot in bank.experts.slots}, x, gates, keep)


def check_against_twin(bank: RoutedExperts, x: Tensor, keep: Tensor | None, tolerance: float) -> None:
    """Output, and the derivative of a curved function of it by the input and by every parameter."""
    x = x.clone().requires_grad_()
    weight = torch.randn(bank(x)[0].shape[1:], dtype=x.dtype)
    out, _ = bank(x) if keep is None else bank(x, keep=keep)
    p, x64 = leaves(bank), x.detach().double().requires_grad_()
    expected = twin(bank, p, x64, keep)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    found = torch.autograd.grad(
        (torch.tanh(out) * weight).sum(), [x, *bank.parameters()], materialize_grads=True
    )
    slow = torch.autograd.grad(
        (torch.tanh(expected) * weight.double()).sum(), [x64, *p.values()], materialize_grads=True
    )
    for name, one, other in zip(["x", *p], found, slow, strict=True):
        torch.testing.assert_close(
            one.double(), other, rtol=tolerance, atol=tolerance, msg=f"{name}: {{}}".format
        )


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=IDS)
@pytest.mark.parametrize("name", list(BANKS))
def test_output_and_gradients_equal_the_oracle(name: str, dtype: torch.dtype, tolerance: float) -> None:
    check_against_twin(build(name, dtype), torch.randn(6, 5, dtype=dtype), None, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=IDS)
@pytest.mark.parametrize("name", ["lora", "lora top-1", "lora one"])
@pytest.mark.parametrize("dropout_mask", ["shared", "per_expert"])
def test_dropout_masks(dropout_mask: str, name: str, dtype: torch.dtype, tolerance: float) -> None:
    bank = build(name, dtype, dropout=0.4, dropout_mask=dropout_mask)
    assert isinstance(bank, RoutedLoRA)
    shape = bank.dropout_shape((6,))
    assert shape == ((6, 5) if dropout_mask == "shared" else (6, bank.experts.count, 5))
    keep = torch.rand(shape) > 0.4
    assert not keep.all()
    check_against_twin(bank, torch.randn(6, 5, dtype=dtype), keep, tolerance)


@pytest.mark.parametrize("name", list(BANKS))
def test_tokens_are_units_and_padding_gets_nothing(name: str) -> None:
    bank = build(name)
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
    out, routing = bank(x, mask)
    flat, flat_routing = bank(x.flatten(0, 1))
    torch.testing.assert_close(out[mask], flat.unflatten(0, (3, 4))[mask], rtol=1e-12, atol=1e-14)
    assert (out[~mask] == 0).all()
    assert torch.equal(routing.logits.flatten(0, 1), flat_routing.logits)
    assert torch.equal(bank(x, mask=mask)[0], out)


def test_dropout_draws_from_torchs_stream_with_the_stated_rate() -> None:
    bank = RoutedLoRA(50, 3, experts=2, top_k=2, rank=2, dropout=0.3)
    x = torch.ones(400, 50)
    torch.manual_seed(3)
    seen = bank.prepare(x, None)
    torch.manual_seed(3)
    assert torch.equal(bank.prepare(x, None), seen)
    assert set(seen.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.7)}
    assert float((seen == 0).float().mean()) == pytest.approx(0.3, abs=0.02)
    per_expert = RoutedLoRA(50, 3, experts=2, top_k=2, rank=2, dropout=0.3, dropout_mask="per_expert")
    own = per_expert.prepare(x, None)
    assert own.shape == (400, 2, 50)
    assert not torch.equal(own[:, 0], own[:, 1])


@pytest.mark.parametrize("dropout_mask", ["shared", "per_expert"])
def test_eval_mode_and_the_router_have_no_dropout(dropout_mask: str) -> None:
    bank = build("lora", dropout=0.5, dropout_mask=dropout_mask)
    x = torch.randn(6, 5, dtype=torch.float64)
    plain = build("lora")
    plain.load_state_dict(bank.state_dict())
    assert torch.equal(bank(x)[1].logits, plain(x)[1].logits), "the router sees the input without dropout"
    assert not torch.equal(bank(x)[0], plain(x)[0])
    bank.eval()
    assert torch.equal(bank(x)[0], plain(x)[0])
    keep = torch.zeros(bank.dropout_shape((6,)), dtype=torch.bool)
    assert torch.equal(bank(x, keep=keep)[0], plain(x)[0]), "not even with a mask given"


def test_initialisation() -> None:
    bank = RoutedLoRA(400, 7, experts=3, top_k=2, rank=16)
    bound = 1 / 400**0.5  # Kaiming uniform with a = sqrt 5
    for A in bank.experts.A.detach():
        assert float(A.abs().max()) == pytest.approx(bound, rel=1e-2)
        assert float(A.std()) == pytest.approx(bound / 3**0.5, rel=5e-2)
    assert (bank.experts.B == 0).all()
    assert (bank(torch.randn(2, 400))[0] == 0).all()
    assert bank.experts.scale == 1.0
    assert RoutedLoRA(4, 4, rank=8, alpha=16).experts.scale == 2.0


@pytest.mark.parametrize("mode", [True, False])
def test_one_expert_is_plain_lora(mode: bool) -> None:
    bank = build("lora one", alpha=2.0).train(mode)
    x = torch.randn(6, 5, dtype=torch.float64)
    A, B = bank.experts.A[0], bank.experts.B[0]
    torch.testing.assert_close(bank(x)[0], 2.0 / 3 * x @ A.T @ B.T, rtol=1e-12, atol=1e-14)
    bank(x)[0].square().sum().backward()
    assert bank.router.weight.grad is None or (bank.router.weight.grad == 0).all()
    assert (bank.experts.A.grad != 0).all()


@pytest.mark.parametrize("name", ["lora top-1", "ffn top-1", "ffn gated without bias"])
def test_top_1_router_gets_the_straight_through_derivative(name: str) -> None:
    """No auxiliary term: the router moves by the full softmax's derivative of every expert's output."""
    bank = build(name)
    x, weight = torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    out, routing = bank(x)
    weight = weight[:, : out.shape[1]]
    (out * weight).sum().backward()
    sigma = routing.logits.detach().softmax(-1)
    outputs = []
    for e in range(bank.experts.count):
        only = functional.one_hot(torch.full((6,), e), bank.experts.count).double()
        outputs.append(twin_experts(bank, {s: getattr(bank.experts, s) for s in bank.experts.slots}, x, only))
    value = torch.stack([(y * weight).sum(-1) for y in outputs], dim=-1).detach()  # [N, E]
    dlogits = sigma * (value - (sigma * value).sum(-1, keepdim=True))
    torch.testing.assert_close(bank.router.weight.grad, dlogits.T @ x, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(bank.router.bias.grad, dlogits.sum(0), rtol=1e-10, atol=1e-12)
    assert (bank.router.weight.grad.abs() > 1e-6).all()


@pytest.mark.parametrize("name", ["ffn", "ffn top-1", "lora top-1"])
def test_no_grad_and_frozen_router_give_the_same_output(name: str) -> None:
    """Without router gradients only selected experts are computed: the value may not depend on that."""
    bank = build(name)
    x = torch.randn(6, 5, dtype=torch.float64)
    out = bank(x)[0]
    with torch.no_grad():
        torch.testing.assert_close(bank(x)[0], out, rtol=1e-12, atol=1e-14)
    bank.router.requires_grad_(False)
    torch.testing.assert_close(bank(x)[0], out, rtol=1e-12, atol=1e-14)


class Dense(nn.Module):
    """A pretrained FFN in one of its usual shapes."""

    def __init__(self, kind: str, bias: bool) -> None:
        super().__init__()
        inner = 12 if kind == "fused" else 6
        self.first = nn.ModuleList(nn.Linear(5, inner, bias=bias) for _ in range(2 if kind == "gated" else 1))
        self.second = nn.Linear(6, 5, bias=bias)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        parts = [layer(x) for layer in self.first]
        if self.kind == "fused":
            parts = list(parts[0].chunk(2, dim=-1))
        hidden = functional.gelu(parts[0]) * (parts[1] if len(parts) == 2 else 1)
        return self.second(hidden)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["plain", "gated", "fused"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_copies_of_a_dense_ffn_equal_it_with_any_routing(
    kind: str, bias: bool, top_k: int, dtype: torch.dtype
) -> None:
    dense = Dense(kind, bias).to(dtype)
    bank = RoutedFFN.from_dense(list(dense.first), dense.second, functional.gelu, experts=4, top_k=top_k)  # type: ignore[arg-type]
    assert bank.experts.W1.dtype == dtype
    if dtype == torch.float64:
        bank.router.double()
    nn.init.normal_(bank.router.weight, std=3.0)
    x = torch.randn(3, 4, 5, dtype=dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(bank(x)[0].to(dtype), dense(x), rtol=tolerance, atol=tolerance)
    assert (bank.experts.b1 is not None) == bias
    with torch.no_grad():
        bank.experts.W1[0] += 1
    first: Any = dense.first[0]
    assert torch.equal(bank.experts.W1[1, : first.out_features], first.weight), "a copy each"
    assert not torch.equal(bank.experts.W1[0], bank.experts.W1[1])


def test_head_adds_the_deltas_to_the_shared_base() -> None:
    head = RoutedHead(5, 3, experts=4, rank=2, top_k=2).double()
    h = torch.randn(6, 5, dtype=torch.float64)
    assert torch.equal(head(h)[0], head.base(h)), "at initialisation the deltas are zero"
    randomize(head)
    logits, routing = head(h)
    p = leaves(head.deltas)
    expected = h @ head.base.weight.T + head.base.bias + twin(head.deltas, p, h)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
    assert routing.gates.shape == (6, 4)
    assert expert_banks(head) == [head.deltas]


@pytest.mark.parametrize("name", list(BANKS))
def test_state_dict_holds_the_parameters_and_nothing_else(name: str) -> None:
    bank = build(name)
    bank(torch.randn(6, 5, dtype=torch.float64))
    expected = {"router.weight", "router.bias", *(f"experts.{slot}" for slot in bank.experts.slots)}
    assert set(bank.state_dict()) == expected == {n for n, _ in bank.named_parameters()}
    assert not list(bank.buffers())
    other = build(name)
    other.load_state_dict(bank.state_dict())
    x = torch.randn(6, 5, dtype=torch.float64)
    assert torch.equal(other(x)[0], bank(x)[0])
    template = bank.experts.template()
    assert list(template) == list(bank.experts.slots)
    for slot, shape in template.items():
        assert getattr(bank.experts, slot).shape == (bank.experts.count, *shape)


@pytest.mark.parametrize("name", ["lora", "ffn", "ffn top-1"])
def test_an_update_with_one_unit_and_with_none_for_an_expert(name: str) -> None:
    bank = build(name)
    nn.init.zeros_(bank.router.weight)
    with torch.no_grad():
        bank.router.bias.copy_(torch.tensor([5.0, 4.0, -5.0, -6.0]))
    check_against_twin(bank, torch.randn(1, 5, dtype=torch.float64), None, 1e-10)
    out, _ = bank(torch.randn(0, 5, dtype=torch.float64))
    assert out.shape[0] == 0


def test_bias_proxies() -> None:
    bank = build("lora")
    delta = torch.randn(6, 3, dtype=torch.float64)
    proxies = bank.experts.bias_proxies(delta)
    for i in range(6):
        for e in range(4):
            expected = 1.5 * bank.experts.B[e].T @ delta[i]
            torch.testing.assert_close(proxies[i, e], expected.detach(), rtol=1e-12, atol=1e-14)
    with pytest.raises(NotImplementedError, match="FFNExperts has no virtual-bias proxies"):
        build("ffn").experts.bias_proxies(delta)


@pytest.mark.parametrize("name", ["lora", "ffn", "ffn gated", "lora top-1"])
def test_bf16_autocast_is_close_to_float32(name: str) -> None:
    bank = build(name, torch.float32)
    x = torch.randn(40, 5)
    exact = bank(x)[0].detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low, routing = bank(x)
    assert routing.gates.dtype == torch.float32
    assert float((low.detach().float() - exact).norm() / exact.norm()) < 2e-2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
        ({"dropout_mask": "each"}, "dropout_mask must be 'shared' or 'per_expert', got 'each'"),
        ({"top_k": 9}, r"top_k must be between 1 and the number of experts \(8\), got 9"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutedLoRA(4, 4, **options)


def test_a_misshapen_dropout_mask_is_refused() -> None:
    bank = build("lora", dropout=0.5)
    with pytest.raises(ValueError, match=r"keep must have shape \(6, 5\), got \(6, 1\)"):
        bank(torch.randn(6, 5, dtype=torch.float64), keep=torch.ones(6, 1, dtype=torch.bool))


def test_oracle_twins_tell_experts_apart() -> None:
    """A control: with experts swapped the twin disagrees, so the comparisons above can fail."""
    bank = build("lora")
    x, p = torch.randn(6, 5, dtype=torch.float64), leaves(build("lora"))
    p.update({n: t for n, t in leaves(bank).items() if n.startswith("router")})
    p["experts.A"] = bank.experts.A.detach()[[1, 0, 2, 3]]
    p["experts.B"] = bank.experts.B.detach()
    gap = oracles.global_norm([bank(x)[0].detach() - twin(bank, p, x).detach()])
    assert gap > 1e-2


@pytest.mark.parametrize("top_k", [1, 4])
def test_the_input_gradient_of_an_ffn_bank_is_the_same_in_every_run(top_k: int) -> None:
    """A unit's contributions come from several experts; they are added up expert by expert.

    With another number of threads the products inside may be summed in another order: n eps then.
    """
    bank = RoutedFFN(64, 8, experts=8, top_k=top_k)
    randomize(bank)
    x = torch.randn(2048, 64, requires_grad=True)
    weight = torch.randn(2048, 64)

    def gradient(threads: int) -> Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            selected = bank.router(x.detach()).selected
            out = bank.experts(x, selected.float() / top_k, selected)
            return torch.autograd.grad((out * weight).sum(), x)[0]
        finally:
            torch.set_num_threads(before)

    first, alone = gradient(2), gradient(1)
    for _ in range(3):
        assert torch.equal(gradient(2), first)
        assert torch.equal(gradient(1), alone)
    terms = 8 * (64 + 8)  # experts times the longest sums
    assert (first - alone).abs().max() <= terms * torch.finfo(torch.float32).eps * alone.abs().max()
