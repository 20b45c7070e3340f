"""What a model reaches, what its experts do, and what they see."""

from gar.evaluation.diagnosis import Lifted, collapse_notes, diagnose, gradient_shares, most_lifted
from gar.evaluation.findings import findings
from gar.evaluation.measure import EvaluationFailure, evaluate, measure_accuracy
from gar.evaluation.saved import Saved, label, load_model, load_saved

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
