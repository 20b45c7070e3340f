"""Where the experts sit, one class a site (specification, section 3).

A site builds the experts on a backbone, reads their input while the backbone runs, and goes from there to
the logits. Whatever differs between sites is a method or an attribute of these classes; nobody else asks
which site it is.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from gar.config import BackboneConfig, ExpertsConfig
from gar.errors import UserError, one_of
from gar.model._architecture import (
    Architecture,
    Capture,
    dense_ffn,
    last_layer,
    module_at,
    norm_behind,
    pool,
    remove_dense_ffn,
)
from gar.nn import RoutedExperts, RoutedFFN, RoutedHead, RoutedLoRA
from gar.nn.head import LinearHeads
from gar.routing import Routing

HEAD_STD = 0.02


@dataclass(frozen=True)
class SiteState:
    """What ``prefix`` hands to ``suffix`` for B examples.

    FFN sites: ``x`` [B, L, d] the routing and expert input, ``base`` what the experts' output is added to,
    [B, L, d], or already pooled [B, d] where nothing nonlinear follows, ``mask`` bool [B, L]. Head site:
    ``x`` is None and ``base`` [B, d] the pooled representation. ``rows`` bool [B] marks the examples that
    count, None: all do.
    """

    x: Tensor | None
    base: Tensor
    mask: Tensor
    rows: Tensor | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> SiteState:
        """Moved, with floating tensors in ``dtype``."""
        x = None if self.x is None else self.x.to(device, dtype, non_blocking=True)
        base, mask = self.base.to(device, dtype, non_blocking=True), self.mask.to(device, non_blocking=True)
        return SiteState(
            x, base, mask, None if self.rows is None else self.rows.to(device, non_blocking=True)
        )


class Output(NamedTuple):
    """Logits [n_i, C_i], one entry a segment, and the routing of the expert site."""

    logits: list[Tensor]
    routing: Routing


@dataclass(frozen=True)
class Blueprint:
    """What a site is built from; ``classes`` maps a task's name to its number of labels."""

    backbone: PreTrainedModel
    entry: Architecture
    config: BackboneConfig
    experts: ExpertsConfig
    classes: Mapping[str, int]

    @property
    def width(self) -> int:
        """Of the hidden states."""
        return int(self.backbone.config.hidden_size)


class Site(ABC):
    """One expert site on one backbone.

    It is no module: the model registers :meth:`modules` under their own names, which are the names of saved
    weights.
    """

    #: What is routed: every token, or an example as a whole.
    unit: ClassVar[Literal["token", "example"]]
    #: Whether the experts take the place of the pretrained FFN, which then leaves the backbone.
    replaces_ffn: ClassVar[bool] = False

    bank: RoutedExperts
    #: What is applied after adding the experts' output, or None.
    tail: nn.Module | None = None

    @abstractmethod
    def __init__(self, plan: Blueprint) -> None: ...

    @abstractmethod
    def modules(self) -> dict[str, nn.Module]:
        """What lies outside of the backbone, by its name in the model, in the order of parameters."""

    @abstractmethod
    def read(self, forward: Callable[[], Tensor], mask: Tensor) -> SiteState:
        """The site's input; ``forward`` runs the backbone and returns the last hidden state [B, L, d]."""

    @abstractmethod
    def output(self, state: SiteState, segments: Sequence[tuple[str, int]], keep: Tensor | None) -> Output:
        """From the site's input to the logits; see :meth:`gar.MultiTaskModel.suffix`."""

    def losses(
        self, state: SiteState, segments: Sequence[tuple[str, int]], labels: Tensor, keep: Tensor | None
    ) -> Tensor:
        """Cross-entropy of every example, [B]; see :meth:`gar.MultiTaskModel.losses`."""
        output = self.output(state, segments, keep)
        return example_losses(output, labels.split([size for _, size in segments]))

    @abstractmethod
    def units(self, rows: int, length: int) -> tuple[int, ...]:
        """Shape of the routed units of ``rows`` examples, padded to ``length`` tokens."""

    @abstractmethod
    def load(self, gates: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Load vector [E] of n examples: ``gates`` [n, E] are their ``q_n``, ``counts`` [E] selections."""

    @property
    def dropout(self) -> float:
        """Rate of the dropout on the experts' input."""
        return self.bank.dropout if isinstance(self.bank, RoutedLoRA) else 0.0

    def dropout_shape(self, rows: int, length: int) -> tuple[int, ...] | None:
        """Shape of the experts' dropout mask for such units, or None where they have no dropout."""
        if not isinstance(self.bank, RoutedLoRA) or self.bank.dropout == 0:
            return None
        return self.bank.dropout_shape(self.units(rows, length))


class _FFNSite(Site):
    """Token-routed experts at the final FFN: ``tail(base + experts(x))``, pooled, then a head per task."""

    unit = "token"

    def __init__(self, plan: Blueprint) -> None:
        self._pool = partial(pool, how=plan.config.pooling)
        self.tail = self._find_tail(plan)
        self.residual_dropout = nn.Dropout(0.0)
        self.bank = self._build(plan)
        layer, entry = last_layer(plan.backbone, plan.entry), plan.entry
        self._capture = Capture(module_at(layer, entry.ffn_input), self._find_residual(layer, entry))
        if self.tail is not None and not plan.config.trainable:
            self.tail = copy.deepcopy(self.tail)  # frozen, free to have the experts' dtype
        #: A tail that is trained as a part of the backbone must not be registered twice.
        self._own_tail = not any(self.tail is module for module in plan.backbone.modules())
        self.heads = LinearHeads({_key(task): _new_head(plan.width, n) for task, n in plan.classes.items()})
        self._tasks = tuple(plan.classes)

    def _find_tail(self, plan: Blueprint) -> nn.Module | None:
        raise NotImplementedError

    def _find_residual(self, layer: nn.Module, entry: Architecture) -> nn.Module | None:
        """The module whose input is ``base``; None where that is the last hidden state."""
        raise NotImplementedError

    def _build(self, plan: Blueprint) -> RoutedExperts:
        raise NotImplementedError

    def modules(self) -> dict[str, nn.Module]:
        tail = {"tail": self.tail} if self.tail is not None and self._own_tail else {}
        return {"bank": self.bank, **tail, "heads": self.heads, "residual_dropout": self.residual_dropout}

    def read(self, forward: Callable[[], Tensor], mask: Tensor) -> SiteState:
        x, base = self._capture.run(forward)
        return SiteState(x, self._pool(base, mask) if self.tail is None else base, mask)

    def output(self, state: SiteState, segments: Sequence[tuple[str, int]], keep: Tensor | None) -> Output:
        hidden, routing = self._hidden(state, keep)
        parts = hidden.split([size for _, size in segments])
        heads = [self._head(name) for name, _ in segments]
        return Output([head(part) for head, part in zip(heads, parts, strict=True)], routing)

    def losses(
        self, state: SiteState, segments: Sequence[tuple[str, int]], labels: Tensor, keep: Tensor | None
    ) -> Tensor:
        # All heads in one product, of which every example takes the columns of its task: few kernels.
        hidden, _ = self._hidden(state, keep)
        heads = {name: self._head(name) for name, _ in segments}
        places = {name: i for i, name in enumerate(heads)}
        columns, missing = _columns(
            tuple((places[name], size) for name, size in segments),
            tuple(head.out_features for head in heads.values()),
            hidden.device,
        )
        logits = _wide(self.heads(hidden, tuple(map(_key, heads)))).gather(1, columns)
        if missing is not None:
            logits = logits.masked_fill(missing, float("-inf"))
        return functional.cross_entropy(logits, labels, reduction="none")

    def _hidden(self, state: SiteState, keep: Tensor | None) -> tuple[Tensor, Routing]:
        """What the heads see, [B, d]."""
        assert state.x is not None
        mixed, routing = self.bank(state.x, state.mask, keep)
        if self.tail is None:
            return state.base + self._pool(mixed, state.mask), routing
        return self._pool(self.tail(state.base + self.residual_dropout(mixed)), state.mask), routing

    def _head(self, task: str) -> nn.Linear:
        if task not in self._tasks:
            raise one_of("task", task, self._tasks)
        head = self.heads[_key(task)]
        assert isinstance(head, nn.Linear)
        return head

    def units(self, rows: int, length: int) -> tuple[int, ...]:
        return rows, length

    def load(self, gates: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
        mean: NDArray[np.float64] = gates.mean(0)
        return mean


class LoRAFFN(_FFNSite):
    """Site ``lora_ffn``: low-rank deltas added to what the final FFN module returns."""

    def _find_tail(self, plan: Blueprint) -> nn.Module | None:
        # An FFN module that ends in its own norm (BERT's ``output``) returns the last hidden state.
        return None if plan.entry.output is not None else norm_behind(plan.backbone, plan.entry)

    def _find_residual(self, layer: nn.Module, entry: Architecture) -> nn.Module | None:
        return self.tail

    def _build(self, plan: Blueprint) -> RoutedExperts:
        return RoutedLoRA(plan.width, plan.width, **_lora_options(plan.experts))


class FullFFN(_FFNSite):
    """Site ``full_ffn``: complete FFNs, copies of the pretrained one, in its place."""

    replaces_ffn = True

    def _find_tail(self, plan: Blueprint) -> nn.Module | None:
        return norm_behind(plan.backbone, plan.entry)

    def _find_residual(self, layer: nn.Module, entry: Architecture) -> nn.Module | None:
        # The residual alone: after a post-norm attention that is ``x`` itself.
        return module_at(layer, entry.pre_norm or entry.ffn_input)

    def _build(self, plan: Blueprint) -> RoutedExperts:
        dense, config, experts = dense_ffn(plan.backbone, plan.entry), plan.config, plan.experts
        if config.trainable and dense.inner_dropout:
            raise UserError(
                f"backbone {config.name} has dropout {dense.inner_dropout} inside its FFN, which "
                "full_ffn experts do not have; expected 0 in its config.json"
            )
        bank = RoutedFFN.from_dense(dense.first, dense.second, dense.activation, experts.count, experts.top_k)
        self.residual_dropout.p = dense.dropout if config.trainable else 0.0
        remove_dense_ffn(plan.backbone, plan.entry)
        return bank


class LoRAHead(Site):
    """Site ``lora_head``: one head of the widest task for all, with low-rank deltas routed by example.

    A task with fewer labels keeps its indices; the further logits take part in softmax and argmax. The head
    also answers for tasks that the model was not made with.
    """

    unit = "example"

    def __init__(self, plan: Blueprint) -> None:
        self._pool = partial(pool, how=plan.config.pooling)
        self.head = RoutedHead(plan.width, max(plan.classes.values()), **_lora_options(plan.experts))
        _initialize(self.head.base)
        self.bank = self.head.deltas

    def modules(self) -> dict[str, nn.Module]:
        return {"head": self.head}

    def read(self, forward: Callable[[], Tensor], mask: Tensor) -> SiteState:
        return SiteState(None, self._pool(forward(), mask), mask)

    def output(self, state: SiteState, segments: Sequence[tuple[str, int]], keep: Tensor | None) -> Output:
        logits, routing = self.head(state.base, keep, state.rows)
        return Output(list(logits.split([size for _, size in segments])), routing)

    def units(self, rows: int, length: int) -> tuple[int, ...]:
        return (rows,)

    def load(self, gates: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
        shares: NDArray[np.float64] = counts / counts.sum()
        return shares


def example_losses(output: Output, labels: Sequence[Tensor]) -> Tensor:
    """Cross-entropy of every example, [B], in float32 or wider."""
    pairs = zip(output.logits, labels, strict=True)
    return torch.cat(
        [functional.cross_entropy(_wide(logits), label, reduction="none") for logits, label in pairs]
    )


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@functools.lru_cache(maxsize=256)
def _columns(
    segments: tuple[tuple[int, int], ...], classes: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Which columns of all heads' logits are whose: int64 [B, C], and where a task has fewer than C labels.

    ``segments`` has head and size of consecutive rows, ``classes`` the labels of every head.
    """
    head = np.repeat([place for place, _ in segments], [size for _, size in segments])
    first, own = np.cumsum([0, *classes])[head][:, None], np.array(classes)[head][:, None]
    labels = np.arange(max(classes))[None]
    columns = torch.from_numpy(first + np.minimum(labels, own - 1)).to(device)
    return columns, torch.from_numpy(labels >= own).to(device) if len({*classes}) > 1 else None


#: By ``experts.site``.
SITES: dict[str, type[Site]] = {"lora_ffn": LoRAFFN, "full_ffn": FullFFN, "lora_head": LoRAHead}


def _lora_options(experts: ExpertsConfig) -> dict[str, Any]:
    names = ("rank", "top_k", "alpha", "dropout", "dropout_mask")
    return {"experts": experts.count, **{name: getattr(experts, name) for name in names}}


def _new_head(width: int, classes: int) -> nn.Linear:
    head = nn.Linear(width, classes)
    _initialize(head)
    return head


def _initialize(head: nn.Linear) -> None:
    nn.init.normal_(head.weight, std=HEAD_STD)
    nn.init.zeros_(head.bias)


def _key(task: str) -> str:
    # torch forbids dots in module names, and an attribute name must not collide with a method.
    return "task_" + task.replace("%", "%25").replace(".", "%2E")
