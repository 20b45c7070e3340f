"""What the experts did in the updates since the last log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gar.integrations._sharding import local
from gar.metrics import (
    load_variance,
    normalized_mutual_information,
    routing_entropy,
    structure_purity,
    utilization,
)
from gar.metrics.load import DEAD_SHARE

Counts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class ExpertStatistics:
    """Selections by label and expert, and means over updates, of every layer; plain numbers, small.

    ``layers`` are the names under which single layers are logged.
    """

    def __init__(self, layers: Sequence[str], adapters: Iterable[str] = ()) -> None:
        self.layers, self.adapters = list(layers), list(adapters)
        self.reset()

    def reset(self) -> None:
        self.counts: list[dict[int, Counts]] = [{} for _ in self.layers]
        self._values: dict[str, list[float]] = {}
        self.reached: set[str] = set()

    def add_selections(self, labels: Sequence[int], counts: Sequence[Tensor]) -> None:
        """``counts`` int64 [labels, E] of every layer: how often its experts were chosen, by label."""
        # Read from the device at once.
        flat = torch.cat([table.flatten().to(counts[0].device) for table in counts]).cpu()
        for table, part in zip(self.counts, flat.split([table.numel() for table in counts]), strict=True):
            _add(table, dict(zip(labels, part.view(len(labels), -1).numpy(), strict=True)))

    def join(self, ranks: Sequence[Sequence[Mapping[int, Counts]]]) -> None:
        """Take the selections of all ranks in the place of the own ones."""
        self.counts = [{} for _ in self.layers]
        for tables in ranks:
            for own, table in zip(self.counts, tables, strict=True):
                _add(own, table)

    def add_value(self, name: str, value: float) -> None:
        """One update's value; the log has the mean of those that are finite."""
        if math.isfinite(value):
            self._values.setdefault(name, []).append(value)

    def logs(self, per_layer: bool) -> dict[str, float]:
        """The log's entries."""
        found = {name: float(np.mean(values)) for name, values in self._values.items()}
        rows = [self._layer(table) for table in self.counts if table]
        for name in rows[0] if rows else ():
            found[f"moe/{name}"] = float(np.mean([row[name] for row in rows]))
            if per_layer:
                found |= {
                    f"moe/{layer}/{name}": row[name] for layer, row in zip(self.layers, rows, strict=True)
                }
        if self.adapters:
            found |= {
                "adapters/reached": float(len(self.reached)),
                "adapters/total": float(len(self.adapters)),
            }
        return found

    @staticmethod
    def _layer(table: Mapping[int, Counts]) -> dict[str, float]:
        counts = np.stack([*table.values()])
        load = counts.sum(0) / max(1, counts.sum())
        found = {
            "load_entropy": routing_entropy(load[None], normalize=True),
            "load_variance": load_variance(load),
            "utilization": utilization(load),
            "dead_experts": float((load < DEAD_SHARE / len(load)).sum()),
        }
        if len(table) > 1:
            found |= {"nmi": normalized_mutual_information(counts), "purity": structure_purity(counts)}
        return found


def _add(table: dict[int, Counts], other: Mapping[int, Counts]) -> None:
    for label, row in other.items():
        table[label] = table[label] + row if label in table else row


def adapter_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The trainable parameters of every adapter of PEFT inside a model, by its module's path."""
    found = {}
    for name, module in model.named_modules():
        parts = (getattr(module, part, None) for part in getattr(module, "adapter_layer_names", ()))
        own = [
            parameter
            for part in parts
            if isinstance(part, (nn.ModuleDict, nn.ParameterDict, nn.Parameter))
            for parameter in ([part] if isinstance(part, nn.Parameter) else part.parameters())
            if parameter.requires_grad
        ]
        if own:
            found[name] = own
    return found


def reached(adapters: Mapping[str, Sequence[nn.Parameter]]) -> set[str]:
    """The adapters of which a parameter has a gradient that is not zero, in this rank's part of it."""
    owners, largest = [], []
    for name, parameters in adapters.items():
        for parameter in parameters:
            if parameter.grad is not None and (own := local(parameter.grad.detach())).numel():
                owners.append(name)
                largest.append(own.abs().amax().float())
    if not largest:
        return set()
    values = torch.stack([value.to(largest[0].device) for value in largest]).tolist()
    return {name for name, value in zip(owners, values, strict=True) if value != 0}
