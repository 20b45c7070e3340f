"""One unit of texts through the model: where its tokens were routed, and the gradient that each expert gets.

Nothing is trained. Experts alone require gradients while a unit is measured; the gradient of a layer's
experts is reduced to rows as soon as autograd has it, and freed: at most one slot of one layer is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gar.errors import UserError
from gar.inspection._encode import Encoded, Unit, batches
from gar.inspection._rows import Reducer
from gar.nn import RoutedExperts
from gar.objective import accurate
from gar.observation import SiteObservation, observe
from gar.routing import Routing


@dataclass(frozen=True)
class Site:
    """An MoE layer: E ``experts``, and their stacked parameters [E, ...] by slot."""

    name: str
    layer: int | None
    experts: int
    slots: dict[str, nn.Parameter]

    @property
    def template(self) -> dict[str, int]:
        """Numbers of one expert by slot."""
        return {slot: parameter[0].numel() for slot, parameter in self.slots.items()}

    @property
    def size(self) -> int:
        """Parameters of one expert."""
        return sum(self.template.values())


@dataclass(frozen=True)
class LayerRecord:
    """What one unit showed in one layer.

    ``counts`` int64 [E]: selections; ``gates`` [E]: sum of the gates of selected experts; ``shares`` [E]: sum
    over texts of ``q``, the gates averaged over a text's tokens, divided by their sum; ``entropy``: sum over
    texts of H(q); ``rows`` [E, s]: the gradient of the SUM of the unit's losses, or its sketch.
    """

    counts: Tensor
    gates: Tensor
    shares: Tensor
    entropy: Tensor
    rows: Tensor


@dataclass(frozen=True)
class UnitRecord:
    """What one unit showed: its texts, tokens, losses (predicted tokens, or texts), and their sum."""

    texts: int
    tokens: int
    losses: int
    loss: float
    layers: list[LayerRecord]


def find_sites(model: nn.Module) -> list[Site]:
    """The MoE layers of a model, in order; a model without any, or with unusual ones, is refused."""
    try:
        with observe(model, gradients=False) as observed:
            return [_site(site) for site in observed.sites]
    except ValueError as error:
        if "no expert bank" not in str(error):
            raise
        raise UserError(
            f"{type(model).__name__} has no MoE layer; expected a model with routed experts, as Qwen3-MoE, "
            "OLMoE, Mixtral, GPT-OSS or DeepSeek-V3"
        ) from None


def _site(site: SiteObservation) -> Site:
    holder: nn.Module = site.bank.experts if isinstance(site.bank, RoutedExperts) else site.bank
    slots = {slot: getattr(holder, slot, None) for slot in site.template()}
    if not all(isinstance(parameter, nn.Parameter) for parameter in slots.values()):
        raise UserError(
            f"{site.name} has an adapter on its experts; expected it merged: model.merge_and_unload()"
        )
    kept = {slot: parameter for slot, parameter in slots.items() if isinstance(parameter, nn.Parameter)}
    return Site(site.name, site.layer, len(next(iter(kept.values()))), kept)


class Meter:
    """Measures units of texts; made by :func:`metering`, which puts the model back as it was."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        reducers: Sequence[Reducer],
        pad: int | None,
        tokens: int,
    ) -> None:
        self._model, self._sites, self._reducers = model, sites, reducers
        self._pad, self._tokens = pad, tokens
        self._rows: list[Tensor] = []
        self._scale = 1.0

    def measure(self, encoded: Encoded, unit: Unit) -> UnitRecord:
        """Forward and backward of the unit's texts, in batches of texts of similar length."""
        lengths = [len(row) for row in encoded.ids]
        dtypes = [torch.promote_types(next(iter(s.slots.values())).dtype, torch.float32) for s in self._sites]
        self._rows = [
            torch.zeros(site.experts, reducer.width, dtype=dtype)
            for site, reducer, dtype in zip(self._sites, self._reducers, dtypes, strict=True)
        ]
        tallies = [_Tally(site.experts) for site in self._sites]
        losses, total = 0, 0.0
        for batch in batches(lengths, unit.texts, self._tokens if self._pad is not None else 1):
            try:
                count, loss = self._batch(encoded, batch, tallies)
            except torch.OutOfMemoryError:
                raise UserError(
                    f"out of memory with {len(batch)} texts of {max(lengths[i] for i in batch)} tokens; "
                    "expected a smaller --batch-tokens, or --max-length"
                ) from None
            losses, total = losses + count, total + loss
        found = [
            LayerRecord(tally.counts, tally.gates, tally.shares, tally.entropy, rows)
            for tally, rows in zip(tallies, self._rows, strict=True)
        ]
        for site, rows in zip(self._sites, self._rows, strict=True):
            if not bool(torch.isfinite(rows).all()):
                raise UserError(f"{site.name}: the gradient is not finite; {_PRECISION}")
        self._rows = []
        return UnitRecord(len(unit.texts), sum(lengths[i] for i in unit.texts), losses, total, found)

    def take(self, number: int, slot: str, parameter: Tensor) -> None:
        """The gradient of a slot is there: into the rows of its layer, and freed."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._reducers[number].add(self._rows[number], slot, gradient, self._scale)

    def _batch(self, encoded: Encoded, batch: Sequence[int], tallies: Sequence[_Tally]) -> tuple[int, float]:
        device = next(iter(self._sites[0].slots.values())).device
        ids, mask = _padded([encoded.ids[i] for i in batch], self._pad or 0)
        ids, mask = ids.to(device), mask.to(device)
        with observe(self._model, gradients=False) as observed:
            logits = self._model(input_ids=ids, attention_mask=mask).logits
            for tally, site in zip(tallies, observed.sites, strict=True):
                tally.add(site.routing, mask)
        if encoded.classes is None:
            targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
            count = int((targets != -100).sum())
            loss = functional.cross_entropy(accurate(logits[:, :-1]).flatten(0, 1), targets.flatten())
        else:
            count = len(batch)
            classes = torch.tensor([encoded.classes[i] for i in batch], device=device)
            loss = functional.cross_entropy(accurate(logits), classes)
        if not bool(torch.isfinite(loss)):
            group = encoded.names[encoded.groups[batch[0]]]
            raise UserError(f"the loss of texts of group {group!r} is not finite; {_PRECISION}")
        self._scale = float(count)  # the mean is what float16 can hold; rows are of the sum
        loss.backward()
        return count, float(loss.detach()) * count


_PRECISION = "expected a model that works in its own precision (try another dtype in its config.json)"


@contextmanager
def metering(
    model: nn.Module, sites: Sequence[Site], reducers: Sequence[Reducer], pad: int | None, tokens: int
) -> Iterator[Meter]:
    """In eval mode, with gradients of the experts alone. Modes, flags and gradients are put back at the end.

    ``pad`` is the token to pad with; without one every text is a batch of its own.
    """
    meter = Meter(model, sites, reducers, pad, tokens)
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    with ExitStack() as stack:
        stack.callback(_restore, modes, flags)
        model.eval()
        for parameter, _, _ in flags:
            parameter.requires_grad_(False)
            parameter.grad = None
        for number, site in enumerate(sites):
            for slot, parameter in site.slots.items():
                parameter.requires_grad_()

                def taken(tensor: Tensor, number: int = number, slot: str = slot) -> None:
                    meter.take(number, slot, tensor)

                stack.callback(parameter.register_post_accumulate_grad_hook(taken).remove)
        stack.enter_context(torch.enable_grad())
        yield meter


def _restore(modes: list[tuple[nn.Module, bool]], flags: list[tuple[nn.Parameter, bool, Any]]) -> None:
    for module, training in modes:
        module.training = training
    for parameter, required, gradient in flags:
        parameter.requires_grad_(required)
        parameter.grad = gradient


class _Tally:
    """Sums over the tokens and texts of one unit in one layer."""

    def __init__(self, experts: int) -> None:
        self.counts = torch.zeros(experts, dtype=torch.int64)
        self.gates = torch.zeros(experts, dtype=torch.float64)
        self.shares = torch.zeros(experts, dtype=torch.float64)
        self.entropy = torch.zeros((), dtype=torch.float64)

    def add(self, routing: Routing, mask: Tensor) -> None:
        gates, selected = routing.gates.detach(), routing.selected
        if gates.dim() == 3:
            gates = gates.masked_fill(mask.unsqueeze(-1) == 0, 0)
            selected = selected & (mask.unsqueeze(-1) != 0)
            self.counts += selected.sum((0, 1)).cpu()
            gates = gates.double().sum(1)
        else:
            self.counts += selected.sum(0).cpu()
            gates = gates.double()
        self.gates += gates.sum(0).cpu()
        # The mean over a text's tokens and the sum have one share.
        shares = gates / gates.sum(1, keepdim=True).clamp(min=torch.finfo(gates.dtype).tiny)
        self.shares += shares.sum(0).cpu()
        self.entropy -= torch.special.xlogy(shares, shares).sum().cpu()


def _padded(rows: Sequence[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, L], padded on the right."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask
