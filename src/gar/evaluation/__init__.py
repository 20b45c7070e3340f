"""What a model reaches, what its experts do, and what they see."""

from gar.evaluation.diagnosis import Lifted, collapse_notes, diagnose, gradient_shares, most_lifted
from gar.evaluation.measure import EvaluationFailure, evaluate

__all__ = [
    "EvaluationFailure",
    "Lifted",
    "collapse_notes",
    "diagnose",
    "evaluate",
    "gradient_shares",
    "most_lifted",
]
