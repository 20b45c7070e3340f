"""What a model reaches, what its experts do, and what they see."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gar.evaluation.findings import findings

if TYPE_CHECKING:
    from gar.evaluation.diagnosis import Lifted, collapse_notes, diagnose, gradient_shares, most_lifted
    from gar.evaluation.measure import EvaluationFailure, evaluate, measure_accuracy
    from gar.evaluation.saved import Saved, label, load_model, load_saved

# Resolved on first use, so that a report, which reads thresholds here, imports no model.
_EXPORTS = {
    "diagnosis": ("Lifted", "collapse_notes", "diagnose", "gradient_shares", "most_lifted"),
    "measure": ("EvaluationFailure", "evaluate", "measure_accuracy"),
    "saved": ("Saved", "label", "load_model", "load_saved"),
}


def __getattr__(name: str) -> Any:
    for module, names in _EXPORTS.items():
        if name in names:
            return getattr(importlib.import_module(f"gar.evaluation.{module}"), name)
    raise AttributeError(f"module 'gar.evaluation' has no attribute {name!r}")


__all__ = [
    "EvaluationFailure",
    "Lifted",
    "Saved",
    "collapse_notes",
    "diagnose",
    "evaluate",
    "findings",
    "gradient_shares",
    "label",
    "load_model",
    "load_saved",
    "measure_accuracy",
    "most_lifted",
]
