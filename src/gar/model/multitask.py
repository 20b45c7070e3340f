"""One multi-task model in two halves: ``prefix`` up to the expert site, ``suffix`` from it to the logits."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gar.config import BackboneConfig, ExpertsConfig
from gar.data.task import Split, Task
from gar.data.tokenize import TokenizedSplit, pad, tokenize_split
from gar.errors import UserError, one_of
from gar.model.architecture import (
    Capture,
    architecture,
    dense_ffn,
    pool,
    position_limit,
    remove_dense_ffn,
    site_tail,
)
from gar.model.backbone import PACKAGED, fingerprint, load_backbone, load_tokenizer
from gar.nn import RoutedExperts, RoutedFFN, RoutedHead, RoutedLoRA
from gar.routing import Routing
from gar.version import __version__

SectionT = TypeVar("SectionT", BackboneConfig, ExpertsConfig)
HEAD_STD = 0.02
CONFIG_FILE, WEIGHTS_FILE, BACKBONE_DIR = "config.json", "model.safetensors", "backbone"


class TaskInfo(NamedTuple):
    """What the model keeps of a task: its name, label names in index order, and text field names."""

    name: str
    labels: tuple[str, ...]
    text: tuple[str, ...] = ("text",)


@dataclass(frozen=True)
class SiteState:
    """What ``prefix`` hands to ``suffix`` for B examples.

    FFN sites: ``x`` [B, L, d] the routing and expert input, ``base`` what the experts' output is added to,
    [B, L, d], or already pooled [B, d] where nothing nonlinear follows, ``mask`` bool [B, L]. Head site:
    ``x`` is None and ``base`` [B, d] the pooled representation.
    """

    x: Tensor | None
    base: Tensor
    mask: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> SiteState:
        """Moved, with floating tensors in ``dtype``."""
        x = None if self.x is None else self.x.to(device, dtype, non_blocking=True)
        return SiteState(
            x, self.base.to(device, dtype, non_blocking=True), self.mask.to(device, non_blocking=True)
        )


class Output(NamedTuple):
    """Logits [n_i, C_i], one entry a segment, and the routing of the expert site."""

    logits: list[Tensor]
    routing: Routing


class Prediction(NamedTuple):
    """One text's answer: the label name and the probability of every label."""

    label: str
    probabilities: dict[str, float]


class MultiTaskModel(nn.Module):
    """A backbone, one routed expert site and classification heads.

    Build one with :meth:`from_pretrained`; ``tasks`` are :class:`TaskInfo` entries.
    """

    def __init__(
        self,
        backbone: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        tasks: Sequence[TaskInfo],
        experts: ExpertsConfig,
        config: BackboneConfig,
        precision: str = "float32",
    ) -> None:
        super().__init__()
        if config.trainable and config.dtype == "bfloat16":
            raise UserError(
                "backbone.dtype is bfloat16 for a trainable backbone; expected float32 weights, "
                "with precision: bfloat16 for speed"
            )
        self.tasks = {task.name: task for task in tasks}
        if not tasks or len(self.tasks) < len(tasks):
            raise UserError(f"task names must be distinct, at least one; got {[task.name for task in tasks]}")
        self.experts_config, self.config, self.precision = experts, config, precision
        self.tokenizer, self.backbone = tokenizer, backbone
        # What the frozen weights were: resuming, saving and the feature cache need to know.
        self._backbone_fingerprint: str | None = None
        if not config.trainable:
            backbone.requires_grad_(False).eval()
        width = int(backbone.config.hidden_size)
        entry = architecture(backbone)
        limit = position_limit(backbone)
        if limit is not None and config.max_length > limit:
            raise UserError(
                f"backbone.max_length is {config.max_length}, but {config.name} has positions for {limit} "
                f"tokens; expected at most {limit}"
            )
        self._tail: nn.Module | None = None
        self.tail: nn.Module | None = None
        self.residual_dropout = 0.0
        self.head: RoutedHead | None = None
        self.bank: RoutedExperts
        self._capture: Capture | None = None
        if experts.site != "lora_head":
            tail = site_tail(backbone, entry, experts.site)
            dense = dense_ffn(backbone, entry)
            if experts.site == "full_ffn":
                if config.trainable and dense.inner_dropout:
                    raise UserError(
                        f"backbone {config.name} has dropout {dense.inner_dropout} inside its FFN, which "
                        "full_ffn experts do not have; expected 0 in its config.json"
                    )
                self.bank = RoutedFFN.from_dense(
                    dense.first, dense.second, dense.activation, experts.count, experts.top_k
                )
                self.residual_dropout = dense.dropout if config.trainable else 0.0
                if not self.saves_backbone:
                    self._backbone_fingerprint = fingerprint(backbone)  # of the backbone as it was loaded
                remove_dense_ffn(backbone, entry)
            else:
                self.bank = RoutedLoRA(width, width, **self._lora_options())
            self._place_tail(tail)
            self._capture = Capture(backbone, entry, experts.site)
            self.heads = nn.ModuleDict({_key(task.name): _head(width, len(task.labels)) for task in tasks})
        else:
            classes = max(len(task.labels) for task in tasks)
            self.head = RoutedHead(width, classes, **self._lora_options())
            nn.init.normal_(self.head.base.weight, std=HEAD_STD)
            nn.init.zeros_(self.head.base.bias)
            object.__setattr__(self, "bank", self.head.deltas)  # a part of the head, not registered twice
        if config.dtype == "float64":
            self.double()
        elif not config.trainable:
            # Everything trained here stays in float32, whatever the frozen backbone is stored in.
            for name, module in self.named_children():
                if name != "backbone":
                    module.float()
        self.train()

    def _lora_options(self) -> dict[str, Any]:
        e = self.experts_config
        return {
            "experts": e.count,
            "rank": e.rank,
            "top_k": e.top_k,
            "alpha": e.alpha,
            "dropout": e.dropout,
            "dropout_mask": e.dropout_mask,
        }

    def _place_tail(self, tail: nn.Module | None) -> None:
        if tail is not None and not self.config.trainable:
            self.tail = copy.deepcopy(tail)  # frozen, free to have the experts' dtype
        elif tail is not None and any(tail is module for module in self.backbone.modules()):
            object.__setattr__(self, "_tail", tail)  # trained as part of the backbone, not registered twice
        else:
            self.tail = tail

    # ------------------------------------------------------------------ building

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path | BackboneConfig,
        tasks: Iterable[Task | TaskInfo] | Mapping[str, Sequence[str]] | None = None,
        experts: ExpertsConfig | Mapping[str, Any] | None = None,
        *,
        precision: str = "float32",
        seed: int = 0,
    ) -> Self:
        """Load a saved model (a directory of :meth:`save_pretrained`), or put new experts on a backbone.

        For a backbone (hub id, directory, ``"minilm"`` or a :class:`~gar.config.BackboneConfig`) give
        ``tasks``: loaded :class:`~gar.data.Task` objects, :class:`TaskInfo`, or a mapping of task name to
        label names. New weights depend on ``seed`` alone.
        """
        if not isinstance(name, BackboneConfig):
            saved = _saved_config(Path(name))
            if saved is not None:
                if tasks is not None or experts is not None:
                    raise UserError(f"{name} is a saved model and brings its own tasks and experts")
                return cls._load_saved(Path(name), saved)
            name = BackboneConfig(name=str(name))
        if tasks is None:
            raise UserError(
                f"{name.name} is a backbone without heads; give tasks=, or the directory of a saved model"
            )
        experts = experts if isinstance(experts, ExpertsConfig) else ExpertsConfig(**(experts or {}))
        tokenizer = load_tokenizer(name)
        backbone = load_backbone(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(backbone, tokenizer, _task_infos(tasks), experts, name, precision)

    @classmethod
    def _load_saved(cls, directory: Path, saved: dict[str, Any]) -> Self:
        config = _from_saved(BackboneConfig, saved["backbone"], directory)
        experts = _from_saved(ExpertsConfig, saved["experts"], directory)
        tasks = [TaskInfo(t["name"], tuple(t["labels"]), tuple(t["text"])) for t in saved["tasks"]]
        holds_backbone = (directory / BACKBONE_DIR).is_dir()
        backbone = load_backbone(config, directory / BACKBONE_DIR if holds_backbone else None)
        tokenizer = load_tokenizer(config, directory)
        model = cls(backbone, tokenizer, tasks, experts, config, saved.get("precision", "float32"))
        expected = saved.get("backbone_fingerprint")
        if not holds_backbone and (found := model.backbone_fingerprint) != expected:
            raise UserError(
                f"{directory}: trained on another {config.name}; its weights had fingerprint {expected}, "
                f"those found now have {found}"
            )
        model._load_weights(directory / WEIGHTS_FILE)
        return model.eval()

    def save_pretrained(self, directory: str | Path) -> None:
        """Write config.json, model.safetensors, and the tokenizer.

        A frozen backbone is stored by name and fingerprint, a trained one with its weights.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save_pretrained(directory)
        if self.saves_backbone:
            self.backbone.config.save_pretrained(directory / BACKBONE_DIR)
        save_file(self.owned_state(), directory / WEIGHTS_FILE, metadata={"format": "pt"})
        path = Path(self.config.name).expanduser()
        name = str(path.resolve()) if self.config.name != PACKAGED and path.is_dir() else self.config.name
        saved = {
            "format": "gar-multitask-model",
            "gar_version": __version__,
            "backbone": self.config.model_dump(mode="json") | {"name": name},
            "backbone_fingerprint": None if self.saves_backbone else self.backbone_fingerprint,
            "experts": self.experts_config.model_dump(mode="json"),
            "precision": self.precision,
            "tasks": [
                {"name": t.name, "labels": list(t.labels), "text": list(t.text)} for t in self.tasks.values()
            ],
        }
        # Written last: a directory with it is complete.
        (directory / CONFIG_FILE).write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")

    @property
    def saves_backbone(self) -> bool:
        """Whether a saved model holds the backbone's weights (not for a frozen pretrained one)."""
        return self.config.trainable or self.config.random_weights

    @property
    def backbone_fingerprint(self) -> str:
        """Digest of the backbone's weights as they are now."""
        if self._backbone_fingerprint is None or self.config.trainable:
            self._backbone_fingerprint = fingerprint(self.backbone)
        return self._backbone_fingerprint

    def owned_state(self) -> dict[str, Tensor]:
        """The tensors that a saved model holds: everything except a frozen pretrained backbone."""
        state = self.state_dict()
        if not self.saves_backbone:
            state = {k: v for k, v in state.items() if not k.startswith(("backbone.", "tail."))}
        return {k: v.detach().contiguous() for k, v in state.items()}

    def _load_weights(self, path: Path) -> None:
        try:
            stored = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from None
        self.load_owned_state(stored, str(path))

    def load_owned_state(self, stored: Mapping[str, Tensor], where: str) -> None:
        """Fill in tensors of :meth:`owned_state`; a missing, extra or misshapen one is an error."""
        if any(key.endswith(".router.selection_bias") for key in stored):
            self.bank.router.add_selection_bias()
        own = self.owned_state()
        if missing := sorted(own.keys() - stored.keys()):
            raise UserError(
                f"{where}: lacks {missing[0]!r}" + (f" and {len(missing) - 1} more" * (len(missing) > 1))
            )
        if extra := sorted(stored.keys() - own.keys()):
            raise UserError(f"{where}: has unknown key {extra[0]!r}")
        for key, tensor in own.items():
            if tensor.shape != stored[key].shape:
                raise UserError(
                    f"{where}: {key!r} has shape {tuple(stored[key].shape)}, expected {tuple(tensor.shape)}"
                )
        self.load_state_dict(dict(stored), strict=False)

    # ------------------------------------------------------------------ the two halves

    @property
    def device(self) -> torch.device:
        return self.bank.router.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of everything from the expert site on."""
        return self.bank.router.weight.dtype

    def train(self, mode: bool = True) -> Self:
        """Training mode; a frozen backbone stays in eval mode (no dropout)."""
        super().train(mode)
        if not self.config.trainable:
            self.backbone.eval()
        return self

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The configured precision of the computation."""
        if self.precision == "bfloat16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def prefix(self, input_ids: Tensor, mask: Tensor, token_type_ids: Tensor | None = None) -> SiteState:
        """Everything up to the expert site, from token ids [B, L] and a bool mask [B, L].

        Without gradients when the backbone is frozen: then it is a function of the input alone.
        """
        inputs: dict[str, Tensor] = {"input_ids": input_ids, "attention_mask": mask.long()}
        # Tokenizers may give type ids to backbones that have a single type or none at all.
        if token_type_ids is not None and getattr(self.backbone.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = token_type_ids

        def forward() -> Tensor:
            hidden: Tensor = self.backbone(**inputs).last_hidden_state
            return hidden

        with torch.set_grad_enabled(torch.is_grad_enabled() and self.config.trainable), self.autocast():
            if self._capture is None:
                return SiteState(None, pool(forward(), mask, self.config.pooling), mask)
            x, base = self._capture.run(forward)
            if self._site_tail is None:
                base = pool(base, mask, self.config.pooling)
            return SiteState(x, base, mask)

    def suffix(
        self, state: SiteState, segments: Sequence[tuple[str, int]], keep: Tensor | None = None
    ) -> Output:
        """From the expert site to the logits.

        ``segments`` names the task of consecutive rows: ``[("rte", 32), ("cb", 16)]``. ``keep`` is the
        experts' dropout mask, drawn by the caller (see :meth:`gar.nn.RoutedLoRA.dropout_shape`).
        """
        names = [name for name, _ in segments]
        sizes = [size for _, size in segments]
        with self.autocast():
            if self.head is not None:
                logits, routing = self.head(state.base, keep)
                return Output(list(logits.split(sizes)), routing)
            assert state.x is not None
            mixed, routing = self.bank(state.x, state.mask, keep)
            if self._site_tail is None:
                hidden = state.base + pool(mixed, state.mask, self.config.pooling)
            else:
                mixed = functional.dropout(mixed, self.residual_dropout, self.training)
                hidden = pool(self._site_tail(state.base + mixed), state.mask, self.config.pooling)
            parts = zip(names, hidden.split(sizes), strict=True)
            return Output([self.heads[_key(name)](part) for name, part in parts], routing)

    @property
    def _site_tail(self) -> nn.Module | None:
        return self.tail if self._tail is None else self._tail

    def trainable_parameters(self) -> list[nn.Parameter]:
        """All parameters with gradients, in a fixed order."""
        return [p for p in self.parameters() if p.requires_grad]

    # ------------------------------------------------------------------ use

    def tokens(
        self, parts: Sequence[tuple[TokenizedSplit, NDArray[np.int64]]]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """``(input_ids, mask, token_type_ids)`` of examples of one or more splits, padded to the longest."""
        assert self.tokenizer.pad_token_id is not None
        spans = [
            (split, slice(split.offsets[i], split.offsets[i + 1]))
            for split, indices in parts
            for i in indices
        ]
        ids = torch.from_numpy(
            pad([split.ids[span] for split, span in spans], int(self.tokenizer.pad_token_id))
        )
        lengths = torch.tensor([span.stop - span.start for _, span in spans])
        mask = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
        types = [None if split.types is None else split.types[span] for split, span in spans]
        type_ids = (
            None
            if any(t is None for t in types)
            else torch.from_numpy(pad([t for t in types if t is not None], 0))
        )
        device = self.device
        return ids.to(device), mask.to(device), None if type_ids is None else type_ids.to(device)

    @torch.inference_mode()
    def predict_probabilities(
        self, task: str, texts: Sequence[str], pairs: Sequence[str] | None = None, batch_tokens: int = 8192
    ) -> Tensor:
        """Probabilities [N, C] of a task's labels, in eval mode; the model's mode is left as it was.

        Rows sum to 1: a shared head that is wider than the task answers among the task's labels.
        """
        info = self.task(task)
        if (len(info.text) == 2) != (pairs is not None):
            raise UserError(
                f"task {task} takes {'a pair of texts' if len(info.text) == 2 else 'one text'} "
                f"({', '.join(info.text)}) per example"
            )
        split = Split(list(texts), np.zeros(len(texts), np.int64), None if pairs is None else list(pairs))
        tokens = tokenize_split(self.tokenizer, split, self.config.max_length)
        result = torch.empty(len(split), len(info.labels))
        with evaluating(self):
            for indices in length_bucketed(tokens.lengths, batch_tokens):
                state = self.prefix(*self.tokens([(tokens, indices)])).to(self.device, self.dtype)
                (logits,), _ = self.suffix(state, [(task, len(indices))])
                probabilities = logits[:, : len(info.labels)].float().softmax(-1).cpu()
                result[torch.from_numpy(indices)] = probabilities
        return result

    def predict(
        self, task: str, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[Prediction]:
        """Label names and probabilities for texts (and their pairs)."""
        labels = self.task(task).labels
        rows = self.predict_probabilities(task, texts, pairs).tolist()
        return [Prediction(labels[int(np.argmax(row))], dict(zip(labels, row, strict=True))) for row in rows]

    def task(self, name: str) -> TaskInfo:
        """A task by name, or an error with the nearest name."""
        if name not in self.tasks:
            raise one_of("task", name, self.tasks)
        return self.tasks[name]


def example_losses(output: Output, labels: Sequence[Tensor]) -> Tensor:
    """Cross-entropy of every example, [B], in float32 or wider."""
    wide = (logits.to(torch.promote_types(logits.dtype, torch.float32)) for logits in output.logits)
    pairs = zip(wide, labels, strict=True)
    return torch.cat([functional.cross_entropy(logits, label, reduction="none") for logits, label in pairs])


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, the former mode afterwards."""
    mode = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(mode)


def length_bucketed(lengths: NDArray[np.int64], batch_tokens: int) -> Iterator[NDArray[np.int64]]:
    """Indices of all examples, longest first, in batches of at most ``batch_tokens`` padded tokens.

    >>> [batch.tolist() for batch in length_bucketed(np.array([3, 9, 4]), 10)]
    [[1], [2, 0]]
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // max(1, int(lengths[order[start]])))
        yield order[start : start + size]
        start += size


def _head(width: int, classes: int) -> nn.Linear:
    head = nn.Linear(width, classes)
    nn.init.normal_(head.weight, std=HEAD_STD)
    nn.init.zeros_(head.bias)
    return head


def _key(task: str) -> str:
    # torch forbids dots in module names, and an attribute name must not collide with a method.
    return "task_" + task.replace("%", "%25").replace(".", "%2E")


def _task_infos(tasks: Iterable[Task | TaskInfo] | Mapping[str, Sequence[str]]) -> list[TaskInfo]:
    if isinstance(tasks, Mapping):
        return [TaskInfo(name, tuple(labels)) for name, labels in tasks.items()]
    return [TaskInfo(task.name, tuple(task.labels), tuple(task.text)) for task in tasks]


def _saved_config(directory: Path) -> dict[str, Any] | None:
    try:
        saved = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return saved if isinstance(saved, dict) and saved.get("format") == "gar-multitask-model" else None


def _from_saved(cls: type[SectionT], values: dict[str, Any], directory: Path) -> SectionT:
    known = {key: value for key, value in values.items() if key in cls.model_fields}
    if unknown := sorted(values.keys() - known.keys()):
        warnings.warn(
            f"{directory}: ignoring {', '.join(unknown)}, saved by a newer version of gar",
            UserWarning,
            stacklevel=4,
        )
    return cls(**known)
