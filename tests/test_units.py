"""Rows of examples and tokens against separate autograd calls, one a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import gar
from gar.config import Config, Kind, build, digest, flat, kind_of, result_only
from gar.errors import UserError
from gar.features.sources import make_sources
from gar.methods import GAR, GroupWeights, Method, UnitChoice
from gar.nn import RoutedExperts, RoutedFFN, RoutedLoRA
from gar.observation import Observed, Unit
from gar.observation._units import add_pairs, add_slices, pairs_are_cheaper
from gar.presets.catalogue import deviations, resolve_config
from gar.runs.directory import first_difference
from gar.training import Updater, fill_gradients
from gar.training.captured import CapturedUpdates
from gar.training.captured_backbone import updates_of
from gar.training.rows import ChosenRows
from support import tiny, tiny_runs
from support.tiny import randomize, relative_error
from support.tiny_moe import tiny_moe
from support.tiny_runs import make_config

D = 5
UNITS: tuple[Unit, ...] = ("example", "token")
BANKS: dict[str, Callable[[], RoutedExperts]] = {
    "lora": lambda: RoutedLoRA(D, 3, experts=4, rank=2, top_k=2, alpha=3.0, dropout=0.4),
    "lora per expert": lambda: RoutedLoRA(
        D, 3, experts=3, rank=2, top_k=2, dropout=0.4, dropout_mask="per_expert"
    ),
    "lora top-1": lambda: RoutedLoRA(D, 3, experts=4, rank=2, top_k=1),
    "ffn": lambda: RoutedFFN(D, 4, experts=4, top_k=2),
    "ffn gated": lambda: RoutedFFN(D, 4, experts=3, top_k=1, gated=True, bias=False),
}


def same(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------- one forward


class Seen:
    """Six rows of uneven masks, one of them without a token; losses that mix the tokens of a row."""

    def __init__(self, bank: str, tokens: int | None = 4, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        self.bank = BANKS[bank]().to(dtype)
        randomize(self.bank)
        shape = (6,) if tokens is None else (6, tokens)
        self.mask = None
        if tokens is not None:
            self.mask = torch.arange(tokens) < torch.tensor([[4], [1], [3], [0], [2], [4]])
        self.x = torch.randn(*shape, D, dtype=dtype)
        self.weight = torch.tensor([0.5, 0.25, 1.0, 2.0, 0.0, 0.125], dtype=dtype)  # row 4 is not counted
        self.keep = None
        if isinstance(self.bank, RoutedLoRA) and self.bank.dropout:
            self.keep = torch.rand(self.bank.dropout_shape(shape)) > self.bank.dropout

    def losses(self) -> tuple[Tensor, Tensor]:
        """``l_n`` [6] and the bank's output."""
        y, _ = self.bank(self.x, self.mask) if self.keep is None else self.bank(self.x, self.mask, self.keep)
        z = torch.tanh(y + torch.linspace(-1, 1, 3 if isinstance(self.bank, RoutedLoRA) else D).to(y))
        if y.dim() > 2:
            assert self.mask is not None
            z = (z * self.mask.to(z).unsqueeze(-1)).sum(1)
        return z.square().sum(-1) + z.prod(-1), y

    def run(self) -> Observed:
        with gar.observe(self.bank) as observed:
            (self.weight * self.losses()[0]).sum().backward()
        return observed

    def units(self, unit: Unit) -> list[tuple[int, ...]]:
        """The counted units, in order."""
        rows = [n for n in range(6) if self.weight[n] > 0]
        if unit == "example" or self.mask is None:
            return [(n,) for n in rows]
        return [(n, t) for n in rows for t in range(self.x.shape[1]) if self.mask[n, t]]

    def slow(self, unit: Unit) -> Tensor:
        """One autograd call a row: of an example's loss, or of what one token's output brings to it."""
        parameters = [getattr(self.bank.experts, slot) for slot in self.bank.experts.slots]
        found = []
        for place in self.units(unit):
            losses, y = self.losses()
            target = losses[place[0]]
            if len(place) == 2:
                (delta,) = torch.autograd.grad(target, y, retain_graph=True)
                target = (delta[place] * y[place]).sum()
            grads = torch.autograd.grad(target, parameters, materialize_grads=True)
            found.append(torch.cat([grad.sum(0).flatten() for grad in grads]))
        return torch.stack(found)

    def gates(self, unit: Unit) -> Tensor:
        gates = self.bank.router(self.x).gates
        if self.mask is not None:
            gates = gates * self.mask.unsqueeze(-1)
        if unit == "example" and self.mask is not None:
            gates = gates.sum(1) / self.mask.sum(1, keepdim=True).clamp(min=1)
        return torch.stack([gates[place] for place in self.units(unit)])


@pytest.mark.parametrize("tokens", [None, 4])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("bank", list(BANKS))
def test_rows_are_those_of_one_autograd_call_each(bank: str, unit: Unit, tokens: int | None) -> None:
    seen = Seen(bank, tokens)
    observed = seen.run()
    rows, expected = observed.unit_rows(unit, seen.weight), seen.slow(unit)
    assert len(rows) == len(expected)
    assert expected.abs().max() > 1e-2
    for size in (1, 300, 1 << 26):
        same(rows.gram(max_bytes=size), expected @ expected.T)
    same(rows.lengths(), torch.linalg.vector_norm(expected, dim=1))
    scale = torch.linalg.vector_norm(expected, dim=1)
    units = expected / torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(1)
    same(rows.gram(scale), units @ units.T)
    same(observed.unit_probabilities(rows), seen.gates(unit))
    chosen = torch.tensor([3, 0, 1])
    some = observed.unit_rows(unit, seen.weight, chosen)
    same(some.gram(), (expected @ expected.T)[chosen][:, chosen])
    same(observed.unit_probabilities(some), seen.gates(unit)[chosen])
    assert not rows.gram().requires_grad


@pytest.mark.parametrize("bank", list(BANKS))
def test_float32_rows(bank: str) -> None:
    seen = Seen(bank, dtype=torch.float32)
    rows, expected = seen.run().unit_rows("token", seen.weight), seen.slow("token").double()
    same(rows.gram(), expected @ expected.T, 1e-5)
    assert rows.gram().dtype == torch.float32


@pytest.mark.parametrize("bank", list(BANKS))
def test_both_ways_to_a_gram_matrix_are_one(bank: str) -> None:
    seen = Seen(bank)
    for unit in UNITS:
        for factors in seen.run().unit_rows(unit, seen.weight).factors.values():
            if factors.right is None:
                continue
            for size in (1, 500, 1 << 20):
                pairs, slices = (torch.zeros(len(factors.left), len(factors.left)).double() for _ in "ab")
                add_pairs(pairs, factors, size)
                add_slices(slices, factors, size)
                same(pairs, slices)


def test_what_costs_less_depends_on_the_shape() -> None:
    def factors(rows: int, terms: int, p: int, q: int) -> Any:
        empty = partial(torch.empty, device="meta")
        return gar.nn.Factors(empty(rows, terms, p), empty(rows, terms, q))

    assert pairs_are_cheaper(factors(1000, 1, 16, 384))  # tokens
    assert not pairs_are_cheaper(factors(128, 64, 16, 384))  # examples of 64 tokens
    assert pairs_are_cheaper(factors(128, 16, 3072, 768))  # of full FFN experts, short texts


@pytest.mark.parametrize("bank", list(BANKS))
def test_tokens_add_up_to_examples_and_examples_to_groups(bank: str) -> None:
    seen = Seen(bank)
    observed = seen.run()
    examples, tokens = (observed.unit_rows(unit, seen.weight) for unit in UNITS)
    of = torch.tensor([place[0] for place in seen.units("token")])
    rows = torch.tensor([place[0] for place in seen.units("example")])
    member = (of == rows.unsqueeze(1)).double()
    same(member @ tokens.gram() @ member.T, examples.gram())
    # Groups of two examples each: a group's row is the mean of theirs.
    groups = torch.tensor([0, 0, 1, 1, -1, 2])
    weight = torch.tensor([1.0, 2.0, 0.5]).double()
    seen.weight = torch.tensor([0.5, 0.5, 1.0, 1.0, 0.0, 0.5]).double()
    observed = seen.run()
    mean = torch.tensor([[0.5, 0.5, 0, 0, 0], [0, 0, 0.5, 0.5, 0], [0, 0, 0, 0, 1.0]]).double()
    gram = observed.unit_rows("example", seen.weight).gram()
    same(mean @ gram @ mean.T, observed.group_gram(groups, weight))


def test_padding_and_the_order_of_rows_change_nothing() -> None:
    seen = Seen("ffn")
    assert seen.mask is not None
    before = {unit: seen.run().unit_rows(unit, seen.weight).gram() for unit in UNITS}
    seen.x = torch.cat([seen.x, torch.randn(6, 4, D, dtype=torch.float64)], 1)
    seen.mask = functional.pad(seen.mask, (0, 4))
    for unit in UNITS:
        same(seen.run().unit_rows(unit, seen.weight).gram(), before[unit])
    places = seen.units("token")
    order = torch.tensor([5, 2, 0, 1, 4, 3])
    seen.x, seen.mask, seen.weight = seen.x[order], seen.mask[order], seen.weight[order]
    moved = [places.index((int(order[n]), t)) for n, t in seen.units("token")]
    same(seen.run().unit_rows("token", seen.weight).gram(), before["token"][moved][:, moved])


def test_rows_without_a_gradient_are_zero() -> None:
    seen = Seen("lora")
    observed = seen.run()
    examples = seen.units("example")
    empty = examples.index((3,))  # no token: reaches no expert
    rows = observed.unit_rows("example", seen.weight)
    assert rows.gram()[empty].abs().sum() == rows.lengths()[empty] == 0
    p = observed.unit_probabilities(rows)
    assert p[empty].sum() == 0
    assert gar.alignment_loss(p, gram=rows.gram(rows.lengths())).isfinite()
    with torch.no_grad():
        seen.bank.experts.A.zero_()
        seen.bank.experts.B.zero_()
    assert seen.run().unit_rows("token", seen.weight).gram().abs().sum() == 0


def test_one_row_and_none() -> None:
    seen = Seen("ffn")
    observed = seen.run()
    one = observed.unit_rows("token", seen.weight, torch.tensor([2]))
    expected = seen.slow("token")[2]
    same(one.gram(), (expected @ expected).reshape(1, 1))
    none = observed.unit_rows("token", seen.weight, torch.tensor([], dtype=torch.long))
    assert none.gram().shape == (0, 0)
    assert observed.unit_probabilities(none).shape == (0, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tokens",), "unit is 'tokens'; expected example or token"),
        (("token", torch.tensor([0, 0])), "different units"),
        (("token", torch.tensor([0.5])), "different units"),
        (("example", torch.tensor([5])), r"chosen must lie in \[0, 5\), the counted examples"),
    ],
)
def test_mistakes(arguments: tuple[Any, ...], message: str) -> None:
    seen = Seen("lora")
    observed = seen.run()
    unit, *chosen = arguments
    with pytest.raises(UserError, match=message):
        observed.unit_rows(unit, seen.weight, *chosen)
    with pytest.raises(UserError, match=r"row_weight must be \[6\], got \[3\]"):
        observed.unit_rows("token", seen.weight[:3])
    for wrong in (-1.0, float("nan"), float("inf")):
        weight = seen.weight.clone()
        weight[2] = wrong
        with pytest.raises(UserError, match="row_weight: expected finite weights of 0 or more"):
            observed.unit_rows("token", weight)


# ---------------------------------------------------------------------- one update


STRONG: dict[str, GAR] = {
    "gar": GAR(coefficient=0.5),
    "unit": GAR(coefficient=0.5, gradients="unit", probabilities="softmax"),
    "task": GAR(coefficient=0.5, gradients="task_scale", self_pairs=False),
    "numerator": GAR(coefficient=0.5, objective="numerator_only", entropy_weight=0.1),
}


def units_of(batch: tiny.Batch, unit: Unit) -> Tensor:
    """The task of every counted unit."""
    return batch.tasks if unit == "example" else batch.tasks.repeat_interleave(batch.mask.sum(1))


def update_gradients(
    model: tiny.Tiny,
    batch: tiny.Batch,
    method: Method,
    unit: Unit,
    split: Sequence[int] | None = None,
    chosen: Tensor | None = None,
) -> tiny.Gradients:
    """All gradients of one update; ``chosen`` are numbers of the update's units (default: all)."""
    ends = np.cumsum(split or [len(batch.sizes)]).tolist()
    begun = 0

    def forward(part: tiny.Batch) -> tuple[Tensor, GroupWeights]:
        nonlocal begun
        tasks = units_of(part, unit)
        own = torch.arange(len(tasks)) if chosen is None else chosen - begun
        own = own[(own >= 0) & (own < len(tasks))]
        begun += len(tasks)
        weights = part.weights(torch.float64, len(batch.sizes))
        weights = replace(weights, units=UnitChoice(unit, own, tasks[own]))
        return weights.grouping.mean(model(part)), weights

    parts = [batch.part(first, last) for first, last in zip([0, *ends[:-1]], ends, strict=True)]
    parameters = [p for p in model.parameters() if p.requires_grad]
    fill_gradients(method, [partial(forward, part) for part in parts], parameters, [model])
    return tiny.named_gradients(model)


def slow_router_gradients(
    model: tiny.Tiny, batch: tiny.Batch, method: GAR, unit: Unit, chosen: Tensor | None = None
) -> dict[str, Tensor]:
    """What the objective brings to the router: a row an autograd call, gates of the unit, plain loops."""
    bank, outputs = model.bank, []
    handle = bank.register_forward_hook(lambda module, args, result: outputs.append((args[0], result[0])))
    losses = model(batch)
    handle.remove()
    x, y = outputs[0]
    parameters = [getattr(bank.experts, slot) for slot in bank.experts.slots]
    routing = bank.router(x.detach())
    gates = routing.gates if method.probabilities == "gates" else routing.logits.softmax(-1)
    rows, p, tasks = [], [], []
    for n, loss in enumerate(losses):
        valid = [t for t in range(batch.mask.shape[1]) if batch.mask[n, t]]
        if unit == "token":
            (delta,) = torch.autograd.grad(loss, y, retain_graph=True)
            targets = [(delta[n, t] * y[n, t]).sum() for t in valid]
            own = [gates[n, t] for t in valid]
        else:
            targets = [loss]
            own = [gates[n] if gates.dim() == 2 else torch.stack([gates[n, t] for t in valid]).mean(0)]
        for target in targets:
            grads = torch.autograd.grad(target, parameters, retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([grad.sum(0).flatten() for grad in grads]))
        p += own
        tasks += [int(batch.tasks[n])] * len(own)
    g, probabilities, of = torch.stack(rows), torch.stack(p), torch.tensor(tasks)
    if chosen is not None:
        g, probabilities, of = g[chosen], probabilities[chosen], of[chosen]
    length = torch.linalg.vector_norm(g, dim=1)
    if method.gradients == "task_scale":
        length = torch.stack([length[of == t].square().mean().sqrt() for t in of])
    if method.gradients != "raw":
        g = g / length.unsqueeze(1)
    load, total = probabilities.sum(0) + 1e-8, probabilities.new_zeros(())
    if method.objective == "numerator_only":
        load = torch.ones_like(load)
    for k in range(gates.shape[-1]):
        for i in range(len(g)):
            for j in range(len(g)):
                if i != j or method.self_pairs:
                    total = total - probabilities[i, k] * probabilities[j, k] * (g[i] @ g[j]) / load[k]
    positive = probabilities[probabilities > 0]
    total = total + method.entropy_weight * (positive * positive.log()).sum()
    names = [name for name, _ in bank.router.named_parameters()]
    found = torch.autograd.grad(method.coefficient * total, list(bank.router.parameters()))
    return dict(zip(names, found, strict=True))


def added(model: tiny.Tiny, found: tiny.Gradients, plain: tiny.Gradients) -> dict[str, Tensor]:
    """What a method brings to the router's parameters; all others are those of Baseline."""
    start = f"{model.bank_name}.router."
    for name, grad in found.items():
        if not name.startswith(start):
            same(grad, plain[name], 1e-13)
    return {
        name.removeprefix(start): grad - plain[name] for name, grad in found.items() if name.startswith(start)
    }


CASES = [("lora_ffn", unit) for unit in UNITS] + [("full_ffn", unit) for unit in UNITS]


@pytest.mark.parametrize("split", [None, [2, 3], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("method", list(STRONG))
@pytest.mark.parametrize(("site", "unit"), [*CASES, ("lora_head", "example")])
def test_the_routers_gradient(site: str, unit: Unit, method: str, split: list[int] | None) -> None:
    model, batch = tiny.make_model(site), tiny.make_batch()
    plain = tiny.update_gradients(model, batch, gar.methods.Baseline())
    found = update_gradients(model, batch, STRONG[method], unit, split)
    expected = slow_router_gradients(model, batch, STRONG[method], unit)
    assert max(float(grad.abs().max()) for grad in expected.values()) > 1e-5
    for name, grad in added(model, found, plain).items():
        same(grad, expected[name])


def test_chosen_rows_padding_order_and_dropout() -> None:
    model, chosen = tiny.make_model("lora_ffn", dropout=0.3), torch.tensor([1, 4, 5, 9, 11])
    batch = tiny.with_keep(model, tiny.make_batch())
    found = update_gradients(model, batch, STRONG["task"], "token", chosen=chosen)
    for split in ([2, 3], [4, 1]):
        again = update_gradients(model, batch, STRONG["task"], "token", split, chosen)
        assert tiny.relative_error(_flat(again), _flat(found)) < 1e-12
    padded = update_gradients(model, batch.padded(8), STRONG["task"], "token", chosen=chosen)
    assert relative_error(_flat(padded), _flat(found)) < 1e-12
    whole = update_gradients(model, batch, STRONG["gar"], "token")
    moved = update_gradients(model, batch.reordered([3, 0, 4, 1, 2]), STRONG["gar"], "token")
    assert relative_error(_flat(moved), _flat(whole)) < 1e-12
    assert relative_error(_flat(found), _flat(whole)) > 1e-4


def _flat(gradients: tiny.Gradients) -> Tensor:
    return torch.cat([grad.flatten() for grad in gradients.values()])


@pytest.mark.parametrize("site", ["lora_ffn", "full_ffn", "lora_head"])
@pytest.mark.parametrize("method", list(STRONG))
def test_with_one_example_a_group_examples_are_the_groups(site: str, method: str) -> None:
    model, batch = tiny.make_model(site), tiny.make_batch(group_size=1)
    expected = tiny.update_gradients(model, batch, STRONG[method])
    assert (
        relative_error(_flat(update_gradients(model, batch, STRONG[method], "example")), _flat(expected))
        < 1e-12
    )


def test_rows_of_examples_do_not_depend_on_the_groups() -> None:
    model = tiny.make_model("lora_ffn")
    first, *others = (
        update_gradients(model, tiny.make_batch(group_size=size), STRONG["gar"], "example")
        for size in (1, 2, 4)
    )
    for other in others:
        assert relative_error(_flat(other), _flat(first)) < 1e-12


# ---------------------------------------------------------------------- MoE layers of transformers


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("implementation", ["batched_mm", "eager"])
def test_rows_of_a_layer_of_transformers(implementation: str, unit: Unit) -> None:
    model = tiny_moe("qwen3_moe", implementation)
    weight = torch.tensor([0.5, 0.25, 0.0, 2.0], dtype=torch.float64)
    ids = torch.randint(1, 20, (4, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(5) < torch.tensor([[5], [3], [4], [1]])
    with gar.observe(model) as observed:
        logits = model(input_ids=ids, attention_mask=mask.long()).logits
        texts = (torch.tanh(logits[..., :7]).sum(-1) * mask).sum(1)
        (weight * texts).sum().backward()
    for site in observed.sites:
        rows = site.unit_rows(unit, weight)
        p = site.unit_probabilities(rows)
        same(p.sum(1), torch.ones(len(rows), dtype=torch.float64))
        shape = site.routing.gates.shape[:2]
        numbers = torch.full((shape[0] * shape[1],), -1)
        if unit == "token":
            numbers[rows.places] = torch.arange(len(rows))
            groups, own = numbers.view(shape), weight[rows.places // shape[1]]
        else:
            numbers = numbers[: shape[0]]
            numbers[rows.places] = torch.arange(len(rows))
            groups, own = numbers, weight[rows.places]
        expected = site.group_gradients(groups, own)
        assert expected.abs().max() > 0
        assert relative_error(rows.gram(), expected @ expected.T) < 1e-10
        same(p, site.group_probabilities(groups, len(rows)))
        assert site.unit_probabilities(rows, soft=True).min() > 0


# ---------------------------------------------------------------------- which rows, and whole runs


def float64(world: Path, **changes: Any) -> Config:
    return make_config(world, **{"backbone__dtype": "float64", "cache__enabled": False, **changes})


def updater_of(config: Config) -> Updater:
    model, mixture = tiny_runs.load(config, randomized=True)
    source, _ = make_sources(model, mixture, config.cache)
    return Updater(model.train(), source, config, [task.name for task in mixture.tasks])


def gradients(config: Config) -> tiny.Gradients:
    updater = updater_of(config)
    updater.gradients(updater.schedule.groups(0), 0)
    return tiny.named_gradients(updater.model)


@pytest.mark.parametrize("unit", UNITS)
def test_rows_are_drawn_without_replacement_from_all_units(world: Path, unit: str) -> None:
    config = float64(world, observation={"unit": unit, "rows": 9})
    updater = updater_of(config)
    groups = updater.schedule.groups(0)
    drawn = updater.rows(groups, 0)
    assert drawn is not None
    picked = [(n, int(i)) for n, own in drawn.chosen.items() for i in own]
    assert len(picked) == len(set(picked)) == 9
    assert all(0 <= i < drawn.counts[n] for n, i in picked)
    again = ChosenRows.of(groups, updater.source.lengths, config.observation, 0, 0)
    assert again is not None
    assert [own.tolist() for own in again.chosen.values()] == [own.tolist() for own in drawn.chosen.values()]
    others = [
        ChosenRows.of(groups, updater.source.lengths, config.observation, *at) for at in ((1, 0), (0, 1))
    ]
    assert all(o is not None and str(o.chosen) != str(drawn.chosen) for o in others)
    state = updater.source.state([(group.task, group.examples) for group in groups])
    assert sum(drawn.counts.values()) == (len(state.mask) if unit == "example" else int(state.mask.sum()))
    # Every unit is drawn as often as another, up to chance.
    total, times = sum(drawn.counts.values()), np.zeros(sum(drawn.counts.values()))
    begins = dict(zip(drawn.counts, np.cumsum([0, *drawn.counts.values()]), strict=False))
    for number in range(400):
        found = ChosenRows.of(groups, updater.source.lengths, config.observation, 0, number)
        assert found is not None
        for n, own in found.chosen.items():
            times[begins[n] + own] += 1
    share = 9 / total
    assert abs(times / 400 - share).max() < 5 * (share * (1 - share) / 400) ** 0.5


@pytest.mark.parametrize("site", ["lora_ffn", "full_ffn", "lora_head"])
def test_an_update_does_not_depend_on_its_passes_or_the_cache(world: Path, tmp_path: Path, site: str) -> None:
    unit = "example" if site == "lora_head" else "token"
    changes = {
        "experts__site": site,
        "method": {"name": "gar", "coefficient": 1.0},
        "observation": {"unit": unit, "rows": 12},
    }
    expected = _flat(gradients(float64(world, **changes)))
    for other in (
        {"max_tokens_per_pass": 40},
        {"max_tokens_per_pass": 1},
        {"cache__enabled": True, "cache__directory": str(tmp_path)},
    ):
        found = _flat(gradients(float64(world, **changes, **other)))
        assert relative_error(found, expected) < (1e-5 if "cache__enabled" in other else 1e-10), other
    other_rows = _flat(gradients(float64(world, **{**changes, "observation": {"unit": unit, "rows": 11}})))
    assert relative_error(other_rows, expected) > 1e-6


def test_a_trained_backbone_in_several_passes(world: Path) -> None:
    changes = {
        **{"backbone__trainable": True, "method": {"name": "gar", "coefficient": 1.0}},
        **{"experts__dropout": 0.0, "observation": {"unit": "example"}},
    }

    def found(limit: int) -> Tensor:
        updater = updater_of(float64(world, max_tokens_per_pass=limit, **changes))
        updater.model.eval()  # its own dropout goes by passes
        updater.gradients(updater.schedule.groups(0), 0)
        return _flat(tiny.named_gradients(updater.model))

    assert relative_error(found(60), found(10_000)) < 1e-10


@pytest.mark.parametrize("unit", UNITS)
def test_runs_end_to_end(world: Path, tmp_path: Path, unit: str) -> None:
    config = make_config(world, observation={"unit": unit, "rows": 20}, cache__directory=str(tmp_path / "c"))
    result = gar.training.train_from_config(config, tmp_path / "run")
    assert result["updates"] == 5
    groups = gar.training.train_from_config(
        make_config(world, cache__directory=str(tmp_path / "c")), tmp_path / "groups"
    )
    assert groups["routing"] != result["routing"]
    results = gar.results(tmp_path)
    assert set(results.frame["variant"]) == {"GAR", f"GAR unit={unit} rows=20"}
    assert len(set(results.frame["setting"])) == 1


def test_a_method_without_such_rows_keeps_its_name(world: Path, tmp_path: Path) -> None:
    """What changes nothing in it makes no second Baseline of it."""
    for number, unit in enumerate(("group", "example")):
        config = make_config(
            world, method={"name": "baseline"}, observation={"unit": unit}, seed=number, optimizer__updates=1
        )
        gar.training.train_from_config(config, tmp_path / unit)
    assert set(gar.results(tmp_path).frame["variant"]) == {"Baseline"}


# ---------------------------------------------------------------------- the configuration


def test_the_keys_belong_to_the_result_and_the_way_to_it_does_not() -> None:
    plain, slow, token = (
        Config(),
        build({"observation": "per_group"}),
        build({"observation": {"unit": "token"}}),
    )
    assert plain.to_dict()["observation"] == "one_pass"
    assert slow.observation.backward == "per_group"
    assert token.to_dict()["observation"] == {"backward": "one_pass", "unit": "token"}
    assert build(token.to_dict()) == token
    assert "observation" not in result_only(plain.to_dict())
    assert digest(plain.to_dict()) == digest(slow.to_dict()) != digest(token.to_dict())
    assert result_only(token.to_dict())["observation"] == {"unit": "token"}
    for key, kind in (("observation", Kind.PLACE), ("observation.backward", Kind.PLACE)):
        assert kind_of(key) is kind
    assert kind_of("observation.unit") is kind_of("observation.rows") is Kind.RESULT
    assert first_difference(plain.to_dict(), token.to_dict()) == ("observation.unit", None, "token")
    changed = plain.override(["observation.unit=token", "observation.rows=64"])
    assert flat(changed.to_dict())["observation.rows"] == 64
    assert plain.override(["observation=per_group"]).observation.backward == "per_group"
    preset = resolve_config("paper/deberta_frozen_lora_ffn/five/gar", ["observation.unit=example"])
    assert deviations(preset) == ["observation.unit"]


class Groups(Method):
    """Reads rows of groups."""

    name: ClassVar[str] = "reads_groups"

    @property
    def observes(self) -> frozenset[str]:
        return frozenset({"routing", "gradients"})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"observation": {"unit": "tokens"}},
            r"observation.unit is 'tokens'; expected 'group', 'example' or 'token'",
        ),
        ({"observation": {"rows": 3}}, "observation.rows is 3, but groups are not drawn from"),
        ({"observation": {"unit": "token", "rows": 0}}, "observation.rows is 0"),
        (
            {"observation": {"unit": "token", "backward": "per_group"}},
            "expected observation.backward one_pass",
        ),
        (
            {"observation": {"unit": "token"}, "experts": {"site": "lora_head"}},
            "observation.unit is token, but experts.site lora_head routes whole examples",
        ),
        (
            {"observation": {"unit": "example"}, "method": "cagrad"},
            "observation.unit is example, but method cagrad reads gradients of groups; expected group",
        ),
        (
            {"observation": {"unit": "example"}, "method": Groups()},
            "method reads_groups reads gradients of groups",
        ),
    ],
)
def test_what_does_not_go_together(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(tree)


def test_methods_without_rows_go_with_any_unit(world: Path) -> None:
    for name in ("baseline", "stgc", "loadpen", "gar+switchaux"):
        changes = {"method": name, "observation": {"unit": "token"}}
        found = gradients(float64(world, **changes))
        if "gar" not in name:
            assert tiny_runs.same_bits(found, gradients(float64(world, method=name)))


def test_finer_rows_are_not_captured(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updater = updater_of(float64(world, observation={"unit": "token"}))
    assert updates_of(updater) is updater
    monkeypatch.setattr(type(updater.model), "device", torch.device("cuda"))
    assert CapturedUpdates.of(updater) is None
    assert updates_of(updater) is updater
