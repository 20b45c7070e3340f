"""Observations from one backward against their definition: one perturbation added to every expert."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gar
from gar.errors import UserError
from gar.nn import Factors, RoutedExperts, RoutedFFN, RoutedLoRA
from gar.observation import Grouping, Observed
from support import oracles
from support.tiny import randomize, relative_error, twin_experts, twin_gates

D = 5

BANKS: dict[str, Callable[[], RoutedExperts]] = {
    "lora": lambda: RoutedLoRA(D, 3, experts=4, rank=2, top_k=2, alpha=3.0),
    "lora dropout": lambda: RoutedLoRA(D, 3, experts=4, rank=2, top_k=2, alpha=3.0, dropout=0.4),
    "lora dropout per expert": lambda: RoutedLoRA(
        D, 3, experts=3, rank=2, top_k=2, dropout=0.4, dropout_mask="per_expert"
    ),
    "lora top-1": lambda: RoutedLoRA(D, 3, experts=4, rank=2, top_k=1, dropout=0.3),
    "lora all": lambda: RoutedLoRA(D, 3, experts=3, rank=1, top_k=3),
    "lora one": lambda: RoutedLoRA(D, 3, experts=1, rank=2, top_k=1, dropout=0.3, dropout_mask="per_expert"),
    "ffn": lambda: RoutedFFN(D, 4, experts=4, top_k=2),
    "ffn top-1": lambda: RoutedFFN(D, 4, experts=4, top_k=1, activation=torch.tanh),
    "ffn gated": lambda: RoutedFFN(D, 4, experts=3, top_k=2, gated=True, activation=functional.silu),
    "ffn gated without bias": lambda: RoutedFFN(D, 4, experts=3, top_k=1, gated=True, bias=False),
    "ffn without bias": lambda: RoutedFFN(D, 4, experts=3, top_k=3, bias=False),
}

#: (group of every row, (task, size) of every group): tasks of different batch sizes, short last groups.
GROUPS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "even": ([0, 0, 1, 1, 2, 2], [(0, 2), (0, 2), (1, 2)]),
    "uneven": ([0, 0, 1, 2, 2, 2, 3], [(0, 2), (0, 1), (1, 3), (2, 1)]),
    "shuffled": ([3, 1, 0, 2, 0, 2, 2], [(0, 2), (0, 1), (1, 3), (2, 1)]),
    "uncounted rows": ([-1, 1, 0, 2, -1, 2, 2, 0, -1], [(0, 2), (0, 1), (1, 3)]),
    "one group": ([0, 0, 0], [(0, 3)]),
    "one row each": ([1, 0, 2], [(0, 1), (1, 1), (2, 1)]),
}


@dataclass
class Problem:
    """Rows routed through a bank, with a curved loss of the output: nothing about it is a classifier."""

    bank: RoutedExperts
    x: Tensor
    groups: Tensor
    weight: Tensor
    mask: Tensor | None
    keep: Tensor | None

    @property
    def count(self) -> int:
        return len(self.weight)

    def group_losses(self, y: Tensor) -> Tensor:
        """``l_m`` [M] from the bank's output."""
        return self._mean_over_groups(unit_losses(y))

    def _mean_over_groups(self, units: Tensor) -> Tensor:
        """Mean over units [R, (L)]: first over a row's valid tokens, unless groups are given per token."""
        if units.dim() == 2:
            mask = torch.ones(units.shape) if self.mask is None else self.mask
            if self.groups.dim() == 1:
                units = (units * mask.to(units.dtype)).sum(1) / mask.sum(1)
        units, groups = units.flatten(), self.groups.flatten()
        return torch.stack([units[groups == m].mean() for m in range(self.count)])

    def run(self, weight: Tensor | None = None) -> tuple[Tensor, Observed]:
        """One forward and one backward of ``sum_m v_m l_m``; the group losses and what was observed."""
        with gar.observe(self.bank) as observed:
            y, _ = call(self.bank, self.x, self.mask, self.keep)
            losses = self.group_losses(y)
            ((self.weight if weight is None else weight) * losses).sum().backward()
        return losses, observed

    def per_group(self) -> Tensor:
        return gar.per_group_gradients(
            self.group_losses(call(self.bank, self.x, self.mask, self.keep)[0]), self.bank
        )

    def definition(self, keep: Tensor | None = None) -> Tensor:
        """``g_m`` through the oracles alone, over valid units."""
        bank, keep = self.bank, self.keep if keep is None else keep
        valid = torch.ones(self.x.shape[:-1]).bool() if self.mask is None else self.mask
        x = self.x.detach().double()[valid]
        p = {n: t.detach().double() for n, t in bank.named_parameters()}
        gates = twin_gates(x @ p["router.weight"].T + p["router.bias"], bank.router.top_k)

        def losses(change: dict[str, Tensor]) -> Tensor:
            slots = {slot: p[f"experts.{slot}"] + change[slot] for slot in bank.experts.slots}
            y = twin_experts(bank, slots, x, gates, None if keep is None else keep[valid])
            units = torch.zeros(valid.shape, dtype=torch.float64).index_put(
                valid.nonzero(as_tuple=True), unit_losses(y)
            )
            return self._mean_over_groups(units)

        return oracles.template_gradients(losses, {n: tuple(s) for n, s in bank.experts.template().items()})

    def probabilities(self) -> Tensor:
        """``p_m`` through the oracles."""
        router = self.bank.router
        logits = self.x.detach().double() @ router.weight.detach().double().T + router.bias.detach().double()
        gates = twin_gates(logits, router.top_k)
        if self.groups.dim() == 2:
            valid = self.groups >= 0 if self.mask is None else (self.groups >= 0) & self.mask
            groups = [int(g) for g in self.groups[valid]]
            return oracles.group_probabilities(
                gates[valid].unsqueeze(1), torch.ones(len(groups), 1), groups, self.count
            )
        gates = gates if gates.dim() == 3 else gates.unsqueeze(1)
        mask = torch.ones(gates.shape[:2]) if self.mask is None else self.mask
        return oracles.group_probabilities(gates, mask, self.groups.tolist(), self.count)


def unit_losses(y: Tensor) -> Tensor:
    """One curved number per unit of [..., d_out]."""
    slope = torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype)
    return torch.tanh(y + slope).square().sum(-1) + (y * slope).sum(-1)


def call(bank: RoutedExperts, x: Tensor, mask: Tensor | None = None, keep: Tensor | None = None) -> Any:
    return bank(x, mask) if keep is None else bank(x, mask, keep)


def make_problem(
    bank_name: str, groups_name: str = "uneven", tokens: int | None = 4, dtype: torch.dtype = torch.float64
) -> Problem:
    bank = BANKS[bank_name]().to(dtype)
    randomize(bank)
    listed, sizes = GROUPS[groups_name]
    shape = (len(listed),) if tokens is None else (len(listed), tokens)
    mask = None
    if tokens is not None:
        mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (len(listed), 1))
        mask[-1] = True
    keep = None
    if isinstance(bank, RoutedLoRA) and bank.dropout:
        keep = torch.rand(bank.dropout_shape(shape)) > bank.dropout
    return Problem(
        bank,
        torch.randn(*shape, D, dtype=dtype),
        torch.tensor(listed),
        torch.tensor(oracles.task_weights(sizes), dtype=dtype),
        mask,
        keep,
    )


def same(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------------------
# Values
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [None, 4])
@pytest.mark.parametrize("groups", list(GROUPS))
@pytest.mark.parametrize("bank", list(BANKS))
def test_one_pass_equals_per_group_equals_the_definition(bank: str, groups: str, tokens: int | None) -> None:
    problem = make_problem(bank, groups, tokens)
    losses, observed = problem.run()
    found = observed.group_gradients(problem.groups, problem.weight)
    expected = problem.definition()
    assert expected.abs().max() > 1e-2
    same(found, expected)
    same(problem.per_group(), expected)
    same(observed.group_gram(problem.groups, problem.weight), expected @ expected.T)
    same(observed.group_probabilities(problem.groups), problem.probabilities())
    same(observed.group_probabilities(problem.groups, problem.count), problem.probabilities())
    assert not found.requires_grad
    assert losses.requires_grad


@pytest.mark.parametrize("tokens", [None, 4])
@pytest.mark.parametrize("bank", list(BANKS))
def test_float32(bank: str, tokens: int | None) -> None:
    problem = make_problem(bank, "shuffled", tokens, torch.float32)
    _, observed = problem.run()
    found = observed.group_gradients(problem.groups, problem.weight)
    assert found.dtype == torch.float32
    same(found, problem.definition(), 1e-5)
    same(problem.per_group(), problem.definition(), 1e-5)
    same(observed.group_probabilities(problem.groups), problem.probabilities(), 1e-5)


@pytest.mark.parametrize("bank", list(BANKS))
@pytest.mark.parametrize("masked", [False, True])
def test_groups_of_tokens(bank: str, masked: bool) -> None:
    problem = make_problem(bank, "even")
    groups = torch.randint(-1, 3, problem.x.shape[:2])
    problem.mask = problem.mask if masked else None
    if problem.mask is not None:
        groups = groups.masked_fill(~problem.mask, -1)
    groups[-1, :3] = torch.arange(3)  # the last row is fully valid, so no group is empty
    problem.groups = groups
    _, observed = problem.run()
    same(observed.group_gradients(groups, problem.weight), problem.definition())
    same(observed.group_probabilities(groups), problem.probabilities())


def test_padding_among_token_groups_is_not_counted() -> None:
    problem = make_problem("lora", "even")
    assert problem.mask is not None
    groups = torch.randint(0, 3, problem.x.shape[:2])
    groups[-1, :3] = torch.arange(3)
    _, observed = problem.run()
    for seen in (observed.group_probabilities, lambda g: observed.group_gradients(g, problem.weight)):
        same(seen(groups), seen(groups.masked_fill(~problem.mask, -1)))


def test_gradients_that_were_not_asked_for_are_refused() -> None:
    problem = make_problem("lora")
    with gar.observe(problem.bank, gradients=False) as observed:
        output, _ = call(problem.bank, problem.x, problem.mask, problem.keep)
        output.square().sum().backward()
    assert observed.group_probabilities(problem.groups).shape[1] == problem.bank.experts.count
    with pytest.raises(RuntimeError, match="gradients=False"):
        observed.group_gradients(problem.groups, problem.weight)


@pytest.mark.parametrize("bank", ["lora dropout", "lora dropout per expert", "lora top-1"])
def test_dropout_that_the_bank_draws_itself(bank: str) -> None:
    problem = make_problem(bank)
    with gar.observe(problem.bank) as observed:
        losses = problem.group_losses(problem.bank(problem.x, problem.mask)[0])
        with observed.site.paused():
            expected = gar.per_group_gradients(losses, problem.bank)
        (problem.weight * losses).sum().backward()
    same(observed.group_gradients(problem.groups, problem.weight), expected)


def test_at_initialisation_half_of_the_template_is_exactly_zero() -> None:
    problem = make_problem("lora")
    problem.bank.experts.reset_parameters()
    _, observed = problem.run()
    g = observed.group_gradients(problem.groups, problem.weight)
    size = problem.bank.experts.template()["A"].numel()
    assert (g[:, :size] == 0).all()
    assert (g[:, size:] != 0).any()
    loss = gar.alignment_loss(observed.group_probabilities(problem.groups), g)
    (grad,) = torch.autograd.grad(loss, problem.bank.router.weight)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("bank", ["lora", "ffn top-1", "lora dropout per expert"])
def test_a_zero_weight_gives_a_zero_row_and_leaves_the_others(bank: str) -> None:
    problem = make_problem(bank)
    expected = problem.definition()
    weight = problem.weight * torch.tensor([1.0, 0, 1, 1])
    _, observed = problem.run(weight)
    found = observed.group_gradients(problem.groups, weight)
    assert (found[1] == 0).all()
    same(found[[0, 2, 3]], expected[[0, 2, 3]])


def test_a_loss_scale_is_undone_with_the_weight() -> None:
    problem = make_problem("lora")
    expected = problem.definition()
    for scale in (1e-9, 65536.0, 1e9):
        _, observed = problem.run(scale * problem.weight)
        same(observed.group_gradients(problem.groups, scale * problem.weight), expected)
        same(observed.group_gradients(problem.groups, problem.weight) / scale, expected)


@pytest.mark.parametrize("bank", ["lora dropout", "lora dropout per expert", "ffn", "ffn top-1"])
def test_padding_to_twice_the_length_changes_nothing(bank: str) -> None:
    problem = make_problem(bank, "shuffled")
    _, observed = problem.run()
    assert problem.mask is not None
    rows, tokens = problem.mask.shape
    long = make_problem(bank, "shuffled")
    long.bank = problem.bank
    long.x = torch.cat([problem.x, 7 * torch.randn(rows, tokens, D, dtype=torch.float64)], dim=1)
    long.mask = torch.cat([problem.mask, torch.zeros_like(problem.mask)], dim=1)
    if problem.keep is not None:
        long.keep = torch.cat([problem.keep, torch.ones_like(problem.keep)], dim=1)
    _, padded = long.run()
    for read in (
        lambda o: o.group_gradients(problem.groups, problem.weight),
        lambda o: o.group_gram(problem.groups, problem.weight),
        lambda o: o.group_probabilities(problem.groups),
    ):
        same(read(padded), read(observed), 1e-12)


# --------------------------------------------------------------------------------------------------
# Controls: what would be wrong does show
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bank", ["lora dropout", "lora dropout per expert", "ffn gated"])
@pytest.mark.parametrize("tokens", [None, 4])
def test_controls_fail(bank: str, tokens: int | None) -> None:
    problem = make_problem(bank, "uneven", tokens)
    expected = problem.definition()
    _, observed = problem.run()
    same(observed.group_gradients(problem.groups, problem.weight), expected)
    wrong = {
        "no weight undone": observed.group_gradients(problem.groups, torch.ones_like(problem.weight)),
        "wrong map": observed.group_gradients(problem.groups.roll(1), problem.weight),
        "groups of another size": observed.group_gradients(
            torch.tensor([0, 0, 1, 1, 2, 2, 3]), problem.weight
        ),
        "weights of another update": observed.group_gradients(problem.groups, problem.weight.flip(0)),
    }
    if problem.keep is not None:
        wrong["another dropout mask"] = problem.definition(problem.keep.roll(1, 0))
    for name, found in wrong.items():
        assert relative_error(found, expected) > 1e-2, name


@pytest.mark.parametrize("bank", ["lora", "ffn"])
def test_padding_without_a_mask_is_a_control_too(bank: str) -> None:
    problem = make_problem(bank)
    expected, p = problem.definition(), problem.probabilities()
    mask, problem.mask = problem.mask, None
    assert mask is not None
    assert not mask.all()
    _, observed = problem.run()
    assert relative_error(observed.group_gradients(problem.groups, problem.weight), expected) > 1e-2
    assert relative_error(observed.group_probabilities(problem.groups).detach(), p) > 1e-2


# --------------------------------------------------------------------------------------------------
# What is observed, and what is left behind
# --------------------------------------------------------------------------------------------------


def test_two_forwards_in_one_block_are_refused() -> None:
    problem = make_problem("lora")
    with gar.observe(problem.bank) as observed:
        y = problem.bank(problem.x, problem.mask)[0] + problem.bank(2 * problem.x, problem.mask)[0]
        problem.group_losses(y).sum().backward()
    for read in (
        lambda: observed.group_gradients(problem.groups, problem.weight),
        lambda: observed.group_gram(problem.groups, problem.weight),
        lambda: observed.group_probabilities(problem.groups),
    ):
        with pytest.raises(RuntimeError, match=r"2 forwards inside one observe block.*shared between layers"):
            read()


def test_a_bank_called_twice_by_its_model_is_refused() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = RoutedLoRA(D, D, experts=2, top_k=1, rank=1)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.first(x)[0]
            return x + self.second(x)[0]

    model = Shared()
    with gar.observe(model) as observed:
        model(torch.randn(2, D)).sum().backward()
    assert len(observed.sites) == 1
    with pytest.raises(RuntimeError, match="2 forwards"):
        observed.group_gradients(torch.tensor([0, 1]), torch.ones(2))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "bank", ["lora dropout", "lora dropout per expert", "lora top-1", "ffn", "ffn top-1"]
)
def test_a_recomputed_bank_is_observed_right(bank: str, reentrant: bool) -> None:
    problem = make_problem(bank)
    problem.x.requires_grad_()
    with gar.observe(problem.bank) as observed:
        y = checkpoint(
            lambda x: call(problem.bank, x, problem.mask, problem.keep)[0], problem.x, use_reentrant=reentrant
        )
        (problem.weight * problem.group_losses(y)).sum().backward()
    same(observed.group_gradients(problem.groups, problem.weight), problem.definition())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("bank", ["lora", "ffn", "ffn top-1"])
def test_a_bank_in_the_middle_of_a_recomputed_part_is_observed_right(bank: str, reentrant: bool) -> None:
    problem = make_problem(bank)
    problem.x.requires_grad_()
    with gar.observe(problem.bank) as observed:
        losses = checkpoint(
            lambda x: problem.group_losses(problem.bank(x, problem.mask)[0]),
            problem.x,
            use_reentrant=reentrant,
        )
        (problem.weight * losses).sum().backward()
    same(observed.group_gradients(problem.groups, problem.weight), problem.definition())


def test_a_router_apart_may_be_recomputed() -> None:
    problem, found = make_problem("lora"), []

    def losses(x: Tensor) -> Tensor:
        return problem.group_losses(problem.bank(x, problem.mask)[0])

    for checkpointed in (False, True):
        problem.bank.zero_grad()
        with gar.observe(problem.bank, router_apart=True) as observed:
            of = checkpoint(losses, problem.x, use_reentrant=False) if checkpointed else losses(problem.x)
            (problem.weight * of).sum().backward()
        assert problem.bank.router.weight.grad is None
        pending = observed.site.pending()
        assert pending is not None
        torch.autograd.backward(*pending)
        found.append(
            (observed.group_gradients(problem.groups, problem.weight), problem.bank.router.weight.grad)
        )
    for plain, recomputed in zip(*found, strict=True):
        assert plain is not None
        same(recomputed, plain)


@pytest.mark.parametrize("first", ["plain", "checkpoint", "reentrant", "offloaded"])
def test_two_forwards_are_refused_however_they_are_recomputed(first: str) -> None:
    problem = make_problem("ffn")
    problem.x.requires_grad_()
    elsewhere = torch.autograd.graph.save_on_cpu() if first == "offloaded" else contextlib.nullcontext()
    with gar.observe(problem.bank) as observed, elsewhere:

        def run(x: Tensor) -> Tensor:
            return problem.group_losses(problem.bank(x, problem.mask)[0])

        one = (
            run(problem.x)
            if first == "plain"
            else checkpoint(run, problem.x, use_reentrant=first != "checkpoint")
        )
        two = checkpoint(run, 2 * problem.x, use_reentrant=True)
        (problem.weight * (one + two)).sum().backward()
    with pytest.raises(RuntimeError, match="ran 2 forwards"):
        observed.group_gradients(problem.groups, problem.weight)
    with pytest.raises(RuntimeError, match="ran 2 forwards"):
        observed.group_probabilities(problem.groups)


def test_experts_of_two_banks_are_refused() -> None:
    first, second = (RoutedFFN(5, 6, experts=4, top_k=2) for _ in range(2))
    second.experts = first.experts
    both = nn.ModuleList([first, second])
    with pytest.raises(gar.UserError, match="banks 0 and 1 share their experts"), gar.observe(both):
        pass
    with gar.observe(both, gradients=False) as observed:
        first(torch.ones(2, 5))
        second(torch.ones(2, 5))
    assert [site.group_probabilities(torch.tensor([0, 0])).shape for site in observed.sites] == [(1, 4)] * 2


def test_what_a_hook_of_others_makes_of_the_output_is_not_the_experts_gradient() -> None:
    problem = make_problem("ffn")
    problem.bank.register_forward_hook(lambda module, args, result: (3 * result[0], result[1]))
    with gar.observe(problem.bank) as observed:
        losses = problem.group_losses(problem.bank(problem.x, problem.mask)[0])
        with observed.site.paused():
            slow = gar.per_group_gradients(losses, problem.bank)
        (problem.weight * losses).sum().backward()
    same(observed.group_gradients(problem.groups, problem.weight), slow)


def test_groups_have_a_number_a_row_or_a_token() -> None:
    problem = make_problem("lora")
    with gar.observe(problem.bank, gradients=False) as observed:
        problem.bank(problem.x, problem.mask)
    for groups in (problem.groups[:-1], problem.groups.repeat(2), problem.groups.unsqueeze(1)):
        with pytest.raises(ValueError, match=r"groups must be \["):
            observed.group_probabilities(groups)


def test_negative_weights_are_undone() -> None:
    problem = make_problem("lora")
    with gar.observe(problem.bank) as observed:
        losses = problem.group_losses(problem.bank(problem.x, problem.mask)[0])
        (-problem.weight * losses).sum().backward()
    same(observed.group_gradients(problem.groups, -problem.weight), problem.definition())


def test_activations_in_place_and_without_a_gradient_are_refused() -> None:
    with pytest.raises(gar.UserError, match="activation works in place"):
        RoutedFFN(5, 6, experts=4, top_k=2, activation=nn.ReLU(inplace=True))
    bank = RoutedFFN(5, 6, experts=4, top_k=2)
    for name, parameter in bank.experts.named_parameters():
        parameter.requires_grad_("2" in name)
    with gar.observe(bank) as observed:
        bank(torch.ones(2, 5))[0].sum().backward()
    with pytest.raises(
        gar.UserError, match="neither the experts' input nor their first layer has a gradient"
    ):
        observed.group_gradients(torch.tensor([0, 0]), torch.ones(1))


def test_a_pause_inside_of_a_pause_does_not_end_it() -> None:
    problem = make_problem("lora")
    with gar.observe(problem.bank) as observed:
        losses = problem.group_losses(problem.bank(problem.x, problem.mask)[0])
        loss = (problem.weight * losses).sum()
        with observed.site.paused():
            observed.site.output_gradient(loss)
            torch.autograd.grad(loss, list(problem.bank.parameters()), retain_graph=True)
        loss.backward()
    same(observed.group_gradients(problem.groups, problem.weight), problem.definition())


@pytest.mark.parametrize("bank", ["lora", "ffn"])
def test_two_backwards_are_refused(bank: str) -> None:
    problem = make_problem(bank)
    with gar.observe(problem.bank) as observed:
        losses = problem.group_losses(problem.bank(problem.x, problem.mask)[0])
        losses[0].backward(retain_graph=True)
        losses[1].backward()
    with pytest.raises(RuntimeError, match="2 backward passes ran inside the observe block"):
        observed.group_gradients(problem.groups, problem.weight)


def test_no_backward_and_no_forward_are_named() -> None:
    problem = make_problem("lora")
    with gar.observe(problem.bank) as observed:
        problem.bank(problem.x, problem.mask)
    with pytest.raises(RuntimeError, match="0 backward passes"):
        observed.group_gradients(problem.groups, problem.weight)
    assert observed.group_probabilities(problem.groups).shape == (4, 4), "needs no backward"
    with gar.observe(problem.bank) as observed:
        pass
    problem.run()
    with pytest.raises(RuntimeError, match="nothing was observed"):
        observed.group_probabilities(problem.groups)
    with pytest.raises(ValueError, match="no expert bank"), gar.observe(nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize("bank", ["lora dropout", "ffn top-1"])
def test_forwards_without_gradients_are_not_captured(bank: str) -> None:
    problem = make_problem(bank)
    _, plain = problem.run()
    other = torch.randn(2, 3, D, dtype=torch.float64)
    with gar.observe(problem.bank) as observed:
        with torch.no_grad():
            problem.bank(other)
        y, _ = call(problem.bank, problem.x, problem.mask, problem.keep)
        with torch.inference_mode():
            problem.bank.eval()(other)
            problem.bank.train()
        losses = problem.group_losses(y)
        (problem.weight * losses).sum().backward()
        with torch.no_grad():
            problem.bank(other)
    problem.bank(other)[0].sum().backward()  # after the block, with gradients: not our business either
    assert torch.equal(
        observed.group_gradients(problem.groups, problem.weight),
        plain.group_gradients(problem.groups, problem.weight),
    )
    assert torch.equal(
        observed.group_probabilities(problem.groups), plain.group_probabilities(problem.groups)
    )


def test_an_eval_forward_between_steps_changes_nothing() -> None:
    results = []
    for evaluate in (False, True):
        torch.manual_seed(1)
        problem = make_problem("lora dropout")
        optimizer = torch.optim.AdamW(problem.bank.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            _, observed = problem.run()
            p, g = (
                observed.group_probabilities(problem.groups),
                observed.group_gradients(problem.groups, problem.weight),
            )
            gar.alignment_loss(p, g).backward()
            optimizer.step()
            if evaluate:
                with torch.no_grad():
                    problem.bank.eval()(torch.randn(3, 2, D, dtype=torch.float64))
                problem.bank.train()
        results.append([p.detach().clone() for p in problem.bank.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def module_state(module: nn.Module) -> dict[str, Any]:
    """Everything that a module holds, hooks included, as identities and copies."""
    state: dict[str, Any] = {}
    for name, inner in module.named_modules():
        for key, value in vars(inner).items():
            state[f"{name}.{key}"] = dict(value) if isinstance(value, dict) else value
    return state


@pytest.mark.parametrize("bank", ["lora dropout", "ffn top-1"])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_on_the_modules(bank: str, fails: bool) -> None:
    problem = make_problem(bank)
    before = module_state(problem.bank)
    inside = {}
    try:
        with gar.observe(problem.bank):
            inside = module_state(problem.bank)
            problem.group_losses(
                call(problem.bank, problem.x, problem.mask, problem.keep)[0]
            ).sum().backward()
            if fails:
                raise KeyError
    except KeyError:
        pass
    after = module_state(problem.bank)
    hooks = [key for key in before if "hooks" in key]
    assert hooks
    assert any(inside[key] for key in hooks), "hooks live inside the block"
    assert not any(after[key] for key in hooks)
    assert before.keys() == after.keys()
    for key, value in before.items():
        found = after[key]
        if isinstance(value, dict):
            assert value.keys() == found.keys(), key
            assert all(found[k] is v for k, v in value.items()), key
        else:
            assert found is value, key


def test_plain_forwards_run_without_hooks() -> None:
    problem = make_problem("lora")
    y, _ = problem.bank(problem.x)
    with gar.observe(problem.bank):
        pass
    assert not y._backward_hooks
    assert all(not value for key, value in module_state(problem.bank).items() if "hooks" in key)


@pytest.mark.parametrize("bank", ["lora", "ffn top-1"])
def test_captures_are_freed(bank: str) -> None:
    problem = make_problem(bank, "even", tokens=None)
    units = 6

    def alive() -> int:
        gc.collect()
        found = [t for t in gc.get_objects() if isinstance(t, Tensor) and t.dim() and t.shape[0] == units]
        return len(found)

    before = alive()
    x = problem.x.clone()
    with gar.observe(problem.bank) as observed:
        y, routing = problem.bank(x)
        graph = weakref.ref(y)
        losses = problem.group_losses(y)
        (problem.weight * losses).sum().backward()
    del y, routing, losses, x
    gc.collect()
    assert graph() is None, "the graph goes with the block, while the observation lives"
    assert observed.group_gradients(problem.groups, problem.weight).shape[0] == problem.count
    assert observed.group_probabilities(problem.groups).shape[0] == problem.count
    assert alive() > before
    for parameter in problem.bank.parameters():
        parameter.grad = None
    site = weakref.ref(observed.sites[0])
    del observed
    assert alive() <= before
    assert site() is None


# --------------------------------------------------------------------------------------------------
# Probabilities
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [None, 4])
@pytest.mark.parametrize("bank", ["lora dropout", "lora top-1", "ffn", "ffn top-1"])
def test_probabilities_reach_only_the_router(bank: str, tokens: int | None) -> None:
    problem = make_problem(bank, "shuffled", tokens)
    below = nn.Linear(D, D).double()
    with gar.observe(problem.bank) as observed:
        y, _ = call(problem.bank, below(problem.x), problem.mask, problem.keep)
        problem.group_losses(y).sum().backward()
    for parameter in [*problem.bank.parameters(), *below.parameters()]:
        parameter.grad = None
    p = observed.group_probabilities(problem.groups)
    torch.testing.assert_close(p.sum(1), torch.ones(problem.count, dtype=torch.float64))
    (p * torch.randn_like(p)).sum().backward()
    reached = {name for name, q in problem.bank.named_parameters() if q.grad is not None}
    assert reached == {"router.weight", "router.bias"}
    assert all(q.grad is None for q in below.parameters())
    assert problem.bank.router.weight.grad is not None
    assert (problem.bank.router.weight.grad != 0).any()


def test_an_empty_last_group() -> None:
    problem = make_problem("lora")
    weight = torch.cat([problem.weight, torch.zeros(1, dtype=torch.float64)])
    _, observed = problem.run()
    p = observed.group_probabilities(problem.groups, 5)
    assert p.shape == (5, 4)
    assert (p[4] == 0).all()
    g = observed.group_gradients(problem.groups, weight)
    assert g.shape[0] == 5
    assert (g[4] == 0).all()
    same(g[:4], problem.definition())


def test_wrong_groups_are_named() -> None:
    problem = make_problem("lora")
    _, observed = problem.run()
    weight = problem.weight
    cases = [
        (torch.tensor([0, 1]), r"one number for each of the 7 rows"),
        (torch.zeros(7, 3).long(), r"\[7\] or \[7, 4\], got \(7, 3\)"),
        (problem.groups + 1, r"-1 \(not counted\) or in \[0, 4\), got up to 4"),
        (problem.groups - 2, r"-1 \(not counted\)"),
        (problem.groups.double(), r"integer vector, got torch.float64"),
    ]
    for groups, message in cases:
        with pytest.raises(ValueError, match=message):
            observed.group_gradients(groups, weight)


# --------------------------------------------------------------------------------------------------
# Precision
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bank", ["lora", "lora dropout per expert", "lora top-1", "ffn", "ffn gated"])
def test_bf16_autocast_is_close_to_float32(bank: str) -> None:
    problem = make_problem(bank, "shuffled", 4, torch.float32)
    _, observed = problem.run()
    exact = observed.group_gradients(problem.groups, problem.weight)
    p = observed.group_probabilities(problem.groups)
    with gar.observe(problem.bank) as low:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, _ = call(problem.bank, problem.x, problem.mask, problem.keep)
        (problem.weight * problem.group_losses(y.float())).sum().backward()
    found = low.group_gradients(problem.groups, problem.weight)
    assert found.dtype == torch.float32
    assert float((found - exact).norm() / exact.norm()) < 2e-2
    torch.testing.assert_close(low.group_probabilities(problem.groups), p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bank", ["lora", "lora dropout per expert", "ffn"])
def test_reading_under_autocast_still_accumulates_in_float32(bank: str) -> None:
    problem = make_problem(bank, "shuffled", 4, torch.float32)
    _, observed = problem.run()

    def read() -> list[Tensor]:
        groups, weight = problem.groups, problem.weight
        return [
            observed.group_gradients(groups, weight),
            observed.group_gram(groups, weight),
            observed.group_probabilities(groups).detach(),
        ]

    expected = read()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = read()
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bank", ["lora", "ffn gated"])
def test_bf16_weights_are_observed_in_float32(bank: str) -> None:
    problem = make_problem(bank, "shuffled", 4, torch.float32)
    problem.bank.experts.bfloat16()
    with gar.observe(problem.bank) as observed:
        y, _ = call(problem.bank, problem.x.bfloat16(), problem.mask, problem.keep)
        (problem.weight * problem.group_losses(y.float())).sum().backward()
    problem.x = problem.x.bfloat16().float()
    found = observed.group_gradients(problem.groups, problem.weight)
    assert found.dtype == torch.float32
    expected = problem.definition()
    assert float((found.double() - expected).norm() / expected.norm()) < 2e-2


# --------------------------------------------------------------------------------------------------
# In models of one's own
# --------------------------------------------------------------------------------------------------


class TwoBanks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(D, D)
        self.first = RoutedLoRA(D, D, experts=3, rank=2, top_k=2)
        self.second = RoutedFFN(D, 4, experts=2, top_k=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.below(x))
        x = torch.tanh(x + self.first(x)[0])
        return x + self.second(x)[0]


def test_several_banks_have_a_site_each() -> None:
    model = TwoBanks().double()
    randomize(model)
    problem = make_problem("lora", "shuffled", None)
    with gar.observe(model) as observed:
        losses = problem.group_losses(model(problem.x))
        expected = []
        for site, bank in zip(observed.sites, (model.first, model.second), strict=True):
            assert site.bank is bank
            with observed.sites[0].paused(), observed.sites[1].paused():
                expected.append(gar.per_group_gradients(losses, bank))
        (problem.weight * losses).sum().backward()
    for site, g in zip(observed.sites, expected, strict=True):
        same(site.group_gradients(problem.groups, problem.weight), g)
        assert site.group_probabilities(problem.groups).shape == (4, site.bank.experts.count)
    with pytest.raises(RuntimeError, match="2 expert banks were observed"):
        observed.group_gradients(problem.groups, problem.weight)
    with gar.observe(model.first, model, model.first) as once:
        pass
    assert [site.bank for site in once.sites] == [model.first, model.second]


def test_a_plain_mlp_learns_with_the_alignment_term() -> None:
    """The use shown in the documentation: no trainer of ours, an MLP, one backward, one router loss."""
    moe = RoutedLoRA(8, 8, experts=4, rank=2, top_k=2, dropout=0.1)
    inner, outer = nn.Linear(6, 8), nn.Linear(8, 3)
    x, labels = torch.randn(20, 6), torch.randint(0, 3, (20,))
    groups = torch.arange(20) // 5
    weight = torch.full((4,), 0.25)
    parameters = [*inner.parameters(), *moe.parameters(), *outer.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    history = []
    for _ in range(30):
        optimizer.zero_grad()
        with gar.observe(moe) as observed:
            hidden = torch.relu(inner(x))
            delta, _ = moe(hidden)
            rows = functional.cross_entropy(outer(hidden + delta), labels, reduction="none")
            losses = torch.stack([rows[groups == m].mean() for m in range(4)])
            (weight * losses).sum().backward()
        task_gradient = moe.router.weight.grad.clone()
        g, p = observed.group_gradients(groups, weight), observed.group_probabilities(groups)
        (0.1 * gar.alignment_loss(p, g)).backward()
        assert moe.router.weight.grad is not None
        assert not torch.equal(task_gradient, moe.router.weight.grad)
        optimizer.step()
        history.append(float(losses.detach().mean()))
    assert history[-1] < 0.7 * history[0]


# --------------------------------------------------------------------------------------------------
# Groupings
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", list(GROUPS))
def test_grouping_equals_loops(groups: str) -> None:
    listed, sizes = GROUPS[groups]
    grouping = Grouping(torch.tensor(listed))
    count = len(sizes)
    assert grouping.count == count
    assert grouping.sizes.tolist() == [size for _, size in sizes]
    values = torch.randn(len(listed), 3, 2, dtype=torch.float64)
    right = torch.randn(len(listed), 3, 4, dtype=torch.float64)
    summed, product, bias = (
        grouping.sum(values),
        grouping.product(Factors(values, right)),
        grouping.product(Factors(values, None)),
    )
    for m in range(count):
        members = [n for n, group in enumerate(listed) if group == m]
        total = torch.zeros(3, 2, dtype=torch.float64)
        outer = torch.zeros(2, 4, dtype=torch.float64)
        for n in members:
            total += values[n]
            for t in range(3):
                outer += torch.outer(values[n, t], right[n, t])
        same(summed[m], total)
        same(grouping.mean(values)[m], total / len(members))
        same(product[m], outer)
        same(bias[m], total.sum(0))
    marks = torch.rand(len(listed), 3) > 0.5
    back = grouping.scatter(grouping.gather(marks).flatten(1, 2), marks.shape)
    counted = torch.tensor(listed) >= 0
    weights = torch.rand(count, dtype=torch.float64)
    spread = [float(weights[group]) if group >= 0 else 0.0 for group in listed]
    assert grouping.spread(weights).tolist() == spread
    assert torch.equal(back[counted], marks[counted])
    assert not back[~counted].any()


@pytest.mark.parametrize("sizes", [[3], [2, 2], [3, 1, 2], [1, 1, 1]])
def test_groupings_made_from_sizes_are_those_of_their_numbers(sizes: list[int]) -> None:
    numbers = torch.tensor([m for m, size in enumerate(sizes) for _ in range(size)])
    width, values = max(sizes), torch.randn(sum(sizes), 3, 2, dtype=torch.float64)
    expected = Grouping(numbers)
    consecutive = Grouping.consecutive(sizes)
    padded = Grouping.padded(torch.tensor(sizes), width)
    slots = torch.cat([m * width + torch.arange(size) for m, size in enumerate(sizes)])
    rows = torch.zeros(len(sizes) * width, 3, 2, dtype=torch.float64)
    rows[slots] = values
    for grouping, own in ((consecutive, values), (padded, rows)):
        same(grouping.sum(own), expected.sum(values))
        same(grouping.mean(own), expected.mean(values))
        same(grouping.product(Factors(own, own)), expected.product(Factors(values, values)))
    weights = torch.rand(len(sizes), dtype=torch.float64)
    assert torch.equal(consecutive.spread(weights), expected.spread(weights))
    assert torch.equal(padded.spread(weights)[slots], expected.spread(weights))
    assert int(padded.spread(weights + 1).count_nonzero()) == sum(sizes)


def test_a_grouping_may_count_no_row() -> None:
    grouping = Grouping(torch.tensor([-1, -1]))
    assert grouping.count == 0
    assert grouping.sum(torch.ones(2, 3)).shape == (0, 3)


# ---------------------------------------------------------------------- what others do around a bank


def _halved(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output / 2


def _doubled_gradient(module: nn.Module, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (2 * grads[0],)


class _Thrice(RoutedLoRA):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, routing = super().forward(*args, **kwargs)
        return 3 * output, routing


@pytest.mark.parametrize("case", ["plain", "output", "gradient", "subclass", "later hook", "in place"])
@pytest.mark.parametrize("kind", ["lora", "ffn"])
def test_rows_are_those_of_what_reaches_the_experts(kind: str, case: str) -> None:
    """Whatever hooks, subclasses and in-place operations make of their output, or of its gradient."""
    if kind == "ffn":
        bank: Any = RoutedFFN(4, 6, experts=3, top_k=2)
    else:
        bank = (_Thrice if case == "subclass" else RoutedLoRA)(4, 4, experts=3, rank=2, top_k=2)
    bank.double()
    randomize(bank)
    if case == "output":
        bank.experts.register_forward_hook(_halved)
    if case == "gradient":
        bank.experts.register_full_backward_pre_hook(_doubled_gradient)
    x = torch.randn(4, 3, 4, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(4, 3, 4, dtype=torch.float64)

    def losses() -> Tensor:
        output, _ = bank(x)
        if case == "in place":
            output += x
        if case == "later hook":
            output.register_hook(lambda grad: grad.sign())
        return (output * pull).sum((1, 2))

    slots = [getattr(bank.experts, slot) for slot in bank.experts.slots]
    expected = []
    for i in range(4):
        grads = torch.autograd.grad(losses()[i], slots)
        expected.append(torch.cat([grad.sum(0).flatten() for grad in grads]))
    with gar.observe(bank) as observed:
        losses().sum().backward()
    found = observed.group_gradients(torch.arange(4), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-10, atol=1e-12)


def test_a_leaf_that_keeps_the_same_gradient_changes_no_row() -> None:
    """AccumulateGrad takes over the memory of a gradient that nobody else holds, and adds to it in place."""
    bank = RoutedLoRA(4, 4, experts=3, rank=2, top_k=2).double()
    randomize(bank)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    rows = []
    for changed in (False, True):
        leaf = torch.zeros(2, 12, dtype=torch.float64, requires_grad=True)
        with gar.observe(bank) as observed:
            output, _ = bank(x)
            (output + leaf.view(2, 3, 4)).square().sum().backward()
        if changed:
            assert leaf.grad is not None
            leaf.grad.zero_()
        rows.append(observed.group_gradients(torch.arange(2), torch.ones(2, dtype=torch.float64)))
    assert rows[0].abs().max() > 0
    assert torch.equal(*rows)


@pytest.mark.parametrize("activation", [torch.relu_, nn.Sequential(nn.ReLU(inplace=True))])
def test_an_activation_that_works_in_place_is_refused(activation: Any) -> None:
    bank = RoutedFFN(4, 6, experts=3, top_k=2, activation=activation)
    with pytest.raises(UserError, match="activation works in place"), gar.observe(bank):
        bank(torch.randn(2, 3, 4))
    bank(torch.randn(2, 3, 4))  # nobody reads its input


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at what it resumes with
@pytest.mark.parametrize("kind", ["lora", "ffn"])
def test_a_bank_that_was_compiled_before_is_named(kind: str) -> None:
    """What is compiled has no hooks inside, and the numbers are missing, not wrong."""
    torch.compiler.reset()
    bank = BANKS[kind]()
    compiled, x = torch.compile(bank, backend="eager"), torch.randn(2, 3, D, requires_grad=True)
    compiled(x)
    with gar.observe(bank) as observed:
        compiled(x)[0].sum().backward()
    with pytest.raises(UserError, match=r"compiled \(torch.compile\) inside the observe block"):
        observed.group_gradients(torch.arange(2), torch.ones(2))
