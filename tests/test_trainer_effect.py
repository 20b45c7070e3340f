"""What the objective does to a small model on texts of two domains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import gar
from gar.integrations import GARArguments, GARTrainer
from support.tiny_training import arguments

WORDS, LENGTH = 40, 16


def domains(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Texts [n, 16] of two Markov chains over the same words, in turn, and their domain [n]."""
    chains = torch.stack([
        torch.softmax(3 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(100 + d)), -1)
        for d in range(2)
    ])  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    domain = torch.arange(count) % 2
    text = [torch.randint(WORDS, (count,), generator=draw)]
    for _ in range(LENGTH - 1):
        text.append(torch.multinomial(chains[domain, text[-1]], 1, generator=draw).squeeze(1))
    return torch.stack(text, 1), domain


def run(out: Path, seed: int, coefficient: float) -> tuple[float, float, float]:
    """Loss, NMI and purity of domains and experts on other texts, after 60 updates."""
    torch.manual_seed(seed)
    config = transformers.OlmoeConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_experts=16, num_experts_per_tok=4, pad_token_id=0, eos_token_id=1, router_aux_loss_coef=0.0,
    )  # fmt: skip
    model = transformers.OlmoeForCausalLM(config)
    texts, domain = domains(2048, 1)
    rows = [
        {"input_ids": text, "labels": text, "group": ("code", "prose")[which]}
        for text, which in zip(texts.tolist(), domain.tolist(), strict=True)
    ]
    trainer: Any = GARTrainer(
        model=model, args=arguments(out, rows=32, updates=60, seed=seed, logging_steps=60),
        train_dataset=datasets.Dataset.from_list(rows), gar=GARArguments(coefficient=coefficient),
    )  # fmt: skip
    trainer.train()
    texts, domain = domains(256, 2)
    with gar.observe(model.eval(), gradients=False) as observed:
        loss = float(model(input_ids=texts, labels=texts).loss.detach())
    chosen = observed.site.routing.selected.sum(1)
    counts = torch.stack([chosen[domain == d].sum(0) for d in range(2)]).numpy()
    return loss, gar.metrics.normalized_mutual_information(counts), gar.metrics.structure_purity(counts)


@pytest.mark.slow
def test_experts_part_the_domains_and_the_loss_is_no_worse(tmp_path: Path) -> None:
    """Means of four seeds: nothing of the domains is told to the router but which texts share a group."""
    found = {c: np.mean([run(tmp_path, seed, c) for seed in range(4)], 0) for c in (0.0, 0.3, 3.0)}
    for coefficient, (cost, told, share) in found.items():  # what docs/trainer.md shows
        print(f"| {coefficient:g} | {told:.4f} | {share:.3f} | {cost:.4f} |")
    (loss, nmi, purity), (_, some, some_purity), (after, more, more_purity) = found.values()
    assert nmi < some < more
    assert more > 2 * nmi
    assert purity < some_purity < more_purity
    assert after < loss + 0.02
