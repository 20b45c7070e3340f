"""Group gradients and metrics of a torch model of one's own, which nothing here trains.

    python examples/observe.py

One forward and one backward give the gradient of every group and what the routing says about the groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, one_hot

import gar
from gar import metrics

NAMES = ("first", "second", "against")
SIZE, LENGTH, WIDTH = 16, 5, 12


class Model(nn.Module):
    """A bank of whole feed-forward experts, routed by token, between two layers of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.experts = gar.nn.RoutedFFN(WIDTH, 24, experts=4, top_k=2)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> tuple[Tensor, gar.Routing]:
        x = self.embed(tokens)
        output, routing = self.experts(x)
        return self.head((x + output).mean(1)), routing


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    groups = torch.arange(len(NAMES)).repeat_interleave(SIZE)  # one a row; -1 would mean: in no group
    tokens = torch.randint(0, 20, (len(groups), LENGTH))
    labels = (tokens[:, 0] > 9).long()
    labels[groups == 2] = 1 - labels[groups == 2]  # what the third group learns undoes what the others do
    weight = torch.full((len(NAMES),), 1 / len(NAMES))

    with gar.observe(model) as observed:
        logits, routing = model(tokens)
        group_losses = cross_entropy(logits, labels, reduction="none").view(len(NAMES), SIZE).mean(1)
        (site,) = observed.sites
        with site.paused():  # the slow way, one autograd call a group, to check the fast one
            slow = gar.per_group_gradients(group_losses, model.experts)
            stacked = tuple(model.experts.experts.parameters())  # each [E, ...]
            by_expert = torch.stack([
                torch.cat([g.flatten(1) for g in torch.autograd.grad(loss, stacked, retain_graph=True)], 1)
                for loss in group_losses
            ])  # [groups, E, d]  # fmt: skip
        (weight * group_losses).sum().backward()
    fast = observed.group_gradients(groups, weight)  # [groups, d]
    print(f"one backward against one a group: {(fast - slow).abs().max() / slow.abs().max():.0e} apart")

    print("cosine between the groups' gradients")
    for name, row in zip(NAMES, cosine_similarity(fast[:, None], fast[None], dim=2), strict=True):
        print(f"  {name:8}" + "".join(f"{value:7.2f}" for value in row.tolist()))

    counts = one_hot(groups, len(NAMES)).T @ routing.selected.long().sum(1)  # selections [groups, E]
    load = counts.sum(0) / counts.sum()
    print(f"experts in effect   {metrics.effective_experts(load):.3f} of 1")
    print(f"NMI                 {metrics.normalized_mutual_information(counts):.3f}")
    print(f"purity above floor  {metrics.purity_above_floor(by_expert.norm(dim=2)):.3f}")
    print(f"cancelled energy    {metrics.cancelled_energy(by_expert):.3f}")


if __name__ == "__main__":
    main()
