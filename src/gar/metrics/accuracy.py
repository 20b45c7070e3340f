"""Right answers: accuracy, and the task metrics of the single-task results.

``predictions`` and ``labels`` [N] are class indices (or names) of the same examples, one each. Paper:
appendix "Metric Definitions and Aggregation", with its zero conventions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gar.metrics._arrays import Values, array


def accuracy(predictions: Values, labels: Values) -> float:
    """Share of the examples [N] whose prediction is the label.

    Range: 0 to 1. Source: paper, "Metric Definitions". No example at all is refused.

    >>> accuracy([1, 0, 2, 1], [1, 0, 0, 1])
    0.75
    """
    predicted, expected = _aligned(predictions, labels)
    return int((predicted == expected).sum()) / len(expected)


def macro_accuracy(tasks: Mapping[str, float]) -> float:
    """Equal-weight mean over tasks of their accuracies, whatever the sizes of their splits.

    Range: 0 to 1. Source: paper, "Metric Definitions". No task at all is refused.

    >>> macro_accuracy({"rte": 0.5, "qnli": 0.75})
    0.625
    """
    if not tasks:
        raise ValueError("tasks must name at least one accuracy")
    wrong = [name for name, value in tasks.items() if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"accuracies must be finite; not so for {', '.join(map(str, wrong))}")
    return math.fsum(float(v) for v in tasks.values()) / len(tasks)


def f1(predictions: Values, labels: Values, positive: Any = 1) -> float:
    """F1 of the class ``positive`` against the rest; ``predictions`` and ``labels`` [N].

    ``Prec = TP / max(1, TP+FP)``, ``Rec = TP / max(1, TP+FN)``, ``F1 = 2 Prec Rec / (Prec + Rec)``. Range: 0
    to 1. Source: paper, "Task-specific F1 and MCC".

    Degenerate: no true positive gives 0, also when no positive exists or is predicted.

    >>> f1([1, 1, 0, 0], [1, 0, 1, 0])
    0.5
    >>> f1([0, 0], [0, 0])
    0.0
    """
    from sklearn.metrics import f1_score  # slow to import, needed by few tasks

    predicted, expected = (side == positive for side in _aligned(predictions, labels))
    return float(f1_score(expected, predicted)) if (predicted & expected).any() else 0.0


def matthews_correlation(predictions: Values, labels: Values, positive: Any = 1) -> float:
    """Matthews correlation of the class ``positive`` against the rest; ``predictions`` and ``labels`` [N].

    ``(TP TN - FP FN) / sqrt((TP+FP)(TP+FN)(TN+FP)(TN+FN))``. Range: -1 to 1. Source: paper, "Task-specific F1
    and MCC".

    Degenerate: a constant prediction or a constant label gives 0.

    >>> matthews_correlation([1, 0, 1, 0], [1, 0, 1, 0])
    1.0
    >>> matthews_correlation([1, 1, 1, 1], [1, 0, 1, 0])
    0.0
    """
    from sklearn.metrics import matthews_corrcoef

    predicted, expected = (side == positive for side in _aligned(predictions, labels))
    constant = any(side.all() or not side.any() for side in (predicted, expected))
    return 0.0 if constant else float(matthews_corrcoef(expected, predicted))


#: A task's own metrics beside accuracy, by the names that tasks give them.
TASK_METRICS: Mapping[str, Callable[..., float]] = {"f1": f1, "mcc": matthews_correlation}


def _aligned(predictions: Values, labels: Values) -> tuple[NDArray[Any], NDArray[Any]]:
    predicted, expected = array(predictions), array(labels)
    if predicted.ndim != 1 or predicted.shape != expected.shape or not len(expected):
        raise ValueError(
            f"predictions and labels must be [N] of one length and not empty, "
            f"got shapes {predicted.shape} and {expected.shape}"
        )
    named = [np.issubdtype(side.dtype, np.character) for side in (predicted, expected)]
    if named[0] != named[1]:
        raise ValueError("predictions and labels must both be class indices or both be class names")
    return predicted, expected
