"""Pairs of units and experts: order, sums over them, and products of sizes that the host never learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gar.nn import RoutedFFN, ffn
from gar.nn._pairs import Pairs, can_group, combine, expert_products, pairs_of, spread, with_bias
from gar.observation import Grouping, WholeGradients, observe

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def some_active(units: int, experts: int, each: int, seed: int = 0) -> Tensor:
    """Up to ``each`` experts a unit; some units have none, and one expert has no unit."""
    random = torch.Generator().manual_seed(seed)
    active = torch.zeros(units, experts, dtype=torch.bool)
    for n in range(units):
        count = int(torch.randint(0, each + 1, (), generator=random))
        active[n, torch.randperm(experts, generator=random)[:count]] = True
    active[:, experts // 2] = False
    return active


def listed(active: Tensor) -> list[tuple[int, int]]:
    """The pairs (unit, expert), expert by expert."""
    return [(n, e) for e in range(active.shape[1]) for n in range(len(active)) if active[n, e]]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("units", "experts", "each"), [(7, 4, 2), (1, 3, 3), (12, 5, 5), (4, 1, 1)])
def test_pairs_are_listed_by_expert_and_found_by_unit(
    units: int, experts: int, each: int, fixed: bool
) -> None:
    active = some_active(units, experts, each) if experts > 1 else torch.ones(units, 1, dtype=torch.bool)
    pairs, expected = pairs_of(active, each, fixed), listed(active)
    assert pairs.units[: len(expected)].tolist() == [n for n, _ in expected]
    assert pairs.experts[: len(expected)].tolist() == [e for _, e in expected]
    assert pairs.ends.tolist() == [sum(e <= last for _, e in expected) for last in range(experts)]
    assert pairs.counts == (None if fixed else [sum(e == own for _, e in expected) for own in range(experts)])
    assert len(pairs.origin) == (units * each if fixed else max(1, len(expected)))
    for n in range(units):
        own = [i for i, (unit, _) in enumerate(expected) if unit == n]
        assert pairs.slots[n, pairs.filled[n]].tolist() == own
        assert pairs.choice[n, pairs.filled[n]].tolist() == [expected[i][1] for i in own]
        assert pairs.filled[n].tolist() == [True] * len(own) + [False] * (each - len(own))
        assert pairs.origin[own].tolist() == [n * each + j for j in range(len(own))]


def test_no_unit_and_no_pair() -> None:
    for active in (torch.zeros(0, 3, dtype=torch.bool), torch.zeros(4, 3, dtype=torch.bool)):
        pairs = pairs_of(active, 2)
        assert sum(pairs.counts or []) == 0
        x, weight = torch.ones(len(active), 2), torch.randn(3, 5, 2)
        rows = expert_products(spread(x, pairs), weight, torch.randn(3, 5), pairs)
        total = combine(rows, torch.zeros(pairs.slots.shape), pairs)
        assert total.shape == (len(active), 5)
        assert not total.any()


# ---------------------------------------------------------------------- the steps against loops


def undefined_behind(pairs: Pairs, values: Tensor) -> Tensor:
    """Values [P, …] with NaN where nothing is defined."""
    behind = torch.arange(len(values)) >= int(pairs.ends[-1])
    return values.masked_fill(behind.reshape(-1, *[1] * (values.dim() - 1)), torch.nan)


@pytest.mark.parametrize("fixed", [False, True])
def test_spread_and_combine_against_loops(fixed: bool) -> None:
    torch.manual_seed(0)
    active = some_active(9, 4, 3)
    pairs, expected = pairs_of(active, 3, fixed), listed(active)
    x = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    rows = spread(x, pairs)
    assert torch.equal(rows[: len(expected)], x[[n for n, _ in expected]])
    pull = torch.randn(len(pairs.origin), 5, dtype=torch.float64)
    (found,) = torch.autograd.grad(rows, x, undefined_behind(pairs, pull))
    own = [
        sum((pull[i] for i, (unit, _) in enumerate(expected) if unit == n), torch.zeros(5)) for n in range(9)
    ]
    torch.testing.assert_close(found, torch.stack(own).double(), rtol=0, atol=1e-14)

    values = torch.randn(len(pairs.origin), 5, dtype=torch.float64)
    values = undefined_behind(pairs, values).requires_grad_()
    weight = (torch.randn(9, 3, dtype=torch.float64) * pairs.filled).requires_grad_()

    def by_loops(values: Tensor, weight: Tensor) -> Tensor:
        total = [torch.zeros(5, dtype=torch.float64) for _ in range(9)]
        seen = [0] * 9
        for i, (n, _) in enumerate(expected):
            total[n] = total[n] + weight[n, seen[n]] * values[i]
            seen[n] += 1
        return torch.stack(total)

    out, slow = combine(values, weight, pairs), by_loops(values, weight)
    torch.testing.assert_close(out, slow, rtol=0, atol=1e-14)
    pull = torch.randn_like(out)
    for mine, theirs in zip(
        torch.autograd.grad(out, [values, weight], pull),
        torch.autograd.grad(slow, [values, weight], pull),
        strict=True,
    ):
        there = theirs.shape != weight.shape or pairs.filled
        mine, theirs = (t[: len(expected)] if t.shape != weight.shape else t[there] for t in (mine, theirs))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize("bias", [False, True])
def test_products_against_loops(bias: bool) -> None:
    torch.manual_seed(0)
    active = some_active(9, 4, 3)
    pairs, expected = pairs_of(active, 3), listed(active)
    rows, weight, shift = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((len(expected), 5), (4, 6, 5), (4, 6))
    )
    of = [rows, weight, *([shift] if bias else [])]
    out = expert_products(rows, weight, shift if bias else None, pairs)
    slow = torch.stack(
        [weight[e] @ row + (shift[e] if bias else 0) for row, (_, e) in zip(rows, expected, strict=True)]
    )
    torch.testing.assert_close(out, slow, rtol=0, atol=1e-13)
    pull = torch.randn_like(out)
    found = torch.autograd.grad(out, of, pull)
    for mine, theirs in zip(found, torch.autograd.grad(slow, of, pull), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    frozen = expert_products(rows.detach(), weight, shift if bias else None, pairs)
    torch.testing.assert_close(torch.autograd.grad(frozen, weight, pull)[0], found[1], rtol=0, atol=0)


def test_a_bias_as_a_column() -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(2, 5, 4), torch.randn(2, 5)
    wider, with_it = with_bias(x, weight, bias)
    assert wider.shape[1] * wider.element_size() % 16 == 0
    for e in range(2):
        torch.testing.assert_close(wider @ with_it[e].T, x @ weight[e].T + bias[e])


# ---------------------------------------------------------------------- the bank


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Products of fixed size wherever the bank asks; what torch leaves undefined is NaN."""
    original = functional.grouped_mm

    def product(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        out = original(a, b, offs=offs)
        if out.dim() == 2:
            behind = torch.arange(len(out), device=out.device) >= offs[-1]
            out = out.masked_fill(behind.unsqueeze(1), torch.nan)
        return out

    def switch(on: bool) -> None:
        monkeypatch.setattr(ffn, "can_group", lambda *_: on)
        monkeypatch.setattr(functional, "grouped_mm", product)

    return switch


def bank_of(top_k: int, gated: bool, bias: bool, dtype: torch.dtype, device: str) -> RoutedFFN:
    torch.manual_seed(0)
    bank = RoutedFFN(16, 24, experts=4, top_k=top_k, gated=gated, bias=bias)
    for parameter in bank.parameters():
        nn.init.normal_(parameter, std=0.3)
    return bank.to(device, dtype)


def observed(bank: RoutedFFN, autocast: bool, groups: Tensor | None = None) -> dict[str, Tensor]:
    """Output, gradients of input and parameters, and group gradients of one forward and backward."""
    random = torch.Generator().manual_seed(1)
    device, dtype = bank.router.weight.device, bank.router.weight.dtype
    x = torch.randn(5, 7, 16, generator=random).to(device, dtype).requires_grad_()
    pull = torch.randn(5, 7, 16, generator=random).to(device, dtype)
    mask = (torch.arange(7) < torch.tensor([7, 3, 5, 1, 7]).unsqueeze(1)).to(device)
    weight = torch.tensor([0.3, 0.7], device=device, dtype=dtype)
    rows = torch.tensor([0, 0, 1, 1, 1], device=device)
    with observe(bank) as seen:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            out, _ = bank(x, mask)
        losses = Grouping(rows).sum((out * pull).sum((1, 2)))
        (weight * losses).sum().backward()
        group = seen.group_gradients(rows if groups is None else groups.to(device), weight)
    found = {name: p.grad.clone() for name, p in bank.named_parameters() if p.grad is not None}
    bank.zero_grad()
    assert x.grad is not None
    return found | {"out": out.detach(), "x": x.grad, "group": group}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_sizes_that_the_host_never_learns_change_nothing(
    grouped: Callable[[bool], None], top_k: int, gated: bool, bias: bool, device: str
) -> None:
    """In float32 up to rounding: the same products by one kernel, padding and undefined rows with it."""
    bank = bank_of(top_k, gated, bias, torch.float32, device)
    grouped(False)
    expected = observed(bank, autocast=False)
    grouped(True)
    found = observed(bank, autocast=False)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_group_gradients_in_bfloat16_are_sums_of_its_own_products(
    grouped: Callable[[bool], None], top_k: int, tokens: bool, fixed: bool, device: str
) -> None:
    """Factors as the backward rounds them, added up in float32: nothing else is lost."""
    grouped(fixed)
    groups = torch.tensor([0, 0, 1, 1, 1])
    groups = groups.unsqueeze(1).expand(5, 7) if tokens else groups
    low = observed(bank_of(top_k, False, True, torch.float32, device), True, groups)
    grouped(False)
    exact = observed(bank_of(top_k, False, True, torch.float64, device), False)
    assert low["group"].dtype == torch.float32
    error = (low["group"].double() - exact["group"]).norm() / exact["group"].norm()
    assert error < 1e-2
    # The sum over the groups is the gradient of all experts together, which autograd rounds to bfloat16.
    total = low["group"].T @ torch.tensor([0.3, 0.7], device=device)
    slots = torch.cat([low[f"experts.{slot}"].sum(0).flatten() for slot in ("W1", "b1", "W2", "b2")])
    assert (total - slots).norm() / slots.norm() < 4e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sizes", [(2, 3), (1, 0, 4), (5,)])
@pytest.mark.parametrize("top_k", [1, 2])
def test_gradients_of_single_experts_by_group(
    grouped: Callable[[bool], None], top_k: int, sizes: tuple[int, ...], gated: bool, bias: bool, device: str
) -> None:
    """Against a backward of each group alone; padded units, undefined rows, and an empty group."""
    bank = bank_of(top_k, gated, bias, torch.float32, device)
    random = torch.Generator().manual_seed(2)
    x, pull = (torch.randn(5, 7, 16, generator=random).to(device) for _ in range(2))
    mask = (torch.arange(7) < torch.tensor([7, 3, 5, 1, 7]).unsqueeze(1)).to(device)
    grouping = Grouping.consecutive(sizes, torch.device(device))
    parameters = {slot: getattr(bank.experts, slot) for slot in bank.experts.slots}
    whole = {}
    for fixed in (False, True):
        grouped(fixed)
        rows = WholeGradients([bank], list(parameters.values()))
        with rows.recording():
            losses = grouping.sum((bank(x, mask)[0] * pull).sum((1, 2)))
            whole[fixed] = x.new_empty(len(sizes), rows.size)
            rows.fill(losses, torch.ones_like(losses), grouping, whole[fixed])
    grouped(False)
    first = 0
    for m, size in enumerate(sizes):
        own = slice(first, first := first + size)
        grads = torch.autograd.grad((bank(x[own], mask[own])[0] * pull[own]).sum(), list(parameters.values()))
        expected = torch.cat([grad.flatten() for grad in grads])
        for fixed in (False, True):
            assert (whole[fixed][m] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_only_hopper_and_aligned_rows_have_such_products() -> None:
    assert not can_group(torch.device("cpu"), torch.bfloat16, 16)
    bank = RoutedFFN(16, 24)
    assert not bank.experts.capturable


@GPU
def test_a_hopper_gpu_has_them() -> None:
    device = torch.device("cuda")
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert can_group(device, torch.bfloat16, 16, 24) == hopper
    assert not can_group(device, torch.bfloat16, 16, 20)
    assert not can_group(device, torch.float32, 16)
    bank: Any = RoutedFFN(16, 24).to(device)
    with torch.autocast("cuda", torch.bfloat16):
        assert bank.experts.capturable == hopper
