"""A tiny BERT with two tasks in files, and what the tests of training runs share."""

from __future__ import annotations

import csv
import json
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel, BertTokenizer

from gar.config import Config, build, set_key
from gar.data import Mixture, load_mixture
from gar.methods import REGISTRY
from gar.model.backbone import without_progress_bars
from gar.model.multitask import MultiTaskModel

WORDS = [f"w{i}" for i in range(30)]
#: Registered methods, so that a new one is tested too; torchjd is an extra and runs like cagrad.
METHODS = tuple(name for name in REGISTRY if name != "torchjd")


def make_world(root: Path) -> Path:
    """``root`` with bert/, the task mood (texts, CSV) and the task nli (pairs, JSONL), of uneven sizes."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s"]
    root.mkdir(parents=True, exist_ok=True)
    (root / "vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
    bert = BertModel(BertConfig(vocab_size=len(pieces), max_position_embeddings=32, **shape))
    with torch.no_grad():
        for parameter in bert.parameters():  # larger than the usual start, so that inputs tell apart
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    with without_progress_bars():
        bert.save_pretrained(root / "bert")
    BertTokenizer(str(root / "vocab.txt")).save_pretrained(root / "bert")
    numbers = random.Random(0)
    for split, size in (("train", 21), ("dev", 12)):
        with (root / f"mood-{split}.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["review", "label"])
            rows.writerows([_text(numbers, i % 2), ("bad", "good")[i % 2]] for i in range(size))
    for split, size in (("train", 11), ("dev", 9)):
        with (root / f"nli-{split}.jsonl").open("w", encoding="utf-8") as file:
            for i in range(size):
                row = {"premise": _text(numbers, i % 3), "hypothesis": _text(numbers, i % 2), "label": i % 3}
                file.write(json.dumps(row) + "\n")
    return root


def _text(numbers: random.Random, kind: int) -> str:
    return " ".join(WORDS[numbers.randrange(10) + 10 * kind] for _ in range(numbers.randint(1, 9)))


def tree(world: Path, **changes: Any) -> dict[str, Any]:
    """A configuration tree of the world; ``changes`` are dotted keys with ``__`` for the dot."""
    tasks: list[dict[str, Any]] = [
        {
            "name": "mood",
            "train": str(world / "mood-train.csv"),
            "validation": str(world / "mood-dev.csv"),
            "text": "review",
        },
        {
            "name": "nli",
            "train": str(world / "nli-train.jsonl"),
            "validation": str(world / "nli-dev.jsonl"),
            "text": ["premise", "hypothesis"],
        },
    ]
    values: dict[str, Any] = {
        "backbone": {"name": str(world / "bert"), "max_length": 24},
        "experts": {"count": 3, "top_k": 2, "rank": 2, "alpha": 4.0},
        "mixture": {"name": "tiny", "batch_size": 8, "group_size": 3, "tasks": tasks},
        "optimizer": {"updates": 5, "learning_rate": 1e-2},
        "evaluation": {"probe_examples": 8},
        "cache": {"directory": str(world / "cache")},
        "device": "cpu",
    }
    for key, value in changes.items():
        set_key(values, key.replace("__", "."), value)
    return values


def make_config(world: Path, **changes: Any) -> Config:
    return build(tree(world, **changes))


def load(config: Config, randomized: bool = False) -> tuple[MultiTaskModel, Mixture]:
    """The model and the mixture of a configuration, as ``train_from_config`` makes them.

    ``randomized`` gives every trained weight a value, so that no gradient is zero for the start's sake.
    """
    mixture = load_mixture(config.mixture)
    model = MultiTaskModel.from_pretrained(
        config.backbone, mixture.tasks, config.experts, precision=config.precision, seed=config.seed
    )
    if randomized:
        random_ = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.trainable_parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=random_, dtype=parameter.dtype))
    return model, mixture


def weights(model: MultiTaskModel) -> dict[str, Tensor]:
    return {name: value.cpu().clone() for name, value in model.owned_state().items()}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@contextmanager
def small_file_system(where: Path, size: str) -> Iterator[Path]:
    """A file system that is soon full, mounted at ``where``; skips the test where that is not allowed."""
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("mounting a small file system needs root")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)
