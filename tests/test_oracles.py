"""Sanity of the slow reference implementations themselves: hand-computed values and textbook identities."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from support import oracles

EPS = 1e-8


def draw(seed: int, *shape: int) -> Tensor:
    """Standard normal float64 values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------------------
# Groups and weights
# --------------------------------------------------------------------------------------------------


def test_groups_of_full_and_short_batches() -> None:
    groups = oracles.split_groups([32, 19, 5], 8)
    assert groups == [(0, 8)] * 4 + [(1, 8), (1, 8), (1, 3), (2, 5)]
    index = oracles.group_of_example(groups)
    assert len(index) == 56
    assert index[:9] == [0] * 8 + [1]
    assert index[-6:] == [6] + [7] * 5


def test_group_of_one() -> None:
    assert oracles.split_groups([9], 8) == [(0, 8), (0, 1)]
    assert oracles.split_groups([1], 8) == [(0, 1)]
    assert oracles.task_weights([(0, 1)]) == [1.0]


def test_task_weights_by_hand() -> None:
    v = oracles.task_weights(oracles.split_groups([32, 19, 5], 8))
    assert v == pytest.approx([8 / 96] * 4 + [8 / 57, 8 / 57, 3 / 57, 1 / 3])
    assert sum(v[:4]) == pytest.approx(1 / 3)
    assert sum(v[4:7]) == pytest.approx(1 / 3)


def test_one_task() -> None:
    """A single task: v_m = |m| / B, and L_task is the plain mean over the batch, short group or not."""
    groups = oracles.split_groups([11], 8)
    assert oracles.task_weights(groups) == pytest.approx([8 / 11, 3 / 11])
    losses = draw(1, 11)
    per_group = oracles.group_losses(losses, oracles.group_of_example(groups), 2)
    close(oracles.task_loss(per_group, oracles.task_weights(groups)), losses.mean())


def test_task_weights_equal_sample_weights_for_full_batches() -> None:
    groups = oracles.split_groups([16, 16], 8)
    assert oracles.task_weights(groups) == oracles.sample_weights([size for _, size in groups])


def test_task_loss_is_the_mean_of_task_means() -> None:
    sizes = [7, 3]
    losses = draw(0, 10)
    groups = oracles.split_groups(sizes, 4)
    per_group = oracles.group_losses(losses, oracles.group_of_example(groups), len(groups))
    expected = (losses[:7].mean() + losses[7:].mean()) / 2
    close(oracles.task_loss(per_group, oracles.task_weights(groups)), expected)


# --------------------------------------------------------------------------------------------------
# Gates
# --------------------------------------------------------------------------------------------------


def test_masked_softmax_by_hand() -> None:
    gates = oracles.masked_softmax(torch.tensor([[0.0, math.log(3.0), -5.0, -7.0]]), 2)
    close(gates, torch.tensor([[0.25, 0.75, 0.0, 0.0]], dtype=torch.float64), 1e-7)
    assert gates[0, 2] == 0.0


@pytest.mark.parametrize("k", [1, 3, 8])
def test_masked_softmax_rows_sum_to_one_on_the_selected_set(k: int) -> None:
    z = draw(1, 2, 5, 8)
    gates = oracles.masked_softmax(z, k)
    close(gates.sum(-1), torch.ones(2, 5, dtype=torch.float64))
    assert torch.equal(gates > 0, oracles.selected(z, k))
    assert torch.equal(oracles.selected(z, k).sum(-1), torch.full((2, 5), k))
    if k == 8:
        close(gates, torch.softmax(z, -1))


def test_masked_softmax_gradient_only_reaches_selected_logits() -> None:
    z = draw(2, 1, 6).requires_grad_()
    (oracles.masked_softmax(z, 3) * draw(3, 1, 6)).sum().backward()
    assert z.grad is not None
    assert torch.equal(z.grad != 0, oracles.selected(z, 3))


def test_masked_softmax_of_large_logits_is_finite() -> None:
    gates = oracles.masked_softmax(torch.tensor([[1e4, 1e4 - 1.0, -1e4]]), 2)
    assert torch.isfinite(gates).all()


def test_ties_go_to_the_lowest_index_and_keep_k_experts() -> None:
    z = torch.zeros(1, 4)
    assert oracles.selected(z, 2).tolist() == [[True, True, False, False]]
    assert oracles.masked_softmax(z, 2).tolist() == [[0.5, 0.5, 0.0, 0.0]]


def test_straight_through_is_one_hot_with_the_softmax_jacobian() -> None:
    z = draw(4, 6)

    def softmax(x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    gate = oracles.straight_through_gate(z)
    assert sorted(gate.tolist()) == [0.0] * 5 + [1.0]
    assert int(gate.argmax()) == int(z.argmax())
    jacobian = torch.autograd.functional.jacobian(oracles.straight_through_gate, z)
    close(jacobian, torch.autograd.functional.jacobian(softmax, z))
    sigma = torch.softmax(z, -1)
    close(jacobian, torch.diag(sigma) - sigma[:, None] * sigma[None, :])


# --------------------------------------------------------------------------------------------------
# Expert banks
# --------------------------------------------------------------------------------------------------


def test_lora_forward_matches_einsum_with_both_kinds_of_dropout() -> None:
    x, A, B = draw(5, 4, 5), draw(6, 3, 2, 5), draw(7, 3, 6, 2)
    gates = oracles.masked_softmax(draw(8, 4, 3), 2)
    shared = (draw(9, 4, 5) > 0).double() / 0.5
    close(
        oracles.lora_forward(x, A, B, gates, 0.5),
        0.5 * torch.einsum("ne,eor,erd,nd->no", gates, B, A, x),
    )
    expected = 0.5 * torch.einsum("ne,eor,erd,nd->no", gates, B, A, x * shared)
    close(oracles.lora_forward(x, A, B, gates, 0.5, shared), expected)
    close(oracles.lora_forward(x, A, B, gates, 0.5, shared[:, None].expand(4, 3, 5)), expected)
    own = (draw(10, 4, 3, 5) > 0).double() / 0.5
    close(
        oracles.lora_forward(x, A, B, gates, 0.5, own),
        0.5 * torch.einsum("ne,eor,erd,ned->no", gates, B, A, x[:, None] * own),
    )


def test_ffn_copies_of_one_ffn_return_that_ffn() -> None:
    """Experts initialised as copies change nothing, whatever the gates, since each row of gates sums to 1."""
    x, W1, b1, W2, b2 = draw(11, 4, 3), draw(12, 5, 3), draw(13, 5), draw(14, 3, 5), draw(15, 3)
    gates = oracles.masked_softmax(draw(16, 4, 6), 2)
    bank = [t.expand(6, *t.shape) for t in (W1, b1, W2, b2)]
    act = torch.nn.functional.gelu
    out = oracles.ffn_forward(x, bank[0], bank[1], bank[2], bank[3], gates, act)
    close(out, act(x @ W1.T + b1) @ W2.T + b2)


def test_gated_ffn_by_einsum() -> None:
    x, W1, b1, W2, b2 = draw(17, 4, 3), draw(18, 2, 10, 3), draw(19, 2, 10), draw(20, 2, 3, 5), draw(21, 2, 3)
    gates = oracles.masked_softmax(draw(22, 4, 2), 2)
    act = torch.nn.functional.silu
    pre = torch.einsum("efd,nd->nef", W1, x) + b1
    y = torch.einsum("edf,nef->ned", W2, act(pre[..., :5]) * pre[..., 5:]) + b2
    close(oracles.ffn_forward(x, W1, b1, W2, b2, gates, act), (gates[..., None] * y).sum(1))


def test_masked_mean_ignores_padding_and_refuses_an_empty_row() -> None:
    values, mask = draw(23, 2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]])
    close(oracles.masked_mean(values, mask), torch.stack([values[0, :2].mean(0), values[1, 0]]))
    with pytest.raises(ValueError, match="no valid position"):
        oracles.masked_mean(values, torch.tensor([[1, 1, 0], [0, 0, 0]]))


# --------------------------------------------------------------------------------------------------
# Gradient observations
# --------------------------------------------------------------------------------------------------

D, R, E, CLASSES = 4, 2, 3, 3
SCALE = 0.75


class Toy:
    """Two tasks, uneven groups, padded tokens, a residual stream and one linear head per task."""

    def __init__(self, k: int = 2) -> None:
        self.sizes = [5, 2]
        self.pairs = oracles.split_groups(self.sizes, 2)  # group sizes 2, 2, 1, 2
        self.groups = oracles.group_of_example(self.pairs)
        self.M = len(self.pairs)
        self.v = oracles.task_weights(self.pairs)
        self.task = [0] * 5 + [1] * 2
        self.labels = [0, 2, 1, 1, 0, 2, 1]
        self.L = 3
        self.mask = torch.tensor(
            [[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]
        )
        self.x = draw(30, 7 * self.L, D)
        self.gates = oracles.masked_softmax(draw(31, 7 * self.L, E), k)
        self.keep = (draw(32, 7 * self.L, D) > -1.0).double() / 0.9
        self.A, self.B = draw(33, E, R, D), draw(34, E, D, R)
        self.W1, self.b1 = draw(35, E, 5, D), draw(36, E, 5)
        self.W2, self.b2 = draw(37, E, D, 5), draw(38, E, D)
        self.heads = [draw(39, CLASSES, D), draw(40, CLASSES, D)]
        self.unit_group = [self.groups[i // self.L] for i in range(7 * self.L)]

    def losses(self, y: Tensor) -> Tensor:
        """Group losses from the gated expert sum y of every unit."""
        hidden = torch.tanh(self.x + y).reshape(7, self.L, D)
        pooled = oracles.masked_mean(hidden, self.mask)
        each = []
        for n in range(7):
            logits = self.heads[self.task[n]] @ pooled[n]
            each.append(torch.logsumexp(logits, 0) - logits[self.labels[n]])
        return oracles.group_losses(torch.stack(each), self.groups, self.M)

    def lora(self, A: Tensor, B: Tensor, keep: Tensor | None = None) -> Tensor:
        keep = self.keep if keep is None else keep
        return self.losses(oracles.lora_forward(self.x, A, B, self.gates, SCALE, keep))

    def ffn(self, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor) -> Tensor:
        return self.losses(oracles.ffn_forward(self.x, W1, b1, W2, b2, self.gates, torch.tanh))

    def lora_observations(self, keep: Tensor | None = None) -> Tensor:
        return oracles.template_gradients(
            lambda p: self.lora(self.A + p["A"], self.B + p["B"], keep), {"A": (R, D), "B": (D, R)}
        )


def delta(toy: Toy, forward: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    """dL_task/dy_i at the gated expert sum, from one ordinary backward."""
    y = y.detach().requires_grad_()
    return torch.autograd.grad(oracles.task_loss(forward(y), toy.v), y)[0]


@pytest.mark.parametrize("k", [1, 2, E])
def test_lora_template_gradient_is_the_sum_of_expert_gradients(k: int) -> None:
    toy = Toy(k)
    summed = oracles.summed_expert_gradients(lambda t: toy.lora(t["A"], t["B"]), {"A": toy.A, "B": toy.B})
    close(toy.lora_observations(), summed)
    assert summed.shape == (4, 2 * R * D)


def test_ffn_template_gradient_is_the_sum_of_expert_gradients() -> None:
    toy = Toy()
    bank = {"W1": toy.W1, "b1": toy.b1, "W2": toy.W2, "b2": toy.b2}

    def forward(t: dict[str, Tensor]) -> Tensor:
        return toy.ffn(t["W1"], t["b1"], t["W2"], t["b2"])

    common = oracles.template_gradients(
        lambda p: forward({name: t + p[name] for name, t in bank.items()}),
        {name: t.shape[1:] for name, t in bank.items()},
    )
    close(common, oracles.summed_expert_gradients(forward, bank))


def test_template_gradient_by_finite_differences() -> None:
    toy = Toy()
    g = toy.lora_observations()
    direction = draw(41, g.shape[1])
    a, b = direction[: R * D].reshape(R, D), direction[R * D :].reshape(D, R)
    h = 1e-6
    up = toy.lora(toy.A + h * a, toy.B + h * b)
    down = toy.lora(toy.A - h * a, toy.B - h * b)
    close(g @ direction, (up - down) / (2 * h), 1e-7)


def test_one_pass_formulas_of_the_specification_for_lora() -> None:
    """The factors of ONE backward of L_task, with rho_m = 1/v_m, give the same observations."""
    toy = Toy()
    seen = toy.x * toy.keep
    d = delta(toy, toy.losses, oracles.lora_forward(toy.x, toy.A, toy.B, toy.gates, SCALE, toy.keep))
    rows = []
    for m in range(toy.M):
        slot_A, slot_B = torch.zeros(R, D, dtype=torch.float64), torch.zeros(D, R, dtype=torch.float64)
        for i in range(len(toy.unit_group)):
            if toy.unit_group[i] != m:
                continue
            down, up = torch.zeros(R, dtype=torch.float64), torch.zeros(R, dtype=torch.float64)
            for e in range(E):
                down = down + toy.gates[i, e] * (toy.A[e] @ seen[i])
                up = up + toy.gates[i, e] * (toy.B[e].T @ d[i])
            slot_B = slot_B + torch.outer(d[i], SCALE * down) / toy.v[m]
            slot_A = slot_A + torch.outer(SCALE * up, seen[i]) / toy.v[m]
        rows.append(torch.cat([slot_A.reshape(-1), slot_B.reshape(-1)]))
    close(torch.stack(rows), toy.lora_observations())


def test_one_pass_formulas_with_per_expert_dropout_keep_the_sum_over_experts_in_slot_a() -> None:
    """With one mask per expert, slot A is sum_e (s pi_e B_e^T delta) (x_e)^T and no longer factorises."""
    toy = Toy()
    keep = (draw(42, 7 * toy.L, E, D) > -1.0).double() / 0.9
    d = delta(toy, toy.losses, oracles.lora_forward(toy.x, toy.A, toy.B, toy.gates, SCALE, keep))
    rows = []
    for m in range(toy.M):
        slot_A, slot_B = torch.zeros(R, D, dtype=torch.float64), torch.zeros(D, R, dtype=torch.float64)
        for i in range(len(toy.unit_group)):
            for e in range(E):
                if toy.unit_group[i] == m:
                    seen, weight = toy.x[i] * keep[i, e], SCALE * toy.gates[i, e] / toy.v[m]
                    slot_A = slot_A + weight * torch.outer(toy.B[e].T @ d[i], seen)
                    slot_B = slot_B + weight * torch.outer(d[i], toy.A[e] @ seen)
        rows.append(torch.cat([slot_A.reshape(-1), slot_B.reshape(-1)]))
    close(torch.stack(rows), toy.lora_observations(keep))


def test_one_pass_formulas_of_the_specification_for_ffn() -> None:
    toy = Toy()
    y = oracles.ffn_forward(toy.x, toy.W1, toy.b1, toy.W2, toy.b2, toy.gates, torch.tanh)
    d = delta(toy, toy.losses, y)
    rows = []
    for m in range(toy.M):
        W1, b1 = torch.zeros(5, D, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
        W2, b2 = torch.zeros(D, 5, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
        for i in range(len(toy.unit_group)):
            if toy.unit_group[i] != m:
                continue
            h_sum, dpre_sum = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
            for e in range(E):
                h = torch.tanh(toy.W1[e] @ toy.x[i] + toy.b1[e])
                h_sum = h_sum + toy.gates[i, e] * h
                dpre_sum = dpre_sum + toy.gates[i, e] * (toy.W2[e].T @ d[i]) * (1 - h * h)
            W2, b2 = W2 + torch.outer(d[i], h_sum) / toy.v[m], b2 + d[i] / toy.v[m]
            W1, b1 = W1 + torch.outer(dpre_sum, toy.x[i]) / toy.v[m], b1 + dpre_sum / toy.v[m]
        rows.append(torch.cat([W1.reshape(-1), b1, W2.reshape(-1), b2]))
    common = oracles.template_gradients(
        lambda p: toy.ffn(toy.W1 + p["W1"], toy.b1 + p["b1"], toy.W2 + p["W2"], toy.b2 + p["b2"]),
        {"W1": (5, D), "b1": (5,), "W2": (D, 5), "b2": (D,)},
    )
    close(torch.stack(rows), common)


def test_observation_undoes_the_loss_weight() -> None:
    """g_m belongs to l_m: the v-weighted sum of the observations is the template gradient of L_task."""
    toy = Toy()
    g = toy.lora_observations()
    total = oracles.template_gradients(
        lambda p: oracles.task_loss(toy.lora(toy.A + p["A"], toy.B + p["B"]), toy.v).reshape(1),
        {"A": (R, D), "B": (D, R)},
    )
    close((torch.tensor(toy.v, dtype=torch.float64)[:, None] * g).sum(0, keepdim=True), total)


def test_only_one_expert_used() -> None:
    """If every unit takes expert 1, the observation is that expert's own gradient."""
    toy = Toy()
    toy.gates = torch.zeros_like(toy.gates)
    toy.gates[:, 1] = 1.0
    own = oracles.summed_expert_gradients(lambda t: toy.lora(t["A"], t["B"]), {"A": toy.A, "B": toy.B})
    A, B = toy.A.clone().requires_grad_(), toy.B.clone().requires_grad_()
    grad_A, grad_B = torch.autograd.grad(toy.lora(A, B)[2], [A, B])
    close(own[2], torch.cat([grad_A[1].reshape(-1), grad_B[1].reshape(-1)]))
    assert float(grad_A[0].abs().sum() + grad_B[2].abs().sum()) == 0.0
    close(toy.lora_observations(), own)


def test_lora_at_initialisation_has_no_gradient_in_slot_a() -> None:
    toy = Toy()
    toy.B = torch.zeros_like(toy.B)
    g = toy.lora_observations()
    assert float(g[:, : R * D].abs().max()) == 0.0
    assert float(g[:, R * D :].abs().max()) > 0.0


def test_slot_without_influence_is_zero() -> None:
    def losses(p: dict[str, Tensor]) -> Tensor:
        return torch.stack([p["a"].sum(), p["b"].sum()])

    g = oracles.template_gradients(losses, {"a": (2,), "b": (1,)})
    assert g.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def test_group_probabilities_by_hand() -> None:
    gates = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5], [9.0, 9.0]], [[0.2, 0.8], [0.4, 0.6]]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
    p = oracles.group_probabilities(gates, mask, [0, 0, 1], 2)
    close(p, torch.tensor([[0.5, 0.5], [0.3, 0.7]], dtype=torch.float64), 1e-7)


def test_group_probabilities_weigh_examples_equally_and_may_exceed_k_experts() -> None:
    gates = oracles.masked_softmax(draw(43, 6, 4, 8), 2)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]] * 3)
    p = oracles.group_probabilities(gates, mask, [0] * 6, 1)
    close(p.sum(1), torch.ones(1, dtype=torch.float64))
    assert int((p > 0).sum()) > 2
    q = oracles.masked_mean(gates, mask)
    close(p[0], q.mean(0))


def test_head_site_is_the_plain_group_mean() -> None:
    gates = oracles.masked_softmax(draw(44, 3, 1, 4), 2)
    p = oracles.group_probabilities(gates, torch.ones(3, 1), [0, 0, 1], 2)
    close(p, torch.stack([gates[:2, 0].mean(0), gates[2, 0]]))


# --------------------------------------------------------------------------------------------------
# The alignment objective
# --------------------------------------------------------------------------------------------------


def three_vectors() -> Tensor:
    """Unit vectors with inner products .9, .2 and .2."""
    W = torch.tensor([[1.0, 0.9, 0.2], [0.9, 1.0, 0.2], [0.2, 0.2, 1.0]], dtype=torch.float64)
    return torch.linalg.cholesky(W)


@pytest.mark.parametrize(
    ("clusters", "value"), [([0, 0, 1], 2.9), ([0, 1, 0], 2.2), ([1, 0, 0], 2.2), ([1, 1, 0], 2.9)]
)
def test_three_vector_example_of_the_paper(clusters: list[int], value: float) -> None:
    g = three_vectors()
    P = torch.nn.functional.one_hot(torch.tensor(clusters), 2).double()
    assert float(oracles.association(P, g, 0.0)) == pytest.approx(value, abs=1e-12)
    assert float(oracles.association_gram(P, g @ g.T, 0.0)) == pytest.approx(value, abs=1e-12)
    assert float(oracles.alignment_loss(P, g, 0.0)) == pytest.approx(-value, abs=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
def test_vector_and_gram_forms_agree(normalize: bool) -> None:
    P, g = torch.softmax(draw(50, 5, 3), -1), draw(51, 5, 7)
    close(
        oracles.association(P, g, EPS, normalize),
        oracles.association_gram(P, g @ g.T, EPS, normalize),
    )


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("eps", [0.0, EPS, 0.3])
def test_alignment_gradient_is_minus_the_marginal_score(normalize: bool, eps: float) -> None:
    P, g = torch.softmax(draw(52, 6, 4), -1).requires_grad_(), draw(53, 6, 5)
    grad = torch.autograd.grad(oracles.alignment_loss(P, g, eps, normalize), P)[0]
    close(grad, -oracles.marginal_scores(P, g, eps, normalize))


def test_entropy_weight() -> None:
    P, g = torch.softmax(draw(54, 3, 4), -1), draw(55, 3, 5)
    difference = oracles.alignment_loss(P, g, tau=0.7) - oracles.alignment_loss(P, g)
    close(difference, 0.7 * (P * P.log()).sum())


def test_entropy_of_a_row_with_zeros_is_finite() -> None:
    P = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64, requires_grad=True)
    loss = oracles.alignment_loss(P, draw(56, 2, 3), tau=1.0)
    grad = torch.autograd.grad(loss, P)[0]
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()


def test_observations_are_held_fixed() -> None:
    P, g = torch.softmax(draw(57, 3, 2), -1).requires_grad_(), draw(58, 3, 4).requires_grad_()
    oracles.alignment_loss(P, g).backward()
    assert P.grad is not None
    assert g.grad is None


def test_zero_gradients_and_unused_experts_give_zero_and_finite_scores() -> None:
    P = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    assert float(oracles.alignment_loss(P, torch.zeros(2, 3))) == 0.0
    g = draw(59, 2, 3)
    for eps in (0.0, EPS):
        assert float(oracles.association(P, g, eps)) == pytest.approx(float(g.sum(0).square().sum() / 2))
        scores = oracles.marginal_scores(P, g, eps)
        assert torch.isfinite(scores).all()
        assert scores[:, 1].tolist() == [0.0, 0.0]


def test_one_group_is_indifferent_without_a_stabiliser_and_prefers_a_vertex_with_one() -> None:
    g = draw(60, 1, 4)
    vertex = oracles.association(torch.tensor([[1.0, 0.0]]), g, 0.0)
    uniform = oracles.association(torch.tensor([[0.5, 0.5]]), g, 0.0)
    close(vertex, (g * g).sum())
    close(uniform, (g * g).sum())  # with eps = 0 a single group is indifferent: p^2 |g|^2 / p
    assert oracles.association(torch.tensor([[1.0, 0.0]]), g, 0.1) > oracles.association(
        torch.tensor([[0.5, 0.5]]), g, 0.1
    )


def test_numerator_only_rewards_load_and_normalised_does_not() -> None:
    g = torch.eye(4, dtype=torch.float64)
    spread, packed = torch.eye(4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    packed[:, 0] = 1.0
    assert float(oracles.association(spread, g, 0.0)) == 4.0
    assert float(oracles.association(packed, g, 0.0)) == 1.0
    same = torch.ones(4, 1, dtype=torch.float64)
    assert (
        float(oracles.association(packed, same, 0.0)) == float(oracles.association(spread, same, 0.0)) == 4.0
    )
    assert float(oracles.association(packed, same, 0.0, normalize=False)) == 16.0


# --------------------------------------------------------------------------------------------------
# Load penalties
# --------------------------------------------------------------------------------------------------


def test_loadpen_by_hand() -> None:
    q = torch.tensor([[0.75, 0.25], [0.25, 0.75], [0.75, 0.25]], requires_grad=True)
    f, P = oracles.loadpen_vectors(q, [2, 1])
    close(f, torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))
    close(P.detach(), torch.tensor([1.75 / 3, 1.25 / 3], dtype=torch.float64))
    loss = oracles.loadpen(q, [2, 1], 0.5)
    assert float(loss.detach()) == pytest.approx(0.5 * 2 * (2 / 3 * 1.75 / 3 + 1 / 3 * 1.25 / 3))
    loss.backward()
    assert q.grad is not None
    close(q.grad.double(), (f / 3).expand(3, 2), 1e-6)


def test_loadpen_does_not_depend_on_how_examples_are_grouped() -> None:
    """w_m / |m| = 1/n, so LoadPen weighs all examples alike."""
    q = torch.softmax(draw(70, 7, 4), -1)
    close(oracles.loadpen(q, [4, 3], 1.0), oracles.loadpen(q, [1, 1, 5], 1.0))
    with pytest.raises(ValueError, match="add up"):
        oracles.loadpen(q, [4, 4], 1.0)


def test_balanced_penalties_equal_their_coefficient() -> None:
    """f = P = 1/E gives E * sum 1/E^2 = 1."""
    q = torch.eye(4, dtype=torch.float64)
    assert float(oracles.loadpen(q, [4], 0.3)) == pytest.approx(0.3)
    aux = oracles.switchaux(q, q > 0, torch.ones(4), [0] * 4, [1.0], 0.3, 1)
    assert float(aux) == pytest.approx(0.3)


def test_everything_on_one_expert_costs_e_times_the_coefficient() -> None:
    q = torch.zeros(5, 4, dtype=torch.float64)
    q[:, 2] = 1.0
    assert float(oracles.loadpen(q, [5], 0.3)) == pytest.approx(1.2)
    assert float(oracles.switchaux(q, q > 0, torch.ones(5), [0] * 5, [1.0], 0.3, 1)) == pytest.approx(1.2)


def test_switchaux_vectors_sum_to_one_and_skip_padding() -> None:
    z = draw(71, 9, 5)
    gates, chosen = oracles.masked_softmax(z, 2), oracles.selected(z, 2)
    mask, groups = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1]), [0, 0, 0, 1, 1, 1, 2, 2, 2]
    f, P = oracles.switchaux_vectors(gates, chosen, mask, groups, 3, 2)
    close(f.sum(1), torch.ones(3, dtype=torch.float64))
    close(P.sum(1), torch.ones(3, dtype=torch.float64))
    close(P[1], gates[3])
    u = [0.5, 0.2, 0.3]
    expected = sum(u[m] * 5 * float((f[m] * P[m]).sum()) for m in range(3))
    assert float(oracles.switchaux(gates, chosen, mask, groups, u, 0.1, 2)) == pytest.approx(0.1 * expected)
    with pytest.raises(ValueError, match="no valid unit"):
        oracles.switchaux_vectors(gates, chosen, torch.zeros(9), groups, 3, 2)


def test_switchaux_is_not_loadpen_when_groups_specialise() -> None:
    """Per-group products punish a specialised group even where the whole update is balanced."""
    q = torch.eye(2, dtype=torch.float64)
    assert float(oracles.loadpen(q, [1, 1], 1.0)) == pytest.approx(1.0)
    assert float(oracles.switchaux(q, q > 0, torch.ones(2), [0, 1], [0.5, 0.5], 1.0, 1)) == pytest.approx(2.0)


# --------------------------------------------------------------------------------------------------
# STGC
# --------------------------------------------------------------------------------------------------


def stgc_problem() -> tuple[Tensor, Tensor, Tensor, Tensor, list[int]]:
    z = draw(80, 8, 4)
    chosen = oracles.selected(z, 2)
    gates = oracles.masked_softmax(z, 2)
    delta = gates[:, :, None] * draw(81, 8, 1, 3)
    return z, chosen, delta, draw(82, 4, 3, 2), [0, 0, 0, 0, 1, 1, 1, 2]


def test_cosine_with_a_zero_vector_is_zero() -> None:
    a, zero = draw(83, 3), torch.zeros(3, dtype=torch.float64)
    assert oracles.cosine(a, zero) == oracles.cosine(zero, a) == oracles.cosine(zero, zero) == 0.0
    assert oracles.cosine(a, 2 * a) == pytest.approx(1.0)
    assert oracles.cosine(1e-200 * a, -1e-200 * a) == pytest.approx(-1.0)


def test_stgc_by_hand() -> None:
    """Three units on expert 0 with deltas 1, 1, -1: the mean is 1/3, so only the third conflicts."""
    z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [2.0, 0.0]], dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([[True, False]] * 3)
    delta = torch.tensor([[[1.0], [0.0]], [[1.0], [0.0]], [[-1.0], [0.0]]])
    conflict, losses = oracles.stgc(z, chosen, delta, torch.ones(2, 1, 1), 0.5, [0, 0, 0], 1)
    assert conflict.tolist() == [[False, False], [False, False], [True, False]]
    expected = -math.log(math.exp(-2.0) / (math.exp(-2.0) + 1.0)) / 2
    assert float(losses[0].detach()) == pytest.approx(expected)
    losses[0].backward()
    assert z.grad is not None
    assert z.grad[:2].abs().sum() == 0.0
    assert z.grad[2, 0] > 0.0  # descent lowers the logit of the conflicting expert
    assert z.grad[2, 1] < 0.0


def test_stgc_at_initialisation_uses_only_the_second_proxy() -> None:
    _, chosen, delta, B, groups = stgc_problem()
    scores = oracles.stgc_scores(chosen, delta, torch.zeros_like(B), 1.0, groups)
    for i in range(8):
        for e in range(4):
            units = [j for j in range(8) if groups[j] == groups[i] and chosen[j, e]]
            if chosen[i, e]:
                second = oracles.cosine(delta[i, e], delta[units, e].mean(0))
                assert float(scores[i, e]) == pytest.approx(second / 2)
            else:
                assert math.isnan(float(scores[i, e]))


def test_stgc_is_unchanged_by_the_lora_scale_and_by_positive_group_weights() -> None:
    z, chosen, delta, B, groups = stgc_problem()
    weight = torch.tensor([0.3, 2.0, 5.0], dtype=torch.float64)[groups]
    first = oracles.stgc_scores(chosen, delta, B, 1.0, groups)
    second = oracles.stgc_scores(chosen, weight[:, None, None] * delta, B, 0.1, groups)
    torch.testing.assert_close(first, second, equal_nan=True)
    conflict, _ = oracles.stgc(z, chosen, delta, B, 1.0, groups, 3)
    assert conflict.any()
    assert not (conflict & ~chosen).any()


def test_stgc_group_of_one_and_zero_gradients_never_conflict() -> None:
    z, chosen, delta, B, groups = stgc_problem()
    conflict, losses = oracles.stgc(z, chosen, delta, B, 1.0, groups, 3)
    assert not conflict[7].any()
    assert float(losses[2]) == 0.0
    conflict, losses = oracles.stgc(z, chosen, torch.zeros_like(delta), B, 1.0, groups, 3)
    assert not conflict.any()
    assert float(oracles.stgc_total([0.5, 0.3, 0.2], losses)) == 0.0


def test_stgc_opposite_pair_has_a_zero_mean_and_no_conflict() -> None:
    chosen = torch.ones(2, 1, dtype=torch.bool)
    delta = torch.tensor([[[1.0, 2.0]], [[-1.0, -2.0]]])
    conflict, _ = oracles.stgc(torch.zeros(2, 1), chosen, delta, torch.ones(1, 2, 1), 1.0, [0, 0], 1)
    assert not conflict.any()


def test_stgc_padding_neither_conflicts_nor_enters_the_mean() -> None:
    z, chosen, delta, B, groups = stgc_problem()
    mask = torch.tensor([1, 1, 1, 0, 1, 1, 0, 1])
    spoiled = torch.where(mask[:, None, None] > 0, delta, 1e3 * torch.ones_like(delta))
    first, _ = oracles.stgc(z, chosen, delta, B, 1.0, groups, 3, mask)
    second, _ = oracles.stgc(z, chosen, spoiled, B, 1.0, groups, 3, mask)
    assert torch.equal(first, second)
    assert not first[3].any()
    assert not first[6].any()


def test_stgc_total_weighs_groups() -> None:
    z, chosen, delta, B, groups = stgc_problem()
    conflict, losses = oracles.stgc(z, chosen, delta, B, 1.0, groups, 3)
    v = [0.25, 0.35, 0.4]
    close(oracles.stgc_total(v, losses), v[0] * losses[0] + v[1] * losses[1] + v[2] * losses[2])
    log_leave = torch.log_softmax(-z, -1)
    for m in range(3):
        rows = [i for i in range(8) if groups[i] == m]
        hit = conflict[rows]
        expected = -(log_leave[rows] * hit).sum() / (4 * max(1, int(hit.sum())))
        close(losses[m], expected)


# --------------------------------------------------------------------------------------------------
# CAGrad
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_simplex_projection_against_scipy_and_its_optimality_conditions(seed: int) -> None:
    x = 2.0 * draw(100 + seed, 2 + seed)
    w = oracles.project_simplex(x)
    assert float(w.min()) >= 0.0
    assert float(w.sum()) == pytest.approx(1.0, abs=1e-14)
    support = w > 0
    theta = (x - w)[support]
    close(theta, theta[:1].expand_as(theta), 1e-13)
    assert (x[~support] <= theta[0] + 1e-13).all()
    found = minimize(
        lambda y: float(((y - x.numpy()) ** 2).sum()),
        [1 / len(x)] * len(x),
        jac=lambda y: 2 * (y - x.numpy()),
        method="SLSQP",
        bounds=[(0, 1)] * len(x),
        constraints=[{"type": "eq", "fun": lambda y: y.sum() - 1}],
        options={"ftol": 1e-14},
    )
    close(w, torch.as_tensor(found.x), 1e-6)


def test_simplex_projection_of_simple_points() -> None:
    close(
        oracles.project_simplex(torch.tensor([0.2, 0.3, 0.5])), torch.tensor([0.2, 0.3, 0.5]).double(), 1e-7
    )
    close(oracles.project_simplex(torch.tensor([5.0, 0.0])), torch.tensor([1.0, 0.0]).double())
    close(oracles.project_simplex(torch.tensor([7.0])), torch.tensor([1.0]).double())
    close(oracles.project_simplex(torch.full((4,), -3.0)), torch.full((4,), 0.25).double())


def test_cagrad_rows_average_to_the_task_gradient() -> None:
    gradients, v = draw(110, 3, 5), [0.5, 0.3, 0.2]
    rows = oracles.cagrad_rows(gradients, v)
    close(rows.mean(0), 0.5 * gradients[0] + 0.3 * gradients[1] + 0.2 * gradients[2])


@pytest.mark.parametrize("constant", [2.0**-20, 3.7e-5, 123.4])
def test_cagrad_weights_are_free_of_the_loss_scale(constant: float) -> None:
    rows = draw(111, 4, 6)
    direction, w = oracles.cagrad(rows, 0.4, eps=0.0)
    scaled_direction, scaled_w = oracles.cagrad(constant * rows, 0.4, eps=0.0)
    close(w, scaled_w, 1e-12)
    close(direction, scaled_direction / constant, 1e-12)


def test_cagrad_gradient_by_finite_differences() -> None:
    rows, w = draw(112, 4, 6), oracles.project_simplex(draw(113, 4))
    gradient = oracles.cagrad_gradient(rows, w, 0.4)
    for m in range(4):
        h = torch.zeros(4, dtype=torch.float64)
        h[m] = 1e-6
        up, down = oracles.cagrad_objective(rows, w + h, 0.4), oracles.cagrad_objective(rows, w - h, 0.4)
        assert float(gradient[m]) == pytest.approx((up - down) / 2e-6, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("c", [0.2, 0.6])
def test_cagrad_exact_closes_the_duality_gap_and_the_solver_descends_towards_it(seed: int, c: float) -> None:
    rows = draw(120 + seed, 3, 6) + 0.4 * draw(130, 6)
    best = oracles.cagrad_exact(rows, c)
    gradient = oracles.cagrad_gradient(rows, best, c)
    # The problem is convex, so this bounds the excess over the minimum from above.
    gap = float((gradient * best).sum() - gradient.min())
    scale = float((rows * rows).sum())
    assert gap >= -1e-12 * scale
    assert gap <= 1e-6 * scale
    values = []
    for steps in (0, 1, 10, 3000):
        _, w = oracles.cagrad(rows, c, inner_steps=steps)
        assert float(w.min()) >= 0.0
        assert float(w.sum()) == pytest.approx(1.0)
        values.append(oracles.cagrad_objective(rows, w, c))
    assert values[0] > values[1] > values[2] >= values[3] - 1e-12 * scale
    assert values[3] == pytest.approx(oracles.cagrad_objective(rows, best, c), abs=1e-5 * scale)


def test_cagrad_of_equal_rows_only_lengthens_the_step() -> None:
    rows = draw(140, 5).expand(3, 5)
    direction, w = oracles.cagrad(rows, 0.3, eps=0.0)
    close(w, torch.full((3,), 1 / 3, dtype=torch.float64))
    close(direction, 1.3 * rows[0])


def test_cagrad_degenerate_rows() -> None:
    direction, w = oracles.cagrad(torch.zeros(3, 4), 0.4)
    assert direction.tolist() == [0.0] * 4
    close(w, torch.full((3,), 1 / 3, dtype=torch.float64))
    close(oracles.cagrad_exact(torch.zeros(3, 4), 0.4), w)
    one = draw(141, 1, 4)
    direction, w = oracles.cagrad(one, 0.4, eps=0.0)
    assert w.tolist() == [1.0]
    close(direction, 1.4 * one[0])
    opposite = torch.stack([one[0], -one[0]])
    direction, w = oracles.cagrad(opposite, 0.4)
    assert direction.tolist() == [0.0] * 4
    assert w.tolist() == [0.5, 0.5]


def test_cagrad_with_c_zero_is_the_task_gradient() -> None:
    rows = draw(142, 3, 4)
    direction, _ = oracles.cagrad(rows, 0.0)
    close(direction, rows.mean(0))


# --------------------------------------------------------------------------------------------------
# Clip, schedule and optimizer
# --------------------------------------------------------------------------------------------------


def test_warmup_rises_linearly_then_stays() -> None:
    factors = [oracles.warmup_factor(u, 2000) for u in range(2000)]
    assert factors[0] == pytest.approx(1 / 200)
    assert factors[99] == pytest.approx(0.5)
    assert factors[199] == 1.0
    assert set(factors[199:]) == {1.0}
    assert max(factors) == 1.0
    rises = [b - a for a, b in itertools.pairwise(factors[:200])]
    assert rises == pytest.approx([1 / 200] * 199)


def test_warmup_length_is_exact_and_rounds_up() -> None:
    assert [oracles.warmup_updates(n) for n in (0, 1, 9, 10, 11, 30, 70, 1000)] == [0, 1, 1, 1, 2, 3, 7, 100]
    assert oracles.warmup_factor(0, 5) == 1.0
    assert oracles.warmup_factor(0, 100, "0") == 1.0


def test_global_clip_is_joint_and_never_lengthens() -> None:
    grads = [draw(150, 3, 2), draw(151, 4)]
    norm = float(torch.cat([g.reshape(-1) for g in grads]).norm())
    assert oracles.global_norm(grads) == pytest.approx(norm)
    clipped = oracles.clip_global(grads, 0.5)
    assert oracles.global_norm(clipped) == pytest.approx(0.5)
    for before, after in zip(grads, clipped, strict=True):
        close(after, before * 0.5 / norm)
    for before, after in zip(grads, oracles.clip_global(grads, 2 * norm), strict=True):
        assert torch.equal(before, after)
    assert oracles.clip_global([torch.zeros(2)], 1.0)[0].tolist() == [0.0, 0.0]


def test_clip_with_slack_matches_torch() -> None:
    grads = [draw(152, 3, 2), draw(153, 4)]
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(params, 0.5)
    for p, expected in zip(params, oracles.clip_global(grads, 0.5, slack=1e-6), strict=True):
        assert p.grad is not None
        close(p.grad, expected, 1e-13)


def test_adamw_matches_torch_over_several_steps() -> None:
    start = draw(160, 5)
    p = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([p], lr=1.0, weight_decay=0.03)
    mine, first, second = start, torch.zeros(5), torch.zeros(5)
    for u in range(6):
        lr = 0.1 * oracles.warmup_factor(u, 30)
        grad = draw(170 + u, 5)
        optimizer.param_groups[0]["lr"] = lr
        p.grad = grad.clone()
        optimizer.step()
        mine, first, second = oracles.adamw_step(mine, grad, first, second, u + 1, lr, 0.03)
        close(p.detach(), mine, 1e-13)


def test_adamw_with_a_zero_gradient_only_decays() -> None:
    p = draw(161, 3)
    after, first, second = oracles.adamw_step(p, torch.zeros(3), torch.zeros(3), torch.zeros(3), 1, 0.1, 0.5)
    close(after, 0.95 * p)
    assert float(first.abs().sum() + second.abs().sum()) == 0.0
