"""The load-normalised alignment objective on plain tensors.

Rows are M observations (groups, examples or tokens), columns are E experts. Every function takes either
the observations ``gradients`` [M, d] or their Gram matrix ``gram`` [M, M]; whichever is given, the value is
the same. Paper: section "Load-normalized partition objective" and equation of ``L_norm``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from gar.precision import full_precision, matmul

EPS = 1e-8
#: Parameters of an observation from which on a GPU takes the Gram matrix.
LONG = 1 << 20


def accurate(x: Tensor) -> Tensor:
    """float32, or wider if it already is: observations never accumulate in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def association(
    probabilities: Tensor,
    gradients: Tensor | None = None,
    *,
    gram: Tensor | None = None,
    eps: float = EPS,
    normalize: bool = True,
) -> Tensor:
    """Load-normalised coherence ``sum_k ||G_k||^2 / (d_k + eps)``, a scalar.

    ``G_k = sum_m p_mk g_m`` and ``d_k = sum_m p_mk``, with ``probabilities`` [M, E] and observations
    [M, d] (or ``gram`` [M, M]). ``normalize=False`` leaves the denominator out. Differentiable in the
    probabilities; observations are detached.

    >>> gram = torch.tensor([[1.0, 0.9, 0.2], [0.9, 1.0, 0.2], [0.2, 0.2, 1.0]])
    >>> pairs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # {1, 2} and {3}
    >>> round(float(association(pairs, gram=gram)), 4)
    2.9
    """
    # A user's autocast or TF32 around the whole step must not lower the objective's precision.
    with torch.autocast(probabilities.device.type, enabled=False):
        mass = _squared_aggregates(probabilities, gradients, gram)
        if normalize:
            load = probabilities.to(mass.dtype).sum(0)
            mass = mass / (load + eps) if eps > 0 else _over_load(mass, load)
        return mass.sum()


def alignment_loss(
    probabilities: Tensor,
    gradients: Tensor | None = None,
    *,
    gram: Tensor | None = None,
    eps: float = EPS,
    normalize: bool = True,
    entropy_weight: float = 0.0,
    self_pairs: bool = True,
) -> Tensor:
    """``L_norm = -association``, plus ``entropy_weight * sum p log p``; a scalar to minimise.

    Shapes as in :func:`association`. Its derivative with respect to the probabilities is minus
    :func:`marginal_scores` (at ``entropy_weight=0``). Without ``self_pairs`` an observation's product with
    itself counts as 0.
    """
    if entropy_weight < 0:
        raise ValueError(f"entropy_weight must be non-negative, got {entropy_weight}")
    if not self_pairs:
        if gram is None:
            gram = gram_matrix(_observations(probabilities, gradients))
            gradients = None
        gram = gram - gram.diagonal().diag_embed()
    loss = -association(probabilities, gradients, gram=gram, eps=eps, normalize=normalize)
    if entropy_weight:
        # p log p is 0 at p = 0, in value and derivative: unselected experts must not turn it into inf * 0.
        p = accurate(probabilities)
        p = torch.where(p > 0, p, torch.ones_like(p))
        loss = loss + entropy_weight * (p * p.log()).sum()
    return loss


def marginal_scores(
    probabilities: Tensor,
    gradients: Tensor | None = None,
    *,
    gram: Tensor | None = None,
    eps: float = EPS,
    normalize: bool = True,
) -> Tensor:
    """The gain of the association per unit of assigned mass, [M, E].

    ``s_mk = 2 <G_k, g_m> / (d_k + eps) - ||G_k||^2 / (d_k + eps)^2``; without normalisation
    ``2 <G_k, g_m>``.
    """
    _check(probabilities)
    probabilities = probabilities.detach()
    with full_precision(probabilities.device):
        if gram is None:
            gradients = _observations(probabilities, gradients)
            probabilities = probabilities.to(gradients.dtype)
            aggregates = probabilities.T @ gradients  # [E, d]
            inner = gradients @ aggregates.T
        else:
            gram = _gram(probabilities, gradients, gram)
            probabilities = probabilities.to(gram.dtype)
            inner = gram @ probabilities
        if not normalize:
            return 2 * inner
        load = probabilities.sum(0) + eps
        mass = (probabilities * inner).sum(0)
        return _over_load(2 * inner, load) - _over_load(mass, load**2)


def _squared_aggregates(probabilities: Tensor, gradients: Tensor | None, gram: Tensor | None) -> Tensor:
    """``||G_k||^2`` [E] by the cheaper of the two ways."""
    _check(probabilities)
    if gram is None:
        gradients = _observations(probabilities, gradients)
        # Forward and backward against one Gram; where reading long rows is all that counts, that is the Gram.
        long = gradients.device.type == "cuda" and gradients.shape[1] >= LONG
        if len(gradients) >= 2 * probabilities.shape[1] and not long:
            return matmul(probabilities.to(gradients.dtype).T, gradients).square().sum(1)
        gram = gram_matrix(gradients) if long else matmul(gradients, gradients.T)
    else:
        gram = _gram(probabilities, gradients, gram)
    p = probabilities.to(gram.dtype)
    return (p * matmul(gram, p)).sum(0)


def gram_matrix(rows: Tensor, columns: int = 4096) -> Tensor:
    """``R R^T`` [M, M] of few long rows [M, d], blocks of columns side by side; without a gradient."""
    rows, whole = rows.detach(), rows.shape[1] // columns
    with full_precision(rows.device):
        parts = rows[:, : whole * columns].unflatten(1, (whole, columns)).transpose(0, 1)
        rest = rows[:, whole * columns :]
        return torch.bmm(parts, parts.transpose(1, 2)).sum(0) + rest @ rest.T


def common_length(length: Tensor, labels: Tensor, count: int) -> Tensor:
    """Root mean square [M] of the ``length`` [M] of observations of one label, int64 [M] in [0, count).

    >>> common_length(torch.tensor([3.0, 1.0, 1.0]), torch.tensor([0, 1, 0]), 2).square()
    tensor([5., 1., 5.])
    """
    member = one_hot(labels, count).to(length)  # no scatter: a CUDA graph replays it, in one order
    mean = (member.T @ length.square()) / member.sum(0).clamp(min=1)
    return (member @ mean).sqrt()


def _check(probabilities: Tensor) -> None:
    if probabilities.dim() != 2:
        raise ValueError(f"probabilities must be [M, E], got shape {tuple(probabilities.shape)}")


def _over_load(value: Tensor, load: Tensor) -> Tensor:
    """``value / load``, and 0 for an unused expert where eps is 0."""
    used = load > 0
    return torch.where(used, value / torch.where(used, load, torch.ones_like(load)), torch.zeros_like(value))


def _observations(probabilities: Tensor, gradients: Tensor | None) -> Tensor:
    if gradients is None:
        raise ValueError("give the observations as gradients [M, d] or as gram= [M, M]")
    if gradients.dim() != 2 or len(gradients) != len(probabilities):
        raise ValueError(
            f"gradients must be [M, d] with M = {len(probabilities)} rows like probabilities, "
            f"got shape {tuple(gradients.shape)}"
        )
    return _as_wide(gradients.detach(), probabilities)


def _gram(probabilities: Tensor, gradients: Tensor | None, gram: Tensor) -> Tensor:
    if gradients is not None:
        raise ValueError("give either gradients or gram=, not both")
    m = len(probabilities)
    if gram.shape != (m, m):
        raise ValueError(f"gram must be [{m}, {m}] like the rows of probabilities, got {tuple(gram.shape)}")
    return _as_wide(gram.detach(), probabilities)


def _as_wide(x: Tensor, other: Tensor) -> Tensor:
    """``x`` in the wider of both dtypes, float32 at least."""
    return x.to(torch.promote_types(torch.promote_types(x.dtype, other.dtype), torch.float32))
