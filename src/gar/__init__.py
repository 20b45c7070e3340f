"""Gradient-aligned routing for mixture-of-experts fine-tuning.

``gar.alignment_loss`` and its kin work on plain tensors; ``gar.nn`` and ``gar.observe`` inside one's own
torch model; ``gar.MultiTaskModel`` and ``gar.train`` do the whole job.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gar.version import __version__

if TYPE_CHECKING:
    from gar import (
        comparison,
        config,
        data,
        distributed,
        errors,
        evaluation,
        features,
        inspection,
        integrations,
        methods,
        metrics,
        model,
        nn,
        observation,
        presets,
        report,
        runs,
        sweeps,
        theory,
        training,
    )
    from gar.config import Config
    from gar.data import Mixture, Task
    from gar.errors import UserError
    from gar.evaluation import diagnose, evaluate
    from gar.model import MultiTaskModel
    from gar.objective import alignment_loss, association, marginal_scores
    from gar.observation import observe, per_group_gradients
    from gar.report import load as results
    from gar.routing import Router, Routing, masked_softmax, straight_through
    from gar.training import train

# The same once more, resolved on first use: `gar --help` and `gar.alignment_loss` import no transformers.
_ROOMS = (
    "comparison", "config", "data", "distributed", "errors", "evaluation", "features", "inspection",
    "integrations",
    "methods", "metrics", "model", "nn", "observation", "presets", "report", "runs", "sweeps", "theory",
    "training",
)  # fmt: skip
_EXPORTS = {
    "Config": "config.Config",
    "Mixture": "data.Mixture",
    "MultiTaskModel": "model.MultiTaskModel",
    "Router": "routing.Router",
    "Routing": "routing.Routing",
    "Task": "data.Task",
    "UserError": "errors.UserError",
    "alignment_loss": "objective.alignment_loss",
    "association": "objective.association",
    "diagnose": "evaluation.diagnose",
    "evaluate": "evaluation.evaluate",
    "marginal_scores": "objective.marginal_scores",
    "masked_softmax": "routing.masked_softmax",
    "observe": "observation.observe",
    "per_group_gradients": "observation.per_group_gradients",
    "results": "report.load",
    "straight_through": "routing.straight_through",
    "train": "training.train",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"gar.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'gar' has no attribute {name!r}")
    room, _, attribute = _EXPORTS[name].partition(".")
    return getattr(importlib.import_module(f"gar.{room}"), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "Config",
    "Mixture",
    "MultiTaskModel",
    "Router",
    "Routing",
    "Task",
    "UserError",
    "__version__",
    "alignment_loss",
    "association",
    "comparison",
    "config",
    "data",
    "diagnose",
    "distributed",
    "errors",
    "evaluate",
    "evaluation",
    "features",
    "inspection",
    "integrations",
    "marginal_scores",
    "masked_softmax",
    "methods",
    "metrics",
    "model",
    "nn",
    "observation",
    "observe",
    "per_group_gradients",
    "presets",
    "report",
    "results",
    "runs",
    "straight_through",
    "sweeps",
    "theory",
    "train",
    "training",
]
