"""Tiny MoE language models as directories, with a tokenizer that knows two kinds of words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gar.model.backbone import without_progress_bars

KINDS = {
    "fruit": ("apple", "pear", "plum", "fig", "kiwi", "lime"),
    "tool": ("saw", "axe", "file", "vice", "drill"),
}
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def word_tokenizer(chat: bool = False) -> Any:
    """A token a word; padding is token 0."""
    words = [word for kind in KINDS.values() for word in kind]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate((*SPECIAL, *words))}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    if chat:
        tokenizer.chat_template = CHAT
    return tokenizer


def save_moe(
    directory: Path, family: str = "olmoe", head: str = "CausalLM", chat: bool = False, **changes: Any
) -> Path:
    """A random model of two MoE layers with four experts, and its tokenizer."""
    tokenizer = word_tokenizer(chat)
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4,
        "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **settings)
    torch.manual_seed(1)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.4)
    with without_progress_bars():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def some_texts(count: int, seed: int = 0, lengths: tuple[int, int] = (3, 12)) -> dict[str, list[str]]:
    """As many texts of each kind of words."""
    draw = np.random.default_rng(seed)
    return {
        kind: [" ".join(draw.choice(words, draw.integers(*lengths))) for _ in range(count)]
        for kind, words in KINDS.items()
    }


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_texts(path: Path, texts: Mapping[str, Sequence[str]], column: str = "group") -> Path:
    """One JSONL file, the groups mixed."""
    rows = [
        (i, {"text": text, column: name}) for name, found in texts.items() for i, text in enumerate(found)
    ]
    return write_jsonl(path, [row for _, row in sorted(rows, key=lambda entry: entry[0])])
