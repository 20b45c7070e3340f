"""Groups spread over the micro-batches of one update against the whole batch and separate autograd calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gar
from gar.nn import RoutedLoRA
from gar.observation import GateSum, Grouping, Observed, RowSum, SiteObservation
from support.tiny import randomize
from support.tiny_moe import tiny_moe

TEXTS, TOKENS, COUNT = 8, 5, 4
SPLITS = [[8], [2, 2, 2, 2], [3, 1, 4], [1] * 8]
#: Group 3 has no text, or nobody has; powers of two scale float32 parts of the model exactly.
WEIGHT = torch.tensor([0.5, 0.25, 2.0, 1.0], dtype=torch.float64)
GROUPS = {
    "whole": [0, 0, 0, 1, 2, 2, 2, 2],
    "spread": [0, 1, 2, 0, 1, 2, 0, -1],
    "permuted": [2, -1, 0, 2, 0, 1, 0, 1],
    "one group": [1] * 8,
    "none": [-1] * 8,
}


class Ours(nn.Module):
    """Tokens routed through a bank of ours, and logits of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.bank = nn.Embedding(29, 6), RoutedLoRA(6, 29, experts=4, rank=2, top_k=2)
        randomize(self.double())

    def token_losses(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits = self.bank(self.embedding(ids), mask)[0].tanh()
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)


class Theirs(nn.Module):
    def __init__(self, family: str = "olmoe") -> None:
        super().__init__()
        self.model = tiny_moe(family)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, attention_mask=attention_mask).logits
        return logits

    def token_losses(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits = self(ids, attention_mask=mask.long())
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)


MODELS: dict[str, Callable[[], Any]] = {"ours": Ours, "olmoe": Theirs, "gpt_oss": lambda: Theirs("gpt_oss")}


def texts() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 29, (TEXTS, TOKENS), generator=generator)
    mask = torch.arange(TOKENS) < torch.tensor([5, 3, 4, 5, 2, 5, 1, 4]).unsqueeze(1)
    return ids.masked_fill(~mask, 0), mask


def parts(model: Any, ids: Tensor, mask: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
    """What these texts bring to the groups' mean losses [COUNT]; ``sizes`` are those of the update."""
    losses = (model.token_losses(ids, mask) * mask).sum(1)
    return torch.stack([losses[groups == m].sum() / max(1, int(sizes[m])) for m in range(COUNT)])


def micro_batches(model: Any, split: Sequence[int], groups: Tensor) -> list[tuple[Observed, Tensor]]:
    ids, mask = texts()
    sizes = groups[groups >= 0].bincount(minlength=COUNT)
    found = []
    for own, valid, numbers in zip(ids.split(split), mask.split(split), groups.split(split), strict=True):
        with gar.observe(model) as observed:
            (WEIGHT * parts(model, own, valid, numbers, sizes)).sum().backward()
        found.append((observed, numbers))
    return found


def separate(model: Any, groups: Tensor) -> list[Tensor]:
    """Of every site, the rows of the whole batch by a backward a group."""
    with gar.observe(model, gradients=False) as observed:
        losses = parts(model, *texts(), groups, groups[groups >= 0].bincount(minlength=COUNT))
        return [gar.per_group_gradients(losses, site.bank) for site in observed.sites]


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance * max(1e-300, float(expected.abs().max()))


@pytest.mark.parametrize("name", list(GROUPS))
@pytest.mark.parametrize("model", list(MODELS))
def test_every_split_has_the_rows_of_the_whole_batch(model: str, name: str) -> None:
    groups = torch.tensor(GROUPS[name])
    made = MODELS[model]()
    slow = separate(made, groups)
    for split in SPLITS:
        seen = micro_batches(made, split, groups)
        for layer, expected in enumerate(slow):
            kept, held = RowSum(COUNT), RowSum(COUNT, dtype=torch.float64)
            for observed, numbers in seen:
                for total in (kept, held):
                    total.add(observed.sites[layer], numbers, WEIGHT)
            for total in (kept, held):
                close(total.rows, expected)
                close(total.gram(), expected @ expected.T)
                close(total.gram(max_bytes=300), expected @ expected.T)
                close(torch.cat([*total.slices(1000)], 1), expected)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", list(GROUPS))
@pytest.mark.parametrize("model", list(MODELS))
def test_every_split_has_the_probabilities_of_the_whole_batch(model: str, name: str, per_token: bool) -> None:
    """Means over the update's texts, in plain loops; the router's gradient is the same too."""
    groups = torch.tensor(GROUPS[name])
    if per_token:
        groups = groups.unsqueeze(1).where(torch.arange(TOKENS) != 1, 2)
    made = MODELS[model]()
    (whole, _), mask = micro_batches(made, [TEXTS], groups[:, 0] if per_token else groups)[0], texts()[1]
    for layer, site in enumerate(whole.sites):
        expected = by_loops(site, groups, mask)
        reference: Tensor | None = None
        for split in SPLITS:
            total = GateSum(COUNT)
            seen = micro_batches(made, split, groups[:, 0] if per_token else groups)
            for (observed, _), numbers in zip(seen, groups.split(split), strict=True):
                total.add(observed.sites[layer], numbers)
            close(total.probabilities.detach(), expected, 1e-12)
            made.zero_grad()
            (total.probabilities * torch.linspace(0, 1, expected.numel()).view_as(expected)).sum().backward()
            gradient = torch.cat([p.grad.flatten() for p in made.parameters() if p.grad is not None])
            reference = gradient if reference is None else reference
            close(gradient, reference, 1e-12)


def by_loops(site: SiteObservation, groups: Tensor, mask: Tensor) -> Tensor:
    gates, expected = site.routing.gates, torch.zeros(COUNT, 4, dtype=torch.float64)
    for m in range(COUNT):
        members = []
        for text in range(TEXTS):
            valid = mask[text].nonzero().flatten().tolist()
            if groups.dim() == 2:
                members += [gates[text, t] for t in valid if groups[text, t] == m]
            elif groups[text] == m:
                members.append(torch.stack([gates[text, t] for t in valid]).mean(0))
        if members:
            mean = torch.stack(members).mean(0)
            expected[m] = mean / mean.sum()
    return expected


def test_what_is_kept_takes_the_less_memory() -> None:
    """Rows of ours are short here: they take the place of captures once these are larger."""
    groups = torch.tensor(GROUPS["spread"])
    made = Ours()
    (slow,) = separate(made, groups)
    total, sizes = RowSum(COUNT), []
    for observed, numbers in micro_batches(made, [1] * TEXTS, groups):
        total.add(observed.site, numbers, WEIGHT)
        kept = [t for part in total._parts for t in part.site.captures()]
        sizes.append(sum(t.numel() * t.element_size() for t in kept))
    rows = COUNT * slow.shape[1] * 8
    assert max(sizes) <= rows
    assert sizes[0] > 0
    assert sizes[-1] == 0
    close(total.rows, slow)
    close(total.gram(max_bytes=300), slow @ slow.T)


def test_rows_may_be_held_in_half_precision() -> None:
    groups = torch.tensor(GROUPS["spread"])
    made = Ours()
    (slow,) = separate(made, groups)
    total = RowSum(COUNT, dtype=torch.bfloat16, device="cpu")
    for observed, numbers in micro_batches(made, [3, 1, 4], groups):
        total.add(observed.site, numbers, WEIGHT)
        observed.site.forget_factors()
    assert total.rows.dtype == torch.bfloat16
    close(total.rows.double(), slow, 2e-2)
    gram = total.gram(max_bytes=100)
    assert gram.dtype == torch.float32
    rows = total.rows.double()
    close(gram.double(), rows @ rows.T, 1e-6)


def test_a_grouping_of_rows_or_tokens_serves_too() -> None:
    groups = torch.tensor(GROUPS["permuted"])
    ((observed, _),) = micro_batches(made := Ours(), [TEXTS], groups)
    expected = observed.group_gradients(groups, WEIGHT)
    tokens = groups.unsqueeze(1).expand(TEXTS, TOKENS)
    for one in (Grouping(groups, COUNT), tokens, Grouping(tokens.flatten(), COUNT)):
        total = RowSum(COUNT)
        total.add(observed.site, one, WEIGHT)
        close(total.rows, expected)
    del made


def test_a_weight_of_zero_is_a_row_of_zeros() -> None:
    groups = torch.tensor(GROUPS["spread"])
    ((observed, _),) = micro_batches(Ours(), [TEXTS], groups)
    total = RowSum(COUNT)
    total.add(observed.site, groups, WEIGHT * torch.tensor([1, 0, 1, 1]))
    assert total.rows.norm(dim=1).gt(0).tolist() == [True, False, True, False]


def test_mistakes_are_named() -> None:
    groups = torch.tensor(GROUPS["spread"])
    ((ours, _),) = micro_batches(Ours(), [TEXTS], groups)
    ((theirs, _),) = micro_batches(Theirs(), [TEXTS], groups)
    total = RowSum(COUNT)
    with pytest.raises(RuntimeError, match="nothing was added"):
        _ = total.rows
    with pytest.raises(RuntimeError, match="nothing was added"):
        total.gram()
    with pytest.raises(RuntimeError, match="nothing was added"):
        _ = GateSum(COUNT).probabilities
    with pytest.raises(gar.UserError, match=r"group_weight must be \[4\], got \[3\]"):
        total.add(ours.site, groups, WEIGHT[:3])
    with pytest.raises(ValueError, match=r"in \[0, 4\), got up to 4"):
        total.add(ours.site, groups + 2, WEIGHT)
    with pytest.raises(ValueError, match="one number for each of the 8 rows"):
        total.add(ours.site, groups[:3], WEIGHT)
    total.add(ours.site, groups, WEIGHT)
    with pytest.raises(gar.UserError, match="expected one RowSum a layer"):
        total.add(theirs.sites[0], groups, WEIGHT)
    with gar.observe(Ours()) as unused:
        pass
    with pytest.raises(RuntimeError, match="nothing was observed"):
        RowSum(COUNT).add(unused.site, groups, WEIGHT)
