"""Observations of MoE layers of transformers against M separate autograd calls and loops over tokens."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gar
from gar.nn import RoutedLoRA
from gar.observation import Observed, balance_loss
from gar.routing import Routing
from support.tiny import relative_error
from support.tiny_moe import FAMILIES, MORE, tiny_moe

GROUPS = torch.tensor([2, 0, 1, 0, -1, 2])
#: Powers of two: norms and softmaxes inside of these models are float32, and scale exactly with these alone.
WEIGHT = torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64)
ROWS, TOKENS, COUNT = 6, 5, 3


@dataclass
class Seen:
    observed: Observed
    #: Of every site, by separate autograd calls; empty where they were not asked for.
    slow: list[Tensor]
    mask: Tensor


def texts() -> tuple[Tensor, Tensor]:
    """Token ids [6, 5] and their mask: rows of 5, 3, 4, 5, 2 and 5 tokens."""
    ids = torch.randint(3, 29, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(TOKENS) < torch.tensor([5, 3, 4, 5, 2, 5]).unsqueeze(1)
    return ids.masked_fill(~mask, 0), mask


def token_losses(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask.long(), **options).logits
    losses = functional.cross_entropy(logits.flatten(0, 1).double(), ids.flatten(), reduction="none")
    return losses.view(ids.shape) * mask


def see(model: Any, slow: bool = True, autocast: bool = False, groups: Tensor = GROUPS) -> Seen:
    ids, mask = texts()
    found: list[Tensor] = []
    with gar.observe(model) as observed:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = token_losses(model, ids, mask)
        values = losses.sum(1) if groups.dim() == 1 else losses
        group_losses = torch.stack([values[groups == m].mean() for m in range(COUNT)])
        if slow:
            with observed.sites[0].paused():
                found = [gar.per_group_gradients(group_losses, site.bank) for site in observed.sites]
        (WEIGHT * group_losses).sum().backward()
    return Seen(observed, found, mask)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("max_bytes", [1, 100, 777, 2**28])
def test_a_sliced_gram_matrix_is_the_product_of_the_rows(family: str, max_bytes: int) -> None:
    for site in see(tiny_moe(family), slow=False).observed.sites:
        rows = site.group_gradients(GROUPS, WEIGHT)
        gram = site.group_gram(GROUPS, WEIGHT, max_bytes=max_bytes)
        assert relative_error(gram, rows @ rows.T) < 1e-13


def test_the_template_is_one_expert() -> None:
    (first, _) = see(tiny_moe("gpt_oss"), slow=False).observed.sites
    assert {k: tuple(v) for k, v in first.template().items()} == {
        "gate_up_proj": (8, 16), "gate_up_proj_bias": (16,), "down_proj": (8, 8), "down_proj_bias": (8,),
    }  # fmt: skip
    assert first.group_gradients(GROUPS, WEIGHT).shape == (COUNT, 8 * 16 + 16 + 8 * 8 + 8)


def test_groups_of_tokens() -> None:
    """A token's loss reaches other tokens below through attention: only the last layer has it apart."""
    groups = torch.randint(-1, COUNT, (ROWS, TOKENS), generator=torch.Generator().manual_seed(2))
    seen = see(tiny_moe("olmoe"), groups=groups)
    last, slow = seen.observed.sites[1], seen.slow[1]
    assert relative_error(last.group_gradients(groups, WEIGHT), slow) < 1e-12


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_a_checkpoint_is_one_observation(family: str, reentrant: bool) -> None:
    plain = see(tiny_moe(family), slow=False).observed
    model = tiny_moe(family).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    for site, other in zip(see(model, slow=False).observed.sites, plain.sites, strict=True):
        rows, expected = (s.group_gradients(GROUPS, WEIGHT) for s in (site, other))
        assert relative_error(rows, expected) < 1e-12
        shares, expected = (s.group_probabilities(GROUPS, COUNT).detach() for s in (site, other))
        assert relative_error(shares, expected) < 1e-12


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_experts_that_run_twice_are_refused(reentrant: bool | None) -> None:
    """Reentrant checkpoints run both forwards without gradients, and again in the backward."""
    model = tiny_moe("olmoe").train()
    model.model.layers[1] = model.model.layers[0]
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    (site,) = see(model, slow=False).observed.sites
    with pytest.raises(RuntimeError, match="ran 2 forwards inside one observe block"):
        site.group_gradients(GROUPS, WEIGHT)


@pytest.mark.parametrize("first", ["plain", "reentrant", "offloaded"])
def test_two_micro_batches_are_refused_however_they_are_recomputed(first: str) -> None:
    model = tiny_moe("olmoe").train()
    ids, mask = texts()
    elsewhere = torch.autograd.graph.save_on_cpu() if first == "offloaded" else contextlib.nullcontext()
    with gar.observe(model) as observed, elsewhere:
        total = torch.zeros((), dtype=torch.float64)
        for number in range(2):
            if number or first != "plain":
                model.gradient_checkpointing_enable({"use_reentrant": True})
                model.enable_input_require_grads()
            total = total + token_losses(model, ids, mask).sum()
        total.backward()
    for site in observed.sites:
        with pytest.raises(RuntimeError, match="ran 2 forwards inside one observe block"):
            site.group_gradients(GROUPS, WEIGHT)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_what_a_hook_of_others_makes_of_the_output_is_not_the_experts_gradient(implementation: str) -> None:
    model = tiny_moe("olmoe", implementation)
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_hook(lambda module, args, output: torch.tanh(output))
    seen = see(model)
    for site, slow in zip(seen.observed.sites, seen.slow, strict=True):
        assert relative_error(site.group_gradients(GROUPS, WEIGHT), slow) < 1e-12


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
@pytest.mark.parametrize("family", ["nemotron_h", "gpt_oss"])
def test_an_activation_in_place_is_observed_right(family: str, implementation: str) -> None:
    model = tiny_moe(family, implementation)
    for module in model.modules():
        if hasattr(module, "is_transposed"):
            if module.has_gate:

                def gate(pre: Tensor) -> Tensor:
                    value, other = pre[..., ::2], pre[..., 1::2]
                    return value.clamp_(max=0.5) * other

                module._apply_gate = gate
            else:
                module.act_fn = nn.ELU(inplace=True)
    seen = see(model)
    for site, slow in zip(seen.observed.sites, seen.slow, strict=True):
        assert relative_error(site.group_gradients(GROUPS, WEIGHT), slow) < 1e-6


@pytest.mark.parametrize("change", ["scale", "norm", "weights", "dropped", "step", "input"])
def test_experts_that_return_something_else_are_refused(change: str) -> None:
    """What was recomputed is compared with what the experts returned."""
    model = tiny_moe("olmoe")
    own = [layer.mlp.experts.forward for layer in model.model.layers]
    made: dict[str, Any] = {
        "scale": lambda forward, x, index, weights: 2 * forward(x, index, weights),
        "norm": lambda forward, x, index, weights: functional.normalize(forward(x, index, weights), dim=-1),
        "weights": lambda forward, x, index, weights: forward(x, index, weights**2),
        "dropped": lambda forward, x, index, weights: forward(x, index, weights * (index > 0)),
    }
    if change in made:
        for layer, forward in zip(model.model.layers, own, strict=True):
            layer.mlp.experts.forward = partial(made[change], forward)
    observed = see(model, slow=False).observed
    if change == "step":
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    for site in observed.sites:
        if change == "input":
            site._seen.x.mul_(0.5)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="is not what their weights give for this input"):
            site.group_gradients(GROUPS, WEIGHT)


def test_the_mask_is_that_of_the_observed_forward() -> None:
    model, other = tiny_moe("olmoe"), tiny_moe("olmoe")
    ids, mask = texts()
    expected = [s.group_probabilities(GROUPS, COUNT) for s in see(model, slow=False).observed.sites]
    with gar.observe(model, other, gradients=False) as observed:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
        model(input_ids=ids, attention_mask=mask.long())
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
        other(input_ids=ids)
    for site, p in zip(observed.sites, expected, strict=False):
        assert torch.equal(site.group_probabilities(GROUPS, COUNT), p)
    assert all(site.routing.mask is None for site in observed.sites[2:])


def test_probabilities_in_the_place_of_logits_are_no_logits() -> None:
    """Gemma4's router returns them: their softmax would be another one."""
    if "gemma4_text" not in MORE:
        pytest.skip("not in this release")
    model = tiny_moe("gemma4_text")
    ids, mask = texts()
    router = next(m for m in model.modules() if type(m).__name__.endswith("Router"))
    told: list[Any] = []
    router.register_forward_hook(lambda module, args, result: told.append(result[0].detach()))
    with gar.observe(model, gradients=False) as observed:
        model(input_ids=ids, attention_mask=mask.long())
    site: Any = observed.sites[0]
    p = told[0].reshape(ROWS, TOKENS, -1).double()
    torch.testing.assert_close(p.sum(-1), torch.ones(ROWS, TOKENS).double(), rtol=1e-6, atol=1e-6)
    texts_of = [
        torch.stack([p[b][mask[b]].mean(0) for b in range(ROWS) if GROUPS[b] == m]) for m in range(COUNT)
    ]
    expected = torch.stack([own.mean(0) for own in texts_of])
    found = site.group_probabilities(GROUPS, COUNT, full_softmax=True)
    assert relative_error(found.detach().double(), expected) < 1e-6
    share = p[mask].mean(0)
    chosen = site.routing.selected[mask].double().mean(0)
    assert float(site.balance_loss().detach()) == pytest.approx(
        float(p.shape[-1] * (chosen @ share)), rel=1e-6
    )


def test_a_checkpoint_inside_of_a_reentrant_one_is_one_observation() -> None:
    found = []
    for checkpointed in (False, True):
        model = tiny_moe("olmoe")
        for layer in model.model.layers:

            def block(x: Tensor, own: Any = layer.mlp.forward) -> Tensor:
                return torch.sin(own(x))  # saves something: the experts are computed again to their end

            inner = partial(checkpoint, block, use_reentrant=False)
            layer.mlp.forward = inner if checkpointed else block
        if checkpointed:
            model.train().gradient_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
        found.append(see(model, slow=False).observed.sites)
    for expected, site in zip(*found, strict=True):
        rows = site.group_gradients(GROUPS, WEIGHT)
        assert relative_error(rows, expected.group_gradients(GROUPS, WEIGHT)) < 1e-12


@pytest.mark.parametrize("max_bytes", [1, 2**28])
@pytest.mark.parametrize("groups", [torch.full((ROWS,), -1), torch.full((ROWS, TOKENS), -1)])
def test_without_a_row_in_a_group_all_is_zero(groups: Tensor, max_bytes: int) -> None:
    for site in see(tiny_moe("olmoe"), slow=False).observed.sites:
        assert not site.group_gradients(groups, WEIGHT).any()
        assert not site.group_gram(groups, WEIGHT, max_bytes=max_bytes).any()
        assert not site.group_probabilities(groups, COUNT).any()


@pytest.mark.parametrize("family", ["mixtral", "flex_olmo"])
def test_a_weight_is_not_taken_for_a_number(family: str) -> None:
    """One expert a token has the weight 1.0, and all tokens of one text may choose number 1."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 29}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 1, "pad_token_id": 0}
    sizes |= {"num_local_experts": 2} if family == "mixtral" else {"num_experts": 2, "norm_topk_prob": True}
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    layer = model.model.layers[0]
    gate = layer.mlp.gate
    for _ in range(2):
        with gar.observe(model) as observed:
            token_losses(model, torch.tensor([[5]]), torch.ones(1, 1)).sum().backward()
        routing = observed.sites[0].routing
        if routing.selected.flatten().tolist() == [False, True]:
            break
        gate.weight.data = gate.weight.data.flip(0)
    assert routing.selected.flatten().tolist() == [False, True]
    p = observed.sites[0].group_probabilities(torch.tensor([0]), 1)
    torch.testing.assert_close(p.detach(), torch.tensor([[0.0, 1.0]], dtype=p.dtype))
    assert p.requires_grad


def test_frozen_experts_have_group_gradients() -> None:
    plain, frozen = tiny_moe("qwen3_moe"), tiny_moe("qwen3_moe")
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("experts" not in name)
    sites = see(frozen, slow=False).observed.sites
    for site, slow in zip(sites, see(plain).slow, strict=True):
        assert relative_error(site.group_gradients(GROUPS, WEIGHT), slow) < 1e-12
    with pytest.raises(gar.UserError, match="frozen"):
        gar.per_group_gradients(torch.ones(1), sites[0].bank)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_autocast_rounds_and_no_more(family: str) -> None:
    seen = see(tiny_moe(family, dtype=torch.float32), autocast=True)
    for site, slow in zip(seen.observed.sites, seen.slow, strict=True):
        assert relative_error(site.group_gradients(GROUPS, WEIGHT), slow) < 5e-2
        again = site.detached_routing()
        assert torch.equal(again.selected, site.routing.selected)
        assert relative_error(again.gates.detach(), site.routing.gates) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_how_many_experts_a_token_chooses_is_known_of_padding_too(family: str) -> None:
    seen = see(tiny_moe(family), slow=False)
    model, ids = tiny_moe(family), torch.zeros(ROWS, TOKENS, dtype=torch.long)
    with gar.observe(model, gradients=False) as observed:
        model(input_ids=ids, attention_mask=torch.zeros_like(ids))
    for site, empty in zip(seen.observed.sites, observed.sites, strict=True):
        assert site.choices == empty.choices == int(site.routing.selected.sum(-1).max())
        assert not empty.routing.selected.any()


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_probabilities_are_means_of_the_gates(family: str, per_token: bool, full: bool) -> None:
    model = tiny_moe(family)
    seen = see(model, slow=False)
    groups = GROUPS
    if per_token:
        groups = torch.randint(-1, COUNT, (ROWS, TOKENS), generator=torch.Generator().manual_seed(2))
    for site in seen.observed.sites:
        routing = site.routing
        expected = torch.zeros(COUNT + 1, 4, dtype=torch.float64)
        for b in range(ROWS):
            gates = routing.logits[b].softmax(-1) if full else routing.gates[b]
            valid = seen.mask[b]
            if per_token:
                for t in valid.nonzero().flatten().tolist():
                    if groups[b, t] >= 0:
                        expected[groups[b, t]] += gates[t]
            elif groups[b] >= 0:
                expected[groups[b]] += gates[valid].mean(0)
        expected[:COUNT] /= expected[:COUNT].sum(1, keepdim=True)
        found = site.group_probabilities(groups, COUNT + 1, full_softmax=full)  # type: ignore[call-arg]
        assert relative_error(found.detach(), expected.detach()) < 1e-6
        router = next(site._seen.router.parameters())  # type: ignore[attr-defined]
        model.zero_grad()
        (found[:, 0].square().sum()).backward()
        assert router.grad is not None
        assert float(router.grad.abs().max()) > 0
        others = [n for n, p in model.named_parameters() if p.grad is not None and float(p.grad.norm()) > 0]
        assert all("gate" in name or "router" in name for name in others), others


def test_the_mask_may_be_given() -> None:
    site = see(tiny_moe("olmoe"), slow=False).observed.sites[0]
    one = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    one[:, 1] = True
    found: Tensor = site.group_probabilities(torch.arange(ROWS), mask=one)  # type: ignore[call-arg]
    expected = site.routing.gates[:, 1]
    assert relative_error(found.detach(), expected / expected.sum(-1, keepdim=True)) < 1e-12
    with pytest.raises(gar.UserError, match=r"mask must be \[6, 5\]"):
        site.group_probabilities(GROUPS, mask=one[:2])  # type: ignore[call-arg]


class Both(nn.Module):
    """A language model with a bank of ours behind its logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.base, self.bank = tiny_moe("olmoe"), RoutedLoRA(29, 29, experts=3, rank=2, top_k=2).double()
        nn.init.normal_(self.bank.experts.get_parameter("B"))

    def forward(self, **inputs: Any) -> Any:
        out = self.base(**inputs)
        out.logits = out.logits + self.bank(out.logits)[0]
        return out


def test_ours_and_theirs_in_one_model() -> None:
    seen = see(Both())
    assert [(s.name, s.layer) for s in seen.observed.sites] == [
        ("base.model.layers.0.mlp.experts", 0), ("base.model.layers.1.mlp.experts", 1), ("bank", None),
    ]  # fmt: skip
    assert "recomputed" in repr(seen.observed.sites[0])
    assert "recorded" in repr(seen.observed.sites[2])
    for site, slow in zip(seen.observed.sites, seen.slow, strict=True):
        assert relative_error(site.group_gradients(GROUPS, WEIGHT), slow) < 1e-12
        assert site.group_probabilities(GROUPS, COUNT).shape[0] == COUNT


def test_nothing_stays_on_the_model_and_no_gradient_changes() -> None:
    plain, model = tiny_moe("mixtral"), tiny_moe("mixtral")
    before = {id(m): dict(vars(m)) for m in model.modules()}
    see(model, slow=False)
    assert all(vars(m).keys() == before[id(m)].keys() for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    ids, mask = texts()
    losses = token_losses(plain, ids, mask).sum(1)
    groups = torch.stack([losses[m == GROUPS].mean() for m in range(COUNT)])
    (WEIGHT * groups).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_the_router_may_be_called_again_inside_the_block() -> None:
    model = tiny_moe("olmoe")
    ids, mask = texts()
    with gar.observe(model) as observed:
        token_losses(model, ids, mask)
        first, second = (observed.sites[1].group_probabilities(GROUPS, COUNT).detach() for _ in range(2))
    assert relative_error(first, second) < 1e-12


def test_two_forwards_or_backwards_are_refused() -> None:
    model = tiny_moe("olmoe")
    ids, mask = texts()
    with gar.observe(model) as observed:
        token_losses(model, ids, mask)
        token_losses(model, ids, mask)
    with pytest.raises(RuntimeError, match="2 forwards"):
        observed.sites[0].group_probabilities(GROUPS)
    with gar.observe(model) as observed:
        losses = token_losses(model, ids, mask).sum()
        losses.backward(retain_graph=True)
        losses.backward()
    with pytest.raises(RuntimeError, match="2 backward passes"):
        observed.sites[0].group_gradients(GROUPS, WEIGHT)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "granitemoe"])
def test_a_balance_loss_is_that_of_transformers_on_one_layer(family: str, masked: bool) -> None:
    """Value, and the gradient in the router; as in transformers, top-2 of the softmax is what is chosen."""
    model = tiny_moe(family)
    module = importlib.import_module(type(model).__module__)
    site = see(model, slow=False).observed.sites[1]
    mask = torch.rand(ROWS, TOKENS, generator=torch.Generator().manual_seed(3)) < 0.6
    valid = texts()[1] & mask if masked else texts()[1]
    logits = site.detached_routing().logits.flatten(0, 1)
    expected = module.load_balancing_loss_func((logits,), 4, 2, valid.long())
    found = site.balance_loss(mask if masked else None)
    router = list(site._seen.router.parameters())  # type: ignore[attr-defined]
    theirs, ours = (torch.autograd.grad(loss, router, allow_unused=True) for loss in (expected, found))
    assert relative_error(found.detach(), expected.detach()) < 1e-6
    for g, e in zip(ours, theirs, strict=True):
        assert (g is None) == (e is None)
        assert g is None or relative_error(g, e) < 1e-5
    outside = [p for p in model.parameters() if not any(p is r for r in router)]
    reached = torch.autograd.grad(site.balance_loss(), outside, allow_unused=True)
    assert not any(g is not None for g in reached)


def test_a_balance_loss_of_an_update_is_that_of_the_whole_batch() -> None:
    """By plain loops over tokens, whatever the micro-batches; sigmoid gates and padding included."""
    model, (ids, mask) = tiny_moe("deepseek_v3"), texts()
    routings: list[list[Routing]] = [[], []]
    for some in torch.arange(ROWS).split([1, 3, 2]):
        with gar.observe(model, gradients=False) as observed:
            token_losses(model, ids[some], mask[some])
        for layer, site in zip(routings, observed.sites, strict=True):
            layer.append(site.detached_routing())
    whole = see(model, slow=False).observed.sites
    for layer, site in zip(routings, whole, strict=True):
        chosen, mass = torch.zeros(2, 4, dtype=torch.float64).unbind()
        for b, t in mask.nonzero().tolist():
            chosen += site.routing.selected[b, t]
            mass += site.routing.logits[b, t].softmax(-1)
        expected = 4 * (chosen * mass).sum() / mask.sum() ** 2
        assert relative_error(balance_loss(*layer).detach(), expected) < 1e-6
        assert relative_error(site.balance_loss().detach(), expected) < 1e-6
    assert float(whole[0].balance_loss(torch.zeros_like(mask)).detach()) == 0


def test_a_balance_loss_of_banks_of_ours() -> None:
    bank = RoutedLoRA(5, 3, experts=4, rank=2, top_k=2).double()
    nn.init.normal_(bank.router.weight)
    with gar.observe(bank, gradients=False) as observed:
        bank(torch.randn(6, 5, dtype=torch.float64))
    loss, routing = observed.site.balance_loss(), observed.site.routing
    expected = 4 * (routing.selected.double().mean(0) * routing.logits.softmax(-1).mean(0)).sum()
    assert relative_error(loss.detach(), expected.detach()) < 1e-12
    (gradient,) = torch.autograd.grad(loss, bank.router.weight)
    assert float(gradient.norm()) > 0
    with pytest.raises(gar.UserError, match=r"mask must be \[6\]"):
        observed.site.balance_loss(torch.ones(5))
    without = replace(routing, logits=routing.logits[:, :0])
    with pytest.raises(gar.UserError, match="no logits"):
        balance_loss(without)
    with pytest.raises(gar.UserError, match="at least one"):
        balance_loss()


@pytest.mark.parametrize("by_call", [False, True])
def test_a_live_auxiliary_loss_is_refused(by_call: bool) -> None:
    model = tiny_moe("qwen3_moe")
    model.config.output_router_logits = not by_call
    ids, mask = texts()
    options = {"output_router_logits": True} if by_call else {}
    with gar.observe(model), pytest.raises(gar.UserError, match=r"auxiliary loss .*set output_router_logits"):
        token_losses(model, ids, mask, **options)
    with gar.observe(model, gradients=False) as observed:
        token_losses(model, ids, mask, **options)
    assert observed.sites[0].group_probabilities(GROUPS, COUNT).shape == (COUNT, 4)


def test_what_does_not_fit_is_refused_with_its_reason() -> None:
    def refused(model: nn.Module) -> str:
        with pytest.raises(gar.UserError) as caught, gar.observe(model):
            pass
        assert "\n" not in str(caught.value)
        return str(caught.value)

    model = tiny_moe("olmoe")
    experts = model.model.layers[1].mlp.experts
    assert "no router beside it" in refused(experts)
    experts._is_expert_parallel = True
    assert "model.layers.1.mlp.experts (OlmoeExperts) is expert parallel" in refused(model)
    experts._is_expert_parallel, experts.has_post_expert_norm = False, True
    assert "norm behind every expert" in refused(model)
    experts.has_post_expert_norm = False
    experts._is_hooked = True
    assert "tensor parallel" in refused(model)
    experts._is_hooked = False
    kept = experts.down_proj
    experts.down_proj = nn.Parameter(kept.to(torch.float8_e4m3fn), requires_grad=False)
    assert "quantised weights (down_proj is float8_e4m3fn)" in refused(model)
    experts.down_proj = nn.Parameter(kept.to("meta"))
    assert "down_proj is offloaded" in refused(model)
    experts.down_proj = kept
    nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())
    assert "parametrised" in refused(model)


class Adapter(nn.Module):
    """Where PEFT's ``target_parameters`` puts the experts."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_adapters_around_the_experts_are_refused() -> None:
    model = tiny_moe("olmoe")
    model.model.layers[0].mlp.experts = Adapter(model.model.layers[0].mlp.experts)
    with pytest.raises(gar.UserError, match="adapters beside the experts"), gar.observe(model):
        pass


def foreign_moe(family: str) -> nn.Module:
    if family == "longcat_flash":
        return tiny_moe(family)
    if family == "switch":
        config = transformers.SwitchTransformersConfig(
            vocab_size=29, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, num_experts=2,
            num_sparse_encoder_layers=1,
        )  # fmt: skip
        return transformers.SwitchTransformersEncoderModel(config)
    text = transformers.Llama4TextConfig(
        vocab_size=29, hidden_size=8, intermediate_size=8, intermediate_size_mlp=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=4, num_local_experts=2, pad_token_id=0,
        interleave_moe_layer_step=1,
    )  # fmt: skip
    return transformers.Llama4ForCausalLM(text)


@pytest.mark.parametrize("family", ["switch", "llama4", "longcat_flash"])
def test_a_layout_outside_of_the_interface_is_refused(family: str) -> None:
    with (
        pytest.raises(gar.UserError, match="layout of its own; supported are"),
        gar.observe(foreign_moe(family)),
    ):
        pass


def test_weights_in_half_precision_are_multiplied_in_float32() -> None:
    seen = see(tiny_moe("mixtral", dtype=torch.bfloat16))
    for site, slow in zip(seen.observed.sites, seen.slow, strict=True):
        rows = site.group_gradients(GROUPS, WEIGHT)
        assert rows.dtype == torch.float32
        assert relative_error(rows, slow) < 5e-2
        assert site.group_probabilities(GROUPS, COUNT).dtype == torch.float32


def test_a_router_that_draws_is_for_diagnosis_alone() -> None:
    model = tiny_moe("phimoe").train()
    seen = see(model, slow=False)
    with pytest.raises(gar.UserError, match=r"draws random numbers .*eval"):
        seen.observed.sites[0].group_probabilities(GROUPS, COUNT)


def test_changed_gates_are_refused() -> None:
    """A block that scales what its router returned: calling the router again would give other gates."""
    model = tiny_moe("olmoe")
    with pytest.MonkeyPatch.context() as patch:
        block = model.model.layers[0].mlp
        gate = block.gate

        def forward(x: Tensor) -> Tensor:
            _, weights, index = gate(x.flatten(0, 1))
            out: Tensor = block.experts(x.flatten(0, 1), index, 2 * weights)
            return out.view_as(x)

        patch.setattr(block, "forward", forward)
        seen = see(model)
    assert relative_error(seen.observed.sites[0].group_gradients(GROUPS, WEIGHT), seen.slow[0]) < 1e-12
    with pytest.raises(gar.UserError, match="not called with what the router returned"):
        seen.observed.sites[0].group_probabilities(GROUPS, COUNT)
