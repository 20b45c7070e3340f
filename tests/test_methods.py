"""Every method's gradient of every parameter against a float64 derivation, and what must not matter."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from pydantic import Field
from torch import Tensor, nn

import gar
from gar.config import build
from gar.errors import UserError
from gar.methods import (
    COMPARED,
    GAR,
    REGISTRY,
    STGC,
    Baseline,
    CAGrad,
    Choices,
    Combined,
    GlobalBalance,
    GradientCombination,
    LoadPenalty,
    LossFreeBias,
    Method,
    MethodState,
    OrthogonalityVariance,
    Pass,
    RouterZLoss,
    SimBal,
    STGCLoad,
    SwitchAux,
    TaskInformation,
    TorchJD,
    Update,
    _rows,
    from_config,
    register,
)
from gar.methods.cagrad import project_to_simplex
from gar.methods.stgc import conflicts
from gar.nn import RoutedFFN, RoutedLoRA, expert_banks
from support import oracles
from support.tiny import (
    Batch,
    Gradients,
    Tiny,
    Twin,
    TwinOutput,
    make_batch,
    make_model,
    named_gradients,
    randomize,
    run_passes,
    twin_experts,
    twin_logits,
    update_gradients,
    with_keep,
)

SITES: dict[str, dict[str, Any]] = {
    "lora_ffn": {"site": "lora_ffn", "dropout": 0.3},
    "lora_ffn top-1": {"site": "lora_ffn", "top_k": 1},
    "lora_ffn per expert": {"site": "lora_ffn", "dropout": 0.3, "dropout_mask": "per_expert"},
    "full_ffn": {"site": "full_ffn", "seed": 1},
    "full_ffn gated top-1": {"site": "full_ffn", "top_k": 1, "gated": True, "bias": False},
    "lora_head": {"site": "lora_head", "dropout": 0.3, "seed": 2},
    "lora_head top-1": {"site": "lora_head", "top_k": 1},
}
METHODS: dict[str, Method] = {
    "baseline": Baseline(),
    "gar": GAR(coefficient=0.3),
    "gar numerator_only": GAR(coefficient=0.3, objective="numerator_only"),
    "gar entropy": GAR(coefficient=0.3, entropy_weight=0.2),
    "gar unit": GAR(coefficient=0.3, gradients="unit"),
    "gar task_scale": GAR(coefficient=0.3, gradients="task_scale"),
    "gar distinct": GAR(coefficient=0.3, self_pairs=False),
    "gar softmax": GAR(coefficient=0.3, probabilities="softmax"),
    "stgc": STGC(coefficient=0.7),
    "loadpen": LoadPenalty(coefficient=0.4),
    "switchaux": SwitchAux(coefficient=0.4),
    "stgc_load": STGCLoad(coefficient=0.7, load_coefficient=0.4),
    "cagrad": CAGrad(c=0.4),
    "cagrad long": CAGrad(c=0.9, inner_learning_rate=1.0, inner_steps=40),
    "torchjd mean": TorchJD(aggregator="Mean"),
    "zloss": RouterZLoss(coefficient=0.4),
    "loss_free": LossFreeBias(speed=0.1),
    "global_balance": GlobalBalance(coefficient=0.4),
    "task_information": TaskInformation(coefficient=0.4),
    "simbal": SimBal(coefficient=0.4),
    "ortho_variance": OrthogonalityVariance(coefficient=0.4, variance_coefficient=0.7),
    "both: gar, ortho_variance": Combined(parts=(GAR(coefficient=0.3), OrthogonalityVariance(coefficient=1))),
    "both: gar, zloss": Combined(parts=(GAR(coefficient=0.3), RouterZLoss(coefficient=0.4))),
    "both: gar, switchaux": Combined(parts=(GAR(coefficient=0.3), SwitchAux(coefficient=0.4))),
    "both: cagrad, switchaux, simbal": Combined(
        parts=(CAGrad(c=0.4), SwitchAux(coefficient=0.4), SimBal(coefficient=0.2))
    ),
}
ROUTER_ONLY = (
    *(name for name in METHODS if name.startswith("gar")),
    *("loadpen", "zloss", "global_balance", "task_information", "both: gar, zloss"),
)
#: They leave the gradients of an update as they are.
WITHOUT_TERMS = ("baseline", "torchjd mean", "loss_free")
SCALED = ("gar unit", "gar task_scale")
CASES = [
    pytest.param(site, method, id=f"{site}-{method}")
    for site in SITES
    for method in METHODS
    if not (site.startswith("full_ffn") and method.startswith("stgc"))
]


@cache
def model_and_batch(
    site: str, backbone: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[Tiny, Batch]:
    model = make_model(backbone=backbone, **SITES[site]).to(dtype)
    return model, with_keep(model, make_batch())


@cache
def twin_of(
    site: str, backbone: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[Twin, TwinOutput, Tensor]:
    """The twin, its output, and ``g_m``."""
    twin = Twin(*model_and_batch(site, backbone, dtype))
    return twin, twin.forward(), twin.template_gradients()


@cache
def package_gradients(site: str, method: str, backbone: bool = True) -> Gradients:
    return update_gradients(*model_and_batch(site, backbone), METHODS[method])


class Rows(GradientCombination):
    """Hands out the group rows that combinations get."""

    name: ClassVar[str] = "rows"
    seen: list[Any] = Field(default_factory=list)

    def combine(self, rows: Tensor) -> Tensor:
        self.seen.append(rows)
        return rows.mean(0)


def group_rows(model: Tiny, batch: Batch, **options: Any) -> Tensor:
    """``M v_m`` times the gradient of group m's mean loss, [M, P]."""
    method = Rows()
    run_passes(model, model, batch, method, **options)
    (rows,) = method.seen
    return rows


def same(found: Gradients, expected: Gradients, tolerance: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(
            found[name].double(),
            grad,
            rtol=tolerance,
            atol=tolerance,
            msg=f"{name}: {{}}".format,
        )


def bitwise(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name


def difference(one: Gradients, other: Gradients) -> Gradients:
    return {name: grad - other[name] for name, grad in one.items()}


def largest(gradients: Gradients, part: str = "") -> float:
    return max(float(g.abs().max()) for name, g in gradients.items() if part in name)


# --------------------------------------------------------------------------------------------------
# The expected gradients
# --------------------------------------------------------------------------------------------------


def task_loss(twin: Twin, out: TwinOutput) -> Tensor:
    return oracles.task_loss(out.losses, twin.batch.v)


def auxiliary_loss(twin: Twin, out: TwinOutput, g: Tensor, method: Method) -> Tensor:
    """What the method adds to the task loss, as a float64 function of the twin's parameters."""
    if isinstance(method, Combined):
        parts = (auxiliary_loss(twin, out, g, part) for part in method.parts)
        return sum(parts, start=torch.zeros((), dtype=torch.float64))
    batch = twin.batch
    sizes = [size for _, size in batch.sizes]
    detached = twin.gates_from_detached(out.x)
    total = torch.zeros((), dtype=torch.float64)
    if isinstance(method, GAR):
        normalize = method.objective == "load_normalized"
        soft = method.probabilities == "softmax"
        p = twin.group_probabilities(oracles.masked_softmax(logits_of(twin, out), 3) if soft else detached)
        rows = oracles.scaled_rows(g, [task for task, _ in batch.sizes], method.gradients)
        loss = oracles.alignment_loss(p, rows, normalize=normalize, tau=method.entropy_weight)
        if not method.self_pairs:
            loss = oracles.distinct_alignment_loss(p, rows)
        total = total + method.coefficient * loss
    if isinstance(method, STGC):
        losses = stgc(twin, out)[1]
        total = total + method.coefficient * oracles.stgc_total(batch.v, losses)
    if isinstance(method, LoadPenalty | STGCLoad):
        weight = method.load_coefficient if isinstance(method, STGCLoad) else method.coefficient
        total = total + oracles.loadpen(twin.example_gates(detached), sizes, weight)
    if isinstance(method, SwitchAux):
        head = twin.model.site == "lora_head"
        gates, u = (out.gates, batch.v) if head else (detached, oracles.sample_weights(sizes))
        everything = torch.ones(len(gates))
        total = total + oracles.switchaux(
            gates, out.chosen, everything, out.unit_groups, u, method.coefficient, twin.top_k
        )
    if isinstance(method, RouterZLoss):
        total = total + method.coefficient * oracles.z_loss(logits_of(twin, out))
    if isinstance(method, GlobalBalance):
        total = total + method.coefficient * oracles.global_balance(logits_of(twin, out), out.chosen)
    if isinstance(method, TaskInformation):
        p = twin.group_probabilities(oracles.masked_softmax(logits_of(twin, out), 3))
        tasks = [task for task, _ in batch.sizes]
        total = total - method.coefficient * oracles.task_information(p, tasks, batch.v)
    if isinstance(method, SimBal):
        total = total + method.coefficient * oracles.simbal(twin.parameters[f"{twin.name}.router.weight"])
    if isinstance(method, OrthogonalityVariance):
        ones = torch.eye(out.chosen.shape[1], dtype=torch.float64)
        x, slots = out.x.detach(), twin.slots()
        alone = [twin_experts(twin.bank, slots, x, one.expand(len(x), -1), twin.keep) for one in ones]
        overlap = oracles.overlap(
            torch.stack(alone, 1), out.chosen, out.unit_groups, oracles.sample_weights(sizes)
        )
        total = total + method.coefficient * overlap
        total = total - method.variance_coefficient * oracles.score_variance(logits_of(twin, out))
    return total


def logits_of(twin: Twin, out: TwinOutput) -> Tensor:
    """The logits of routing inputs taken as constants."""
    return twin_logits(twin.parameters, twin.name, out.x.detach())


def stgc(twin: Twin, out: TwinOutput) -> tuple[Tensor, list[Tensor]]:
    """Conflict mask [N, E] and C_m; the derivative at every expert's output is taken as such."""
    experts: Any = twin.bank.experts
    nudge = torch.zeros(*out.gates.shape, experts.B.shape[1], dtype=torch.float64, requires_grad=True)
    (delta,) = torch.autograd.grad(task_loss(twin, twin.forward(at_outputs=nudge)), nudge)
    B = twin.parameters[f"{twin.name}.experts.B"]
    return oracles.stgc(
        out.logits, out.chosen, delta, B, experts.scale, out.unit_groups, len(twin.batch.sizes)
    )


def expected_gradients(twin: Twin, out: TwinOutput, g: Tensor, method: Method) -> Gradients:
    if isinstance(method, Combined) and isinstance(method.parts[0], CAGrad):
        own_way = expected_gradients(twin, out, g, method.parts[0])
        added = twin.gradients(auxiliary_loss(twin, out, g, method))
        return {name: grad + added[name] for name, grad in own_way.items()}
    if isinstance(method, CAGrad):
        own = [twin.gradients(loss) for loss in out.losses]
        rows = torch.stack([torch.cat([grad.flatten() for grad in grads.values()]) for grads in own])
        rows = oracles.cagrad_rows(rows, twin.batch.v)
        direction, _ = oracles.cagrad(rows, method.c, method.inner_learning_rate, method.inner_steps)
        parts = direction.split([grad.numel() for grad in own[0].values()])
        return {name: part.view_as(own[0][name]) for name, part in zip(own[0], parts, strict=True)}
    return twin.gradients(task_loss(twin, out) + auxiliary_loss(twin, out, g, method))


# --------------------------------------------------------------------------------------------------
# Gradients
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize(("site", "method"), CASES)
def test_every_gradient_equals_the_derivation(site: str, method: str, backbone: bool) -> None:
    twin, out, g = twin_of(site, backbone)
    found = package_gradients(site, method, backbone)
    same(found, expected_gradients(twin, out, g, METHODS[method]))
    assert ("embedding.weight" in found) == backbone
    if method not in WITHOUT_TERMS:
        added = difference(found, package_gradients(site, "baseline", backbone))
        assert largest(added, "router") > 1e-5, "a term that adds nothing would make this test empty"


@pytest.mark.parametrize(("site", "method"), CASES)
def test_gradients_in_float32(site: str, method: str) -> None:
    model, batch = model_and_batch(site, dtype=torch.float32)
    twin, out, g = twin_of(site, dtype=torch.float32)
    found = update_gradients(model, batch, METHODS[method])
    assert all(grad.dtype == torch.float32 for grad in found.values())
    same(found, expected_gradients(twin, out, g, METHODS[method]), 1e-5)


@pytest.mark.parametrize("method", [*ROUTER_ONLY, "switchaux"])
@pytest.mark.parametrize("site", list(SITES))
def test_where_the_auxiliary_gradient_does_not_reach(site: str, method: str) -> None:
    """GAR, LoadPen and SwitchAux at FFN sites move the router alone; all else is Baseline to the bit."""
    found, plain = package_gradients(site, method), package_gradients(site, "baseline")
    moved = {name for name, grad in plain.items() if not torch.equal(found[name], grad)}
    bank = model_and_batch(site)[0].bank_name
    router = {f"{bank}.router.weight", f"{bank}.router.bias"}
    at_head = method == "switchaux" and "head" in site  # takes the ordinary routing path
    assert moved == router | ({"embedding.weight"} if at_head else set())


@pytest.mark.parametrize(
    ("site", "method"),
    [
        ("lora_ffn", "stgc"),
        ("lora_ffn top-1", "stgc"),
        ("lora_head", "stgc"),
        ("lora_ffn", "stgc_load"),
        ("lora_head", "switchaux"),
        ("lora_head top-1", "switchaux"),
    ],
)
def test_where_the_auxiliary_gradient_reaches_a_trainable_backbone(site: str, method: str) -> None:
    added = difference(package_gradients(site, method), package_gradients(site, "baseline"))
    assert largest(added, "embedding") > 1e-5
    assert largest(added, "router") > 1e-5
    others = {name: grad for name, grad in added.items() if "embedding" not in name and "router" not in name}
    assert largest(others) < 1e-14, "experts and heads are behind the routing"


@pytest.mark.parametrize("site", list(SITES))
def test_per_group_observation_gives_the_same_update(site: str) -> None:
    model, batch = model_and_batch(site)
    for split in (None, [2, 3]):
        slow = update_gradients(model, batch, METHODS["gar"], observation="per_group", split=split)
        same(slow, package_gradients(site, "gar"))


@pytest.mark.parametrize("method", [name for name in METHODS if name not in WITHOUT_TERMS])
def test_another_coefficient_gives_another_update(method: str) -> None:
    """A control for the tolerances: 1 % in the coefficient shows."""
    model, batch = model_and_batch("lora_ffn")
    chosen = METHODS[method]
    if isinstance(chosen, Combined):
        *first, last = chosen.parts
        key = "coefficient"
        last = last.model_copy(update={key: 1.01 * getattr(last, key)})
        other: Method = Combined(parts=(*first, last))
    else:
        key = "c" if isinstance(chosen, CAGrad) else "coefficient"
        other = chosen.model_copy(update={key: 1.01 * getattr(chosen, key)})
    assert (
        largest(difference(update_gradients(model, batch, other), package_gradients("lora_ffn", method)))
        > 1e-7
    )


# --------------------------------------------------------------------------------------------------
# Invariances
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("site", "method"), CASES)
def test_order_of_groups_and_examples_does_not_matter(site: str, method: str) -> None:
    model, batch = model_and_batch(site)
    expected = package_gradients(site, method)
    same(update_gradients(model, batch.reordered([3, 0, 4, 2, 1]), METHODS[method]), expected)
    shuffled = batch.rows(torch.randperm(len(batch.ids)))
    assert not torch.equal(shuffled.groups, shuffled.groups.sort().values)
    same(update_gradients(model, shuffled, METHODS[method]), expected)


@pytest.mark.parametrize("split", [[1, 1, 1, 1, 1], [2, 3], [4, 1]], ids=str)
@pytest.mark.parametrize(("site", "method"), CASES)
def test_the_update_does_not_depend_on_its_passes(site: str, method: str, split: list[int]) -> None:
    model, batch = model_and_batch(site)
    same(update_gradients(model, batch, METHODS[method], split=split), package_gradients(site, method))


@pytest.mark.parametrize(("site", "method"), CASES)
def test_padding_to_twice_the_length_changes_nothing(site: str, method: str) -> None:
    model, batch = model_and_batch(site)
    found = update_gradients(model, batch.padded(2 * batch.ids.shape[1]), METHODS[method])
    same(found, package_gradients(site, method), 1e-12)


@pytest.mark.parametrize("scale", [1e-3, 30.0])
@pytest.mark.parametrize(
    ("site", "method"), [case for case in CASES if not ("entropy" in case.id or "both" in case.id)]
)
def test_scaling_the_loss(site: str, method: str, scale: float) -> None:
    """The added term scales with the square of the loss (GAR), not at all, or with it (combinations)."""
    model, batch = model_and_batch(site)
    unit, plain = package_gradients(site, method), package_gradients(site, "baseline")
    found = update_gradients(model, batch, METHODS[method], scale=scale)
    power = (
        0
        if method in SCALED
        else 2
        if method.startswith("gar")
        else 1
        if method.startswith("cagrad") or method in WITHOUT_TERMS
        else 0
    )
    expected = {n: scale * plain[n] + scale**power * (unit[n] - plain[n]) for n in unit}
    # CAGrad's eps = 1e-8 is absolute in its specification.
    same(found, expected, 1e-5 if method.startswith("cagrad") else 1e-9)


@pytest.mark.parametrize("scale", [1e-9, 1e-4, 1e4, 1e9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cagrad_weights_do_not_see_the_loss_scale(scale: float, dtype: torch.dtype) -> None:
    model, batch = model_and_batch("lora_ffn", dtype=dtype)
    method = CAGrad(c=0.9, inner_learning_rate=1.0, inner_steps=40)

    def weights(scale: float) -> tuple[Tensor, Tensor]:
        rows = group_rows(model, batch, scale=scale)
        return method.weights(rows @ rows.T), rows

    expected, rows = weights(1.0)
    found, scaled = weights(scale)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(scaled / scale, rows, rtol=1e-4, atol=1e-6)
    assert float((expected - 1 / len(expected)).abs().max()) > 1e-2, "w moved away from uniform"


@pytest.mark.parametrize("name", list(METHODS))
def test_running_twice_and_after_another_method_gives_the_same(name: str) -> None:
    model, batch = model_and_batch("lora_ffn")
    first = update_gradients(model, batch, METHODS[name])
    update_gradients(model, batch, METHODS["stgc_load"])
    bitwise(update_gradients(model, batch, METHODS[name]), first)


class TwoSites(nn.Module):
    """Two banks above one another, one LoRA and one FFN (or two LoRA)."""

    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.tiny = Tiny("lora_ffn")
        self.second = second

    def forward(self, batch: Batch) -> Tensor:
        x = torch.tanh(self.tiny.embedding(batch.ids))
        x = torch.tanh(x + self.tiny.experts(x, batch.mask)[0])
        x = torch.tanh(x + self.second(x, batch.mask)[0])
        pooled = (x * batch.mask.unsqueeze(-1)).sum(1) / batch.mask.sum(1, keepdim=True)
        logits = self.tiny.heads[1](pooled)
        return nn.functional.cross_entropy(logits, batch.labels, reduction="none")


@pytest.mark.parametrize(
    "method",
    [
        *("gar", "gar entropy", "stgc", "loadpen", "switchaux", "stgc_load", "zloss", "global_balance"),
        *("task_information", "simbal", "both: gar, switchaux"),
    ],
)
def test_several_sites_add_up(method: str) -> None:
    second = (
        RoutedLoRA(4, 4, experts=2, top_k=1, rank=1)
        if "stgc" in method
        else RoutedFFN(4, 3, experts=2, top_k=1)
    )
    model = TwoSites(second).double()
    randomize(model)
    batch = make_batch()

    def added(*observed: nn.Module) -> Gradients:
        run_passes(model, model, batch, METHODS[method], observed=observed)
        return difference(named_gradients(model), plain)

    run_passes(model, model, batch, Baseline())
    plain = named_gradients(model)
    first_only, second_only, both = added(model.tiny), added(model.second), added(model)
    assert len(expert_banks(model)) == 2
    assert min(largest(first_only, "router"), largest(second_only, "second.router")) > 1e-6
    same(both, {name: first_only[name] + second_only[name] for name in both}, 1e-12)


@pytest.mark.parametrize("method", SCALED)
def test_a_tasks_loss_scale_does_not_change_scaled_rows(method: str) -> None:
    """The control: with raw rows it does."""
    model, batch = model_and_batch("lora_ffn")
    scale: Any = torch.tensor([1000.0 if task == 1 else 1.0 for task, _ in batch.sizes])

    def added(name: str, **options: Any) -> Gradients:
        parts = (update_gradients(model, batch, METHODS[which], **options) for which in (name, "baseline"))
        return difference(*parts)

    same(added(method, scale=scale), added(method), 1e-9)
    assert largest(difference(added("gar", scale=scale), added("gar")), "router") > 1


@pytest.mark.parametrize("tiny", [1e-30, 1e-15, 1.0, 1e15])
@pytest.mark.parametrize("method", SCALED)
def test_scaled_rows_of_any_size(method: str, tiny: float) -> None:
    """Float32 rows whose squares leave its range, a zero row, a task of zeros, one group alone."""
    chosen: Any = METHODS[method]
    rows = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
    rows[1] = rows[4] = rows[5] = 0
    tasks = [0, 0, 1, 1, 2, 2]

    def scaled(rows: Tensor, tasks: list[int]) -> Tensor:
        seen: Any = SimpleNamespace(row_tasks=torch.tensor(tasks), task_count=3)
        return chosen.scaled(rows, seen)

    expected = oracles.scaled_rows(rows.double(), tasks, chosen.gradients)
    found = scaled(tiny * rows, tasks)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert not found[[1, 4, 5]].any()
    torch.testing.assert_close(scaled(tiny * rows[:1], [2]).norm(), torch.tensor(1.0))


def test_a_group_alone_has_no_pair() -> None:
    """Orthogonal rows neither: without self-pairs nothing is gained by setting them apart."""
    p = torch.tensor([[0.7, 0.3], [0.2, 0.8]], dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([[2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    for few, some in ((p[:1], rows[:1]), (p, rows), (p, 0 * rows)):
        (grad,) = torch.autograd.grad(GAR(self_pairs=False).loss(few, some), p)
        assert not grad.any()
    (grad,) = torch.autograd.grad(GAR().loss(p, rows), p)
    assert float(grad.abs().min()) > 0.1


def test_the_coefficient_rises_over_the_warmup() -> None:
    model, batch = model_and_batch("lora_ffn")
    method = GAR(coefficient=0.3, warmup=4)
    state: Any = method.initial_state(model)
    plain, whole = package_gradients("lora_ffn", "baseline"), package_gradients("lora_ffn", "gar")
    for share in (0.25, 0.5, 0.75, 1.0, 1.0):
        update = run_passes(model, model, batch, method, state=state, split=[2, 3])
        method.after_step(update)
        same(named_gradients(model), {n: plain[n] + share * (whole[n] - plain[n]) for n in plain}, 1e-12)
    assert int(state["updates"]) == 5
    for without in (GAR(coefficient=0.3), GAR(coefficient=0, warmup=4)):
        assert without.initial_state(model) is None


def test_soft_gates_reach_every_expert() -> None:
    """The configured gates leave out who was not selected; padding stays out of both."""
    logits = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    routing = RoutedLoRA(4, 4, experts=4, top_k=2, rank=1).router.gate(logits, mask)
    weights = torch.tensor([1.0, 2.0, 4.0, 8.0])
    for gates, reached in ((routing.gates, routing.selected), (routing.soft().gates, mask.unsqueeze(-1))):
        assert torch.equal(gates.sum(-1) > 0.5, mask)
        (grad,) = torch.autograd.grad((gates * weights).sum(), logits)
        assert torch.equal(grad != 0, reached.expand_as(grad))


# --------------------------------------------------------------------------------------------------
# Coefficient zero
# --------------------------------------------------------------------------------------------------

ZERO: dict[str, Method] = {
    "gar": GAR(coefficient=0),
    "gar numerator_only": GAR(coefficient=0, objective="numerator_only", entropy_weight=0.5),
    "gar options": GAR(coefficient=0, gradients="unit", probabilities="softmax", warmup=3),
    "stgc": STGC(coefficient=0),
    "loadpen": LoadPenalty(coefficient=0),
    "switchaux": SwitchAux(coefficient=0),
    "stgc_load": STGCLoad(coefficient=0, load_coefficient=0),
    "zloss": RouterZLoss(coefficient=0),
    "loss_free": LossFreeBias(speed=0),
    "global_balance": GlobalBalance(coefficient=0),
    "task_information": TaskInformation(coefficient=0),
    "simbal": SimBal(coefficient=0),
    "ortho_variance": OrthogonalityVariance(coefficient=0, variance_coefficient=0),
    "both": Combined(parts=(GAR(coefficient=0), SwitchAux(coefficient=0), LossFreeBias(speed=0))),
}


@pytest.mark.parametrize("method", list(ZERO))
@pytest.mark.parametrize("site", list(SITES))
def test_coefficient_zero_is_baseline_to_the_bit(site: str, method: str) -> None:
    model, batch = model_and_batch(site)
    assert not ZERO[method].observes, "nothing is captured"
    for split in (None, [2, 3]):
        plain = update_gradients(model, batch, Baseline(), split=split)
        bitwise(update_gradients(model, batch, ZERO[method], split=split), plain)
    update = run_passes(model, model, batch, ZERO[method])
    assert ZERO[method].router_loss(update) is None
    assert ZERO[method].terms(update.passes[0]) is None


def test_stgc_load_with_one_coefficient_is_the_other_method() -> None:
    model, batch = model_and_batch("lora_ffn")
    load = update_gradients(model, batch, STGCLoad(coefficient=0, load_coefficient=0.4))
    bitwise(load, package_gradients("lora_ffn", "loadpen"))
    bitwise(
        update_gradients(model, batch, STGCLoad(coefficient=0.7, load_coefficient=0)),
        package_gradients("lora_ffn", "stgc"),
    )


@pytest.mark.parametrize("site", list(SITES))
def test_cagrad_with_no_radius_is_the_mean_gradient(site: str) -> None:
    model, batch = model_and_batch(site)
    same(update_gradients(model, batch, CAGrad(c=0)), package_gradients(site, "baseline"), 1e-12)


# --------------------------------------------------------------------------------------------------
# STGC
# --------------------------------------------------------------------------------------------------


def conflict_mask(model: Tiny, batch: Batch, scale: float = 1.0) -> Tensor:
    """The package's mask at the valid units, [N, E]."""
    with gar.observe(model) as seen:
        rows = model(batch)
        weights = batch.weights(rows.dtype)
        pass_ = Pass.of(scale * weights.grouping.mean(rows), weights, list(model.parameters()), seen)
        site = pass_.sites[0]
        mask = conflicts(site, site.observation.output_gradient(pass_.task_loss))
        pass_.task_loss.backward()  # the graph is still whole
    return mask if mask.dim() == 2 else mask[batch.mask]


@pytest.mark.parametrize(
    "site", ["lora_ffn", "lora_ffn top-1", "lora_ffn per expert", "lora_head", "lora_head top-1"]
)
@pytest.mark.parametrize("seed", range(3))
def test_conflicts_equal_the_oracle(site: str, seed: int) -> None:
    model = make_model(**{**SITES[site], "seed": seed})
    batch = with_keep(model, make_batch((9, 6), group_size=4, seed=seed), seed)
    twin = Twin(model, batch)
    expected, _ = stgc(twin, twin.forward())
    assert torch.equal(conflict_mask(model, batch), expected)
    shuffled = batch.rows(torch.randperm(len(batch.ids)))
    twin = Twin(model, shuffled)
    assert torch.equal(conflict_mask(model, shuffled), stgc(twin, twin.forward())[0])
    assert 0 < int(expected.sum()) < expected.numel()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1e-25, 1e-9, 1e9])
def test_conflicts_do_not_see_the_loss_scale(scale: float, dtype: torch.dtype) -> None:
    model, batch = model_and_batch("lora_ffn", dtype=dtype)
    expected = conflict_mask(model, batch)
    assert expected.any()
    assert torch.equal(conflict_mask(model, batch, scale), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1e-9, 1e-5])
def test_a_tiny_b_still_has_its_say_in_the_conflict(size: float, dtype: torch.dtype) -> None:
    """Cosines have no absolute floor: shortly after initialisation B is small, not irrelevant."""
    model = make_model("lora_ffn").to(dtype)
    batch = make_batch((9, 6), group_size=4)
    with torch.no_grad():
        model.bank.experts.B.mul_(size)
    twin = Twin(model, batch)
    expected = stgc(twin, twin.forward())[0]
    assert torch.equal(conflict_mask(model, batch), expected)
    with torch.no_grad():
        model.bank.experts.B.zero_()
    assert not torch.equal(conflict_mask(model, batch), expected), "the control: without B it differs"


@pytest.mark.parametrize("site", ["lora_ffn", "lora_head"])
def test_stgc_at_initialisation(site: str) -> None:
    """B = 0: the first proxy is zero everywhere, its cosine 0; the second one decides alone."""
    model = make_model(**SITES[site])
    with torch.no_grad():
        model.bank.experts.B.zero_()
    batch = with_keep(model, make_batch())
    twin = Twin(model, batch)
    out = twin.forward()
    expected = expected_gradients(twin, out, torch.zeros(0), METHODS["stgc"])
    same(update_gradients(model, batch, METHODS["stgc"]), expected)
    mask = conflict_mask(model, batch)
    assert mask.any()
    assert torch.equal(mask, stgc(twin, out)[0])


def test_stgc_with_zero_derivatives_has_no_conflict() -> None:
    model = make_model("lora_ffn")
    with torch.no_grad():
        for head in model.heads:
            head.weight.zero_()
    batch = make_batch()
    assert not conflict_mask(model, batch).any()
    found = update_gradients(model, batch, METHODS["stgc"])
    assert all(torch.isfinite(grad).all() for grad in found.values())
    bitwise(found, update_gradients(model, batch, Baseline()))


def test_stgc_with_a_gate_that_underflows_has_no_conflict_there() -> None:
    model = make_model("lora_ffn")
    with torch.no_grad():
        model.bank.router.weight.mul_(3000)
    batch = make_batch((9, 6), group_size=4)
    twin = Twin(model, batch)
    out = twin.forward()
    vanished = out.chosen & (out.gates == 0)
    assert vanished.any()
    mask = conflict_mask(model, batch)
    assert torch.equal(mask, stgc(twin, out)[0])
    assert not mask[vanished].any()


def test_stgc_with_one_unit_per_expert_and_group_has_no_conflict() -> None:
    model = make_model("lora_head", top_k=3)
    batch = make_batch((3, 2), group_size=1)
    assert not conflict_mask(model, batch).any()


# --------------------------------------------------------------------------------------------------
# CAGrad and torchjd
# --------------------------------------------------------------------------------------------------


def row_sets() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(5)
    rows = torch.randn(5, 12, dtype=torch.float64, generator=random)
    return {
        "random": rows,
        "many": torch.randn(20, 12, dtype=torch.float64, generator=random),
        "more rows than columns": torch.randn(9, 2, dtype=torch.float64, generator=random),
        "one row": rows[:1],
        "equal rows": rows[:1].expand(4, -1),
        "opposite": torch.stack([rows[0], -0.9 * rows[0]]),
        "one zero row": torch.cat([rows, torch.zeros(1, 12, dtype=torch.float64)]),
        "one row dominates": torch.cat([1e4 * rows[:1], rows[1:]]),
    }


@pytest.mark.parametrize("split", [None, [1, 1, 1, 1, 1], [2, 3]])
@pytest.mark.parametrize("site", list(SITES))
def test_rows_are_scaled_group_gradients(site: str, split: list[int] | None) -> None:
    model, batch = model_and_batch(site)
    twin, out, _ = twin_of(site)
    own = [torch.cat([grad.flatten() for grad in twin.gradients(loss).values()]) for loss in out.losses]
    rows = group_rows(model, batch, split=split)
    torch.testing.assert_close(rows, oracles.cagrad_rows(torch.stack(own), batch.v), rtol=1e-10, atol=1e-12)
    plain = torch.cat([grad.flatten() for grad in package_gradients(site, "baseline").values()])
    torch.testing.assert_close(rows.mean(0), plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", list(row_sets()))
@pytest.mark.parametrize(
    "options", [{}, {"c": 0.9, "inner_learning_rate": 1.0, "inner_steps": 30}, {"inner_steps": 0}], ids=str
)
def test_cagrad_equals_the_oracle(name: str, options: dict[str, Any]) -> None:
    rows, method = row_sets()[name], CAGrad(**options)
    direction, w = oracles.cagrad(rows, method.c, method.inner_learning_rate, method.inner_steps)
    torch.testing.assert_close(method.weights(rows @ rows.T), w, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(method.combine(rows), direction, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(
        method.combine(rows.float()).double(), direction, rtol=1e-4, atol=1e-4 * float(rows.abs().max())
    )


@pytest.mark.parametrize("name", ["random", "more rows than columns"])
@pytest.mark.parametrize("c", [0.2, 0.9])
def test_cagrad_approaches_the_exact_solution(name: str, c: float) -> None:
    rows = row_sets()[name]
    uniform = torch.full((len(rows),), 1 / len(rows), dtype=torch.float64)
    best = oracles.cagrad_objective(rows, oracles.cagrad_exact(rows, c), c)
    start = oracles.cagrad_objective(rows, uniform, c)
    few = oracles.cagrad_objective(rows, CAGrad(c=c).weights(rows @ rows.T), c)
    long = CAGrad(c=c, inner_learning_rate=0.5, inner_steps=2000).weights(rows @ rows.T)
    assert best <= few + 1e-9 < start
    assert oracles.cagrad_objective(rows, long, c) == pytest.approx(best, abs=1e-2 * (start - best))


def cancelling_rows(seed: int, rest: float) -> Tensor:
    """float32 rows of norm about 1 that contradict each other up to ``rest``."""
    random = torch.Generator().manual_seed(seed)
    count, size = (4, 12, 20)[seed % 3], (30, 300)[seed % 2]
    common = torch.randn(size, dtype=torch.float64, generator=random)
    signs = torch.randn(count, 1, dtype=torch.float64, generator=random)
    signs -= signs.mean()
    noise = torch.randn(count, size, dtype=torch.float64, generator=random)
    return ((signs * common + rest * noise) / size**0.5).float()


@pytest.mark.parametrize("rest", [10.0**-n for n in range(1, 9)])
@pytest.mark.parametrize("options", [{}, {"c": 0.9, "inner_learning_rate": 1.0, "inner_steps": 30}], ids=str)
def test_cagrad_of_float32_rows_that_nearly_cancel(rest: float, options: dict[str, Any]) -> None:
    """Against the float64 twin on the same rows: only the result's own rounding to float32 is left.

    float64 tells norms apart down to 1e-8 of the rows'; a rest of that size may be wrong in itself.
    """
    method = CAGrad(**options)
    for seed in range(6):
        rows = cancelling_rows(seed, rest)
        direction, w = oracles.cagrad(rows, method.c, method.inner_learning_rate, method.inner_steps)
        found = method.combine(rows)
        assert found.dtype == torch.float32
        error = float((found.double() - direction).norm())
        assert error < 1e-8
        if rest >= 1e-6:
            assert error < 1e-4 * float(direction.norm())
        wide = rows.double()
        torch.testing.assert_close(method.weights(wide @ wide.T), w, rtol=0, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cagrad_weights_stay_on_the_simplex(dtype: torch.dtype) -> None:
    """Whatever rounding left of the Gram matrix: in float32 a cancelled square is noise of either sign."""
    for seed in range(60):
        for rest in (1e-8, 1e-5, 1e-4):
            rows = cancelling_rows(seed, rest).to(dtype)
            for method in (CAGrad(), CAGrad(inner_learning_rate=1.0, inner_steps=30)):
                w = method.weights(rows @ rows.T)
                assert w.dtype == dtype
                assert float(w.min()) >= 0
                assert float(w.double().sum()) == pytest.approx(1, abs=len(w) * torch.finfo(dtype).eps)


def test_cagrad_trains_right_on_contradicting_labels() -> None:
    """Twelve times one text, with either label: the group gradients come to cancel."""
    model = make_model("lora_ffn").float()
    batch = make_batch((12,), group_size=1)
    same_text = torch.zeros(12, dtype=torch.long)
    batch = replace(
        batch, ids=batch.ids[same_text], mask=batch.mask[same_text], labels=torch.tensor([0, 1]).repeat(6)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cancelled = []
    for _ in range(40):
        rows = group_rows(model, batch)
        direction, _ = oracles.cagrad(rows, 0.4)
        found = torch.cat([g.flatten() for g in update_gradients(model, batch, CAGrad()).values()])
        assert float((found.double() - direction).norm() / direction.norm()) < 1e-3
        cancelled.append(float(rows.double().mean(0).norm() / rows.double().norm(dim=1).max()))
        optimizer.step()
    assert min(cancelled) < 1e-3


def test_combinations_stream_over_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = row_sets()["many"]
    whole = CAGrad().combine(rows)
    blocks = _rows._blocks
    monkeypatch.setattr(_rows, "_blocks", lambda rows: blocks(rows, entries=3 * len(rows)))
    assert [block.shape for block in _rows._blocks(rows)] == 4 * [(20, 3)]
    torch.testing.assert_close(CAGrad().combine(rows), whole, rtol=1e-13, atol=1e-13)


def test_cagrad_of_one_row_and_of_zero_rows() -> None:
    row = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(CAGrad(c=0.4).combine(row), 1.4 * row[0], rtol=1e-8, atol=0)
    for dtype in (torch.float32, torch.float64):
        zero = torch.zeros(3, 4, dtype=dtype)
        assert (CAGrad().combine(zero) == 0).all()
        torch.testing.assert_close(CAGrad().weights(zero @ zero.T), torch.full((3,), 1 / 3, dtype=dtype))


@pytest.mark.parametrize("size", [1, 2, 3, 10])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_project_to_simplex(size: int, spread: float) -> None:
    for _ in range(20):
        v = spread * torch.randn(size, dtype=torch.float64)
        found = project_to_simplex(v)
        torch.testing.assert_close(found, oracles.project_simplex(v), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.sum(), torch.ones((), dtype=torch.float64))
        torch.testing.assert_close(project_to_simplex(found), found, rtol=1e-12, atol=1e-12)
    ties = torch.full((size,), spread, dtype=torch.float64)
    torch.testing.assert_close(project_to_simplex(ties), torch.full_like(ties, 1 / size))


@pytest.mark.parametrize("site", list(SITES))
@pytest.mark.parametrize("split", [None, [2, 3]])
def test_torchjd_mean_is_baseline(site: str, split: list[int] | None) -> None:
    model, batch = model_and_batch(site)
    found = update_gradients(model, batch, METHODS["torchjd mean"], split=split)
    same(found, package_gradients(site, "baseline"), 1e-12)


CHOICES = Choices("lora_ffn", 3, 2, 5)


def test_torchjd_upgrad_conflicts_with_no_group() -> None:
    method = from_config({"name": "torchjd", "aggregator": "UPGrad"})
    problem = method.check(CHOICES)
    if problem is not None:
        assert "quadprog" in problem
        assert "\n" not in problem
        pytest.skip(problem)
    model, batch = model_and_batch("lora_ffn")
    rows = group_rows(model, batch)
    found = update_gradients(model, batch, method)
    direction = torch.cat([grad.flatten() for grad in found.values()])
    assert torch.isfinite(direction).all()
    assert float((rows @ direction).min()) > -1e-6
    assert largest(difference(found, package_gradients("lora_ffn", "baseline"))) > 1e-4
    same(update_gradients(model, batch, method, split=[2, 3]), found, 1e-6)


def test_torchjd_takes_what_a_learnt_task_leaves() -> None:
    """Its gradient is so short that its square is 0, and its product with another is not."""
    torch.manual_seed(0)  # PCGrad draws its orders
    rows = torch.tensor([[1.0, 0.0, 1.0], [-1.0, 0.5, 0.0], [-1e-23, 0.0, 1e-24]])
    assert rows[2] @ rows[2] == 0 > rows[0] @ rows[2]
    for name in ("PCGrad", "UPGrad", "DualProj", "MGDA", "AlignedMTL", "IMTLG"):
        found = TorchJD(aggregator=name).combine(rows)
        assert found.isfinite().all(), name
    # g_1 − (g_1·g_2 / g_2·g_2) g_2 and the other way round, by hand; the third changes nothing.
    expected = torch.tensor([1 - 0.8 - 1 + 0.5, 0.4 + 0.5, 1 + 0.5])
    torch.testing.assert_close(TorchJD(aggregator="PCGrad").combine(rows), expected)


def test_torchjd_takes_the_options_of_its_aggregator() -> None:
    method = TorchJD(aggregator="TrimmedMean", options={"trim_number": 1})
    assert method.check(CHOICES) is None
    assert method.to_config() == {
        "name": "torchjd",
        "aggregator": "TrimmedMean",
        "options": {"trim_number": 1},
    }
    model, batch = model_and_batch("lora_ffn")
    middle = group_rows(model, batch).sort(dim=0).values[1:-1].mean(0)
    direction = torch.cat([grad.flatten() for grad in update_gradients(model, batch, method).values()])
    torch.testing.assert_close(direction, middle, rtol=1e-12, atol=1e-14)


# --------------------------------------------------------------------------------------------------
# Configuration
# --------------------------------------------------------------------------------------------------

TASKS = [{"name": n, "train": f"{n}.csv", "validation": f"{n}.csv"} for n in ("a", "b")]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("gra", r"method\.name.*'gra'.*did you mean 'gar'"),
        ({"name": "baselin"}, r"'baselin'.*baseline, cagrad, gar.*did you mean 'baseline'"),
        (
            {"name": "gar", "coeficient": 1.0},
            r"'method\.coeficient' for method gar.*did you mean 'coefficient'",
        ),
        (
            {"name": "baseline", "coefficient": 1.0},
            r"'method\.coefficient' for method baseline; its keys: none",
        ),
        ({"name": "gar", "coefficient": -1}, r"method\.coefficient is -1"),
        ({"name": "stgc", "coefficient": -1e-9}, r"method\.coefficient is -1e-09"),
        ({"name": "loadpen", "coefficient": -1}, r"method\.coefficient is -1"),
        ({"name": "switchaux", "coefficient": -1}, r"method\.coefficient is -1"),
        ({"name": "stgc_load", "load_coefficient": -1}, r"method\.load_coefficient is -1"),
        ({"name": "gar", "entropy_weight": -1}, r"method\.entropy_weight is -1"),
        ({"name": "gar", "objective": "numerator"}, r"method\.objective is 'numerator'.*numerator_only"),
        ({"name": "gar", "coefficient": "much"}, r"method\.coefficient is 'much'"),
        ({"name": "cagrad", "c": -0.1}, r"method\.c is -0\.1"),
        ({"name": "cagrad", "inner_learning_rate": 0}, r"method\.inner_learning_rate is 0"),
    ],
    ids=str,
)
def test_wrong_methods_are_one_clear_line(config: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        from_config(config)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=message) as caught:
        build({"method": config})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, 3, True, ["gar"], "", {"name": ["gar"]}, {"name": None}], ids=str)
def test_a_method_of_the_wrong_type_is_one_clear_line(value: Any) -> None:
    with pytest.raises(UserError, match="method") as caught:
        build({"method": value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"method": "stgc", "experts": {"site": "full_ffn"}},
            r"method\.name is stgc.*lora_ffn or lora_head, found full_ffn",
        ),
        (
            {"method": "stgc_load", "experts": {"site": "full_ffn"}},
            r"method\.name is stgc_load.*found full_ffn",
        ),
        (
            {"method": "cagrad", "mixture": {"tasks": TASKS[:1], "batch_size": 8, "group_size": 8}},
            r"method\.name is cagrad: .*one group only",
        ),
        (
            {
                "method": {"name": "torchjd", "aggregator": "Mean"},
                "mixture": {"tasks": TASKS[:1], "batch_size": 4},
            },
            r"method\.name is torchjd: .*one group only",
        ),
        (
            {"method": {"name": "torchjd", "aggregator": "UpGrad"}},
            r"method\.aggregator: unknown name 'UpGrad'.*did you mean 'UPGrad'",
        ),
        (
            {"method": {"name": "torchjd", "aggregator": "Mean", "options": {"colour": 1}}},
            r"method\.options do not fit Mean",
        ),
        ({"experts": {"count": 2, "top_k": 3}}, r"experts\.top_k is 3 but experts\.count is 2"),
    ],
    ids=str,
)
def test_wrong_combinations_are_refused_before_anything_is_loaded(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build(tree)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tree",
    [
        {"method": "cagrad", "mixture": {"tasks": TASKS, "batch_size": 8, "group_size": 8}},
        {"method": "cagrad", "mixture": {"tasks": TASKS[:1], "batch_size": 9, "group_size": 8}},
        {"method": "stgc", "experts": {"site": "lora_head"}},
        {"method": "gar", "mixture": {"tasks": TASKS[:1], "batch_size": 8}},
    ],
    ids=str,
)
def test_right_combinations_are_taken(tree: dict[str, Any]) -> None:
    assert build(tree).method.name == tree["method"]


def test_torchjd_names_its_install_line_when_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchjd", None)
    problem = TorchJD().check(Choices("lora_ffn", 8, 4, 20))
    assert problem is not None
    assert "pip install 'gradient-aligned-routing[torchjd]'" in problem


@pytest.mark.parametrize("name", list(METHODS))
def test_methods_survive_their_own_configuration(name: str) -> None:
    method = METHODS[name]
    assert from_config(method.to_config()) == method
    assert method.to_config()["name"] == method.name
    assert isinstance(method, Combined) or method.name == type(method).name
    with pytest.raises(ValueError, match="frozen"):
        method.name_of_no_field = 1  # type: ignore[attr-defined]


def test_the_registry_holds_the_methods_of_the_paper() -> None:
    paper = {"baseline", "gar", "stgc", "loadpen", "switchaux", "stgc_load", "cagrad"}
    others = {"zloss", "loss_free", "global_balance", "task_information", "simbal", "ortho_variance"}
    assert set(REGISTRY) == paper | others | {"torchjd"}
    assert COMPARED == ("baseline", "gar", "switchaux"), "a comparison stays what it was"
    for name in paper | others:
        assert from_config(name).name == name
        assert from_config(name).check(Choices("lora_ffn", 8, 4, 20)) is None
    assert from_config({}).name == "gar"


# --------------------------------------------------------------------------------------------------
# A method of one's own
# --------------------------------------------------------------------------------------------------


class Spread(Method):
    """A toy: experts should not be used by the same groups, the more so the larger the gradients."""

    name: ClassVar[str] = "spread"
    coefficient: float = Field(0.5, ge=0)

    @property
    def observes(self) -> frozenset[str]:
        return frozenset({"routing", "gradients"})

    def check(self, choices: Choices) -> str | None:
        return "needs two experts" if choices.experts < 2 else None

    def router_loss(self, update: Update) -> Tensor | None:
        total = update.zero
        for site in update.sites:
            p, g = site.probabilities(), site.gradients()
            total = total + (p.T @ p).square().sum() * g.square().mean()
        return self.coefficient * total


@contextlib.contextmanager
def registered(cls: type[Method]) -> Iterator[None]:
    assert register(cls) is cls
    try:
        yield
    finally:
        del REGISTRY[cls.name]


def test_a_registered_method_goes_the_same_way() -> None:
    with registered(Spread):
        config = build({"method": {"name": "spread", "coefficient": 0.25}})
        method = config.method
        assert isinstance(method, Spread)
        assert build(config.to_dict()).method == method
        assert config.override(["method.coefficient=1"]).method.to_config()["coefficient"] == 1
        with pytest.raises(UserError, match=r"did you mean 'coefficient'"):
            from_config({"name": "spread", "coefficent": 1})
        with pytest.raises(UserError, match=r"method\.name is spread: needs two experts"):
            build({"method": "spread", "experts": {"count": 1, "top_k": 1}})
    with pytest.raises(UserError, match="unknown name 'spread'"):
        from_config("spread")
    twin, out, g = twin_of("lora_ffn")
    p = twin.group_probabilities(twin.gates_from_detached(out.x))
    loss = task_loss(twin, out) + 0.25 * (p.T @ p).square().sum() * g.square().mean()
    model, batch = model_and_batch("lora_ffn")
    for split in (None, [2, 3]):
        same(update_gradients(model, batch, method, split=split), twin.gradients(loss))


class Positional(Method):
    """Hooks by position, under parameter names of its own."""

    name: ClassVar[str] = "positional"

    def terms(self, step: Pass) -> Tensor | None:
        return 0.5 * step.task_loss


def test_hooks_are_called_by_position() -> None:
    model, batch = model_and_batch("lora_ffn")
    found = update_gradients(model, batch, Positional())
    same(found, {name: 1.5 * grad for name, grad in package_gradients("lora_ffn", "baseline").items()}, 1e-12)


def test_a_name_belongs_to_one_class() -> None:
    class Other(Method):
        name: ClassVar[str] = "spread"

    class Heir(GAR):
        """Forgets a name of its own."""

    class Nameless(Method):
        pass

    class Odd(Method):
        name: ClassVar[str] = "my method"

    with registered(Spread):
        with pytest.raises(UserError, match=r"Other has the name 'spread', which .*\.Spread has already"):
            register(Other)
        assert REGISTRY["spread"] is Spread
        again = type("Spread", (Spread,), {"__module__": Spread.__module__, "__qualname__": "Spread"})
        assert register(again) is again, "its module was imported again"
        assert REGISTRY["spread"] is again
    with pytest.raises(UserError, match=r"Heir has the name 'gar', which gar\.methods\.gar\.GAR has already"):
        register(Heir)
    for cls, found in ((Nameless, "no name"), (Odd, "the name 'my method'")):
        with pytest.raises(UserError, match=rf"{cls.__name__} has {found}; expected name = ") as caught:
            register(cls)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"expected a subclass of gar\.methods\.Method"):
        register(Tiny)  # type: ignore[arg-type]
    assert not {"spread", "my method"} & REGISTRY.keys()


# --------------------------------------------------------------------------------------------------
# What an update tells of its groups, and what a method keeps
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [None, [1, 1, 1, 1, 1], [2, 3]], ids=str)
@pytest.mark.parametrize("site", list(SITES))
def test_groups_know_their_task_and_their_selections(site: str, split: list[int] | None) -> None:
    twin, out, _ = twin_of(site)
    batch = twin.batch
    model = make_model(**SITES[site])
    update = run_passes(model, model, batch, METHODS["gar"], split=split)
    assert update.tasks.dtype == torch.int64
    assert update.tasks.tolist() == [task for task, _ in batch.sizes] == [0, 0, 0, 1, 1]
    assert update.task_count == 2
    expected = torch.zeros(5, out.chosen.shape[1], dtype=torch.long)
    for group, chosen in zip(out.unit_groups, out.chosen.long(), strict=True):
        expected[group] += chosen
    with torch.no_grad():  # what the forward chose, whatever the step has made of the router
        for parameter in model.bank.router.parameters():
            parameter.neg_()
    assert torch.equal(update.sites[0].selections(), expected)
    assert int(expected.sum()) == twin.top_k * len(out.chosen)
    routing = update.sites[0].parts[0].routing
    assert not routing.gates.requires_grad
    assert not routing.logits.requires_grad


def test_task_numbers_give_the_joint_use_of_tasks_and_experts() -> None:
    """What a method on the dependence of tasks and experts needs: one-hot tasks times probabilities."""
    model, batch = model_and_batch("lora_ffn")
    update = run_passes(model, model, batch.reordered([3, 0, 4, 2, 1]), METHODS["gar"], split=[2, 3])
    one_hot = nn.functional.one_hot(update.tasks, update.task_count).double()
    joint = one_hot.T @ update.sites[0].probabilities()
    twin, out, _ = twin_of("lora_ffn")
    p = twin.group_probabilities(out.gates)
    expected = torch.stack([p[:3].sum(0), p[3:].sum(0)])
    torch.testing.assert_close(joint, expected)
    assert joint.requires_grad


def test_a_state_reaches_every_hook() -> None:
    class Remembers(Method):
        name: ClassVar[str] = "remembers"

        def initial_state(self, model: nn.Module) -> MethodState:
            return {"seen": torch.zeros(3)}

        def terms(self, pass_: Pass) -> None:
            pass_.state["seen"][0] += 1

        def finish(self, update: Update) -> None:
            update.state["seen"][1] += 1

        def after_step(self, update: Update) -> None:
            update.state["seen"][2] += 1

    model, batch = model_and_batch("lora_ffn")
    state = Remembers().initial_state(model)
    update = run_passes(model, model, batch, Remembers(), split=[2, 3], state=state)
    Remembers().after_step(update)
    assert update.state is state
    assert update.state["seen"].tolist() == [2, 1, 1]
    plain = run_passes(model, model, batch, Baseline())
    assert Baseline().initial_state(model) is None
    assert plain.state is None
    Baseline().after_step(plain)


# --------------------------------------------------------------------------------------------------
# Nobody else knows which method runs
# --------------------------------------------------------------------------------------------------

PACKAGE = Path(gar.__file__).parent
#: What deals with certain methods as such: the paper's presets and search, and what is timed beside what.
BY_NAME = ("methods", "presets", "sweeps/search.py", "benchmark")
ELSEWHERE = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if not any(path.is_relative_to(PACKAGE / place) for place in BY_NAME)
)


def method_mentions(source: str) -> list[str]:
    """Where a source names a method: by its name, by its module, or by its class where something is decided.

    The string "gar" also names the package, so it counts only where something is decided.
    """
    classes = {cls.__name__ for cls in REGISTRY.values()}
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in REGISTRY and node.value != "gar":
            found.append(f"line {node.lineno}: {node.value!r}")
        if isinstance(node, ast.ImportFrom):
            *room, module = (node.module or "").split(".")
            if room == ["gar", "methods"] and module not in ("base", "update"):
                found.append(f"line {node.lineno}: from {node.module}")
        checks_type = isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "isinstance",
            "issubclass",
        )
        if checks_type or isinstance(node, ast.Compare | ast.match_case | ast.Subscript):
            part = node.pattern if isinstance(node, ast.match_case) else node
            for inner in ast.walk(part):
                name = getattr(inner, "id", getattr(inner, "attr", None))
                if name in classes or (isinstance(inner, ast.Constant) and inner.value == "gar"):
                    found.append(f"line {getattr(inner, 'lineno', '?')}: {ast.unparse(part)}")
    return found


def test_label_style_and_part_in_comparisons_are_a_methods_own() -> None:
    """A method made from another must not be shown, and averaged, as that one."""

    class Variation(GAR):
        name: ClassVar[str] = "variation"

    class Named(STGCLoad):
        name: ClassVar[str] = "named"
        label: ClassVar[str] = "GAR"

    assert (Variation.label, Variation.style, Variation.proposed) == ("variation", None, False)
    assert (GAR.label, GAR.proposed, GAR.reference) == ("GAR", True, False)
    assert [name for name, cls in REGISTRY.items() if cls.reference] == ["baseline"]
    with pytest.raises(ValueError, match="has the label 'GAR', which gar has already"):
        register(Named)
    assert "named" not in REGISTRY


def test_every_method_of_the_package_has_a_look_of_its_own() -> None:
    labels = [cls.label for cls in REGISTRY.values()]
    assert labels == [
        "Baseline", "CAGrad", "GAR", "STGC", "LoadPen", "SwitchAux", "STGC+Load", "z-loss", "Loss-free bias",
        "Global balance", "Task information", "SimBal", "Ortho+Variance", "TorchJD",
    ]  # fmt: skip
    styles = [cls.style for cls in REGISTRY.values() if cls.style is not None]
    assert len({color for color, _ in styles}) == len({marker for _, marker in styles}) == len(styles) == 7


def test_the_search_for_method_names_finds_them() -> None:
    for source in (
        "if method.name == 'gar': pass",
        "if name in ('stgc', 'other'): pass",
        "if name in ('gar', 'other'): pass",
        "match name:\n    case 'gar': pass",
        "match method:\n    case GAR(): pass",
        "isinstance(method, CAGrad)",
        "isinstance(method, methods.GAR)",
        "type(method) is GAR",
        "from gar.methods.cagrad import project_to_simplex",
        "run('cagrad')",
    ):
        assert method_mentions(source), source
    assert not method_mentions("version('gar'); home / 'gar'; PROJECT = 'gar'; method = method or Baseline()")


@pytest.mark.parametrize("path", ELSEWHERE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_method_is_named_outside_its_room(path: Path) -> None:
    assert method_mentions(path.read_text(encoding="utf-8")) == []
