"""What models and users may do around native experts: rows stay those of separate calls, or are refused."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.integrations import moe

import gar
from gar.observation import RowSum
from gar.observation._grouping import Grouping
from gar.observation._native_factors import DOUBLE, HALF, SINGLE, probe
from support.tiny import relative_error
from support.tiny_native import (
    CHOSEN,
    COUNT,
    EXPERTS,
    GROUPS,
    TOKENS,
    WEIGHT,
    WIDTH,
    TinyBlock,
    TinyNative,
    TinyRouter,
    group_losses,
    inputs,
    observed,
    separate,
)

IMPLEMENTATIONS = ["eager", "batched_mm"]
both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def assert_rows(model: TinyNative, seen: gar.observation.Observed, expected: list[Tensor]) -> None:
    assert len(seen.sites) == len(expected)
    for site, slow in zip(seen.sites, expected, strict=True):
        assert relative_error(site.group_gradients(GROUPS, WEIGHT), slow) < 1e-12


class Positions(TinyBlock):
    """Adds a table to what the experts return, through a view: its gradient is the output's memory."""

    def __init__(self, implementation: str, router: nn.Module) -> None:
        super().__init__(implementation, router)
        self.table = nn.Parameter(torch.zeros(TOKENS * WIDTH, dtype=torch.float64))

    def mix(self, x: Tensor) -> Tensor:
        return super().mix(x) + self.table.view(TOKENS, WIDTH)


@both
def test_rows_do_not_follow_a_gradient_that_is_written_to_later(implementation: str) -> None:
    """Micro-batches of one text that add up in ``.grad``, then clipping."""
    model, weight, count = TinyNative(implementation, Positions), torch.tensor([0.5, 2.0]).double(), 2
    groups = torch.tensor([[0, 1, 0, 1]])

    def losses(row: Tensor) -> Tensor:
        values = model(row[None]).square().sum(-1)
        return torch.stack([values[groups == m].mean() for m in range(count)])

    slow = separate(model, sum(losses(row) for row in inputs()))  # type: ignore[arg-type]
    sums = [RowSum(count) for _ in model.layers]
    for row in inputs():
        with gar.observe(model) as seen:
            (weight * losses(row)).sum().backward()
        for total, site in zip(sums, seen.sites, strict=True):
            total.add(site, groups, weight)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    # Of the last layer: what a token's loss brings to it is the token's own.
    assert relative_error(sums[-1].rows, slow[-1]) < 1e-12
    assert relative_error(sums[0].rows, slow[0]) < 1e-12


class Hooked(TinyBlock):
    """Changes the gradient of what the experts return by a hook on the tensor."""

    def mix(self, x: Tensor) -> Tensor:
        out = super().mix(x)
        if out.requires_grad:  # a reentrant checkpoint's first forward has no graph
            out.register_hook(lambda grad: 2 * grad)
        return out


class HookedBefore(TinyBlock):
    """Changes the gradient that goes on behind the activation, by a hook that comes after the experts."""

    def mix(self, x: Tensor) -> Tensor:
        experts: Any = self.experts
        kept: list[Tensor] = []
        own = experts._apply_gate

        def gate(pre: Tensor) -> Tensor:
            kept.append(pre)
            hidden: Tensor = own(pre)
            return hidden

        experts._apply_gate = gate
        out = super().mix(x)
        experts._apply_gate = own
        kept[0].register_hook(lambda grad: 2 * grad)
        return out


class Checkpointed(Hooked):
    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().mix, x, use_reentrant=False)
        return out


class Reentrant(Hooked):
    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().mix, x, use_reentrant=True)
        return out


@pytest.mark.parametrize("block", [Hooked, Checkpointed, Reentrant])
@both
def test_a_hook_that_changes_the_gradient_is_what_the_parameters_get(
    implementation: str, block: type[TinyBlock]
) -> None:
    model, plain = TinyNative(implementation, block), TinyNative(implementation, Hooked)
    seen, slow = observed(model), separate(plain, group_losses(plain(inputs())))
    assert_rows(model, seen, slow)
    for site, layer in zip(seen.sites, model.layers, strict=True):
        total = WEIGHT @ site.group_gradients(GROUPS, WEIGHT)[:, : 8 * WIDTH]
        grad = layer.experts.gate_up_proj.grad
        assert relative_error(total, grad.sum(0).flatten()) < 1e-12


def test_a_hook_that_changes_the_gradient_of_what_is_activated_counts() -> None:
    model = TinyNative("batched_mm", HookedBefore)
    slow = separate(model, group_losses(model(inputs())))
    with gar.observe(model) as seen:
        (WEIGHT * group_losses(model(inputs()))).sum().backward()
    assert all(repr(site).endswith("intercepted)") for site in seen.sites)
    assert_rows(model, seen, slow)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@both
def test_a_backward_that_builds_a_graph_is_observed(implementation: str) -> None:
    model = TinyNative(implementation, Hooked)
    slow = separate(model, group_losses(model(inputs())))
    with gar.observe(model) as seen:
        (WEIGHT * group_losses(model(inputs()))).sum().backward(create_graph=True)
    assert_rows(model, seen, slow)
    model.zero_grad()  # parameter, gradient and graph are a cycle
    assert not any(t.requires_grad for site in seen.sites for t in site.captures())


class Keywords(TinyBlock):
    def mix(self, x: Tensor) -> Tensor:
        _, weights, index = self.gate(x)
        out: Tensor = self.experts(x, top_k_weights=weights, top_k_index=index)
        return out


class AllKeywords(TinyBlock):
    def mix(self, x: Tensor) -> Tensor:
        _, weights, index = self.gate(x)
        out: Tensor = self.experts(top_k_weights=weights, top_k_index=index, hidden_states=x)
        return out


class Rows(TinyBlock):
    """Calls experts and router with [B, L, H]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


@pytest.mark.parametrize("named", [True, False])
@both
def test_keywords_may_stand_in_any_order(implementation: str, named: bool) -> None:
    """Also those of transformers, for a forward that names none."""
    model = TinyNative(implementation, AllKeywords if not named else Keywords)
    for layer in [] if named else model.layers:

        def unnamed(*args: Any, own: Any = layer.experts.forward, **keywords: Any) -> Any:
            return own(*args, **keywords)

        layer.experts.forward = unnamed
    seen, slow = observed(model), separate(model, group_losses(model(inputs())))
    assert_rows(model, seen, slow)


def test_experts_may_be_called_with_rows_of_tokens() -> None:
    """Of a ``forward`` that flattens them; [B, L, k] says the same as [T, k]."""
    model = TinyNative("eager", Rows)
    for layer in model.layers:

        def flat(x: Tensor, i: Tensor, w: Tensor, own: Any = layer.experts.forward) -> Tensor:
            out: Tensor = own(x.flatten(0, 1), i.flatten(0, 1), w.flatten(0, 1))
            return out.view_as(x)

        layer.experts.forward = flat
    seen, slow = observed(model), separate(model, group_losses(model(inputs())))
    assert_rows(model, seen, slow)
    plain = observed(TinyNative("eager"))
    for site, expected in zip(seen.sites, plain.sites, strict=True):
        p = expected.group_probabilities(GROUPS, COUNT)
        assert relative_error(site.group_probabilities(GROUPS, COUNT).detach(), p.detach()) < 1e-12


class Mixed(TinyBlock):
    def mix(self, x: Tensor) -> Tensor:
        _, weights, index = self.gate(x)
        out: Tensor = self.experts(x, weights, index)
        return out


def test_experts_that_are_called_otherwise_are_refused() -> None:
    expected = r"layers.0.experts \(TinyExperts\) was called with .* expected hidden \[T, H\], index \[T, k\]"
    with pytest.raises(gar.UserError, match=expected):
        observed(TinyNative("eager", Mixed))


def scaled(own: Any) -> Any:
    @functools.wraps(own)
    def forward(*args: Any) -> Tensor:
        out: Tensor = own(*args) / 2
        return out

    return forward


def reversed_tokens(own: Any) -> Any:
    def forward(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = own(x.flip(0), index.flip(0), weights.flip(0))
        return out.flip(0)

    return forward


def test_a_forward_of_the_instance_is_not_known() -> None:
    """It is computed again: where it does the same in another order, rows are right."""
    model = TinyNative("batched_mm")
    for layer in model.layers:
        layer.experts.forward = reversed_tokens(layer.experts.forward)
    seen, slow = observed(model), separate(model, group_losses(model(inputs())))
    assert all(repr(site).endswith("recomputed)") for site in seen.sites)
    assert_rows(model, seen, slow)


@pytest.mark.parametrize("where", ["instance", "table"])
def test_a_forward_that_is_wrapped_is_not_known(where: str) -> None:
    model = TinyNative("batched_mm")
    with pytest.MonkeyPatch.context() as patch:
        if where == "table":
            wrapped = scaled(moe.ALL_EXPERTS_FUNCTIONS["batched_mm"])
            patch.setitem(moe.ALL_EXPERTS_FUNCTIONS, "batched_mm", wrapped)
        else:
            for layer in model.layers:
                layer.experts.forward = scaled(layer.experts.forward)
        seen = observed(model)
    for site in seen.sites:
        with pytest.raises(RuntimeError, match="is not what their weights give for this input"):
            site.group_gradients(GROUPS, WEIGHT)


class InPlace(TinyBlock):
    """Writes to the experts' input after they ran; nothing of autograd's needs it."""

    def mix(self, x: Tensor) -> Tensor:
        x = x.clone()
        _, weights, index = self.gate(x.clone())
        out: Tensor = self.experts(x, index, weights)
        out = out + x
        x.add_(1)
        return out


@both
def test_an_input_that_changed_in_place_is_refused(implementation: str) -> None:
    for site in observed(TinyNative(implementation, InPlace)).sites:
        with pytest.raises(RuntimeError, match="is not what their weights give for this input"):
            site.group_gradients(GROUPS, WEIGHT)


@pytest.mark.parametrize("what", ["index", "weights"])
@both
def test_pairs_that_changed_in_place_are_refused(implementation: str, what: str) -> None:
    for site in observed(TinyNative(implementation)).sites:
        pairs: Tensor = getattr(site._seen, what)  # type: ignore[attr-defined]
        pairs.copy_(pairs.flip(0))
        with pytest.raises(RuntimeError, match="is not what their weights give for this input"):
            site.group_gradients(GROUPS, WEIGHT)
        with pytest.raises(RuntimeError, match="changed in place"):
            _ = site.routing


class Noisy(TinyRouter):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(x + torch.randn_like(x) if self.training else x)


class Counting(TinyRouter):
    """Moves a bias of its own in training, in the forward (DeepSeek's balance without a loss)."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(EXPERTS, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(x, self.weight)
        scores = logits.sigmoid()
        index = (scores + self.bias).topk(CHOSEN, -1)[1]
        if self.training:
            load = torch.bincount(index.flatten(), minlength=EXPERTS).double()
            self.bias += (load.mean() - load).sign()
        return logits, scores.gather(1, index), index


class Copying(TinyRouter):
    """Autograd needs no input that was copied."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(x.clone())


class Overwritten(TinyBlock):
    """Writes to the router's input after it ran."""

    def mix(self, x: Tensor) -> Tensor:
        x = x.clone()
        _, weights, index = self.gate(x)
        out: Tensor = self.experts(x.clone(), index, weights)
        x.mul_(-1)
        return out


@pytest.mark.parametrize("way", ["noise", "state", "input", "functional", "step"])
def test_a_router_that_gives_other_gates_is_refused(way: str) -> None:
    block = Overwritten if way == "input" else TinyBlock
    router = {"noise": Noisy, "state": Counting, "input": Copying}.get(way, TinyRouter)
    model = TinyNative("eager", block, router)
    with gar.observe(model) as seen:
        if way == "functional":
            others = {name: p.detach() + 1 for name, p in model.layers.named_parameters(prefix="layers")}
            others = {name: p.flip(-1).requires_grad_() for name, p in others.items()}
            out = torch.func.functional_call(model, others, (inputs(),))
        else:
            out = model(inputs())
        (WEIGHT * group_losses(out)).sum().backward()
    if way == "step":
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    for site in seen.sites:
        with pytest.raises(gar.UserError, match=r"router called again gives other gates .* of 24 tokens"):
            site.group_probabilities(GROUPS, COUNT)
        assert site.routing.gates.shape == (*inputs().shape[:2], EXPERTS)


def test_a_router_that_draws_in_training_alone_is_diagnosed_in_eval() -> None:
    model = TinyNative("eager", router=Noisy).eval()
    plain = observed(TinyNative("eager"))
    for site, expected in zip(observed(model).sites, plain.sites, strict=True):
        p = expected.group_probabilities(GROUPS, COUNT).detach()
        assert relative_error(site.group_probabilities(GROUPS, COUNT).detach(), p) < 1e-12


@pytest.mark.parametrize("training", [False, True])
def test_buffers_of_a_router_that_is_called_again_stay(training: bool) -> None:
    model = TinyNative("eager", router=Counting).train(training)
    seen = observed(model)
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    for site in seen.sites:
        with contextlib.suppress(gar.UserError):
            site.group_probabilities(GROUPS, COUNT)
    for name, (buffer, value) in before.items():
        assert model.get_buffer(name) is buffer
        assert torch.equal(buffer, value)


def test_a_router_may_be_asked_with_other_parameters() -> None:
    model = TinyNative("eager")
    site = observed(model).sites[0]
    other = model.layers[0].gate.weight.detach().flip(0)
    routing = site.detached_routing({"weight": other})
    assert relative_error(routing.logits.flip(-1), site.routing.logits) < 1e-12


def test_a_step_before_reading_is_refused_however_small() -> None:
    model = TinyNative("eager")
    seen = observed(model)
    torch.optim.AdamW(model.parameters(), lr=1e-9).step()
    for site in seen.sites:
        with pytest.raises(RuntimeError, match=r"\(gate_up_proj changed in place\)"):
            site.group_gradients(GROUPS, WEIGHT)


def test_what_was_read_needs_no_weights() -> None:
    model = TinyNative("batched_mm")
    seen, slow = observed(model), separate(model, group_losses(model(inputs())))
    torch.optim.AdamW(model.parameters(), lr=1.0).step()
    assert_rows(model, seen, slow)


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float64, 1 + 1e-4), (torch.float32, 1.002), (torch.bfloat16, 1.3)]
)
def test_a_forward_that_scales_a_little_is_refused(dtype: torch.dtype, factor: float) -> None:
    model = TinyNative("eager").to(dtype)
    for layer in model.layers:

        def forward(*args: Tensor, own: Any = layer.experts.forward) -> Tensor:
            out: Tensor = own(*args) * factor
            return out

        layer.experts.forward = forward
    for site in observed(model, inputs().to(dtype)).sites:
        with pytest.raises(RuntimeError, match="is not what their weights give for this input;"):
            site.group_gradients(GROUPS, WEIGHT)


def test_what_is_rounded_may_differ_by_more() -> None:
    out, half = torch.ones(2, 3), torch.ones(1, dtype=torch.bfloat16)
    assert probe(out)[1] == SINGLE
    assert probe(out.double())[1] == DOUBLE
    assert probe(out, half)[1] == probe(out.bfloat16())[1] == HALF
    with torch.autocast("cpu"):
        assert probe(out)[1] == HALF
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gar.observation._native_factors.is_reduced", lambda device: True)
        assert probe(out)[1] == HALF
        assert probe(out.double())[1] == DOUBLE


MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1]])


def slow_shares(site: Any, mask: Tensor) -> Tensor:
    """``p`` of the gates that the experts were called with, by loops over texts and their valid tokens."""
    index, weights = site._seen.index, site._seen.weights
    rows = torch.zeros(COUNT, EXPERTS, dtype=torch.float64)
    for b, m in enumerate(GROUPS.tolist()):
        valid = [t for t in range(TOKENS) if mask[b, t]]
        for t in valid if m >= 0 else []:
            for i, w in zip(index[b * TOKENS + t], weights[b * TOKENS + t], strict=True):
                rows[m, i] += w / len(valid) / int((m == GROUPS).sum())
    return rows / rows.sum(1, keepdim=True)


def shares_under(site: Any, mask: Tensor) -> Tensor:
    p: Tensor = site.group_probabilities(GROUPS, COUNT, mask=mask)
    return p.detach()


def same_mask(site: Any, mask: Tensor) -> bool:
    return torch.equal(site.routing.mask, mask)


class Flat(TinyBlock):
    """Is called with the tokens of all rows, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


class Flattening(TinyNative):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


@pytest.mark.parametrize("before", [0, 3])
def test_a_mask_of_cached_tokens_too_ends_with_this_forwards(before: int) -> None:
    """[B, past + L], as with a cache or a prefix."""
    model = TinyNative()
    mask = torch.cat([torch.ones(len(MASK), before).long(), MASK], 1)
    with gar.observe(model, gradients=False) as seen:
        model(inputs(), attention_mask=mask)
    for site in seen.sites:
        p = site.group_probabilities(GROUPS, COUNT).detach()
        assert relative_error(p, slow_shares(site, MASK)) < 1e-12
        assert same_mask(site, MASK.bool())


def test_a_mask_reaches_a_block_that_is_called_with_flat_tokens() -> None:
    model = Flattening(block=Flat)
    with gar.observe(model, gradients=False) as seen:
        model(inputs(), attention_mask=MASK)
    for site in seen.sites:
        assert same_mask(site, MASK.bool().reshape(-1, 1))


def test_a_mask_that_is_given_takes_the_place_of_the_calls() -> None:
    model = TinyNative()
    with gar.observe(model, gradients=False) as seen:
        model(inputs(), attention_mask=MASK)
    for site in seen.sites:
        mask = 1 - MASK + (MASK.sum(1, keepdim=True) == TOKENS)
        p = shares_under(site, mask)
        assert relative_error(p, slow_shares(site, mask)) < 1e-12


@pytest.mark.parametrize("mask", [MASK[:, 1:], MASK[:5], MASK.T])
def test_a_mask_that_fits_nothing_is_refused_unless_it_leaves_nothing_out(mask: Tensor) -> None:
    model = TinyNative()
    with gar.observe(model) as seen:
        (WEIGHT * group_losses(model(inputs(), attention_mask=mask))).sum().backward()
    slow = separate(model, group_losses(model(inputs())))
    assert_rows(model, seen, slow)
    for site in seen.sites:
        with pytest.raises(
            gar.UserError, match=r"attention_mask \[\d, \d\] of the call fits none .*\[6, 4\]"
        ):
            site.group_probabilities(GROUPS, COUNT)
        p = shares_under(site, MASK)
        assert relative_error(p, slow_shares(site, MASK)) < 1e-12
    for ones in (torch.ones_like(mask), torch.ones(6, 1, TOKENS, TOKENS), None):
        with gar.observe(model, gradients=False) as seen:
            model(inputs(), attention_mask=ones)
        p = seen.sites[0].group_probabilities(GROUPS, COUNT).detach()
        assert relative_error(p, slow_shares(seen.sites[0], torch.ones_like(MASK))) < 1e-12


class Pair(nn.Module):
    """An encoder and a decoder, each with a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = TinyNative(), TinyNative()

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        out: Tensor = self.decoder(y + self.encoder(x).mean(1, keepdim=True))
        return out


@pytest.mark.parametrize("decoder_mask", [None, MASK.flip(0)])
def test_a_decoder_has_a_mask_of_its_own(decoder_mask: Tensor | None) -> None:
    model = Pair()
    with gar.observe(model, gradients=False) as seen:
        model(inputs(), inputs().flip(1), attention_mask=MASK, decoder_attention_mask=decoder_mask)
    for site in seen.sites:
        mask = MASK if site.name.startswith("encoder") else decoder_mask
        mask = torch.ones_like(MASK) if mask is None else mask
        p = site.group_probabilities(GROUPS, COUNT).detach()
        assert relative_error(p, slow_shares(site, mask)) < 1e-12


class Some(TinyBlock):
    """Only some tokens reach the experts: as many as there are rows."""

    chosen = torch.tensor([0, 1, 2, 8, 12, 16])

    def mix(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_copy(0, self.chosen, super().mix(x[self.chosen]))


class Inner(TinyNative):
    """The same, and blocks are called without rows or tokens, as in Ernie 4.5-VL."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            flat = x.flatten(0, 1)
            out = layer(flat[Some.chosen].flatten()).view(-1, WIDTH)
            x = x + torch.zeros_like(flat).index_copy(0, Some.chosen, out).view_as(x)
        return self.last(x).tanh()


@pytest.mark.parametrize("flat", [False, True])
def test_one_group_a_row_is_refused_where_the_experts_saw_other_tokens(flat: bool) -> None:
    model = Inner() if flat else TinyNative("eager", Some)
    own = GROUPS.repeat_interleave(TOKENS)[Some.chosen]
    seen, slow = observed(model), separate(model, group_losses(model(inputs())))
    for site, expected in zip(seen.sites, slow, strict=True):
        for ask in (
            lambda s=site: s.group_gradients(GROUPS, WEIGHT),
            lambda s=site: s.group_gram(GROUPS, WEIGHT),
            lambda s=site: s.group_probabilities(GROUPS, COUNT),
            lambda s=site: s.unit_rows("example", torch.ones(len(GROUPS))),
            lambda s=site: RowSum(COUNT).add(s, GROUPS, WEIGHT),
        ):
            with pytest.raises(gar.UserError, match=r"saw 6 tokens where the model has 6 x 4.*\[6, 1\]"):
                ask()
        for groups in (own.unsqueeze(1), Grouping(own, COUNT)):
            assert relative_error(site.group_gradients(groups, WEIGHT), expected) < 1e-12
        gates = torch.stack([site.routing.gates[own == m].sum((0, 1)) for m in range(COUNT)])
        p = site.group_probabilities(own.unsqueeze(1), COUNT).detach()
        assert relative_error(p, gates / gates.sum(1, keepdim=True).clamp(min=1e-9)) < 1e-12
        rows = site.unit_rows("example", WEIGHT[own].unsqueeze(1))
        assert len(rows) == len(own)


class Dropping(TinyRouter):
    """Drops pairs of a small weight: their expert gets the number ``EXPERTS``, which is none."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, index = super().forward(x)
        return logits, weights, index.masked_fill(weights < 0.4, EXPERTS)


def test_a_dropped_pair_has_no_part() -> None:
    """Even with a weight."""
    model = TinyNative("eager", router=Dropping)
    seen, slow = observed(model), separate(model, group_losses(model(inputs())))
    assert_rows(model, seen, slow)
    for site in seen.sites:
        index, weights = site._seen.index, site._seen.weights  # type: ignore[attr-defined]
        assert int((index == EXPERTS).sum()) > 0
        expected = torch.zeros(len(index), EXPERTS, dtype=torch.float64)
        for unit, place in (index < EXPERTS).nonzero().tolist():
            expected[unit, index[unit, place]] += weights[unit, place]
        assert torch.equal(site.routing.gates.flatten(0, 1), expected)
        assert torch.equal(site.routing.selected.flatten(0, 1), expected > 0)
        p = site.group_probabilities(GROUPS, COUNT).detach()
        rows = expected.view(len(GROUPS), TOKENS, EXPERTS)
        means = torch.stack([rows[m == GROUPS].mean((0, 1)) for m in range(COUNT)])
        assert relative_error(p, means / means.sum(1, keepdim=True)) < 1e-12


@pytest.mark.parametrize("kind", [torch.Tensor.tolist, torch.Tensor.numpy])
def test_groups_and_weights_may_be_lists_or_arrays(kind: Any) -> None:
    groups, weight = kind(GROUPS), kind(WEIGHT / 3)
    for site in observed(TinyNative()).sites:
        expected = site.group_gradients(GROUPS, WEIGHT / 3)
        assert torch.equal(site.group_gradients(groups, weight), expected)
        assert torch.equal(site.group_gradients(Grouping(groups, COUNT), weight), expected)
        p = site.group_probabilities(GROUPS, COUNT)
        assert torch.equal(site.group_probabilities(groups, COUNT), p)
        rows = RowSum(COUNT)
        rows.add(site, groups, weight)
        assert torch.equal(rows.rows, expected)


def test_what_is_no_group_or_weight_is_named() -> None:
    site = observed(TinyNative()).sites[0]
    for groups in (GROUPS > 0, GROUPS.double(), [0.5] * 6):
        for ask in (
            lambda g=groups: site.group_gradients(g, WEIGHT),
            lambda g=groups: site.group_probabilities(g, COUNT),
            lambda g=groups: RowSum(COUNT).add(site, g, WEIGHT),
        ):
            with pytest.raises(gar.UserError, match=r"groups must be an integer vector.* got torch\.\w+ of"):
                ask()
    some: Any
    for some in ("texts", [[0], [1, 2]], None):
        with pytest.raises(gar.UserError, match=r"groups: expected integers \[N\] or \[B, L\], got "):
            site.group_gradients(some, WEIGHT)
        with pytest.raises(gar.UserError, match=r"group_weight: expected numbers \[M\], got "):
            site.group_gradients(GROUPS, some)
    for weight in (WEIGHT.unsqueeze(1), WEIGHT[0], 1.0):
        with pytest.raises(gar.UserError, match=r"group_weight must be \[M\], one number a group, got \["):
            site.group_gradients(GROUPS, weight)  # type: ignore[arg-type]
