"""Every backbone with every expert site, against transformers' own forward and against itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel

from gar.config import CacheConfig, build
from gar.errors import UserError
from gar.features.sources import RawSource
from gar.methods import GAR
from gar.model import Known, MultiTaskModel, SiteState, evaluating
from gar.model._architecture import ARCHITECTURES, architecture, pool
from gar.training import Updater
from support.tiny import relative_error
from support.tiny_backbones import (
    DECODERS,
    KINDS,
    SITES,
    TASKS,
    Directories,
    all_tokens,
    make_model,
    make_splits,
    save_backbone,
    scatter_weights,
)

EXACT = 1e-10
every_backbone = pytest.mark.parametrize("kind", KINDS)
every_site = pytest.mark.parametrize("site", SITES)
frozen_or_not = pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return Directories(tmp_path_factory.mktemp("backbones"))


def pooled_hidden(model: MultiTaskModel) -> tuple[Tensor, tuple[Any, ...]]:
    """What the heads see for all examples, [B, d], and the tokens behind it."""
    seen: list[Tensor] = []
    modules = [model.head] if hasattr(model, "head") else list(model.heads.values())
    handles = [module.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for module in modules]
    tokens, segments = all_tokens(model, make_splits(model))
    with torch.no_grad():
        model.suffix(model.prefix(*tokens).to(model.device, model.dtype), segments)
    for handle in handles:
        handle.remove()
    return torch.cat(seen), tokens


def dense_hidden(directory: str, tokens: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    """Masked mean of the last hidden state of the model as transformers runs it."""
    dense = AutoModel.from_pretrained(directory, dtype=dtype).eval()
    ids, mask, types = tokens
    uses_types = types is not None and getattr(dense.config, "type_vocab_size", 0) > 1
    with torch.no_grad():
        states = dense(
            input_ids=ids, attention_mask=mask.long(), **({"token_type_ids": types} if uses_types else {})
        ).last_hidden_state
    return torch.stack(
        [row[valid].to(torch.float64).mean(0) for row, valid in zip(states, mask, strict=True)]
    )


def steep_router(model: MultiTaskModel) -> None:
    """Uneven, far from uniform gates."""
    with torch.no_grad():
        for parameter in model.bank.router.parameters():
            parameter.copy_(2 * torch.randn_like(parameter))


def gradients(
    model: MultiTaskModel, observation: str = "one_pass", seed: int = 1
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and ``.grad`` of one GAR update with uneven groups, in training mode."""
    splits = make_splits(model)
    source = RawSource(model, splits, CacheConfig())
    names = [task.name for task in TASKS]
    config = build(
        {
            "method": GAR(coefficient=10.0),
            "mixture": {"batch_size": 5, "group_size": 2},
            "observation": observation,
            "seed": seed,
        }
    )
    updater = Updater(model.train(), source, config, names)
    groups = updater.schedule.groups(0)
    assert [len(group) for group in groups] == [2, 2, 1, 2, 1]
    losses = updater.gradients(groups, 0).losses
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        scale = max(float(tensor.abs().max()), 1e-3 * largest)
        assert float((found[name] - tensor).abs().max()) <= tolerance * scale, name


# --------------------------------------------------------------------------------------------------
# The model at initialisation is the pretrained one
# --------------------------------------------------------------------------------------------------


@every_backbone
@every_site
@frozen_or_not
@pytest.mark.parametrize("top_k", [1, 2])
def test_at_initialisation_the_model_is_the_dense_one(
    directories: Directories, kind: str, site: str, trainable: bool, top_k: int
) -> None:
    model = make_model(directories[kind], site, trainable, top_k=top_k).eval()
    steep_router(model)
    found, tokens = pooled_hidden(model)
    expected = dense_hidden(directories[kind], tokens, torch.float64)
    assert (found - expected).abs().max() < EXACT
    scatter_weights(model)
    moved = (pooled_hidden(model)[0] - expected).abs().max()
    assert (moved > 1e-3) == (site != "lora_head")  # the control: other experts give another model


@every_backbone
@every_site
def test_a_frozen_half_precision_backbone_has_a_float32_site(
    directories: Directories, kind: str, site: str
) -> None:
    model = make_model(directories[kind], site, dtype="bfloat16").eval()
    assert {p.dtype for p in model.backbone.parameters()} == {torch.bfloat16}
    assert {p.dtype for name, p in model.named_parameters() if not name.startswith("backbone.")} == {
        torch.float32
    }
    tokens, segments = all_tokens(model, make_splits(model))
    state = model.prefix(*tokens)
    if state.base.dim() == 2:
        assert state.base.dtype == torch.float32  # a mean in half precision would lose digits
    output = model.suffix(state.to(model.device, model.dtype), segments)
    assert {t.dtype for t in (*output.logits, output.routing.logits, output.routing.gates)} == {torch.float32}
    found, tokens = pooled_hidden(model)
    expected = dense_hidden(directories[kind], tokens, torch.bfloat16)
    assert relative_error(found.double(), expected) < 2e-2


@every_backbone
def test_the_ffn_input_is_the_routing_input(directories: Directories, kind: str) -> None:
    """x is what the final FFN module receives, and the experts' output is added to what it returns."""
    model = make_model(directories[kind], "lora_ffn").eval()
    dense = AutoModel.from_pretrained(directories[kind], dtype=torch.float64).eval()
    entry = ARCHITECTURES[kind]
    layer = dense.get_submodule(entry.layers)[-1]
    (ids, mask, types), segments = all_tokens(model, make_splits(model))
    scatter_weights(model)
    seen: dict[str, Tensor] = {}

    def first(module: Any, args: Any) -> None:
        seen["x"] = args[0]

    def add(module: Any, args: Any, output: Tensor) -> Tensor:
        return output + model.bank(seen["x"], mask)[0]

    layer.get_submodule(entry.ffn_input).register_forward_pre_hook(first)
    layer.get_submodule(entry.output or entry.ffn_input).register_forward_hook(add)
    if types is None or getattr(dense.config, "type_vocab_size", 0) < 2:
        arguments = {}
    else:
        arguments = {"token_type_ids": types}
    with torch.no_grad():
        states = dense(input_ids=ids, attention_mask=mask.long(), **arguments).last_hidden_state
        state = model.prefix(ids, mask, types)
        logits = model.suffix(state, segments).logits
    assert state.x is not None
    assert torch.equal(state.x[mask], seen["x"][mask])
    hidden = pool(states, mask, "mean").split([n for _, n in segments])
    for found, head, part in zip(logits, model.heads.values(), hidden, strict=True):
        assert (found - head(part)).abs().max() < EXACT


# --------------------------------------------------------------------------------------------------
# Gradients
# --------------------------------------------------------------------------------------------------


def task_loss(model: MultiTaskModel) -> Tensor:
    splits = make_splits(model)
    tokens, segments = all_tokens(model, splits)
    output = model.suffix(model.prefix(*tokens), segments)
    labels = [torch.from_numpy(split.labels) for split in splits]
    return sum(
        (functional.cross_entropy(a, b) for a, b in zip(output.logits, labels, strict=True)),
        start=torch.zeros((), dtype=model.dtype),
    )


@every_backbone
@every_site
@frozen_or_not
@pytest.mark.parametrize("top_k", [1, 2])
def test_every_trainable_parameter_has_a_gradient_and_no_other(
    directories: Directories, kind: str, site: str, trainable: bool, top_k: int
) -> None:
    model = make_model(directories[kind], site, trainable, top_k=top_k)
    scatter_weights(model)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == any(name.startswith("backbone.") for name in names)
    task_loss(model).backward()
    for name, parameter in model.named_parameters():
        if name in names:
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
        else:
            assert parameter.grad is None, name
    router = model.bank.router.weight.grad
    assert router is not None
    assert router.norm() > 0
    for slot in model.bank.experts.slots:  # the first experts' weights move, of every slot
        assert getattr(model.bank.experts, slot).grad.norm() > 0, slot
    if trainable:
        embedding = model.backbone.get_input_embeddings().weight.grad
        assert embedding is not None
        assert embedding.norm() > 0


@every_backbone
@every_site
@frozen_or_not
def test_one_pass_and_per_group_give_the_same_update(
    directories: Directories, kind: str, site: str, trainable: bool
) -> None:
    model = make_model(directories[kind], site, trainable, dropout=0.25)
    scatter_weights(model)
    losses, reference = gradients(model, "per_group")
    again, found = gradients(model, "one_pass")
    assert torch.equal(losses, again)
    # The decoders' norm computes in float32 whatever its input, so that scaling a loss rounds differently.
    assert_same(found, reference, 1e-6 if kind in DECODERS else EXACT)


@every_backbone
@every_site
@pytest.mark.parametrize("dropout", ["dropout", "no dropout"])
def test_gradient_checkpointing_changes_nothing(
    directories: Directories, kind: str, site: str, dropout: str
) -> None:
    results = []
    for checkpointing in (False, True):
        model = make_model(
            directories[kind],
            site,
            trainable=True,
            dropout=0.2 if dropout == "dropout" else 0.0,
            backbone={"gradient_checkpointing": checkpointing},
        )
        assert model.backbone.is_gradient_checkpointing == checkpointing
        if dropout == "no dropout":
            without_dropout(model)
        scatter_weights(model)
        results.append(gradients(model))
        # Nothing stays behind in the backbone.
        assert not any(module._forward_pre_hooks for module in model.backbone.modules())
    (losses, plain), (again, checkpointed) = results
    assert torch.equal(losses, again)
    assert_same(checkpointed, plain, EXACT)
    model.eval()
    if dropout == "dropout":
        quiet = [make_model(directories[kind], site, trainable=True, dropout=0.0) for _ in range(2)]
        for other in quiet:
            scatter_weights(other)
        without_dropout(quiet[1])
        noisy, calm = (gradients(other)[0] for other in quiet)
        assert not torch.allclose(noisy, calm)  # the control: the backbone's own dropout is on


def without_dropout(model: MultiTaskModel) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010


# --------------------------------------------------------------------------------------------------
# Padding, halves, modes
# --------------------------------------------------------------------------------------------------


@every_backbone
@every_site
@frozen_or_not
def test_padding_to_twice_the_length_changes_nothing(
    directories: Directories, kind: str, site: str, trainable: bool
) -> None:
    model = make_model(directories[kind], site, trainable).eval()
    scatter_weights(model)
    splits = make_splits(model)
    (ids, mask, types), segments = all_tokens(model, splits)
    more = min(ids.shape[1], 38 - ids.shape[1])
    pad = model.tokenizer.pad_token_id
    longer = (
        functional.pad(ids, (0, more), value=pad),
        functional.pad(mask, (0, more)),
        None if types is None else functional.pad(types, (0, more)),
    )
    with torch.no_grad():
        short = model.suffix(model.prefix(ids, mask, types), segments)
        long = model.suffix(model.prefix(*longer), segments)
        alone = [
            model.suffix(model.prefix(*model.tokens([(split, np.array([row]))])), [(name, 1)]).logits[0]
            for (name, size), split in zip(segments, splits, strict=True)
            for row in range(size)
        ]
    for a, b in zip(short.logits, long.logits, strict=True):
        assert (a - b).abs().max() < (1e-6 if kind in DECODERS else EXACT)
    found = [row for logits in short.logits for row in logits.split(1)]
    for a, b in zip(found, alone, strict=True):
        assert (a - b).abs().max() < (1e-6 if kind in DECODERS else EXACT)
    gates = short.routing.example_gates() - long.routing.example_gates()
    assert gates.abs().max() < (1e-6 if kind in DECODERS else EXACT)
    valid = long.routing.mask
    if valid is not None:
        assert not long.routing.selected[~valid].any()
        assert (long.routing.gates[~valid] == 0).all()


@every_backbone
def test_what_is_known_of_tokens_changes_nothing(directories: Directories, kind: str) -> None:
    """The mask that nobody has to look at, and DeBERTa's positions for a longer text."""
    model = make_model(directories[kind], trainable=True).eval()
    ids, mask, types = all_tokens(model, make_splits(model))[0]
    width = ids.shape[1]
    table = model.positions(width + 3)
    assert (table is not None) == kind.startswith("deberta")
    table = None if table is None else table[:, :width, :width]
    with torch.no_grad():
        for valid, padded in ((mask, True), (torch.ones_like(mask), False)):
            expected = model.prefix(ids, valid, types)
            for known in (Known(padded), Known(padded, table)):
                found = model.prefix(ids, valid, types, known)
                for mine, theirs in ((found.x, expected.x), (found.base, expected.base)):
                    assert mine is not None
                    assert theirs is not None
                    mine, theirs = (  # what stands at padding is read by nobody
                        t.masked_fill(~valid.unsqueeze(-1), 0) if t.dim() == 3 else t for t in (mine, theirs)
                    )
                    assert (mine - theirs).abs().max() < EXACT
    assert not any(module._forward_pre_hooks for module in model.backbone.modules())


@every_backbone
@every_site
@frozen_or_not
def test_the_two_halves_are_one_forward(
    directories: Directories, kind: str, site: str, trainable: bool
) -> None:
    model = make_model(directories[kind], site, trainable)
    scatter_weights(model)
    assert model.training
    assert model.backbone.training == trainable
    assert all(m.training == trainable for m in model.backbone.modules())
    tokens, segments = all_tokens(model, make_splits(model))
    enabled: list[bool] = []
    handle = model.backbone.register_forward_hook(lambda *_: enabled.append(torch.is_grad_enabled()))
    state = model.prefix(*tokens)
    handle.remove()
    assert enabled == [trainable]
    assert state.base.requires_grad == trainable
    assert state.x is None or state.x.requires_grad == trainable
    assert (state.x is None) == (site == "lora_head")
    if not trainable:  # a function of the input alone: no dropout even in training mode
        again = model.prefix(*tokens)
        assert torch.equal(state.base, again.base)
    with evaluating(model), torch.no_grad():
        whole = model.suffix(model.prefix(*tokens), segments).logits
        halves = [
            model.prefix(tokens[0][rows], tokens[1][rows], None if tokens[2] is None else tokens[2][rows])
            for rows in (slice(3), slice(3, 8))
        ]
        joined = SiteState(
            None if site == "lora_head" else torch.cat([h.x for h in halves if h.x is not None]),
            torch.cat([h.base for h in halves]),
            torch.cat([h.mask for h in halves]),
        )
        for a, b in zip(whole, model.suffix(joined, segments).logits, strict=True):
            assert (a - b).abs().max() < EXACT
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.backbone.modules())


@every_site
def test_a_failing_forward_leaves_no_hooks(directories: Directories, site: str) -> None:
    model = make_model(directories["bert"], site)
    with pytest.raises(IndexError):
        model.prefix(torch.full((1, 3), 10_000), torch.ones(1, 3, dtype=torch.bool))
    assert not any(module._forward_pre_hooks for module in model.backbone.modules())


@every_backbone
def test_full_ffn_experts_replace_the_dense_ffn(directories: Directories, kind: str) -> None:
    """The replaced FFN is neither stored nor trained, and the experts are its copies."""
    dense = AutoModel.from_pretrained(directories[kind], dtype=torch.float64)
    entry = ARCHITECTURES[kind]
    layer = dense.get_submodule(entry.layers)[-1]
    model = make_model(directories[kind], "full_ffn", trainable=True)
    first = torch.cat([layer.get_submodule(path).weight for path in entry.first])
    second = layer.get_submodule(entry.second).weight
    bank = model.bank.experts
    for expert in range(bank.count):
        assert torch.equal(bank.W1[expert], first)
        assert torch.equal(bank.W2[expert], second)
    names = [name for name, _ in model.named_parameters()]
    last = f"backbone.{entry.layers}.1."
    assert not [n for path in (*entry.first, entry.second) for n in names if n.startswith(last + path + ".")]
    assert len(names) == len(set(names))
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in {id(p): p for p in model.parameters()}.values()
    )


# --------------------------------------------------------------------------------------------------
# Pooling and refusals
# --------------------------------------------------------------------------------------------------


def test_pooling_takes_non_padding_tokens_on_either_side() -> None:
    states = torch.arange(24, dtype=torch.float64).reshape(2, 4, 3)
    mask = torch.tensor([[True, True, True, False], [False, True, True, False]])
    for how, expected in {
        "mean": [states[0, :3].mean(0), states[1, 1:3].mean(0)],
        "first": [states[0, 0], states[1, 1]],
        "last": [states[0, 2], states[1, 2]],
    }.items():
        assert torch.equal(pool(states, mask, how), torch.stack(expected)), how  # type: ignore[arg-type]
    half = torch.randn(1, 300, 3).to(torch.bfloat16)
    everything = torch.ones(1, 300, dtype=torch.bool)
    for how in ("mean", "first", "last"):
        assert pool(half, everything, how).dtype == torch.float32  # type: ignore[arg-type]
    assert torch.allclose(pool(half, everything, "mean"), half.float().mean(1), atol=1e-6)


@every_site
@pytest.mark.parametrize("kind", ["bert", "distilbert", "llama"])
@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_pooling_choices(directories: Directories, kind: str, site: str, pooling: str) -> None:
    model = make_model(directories[kind], site, backbone={"pooling": pooling}).eval()
    found, (ids, mask, types) = pooled_hidden(model)
    dense = AutoModel.from_pretrained(directories[kind], dtype=torch.float64).eval()
    arguments = {"token_type_ids": types} if kind == "bert" else {}
    with torch.no_grad():
        states = dense(input_ids=ids, attention_mask=mask.long(), **arguments).last_hidden_state
    rows = [row[valid] for row, valid in zip(states, mask, strict=True)]
    pick = {"mean": lambda t: t.mean(0), "first": lambda t: t[0], "last": lambda t: t[-1]}[pooling]
    assert (found - torch.stack([pick(row) for row in rows])).abs().max() < EXACT


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("albert", {"embedding_size": 6}, "its layers share one FFN"),
        (
            "gpt2",
            {"n_embd": 8, "n_layer": 1, "n_head": 2},
            "of type gpt2: not supported; expected one of bert",
        ),
        (
            "t5",
            {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
            "of type t5: not support",
        ),
    ],
)
def test_other_architectures_are_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], reason: str
) -> None:
    from transformers import AutoConfig

    from support.tiny_backbones import make_tokenizer

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = AutoConfig.for_model(
        kind, **({**small, **changes} if kind == "albert" else changes), vocab_size=40
    )
    AutoModel.from_config(config).save_pretrained(tmp_path)
    make_tokenizer("bert").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=reason) as refused:
        make_model(str(tmp_path), dtype="float32")
    assert "\n" not in str(refused.value)


def test_a_model_without_the_expected_layers_is_refused() -> None:
    fake = torch.nn.Linear(2, 2)
    fake.config = SimpleNamespace(model_type="bert")  # type: ignore[assignment]
    with pytest.raises(UserError, match="does not have the expected layers"):
        architecture(fake)


def test_refused_settings(directories: Directories, tmp_path: Path) -> None:
    chunked = save_backbone("bert", tmp_path / "chunked", chunk_size_feed_forward=4)
    steps = save_backbone("deberta-v2", tmp_path / "steps", z_steps=2)
    inner = str(save_backbone("modernbert", tmp_path / "inner", mlp_dropout=0.1))
    make_model(inner, "full_ffn")  # frozen: no dropout
    make_model(inner, "lora_ffn", trainable=True)
    refusals: list[tuple[str, dict[str, Any], str]] = [
        (str(chunked), {}, "chunk_size_feed_forward must be 0"),
        (str(steps), {}, "runs its last layer 2 times"),
        (directories["bert"], {"trainable": True, "dtype": "bfloat16"}, "bfloat16 for a trainable backbone"),
        (
            directories["bert"],
            {"backbone": {"max_length": 41}},
            "positions for 40 tokens; expected at most 40",
        ),
        (directories["roberta"], {"backbone": {"max_length": 39}}, "positions for 38 tokens"),
        (inner, {"site": "full_ffn", "trainable": True}, "dropout 0.1 inside its FFN"),
        (str(tmp_path), {}, "has no config.json"),
        (str(tmp_path / "nowhere"), {}, "no such directory"),
        ("./nowhere", {}, "no such directory"),
    ]
    for directory, options, reason in refusals:
        with pytest.raises(UserError, match=reason) as refused:
            make_model(directory, **options)
        assert "\n" not in str(refused.value)


def test_the_longest_allowed_input_runs(directories: Directories) -> None:
    for kind, limit in (("bert", 40), ("roberta", 38)):
        model = make_model(directories[kind], backbone={"max_length": limit})
        ((_, probability),) = [
            (label, sum(values.values())) for label, values in model.predict("first", ["the cat " * 60])
        ]
        assert probability == pytest.approx(1)


@pytest.mark.parametrize("damage", ["no weights", "cut", "another width", "missing", "bad json"])
def test_damaged_backbones_are_refused(tmp_path: Path, damage: str) -> None:
    from safetensors.torch import load_file, save_file

    directory = save_backbone("bert", tmp_path / "bert")
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    key = "encoder.layer.1.output.dense.weight"
    if damage == "no weights":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:2000])
    elif damage == "bad json":
        (directory / "config.json").write_text("{")
    else:
        wide = {key: torch.zeros(8, 13)} if damage == "another width" else {}
        save_file({k: v for k, v in tensors.items() if k != key} | wide, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"backbone\.name") as refused:
        make_model(str(directory))
    assert "\n" not in str(refused.value)
    if damage == "missing":
        assert key in str(refused.value)
