"""Models of published sizes with random weights, on random tokens: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from gar.config import Config
from gar.data.tokenize import TokenizedSplit
from gar.errors import one_of
from gar.features import CachedSource, Features
from gar.model.backbone import DTYPES, prepare
from gar.model.multitask import MultiTaskModel, TaskInfo, evaluating, length_bucketed
from gar.objective import accurate
from gar.seeds import derive_seed

#: Token ids are below it, and 0 is padding.
VOCABULARY = 1000


class Size(NamedTuple):
    """A published model: its configuration, and what its weights are stored in where they are frozen."""

    build: Callable[[], PreTrainedConfig]
    frozen_dtype: str = "float32"


def _bert(hidden: int, layers: int, heads: int, inner: int) -> PreTrainedConfig:
    return transformers.BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner
    )


def _qwen3(hidden: int, layers: int, heads: int, inner: int) -> PreTrainedConfig:
    return transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=inner,
        max_position_embeddings=40960,
    )


#: By the last part of the hub id. ``tiny`` is no published model: it shows in seconds what a command prints.
SIZES: dict[str, Size] = {
    "tiny": Size(lambda: _bert(32, 2, 2, 64)),
    "minilm": Size(lambda: _bert(384, 6, 12, 1536)),
    "roberta-base": Size(
        lambda: transformers.RobertaConfig(
            vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
        )
    ),
    "deberta-v3-base": Size(
        lambda: transformers.DebertaV2Config(
            vocab_size=128100,
            type_vocab_size=0,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
            relative_attention=True,
            position_buckets=256,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            position_biased_input=False,
            max_relative_positions=-1,
        )
    ),
    "qwen3-1.7b": Size(lambda: _qwen3(2048, 28, 16, 6144), "bfloat16"),
    "qwen3-8b": Size(lambda: _qwen3(4096, 36, 32, 12288), "bfloat16"),
}


def find_size(name: str) -> Size:
    """By name or hub id, whatever its case."""
    if (size := SIZES.get(name.lower().rpartition("/")[2])) is None:
        raise one_of("model", name, SIZES)
    return size


def count_parameters(name: str) -> int:
    """Parameters of a backbone, without making it."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModel.from_config(find_size(name).build()).parameters())


def synthetic_model(
    config: Config, classes: Sequence[int], device: torch.device, backbone: PreTrainedModel | None = None
) -> MultiTaskModel:
    """The configured model on a backbone of the published size with random weights, or on a given one.

    ``classes`` are the numbers of labels of its tasks, which are called ``task0``, ``task1``, …
    """
    architecture = find_size(config.backbone.name).build()
    vocabulary = {"[PAD]": 0, "[SEP]": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="[PAD]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", sep_token="[SEP]")
    tasks = [TaskInfo(f"task{i}", tuple(map(str, range(n)))) for i, n in enumerate(classes)]
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(config.seed)
        if backbone is None:
            fresh = AutoModel.from_config(architecture, dtype=DTYPES[config.backbone.dtype])
            backbone = prepare(fresh, config.backbone)
        model = MultiTaskModel(backbone, tokenizer, tasks, config.experts, config.backbone, config.precision)
    return model.to(device)


def synthetic_splits(classes: Sequence[int], examples: int, length: int, seed: int) -> list[TokenizedSplit]:
    """Random tokens: lengths uniform between half of ``length`` and ``length``."""
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "bench")))
    splits = []
    for n in classes:
        lengths = rng.integers(max(1, length // 2), length + 1, examples)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        ids = rng.integers(2, VOCABULARY, offsets[-1]).astype(np.int32)
        splits.append(TokenizedSplit(ids, offsets, None, rng.integers(0, n, examples)))
    return splits


def cached_source(model: MultiTaskModel, splits: Sequence[TokenizedSplit]) -> CachedSource:
    """Features of random-weight prefixes, in memory, in float32 as in the cache's files."""
    features = []
    for split in splits:
        x: dict[int, Tensor] = {}
        base: dict[int, Tensor] = {}
        with evaluating(model), torch.no_grad():
            for rows in length_bucketed(split.lengths, 16384):
                state = model.prefix(*model.tokens([(split, rows)]))
                for row, i in enumerate(rows.tolist()):
                    width = int(split.lengths[i])
                    base[i] = state.base[row : row + 1] if state.base.dim() == 2 else state.base[row, :width]
                    if state.x is not None:
                        x[i] = state.x[row, :width]
        features.append(Features(split.offsets, _joined(x) if x else None, _joined(base)))
    return CachedSource(model, splits, features)


def _joined(parts: Mapping[int, Tensor]) -> Tensor:
    return accurate(torch.cat([parts[i] for i in range(len(parts))]))
