"""Tiny random backbones with tokenizers, written to local directories as a hub download would be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoConfig, AutoModel, BertTokenizer, PreTrainedTokenizerFast, RobertaTokenizer

from gar.config import BackboneConfig, ExpertsConfig
from gar.data.task import Split
from gar.data.tokenize import TokenizedSplit, tokenize_split
from gar.model.backbone import without_progress_bars
from gar.model.multitask import MultiTaskModel, TaskInfo

ENCODERS = ("bert", "roberta", "deberta-v2", "electra", "distilbert", "modernbert")
DECODERS = ("qwen3", "llama", "mistral")
KINDS = (*ENCODERS, *DECODERS)
SITES = ("lora_ffn", "full_ffn", "lora_head")
WIDTH, MAX_LENGTH = 8, 24

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "red", "blue", "big", "small", "and", "not"]
WORDS += ["yes", "no", "old", "new", "it", "is", "was"]
SENTENCES = [
    "the cat sat on the mat",
    "a big dog ran",
    "it is not red and not blue",
    "no",
    "the old dog was big and the new cat is small",
    "yes it was",
]
TASKS = (
    TaskInfo("first", ("no", "yes")),
    TaskInfo("second", ("low", "middle", "high"), ("question", "answer")),
)

_SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
_POST_NORM = {**_SMALL, "max_position_embeddings": 40, "type_vocab_size": 2}
_DECODER = {
    **_SMALL,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "bert": _POST_NORM,
    "roberta": {**_POST_NORM, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    # The flags of DeBERTa-v3.
    "deberta-v2": {
        **_POST_NORM,
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": 8,
        "max_relative_positions": -1,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
    "electra": {**_POST_NORM, "embedding_size": 6},
    "distilbert": {
        "dim": WIDTH,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 12,
        "max_position_embeddings": 40,
    },
    "modernbert": {
        **_SMALL,
        "max_position_embeddings": 64,
        "global_attn_every_n_layers": 2,
        "local_attention": 8,
        "attention_dropout": 0.1,
        "embedding_dropout": 0.1,
        "pad_token_id": 0,
    },
    "qwen3": _DECODER,
    "llama": _DECODER,
    "mistral": {**_DECODER, "sliding_window": 8},
}


def word_tokenizer(special: Sequence[str], start: str | None, end: str | None, **names: Any) -> Any:
    """A word-level tokenizer in which unknown words are ``special[1]`` and a newline is a token."""
    vocabulary = {token: i for i, token in enumerate([*special, "\n", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=special[1]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    single = " ".join(part for part in (start, "$A", end) if part)
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single} $B:1 {end}:1" if end else f"{single} $B:1",
        special_tokens=[(token, vocabulary[token]) for token in (start, end) if token],
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=special[1], **names)


def byte_vocabulary(special: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Bytes and a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "t"), ("c", "at"), ("Ġ", "cat"), ("d", "o")]
    tokens = [*special, *letters, *(a + b for a, b in merges)]
    return {token: i for i, token in enumerate(tokens)}, merges


def make_tokenizer(kind: str) -> Any:
    """WordPiece for BERT and ELECTRA, byte-level BPE for RoBERTa and Qwen3, word level for the others.

    Llama and Mistral start with a token of their own; like Qwen3 here they have no padding and no pair form.
    """
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if kind in ("bert", "electra"):
        pieces = [*special, *WORDS, *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnop")]
        return BertTokenizer(vocab={piece: i for i, piece in enumerate(dict.fromkeys(pieces))})
    if kind == "roberta":
        vocabulary, merges = byte_vocabulary(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
        return RobertaTokenizer(vocab=vocabulary, merges=merges)
    if kind in ENCODERS:
        names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
        inputs = ["input_ids", "attention_mask"] + ["token_type_ids"] * (kind != "modernbert")
        return word_tokenizer(special, "[CLS]", "[SEP]", model_input_names=inputs, **names)
    if kind == "qwen3":
        vocabulary, merges = byte_vocabulary(["<|end|>"])
        backend = Tokenizer(models.BPE(vocabulary, merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    return word_tokenizer(["<s>", "<unk>", "</s>"], "<s>", None, bos_token="<s>", eos_token="</s>")


def save_backbone(kind: str, directory: Path, **changes: Any) -> Path:
    """A backbone of a kind, every weight random and away from its initial value; returns the directory."""
    tokenizer = make_tokenizer(kind)
    settings = {"pad_token_id": tokenizer.pad_token_id, **CONFIGURATIONS[kind], **changes}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **settings)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModel.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.25 * torch.randn_like(parameter))
    with (
        without_progress_bars()
    ):  # it is written when first asked for, maybe in a test that looks at the output
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


class Directories:
    """Directories of tiny backbones, each written when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __getitem__(self, kind: str) -> str:
        directory = self.root / kind
        return str(directory if directory.exists() else save_backbone(kind, directory))


def make_model(
    directory: str,
    site: str = "lora_ffn",
    trainable: bool = False,
    dtype: str = "float64",
    tasks: Any = TASKS,
    precision: str = "float32",
    backbone: dict[str, Any] | None = None,
    **experts: Any,
) -> MultiTaskModel:
    """A model on a tiny backbone; in float64 unless told otherwise."""
    options = {"max_length": MAX_LENGTH, "trainable": trainable, "dtype": dtype, **(backbone or {})}
    sizes = {"count": 3, "top_k": 2, "rank": 2, "alpha": 3.0, **experts}
    return MultiTaskModel.from_pretrained(
        BackboneConfig(name=directory, **options),
        tasks,
        ExpertsConfig(site=site, **sizes),
        precision=precision,
    )


def scatter_weights(model: MultiTaskModel, scale: float = 0.4) -> None:
    """Random values in the expert bank and heads: no zero B, uneven routing, experts that differ."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if not name.startswith(("backbone.", "tail.")):
                parameter.add_(scale * torch.randn_like(parameter))


def make_splits(model: MultiTaskModel) -> list[TokenizedSplit]:
    """The two tasks' examples: single sentences, and pairs, of uneven lengths and numbers."""
    single = Split(SENTENCES[:5], np.array([0, 1, 1, 0, 1]))
    pairs = Split(SENTENCES[:3], np.array([2, 0, 1]), [SENTENCES[3], SENTENCES[0], SENTENCES[1]])
    return [tokenize_split(model.tokenizer, split, model.config.max_length) for split in (single, pairs)]


def all_tokens(
    model: MultiTaskModel, splits: Sequence[TokenizedSplit]
) -> tuple[tuple[Tensor, Tensor, Tensor | None], list[tuple[str, int]]]:
    """All examples of all tasks as one batch, and its segments."""
    tokens = model.tokens([(split, np.arange(len(split))) for split in splits])
    return tokens, [(task.name, len(split)) for task, split in zip(TASKS, splits, strict=True)]


def logits_of(model: MultiTaskModel) -> list[Tensor]:
    """Logits of all examples in eval mode, one entry a task."""
    tokens, segments = all_tokens(model, make_splits(model))
    mode = model.training
    with torch.no_grad():
        logits = model.eval().suffix(model.prefix(*tokens).to(model.device, model.dtype), segments).logits
    model.train(mode)
    return logits
