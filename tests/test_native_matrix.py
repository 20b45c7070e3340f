"""Every tested family x implementation x way of training, against separate autograd calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import gar
from gar.observation import Observed
from support.tiny import relative_error
from support.tiny_moe import FAMILIES, MORE, tiny_moe

GROUPS = torch.tensor([2, 0, 1, 0, -1, 2])
#: Powers of two: norms and softmaxes inside of these models are float32, and scale exactly with these alone.
WEIGHT = torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64)
COUNT = 3
WAYS = ["plain", "checkpoint", "reentrant", "frozen", "autocast", "bfloat16", "lora"]
#: Some eager families round to float32 inside, at the token's gates.
ROUNDED = {"nemotron_h": 1e-6, "beam": 1e-6}

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def group_losses(model: Any) -> Tensor:
    ids = torch.randint(3, 29, (6, 5), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    losses = functional.cross_entropy(logits.flatten(0, 1).double(), ids.flatten(), reduction="none")
    texts = losses.view(ids.shape).sum(1)
    return torch.stack([texts[m == GROUPS].mean() for m in range(COUNT)])


def prepared(family: str, implementation: str, way: str) -> Any:
    # The CPU has no float64 kernel for grouped_mm.
    dtype = torch.float32 if implementation == "grouped_mm" or way == "autocast" else torch.float64
    model = tiny_moe(family, implementation, torch.bfloat16 if way == "bfloat16" else dtype)
    if way in ("checkpoint", "reentrant"):
        model.train().gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
        model.enable_input_require_grads()
    return adapted(model) if way == "lora" else model


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    found = [name for name, inner in model.named_modules() if hasattr(inner, "is_transposed")]
    up = "gate_up_proj" if model.get_submodule(found[0]).has_gate else "up_proj"
    targets = [f"{'.'.join(found[0].split('.')[-2:])}.{slot}" for slot in (up, "down_proj")]
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=[], target_parameters=targets)
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.4)
    return model


def see(model: Any, way: str, slow: bool) -> tuple[Observed, list[Tensor]]:
    """What was observed and, if it is asked for, the rows of every site by separate autograd calls."""
    found: list[Tensor] = []
    torch.manual_seed(5)
    with gar.observe(model) as observed:
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            losses = group_losses(model)
        if slow:
            with observed.sites[0].paused():
                found = [gar.per_group_gradients(losses, site.bank) for site in observed.sites]
        (WEIGHT * losses).sum().backward()
    return observed, found


@pytest.mark.numerics
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_group_gradients_are_those_of_separate_backwards(family: str, implementation: str, way: str) -> None:
    """Of the same forward; where that cannot be (frozen, reentrant), of the same model and random numbers."""
    half, apart = way in ("autocast", "bfloat16"), {"frozen": "plain", "reentrant": "checkpoint"}.get(way)
    slow = see(prepared(family, implementation, apart), way, True)[1] if apart else []
    model = prepared(family, implementation, way)
    if way == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)
    observed, same = see(model, way, not apart)
    slow = slow or same
    exact = ROUNDED.get(family, 1e-12) if implementation != "grouped_mm" else 1e-5
    read = implementation != "eager" and way not in ("checkpoint", "reentrant", "lora")
    assert len(observed.sites) == 2
    for site, expected in zip(observed.sites, slow, strict=True):
        assert repr(site).endswith("intercepted)" if read else "recomputed)")
        rows = site.group_gradients(GROUPS, WEIGHT)
        assert float(expected.norm(dim=1).min()) > 0
        assert relative_error(rows, expected) < (5e-2 if half else exact)
        gram = site.group_gram(GROUPS, WEIGHT, max_bytes=300)
        assert relative_error(gram, rows @ rows.T) < 1e-5


@pytest.mark.numerics
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", MORE)
def test_more_families(family: str, implementation: str) -> None:
    """Rows, the gates of the router called again, and that probabilities reach a parameter of the router."""
    model = prepared(family, implementation, "plain")
    observed, slow = see(model, "plain", True)
    exact = ROUNDED.get(family, 1e-12) if implementation != "grouped_mm" else 1e-5
    assert observed.sites
    for site, expected in zip(observed.sites, slow, strict=True):
        assert relative_error(site.group_gradients(GROUPS, WEIGHT), expected) < exact
        assert relative_error(site.detached_routing().gates.detach(), site.routing.gates) < 1e-6
        model.zero_grad()
        site.group_probabilities(GROUPS, COUNT)[:, 0].square().sum().backward()
        reached = [n for n, p in model.named_parameters() if p.grad is not None and float(p.grad.norm()) > 0]
        assert reached
        assert all("gate" in name or "router" in name for name in reached), reached
