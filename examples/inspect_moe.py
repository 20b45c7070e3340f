"""What the experts of a language model do on groups of texts, from Python: `gar inspect` as objects.

    python examples/inspect_moe.py                      # a tiny random OLMoE, no network
    python examples/inspect_moe.py allenai/OLMoE-1B-7B-0924 texts.jsonl

`texts.jsonl` has one `{"text": ..., "group": ...}` a line. Nothing is trained, and the
model is left as it was.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, OlmoeConfig, PreTrainedTokenizerFast

from gar.data import read_grouped
from gar.inspection import inspect

DOMAINS = {
    "numbers": [str(n) for n in range(40)],
    "colours": ["red", "green", "blue", "grey", "pink", "teal"],
}


def tiny() -> tuple[Any, Any, dict[str, list[str]]]:
    """A random model with two layers of eight experts, its tokenizer, and texts of two domains."""
    words = ["<pad>", "</s>", *(word for domain in DOMAINS.values() for word in domain)]
    vocabulary = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<pad>"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="</s>")
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        OlmoeConfig(vocab_size=len(words), pad_token_id=0, eos_token_id=1, **sizes, **experts)
    )
    draw = random.Random(0)
    texts = {
        group: [" ".join(draw.choices(domain, k=draw.randint(6, 16))) for _ in range(40)]
        for group, domain in DOMAINS.items()
    }
    return model, tokenizer, texts


def main() -> None:
    if len(sys.argv) == 3:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
        tokenizer: Any = AutoTokenizer.from_pretrained(sys.argv[1])
        texts: Any = read_grouped([sys.argv[2]])
    else:
        model, tokenizer, texts = tiny()
    found = inspect(model, texts, tokenizer)
    print(found.verdict)
    for layer in found.layers:
        told = "above" if layer.nmi.above else "not above"
        print(
            f"{layer.title}: NMI {layer.nmi.value:.3f}, {told} shuffled groups (up to {layer.nmi.high:.3f})"
        )


if __name__ == "__main__":
    main()
