"""From several labelled files to an answer: methods with the same seeds, what they show, and a model to use.

:func:`compare` is ``gar compare``; :func:`judge` and :func:`recommend` are its rules on plain numbers.
"""

from gar.comparison.compare import Stopped, compare
from gar.comparison.outcome import Comparison, Recommended
from gar.comparison.recommend import Recommendation, recommend
from gar.report.verdict import Kind, Verdict, judge

__all__ = [
    "Comparison",
    "Kind",
    "Recommendation",
    "Recommended",
    "Stopped",
    "Verdict",
    "compare",
    "judge",
    "recommend",
]
