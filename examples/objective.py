"""The objective in a torch model of one's own: which groups share an expert, with and without it.

    python examples/objective.py

Four made-up tasks map x to a class; the second pair of tasks wants the opposite answers of the first, so
their gradients fight. No backbone, no files, no trainer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import gar
from gar import metrics

TASKS, GROUPS, SIZE, WIDTH, EXPERTS = 4, 8, 8, 16, 4


def batch(draw: torch.Generator, direction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [N, WIDTH], labels [N] and tasks [N] of GROUPS groups, each of one task."""
    tasks = torch.arange(GROUPS).remainder(TASKS).repeat_interleave(SIZE)
    x = torch.randn(len(tasks), WIDTH, generator=draw)
    labels = ((x @ direction > 0) ^ (tasks >= TASKS // 2)).long()
    # The router may read the task off the last inputs.
    x[:, -TASKS:] = one_hot(tasks, TASKS).float()
    return x, labels, tasks


def train(coefficient: float, seed: int, updates: int = 150) -> tuple[float, float, float]:
    """Accuracy, share of experts in effect, and NMI of tasks and experts on a last batch."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(1000 + seed)
    direction = torch.cat([torch.randn(WIDTH - TASKS, generator=draw), torch.zeros(TASKS)])
    moe = gar.nn.RoutedLoRA(WIDTH, WIDTH, experts=EXPERTS, rank=4, top_k=1)
    head = nn.Linear(WIDTH, 2)
    optimizer = torch.optim.AdamW([*moe.parameters(), *head.parameters()], lr=1e-2)
    groups, weight = torch.arange(GROUPS * SIZE) // SIZE, torch.full((GROUPS,), 1 / GROUPS)
    for _ in range(updates):
        x, labels, tasks = batch(draw, direction)
        optimizer.zero_grad()
        with gar.observe(moe) as observed:
            output, routing = moe(x)
            losses = cross_entropy(head(x + output), labels, reduction="none")
            (weight * losses.view(GROUPS, SIZE).mean(1)).sum().backward()
        if coefficient:
            g = observed.group_gradients(groups, weight)  # [GROUPS, d], of the backward that was done anyway
            p = observed.group_probabilities(groups)  # [GROUPS, EXPERTS], differentiable in the router alone
            (coefficient * gar.alignment_loss(p, g)).backward()
        optimizer.step()
    x, labels, tasks = batch(draw, direction)
    with torch.no_grad():
        output, routing = moe(x)
    accuracy = float((head(x + output).argmax(1) == labels).float().mean())
    counts = one_hot(tasks, TASKS).T @ routing.selected.long()  # [TASKS, EXPERTS]
    load = counts.sum(0) / counts.sum()
    return accuracy, metrics.effective_experts(load), metrics.normalized_mutual_information(counts)


def main() -> None:
    print("seed  coefficient  accuracy  experts in effect   NMI")
    for seed in range(3):  # one alone would prove nothing: look at how they differ
        for coefficient in (0.0, 1.0):
            accuracy, effective, nmi = train(coefficient, seed)
            print(f"{seed:4}  {coefficient:11g}  {accuracy:8.3f}  {effective:17.3f}  {nmi:.3f}")


if __name__ == "__main__":
    main()
