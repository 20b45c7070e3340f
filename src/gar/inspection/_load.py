"""The model to look at: a hub id or a directory, with an adapter of PEFT merged into it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from gar.errors import UserError, nearest, one_of, path_kind, user_path
from gar.model.backbone import without_progress_bars
from gar.runs.files import checksum
from gar.runs.names import CONFIG

ADAPTER = "adapter_config.json"
LOSSES = ("lm", "classification")
#: A model's name, or an owner's.
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
#: Files above this size are known by name, size and time, smaller ones by their content.
SMALL = 1 << 20


@dataclass(frozen=True)
class Source:
    """What to load: ``base`` is a hub id or a directory, ``adapter`` a directory or None."""

    base: str
    adapter: str | None

    @property
    def name(self) -> str:
        """For people and for directories: the adapter's name, or the model's."""
        return Path(self.adapter or self.base).name or "model"


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode on its device, its tokenizer, and which loss it has."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    loss: str
    notes: tuple[str, ...] = ()


def find_source(model: str, adapter: str | Path | None = None) -> Source:
    """What MODEL and ``--adapter`` name; nothing is loaded."""
    path = user_path(model)
    kind = path_kind(path)
    if kind == "missing":
        if path.is_absolute() or model.startswith((".", "~")):
            raise UserError(f"{model}: no such directory; expected a saved model or a hub id")
        return Source(model, None if adapter is None else _adapter(user_path(adapter)))
    if kind != "directory":
        raise UserError(f"{model}: is a {kind}; expected the directory of a saved model, or a hub id")
    if (path / ADAPTER).is_file():
        if adapter is not None:
            raise UserError(f"{model}: is an adapter itself; expected a model before --adapter {adapter}")
        return Source(_base_of(path), str(path))
    if (path / CONFIG).is_file() or (path / "backbone").is_dir():
        raise UserError(
            f"{model}: is a run or a model of gar; expected a language model (gar diagnose {model})"
        )
    if not (path / "config.json").is_file():
        found = sorted(child.name for child in path.iterdir())[:5]
        raise UserError(
            f"{model}: has no config.json and no {ADAPTER}; expected a saved model or adapter, "
            f"found {', '.join(found) or 'nothing'}"
        )
    return Source(str(path), None if adapter is None else _adapter(user_path(adapter)))


def _adapter(path: Path) -> str:
    if path_kind(path) != "directory" or not (path / ADAPTER).is_file():
        raise UserError(f"--adapter {path}: no {ADAPTER} in it; expected a directory that PEFT has saved")
    return str(path)


def _base_of(adapter: Path) -> str:
    config = _peft_config(adapter)
    base = config.base_model_name_or_path
    if not base:
        raise UserError(
            f"{adapter}: {ADAPTER} names no base model; expected the base model as MODEL and "
            f"--adapter {adapter}"
        )
    if path_kind(user_path(base)) == "missing" and (Path(base).is_absolute() or not HUB_ID.fullmatch(base)):
        raise UserError(
            f"{adapter}: its base model is {base!r} ({ADAPTER}), which is no directory here; expected "
            f"the base model as MODEL and --adapter {adapter}"
        )
    return str(base)


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UserError("an adapter needs peft, which is not installed; pip install peft") from None
    return peft


def _peft_config(adapter: Path) -> Any:
    peft = _peft()
    try:
        return peft.PeftConfig.from_pretrained(str(adapter))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{adapter}: {ADAPTER} cannot be read ({_first_line(error)})") from None


def loss_of(source: Source, loss: str | None = None) -> str:
    """``lm`` or ``classification``: what the architecture in config.json, or the adapter, is for.

    A ``loss`` that it is not for is refused. No weights are loaded.
    """
    if loss is not None and loss not in LOSSES:
        raise one_of("--loss", loss, LOSSES)
    classifier = _is_classifier(_call(AutoConfig.from_pretrained, source.base)) or _brings_head(source)
    has = LOSSES[classifier]
    if loss not in (None, has):
        head = "a sequence classification head" if classifier else "no classification head"
        raise UserError(f"--loss {loss}: {source.name} has {head}; expected --loss {has}")
    return has


def _is_classifier(config: Any) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def _brings_head(source: Source) -> bool:
    """Whether the adapter is one of a classifier."""
    if source.adapter is None:
        return False
    return str(getattr(_peft_config(Path(source.adapter)), "task_type", None) or "").endswith("SEQ_CLS")


def load(source: Source, loss: str, device: torch.device | None = None) -> Loaded:
    """The model with its own dtype, the adapter merged; ``loss`` is what :func:`loss_of` says."""
    options: dict[str, Any] = {}
    classifies = loss == "classification"
    if classifies and not _is_classifier(_call(AutoConfig.from_pretrained, source.base)):
        options["num_labels"] = _classes(Path(str(source.adapter)))
    auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    model, found = _call(auto.from_pretrained, source.base, dtype="auto", output_loading_info=True, **options)
    # transformers fills gaps with random weights; a head may come with the adapter.
    missing = sorted(key for key in found["missing_keys"] if not options or not key.startswith("score."))
    if missing:
        raise UserError(f"{source.base}: its weights lack {missing[0]!r}, which its config.json asks for")
    notes = []
    if source.adapter is not None:
        model = _merged(model, source.adapter)
        notes.append(
            f"the adapter {source.adapter} is merged into the weights; gradients are of the merged experts"
        )
    tokenizer = _tokenizer(source)
    model.config.use_cache = False
    model.eval()
    if device is not None:
        model.to(device)
    return Loaded(model, tokenizer, loss, tuple(notes))


def _tokenizer(source: Source) -> PreTrainedTokenizerBase:
    names = ("tokenizer.json", "tokenizer_config.json")
    if source.adapter is not None and any((Path(source.adapter) / name).is_file() for name in names):
        return _call(AutoTokenizer.from_pretrained, source.adapter)
    tokenizer = _call(AutoTokenizer.from_pretrained, source.base)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # of a directory without its files
        raise UserError(
            f"{source.base}: its tokenizer knows no word; expected tokenizer.json or a vocabulary beside the "
            "weights (tokenizer.save_pretrained)"
        )
    return tokenizer


def _merged(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    peft = _peft()
    try:
        wrapped = peft.PeftModel.from_pretrained(model, adapter)
        merged = wrapped.merge_and_unload()
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        NotImplementedError,
        AttributeError,
        TypeError,
    ) as error:
        raise UserError(
            f"{adapter}: cannot be merged into {type(model).__name__} ({_first_line(error)}); expected a "
            "LoRA adapter of this model"
        ) from error
    return merged


def _classes(adapter: Path) -> int:
    """How many classes the head has that came with an adapter."""
    path = adapter / "adapter_model.safetensors"
    if path.is_file():
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                if key.endswith(("score.weight", "classifier.weight")):
                    return int(file.get_slice(key).get_shape()[0])
    raise UserError(f"{adapter}: is an adapter for classification without the head's weights (score.weight)")


@without_progress_bars()
def _call(function: Any, source: str, **options: Any) -> Any:
    try:
        return function(source, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise UserError(
            f"{source}: cannot be loaded ({_first_line(error)}); expected a language model: a hub id that is "
            "reachable or cached, or a local directory"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def digest(source: Source) -> str:
    """A digest of what will be loaded: of small files the content, of large ones name, size and time.

    Of a hub id it is the commit that the hub, or the cache without a network, has now.
    """
    found = hashlib.blake2b(digest_size=16)
    for place in (source.base, source.adapter):
        found.update(f"{place}\0".encode())
        path = None if place is None else Path(place)
        if path is None:
            continue
        if not path.is_dir():
            commit = getattr(_call(AutoConfig.from_pretrained, str(place)), "_commit_hash", None)
            found.update(f"{commit}\0".encode())
            continue
        for file in sorted(child for child in path.iterdir() if child.is_file() and child.name[0] != "."):
            facts = file.stat()
            known = checksum(file) if facts.st_size <= SMALL else f"{facts.st_size} {facts.st_mtime_ns}"
            found.update(f"{file.name} {known}\0".encode())
    return found.hexdigest()


def class_index(config: Any, label: tuple[str, int | None]) -> int:
    """The class that a label names: by the model's own names, else its index in its task, else a number."""
    name, index = label
    names: dict[str, int] = dict(config.label2id or {})
    if name in names:
        return int(names[name])
    number = int(name) if index is None and name.isdecimal() else index
    if number is None or not 0 <= number < config.num_labels:
        raise UserError(
            f"label {name!r} is no class of the model; expected one of {', '.join(names)}, or a number below "
            f"{config.num_labels}{nearest(name, names)}"
        )
    return number
