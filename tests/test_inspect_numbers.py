"""The numbers of an inspection against slow twins: separate autograd calls, loops over tokens and experts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import gar
from gar.inspection import Inspection, inspect
from gar.inspection._encode import batches
from gar.inspection._measure import find_sites
from gar.inspection._rows import Reducer, choose_dimension, relative_error
from gar.inspection._statistics import Assignment, LayerUnits, against_chance, compared
from support.saved_moe import KINDS, some_texts, word_tokenizer
from support.tiny_moe import FAMILIES, tiny_moe

TOKENIZER = word_tokenizer()
THREE = {**some_texts(5), "both": ["apple saw fig", "axe pear plum kiwi drill saw"]}


def same(a: Any, b: Any, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------------------
# Twins
# --------------------------------------------------------------------------------------------------


def text_loss(model: Any, text: str) -> tuple[Tensor, int]:
    """Sum of the losses of a text's tokens but the first, alone in its batch, and how many these are."""
    ids = torch.tensor([TOKENIZER(text)["input_ids"]])
    logits = model(input_ids=ids).logits[0]
    losses = [functional.cross_entropy(logits[i], ids[0, i + 1]) for i in range(ids.shape[1] - 1)]
    return torch.stack(losses).sum(), len(losses)


def group_gradients(model: Any, texts: Mapping[str, Sequence[str]]) -> list[np.ndarray]:
    """By layer [T, E, d]: the gradients of the groups' mean losses, one autograd call a text."""
    sites = find_sites(model)
    found: list[list[np.ndarray]] = [[] for _ in sites]
    for own in texts.values():
        total, count = [np.zeros(()) for _ in sites], 0
        for text in own:
            loss, losses = text_loss(model, text)
            count += losses
            for at, site in enumerate(sites):
                grads = torch.autograd.grad(loss, list(site.slots.values()), retain_graph=True)
                total[at] = total[at] + torch.cat([g.reshape(len(g), -1) for g in grads], 1).double().numpy()
        for at, rows in enumerate(total):
            found[at].append(rows / count)
    return [np.stack(rows) for rows in found]


def routed(model: Any, texts: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """OLMoE's routing by layer, from the routers' inputs: softmax, the two largest, loops over tokens."""
    layers = model.model.layers
    experts = model.config.num_experts
    found: list[dict[str, Any]] = [
        {"counts": np.zeros((len(texts), experts), int), "q": [[] for _ in texts], "gates": np.zeros(experts)}
        for _ in layers
    ]
    seen: dict[int, Tensor] = {}

    def see(number: int) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[number] = args[0].detach()

        return hook

    handles = [layer.mlp.register_forward_pre_hook(see(n)) for n, layer in enumerate(layers)]
    for t, own in enumerate(texts.values()):
        for text in own:
            model(input_ids=torch.tensor([TOKENIZER(text)["input_ids"]]))
            for n, layer in enumerate(layers):
                shares = np.zeros(experts)
                for hidden in seen[n][0]:
                    p = torch.softmax(layer.mlp.gate.weight.detach() @ hidden, 0).tolist()
                    for e in sorted(range(experts), key=p.__getitem__)[-2:]:
                        found[n]["counts"][t, e] += 1
                        found[n]["gates"][e] += p[e]
                        shares[e] += p[e]
                found[n]["q"][t].append(shares / shares.sum())
    for handle in handles:
        handle.remove()
    return found


# --------------------------------------------------------------------------------------------------
# Against the twins
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def olmoe() -> Any:
    return tiny_moe("olmoe")


@pytest.fixture(scope="module")
def found(olmoe: Any) -> Inspection:
    return inspect(olmoe, THREE, TOKENIZER, permutations=19, batch_tokens=30)


def test_routing_is_that_of_loops_over_tokens(olmoe: Any, found: Inspection) -> None:
    for layer, twin in zip(found.layers, routed(olmoe, THREE), strict=True):
        np.testing.assert_array_equal(layer.counts, twin["counts"])
        same(layer.load, [np.mean(rows, 0) for rows in twin["q"]], 1e-6)  # the router is in float32
        same(layer.gate, twin["gates"] / np.maximum(twin["counts"].sum(0), 1), 1e-6)
        everyone = np.array([q for rows in twin["q"] for q in rows])
        same(layer.entropy, np.mean([-sum(x * math.log(x) for x in q if x > 0) for q in everyone]), 1e-6)
        load = everyone.mean(0)
        same(layer.load_variance, ((load - 0.25) ** 2).mean(), 1e-6)
        assert layer.utilization == np.mean(load >= 1 / 8)
        events = [(t, e) for (t, e), n in np.ndenumerate(twin["counts"]) for _ in range(n)]
        same(layer.nmi.value, normalized_mutual_info_score(*zip(*events, strict=True)))
        same(layer.ari, adjusted_rand_score(*zip(*events, strict=True)))
        assert layer.dead == [e for e in range(4) if not twin["counts"][:, e].any()]
        assert layer.top_k == 2


def check_gradients(layer: Any, twin: np.ndarray, tolerance: float) -> None:
    norms = np.linalg.norm(twin, axis=2)
    scale = norms.max()
    same(layer.norms / scale, norms / scale, tolerance)
    left = (twin.sum(0) ** 2).sum(1)
    whole = norms.sum(0) ** 2
    live = whole > 1e-12 * whole.max()
    expected = np.where(live, 1 - left / np.where(live, whole, 1), 0)
    same(layer.cancelled, expected, 10 * tolerance)
    same(layer.cancelled_energy.value, 1 - left.sum() / whole.sum(), tolerance)
    rows = twin.reshape(len(twin), -1)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    same(layer.cosines, rows @ rows.T, tolerance)
    mass = [
        max(norms[:, e]) / sum(norms[:, e]) if sum(norms[:, e]) > 1e-12 else 0 for e in range(norms.shape[1])
    ]
    same(layer.gradient_mass_purity, np.mean(mass), tolerance)
    floor = norms.sum(1).max() / norms.sum()
    same(layer.gradient_mass_floor, floor, tolerance)
    own = [share for share in mass if share]
    same(layer.purity_above_floor.value, (np.mean(own) - floor) / (1 - floor), 10 * tolerance)
    same(layer.intra_expert_coherence, gar.metrics.intra_expert_coherence(twin), 10 * tolerance)
    same(layer.inter_expert_similarity, gar.metrics.inter_expert_similarity(twin), 10 * tolerance)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_gradients_are_those_of_separate_autograd_calls(family: str) -> None:
    model = tiny_moe(family)
    found = inspect(model, THREE, TOKENIZER, permutations=0, batch_tokens=30)
    assert found.dimension is None
    for parameter in model.parameters():
        parameter.requires_grad_()
    for layer, twin in zip(found.layers, group_gradients(model, THREE), strict=True):
        # Some norms and softmaxes inside are in float32, whose rounding depends on the batch.
        check_gradients(layer, twin, 1e-5)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_every_implementation_gives_the_same(olmoe: Any, found: Inspection, implementation: str) -> None:
    model = tiny_moe("olmoe", implementation, torch.float32)
    model.load_state_dict(olmoe.state_dict())
    other = inspect(model, THREE, TOKENIZER, permutations=0)
    for layer, own in zip(other.layers, found.layers, strict=True):
        np.testing.assert_array_equal(layer.counts, own.counts)
        same(layer.norms, own.norms, 1e-4)


def test_losses_are_means_over_tokens(olmoe: Any, found: Inspection) -> None:
    for group, texts in zip(found.groups, THREE.values(), strict=True):
        sums = [text_loss(olmoe, text) for text in texts]
        same(group.loss, sum(s.item() for s, _ in sums) / sum(n for _, n in sums), 1e-6)
        assert group.texts == len(texts)
        assert group.tokens == sum(n + 1 for _, n in sums)


def test_batches_units_and_the_order_of_groups_change_nothing(olmoe: Any, found: Inspection) -> None:
    swapped = dict(reversed(THREE.items()))
    cases: list[tuple[dict[str, list[str]], dict[str, Any]]] = [
        (THREE, {"batch_tokens": 1}),
        (THREE, {"batch_tokens": 10_000, "group_size": 3}),
        (swapped, {"seed": 5}),
    ]
    for texts, options in cases:
        other = inspect(olmoe, texts, TOKENIZER, permutations=0, **options)
        order = [list(texts).index(name) for name in THREE]
        for layer, own in zip(other.layers, found.layers, strict=True):
            np.testing.assert_array_equal(layer.counts[order], own.counts)
            same(layer.norms[order], own.norms, 1e-6)
            same(layer.load[order], own.load, 1e-6)
            same(layer.cosines[np.ix_(order, order)], own.cosines, 1e-6)
            same(layer.cancelled, own.cancelled, 1e-6)


def test_the_model_is_left_as_it_was(olmoe: Any) -> None:
    model = tiny_moe("olmoe")
    frozen = next(iter(model.parameters())).requires_grad_(False)
    kept = model.lm_head.weight
    kept.grad = torch.ones_like(kept)
    model.train()
    model.model.norm.eval()
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        inspect(model, THREE, TOKENIZER, permutations=0)
    with pytest.raises(gar.UserError):
        inspect(model, {"a": ["apple"]}, TOKENIZER)
    assert not frozen.requires_grad
    assert all(p.requires_grad for p in model.parameters() if p is not frozen)
    assert model.training
    assert not model.model.norm.training
    assert [p.grad is None for p in model.parameters()].count(False) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    sites = find_sites(model)
    assert not any(p._post_accumulate_grad_hooks for site in sites for p in site.slots.values())


class OwnModel(nn.Module):
    """A language model with a bank of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(TOKENIZER), 8)
        self.bank = gar.nn.RoutedLoRA(8, 8, experts=3, rank=2, top_k=2)
        self.head = nn.Linear(8, len(TOKENIZER))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        output, _ = self.bank(x)  # padding is routed too; an inspection leaves it out

        class Output:
            logits = self.head(x + output)

        return Output


def test_banks_of_our_own_are_layers_too() -> None:
    model = OwnModel().double()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.5)
    found = inspect(model.eval(), THREE, TOKENIZER, permutations=0)
    (layer,) = found.layers
    assert layer.counts.sum() == 2 * sum(group.tokens for group in found.groups)
    assert (layer.name, layer.layer, layer.experts) == ("bank", None, 3)
    (twin,) = group_gradients(model, THREE)
    check_gradients(layer, twin, 1e-8)


# --------------------------------------------------------------------------------------------------
# Shuffled labels
# --------------------------------------------------------------------------------------------------


def made_up(units: int = 9, experts: int = 3, size: int = 5) -> tuple[LayerUnits, np.ndarray, Assignment]:
    draw = np.random.default_rng(4)
    rows = draw.normal(size=(units, experts, size))
    counts = draw.integers(0, 9, (units, experts))
    gram = np.einsum("med,ned->emn", rows, rows)
    zeros = np.zeros((units, experts))
    seen = LayerUnits(counts, zeros, zeros, np.zeros(units), gram, np.eye(experts))
    own = Assignment(np.arange(units) % 3, draw.integers(1, 9, units), 3)
    return seen, rows, own


def test_every_assignment_of_labels_is_computed_from_inner_products_alone() -> None:
    seen, rows, own = made_up()
    for other in [own, *own.shuffled(5, 0)]:
        table, gradients = np.zeros((3, 3), int), np.zeros((3, 3, 5))
        for t in range(3):
            members = [m for m in range(9) if other.groups[m] == t]
            table[t] = sum(seen.counts[m] for m in members)
            gradients[t] = sum(rows[m] for m in members) / sum(other.losses[m] for m in members)
        norms = np.linalg.norm(gradients, axis=2)
        floor = norms.sum(1).max() / norms.sum()
        left, whole = (gradients.sum(0) ** 2).sum(), (norms.sum(0) ** 2).sum()
        expected = {
            "nmi": gar.metrics.normalized_mutual_information(table),
            "purity_above_floor": (np.mean(norms.max(0) / norms.sum(0)) - floor) / (1 - floor),
            "cancelled_energy": 1 - left / whole,
        }
        assert compared(seen, other) == pytest.approx(expected, rel=1e-9)


def test_shuffles_keep_sizes_and_losses() -> None:
    own = Assignment(np.array([0, 0, 0, 1, 2]), np.arange(1, 6), 3)
    for other in own.shuffled(20, 1):
        assert sorted(other.groups) == [0, 0, 0, 1, 2]
        assert list(other.losses) == [1, 2, 3, 4, 5]
    assert len({tuple(other.groups) for other in own.shuffled(20, 1)}) > 3


@pytest.mark.parametrize("groups", [[0, 1], [0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 2], [0, 0, 0, 0]])
def test_arrangements_are_counted_up_to_the_names_of_groups(groups: list[int]) -> None:
    def partition(labels: Sequence[int]) -> frozenset[frozenset[int]]:
        return frozenset(frozenset(i for i, x in enumerate(labels) if x == t) for t in range(max(groups) + 1))

    different = {partition(order) for order in itertools.permutations(groups)}
    own = Assignment(np.array(groups), np.ones(len(groups), int), max(groups) + 1)
    assert own.arrangements == pytest.approx(len(different))
    assert own.tells == (max(groups) > 0 and len(different) >= 20)


def test_p_values_are_of_the_largest_over_layers() -> None:
    draw = np.random.default_rng(2)
    shuffled = draw.normal(size=(39, 4)) * [1, 2, 3, 0]
    values = [3.5, 1.0, 9.0, 0.0]
    layers, overall = against_chance(values, shuffled)
    together = np.array([*shuffled, values])
    means, spreads = together.mean(0), together.std(0)
    for n, chance in enumerate(layers):
        z = (values[n] - means[n]) / spreads[n] if n < 3 else 0.0
        larger = 0
        for row in shuffled:
            larger += max(0.0, *((row[k] - means[k]) / spreads[k] for k in range(3))) >= z
        assert chance.p == (1 + larger) / 40
        assert chance.above == (chance.p <= 0.05)
        assert chance.mean == pytest.approx(shuffled[:, n].mean())
        assert (chance.low, chance.high) == pytest.approx(tuple(np.percentile(shuffled[:, n], [2.5, 97.5])))
    assert overall.value == pytest.approx(np.mean(values))
    assert overall.p == (1 + sum(row.mean() >= np.mean(values) for row in shuffled)) / 40


def test_nothing_shuffled_carries_no_claim() -> None:
    layers, overall = against_chance([0.9], np.empty((0, 1)))
    assert [layers[0].p, layers[0].low, layers[0].above] == [None, None, False]
    assert overall.p is None


def test_two_kinds_of_words_are_told_apart_and_random_groups_are_not(olmoe: Any) -> None:
    apart = inspect(olmoe, some_texts(30), TOKENIZER)
    assert all(layer.nmi.above and layer.cancelled_energy.above for layer in apart.layers)
    everyone = [text for texts in zip(*some_texts(30).values(), strict=True) for text in texts]
    draw = np.random.default_rng(1).permutation(len(everyone))
    halves = {"a": [everyone[i] for i in draw[:30]], "b": [everyone[i] for i in draw[30:]]}
    mixed = inspect(olmoe, halves, TOKENIZER)
    for layer in mixed.layers:
        assert not layer.nmi.above
        assert not layer.purity_above_floor.above
        assert not layer.cancelled_energy.above


# --------------------------------------------------------------------------------------------------
# Sketches and memory
# --------------------------------------------------------------------------------------------------


def sketch_matrix(reducer: Reducer, size: int) -> np.ndarray:
    """[s, d] from the sketches of unit vectors."""
    rows = torch.zeros(size, reducer.width, dtype=torch.float64)
    at = 0
    for slot, length in reducer.template.items():
        part = rows[at : at + length]
        reducer.add(part, slot, torch.eye(length, dtype=torch.float64), 1.0)
        at += length
    return rows.numpy().T


@pytest.mark.parametrize("dimension", [4, 7, 64])
def test_a_sketch_is_a_linear_map_with_one_sign_a_column(dimension: int) -> None:
    reducer = Reducer({"up": 30, "down": 11}, dimension, 3)
    matrix = sketch_matrix(reducer, 41)
    assert sorted(map(sorted, matrix.T.tolist())) == sorted(map(sorted, matrix.T.tolist()))
    np.testing.assert_array_equal(np.abs(matrix).sum(0), np.ones(41))
    loads = np.abs(matrix[:, :30]).sum(1)
    assert loads.max() - loads.min() <= 1  # even heaps
    x = torch.randn(2, 41, dtype=torch.float64)
    rows = torch.zeros(2, dimension, dtype=torch.float64)
    reducer.add(rows, "up", x[:, :30].reshape(2, 5, 6), 2.0)
    reducer.add(rows, "down", x[:, 30:], 2.0)
    same(rows, 2 * x.numpy() @ matrix.T)


def test_inner_products_of_sketches_are_right_in_the_mean_within_their_error() -> None:
    x, y = torch.randn(2, 200, dtype=torch.float64)
    y = 0.5 * x + y
    seeds, dimension = 400, 16
    found = []
    for seed in range(seeds):
        rows = torch.zeros(2, dimension, dtype=torch.float64)
        Reducer({"up": 200}, dimension, seed).add(rows, "up", torch.stack([x, y]), 1.0)
        found.append([float(rows[0] @ rows[0]), float(rows[0] @ rows[1])])
    mean, spread = np.mean(found, 0), np.std(found, 0)
    xx, yy, xy = float(x @ x), float(y @ y), float(x @ y)
    bounds = np.sqrt([2 * xx * xx / dimension, (xx * yy + xy * xy) / dimension])
    assert (np.abs(mean - [xx, xy]) < 5 * bounds / math.sqrt(seeds)).all()
    assert (spread < 1.15 * bounds).all()
    assert relative_error(dimension) == pytest.approx(bounds[0] / xx)


def test_a_whole_row_is_the_gradient_itself() -> None:
    reducer = Reducer({"up": 6, "down": 2}, None)
    assert reducer.width == 8
    np.testing.assert_array_equal(sketch_matrix(reducer, 8), np.eye(8))


def test_the_dimension_is_the_largest_that_fits() -> None:
    layers = {"a": (4, 1000), "b": (8, 500)}
    assert choose_dimension(layers, 10, 4, 10 * 8000 * 4) is None
    for budget in (10 * 12 * 4 * 200, 10 * 12 * 4 * 64):
        dimension = choose_dimension(layers, 10, 4, budget)
        assert dimension is not None
        assert 10 * 12 * 4 * dimension <= budget < 10 * 12 * 4 * 2 * dimension
    with pytest.raises(gar.UserError, match="expected 30720 or more"):
        choose_dimension(layers, 10, 4, 10 * 12 * 4 * 63)


def test_the_inner_products_of_many_units_are_refused_early() -> None:
    """Rows of few numbers, and many of them: [E, M, M] is what takes the memory."""
    layers, needed = {"a": (4, 8), "b": (8, 8)}, 8 * 2000**2 * 8
    with pytest.raises(gar.UserError, match=f"2000 units of texts and 12 experts; expected {needed} or more"):
        choose_dimension(layers, 2000, 4, needed - 1)
    assert choose_dimension(layers, 2000, 4, needed) is None


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that any operation returns."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.numbers = max(self.numbers, value.numel())
        return result


def many_experts() -> Any:
    import transformers

    config = transformers.OlmoeConfig(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_experts=128, num_experts_per_tok=4, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.OlmoeForCausalLM(config)


def test_with_128_experts_no_tensor_is_larger_than_one_slot_of_one_layer() -> None:
    model, texts = many_experts(), some_texts(8)
    budget = 16 * 2 * 128 * 64 * 4
    sizes = []
    with Largest() as seen:
        found = inspect(
            model, texts, TOKENIZER, permutations=9, max_bytes=budget, progress=lambda *a: sizes.append(a)
        )
    slot = 128 * 2 * 16 * 16
    assert found.dimension == 64
    assert seen.numbers <= slot
    # The rows of all units would be 16 times 1.5 slots, of both layers twice that.
    exact = inspect(model, texts, TOKENIZER, permutations=9)
    assert exact.dimension is None
    assert sizes[-1] == ("layers", 2, 2)
    for layer, own in zip(found.layers, exact.layers, strict=True):
        np.testing.assert_array_equal(layer.counts, own.counts)
        assert layer.nmi == own.nmi
        # Of 128 experts the sum is much better than one: errors are independent between them, nearly.
        assert abs((layer.norms**2).sum() / (own.norms**2).sum() - 1) < 3 * found.relative_error
        assert abs(layer.cancelled_energy.value - own.cancelled_energy.value) < 0.1


# --------------------------------------------------------------------------------------------------
# Degenerate inputs
# --------------------------------------------------------------------------------------------------


def test_one_group(olmoe: Any) -> None:
    found = inspect(olmoe, {"all": some_texts(9)["tool"]}, TOKENIZER)
    assert "one group" in found.verdict
    assert found.permutations == 0
    for layer in found.layers:
        assert (layer.nmi.value, layer.nmi.p) == (0.0, None)
        assert layer.cancelled_energy.value == pytest.approx(0)
        assert layer.norms.shape == (1, 4)


def test_groups_of_one_text_cannot_be_told_apart(olmoe: Any) -> None:
    found = inspect(olmoe, {"a": ["apple fig"], "b": ["saw axe drill"]}, TOKENIZER)
    assert found.units == 2
    assert "cannot be told" in found.verdict
    assert not any(layer.nmi.above for layer in found.layers)


def test_a_group_with_one_text_beside_many(olmoe: Any) -> None:
    found = inspect(olmoe, {"many": some_texts(30)["tool"], "one": ["fig plum"]}, TOKENIZER)
    assert found.tells
    assert found.groups[1].texts == 1
    assert np.isfinite(found.layers[0].norms).all()


def test_texts_without_anything_to_predict_are_left_out_and_said(olmoe: Any) -> None:
    found = inspect(olmoe, {"a": ["apple fig", "", "kiwi"], "b": ["saw axe"]}, TOKENIZER)
    assert [group.texts for group in found.groups] == [1, 1]
    assert found.notes == ("2 of 4 texts left out: shorter than 2 tokens",)
    with pytest.raises(gar.UserError, match="group 'b': no text of 2 tokens or more"):
        inspect(olmoe, {"a": ["apple fig"], "b": [""]}, TOKENIZER)


def test_long_texts_are_cut_and_said(olmoe: Any) -> None:
    texts = {"a": ["apple fig kiwi lime plum"], "b": ["saw axe"]}
    found = inspect(olmoe, texts, TOKENIZER, max_length=3)
    assert [group.tokens for group in found.groups] == [3, 2]
    assert found.notes == ("1 of 2 texts cut after 3 tokens",)


def test_a_model_without_moe_layers_is_refused() -> None:
    with pytest.raises(gar.UserError, match="Linear has no MoE layer"):
        inspect(nn.Linear(2, 2), THREE, TOKENIZER)


def test_values_that_are_not_finite_are_refused() -> None:
    model = tiny_moe("olmoe")
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(gar.UserError, match="the loss of texts of group 'fruit' is not finite"):
        inspect(model, THREE, TOKENIZER)


def test_quantised_weights_are_refused() -> None:
    model = tiny_moe("olmoe")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.data.to(torch.int8), requires_grad=False)
    with pytest.raises(gar.UserError, match="down_proj is int8"):
        inspect(model, THREE, TOKENIZER)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "lmm"}, "did you mean 'lm'"),
        ({"max_length": 1}, "max_length is 1"),
        ({"group_size": 0}, "group_size is 0"),
        ({"permutations": -1}, "permutations and batch_tokens are -1"),
        ({"loss": "classification"}, "needs labels"),
    ],
)
def test_wrong_options_are_one_line(olmoe: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(gar.UserError, match=message):
        inspect(olmoe, THREE, TOKENIZER, **options)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    model = tiny_moe("olmoe")
    model.config.vocab_size = 5
    with pytest.raises(gar.UserError, match="the model has 5; expected the model's own"):
        inspect(model, THREE, TOKENIZER)


def test_batches_hold_every_text_once_within_the_tokens() -> None:
    lengths = [5, 1, 9, 3, 3, 20, 2]
    for tokens in (1, 6, 10, 100):
        parts = list(batches(lengths, range(7), tokens))
        assert sorted(i for part in parts for i in part) == list(range(7))
        for part in parts:
            assert len(part) == 1 or len(part) * max(lengths[i] for i in part) <= tokens


def test_kinds_are_distinct() -> None:
    assert not set(KINDS["fruit"]) & set(KINDS["tool"])
