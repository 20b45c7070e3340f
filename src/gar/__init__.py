"""Gradient-aligned routing for mixture-of-experts fine-tuning.

``gar.alignment_loss`` and its kin work on plain tensors; ``gar.nn`` and ``gar.observe`` inside one's own
torch model; ``gar.MultiTaskModel`` and ``gar.train`` do the whole job.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gar.version import __version__

# Resolved on first use, so that `gar --help` and `gar.alignment_loss` do not import transformers.
_EXPORTS = {
    "alignment_loss": "gar.objective",
    "association": "gar.objective",
    "marginal_scores": "gar.objective",
    "Routing": "gar.routing",
    "Router": "gar.routing",
    "masked_softmax": "gar.routing",
    "straight_through": "gar.routing",
    "observe": "gar.observation",
    "per_group_gradients": "gar.observation",
    "MultiTaskModel": "gar.model.multitask",
    "Mixture": "gar.data",
    "Task": "gar.data",
    "Config": "gar.config",
    "train": "gar.training",
    "diagnose": "gar.evaluation.diagnosis",
    "evaluate": "gar.evaluation.measure",
    "results": "gar.report.results",
}
_RENAMED = {"results": "load"}
_MODULES = ("config", "data", "methods", "metrics", "nn", "training")

if TYPE_CHECKING:
    from gar import data, methods, metrics, nn
    from gar.config import Config
    from gar.data import Mixture, Task
    from gar.evaluation.diagnosis import diagnose
    from gar.evaluation.measure import evaluate
    from gar.model.multitask import MultiTaskModel
    from gar.objective import alignment_loss, association, marginal_scores
    from gar.observation import observe, per_group_gradients
    from gar.report.results import load as results
    from gar.routing import Router, Routing, masked_softmax, straight_through
    from gar.training import train


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), _RENAMED.get(name, name))
    if name in _MODULES:
        return importlib.import_module(f"gar.{name}")
    raise AttributeError(f"module 'gar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS, *_MODULES])


__all__ = [
    "Config",
    "Mixture",
    "MultiTaskModel",
    "Router",
    "Routing",
    "Task",
    "__version__",
    "alignment_loss",
    "association",
    "data",
    "diagnose",
    "evaluate",
    "marginal_scores",
    "masked_softmax",
    "methods",
    "metrics",
    "nn",
    "observe",
    "per_group_gradients",
    "results",
    "straight_through",
    "train",
]
