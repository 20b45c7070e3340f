"""Where the order of an implementation's pairs is known, activations are read and not recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations import moe

import gar
from gar.observation import Observed
from gar.observation import _native_order as order
from support.tiny import relative_error
from support.tiny_moe import FAMILIES, tiny_moe

GROUPS = torch.tensor([2, 0, 1, 0, -1, 2])
WEIGHT = torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64)
COUNT = 3


def group_losses(model: Any) -> Tensor:
    """Texts that are the same in part: equal tokens in different groups."""
    ids = torch.randint(3, 29, (6, 5), generator=torch.Generator().manual_seed(1))
    ids[1] = ids[0]
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    losses = functional.cross_entropy(logits.flatten(0, 1).double(), ids.flatten(), reduction="none")
    texts = losses.view(ids.shape).sum(1)
    return torch.stack([texts[m == GROUPS].mean() for m in range(COUNT)])


def see(model: Any) -> Observed:
    with gar.observe(model) as observed:
        (WEIGHT * group_losses(model)).sum().backward()
    return observed


def ways(observed: Observed) -> set[str]:
    return {repr(site).rpartition(", ")[2].rstrip(")") for site in observed.sites}


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_is_what_would_be_recomputed(family: str, implementation: str) -> None:
    dtype = torch.float32 if implementation == "grouped_mm" else torch.float64
    model = tiny_moe(family, implementation, dtype)
    with gar.observe(model) as before:
        assert ways(before) == {"intercepted"}
    read = see(model)
    assert ways(read) == {"intercepted"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gar.observation._native.known", lambda experts: None)
        model.zero_grad()
        again = see(model)
        assert ways(again) == {"recomputed"}
    for site, other in zip(read.sites, again.sites, strict=True):
        assert site.template() == other.template()
        rows, expected = (s.group_gradients(GROUPS, WEIGHT) for s in (site, other))
        assert relative_error(rows, expected) < (1e-12 if dtype == torch.float64 else 1e-5)
        gram = site.group_gram(GROUPS, WEIGHT, max_bytes=300)
        assert relative_error(gram, expected @ expected.T) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes(reentrant: bool) -> None:
    """It was asked for to keep nothing: neither are activations kept for the rows."""
    model = tiny_moe("olmoe", "batched_mm").train()
    expected = see(tiny_moe("olmoe", "batched_mm"))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    observed = see(model)
    assert ways(observed) == {"recomputed"}
    for site, other in zip(observed.sites, expected.sites, strict=True):
        rows = other.group_gradients(GROUPS, WEIGHT)
        assert relative_error(site.group_gradients(GROUPS, WEIGHT), rows) < 1e-12


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("what", ["frozen", "nothing below"])
def test_frozen_experts(what: str, implementation: str) -> None:
    """Also where the first layer's pre-activation has no gradient: only its router's gates do."""
    dtype = torch.float32 if implementation == "grouped_mm" else torch.float64
    plain, frozen = (tiny_moe("qwen3_moe", implementation, dtype) for _ in range(2))
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("mlp.gate" in name if what == "nothing below" else "experts" not in name)
    expected, observed = see(plain), see(frozen)
    assert repr(observed.sites[1]).endswith("intercepted)")
    assert repr(observed.sites[0]).endswith("recomputed)" if what == "nothing below" else "intercepted)")
    for site, other in zip(observed.sites, expected.sites, strict=True):
        rows = other.group_gradients(GROUPS, WEIGHT)
        assert relative_error(site.group_gradients(GROUPS, WEIGHT), rows) < 1e-5


def test_paused_backwards_leave_no_trace() -> None:
    model = tiny_moe("olmoe", "batched_mm")
    with gar.observe(model) as observed:
        losses = group_losses(model)
        with observed.sites[0].paused():
            slow = [gar.per_group_gradients(losses, site.bank) for site in observed.sites]
        (WEIGHT * losses).sum().backward(retain_graph=True)
        with observed.sites[0].paused():
            losses.sum().backward()
    for site, expected in zip(observed.sites, slow, strict=True):
        assert relative_error(site.group_gradients(GROUPS, WEIGHT), expected) < 1e-12


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("family", ["olmoe", "nemotron_h"])
def test_nothing_stays_on_the_instance(family: str, failing: bool) -> None:
    model = tiny_moe(family, "batched_mm")
    before = {id(m): dict(vars(m)) for m in model.modules()}
    with pytest.MonkeyPatch.context() as patch:
        if failing:
            experts = type(next(m for m in model.modules() if hasattr(m, "is_transposed")))
            patch.setattr(experts, "_apply_gate", fail, raising=False)
            patch.setattr(model.lm_head, "forward", fail)
        if failing:
            with pytest.raises(ArithmeticError):
                see(model)
        else:
            see(model)
    assert all(vars(m).keys() == before[id(m)].keys() for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def fail(*args: Any) -> Any:
    raise ArithmeticError


def test_a_gate_of_the_instance_itself_stays() -> None:
    model = tiny_moe("olmoe", "batched_mm")
    experts = model.model.layers[0].mlp.experts
    own: Callable[[Tensor], Tensor] = lambda both: both.chunk(2, -1)[0].tanh()  # noqa: E731
    experts._apply_gate = own
    with gar.observe(model) as observed:
        losses = group_losses(model)
        with observed.sites[0].paused():
            slow = gar.per_group_gradients(losses, experts)
        (WEIGHT * losses).sum().backward()
    assert experts._apply_gate is own
    assert ways(observed) == {"intercepted"}
    assert relative_error(observed.sites[0].group_gradients(GROUPS, WEIGHT), slow) < 1e-12


def test_an_unknown_implementation_recomputes() -> None:
    """One that goes by a known name but has another order."""

    def reversed_pairs(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = moe.batched_mm_experts_forward(self, hidden.flip(0), index.flip(0), weights.flip(0))
        return out.flip(0)

    model = tiny_moe("olmoe", "batched_mm")
    expected = see(model)
    model.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(moe.ALL_EXPERTS_FUNCTIONS, "batched_mm", reversed_pairs)
        observed = see(model)
    assert ways(observed) == {"recomputed"}
    for site, other in zip(observed.sites, expected.sites, strict=True):
        rows = other.group_gradients(GROUPS, WEIGHT)
        assert relative_error(site.group_gradients(GROUPS, WEIGHT), rows) < 1e-12


def test_both_implementations_of_this_release_are_known() -> None:
    """Where this fails, transformers has changed: read it, then ``gar.observation._native_order``."""
    for name in ("batched_mm", "grouped_mm"):
        experts = tiny_moe("olmoe", name).model.layers[0].mlp.experts
        assert order.known(experts) == name
    experts.config._experts_implementation = "eager"
    assert order.known(experts) is None
