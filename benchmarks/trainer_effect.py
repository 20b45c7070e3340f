"""What the objective does to a small model inside Trainer: texts of two kinds, paired seeds.

Nothing of the kinds is told to the router but which texts share a group. Each run is a line of a CSV; those
that a file has are not run again. ``tables.py`` makes docs/trainer.md's tables of it.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import datasets
import numpy as np
import torch
import transformers
import typer
from torch import Tensor

import gar
from gar.integrations import GARArguments, GARTrainer

#: Tokens that texts have, numbered from 0; one more is padding, which no text has.
WORDS = 40
EXPERTS, TEXTS, UPDATES, HELD_OUT = 16, 32, 200, 1024
#: Seeds of texts that are measured on lie far from those that are trained on.
FAR = 10**6
SEED = "seed"
MEASURED = ("nmi", "purity", "loss")
NUMBERS = ("learning_rate", "max_grad_norm", "coefficient")

LETTERS = " abcdefghijklmnopqrstuvwxyz0123456789+=."
ARTICLES, ENDS = ("the", "a"), (".", " now.", " again.")
ADJECTIVES = ("small", "big", "old", "red", "quick", "kind")
NOUNS = ("dog", "cat", "bird", "farmer", "child", "king", "horse", "sailor")
VERBS = ("sees", "finds", "likes", "follows", "calls", "paints")


def chains(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Texts [n, 16] of two Markov chains over the same words, in turn, and their kind [n]."""
    steps = torch.stack([
        torch.softmax(3 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(100 + d)), -1)
        for d in range(2)
    ])  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    kind = torch.arange(count) % 2
    text = [torch.randint(WORDS, (count,), generator=draw)]
    for _ in range(15):
        text.append(torch.multinomial(steps[kind, text[-1]], 1, generator=draw).squeeze(1))
    return torch.stack(text, 1), kind


def words(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Texts [n, 16] in turn of sums and of sentences, which share no token: digits and signs, words."""
    draw = np.random.default_rng(seed)

    def addition() -> list[int]:
        a, b = draw.integers(0, 50, 2)
        return [a // 10, a % 10, 10, b // 10, b % 10, 11, (a + b) // 10, (a + b) % 10]

    def sentence() -> list[int]:
        first, second, adjective, choice = draw.integers(0, (8, 8, 6, 6))
        verb = (first + choice // 2) % 6  # which verbs there can be depends on who acts
        return [12, 13 + adjective, 19 + first, 27 + verb, 33, 19 + second, 34 + first % 3, 37]

    return alternating(count, 16, addition, sentence)


def characters(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Texts [n, 24] in turn of sums and of English sentences, character by character."""
    draw = np.random.default_rng(seed)

    def addition() -> list[int]:
        a, b = draw.integers(0, 50, 2)
        return coded(f"{a}+{b}={a + b}. ")

    def sentence() -> list[int]:
        chosen = (draw.choice(of) for of in (ARTICLES, ADJECTIVES, NOUNS, VERBS, ARTICLES, NOUNS))
        return coded(" ".join(chosen) + draw.choice(ENDS) + " ")

    return alternating(count, 24, addition, sentence)


def coded(text: str) -> list[int]:
    """Numbers of characters."""
    return [LETTERS.index(letter) for letter in text]


def alternating(count: int, length: int, *kinds: Callable[[], list[int]]) -> tuple[Tensor, Tensor]:
    """Texts [n, length] of the kinds in turn, each of as many pieces as it takes, and their kind [n]."""
    texts = []
    for number in range(count):
        text: list[int] = []
        while len(text) < length:
            text += kinds[number % len(kinds)]()
        texts.append([int(token) for token in text[:length]])
    return torch.tensor(texts), torch.arange(count) % len(kinds)


KINDS = {"chains": chains, "words": words, "characters": characters}


@dataclass(frozen=True)
class Arm:
    """A setting of several seeds; ``max_grad_norm`` 0 clips nothing."""

    texts: str
    top_k: int = 4
    learning_rate: float = 0.01
    max_grad_norm: float = 1.0
    gradients: str = "relative"
    coefficient: float = 0.0


def arms() -> Iterator[Arm]:
    """All that the tables show: of chains every form, of other texts learning rates and clips."""
    scales = {
        "relative": (0.01, 0.1, 0.3, 1.0, 3.0, 30.0),
        "unit": (1e-3, 1e-2, 0.1),
        "raw": (1e-3, 1e-2, 0.1, 1.0, 10.0),
    }
    for top_k in (4, 2):
        yield Arm("chains", top_k)
        for gradients, coefficients in scales.items():
            for coefficient in coefficients:
                yield Arm("chains", top_k, gradients=gradients, coefficient=coefficient)
    for texts in ("words", "characters"):
        for rate in (0.01, 0.003):
            for clip in (1.0, 0.0):
                for coefficient in (0.0, 0.3, 1.0):
                    yield Arm(texts, 4, rate, clip, coefficient=coefficient)


def run(arm: Arm, seed: int) -> dict[str, float]:
    """NMI and purity of kinds and experts, means over two layers, and the loss, on texts not trained on."""
    torch.manual_seed(seed)
    config = transformers.OlmoeConfig(
        vocab_size=WORDS + 1, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_experts=EXPERTS, num_experts_per_tok=arm.top_k,
        pad_token_id=WORDS, eos_token_id=WORDS, router_aux_loss_coef=0.0,
    )  # fmt: skip
    model = transformers.OlmoeForCausalLM(config)
    make = KINDS[arm.texts]
    texts, kind = make(TEXTS * UPDATES, seed)
    rows = [
        {"input_ids": text, "labels": text, "group": which}
        for text, which in zip(texts.tolist(), kind.tolist(), strict=True)
    ]
    with tempfile.TemporaryDirectory() as out:
        trainer: Any = GARTrainer(
            model=model,
            args=transformers.TrainingArguments(
                out, per_device_train_batch_size=TEXTS, max_steps=UPDATES, seed=seed, use_cpu=True,
                report_to=[], learning_rate=arm.learning_rate, max_grad_norm=arm.max_grad_norm,
                save_strategy="no", logging_strategy="no", disable_tqdm=True,
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            gar=GARArguments(coefficient=arm.coefficient, gradients=arm.gradients),  # type: ignore[arg-type]
        )  # fmt: skip
        trainer.train()
    texts, kind = make(HELD_OUT, FAR + seed)
    with gar.observe(model.eval(), gradients=False) as observed:
        loss = float(model(input_ids=texts, labels=texts).loss.detach())
    counts = [
        torch.stack([site.routing.selected.sum(1)[kind == k].sum(0) for k in range(2)]).numpy()
        for site in observed.sites
    ]
    return {
        "nmi": float(np.mean([gar.metrics.normalized_mutual_information(table) for table in counts])),
        "purity": float(np.mean([gar.metrics.structure_purity(table) for table in counts])),
        "loss": loss,
    }


def read(path: Path) -> dict[Arm, dict[int, dict[str, float]]]:
    """What every arm's seeds have measured."""
    found: dict[Arm, dict[int, dict[str, float]]] = {}
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                rate, clip, coefficient = (float(line[key]) for key in NUMBERS)
                arm = Arm(line["texts"], int(line["top_k"]), rate, clip, line["gradients"], coefficient)
                found.setdefault(arm, {})[int(line[SEED])] = {key: float(line[key]) for key in MEASURED}
    return found


def write(path: Path, found: dict[Arm, dict[int, dict[str, float]]]) -> None:
    """All runs in the order of :func:`arms`; numbers to eight places."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow([*(field.name for field in fields(Arm)), SEED, *MEASURED])
        for arm in arms():
            for seed, values in sorted(found.get(arm, {}).items()):
                out.writerow([*asdict(arm).values(), seed, *(f"{values[key]:.8f}" for key in MEASURED)])


def one_thread() -> None:
    """Of a process that has a core."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def main(
    out: Annotated[Path, typer.Option(help="CSV of all runs; those that it has are kept.")],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, … of every arm.")] = 10,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 2,
) -> None:
    """Train every arm with every seed; about six seconds a run."""
    found = read(out)
    work = [(arm, seed) for seed in range(seeds) for arm in arms() if seed not in found.get(arm, {})]
    with ProcessPoolExecutor(jobs, initializer=one_thread) as workers:
        running = {workers.submit(partial(run, arm, seed)): (arm, seed) for arm, seed in work}
        for done, future in enumerate(as_completed(running), 1):
            arm, seed = running[future]
            found.setdefault(arm, {})[seed] = future.result()
            write(out, found)
            print(f"{done}/{len(work)} {arm} seed {seed}: {future.result()}", flush=True)


if __name__ == "__main__":
    typer.run(main)
