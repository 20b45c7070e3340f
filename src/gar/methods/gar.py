"""GAR: the router is trained to group examples whose expert gradients agree."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from gar.methods.base import Method, MethodState
from gar.methods.update import Update, over
from gar.objective import alignment_loss, common_length

#: The key in the saved state: updates made so far.
UPDATES = "updates"


class GAR(Method):
    """Router parameters get the gradient of ``L_task + coefficient * L_norm``, all others of ``L_task``.

    ``L_norm`` is :func:`gar.alignment_loss` over the update's group gradients and group routing
    probabilities, summed over expert sites (paper, section "Training with First-Order Detached Alignment"),
    or over those of examples or tokens (``observation.unit``; section "Route-Aligned Observation
    Construction").

    The defaults are the paper's form. ``gradients`` and ``probabilities`` put other rows into the same
    objective; without ``self_pairs`` it is ``-sum_k sum_{i != j} p_ik p_jk <g_i, g_j> / (d_k + eps)``
    (docs/top4.md has what each of them does). ``warmup`` lets the coefficient rise: it is
    ``coefficient * min(1, u / warmup)`` in update u = 1, 2, …; the count is saved with checkpoints.
    """

    name: ClassVar[str] = "gar"
    label: ClassVar[str] = "GAR"
    style: ClassVar[tuple[str, str] | None] = ("#0072B2", "D")
    capturable: ClassVar[bool] = True
    finer_observations: ClassVar[bool] = True
    compared: ClassVar[bool] = True
    proposed: ClassVar[bool] = True
    coefficient: float = Field(1e-3, ge=0, description="lambda; 0 is exactly Baseline")
    objective: Literal["load_normalized", "numerator_only"] = "load_normalized"
    entropy_weight: float = Field(0.0, ge=0, description="tau of the added sum p log p")
    gradients: Literal["raw", "unit", "task_scale"] = Field(
        "raw", description="g_m as it is, of length 1, or over the root mean square length of its task's"
    )
    probabilities: Literal["gates", "softmax"] = Field(
        "gates", description="p_m from the configured gates, or from the softmax over all experts"
    )
    self_pairs: bool = Field(
        True, description="whether a group's pair with itself, p_mk^2 |g_m|^2 / d_k, counts in the objective"
    )
    warmup: int = Field(0, ge=0, description="updates over which the coefficient rises from 0")

    def to_config(self) -> dict[str, Any]:
        # At their defaults the later keys are left out: runs of before them have the same configuration.
        later = ("gradients", "probabilities", "self_pairs", "warmup")
        unset = {key for key in later if getattr(self, key) == type(self).model_fields[key].default}
        return {key: value for key, value in super().to_config().items() if key not in unset}

    @property
    def observes(self) -> frozenset[str]:
        return frozenset({"routing", "gradients"}) if self.coefficient else frozenset()

    def initial_state(self, model: nn.Module) -> MethodState | None:
        if not (self.warmup and self.coefficient):
            return None
        device = next(model.parameters()).device
        return {UPDATES: torch.zeros((), dtype=torch.int64, device=device)}

    def router_loss(self, update: Update) -> Tensor | None:
        if not self.coefficient:
            return None
        total = update.zero
        for site in update.sites:
            p = site.row_probabilities(soft=self.probabilities == "softmax")
            scale = None if self.gradients == "raw" else self.scale(site.lengths(), update)
            total = total + self.loss(p, *site.observations(scale))
        return self.strength(update) * total

    def loss(self, p: Tensor, rows: Tensor | None, gram: Tensor | None = None) -> Tensor:
        """The objective of one site from ``p_m`` [M, E] and observations [M, d] or their Gram matrix."""
        return alignment_loss(
            p,
            rows if gram is None else None,
            gram=gram,
            normalize=self.objective == "load_normalized",
            entropy_weight=self.entropy_weight,
            self_pairs=self.self_pairs,
        )

    def strength(self, update: Update) -> float | Tensor:
        """What the coefficient is in this update; on the device while it may still rise."""
        if not self.warmup:
            return self.coefficient
        number: Tensor = update.state[UPDATES].double() + 1
        return self.coefficient * (number / self.warmup).clamp(max=1)

    def after_step(self, update: Update) -> None:
        if update.state is not None:
            update.state[UPDATES].add_(1)

    def scaled(self, rows: Tensor, update: Update) -> Tensor:
        """The observations [M, d] as ``gradients`` asks for them; a zero row stays one."""
        if self.gradients == "raw":
            return rows
        return over(rows, self.scale(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64), update))

    def scale(self, length: Tensor, update: Update) -> Tensor:
        """What the observations are divided by, [M], from their lengths."""
        if self.gradients == "unit":
            return length
        return common_length(length, update.row_tasks.to(length.device), update.task_count)
