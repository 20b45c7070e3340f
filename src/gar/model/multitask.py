"""One multi-task model in two halves: ``prefix`` up to the expert site, ``suffix`` from it to the logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gar.config import BackboneConfig, ExpertsConfig
from gar.data.task import Split, Task
from gar.data.tokenize import TokenizedSplit, tokenize_split
from gar.errors import UserError, one_of, user_path
from gar.model import _saved
from gar.model._architecture import (
    architecture,
    given_positions,
    position_limit,
    relative_positions,
    takes_ready_mask,
)
from gar.model._saved import CONFIG_FILE as CONFIG_FILE
from gar.model._saved import WEIGHTS_FILE
from gar.model.backbone import PACKAGED, Digest, Pretrained, load_backbone, load_tokenizer
from gar.model.sites import SITES, Blueprint, Output, SiteState
from gar.nn import RoutedExperts, RoutedHead
from gar.precision import PRECISIONS, computing_in, float32_products
from gar.version import __version__

#: Submodules that stay as they were loaded when the backbone is frozen.
FROZEN = ("backbone", "tail")


class TaskInfo(NamedTuple):
    """What the model keeps of a task: its name, label names in index order, and text field names."""

    name: str
    labels: tuple[str, ...]
    text: tuple[str, ...] = ("text",)


class Known(NamedTuple):
    """What is known of tokens [B, L] without a look at them.

    ``padded``: whether any is padding; ``positions``: :meth:`MultiTaskModel.positions` of L tokens, or None.
    """

    padded: bool
    positions: Tensor | None = None


class Prediction(NamedTuple):
    """One text's answer: the label name and the probability of every label."""

    label: str
    probabilities: dict[str, float]


class MultiTaskModel(nn.Module):
    """A backbone, one routed expert site and classification heads.

    Build one with :meth:`from_pretrained`; ``tasks`` are :class:`TaskInfo` entries. ``site`` is what differs
    between the places for experts, ``bank`` its experts; ``config``, ``experts_config`` and ``precision`` are
    the settings it was made with (together: :attr:`description`).
    """

    bank: RoutedExperts
    #: What the site brings: one head a task, or one for all.
    heads: nn.ModuleDict
    head: RoutedHead

    def __init__(
        self,
        backbone: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        tasks: Sequence[TaskInfo],
        experts: ExpertsConfig,
        config: BackboneConfig,
        precision: str = "float32",
        *,
        pretrained: Pretrained | None = None,
    ) -> None:
        super().__init__()
        if precision not in PRECISIONS:
            raise one_of("precision", precision, PRECISIONS)
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
        if not config.trainable:
            backbone.requires_grad_(False).eval()
        entry = architecture(backbone)
        limit = position_limit(backbone)
        if limit is not None and config.max_length > limit:
            raise UserError(
                f"backbone.max_length is {config.max_length}, but {config.name} has positions for {limit} "
                f"tokens; expected at most {limit}"
            )
        # Digest of the weights that the backbone's name stands for, before the site takes any out; None where
        # a saved model holds them anyway.
        self._digests = {"backbone": Digest(), "tail": Digest()}
        if pretrained is not None and pretrained.model is backbone:
            self._digests["backbone"] = pretrained.digest
        self._pretrained = None
        if not (config.trainable or config.random_weights):
            self._pretrained = pretrained.fingerprint if pretrained else self._digests["backbone"](backbone)
        classes = {task.name: len(task.labels) for task in tasks}
        self.site = SITES[experts.site](Blueprint(backbone, entry, config, experts, classes))
        for name, module in self.site.modules().items():
            self.add_module(name, module)
        object.__setattr__(self, "bank", self.site.bank)  # registered by the site, alone or inside the head
        if config.dtype == "float64":
            self.double()
        elif not config.trainable:
            # Everything trained here stays in float32, whatever the frozen backbone is stored in.
            for name, module in self.named_children():
                if name != "backbone":
                    module.float()
        if self._pretrained is not None:
            self._as_loaded = self._frozen_digests(None if self.site.replaces_ffn else self._pretrained)
        self.train()

    @property
    def description(self) -> dict[str, Any]:
        """The sections of a configuration that the model brings: ``backbone``, ``experts``, ``precision``."""
        return {"backbone": self.config, "experts": self.experts_config, "precision": self.precision}

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
        pretrained: Pretrained | None = None,
    ) -> Self:
        """Load a saved model (a directory of :meth:`save_pretrained`), or put new experts on a backbone.

        For a backbone (hub id, directory, ``"minilm"`` or a :class:`~gar.config.BackboneConfig`) give
        ``tasks``: loaded :class:`~gar.data.Task` objects, :class:`TaskInfo`, or a mapping of task name to
        label names. New weights depend on ``seed`` alone. ``pretrained`` is this backbone, loaded before.
        """
        if not isinstance(name, BackboneConfig):
            directory = user_path(name)
            saved = _saved.read(directory)
            if saved is not None:
                if tasks is not None or experts is not None:
                    raise UserError(f"{name} is a saved model and brings its own tasks and experts")
                return cls._load_saved(directory, saved)
            name = BackboneConfig(name=str(name))
        if tasks is None:
            raise UserError(
                f"{name.name} is a backbone without heads; give tasks=, or the directory of a saved model"
            )
        experts = experts if isinstance(experts, ExpertsConfig) else ExpertsConfig(**(experts or {}))
        if pretrained is None:
            tokenizer, backbone = load_tokenizer(name), load_backbone(name)
        elif pretrained.config != name:
            raise ValueError(f"pretrained is {pretrained.config}, expected {name}")
        else:
            tokenizer = pretrained.tokenizer
            backbone = pretrained.backbone(changes_backbone(name, experts))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            infos = _task_infos(tasks)
            return cls(backbone, tokenizer, infos, experts, name, precision, pretrained=pretrained)

    @classmethod
    def _load_saved(cls, directory: Path, saved: _saved.SavedModel) -> Self:
        expected = saved.backbone_fingerprint
        backbone = load_backbone(
            saved.backbone, directory / _saved.BACKBONE_DIR if expected is None else None
        )
        tokenizer = load_tokenizer(saved.backbone, directory)
        tasks = [TaskInfo(task.name, task.labels, task.text) for task in saved.tasks]
        model = cls(backbone, tokenizer, tasks, saved.experts, saved.backbone, saved.precision)
        if expected is None:
            model._pretrained = None
        elif model._pretrained not in (None, expected):
            raise UserError(
                f"{directory}: trained on another {saved.backbone.name}; its weights had fingerprint "
                f"{expected}, those found now have {model._pretrained}"
            )
        model.load_owned_state(_saved.read_weights(directory), str(directory / WEIGHTS_FILE))
        return model.eval()

    def load_weights(self, directory: str | Path) -> None:
        """Take over the weights of a saved model of the same making; its files are checked."""
        directory = Path(directory)
        if _saved.read(directory) is None:
            raise UserError(f"{directory}: holds no saved model; expected a directory of save_pretrained")
        self.load_owned_state(_saved.read_weights(directory), str(directory / WEIGHTS_FILE))

    def save_pretrained(self, directory: str | Path) -> None:
        """Write config.json, model.safetensors and the tokenizer, whole and on the disk, with checksums.

        A frozen backbone is stored by name and fingerprint; a trained one with its weights, and so is one
        whose weights were changed after it was loaded. Other files in the directory are left alone.
        """
        whole = self.saves_backbone or self._frozen_digests() != self._as_loaded

        def fill(working: Path) -> None:
            _forget_lengths(self.tokenizer)
            self.tokenizer.save_pretrained(working)
            if whole:
                self.backbone.config.save_pretrained(working / _saved.BACKBONE_DIR)
            save_file(self._state(whole), working / WEIGHTS_FILE, metadata={"format": "pt"})

        path = user_path(self.config.name)
        name = str(path.resolve()) if self.config.name != PACKAGED and path.is_dir() else self.config.name
        facts = {
            "format": _saved.FORMAT,
            "gar_version": __version__,
            "backbone": self.config.model_dump(mode="json") | {"name": name},
            "backbone_fingerprint": None if whole else self._pretrained,
            "experts": self.experts_config.model_dump(mode="json"),
            "precision": self.precision,
            "tasks": [
                {"name": t.name, "labels": list(t.labels), "text": list(t.text)} for t in self.tasks.values()
            ],
        }
        _saved.write(Path(directory), facts, fill)

    @property
    def saves_backbone(self) -> bool:
        """Whether the model's own state has the backbone's weights (not those of a frozen pretrained one)."""
        return self._pretrained is None

    @property
    def backbone_fingerprint(self) -> str:
        """Digest of the backbone's weights as they are now: looked at anew, for nothing tells of a change."""
        return self._digests["backbone"](self.backbone)

    def _frozen_digests(self, backbone: str | None = None) -> dict[str, str]:
        parts = {name: module for name, module in self.named_children() if name in FROZEN}
        known = {} if backbone is None else {"backbone": backbone}
        return {name: known.get(name) or self._digests[name](module) for name, module in parts.items()}

    def owned_state(self) -> dict[str, Tensor]:
        """The tensors of the model's own: everything except a frozen pretrained backbone."""
        return self._state(self.saves_backbone)

    def _state(self, whole: bool) -> dict[str, Tensor]:
        state = self.state_dict().items()
        return {k: v.detach().contiguous() for k, v in state if whole or k.split(".")[0] not in FROZEN}

    def load_owned_state(self, stored: Mapping[str, Tensor], where: str) -> None:
        """Fill in tensors of :meth:`owned_state`; a missing, extra or misshapen one is an error before any.

        Those of a model that was saved with its frozen backbone, because that was changed, may come with it.
        """
        whole = self.saves_backbone or any(key.startswith("backbone.") for key in stored)
        shapes = {key: tensor.shape for key, tensor in self._state(whole).items()}
        router = self.bank.router
        place = next(name for name, module in self.named_modules() if module is router)
        if (bias := f"{place}.selection_bias") in stored:  # given by a method, after it was made
            shapes.setdefault(bias, torch.Size([router.experts]))
        if missing := sorted(shapes.keys() - stored.keys()):
            raise UserError(
                f"{where}: lacks {missing[0]!r}" + (f" and {len(missing) - 1} more" * (len(missing) > 1))
            )
        if extra := sorted(stored.keys() - shapes.keys()):
            raise UserError(f"{where}: has unknown key {extra[0]!r}")
        for key, shape in shapes.items():
            if shape != stored[key].shape:
                raise UserError(
                    f"{where}: {key!r} has shape {tuple(stored[key].shape)}, expected {tuple(shape)}"
                )
        if bias in stored:
            router.add_selection_bias()
        self.load_state_dict(dict(stored), strict=False)

    # ------------------------------------------------------------------ the two halves

    @property
    def device(self) -> torch.device:
        return self.bank.router.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of everything from the expert site on."""
        return self.bank.router.weight.dtype

    @property
    def draws_by_pass(self) -> bool:
        """Whether a training forward draws from torch's own generator: a trained backbone with dropout.

        Such masks depend on which examples run together. (The experts' own come as ``keep``.)
        """
        active = (
            getattr(module, "p", 0)
            if isinstance(module, _DropoutNd)
            else getattr(module, "attention_dropout", 0)
            for module in self.modules()
        )
        return self.config.trainable and any(isinstance(rate, float) and rate > 0 for rate in active)

    def train(self, mode: bool = True) -> Self:
        """Training mode; a frozen backbone stays in eval mode (no dropout)."""
        super().train(mode)
        if not self.config.trainable:
            self.backbone.eval()
        return self

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """The configured precision, for forwards; :meth:`prefix` and :meth:`suffix` enter it themselves."""
        return computing_in(self.device, self.precision)

    def products(self) -> contextlib.AbstractContextManager[None]:
        """The configured precision of float32 products, for a backward: TF32, or all digits."""
        return float32_products(self.device, tf32=self.precision == "tf32")

    def prefix(
        self,
        input_ids: Tensor,
        mask: Tensor,
        token_type_ids: Tensor | None = None,
        known: Known | None = None,
    ) -> SiteState:
        """Everything up to the expert site, from token ids [B, L] and a bool mask [B, L].

        Without gradients when the backbone is frozen: then it is a function of the input alone. What the
        caller knows of the tokens, nobody has to ask the device for.
        """
        attention: Tensor | None = mask.long()
        if known is not None and takes_ready_mask(self.backbone):
            attention = mask[:, None, None].expand(-1, 1, mask.shape[1], -1) if known.padded else None
        inputs: dict[str, Tensor | None] = {"input_ids": input_ids, "attention_mask": attention}
        # Tokenizers may give type ids to backbones that have a single type or none at all.
        if token_type_ids is not None and getattr(self.backbone.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = token_type_ids

        def forward() -> Tensor:
            with given_positions(self.backbone, None if known is None else known.positions):
                hidden: Tensor = self.backbone(**inputs).last_hidden_state
            return hidden

        with torch.set_grad_enabled(torch.is_grad_enabled() and self.config.trainable), self.computing():
            return self.site.read(forward, mask)

    def positions(self, length: int) -> Tensor | None:
        """What :class:`Known` says of positions, for texts of ``length`` tokens; shorter ones take a part."""
        return relative_positions(self.backbone, length, self.device)

    def suffix(
        self, state: SiteState, segments: Sequence[tuple[str, int]], keep: Tensor | None = None
    ) -> Output:
        """From the expert site to the logits.

        ``segments`` names the task of consecutive rows: ``[("rte", 32), ("cb", 16)]``. ``keep`` is the
        experts' dropout mask, drawn by the caller (see :meth:`gar.model.Site.dropout_shape`).
        """
        with self.computing():
            return self.site.output(state, segments, keep)

    def losses(
        self,
        state: SiteState,
        segments: Sequence[tuple[str, int]],
        labels: Tensor,
        keep: Tensor | None = None,
    ) -> Tensor:
        """The cross-entropy of every example, [B], for ``labels`` int64 [B]: of :meth:`suffix`'s logits."""
        with self.computing():
            return self.site.losses(state, segments, labels, keep)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """All parameters with gradients, in a fixed order."""
        return [p for p in self.parameters() if p.requires_grad]

    # ------------------------------------------------------------------ use

    def tokens(
        self, parts: Sequence[tuple[TokenizedSplit, NDArray[np.int64]]]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """``(input_ids, mask, token_type_ids)`` of examples of one or more splits, padded to the longest."""
        width = max(int(split.lengths[rows].max()) for split, rows in parts)
        ids, types, inside = [], [], []
        for split, rows in parts:
            start, stop = split.offsets[rows, None], split.offsets[rows + 1, None]
            where = np.minimum(start + np.arange(width), stop - 1)
            inside.append(start + np.arange(width) < stop)
            ids.append(np.where(inside[-1], split.ids[where], self.padding))
            types.append(None if split.types is None else np.where(inside[-1], split.types[where], 0))
        known = [part for part in types if part is not None]

        def together(parts: list[NDArray[Any]]) -> Tensor:
            return torch.from_numpy(np.concatenate(parts)).to(self.device)

        type_ids = together(known).long() if len(known) == len(types) else None
        return together(ids).long(), together(inside), type_ids

    @property
    def padding(self) -> int:
        """The token id that stands behind the end of a text."""
        assert self.tokenizer.pad_token_id is not None
        return int(self.tokenizer.pad_token_id)

    @torch.inference_mode()
    def predict_probabilities(
        self, task: str, texts: Sequence[str], pairs: Sequence[str] | None = None, batch_tokens: int = 8192
    ) -> Tensor:
        """Probabilities [N, C] of a task's labels, in eval mode; the model's mode is left as it was.

        Rows sum to 1: a shared head that is wider than the task answers among the task's labels. (In the
        loss and in :func:`gar.evaluate` its further logits count, as the specification has it.)
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


def changes_backbone(config: BackboneConfig, experts: ExpertsConfig) -> bool:
    """Whether a model trains its backbone or takes modules out of it."""
    return config.trainable or SITES[experts.site].replaces_ffn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, every module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


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


def _forget_lengths(tokenizer: PreTrainedTokenizerBase) -> None:
    """Take out how the last call cut and padded, which a fast tokenizer would save as a part of itself."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()


def _task_infos(tasks: Iterable[Task | TaskInfo] | Mapping[str, Sequence[str]]) -> list[TaskInfo]:
    if isinstance(tasks, Mapping):
        return [TaskInfo(name, tuple(labels)) for name, labels in tasks.items()]
    return [TaskInfo(task.name, tuple(task.labels), tuple(task.text)) for task in tasks]
