"""Any aggregator of the torchjd package as a method."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from gar.errors import one_of
from gar.methods._rows import GradientCombination
from gar.methods.base import Choices


class TorchJD(GradientCombination):
    """Combines the group-gradient rows by ``torchjd.aggregation.<aggregator>(**options)``.

    With ``aggregator: Mean`` the update is that of Baseline. Needs the extra ``[torchjd]``.
    """

    name: ClassVar[str] = "torchjd"
    label: ClassVar[str] = "TorchJD"
    aggregator: str = Field("UPGrad", description="class name in torchjd.aggregation")
    options: dict[str, Any] = Field(default_factory=dict, description="its constructor arguments")

    def check(self, choices: Choices) -> str | None:
        try:
            from torchjd import aggregation
        except ImportError:
            return "torchjd is not installed; pip install 'gradient-aligned-routing[torchjd]'"
        known = sorted(
            name
            for name in aggregation.__all__
            if isinstance(cls := getattr(aggregation, name), type)
            and issubclass(cls, aggregation.Aggregator)
            and not getattr(cls, "__abstractmethods__", None)
        )
        if self.aggregator not in known:
            return str(one_of("method.aggregator", self.aggregator, known))
        try:
            self._build()
        except ImportError as error:
            return f"aggregator {self.aggregator} needs more packages: {error}"
        except (TypeError, ValueError) as error:
            return f"method.options do not fit {self.aggregator}: {error}"
        return super().check(choices)

    def _build(self) -> Any:
        from torchjd import aggregation

        return getattr(aggregation, self.aggregator)(**self.options)

    def combine(self, rows: Tensor) -> Tensor:
        # Aggregators divide by squared lengths: a task that is learnt has rows whose square is 0 in float32
        # while their products with others are not.
        squares = torch.linalg.vector_norm(rows, dim=1, keepdim=True).square()
        vanishing = squares < torch.finfo(rows.dtype).tiny
        if vanishing.any():
            rows = rows.masked_fill(vanishing, 0)
        direction: Tensor = self._build()(rows)
        return direction
