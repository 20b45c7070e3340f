"""Fine-tune a mixture-of-experts language model with transformers' Trainer and GAR.

    python examples/trainer.py     # a tiny random OLMoE, texts of two made-up domains, no network
    python examples/trainer.py --model allenai/OLMoE-1B-7B-0924 --data texts.jsonl --bf16 --output_dir out

`texts.jsonl` has one `{"text": ..., "group": ...}` a line. All options of TrainingArguments and of
GARArguments (`--coefficient`, `--group_size`, `--layers`, ...) can be given. Several GPUs:
`accelerate launch --multi_gpu --num_processes 4 examples/trainer.py ...`, or torchrun; with `--fsdp` each
keeps a part of the model.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    OlmoeConfig,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from gar import UserError
from gar.integrations.transformers import GARArguments, GARTrainer

DOMAINS = {
    "numbers": [str(n) for n in range(40)],
    "colours": ["red", "green", "blue", "grey", "pink", "teal"],
}


@dataclass
class Inputs:
    """What is trained, and on what."""

    model: str | None = None
    data: str | None = None
    max_length: int = 512


def tiny() -> tuple[Any, Any, datasets.Dataset]:
    """A random model of 16 experts a layer, its tokenizer, and texts of two domains."""
    words = ["<pad>", "</s>", *(word for domain in DOMAINS.values() for word in domain)]
    vocabulary = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<pad>"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="</s>")
    config = OlmoeConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_experts=16,
        num_experts_per_tok=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    draw = random.Random(0)
    rows = [
        {"text": " ".join(draw.choices(DOMAINS[group], k=draw.randint(6, 16))), "group": group}
        for group in DOMAINS
        for _ in range(256)
    ]
    return AutoModelForCausalLM.from_config(config), tokenizer, datasets.Dataset.from_list(rows)


def main() -> None:
    given = sys.argv[1:] + ([] if torch.accelerator.is_available() else ["--use_cpu"])
    inputs, arguments, options = HfArgumentParser(
        (Inputs, TrainingArguments, GARArguments)
    ).parse_args_into_dataclasses(given)
    if (inputs.model is None) != (inputs.data is None):
        raise UserError("--model and --data go together; data is a JSONL file with a text and a group a line")
    if inputs.model is None:
        model, tokenizer, data = tiny()
        arguments.logging_steps = min(arguments.logging_steps, 20)
    else:
        model = AutoModelForCausalLM.from_pretrained(inputs.model)
        tokenizer = AutoTokenizer.from_pretrained(inputs.model)
        data = datasets.load_dataset("json", data_files=inputs.data, split="train")
    # The model's own balance loss pools all layers; balance_coefficient is the one of every layer.
    model.config.output_router_logits = False
    data = data.map(
        lambda row: tokenizer(
            row["text"] + tokenizer.eos_token, truncation=True, max_length=inputs.max_length
        )
    )
    trainer = GARTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        gar=options,
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()
    # Several processes leave together: gloo's threads must be done with tensors before Python ends.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:  # a mistake in what was given: one line, no traceback
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
