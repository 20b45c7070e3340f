"""Which module of which architecture is the final FFN, and what to read around it (specification, section 3).

A backbone's own forward runs unchanged; two read-only hooks take what the expert site needs:

* ``x``, the input of the final FFN: the routing input and the experts' input;
* ``base``, what the (gated sum of the) experts is added to, before the module called ``tail``.

The output of the site is ``tail(base + experts(x))``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gar.errors import UserError


@dataclass(frozen=True)
class Architecture:
    """Module paths; those of a layer are relative to it, ``final_norm`` is relative to the model."""

    layers: str
    ffn_input: str
    first: tuple[str, ...]
    activation: str
    second: str
    #: Post-norm: the norm behind the FFN's residual sum. None for pre-norm models.
    post_norm: str | None = None
    #: Post-norm, when the FFN module already contains its own residual and norm (BERT's ``output``).
    output: str | None = None
    #: Pre-norm: the norm before the FFN (its input is the residual) and the norm after the last layer.
    pre_norm: str | None = None
    final_norm: str | None = None
    #: Dropout between the FFN and its residual sum.
    dropout: str | None = None
    #: Dropout between the two linear layers, which the experts do not have.
    inner_dropout: str | None = None


_BERT = Architecture(
    layers="encoder.layer",
    ffn_input="intermediate",
    first=("intermediate.dense",),
    activation="intermediate.intermediate_act_fn",
    second="output.dense",
    post_norm="output.LayerNorm",
    output="output",
    dropout="output.dropout",
)
_DISTILBERT = Architecture(
    layers="transformer.layer",
    ffn_input="ffn",
    first=("ffn.lin1",),
    activation="ffn.activation",
    second="ffn.lin2",
    post_norm="output_layer_norm",
    dropout="ffn.dropout",
)
_MODERNBERT = Architecture(
    layers="layers",
    ffn_input="mlp",
    first=("mlp.Wi",),
    activation="mlp.act",
    second="mlp.Wo",
    pre_norm="mlp_norm",
    final_norm="final_norm",
    inner_dropout="mlp.drop",
)
_LLAMA = Architecture(
    layers="layers",
    ffn_input="mlp",
    first=("mlp.gate_proj", "mlp.up_proj"),
    activation="mlp.act_fn",
    second="mlp.down_proj",
    pre_norm="post_attention_layernorm",
    final_norm="norm",
)

ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "camembert", "electra", "deberta", "deberta-v2"), _BERT
    ),
    "distilbert": _DISTILBERT,
    "modernbert": _MODERNBERT,
    **dict.fromkeys(("qwen3", "qwen2", "llama", "mistral"), _LLAMA),
}


def architecture(model: PreTrainedModel) -> Architecture:
    """The entry of a loaded model, or the reason why it is not supported."""
    kind = model.config.model_type
    if kind == "albert":
        raise UserError(
            "backbone is of type albert: its layers share one FFN, so experts in the final layer would sit "
            "in every layer; expected an encoder with its own final FFN"
        )
    if getattr(model.config, "z_steps", 0) > 1:
        raise UserError(
            f"backbone of type {kind} runs its last layer {model.config.z_steps} times (z_steps in its "
            "config.json); expected a final FFN that runs once"
        )
    if kind not in ARCHITECTURES:
        raise UserError(
            f"backbone is of type {kind}: not supported; expected one of {', '.join(ARCHITECTURES)}"
        )
    entry = ARCHITECTURES[kind]
    try:
        layer = last_layer(model, entry)
        for path in (entry.ffn_input, *entry.first, entry.second):
            layer.get_submodule(path)
    except (AttributeError, IndexError) as error:
        raise UserError(f"backbone of type {kind} does not have the expected layers: {error}") from None
    return entry


def takes_ready_mask(model: PreTrainedModel) -> bool:
    """Whether the model hands a mask bool [B, 1, L, L] to torch's attention as it is, and None as no mask.

    Out of one [B, L] it makes the same mask, but first asks the device whether there is any padding.
    """
    plain = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")
    return model.config.model_type in plain and model.config._attn_implementation == "sdpa"


def relative_positions(model: PreTrainedModel, length: int, device: torch.device) -> Tensor | None:
    """DeBERTa's table of relative positions [1, L, L], None for other models.

    A forward computes it anew, and goes through the host for it, which a captured one cannot. It depends on
    the distance of two tokens alone: a shorter text has the first rows and columns of a longer one's.
    """
    encoder = getattr(model, "encoder", None)
    if not hasattr(encoder, "get_rel_pos"):
        return None
    states = torch.empty(1, length, 1, device=device)
    table: Tensor | None = encoder.get_rel_pos(states)  # type: ignore[union-attr]
    return table


@contextmanager
def given_positions(model: PreTrainedModel, table: Tensor | None) -> Iterator[None]:
    """In this block the model's encoder takes this table of :func:`relative_positions`."""
    if table is None:
        yield
        return

    def give(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {"relative_pos": table, **kwargs}

    handle = module_at(model, "encoder").register_forward_pre_hook(give, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def position_limit(model: PreTrainedModel) -> int | None:
    """The longest input that the position embeddings reach, or None for relative and rotary positions."""
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    if not isinstance(table, nn.Embedding):
        return None
    # RoBERTa counts its positions from behind the padding index.
    return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)


def module_at(model: nn.Module, path: str) -> nn.Module:
    """``model.get_submodule`` (transformers overrides its type)."""
    found: nn.Module = model.get_submodule(path)
    return found


def last_layer(model: nn.Module, entry: Architecture) -> nn.Module:
    """The final transformer layer."""
    layers = model.get_submodule(entry.layers)
    assert isinstance(layers, nn.ModuleList)
    return layers[-1]


def norm_behind(model: nn.Module, entry: Architecture) -> nn.Module:
    """The norm behind the final FFN's residual sum."""
    if entry.final_norm is not None:
        return module_at(model, entry.final_norm)
    assert entry.post_norm is not None
    return module_at(last_layer(model, entry), entry.post_norm)


class Capture:
    """Reads what enters two modules while the backbone runs; holds nothing afterwards.

    Several threads may do so at once, each with a forward of its own. Without a ``residual`` module, ``base``
    is the last hidden state.
    """

    def __init__(self, ffn_input: nn.Module, residual: nn.Module | None) -> None:
        self._input, self._residual = ffn_input, residual

    def run(self, forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """``(x, base)`` of one backbone forward that returns the last hidden state."""
        seen: dict[nn.Module, Tensor] = {}
        mine = threading.get_ident()

        def read(module: nn.Module, args: tuple[Any, ...]) -> None:
            if threading.get_ident() == mine:
                seen[module] = args[0]

        watched = {self._input, *([self._residual] if self._residual is not None else [])}
        handles = [module.register_forward_pre_hook(read) for module in watched]
        try:
            last = forward()
        finally:
            for handle in handles:
                handle.remove()
        return seen[self._input], last if self._residual is None else seen[self._residual]


@dataclass(frozen=True)
class DenseFFN:
    """The pretrained final FFN, to start the experts from."""

    first: list[nn.Linear]
    second: nn.Linear
    activation: Callable[[Tensor], Tensor]
    dropout: float
    inner_dropout: float = 0.0


def dense_ffn(model: PreTrainedModel, entry: Architecture) -> DenseFFN:
    """The parts of the final FFN."""
    layer = last_layer(model, entry)
    first = [layer.get_submodule(path) for path in entry.first]
    second = layer.get_submodule(entry.second)
    parent, _, name = entry.activation.rpartition(".")
    activation = getattr(layer.get_submodule(parent), name)
    outer, inner = (
        float(getattr(layer.get_submodule(path), "p", 0.0)) if path else 0.0
        for path in (entry.dropout, entry.inner_dropout)
    )
    return DenseFFN(first, second, activation, outer, inner)  # type: ignore[arg-type]


class _PassFirst(nn.Module):
    """Stands where the replaced FFN was, so that the backbone's own forward computes nothing there."""

    def forward(self, states: Tensor, *residual: Tensor) -> Tensor:
        return residual[0] if residual else states


def remove_dense_ffn(model: PreTrainedModel, entry: Architecture) -> None:
    """Take the final FFN's weights out of the backbone, with BERT's norm behind it (the site's tail)."""
    layer = last_layer(model, entry)
    setattr(layer, entry.ffn_input, _PassFirst())
    if entry.output is not None:
        setattr(layer, entry.output, _PassFirst())


def pool(states: Tensor, mask: Tensor, how: Literal["mean", "first", "last"]) -> Tensor:
    """[B, L, d] to [B, d] over non-padding tokens, in float32 or wider; padding may stand on either side."""
    wide = torch.promote_types(states.dtype, torch.float32)
    if how == "mean":
        weight = mask.to(states.dtype).unsqueeze(-1)
        return (states * weight).sum(1, dtype=wide) / weight.sum(1, dtype=wide).clamp(min=1)
    positions = torch.arange(mask.shape[1], device=mask.device)
    if how == "first":
        index = torch.where(mask, positions, mask.shape[1] - 1).min(1).values
    else:
        index = torch.where(mask, positions, 0).max(1).values
    return states[torch.arange(len(states), device=states.device), index].to(wide)
