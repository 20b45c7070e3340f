"""LoRA of PEFT on the stacked parameters of experts: the rows are the adapter's own A and B."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import gar
from gar.observation import Observed, RowSum
from support.tiny import relative_error
from support.tiny_moe import tiny_moe

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

GROUPS = torch.tensor([2, 0, 1, 0, -1, 2])
WEIGHT = torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64)
ROWS, TOKENS, COUNT = 6, 5, 3
BOTH = ["gate_up_proj", "down_proj"]
#: Concatenated, twice with gates that do and do not sum to 1; transposed, interleaved and with biases.
FAMILIES = ["qwen3_moe", "olmoe", "mixtral", "gpt_oss"]


def adapted(
    family: str,
    targets: list[str] = BOTH,
    implementation: str = "eager",
    dtype: Any = torch.float64,
    **options: Any,
) -> Any:
    """A model with random A and B on the targeted parameters of its experts."""
    keys = {"r": 2, "lora_alpha": 3, "target_modules": [], **options}
    found = [target if "." in target else f"mlp.experts.{target}" for target in targets]
    model = peft.get_peft_model(
        tiny_moe(family, implementation, dtype), peft.LoraConfig(target_parameters=found, **keys)
    )
    randomize(model)
    return model


def randomize(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.4)


def group_losses(model: Any, **options: Any) -> Tensor:
    ids = torch.randint(3, 29, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **options).logits
    losses = functional.cross_entropy(logits.flatten(0, 1).double(), ids.flatten(), reduction="none")
    texts = losses.view(ids.shape).sum(1)
    return torch.stack([texts[m == GROUPS].mean() for m in range(COUNT)])


def see(model: Any, autocast: bool = False) -> tuple[Observed, list[Tensor]]:
    """What was observed, and by separate autograd calls each site's adapter gradients in plain loops."""
    with gar.observe(model) as observed:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = group_losses(model)
        with observed.sites[0].paused():
            slow = [separate(losses, site.bank) for site in observed.sites]
            for site, expected in zip(observed.sites, slow, strict=True):
                assert relative_error(gar.per_group_gradients(losses, site.bank), expected) < 1e-12
        (WEIGHT * losses).sum().backward()
    return observed, slow


def separate(losses: Tensor, bank: Any) -> Tensor:
    """Rows [M, d] over A and B of each targeted parameter, summed over experts as PEFT splits them."""
    wrappers: dict[str, Any] = {}
    while hasattr(bank, "base_layer"):
        wrappers[bank.parameter_name], bank = bank, bank.base_layer
    rows = []
    for loss in losses:
        row: list[Tensor] = []
        for slot in BOTH:
            if slot not in wrappers:
                continue
            wrapper = wrappers[slot]
            (name,) = wrapper.active_adapters
            a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
            grad_a, grad_b = torch.autograd.grad(loss, [a, b], retain_graph=True)
            rank, experts = wrapper.r[name], wrapper.num_experts
            row.append(sum(grad_a[e * rank : (e + 1) * rank] for e in range(experts)).flatten())
            row.append(sum(grad_b[:, e::experts] for e in range(experts)).flatten())
        rows.append(torch.cat(row).double())
    return torch.stack(rows)


@pytest.mark.numerics
@pytest.mark.parametrize("targets", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "up", "down"])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_the_adapter(family: str, implementation: str, targets: list[str]) -> None:
    dtype = torch.float32 if implementation == "grouped_mm" else torch.float64
    observed, slow = see(adapted(family, targets, implementation, dtype))
    for layer, (site, expected) in enumerate(zip(observed.sites, slow, strict=True)):
        assert site.name == f"base_model.model.model.layers.{layer}.mlp.experts"
        assert float(expected.norm(dim=1).min()) > 0
        rows = site.group_gradients(GROUPS, WEIGHT)
        assert relative_error(rows, expected) < (1e-12 if dtype == torch.float64 else 1e-5)
        assert list(site.template()) == [f"{slot}.lora_{x}" for slot in targets for x in "AB"]
        gram = site.group_gram(GROUPS, WEIGHT, max_bytes=300)
        assert relative_error(gram, rows @ rows.T) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"r": 3, "lora_alpha": 5},
        {"lora_alpha": 1, "target_modules": ["q_proj"]},
    ],
    ids=["rslora", "alpha", "attention too"],
)
def test_scaling_and_ranks(options: dict[str, Any]) -> None:
    observed, slow = see(adapted("olmoe", **options))
    for site, expected in zip(observed.sites, slow, strict=True):
        assert relative_error(site.group_gradients(GROUPS, WEIGHT), expected) < 1e-12


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_is_one_observation(reentrant: bool) -> None:
    plain, _ = see(adapted("gpt_oss"))
    model = adapted("gpt_oss").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with gar.observe(model) as observed:
        (WEIGHT * group_losses(model)).sum().backward()
    for site, other in zip(observed.sites, plain.sites, strict=True):
        expected = other.group_gradients(GROUPS, WEIGHT)
        assert relative_error(site.group_gradients(GROUPS, WEIGHT), expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_half_precision_rounds_and_no_more(family: str, dtype: torch.dtype) -> None:
    observed, slow = see(adapted(family, dtype=dtype), autocast=dtype == torch.float32)
    for site, expected in zip(observed.sites, slow, strict=True):
        rows = site.group_gradients(GROUPS, WEIGHT)
        assert rows.dtype == torch.float32
        assert relative_error(rows, expected) < 5e-2


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_the_active_adapter_counts(family: str) -> None:
    model = adapted(family)
    keys = {"r": 3, "lora_alpha": 1, "target_modules": []}
    found = [f"mlp.experts.{target}" for target in BOTH]
    model.add_adapter("other", peft.LoraConfig(target_parameters=found, **keys))
    randomize(model)
    first, slow = see(model)
    assert relative_error(first.sites[0].group_gradients(GROUPS, WEIGHT), slow[0]) < 1e-12
    model.set_adapter("other")
    second, slow = see(model)
    assert next(iter(second.sites[0].template().values()))[0] == 3
    assert relative_error(second.sites[0].group_gradients(GROUPS, WEIGHT), slow[0]) < 1e-12
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(gar.UserError, match=r"experts \(\w+\) has 2 active adapters \(default, other\)"):
        see(model)


@pytest.mark.parametrize("merged", [False, True])
def test_without_adapters_in_the_forward_the_experts_are_plain(merged: bool) -> None:
    """Merged or disabled: the rows of the weights that ran, in the template of the experts."""
    model, plain = adapted("olmoe"), tiny_moe("olmoe")
    if merged:
        model.merge_adapter()
        weights = {n.replace("base_layer.", ""): p for n, p in model.base_model.model.named_parameters()}
        for name, parameter in plain.named_parameters():
            parameter.data.copy_(weights[name])
    with gar.observe(plain) as expected:
        (WEIGHT * group_losses(plain)).sum().backward()
    model.enable_input_require_grads()
    with gar.observe(model) as observed:
        if merged:
            (WEIGHT * group_losses(model)).sum().backward()
        else:
            with model.disable_adapter():
                (WEIGHT * group_losses(model)).sum().backward()
    for site, other in zip(observed.sites, expected.sites, strict=True):
        assert list(site.template()) == BOTH
        rows = site.group_gradients(GROUPS, WEIGHT)
        assert relative_error(rows, other.group_gradients(GROUPS, WEIGHT)) < 1e-12


@pytest.mark.parametrize("how", ["modules_to_save", "target_parameters"])
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_a_router_that_peft_trains_has_probabilities(family: str, how: str) -> None:
    router = "router" if family == "gpt_oss" else "gate"
    if how == "modules_to_save":
        model = adapted(family, modules_to_save=[router])
    else:
        model = adapted(family, [*BOTH, f"mlp.{router}.weight"])
    observed, slow = see(model)
    for site, expected in zip(observed.sites, slow, strict=True):
        assert relative_error(site.group_gradients(GROUPS, WEIGHT), expected) < 1e-12
        model.zero_grad()
        site.group_probabilities(GROUPS, COUNT)[:, 0].sum().backward()
        reached = [n for n, p in model.named_parameters() if p.grad is not None and float(p.grad.norm()) > 0]
        assert reached
        assert all(f"layers.{site.layer}.mlp.{router}" in name for name in reached), reached


def test_experts_that_peft_copies_are_plain() -> None:
    """``modules_to_save`` trains a copy of the experts, and keeps the original beside."""
    model = peft.get_peft_model(
        tiny_moe("olmoe"), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"])
    )
    with gar.observe(model) as observed:
        losses = group_losses(model)
        with observed.sites[0].paused():
            slow = [gar.per_group_gradients(losses, site.bank) for site in observed.sites]
        (WEIGHT * losses).sum().backward()
    assert len(observed.sites) == 2
    for site, expected in zip(observed.sites, slow, strict=True):
        assert float(expected.norm()) > 0
        assert relative_error(site.group_gradients(GROUPS, WEIGHT), expected) < 1e-12


def test_rows_add_up_over_micro_batches() -> None:
    observed, slow = see(adapted("olmoe"))
    for site, expected in zip(observed.sites, slow, strict=True):
        kept, held = RowSum(COUNT), RowSum(COUNT, dtype=torch.float64)
        for total in (kept, held):
            for _ in range(2):
                total.add(site, GROUPS, 2 * WEIGHT)
            assert relative_error(total.rows, expected) < 1e-12


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_groups_of_tokens(family: str) -> None:
    """In the last layer, where a token's loss has a part of its own token alone."""
    groups = torch.randint(-1, COUNT, (ROWS, TOKENS), generator=torch.Generator().manual_seed(2))
    model = adapted(family)
    with gar.observe(model) as observed:
        ids = torch.randint(3, 29, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        values = functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(
            ids.shape
        )
        losses = torch.stack([values[groups == m].mean() for m in range(COUNT)])
        last = observed.sites[1]
        with last.paused():
            expected = separate(losses, last.bank)
        (WEIGHT * losses).sum().backward()
    assert relative_error(last.group_gradients(groups, WEIGHT), expected) < 1e-12
    total = RowSum(COUNT)
    total.add(last, groups, WEIGHT)
    assert relative_error(total.rows, expected) < 1e-12


def test_one_layer_with_adapters_beside_one_without() -> None:
    model = adapted("olmoe", [f"model.layers.1.mlp.experts.{slot}" for slot in BOTH])
    model.enable_input_require_grads()
    with gar.observe(model) as observed:
        losses = group_losses(model)
        with observed.sites[0].paused():
            slow = separate(losses, observed.sites[1].bank)
        (WEIGHT * losses).sum().backward()
    first, second = observed.sites
    assert list(first.template()) == BOTH
    assert relative_error(second.group_gradients(GROUPS, WEIGHT), slow) < 1e-12


def test_nothing_changes_on_the_model() -> None:
    model, plain = adapted("olmoe"), adapted("olmoe")
    before = {id(m): set(vars(m)) for m in model.modules()}
    with gar.observe(model):
        (WEIGHT * group_losses(model)).sum().backward()
    assert all(set(vars(m)) == before[id(m)] for m in model.modules())
    (WEIGHT * group_losses(plain)).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def test_what_is_no_plain_lora_is_refused() -> None:
    def refused(model: Any) -> str:
        with pytest.raises(gar.UserError) as caught, gar.observe(model):
            pass
        assert "\n" not in str(caught.value)
        return str(caught.value)

    model = adapted("olmoe")
    outer = model.base_model.model.model.layers[1].mlp.experts
    outer.use_dora["default"] = True
    assert "layers.1.mlp.experts (OlmoeExperts) has an adapter that is no plain LoRA" in refused(model)
    outer.use_dora["default"] = False
    outer.lora_dropout["default"] = torch.nn.Dropout(0.1)
    assert "an adapter with dropout" in refused(model)
    outer.lora_dropout["default"] = torch.nn.Identity()
    outer.get_base_layer().down_proj.requires_grad_()
    assert "trains down_proj beside the adapter" in refused(model)
    biased = adapted("gpt_oss", ["gate_up_proj_bias"])
    assert "gate_up_proj_bias, which is no stack of matrices" in refused(biased)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_a_step_of_the_adapter_before_reading_is_refused(implementation: str) -> None:
    model = adapted("olmoe", implementation=implementation)
    observed, _ = see(model)
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-9).step()
    for site in observed.sites:
        with pytest.raises(RuntimeError, match=r"\(gate_up_proj.lora_A changed in place\)"):
            site.group_gradients(GROUPS, WEIGHT)
