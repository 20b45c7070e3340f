"""Whole group gradients out of one forward and backward, against a forward and backward of every group."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from gar.config import CacheConfig, build
from gar.features.sources import RawSource
from gar.methods import CAGrad
from gar.model import MultiTaskModel, SiteState
from gar.nn import Experts, FFNExperts, ffn
from gar.nn.head import LinearHeads
from gar.observation import Grouping, WholeGradients, _modules
from gar.training import Updater
from support import oracles
from support.tiny_backbones import (
    DECODERS,
    KINDS,
    SITES,
    TASKS,
    Directories,
    make_model,
    make_splits,
    scatter_weights,
)

#: The decoders' norms and the rotary positions of ModernBERT compute in float32, whatever the model's dtype.
TOLERANCE = dict.fromkeys(KINDS, 1e-12) | dict.fromkeys((*DECODERS, "modernbert"), 1e-6)
FACTORS, SHARED, SEPARATE = "from factors", "with a shared part", "by a backward a group"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return Directories(tmp_path_factory.mktemp("backbones"))


# --------------------------------------------------------------------------------------------------
# The model of the package
# --------------------------------------------------------------------------------------------------


class Padded(RawSource):
    """Inputs padded to twice their length."""

    def state(self, parts: Sequence[tuple[int, NDArray[np.int64]]]) -> SiteState:
        ids, mask, types = self.model.tokens([(self.splits[task], rows) for task, rows in parts])

        def wider(values: Tensor, fill: int) -> Tensor:
            return functional.pad(values, (0, values.shape[1]), value=fill)

        padding = int(self.model.tokenizer.pad_token_id)
        return self.model.prefix(
            wider(ids, padding), wider(mask, False), None if types is None else wider(types, 0)
        )


def make_updater(model: MultiTaskModel, batch_size: int = 5, group_size: int = 2, **options: Any) -> Updater:
    """Five examples of one task and three of another, or fewer; groups of two, the last ones of one."""
    source = RawSource(model, make_splits(model), CacheConfig())
    mixture = {"batch_size": batch_size, "group_size": group_size}
    config = build({"method": CAGrad(), "mixture": mixture, **options})
    return Updater(model, source, config, [task.name for task in TASKS])


def flat(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


def backward_of(loss: Tensor, parameters: Sequence[nn.Parameter], keep: bool = False) -> Tensor:
    return flat(torch.autograd.grad(loss, parameters, retain_graph=keep, materialize_grads=True)).detach()


def rows_of_separate_passes(updater: Updater) -> Tensor:
    """``M v_m`` times the gradient of every group's mean loss, by a forward and a backward of each."""
    groups = updater.schedule.groups(0)
    own = []
    for group in groups:
        losses, _ = updater.group_losses([group], 0, len(groups))
        own.append(backward_of(losses[0], updater.parameters))
    return oracles.cagrad_rows(torch.stack(own), [group.task_weight for group in groups])


def rows_of_one_pass(updater: Updater, whole: WholeGradients | None = None) -> tuple[Tensor, Tensor]:
    """The rows of all groups in one pass, and those of M backwards on the same graph."""
    groups = updater.schedule.groups(0)
    whole = whole or updater.whole
    assert whole is not None
    with whole.recording():
        losses, weights = updater.group_losses(groups, 0, len(groups))
        same_graph = torch.stack([backward_of(loss, updater.parameters, keep=True) for loss in losses])
        rows = torch.full((len(groups), whole.size), float("nan"), dtype=losses.dtype)
        scale = weights.total * weights.task_weights
        whole.fill(losses, scale, weights.grouping, rows)
    return rows, oracles.cagrad_rows(same_graph, [group.task_weight for group in groups])


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("kind", ["bert", "roberta", "deberta-v2", "qwen3"])
def test_one_pass_equals_separate_passes(
    directories: Directories, kind: str, site: str, trainable: bool
) -> None:
    model = make_model(directories[kind], site, trainable).eval()
    scatter_weights(model)
    updater = make_updater(model)
    assert [len(group) for group in updater.schedule.groups(0)] == [2, 2, 1, 2, 1]
    expected = rows_of_separate_passes(updater)
    for _ in range(3):  # checked twice, then no longer
        close(rows_of_one_pass(updater)[0], expected, TOLERANCE[kind])
    padded = Padded(model, make_splits(model), CacheConfig())
    updater.source = padded
    close(rows_of_one_pass(updater)[0], expected, TOLERANCE[kind])


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("kind", KINDS)
def test_with_dropout_the_rows_are_of_the_same_graph(directories: Directories, kind: str, site: str) -> None:
    """And no supported backbone needs more than the one backward."""
    model = make_model(directories[kind], site, True, dropout=0.3).train()
    scatter_weights(model)
    updater = make_updater(model)
    assert updater.whole is not None
    for _ in range(2):
        rows, expected = rows_of_one_pass(updater)
        close(rows, expected, TOLERANCE[kind])
    ways = updater.whole._ways
    assert ways[FACTORS] + ways[SHARED] == len(updater.parameters)
    assert (ways[SHARED] > 0) == (kind in ("bert", "deberta-v2", "electra", "distilbert"))
    assert f"{ways[FACTORS]} {FACTORS}" in repr(updater.whole)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"dropout_mask": "per_expert", "dropout": 0.3}], ids=str)
@pytest.mark.parametrize("site", ["lora_ffn", "lora_head"])
def test_gates_and_masks(directories: Directories, site: str, options: dict[str, Any]) -> None:
    model = make_model(directories["bert"], site, True, **options).train()
    scatter_weights(model)
    close(*rows_of_one_pass(make_updater(model)), 1e-12)


def test_top_1_full_ffn(directories: Directories) -> None:
    model = make_model(directories["qwen3"], "full_ffn", True, top_k=1).train()
    scatter_weights(model)
    close(*rows_of_one_pass(make_updater(model)), 1e-6)


@pytest.mark.parametrize(("batch", "size"), [(5, 1), (4, 4), (5, 5), (1, 1)])
def test_groups_of_one_and_one_group_a_task(directories: Directories, batch: int, size: int) -> None:
    for kind in ("bert", "deberta-v2"):
        model = make_model(directories[kind], "full_ffn", True).eval()
        scatter_weights(model)
        updater = make_updater(model, batch, size)
        expected = rows_of_separate_passes(updater)
        close(rows_of_one_pass(updater)[0], expected, 1e-12)


@pytest.mark.parametrize("kind", ["bert", "deberta-v2"])
def test_the_rows_of_several_passes_stack(
    directories: Directories, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(directories[kind], "lora_ffn", True).eval()
    scatter_weights(model)
    updater = make_updater(model)
    groups = updater.schedule.groups(0)
    expected = oracles.cagrad(rows_of_separate_passes(updater), 0.4)[0]
    # The second pass has the second task's groups alone: the other head is not called there.
    for parts in ([groups], [groups[:3], groups[3:]], [groups[:1], groups[1:4], groups[4:]]):
        monkeypatch.setattr("gar.training.updater.passes", lambda *_, parts=parts: iter(parts))
        for _ in range(2):
            updater.gradients(groups, 0)
            found = [torch.zeros(0) if p.grad is None else p.grad for p in updater.parameters]
            assert [grad.shape for grad in found] == [p.shape for p in updater.parameters]
            close(flat(found), expected, 1e-9)


def test_gradient_checkpointing(directories: Directories) -> None:
    model = make_model(
        directories["bert"], "lora_ffn", True, backbone={"gradient_checkpointing": True}
    ).train()
    scatter_weights(model)
    close(*rows_of_one_pass(make_updater(model)), 1e-12)


@pytest.mark.parametrize("site", SITES)
def test_the_slow_way_is_one_key(directories: Directories, site: str) -> None:
    model = make_model(directories["bert"], site).eval()
    scatter_weights(model)
    fast, slow = make_updater(model), make_updater(model, observation="per_group")
    assert slow.whole is not None
    close(rows_of_one_pass(slow)[0], rows_of_one_pass(fast)[0], 1e-12)
    assert slow.whole._ways == {SEPARATE: len(slow.parameters)}
    assert f"{len(slow.parameters)} {SEPARATE}" in repr(slow.whole)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_half_precision_rows_are_float32(directories: Directories, kind: str, site: str) -> None:
    model = make_model(directories[kind], site, True, dtype="float32", precision="bfloat16").train()
    scatter_weights(model)
    updater = make_updater(model)
    assert updater.whole is not None
    rows, same_graph = rows_of_one_pass(updater)
    assert rows.dtype == torch.float32
    # Both multiply the same rounded factors; M backwards round every weight gradient to bfloat16 as well.
    for place in updater.whole.places.values():
        error = (rows[:, place].double() - same_graph[:, place]).norm(dim=1)
        assert (error <= 0.03 * same_graph[:, place].norm(dim=1) + 2e-3 * same_graph.norm(dim=1)).all()
    assert updater.whole._ways[SEPARATE] == 0


def test_weight_gradients_are_not_computed_twice(directories: Directories) -> None:
    model = make_model(directories["roberta"], "full_ffn", True).eval()
    updater = make_updater(model)
    computed: list[int] = []
    handles = [
        p.register_hook(lambda _, number=n: computed.append(number)) for n, p in enumerate(updater.parameters)
    ]
    groups = updater.schedule.groups(0)

    def fill() -> int:
        assert updater.whole is not None
        computed.clear()
        with updater.whole.recording():
            losses, weights = updater.group_losses(groups, 0, len(groups))
            rows = losses.new_empty(len(groups), updater.whole.size)
            updater.whole.fill(losses, weights.task_weights, weights.grouping, rows)
        return len(computed)

    assert fill() > 0  # the check
    assert fill() > 0
    assert fill() == 0
    for handle in handles:
        handle.remove()


def test_nothing_is_left_behind(directories: Directories) -> None:
    model = make_model(directories["deberta-v2"], "full_ffn", True).train()
    updater = make_updater(model)
    assert updater.whole is not None
    groups = updater.schedule.groups(0)
    seen: list[StorageWeakRef] = []
    watched = [module for module in model.modules() if isinstance(module, nn.Linear | nn.LayerNorm)]
    for _ in range(3):
        handles = [
            module.register_forward_hook(
                lambda _, args, y: seen.extend(StorageWeakRef(t.untyped_storage()) for t in (*args, y))
            )
            for module in watched
        ]
        gc.disable()  # a cycle through the graph would hold its memory until the next collection
        try:
            with updater.whole.recording():
                losses, weights = updater.group_losses(groups, 0, len(groups))
                rows = losses.new_empty(len(groups), updater.whole.size)
                updater.whole.fill(losses, weights.task_weights, weights.grouping, rows)
            del losses
            weight = {p.untyped_storage()._cdata for p in model.parameters()}
            assert all(storage.expired() or storage.cdata in weight for storage in seen)
        finally:
            gc.enable()
        assert len(seen) > 20
        for handle in handles:
            handle.remove()
        seen.clear()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_failing_forward_leaves_no_hooks(directories: Directories) -> None:
    model = make_model(directories["bert"], "lora_ffn", True)
    updater = make_updater(model)
    assert updater.whole is not None
    updater.source.labels = []
    with pytest.raises(IndexError), updater.whole.recording():
        updater.group_losses(updater.schedule.groups(0), 0, 5)
    updater = make_updater(model)
    assert not any(module._forward_hooks for module in model.modules())
    close(*rows_of_one_pass(updater), 1e-12)


# --------------------------------------------------------------------------------------------------
# Modules that are no sum over rows
# --------------------------------------------------------------------------------------------------

SIZES, LENGTH, WIDTH = (2, 3, 1), 4, 6
GROUPING = Grouping(torch.tensor([0, 0, 1, 1, 1, 2]))
SCALE = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)


class Net(nn.Module):
    """``forward`` takes [B, L, d] to [B, L, d]; the loss of a row is a square of its mean."""

    def __init__(self, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        for name, part in parts.items():
            setattr(self, name, part)


def split(
    net: nn.Module, forward: Callable[[Tensor], Tensor], whole: WholeGradients | None = None
) -> tuple[Tensor, Tensor, WholeGradients]:
    """The rows, M backwards on the same graph, and what made them."""
    net.double()
    parameters = [p for p in net.parameters() if p.requires_grad]
    whole = whole or WholeGradients([net], parameters)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SIZES), LENGTH, WIDTH, dtype=torch.float64, generator=random)
    with whole.recording():
        losses = GROUPING.mean(forward(x).flatten(1).mean(1).square())
        expected = torch.stack([backward_of(loss, parameters, keep=True) for loss in losses])
        rows = torch.full((3, whole.size), float("nan"), dtype=torch.float64)
        whole.fill(losses, SCALE, GROUPING, rows)
    return rows, SCALE.unsqueeze(1) * expected, whole


def exact(net: nn.Module, forward: Callable[[Tensor], Tensor], **ways: int) -> None:
    whole = None
    for _ in range(3):
        rows, expected, whole = split(net, forward, whole)
        close(rows, expected, 1e-13)
    assert whole is not None
    found = {
        "factors": whole._ways[FACTORS],
        "shared": whole._ways[SHARED],
        "separate": whole._ways[SEPARATE],
    }
    assert found == {"factors": 0, "shared": 0, "separate": 0} | ways


def test_a_module_called_twice_adds_up() -> None:
    net = Net(norm=nn.LayerNorm(WIDTH))
    exact(net, lambda x: net.norm(net.first(net.norm(net.first(x).tanh()))).tanh(), factors=4)


def test_modules_that_see_some_of_the_rows() -> None:
    net = Net(one=nn.Linear(WIDTH, 3), two=nn.Linear(WIDTH, 3), other=nn.Linear(WIDTH, 3))

    def forward(x: Tensor) -> Tensor:
        hidden = net.first(x).tanh().mean(1)
        one, two = hidden.split([4, 2])
        return torch.cat([net.one(one), net.two(two)])

    exact(net, forward, factors=8)

    def rearranged(x: Tensor) -> Tensor:
        hidden = net.first(x).tanh().mean(1)
        return torch.stack([*net.one(hidden[::2]), *net.two(hidden[[1, 3, 5]])])[[0, 3, 1, 4, 2, 5]]

    exact(net, rearranged, factors=4, separate=4)


def test_linear_heads_as_one_module() -> None:
    heads = LinearHeads({name: nn.Linear(WIDTH, size) for name, size in (("a", 2), ("b", 3), ("c", 1))})
    heads["b"].bias.requires_grad_(False)
    net = Net(heads=heads)
    exact(net, lambda x: heads(net.first(x).tanh().mean(1), ("c", "b")), factors=7)


def test_parameters_of_unknown_modules() -> None:
    net = Net(conv=nn.Conv1d(WIDTH, WIDTH, 3), scale=nn.Parameter(torch.rand(WIDTH)))
    exact(net, lambda x: net.conv((net.first(x) * net.scale).mT).mT.tanh(), factors=2, separate=3)


def test_frozen_parts_and_modules_without_bias() -> None:
    net = Net(last=nn.Linear(WIDTH, WIDTH, bias=False), norm=nn.RMSNorm(WIDTH), plain=nn.LayerNorm(WIDTH))
    net.first.weight.requires_grad_(False)
    net.plain.weight.requires_grad_(False)
    exact(net, lambda x: net.norm(net.plain(net.last(net.first(x).tanh()))).tanh(), factors=4)


def test_unused_parameters_have_zero_rows() -> None:
    net = Net(other=nn.Linear(WIDTH, WIDTH), loose=nn.Parameter(torch.ones(())))
    exact(net, lambda x: (net.first(x), net.other(x))[0].tanh(), factors=5)
    exact(net, lambda x: net.loose * net.first(x).tanh(), factors=4, separate=1)


@pytest.mark.parametrize(
    ("kind", "spread"),
    [
        ("shared", lambda x, b: x + b),
        ("shared", lambda x, b: b + x),
        ("shared", lambda x, b: x + b[:1].tanh()),
        ("shared", lambda x, b: x * b.unsqueeze(0).expand(len(x), -1, -1)),
        ("shared", lambda x, b: x * b.unsqueeze(0).repeat(len(x), 1, 1)),
        ("separate", lambda x, b: x * b.unsqueeze(0).repeat(2 * len(x), 1, 1)[: len(x)]),
        ("separate", lambda x, b: x * b),
        ("separate", lambda x, b: x @ b.mT),
    ],
)
def test_what_all_rows_share(kind: str, spread: Callable[[Tensor, Tensor], Tensor]) -> None:
    net = Net(shared=nn.Embedding(LENGTH, WIDTH), norm=nn.LayerNorm(WIDTH))
    ways = {kind: 3}
    exact(
        net,
        lambda x: spread(net.first(x), net.norm(net.shared(torch.arange(LENGTH)))).tanh(),
        factors=2,
        **ways,
    )


def test_a_shared_weight_with_as_many_rows_as_the_batch() -> None:
    net = Net(norm=nn.LayerNorm(WIDTH), table=nn.Parameter(torch.rand(6, WIDTH)))
    exact(net, lambda x: net.first(x).unsqueeze(2).tanh() + net.norm(net.table), factors=2, shared=3)


def test_scaled_addition_is_no_copy() -> None:
    shared = nn.Parameter(torch.rand(1, WIDTH, dtype=torch.float64))
    net = Net(shared=shared)
    exact(net, lambda x: torch.add(net.first(x), shared, alpha=3).tanh(), factors=2, separate=1)


def test_embeddings_with_padding_and_tables_of_other_kinds() -> None:
    net = Net(
        plain=nn.Embedding(5, WIDTH, padding_idx=1), counted=nn.Embedding(5, WIDTH, scale_grad_by_freq=True)
    )
    ids = torch.tensor([[0, 1, 2, 2], [1, 1, 1, 1], [4, 3, 2, 1], [0, 0, 0, 0], [3, 4, 1, 0], [2, 2, 1, 1]])
    exact(net, lambda x: (net.first(x) * net.plain(ids) + net.plain(ids).sin()).tanh(), factors=4)
    # Scaled by the counts of the whole pass: that is what M backwards on its graph say, too.
    exact(net, lambda x: (net.first(x) * net.counted(ids)).tanh(), factors=3, separate=1)


def test_a_tied_weight_is_noticed_by_its_numbers() -> None:
    net = Net()

    def forward(x: Tensor) -> Tensor:
        return functional.linear(net.first(x).tanh(), net.first.weight).sin()

    with pytest.warns(UserWarning, match=r"group gradients of first\.weight are not a sum over the rows"):
        rows, expected, whole = split(net, forward)
    close(rows, expected, 1e-13)
    for _ in range(2):  # remembered, and no more warnings
        rows, expected, _ = split(net, forward, whole)
        close(rows, expected, 1e-13)
    assert whole._ways == {FACTORS: 1, SEPARATE: 1, SHARED: 0}


def test_rows_that_are_not_the_batchs_are_noticed_by_their_numbers() -> None:
    """As many as the batch has, but in another order: only the uneven weights tell."""
    net = Net(last=nn.Linear(WIDTH, WIDTH))
    order = torch.tensor([5, 4, 3, 2, 1, 0])

    def forward(x: Tensor) -> Tensor:
        return net.last(net.first(x).tanh()[order]).sin()[order]

    with pytest.warns(UserWarning, match=r"last\.weight and 1 more parameters"):
        rows, expected, whole = split(net, forward)
    close(rows, expected, 1e-13)
    assert whole._ways[SEPARATE] == 2


def test_a_wrong_product_is_noticed(monkeypatch: pytest.MonkeyPatch, directories: Directories) -> None:
    """The control of the check."""
    original = _modules._norm

    def wrong(module: nn.Module, x: Tensor, grad: Tensor, rows: _modules.Rows) -> None:
        original(module, x, 2 * grad, rows)

    monkeypatch.setattr(_modules, "_norm", wrong)
    model = make_model(directories["bert"], "lora_ffn", True).eval()
    scatter_weights(model)
    updater = make_updater(model)
    with pytest.warns(UserWarning, match="LayerNorm"):
        rows, expected = rows_of_one_pass(updater)
    close(rows, expected, 1e-5)  # what is below the check's own tolerance stays


def test_experts_of_ones_own_take_a_backward_a_group(directories: Directories) -> None:
    model = make_model(directories["bert"], "full_ffn").eval()
    scatter_weights(model)

    class Own(FFNExperts):
        add_gradients = Experts.add_gradients

    model.bank.experts.__class__ = Own
    updater = make_updater(model)
    assert updater.whole is not None
    close(*rows_of_one_pass(updater), 1e-12)
    assert updater.whole._ways[SEPARATE] == 4


def test_what_is_not_finite_is_not_called_wrong() -> None:
    net = Net()
    with torch.no_grad():
        net.first.weight[0, 0] = float("nan")
    rows, _, whole = split(net, lambda x: net.first(x).tanh())
    assert rows.isnan().any()
    assert whole._ways[SEPARATE] == 0


# --------------------------------------------------------------------------------------------------
# Nothing is read back from the device
# --------------------------------------------------------------------------------------------------


class NoReadBack(TorchDispatchMode):
    """Fails where a GPU would have to wait for a number or for a size."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        waits = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
        assert not name.startswith(waits), name
        return func(*args, **(kwargs or {}))


def test_the_combination_reads_nothing_back() -> None:
    rows = torch.randn(7, 50)
    expected = CAGrad().combine(rows)
    with NoReadBack():
        found = CAGrad().combine(rows)
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            float(found.sum())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("site", ["lora_ffn", "lora_head", "full_ffn"])
def test_a_checked_pass_reads_nothing_back(
    directories: Directories, site: str, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of complete FFN experts where products of unknown sizes are one kernel."""

    def product(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        own = torch.searchsorted(offs, torch.arange(a.shape[0 if b.dim() == 3 else 1]), right=True)
        own = (own.unsqueeze(1) == torch.arange(len(offs))).to(a.dtype)
        return torch.einsum("nq,gqp,ng->np" if b.dim() == 3 else "pn,nq,ng->gpq", a, b, own)

    monkeypatch.setattr(functional, "grouped_mm", product)
    monkeypatch.setattr(ffn, "can_group", lambda *_: True)
    model = make_model(directories["bert"], site, trained).train()
    updater = make_updater(model)
    assert updater.whole is not None
    groups = updater.schedule.groups(0)
    for number in range(3):
        with updater.whole.recording():
            losses, weights = updater.group_losses(groups, 0, len(groups))
            rows = losses.new_empty(len(groups), updater.whole.size)
            grouping = weights.grouping
            if number < 2:
                updater.whole.fill(losses, weights.task_weights, grouping, rows)
            else:
                with NoReadBack():
                    updater.whole.fill(losses, weights.task_weights, grouping, rows)
