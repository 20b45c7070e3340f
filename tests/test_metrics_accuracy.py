"""Accuracy, F1 and MCC against plain loops, and against scikit-learn where it defines them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.metrics import f1_score, matthews_corrcoef

from gar.metrics import accuracy, f1, macro_accuracy, matthews_correlation


def slow_confusion(predictions, labels):
    tp = tn = fp = fn = 0
    for p, y in zip(predictions, labels, strict=True):
        if p == 1 and y == 1:
            tp += 1
        elif p == 1:
            fp += 1
        elif y == 1:
            fn += 1
        else:
            tn += 1
    return tp, tn, fp, fn


def slow_f1(predictions, labels):
    tp, _, fp, fn = slow_confusion(predictions, labels)
    precision, recall = tp / max(1, tp + fp), tp / max(1, tp + fn)
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0


def slow_mcc(predictions, labels):
    tp, tn, fp, fn = slow_confusion(predictions, labels)
    denominator = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return (tp * tn - fp * fn) / denominator if denominator > 0 else 0.0


binary = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)
many = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40)


@given(many)
def test_accuracy_agrees_with_loops(pairs):
    predictions, labels = zip(*pairs, strict=True)
    assert accuracy(predictions, labels) == sum(p == y for p, y in pairs) / len(pairs)


@given(many)
def test_f1_and_mcc_agree_with_loops(pairs):
    predictions, labels = zip(*pairs, strict=True)
    assert f1(predictions, labels) == pytest.approx(slow_f1(predictions, labels), rel=1e-12)
    assert matthews_correlation(predictions, labels) == pytest.approx(
        slow_mcc(predictions, labels), abs=1e-12
    )
    assert 0 <= f1(predictions, labels) <= 1
    assert -1 <= matthews_correlation(predictions, labels) <= 1


@given(binary)
def test_f1_and_mcc_agree_with_scikit_learn(pairs):
    predictions, labels = zip(*pairs, strict=True)
    # without a true positive or with one class alone it warns
    assume(any(p and y for p, y in pairs) and not all(p and y for p, y in pairs))
    assert f1(predictions, labels) == pytest.approx(f1_score(labels, predictions), abs=1e-14)
    assert matthews_correlation(predictions, labels) == pytest.approx(
        matthews_corrcoef(labels, predictions), abs=1e-14
    )


@given(many, st.randoms())
def test_the_order_of_examples_does_not_matter(pairs, random):
    shuffled = random.sample(pairs, len(pairs))
    for metric in (accuracy, f1, matthews_correlation):
        assert metric(*zip(*shuffled, strict=True)) == metric(*zip(*pairs, strict=True))


@pytest.mark.parametrize(
    ("predictions", "labels"),
    [([0, 0, 0], [0, 0, 0]), ([1, 1], [0, 0]), ([0, 0], [1, 1]), ([0, 0, 0], [1, 0, 1]), ([0, 1], [1, 0])],
)
def test_without_a_true_positive_f1_is_zero(predictions, labels):
    assert f1(predictions, labels) == 0.0


@pytest.mark.parametrize(
    ("predictions", "labels"), [([1, 1, 1], [1, 1, 1]), ([1, 1, 1], [0, 1, 0]), ([0, 1, 0], [0, 0, 0])]
)
def test_a_constant_side_has_no_correlation(predictions, labels):
    assert matthews_correlation(predictions, labels) == 0.0


def test_large_splits_do_not_overflow():
    labels = np.tile([0, 1], 400_000).astype(np.int8)
    assert matthews_correlation(labels, labels) == 1.0
    assert matthews_correlation(1 - labels, labels) == -1.0
    assert f1(labels, labels) == 1.0


def test_class_names_and_tensors():
    assert accuracy(["yes", "no"], ["yes", "yes"]) == 0.5
    assert f1(["yes", "no", "yes"], ["yes", "yes", "no"], positive="yes") == 0.5
    predictions, labels = torch.tensor([1, 0, 1]), torch.tensor([1, 1, 0])
    assert accuracy(predictions, labels) == pytest.approx(1 / 3)
    assert f1(predictions, labels) == 0.5
    assert f1(predictions, labels, positive=0) == 0.0
    assert matthews_correlation(predictions, labels) == -0.5


def test_macro_accuracy_weighs_tasks_equally():
    assert macro_accuracy({"a": 0.25, "b": 0.5, "c": 0.75}) == 0.5
    assert macro_accuracy({"a": 0.25}) == 0.25
    with pytest.raises(ValueError, match="at least one"):
        macro_accuracy({})
    with pytest.raises(ValueError, match="not so for b"):
        macro_accuracy({"a": 0.5, "b": math.nan})


@pytest.mark.parametrize("metric", [accuracy, f1, matthews_correlation])
def test_answers_that_make_no_sense_are_refused(metric):
    with pytest.raises(ValueError, match="one length"):
        metric([1, 0], [1])
    with pytest.raises(ValueError, match="not empty"):
        metric([], [])
    with pytest.raises(ValueError, match="one length"):
        metric([[1, 0]], [[1, 0]])
    with pytest.raises(ValueError, match="class names"):
        metric([1, 0], ["1", "0"])
