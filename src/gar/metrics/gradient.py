"""Whose gradients the experts receive, and how they agree.

``gradients`` [T, E, d] holds for each task and expert the mean over the task's groups of the gradient with
respect to that expert's own parameters; ``norms`` [T, E] holds its lengths. Cosines do not depend on the
scale of a gradient; a cosine with a zero gradient is 0. For large d, give Gram matrices instead: the value is
the same. ``gradients`` is read one expert at a time, so that float64 copies stay small.
Paper: appendix "Metric Definitions and Aggregation".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gar.metrics._arrays import Floats, Values, array, check_shape, non_negative, real

MASS_FLOOR = 1e-12  # an expert with no more total gradient mass than this has purity 0


def gradient_mass_purity(norms: Values) -> float:
    """Mean over experts of ``max_t ||g_te|| / sum_t' ||g_t'e||``; ``norms`` [T, E].

    Range: 0 to 1; at least ``1/T`` when every expert receives gradient. Source: paper, "Gradient-mass expert
    purity".

    Degenerate: an expert whose total is at most 1e-12 counts 0 and stays in the mean, so idle experts lower
    the value; one task gives the share of the experts above that floor.

    >>> gradient_mass_purity([[3.0, 0.0], [1.0, 0.0]])  # (0.75 + 0) / 2
    0.375
    """
    mass = non_negative(norms, "norms", "T", "E")
    with np.errstate(over="ignore"):
        live = mass.sum(0) > MASS_FLOOR
    top = np.where(live, mass.max(0), 1.0)
    return float(np.mean(np.where(live, 1 / np.maximum((mass / top).sum(0), 1.0), 0.0)))


def gradient_mass_floor(norms: Values) -> float:
    """``max_t sum_e ||g_te|| / sum_te ||g_te||``: the purity of experts that all have the same mix of tasks.

    ``norms`` [T, E]. What :func:`live_gradient_mass_purity` is compared with: where one task's gradients are
    long, every expert's largest share is high, specialised or not. Range: ``1/T`` to 1. Not in the paper.

    Degenerate: no gradient mass gives 0, one task 1.

    >>> gradient_mass_floor([[2.0, 4.0], [1.0, 1.0]])
    0.75
    """
    mass = non_negative(norms, "norms", "T", "E")
    by_task = (mass / (mass.max() or 1.0)).sum(1)
    return float(by_task.max() / by_task.sum()) if by_task.any() else 0.0


def live_gradient_mass_purity(norms: Values) -> float:
    """:func:`gradient_mass_purity` over the experts that receive gradient: idle ones do not count.

    ``norms`` [T, E]. Range: ``1/T`` to 1. Not in the paper. Degenerate: no gradient mass gives 0, one task 1.

    >>> live_gradient_mass_purity([[3.0, 0.0], [1.0, 0.0]])
    0.75
    """
    mass = non_negative(norms, "norms", "T", "E")
    with np.errstate(over="ignore"):
        live = mass.sum(0) > MASS_FLOOR
    return gradient_mass_purity(mass[:, live]) if live.any() else 0.0


def purity_above_floor(norms: Values) -> float:
    """``(live - floor) / (1 - floor)``: how far the live experts' purity goes beyond an equal mix of tasks.

    ``norms`` [T, E]; ``live`` is :func:`live_gradient_mass_purity`, ``floor`` :func:`gradient_mass_floor`.
    0: no more than an equal mix; 1: every live expert has one task's gradient alone. It may be below 0, since
    experts count alike however much gradient they receive. Not in the paper.

    Degenerate: one task, or no gradient mass, gives 0.

    >>> purity_above_floor([[3.0, 0.0], [1.0, 4.0]])  # (0.875 - 0.625) / 0.375
    0.6666666666666666
    """
    floor = gradient_mass_floor(norms)
    return (live_gradient_mass_purity(norms) - floor) / (1 - floor) if 0 < floor < 1 else 0.0


def gradient_mass_shares(norms: Values) -> Floats:
    """Each task's share of the expert's gradient mass ``||g_te|| / sum_t' ||g_t'e||``; ``norms`` [T, E].

    Columns sum to 1. Degenerate: an expert whose total is at most 1e-12 has zeros. Not in the paper, whose
    purity is the mean of the columns' largest shares.

    >>> gradient_mass_shares([[3.0, 0.0], [1.0, 0.0]]).tolist()
    [[0.75, 0.0], [0.25, 0.0]]
    """
    mass = non_negative(norms, "norms", "T", "E")
    with np.errstate(over="ignore"):
        live = mass.sum(0) > MASS_FLOOR
    scaled = mass / np.where(live, mass.max(0), 1.0)
    return np.where(live, scaled / np.where(live, scaled.sum(0), 1.0), 0.0)


def intra_expert_coherence(gradients: Values | None = None, *, gram: Values | None = None) -> float:
    """Expert mean of the mean cosine over all task pairs; ``gradients`` [T, E, d] or ``gram`` [E, T, T].

    ``gram[e]`` holds the inner products of expert e's task gradients. Range: ``-1/(T-1)`` to 1. Source:
    paper, "Gradient cosine diagnostics".

    Degenerate: a pair with a zero gradient counts 0 and stays in the mean; one task (no pair) gives 0.

    >>> intra_expert_coherence([[[1.0, 0.0]], [[2.0, 0.0]], [[0.0, 0.0]]])  # 1 of 3 pairs is active
    0.3333333333333333
    >>> intra_expert_coherence(gram=[[[1.0, 2.0, 0.0], [2.0, 4.0, 0.0], [0.0, 0.0, 0.0]]])
    0.3333333333333333
    """
    if gram is not None:
        _one_of(gradients)
        blocks = real(gram, "gram", "E", "T", "T")
        return float(np.mean([_pair_mean(_cosines_of_gram(block)) for block in blocks]))
    host = _probe(gradients)
    return float(np.mean([_pair_mean(_cosine_matrix(_expert(host, e))) for e in range(host.shape[1])]))


def inter_expert_similarity(gradients: Values | None = None, *, gram: Values | None = None) -> float:
    """Mean cosine over expert pairs of ``gbar_e = mean_t g_te``; ``gradients`` [T, E, d] or ``gram`` [E, E].

    ``gram`` holds the inner products of the ``gbar_e``. All experts share one parameter template, so their
    gradients are compared entry by entry. Range: ``-1/(E-1)`` to 1. Source: paper, "Gradient cosine
    diagnostics".

    Degenerate: a pair with a zero ``gbar`` counts 0 and stays in the mean; one expert (no pair) gives 0.

    >>> inter_expert_similarity([[[1.0, 0.0], [1.0, 1.0]], [[1.0, 0.0], [1.0, -1.0]]])
    1.0
    >>> inter_expert_similarity(gram=[[4.0, 0.0], [0.0, 9.0]])
    0.0
    """
    if gram is not None:
        _one_of(gradients)
        return _pair_mean(_cosines_of_gram(real(gram, "gram", "E", "E")))
    host = _probe(gradients)
    means = []
    for e in range(host.shape[1]):
        block = _expert(host, e)
        means.append((block / (np.abs(block).max() or 1.0)).mean(0))
    return _pair_mean(_cosine_matrix(np.stack(means)))


def expert_cosines(gradients: Values | None = None, *, gram: Values | None = None) -> Floats:
    """Cosines [E, T, T] between the tasks' gradients within each expert.

    ``gradients`` [T, E, d], or ``gram`` [E, T, T] as in :func:`intra_expert_coherence`, which is their mean
    over experts and task pairs. Range: -1 to 1. Source: paper, "Gradient cosine diagnostics".

    Degenerate: cosines with a zero gradient are 0, on the diagonal too.

    >>> expert_cosines(gram=[[[4.0, -2.0], [-2.0, 4.0]], [[9.0, 0.0], [0.0, 0.0]]]).tolist()
    [[[1.0, -0.5], [-0.5, 1.0]], [[1.0, 0.0], [0.0, 0.0]]]
    """
    if gram is not None:
        _one_of(gradients)
        return np.stack([_cosines_of_gram(block) for block in real(gram, "gram", "E", "T", "T")])
    host = _probe(gradients)
    return np.stack([_cosine_matrix(_expert(host, e)) for e in range(host.shape[1])])


def task_cosines(gradients: Values | None = None, *, gram: Values | None = None) -> Floats:
    """Cosines [T, T] between the tasks' gradients in all experts together.

    ``gradients`` [T, E, d] are read as T rows of E d numbers; ``gram`` [E, T, T] as in
    :func:`intra_expert_coherence`, whose sum over experts holds the inner products of these rows. An expert
    that receives more gradient counts more, unlike there. Range: -1 to 1. The paper has no such number.

    Degenerate: cosines with a zero row are 0, on the diagonal too.

    >>> task_cosines([[[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]]).round(3).tolist()
    [[1.0, 0.5], [0.5, 1.0]]
    """
    if gram is not None:
        _one_of(gradients)
        return _cosines_of_gram(real(gram, "gram", "E", "T", "T").sum(0))
    rows = real(_probe(gradients), "gradients", "T", "E", "d")
    return _cosine_matrix(rows.reshape(len(rows), -1))


def task_cosine(gradients: Values | None = None, *, gram: Values | None = None) -> float:
    """Mean over task pairs of :func:`task_cosines`: how far the tasks pull the experts in one direction.

    Range: ``-1/(T-1)`` to 1; below 0 the tasks are in conflict on the whole. Degenerate: one task (no pair)
    gives 0.

    >>> task_cosine([[[1.0, 0.0], [0.0, 0.0]], [[-1.0, 0.0], [0.0, 0.0]]])
    -1.0
    """
    return _pair_mean(task_cosines(gradients, gram=gram))


def task_conflict(gradients: Values | None = None, *, gram: Values | None = None) -> float:
    """Share of the task pairs whose cosine in :func:`task_cosines` is negative.

    Range: 0 to 1, a multiple of one over the number of pairs. Degenerate: one task (no pair) gives 0.

    >>> task_conflict([[[1.0, 0.0]], [[-1.0, 0.1]], [[0.5, 1.0]]])  # 1 and 2, 2 and 3
    0.6666666666666666
    """
    return _pair_mean((task_cosines(gradients, gram=gram) < 0).astype(float))


def observed_cosine(gradients: Values | None = None, *, gram: Values | None = None) -> float:
    """Mean cosine over task pairs of ``g_t = sum_e g_te``, the observation that the objective reads.

    ``gradients`` [T, E, d], or ``gram`` [T, T], the inner products of the ``g_t``. All experts share one
    parameter template, so their gradients are added entry by entry. Range: ``-1/(T-1)`` to 1. Degenerate: a
    pair with a zero ``g_t`` counts 0; one task (no pair) gives 0.

    >>> observed_cosine([[[1.0, 0.0], [1.0, 0.0]], [[2.0, 0.0], [-1.0, 0.0]]])
    1.0
    """
    if gram is not None:
        _one_of(gradients)
        return _pair_mean(_cosines_of_gram(real(gram, "gram", "T", "T")))
    rows = real(_probe(gradients), "gradients", "T", "E", "d")
    return _pair_mean(_cosine_matrix((rows / (np.abs(rows).max() or 1.0)).sum(1)))


def cancelled_energy(gradients: Values | None = None, *, gram: Values | None = None) -> float:
    """Share of the gradient energy that cancels inside the experts when the tasks' gradients are added.

    ``1 - sum_e ||sum_t g_te||^2 / sum_e (sum_t ||g_te||)^2``: the denominator is what the sum would be if all
    tasks pulled an expert in one direction. ``gradients`` [T, E, d], or ``gram`` [E, T, T] as in
    :func:`intra_expert_coherence`. Range: 0 (every expert's tasks agree, or it has one task) to 1 (the sum is
    zero in every expert); tasks of equal length at right angles have ``1 - 1/T``. The paper has none such.

    Degenerate: no gradient at all gives 0; an expert without gradient has no part in it.

    >>> cancelled_energy([[[1.0, 0.0]], [[-1.0, 0.0]]]), cancelled_energy([[[1.0, 0.0]], [[0.0, 1.0]]])
    (1.0, 0.5)
    """
    left, whole = _energies(gradients, gram)
    return _cancelled(left.sum(), whole.sum())


def cancelled_by_expert(gradients: Values | None = None, *, gram: Values | None = None) -> list[float]:
    """:func:`cancelled_energy` of every expert alone; an expert without gradient has 0.

    >>> cancelled_by_expert([[[1.0, 0.0], [2.0, 0.0]], [[0.0, 0.0], [-1.0, 0.0]]])  # 0, and 1 - 1 / 9
    [0.0, 0.8888888888888888]
    """
    return list(map(_cancelled, *_energies(gradients, gram)))


def _energies(gradients: Values | None, gram: Values | None) -> tuple[Floats, Floats]:
    """By expert ``||sum_t g_te||^2`` and ``(sum_t ||g_te||)^2``, [E], up to one common factor."""
    if gram is not None:
        _one_of(gradients)
        blocks = real(gram, "gram", "E", "T", "T")
    else:
        host = _probe(gradients)
        rows = real(host, "gradients", "T", "E", "d").transpose(1, 0, 2)
        rows = rows / (np.abs(rows).max() or 1.0)
        blocks = rows @ rows.transpose(0, 2, 1)
    if blocks.shape[1] != blocks.shape[2]:
        raise ValueError(f"gram must be square in its last two axes, got {list(blocks.shape[1:])}")
    squares = np.diagonal(blocks, axis1=1, axis2=2)
    return blocks.sum((1, 2)), np.sqrt(np.maximum(squares, 0.0)).sum(1) ** 2


def _cancelled(left: float, whole: float) -> float:
    return min(1.0, max(0.0, 1.0 - float(left / whole))) if whole > 0 else 0.0


def _one_of(gradients: Values | None) -> None:
    if gradients is not None:
        raise ValueError("give either gradients or gram=, not both")


def _probe(gradients: Values | None) -> Any:
    """Checked for shape only and, when it is a tensor, left where it is."""
    if gradients is None:
        raise ValueError("give the observations as gradients [T, E, d] or their products as gram=")
    host = gradients if hasattr(gradients, "detach") else array(gradients)
    check_shape(host, "gradients", "T", "E", "d")
    return host


def _expert(host: Any, e: int) -> Floats:
    return real(host[:, e], "gradients", "T", "d")


def _cosine_matrix(rows: Floats) -> Floats:
    """Cosines [n, n] between ``rows`` [n, d]; 0 with a zero row. No square under- or overflows."""
    scale = np.abs(rows).max(1, keepdims=True)
    unit = rows / np.where(scale > 0, scale, 1.0)
    length = np.sqrt((unit * unit).sum(1, keepdims=True))
    unit /= np.where(length > 0, length, 1.0)
    return np.clip(unit @ unit.T, -1.0, 1.0)


def _cosines_of_gram(gram: Floats) -> Floats:
    """As :func:`_cosine_matrix`, from inner products [n, n]; rounding below zero on the diagonal is zero."""
    if gram.shape[0] != gram.shape[1]:
        raise ValueError(f"gram must be square in its last two axes, got {gram.shape[0]} x {gram.shape[1]}")
    squares = np.diagonal(gram)
    if squares.min() < -1e-6 * np.abs(squares).max():
        raise ValueError(f"gram must have squared lengths on its diagonal, got {squares.min():g}")
    live = squares > 0
    length = np.sqrt(np.where(live, squares, 1.0))
    cosines = np.where(np.outer(live, live), gram, 0.0) / length[:, None] / length
    return np.clip(cosines, -1.0, 1.0)


def _pair_mean(cosines: Floats) -> float:
    n = len(cosines)
    return float(cosines[np.triu_indices(n, 1)].mean()) if n > 1 else 0.0
