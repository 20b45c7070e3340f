"""What a run costs beside its updates: start, features, diagnosis, saving; several runs in a process."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from gar.benchmark.report import machine_line
from gar.cli.options import DeviceOption
from gar.config import build
from gar.runs import directory
from gar.runs.environment import resolve_device
from gar.training import Shared, checkpoint, loop, run, sharing, train_from_config

#: Training and validation examples of tasks like the paper's five, and words of a text, on average.
FIVE = {
    "qnli": (10475, 5463, 45),
    "boolq": (2000, 3270, 120),
    "rte": (2490, 277, 65),
    "paws": (8000, 8000, 50),
    "wic": (5428, 638, 22),
}
WORDS = [f"w{i}" for i in range(5000)]
#: Where the time of a run goes, by what does it.
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "load": ((run, "start"),),
    "sources": ((sharing, "sources_of"),),
    "checkpoint": ((checkpoint, "save"),),
    "diagnosis": ((loop, "diagnose"),),
    "saving": ((run, "_save_model"), (directory.RunDirectory, "finish")),
}


def main(
    runs: Annotated[int, typer.Option(min=1, help="Runs in this process.")] = 4,
    updates: Annotated[int, typer.Option(min=1, help="Updates of a run.")] = 2000,
    share: Annotated[float, typer.Option(min=0, max=1, help="Of the examples.")] = 1.0,
    width: Annotated[int, typer.Option(help="Of a BERT with six layers and random weights.")] = 384,
    device: DeviceOption = None,
) -> None:
    """Seconds of the parts of runs in one process, on random texts like the paper's five tasks."""
    where = resolve_device(device or "auto")
    with tempfile.TemporaryDirectory(prefix="gar-starts-") as root:
        tree = world(Path(root), share, width) | {"device": str(where)}
        tree["optimizer"] = {"updates": updates}
        print(f"{machine_line(where)}; {updates} updates a run\n")
        print(f"| run | {' | '.join(PARTS)} | updates | rest | all |\n|---|{'---|' * (len(PARTS) + 3)}")
        shared = Shared()
        for number in range(runs):
            method = ("gar", "baseline")[number % 2]
            config = build({**tree, "seed": number // 2, "method": {"name": method}})
            with timed(where) as seconds:
                result = train_from_config(config, Path(root) / "runs" / str(number), shared=shared)
            seconds["updates"] = result["timing"]["step_seconds_mean"] * updates
            whole = seconds.pop("all")
            rest = whole - sum(seconds.values())
            cells = (f"{seconds[part]:.3f}" for part in (*PARTS, "updates"))
            print(f"| {number}, {method} | {' | '.join(cells)} | {rest:.3f} | {whole:.3f} |", flush=True)


def world(root: Path, share: float, width: int) -> dict[str, Any]:
    """A configuration tree: task files of random words and a backbone with random weights below ``root``."""
    numbers = random.Random(0)
    tasks = []
    for name, (train, validation, words) in FIVE.items():
        files = {}
        for split, count in (("train", train), ("validation", validation)):
            files[split] = str(root / f"{name}-{split}.jsonl")
            with open(files[split], "w", encoding="utf-8") as file:
                for _ in range(max(8, round(count * share))):
                    length = max(2, round(words * numbers.uniform(0.4, 1.6)))
                    text = " ".join(numbers.choices(WORDS, k=length))
                    file.write(json.dumps({"text": text, "label": numbers.choice(("no", "yes"))}) + "\n")
        tasks.append({"name": name, **files})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", sep_token="[SEP]", cls_token="[CLS]", unk_token="[UNK]"
    )
    heads = max(1, width // 32)
    shape = {"hidden_size": width, "num_hidden_layers": 6, "num_attention_heads": heads}
    torch.manual_seed(0)
    # As many embeddings as MiniLM has: they are most of the weights that are read and looked at.
    BertModel(BertConfig(intermediate_size=4 * width, **shape)).save_pretrained(root / "bert")
    tokenizer.save_pretrained(root / "bert")
    return {
        "backbone": {"name": str(root / "bert"), "max_length": 128},
        "mixture": {"name": "like five", "tasks": tasks},
        "cache": {"directory": str(root / "cache")},
    }


@contextmanager
def timed(device: torch.device) -> Iterator[dict[str, float]]:
    """Seconds of every part of what runs inside, and of all; what a device still computes belongs to it."""
    seconds = dict.fromkeys(PARTS, 0.0)
    kept: list[tuple[Any, str, Any]] = []

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def around(part: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*arguments: Any, **options: Any) -> Any:
            began = clock()
            try:
                return do(*arguments, **options)
            finally:
                seconds[part] += clock() - began

        return timed_call

    for part, places in PARTS.items():
        for place, name in places:
            kept.append((place, name, getattr(place, name)))
            setattr(place, name, around(part, getattr(place, name)))
    began = clock()
    try:
        yield seconds
    finally:
        seconds["all"] = clock() - began
        for place, name, before in kept:
            setattr(place, name, before)


if __name__ == "__main__":
    typer.run(main)
