"""Slow reference implementations, written from the specification of the method alone.

Everything here runs in float64 with plain loops. Autograd is used only where a definition itself says
"derivative of". Nothing is imported from the package under test, so an agreement between the two is evidence
for both. Section numbers refer to the specification of the method ("Gradient-aligned routing: the method,
exactly").

Conventions that the specification leaves open and that are fixed here:

* ties between logits (or gates) go to the lowest expert index;
* an expert whose denominator ``d_k + eps`` is exactly zero contributes nothing to the objective;
* ``0 log 0 = 0`` with derivative 0;
* where ``||g_w|| = 0`` the inner CAGrad problem uses the subgradient 0 of the norm;
* update ``u`` (counted from 0) of a warmup of ``W`` updates gets the factor ``min(1, (u + 1) / W)``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

Perturbation = dict[str, Tensor]
"""One additive change per slot of the expert template, shared by every expert."""


def _f64(x: Tensor) -> Tensor:
    """The same values (and the same autograd graph) in float64."""
    return x.to(torch.float64)


def _number(x: Tensor) -> float:
    """The value of a scalar tensor, outside autograd."""
    return float(x.detach())


# --------------------------------------------------------------------------------------------------
# Groups and weights (section 1)
# --------------------------------------------------------------------------------------------------


def split_groups(task_batch_sizes: Sequence[int], group_size: int) -> list[tuple[int, int]]:
    """(task, size) of every group of one update, tasks in order; a last one may be short (section 1.2)."""
    groups = []
    for task, left in enumerate(task_batch_sizes):
        while left > 0:
            size = min(group_size, left)
            groups.append((task, size))
            left -= size
    return groups


def group_of_example(groups: Sequence[tuple[int, int]]) -> list[int]:
    """The group index of each example of the update, examples in batch order (section 1.2)."""
    index: list[int] = []
    for m, (_, size) in enumerate(groups):
        index.extend([m] * size)
    return index


def task_weights(groups: Sequence[tuple[int, int]]) -> list[float]:
    """v_m = |m| / (T B_t) for groups given as (task, size) (section 1.3)."""
    batch: dict[int, int] = {}
    for task, size in groups:
        batch[task] = batch.get(task, 0) + size
    return [size / (len(batch) * batch[task]) for task, size in groups]


def sample_weights(sizes: Sequence[int]) -> list[float]:
    """w_m = |m| / sum_j |j| (section 5, LoadPen)."""
    return [size / sum(sizes) for size in sizes]


def group_losses(example_losses: Tensor, groups: Sequence[int], M: int) -> Tensor:
    """l_m = mean loss of group m, from one loss per example (section 1.3)."""
    means = []
    for m in range(M):
        members = [example_losses[n] for n in range(len(groups)) if groups[n] == m]
        means.append(torch.stack(members).sum() / len(members))
    return torch.stack(means)


def task_loss(losses: Tensor, v: Sequence[float]) -> Tensor:
    """L_task = sum_m v_m l_m (section 1.3)."""
    total = torch.zeros((), dtype=torch.float64)
    for m in range(len(v)):
        total = total + v[m] * losses[m]
    return total


# --------------------------------------------------------------------------------------------------
# Gates (section 2)
# --------------------------------------------------------------------------------------------------


def _largest(row: Tensor, k: int) -> list[int]:
    """Indices of the k largest entries, ties to the lowest index."""
    values = row.detach().tolist()
    return sorted(range(len(values)), key=lambda e: (-values[e], e))[:k]


def selected(logits: Tensor, k: int) -> Tensor:
    """True at the k largest logits of each row (section 2)."""
    rows = logits.reshape(-1, logits.shape[-1])
    chosen = torch.zeros(rows.shape, dtype=torch.bool)
    for i in range(rows.shape[0]):
        for e in _largest(rows[i], k):
            chosen[i, e] = True
    return chosen.reshape(logits.shape)


def masked_softmax(logits: Tensor, k: int) -> Tensor:
    """Softmax over the k largest logits of each row, exactly zero elsewhere (section 2)."""
    rows = _f64(logits).reshape(-1, logits.shape[-1])
    out = []
    for row in rows:
        keep = _largest(row, k)
        shift = row[keep[0]].detach()
        weight = {e: torch.exp(row[e] - shift) for e in keep}
        total = torch.stack(list(weight.values())).sum()
        zero = torch.zeros((), dtype=torch.float64)
        out.append(torch.stack([weight[e] / total if e in weight else zero for e in range(row.shape[0])]))
    return torch.stack(out).reshape(logits.shape)


def straight_through_gate(logits: Tensor) -> Tensor:
    """onehot(argmax) forward, full-softmax Jacobian backward (section 2).

    Written as ``o + (sigma - stopgrad(sigma))``: the same function, one-hot without any argument on rounding.
    """
    sigma = masked_softmax(logits, logits.shape[-1])
    onehot = _f64(selected(logits, 1))
    return onehot + (sigma - sigma.detach())


# --------------------------------------------------------------------------------------------------
# Expert banks and pooling (section 3)
# --------------------------------------------------------------------------------------------------


def lora_forward(
    x: Tensor, A: Tensor, B: Tensor, gates: Tensor, scale: float, keep: Tensor | None = None
) -> Tensor:
    """sum_e pi_ie s B_e A_e dropout(x_i) (section 3).

    x [N,d_in], A [E,r,d_in], B [E,d_out,r], gates [N,E]; the result is [N,d_out].
    ``keep`` is the dropout multiplier (0 or 1/(1-p)): [N,d_in] shared by the experts, or [N,E,d_in].
    """
    x, A, B, gates = _f64(x), _f64(A), _f64(B), _f64(gates)
    out = []
    for i in range(x.shape[0]):
        y = torch.zeros(B.shape[1], dtype=torch.float64)
        for e in range(A.shape[0]):
            seen = x[i]
            if keep is not None:
                seen = seen * _f64(keep[i] if keep.dim() == 2 else keep[i, e])
            y = y + gates[i, e] * (scale * (B[e] @ (A[e] @ seen)))
        out.append(y)
    return torch.stack(out)


def ffn_hidden(pre: Tensor, width: int, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """h = act(pre), or act(first half) * second half when ``pre`` is twice as wide as the FFN (section 3)."""
    if pre.shape[0] == width:
        return activation(pre)
    return activation(pre[:width]) * pre[width:]


def ffn_forward(
    x: Tensor,
    W1: Tensor,
    b1: Tensor,
    W2: Tensor,
    b2: Tensor,
    gates: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """sum_e pi_ie (W2_e h_ie + b2_e), h_ie = act(W1_e x_i + b1_e) (section 3, ``full_ffn``).

    W1 [E,f,d], b1 [E,f], W2 [E,d,f], b2 [E,d]; a gated FFN has W1 [E,2f,d], b1 [E,2f].
    """
    x, W1, b1, W2, b2, gates = _f64(x), _f64(W1), _f64(b1), _f64(W2), _f64(b2), _f64(gates)
    out = []
    for i in range(x.shape[0]):
        y = torch.zeros(W2.shape[1], dtype=torch.float64)
        for e in range(W1.shape[0]):
            h = ffn_hidden(W1[e] @ x[i] + b1[e], W2.shape[2], activation)
            y = y + gates[i, e] * (W2[e] @ h + b2[e])
        out.append(y)
    return torch.stack(out)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of values [B,L,D] over the positions where mask [B,L] is nonzero (sections 3 and 4)."""
    values = _f64(values)
    out = []
    for n in range(values.shape[0]):
        valid = [values[n, t] for t in range(values.shape[1]) if bool(mask[n, t])]
        if not valid:
            raise ValueError(f"example {n} has no valid position")
        out.append(torch.stack(valid).sum(0) / len(valid))
    return torch.stack(out)


# --------------------------------------------------------------------------------------------------
# Gradient observations and group probabilities (section 4)
# --------------------------------------------------------------------------------------------------


def template_gradients(
    loss_fn: Callable[[Perturbation], Tensor], shapes: Mapping[str, Sequence[int]]
) -> Tensor:
    """g_m [M,d]: derivative of l_m by ONE perturbation that is added to every expert (section 4).

    ``loss_fn`` maps the perturbation (slot name -> tensor) to the M group losses and must be deterministic.
    Slots are flattened and joined in the order of ``shapes``.
    """
    zero = {name: torch.zeros(tuple(shape), dtype=torch.float64) for name, shape in shapes.items()}
    rows = []
    for m in range(loss_fn(zero).shape[0]):
        perturbation = {name: t.clone().requires_grad_() for name, t in zero.items()}
        loss = loss_fn(perturbation)[m]
        slots = torch.autograd.grad(loss, list(perturbation.values()), materialize_grads=True)
        rows.append(torch.cat([slot.reshape(-1) for slot in slots]).detach())
    return torch.stack(rows)


def summed_expert_gradients(
    loss_fn: Callable[[dict[str, Tensor]], Tensor], experts: Mapping[str, Tensor]
) -> Tensor:
    """g_m [M,d] as sum_e d l_m / d theta_e, every slot of ``experts`` stacked [E,...] (section 4)."""
    values = {name: _f64(t).detach() for name, t in experts.items()}
    rows = []
    for m in range(loss_fn(values).shape[0]):
        own = {name: t.clone().requires_grad_() for name, t in values.items()}
        loss = loss_fn(own)[m]
        slots = torch.autograd.grad(loss, list(own.values()), materialize_grads=True)
        summed = []
        for slot in slots:
            total = torch.zeros(slot.shape[1:], dtype=torch.float64)
            for e in range(slot.shape[0]):
                total = total + slot[e]
            summed.append(total.reshape(-1))
        rows.append(torch.cat(summed).detach())
    return torch.stack(rows)


def group_probabilities(gates: Tensor, mask: Tensor, groups: Sequence[int], M: int) -> Tensor:
    """p_m [M,E]: mean over the group of q_n, itself the mean gate over valid tokens (section 4).

    gates [B,L,E], mask [B,L], groups [B]; the head site is L = 1 with a mask of ones.
    """
    q = masked_mean(gates, mask)
    out = []
    for m in range(M):
        members = [q[n] for n in range(len(groups)) if groups[n] == m]
        out.append(torch.stack(members).sum(0) / len(members))
    return torch.stack(out)


# --------------------------------------------------------------------------------------------------
# The alignment objective (section 5)
# --------------------------------------------------------------------------------------------------


def distinct_alignment_loss(P: Tensor, g: Tensor, eps: float = 1e-8) -> Tensor:
    """-sum_k sum_{i != j} p_ik p_jk <g_i, g_j> / (d_k + eps): L_norm without the pairs (i, i)."""
    P, g = _f64(P), _f64(g)
    total = torch.zeros((), dtype=torch.float64)
    for k in range(P.shape[1]):
        d = sum((P[m, k] for m in range(len(P))), torch.zeros((), dtype=torch.float64))
        for i in range(len(P)):
            for j in range(len(P)):
                if i != j:
                    total = total - P[i, k] * P[j, k] * (g[i] * g[j]).sum() / (d + eps)
    return total


def scaled_rows(g: Tensor, tasks: Sequence[int], how: str) -> Tensor:
    """g_m / ||g_m|| (``unit``), or over the root mean square of its task's norms (``task_scale``).

    A row whose divisor is zero stays zero; ``raw`` rows are as they are.
    """
    out = []
    for m in range(len(g)):
        members = [m] if how == "unit" else [j for j in range(len(g)) if tasks[j] == tasks[m]]
        squares = [sum(float(x) ** 2 for x in g[j]) for j in members]
        scale = 1.0 if how == "raw" else math.sqrt(sum(squares) / len(squares))
        out.append(_f64(g[m]) / scale if scale > 0 else _f64(g[m]))
    return torch.stack(out)


def _aggregate(P: Tensor, g: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(G_k, d_k): the surrogate aggregate and the load of expert k (section 5)."""
    G = torch.zeros(g.shape[1], dtype=torch.float64)
    load = torch.zeros((), dtype=torch.float64)
    for m in range(P.shape[0]):
        G = G + P[m, k] * g[m]
        load = load + P[m, k]
    return G, load


def association(P: Tensor, g: Tensor, eps: float, normalize: bool = True) -> Tensor:
    """sum_k ||G_k||^2 / (d_k + eps), or sum_k ||G_k||^2 without ``normalize`` (section 5)."""
    P, g = _f64(P), _f64(g)
    total = torch.zeros((), dtype=torch.float64)
    for k in range(P.shape[1]):
        G, load = _aggregate(P, g, k)
        square = (G * G).sum()
        if not normalize:
            total = total + square
        elif _number(load) + eps != 0.0:
            total = total + square / (load + eps)
    return total


def association_gram(P: Tensor, W: Tensor, eps: float, normalize: bool = True) -> Tensor:
    """The same from the Gram matrix: sum_k [P^T W P]_kk / (d_k + eps) (section 5)."""
    P, W = _f64(P), _f64(W)
    total = torch.zeros((), dtype=torch.float64)
    for k in range(P.shape[1]):
        square = torch.zeros((), dtype=torch.float64)
        load = torch.zeros((), dtype=torch.float64)
        for i in range(P.shape[0]):
            load = load + P[i, k]
            for j in range(P.shape[0]):
                square = square + P[i, k] * P[j, k] * W[i, j]
        if not normalize:
            total = total + square
        elif _number(load) + eps != 0.0:
            total = total + square / (load + eps)
    return total


def alignment_loss(
    P: Tensor, g: Tensor, eps: float = 1e-8, normalize: bool = True, tau: float = 0.0
) -> Tensor:
    """L_norm = -association + tau sum_mk p log p, with g held fixed (section 5)."""
    P = _f64(P)
    loss = -association(P, g.detach(), eps, normalize)
    if tau != 0.0:
        for m in range(P.shape[0]):
            for k in range(P.shape[1]):
                if _number(P[m, k]) > 0.0:
                    loss = loss + tau * P[m, k] * torch.log(P[m, k])
    return loss


def marginal_scores(P: Tensor, g: Tensor, eps: float = 1e-8, normalize: bool = True) -> Tensor:
    """s_mk = 2<G_k,g_m>/(d_k+eps) - ||G_k||^2/(d_k+eps)^2; numerator only: 2<G_k,g_m> (section 5)."""
    P, g = _f64(P).detach(), _f64(g).detach()
    scores = torch.zeros(P.shape, dtype=torch.float64)
    for k in range(P.shape[1]):
        G, load = _aggregate(P, g, k)
        for m in range(P.shape[0]):
            if not normalize:
                scores[m, k] = 2.0 * (G * g[m]).sum()
            elif _number(load) + eps != 0.0:
                first = 2.0 * (G * g[m]).sum() / (load + eps)
                scores[m, k] = first - (G * G).sum() / (load + eps) ** 2
    return scores


# --------------------------------------------------------------------------------------------------
# Load penalties (section 5)
# --------------------------------------------------------------------------------------------------


def loadpen_vectors(q: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(f, P) of LoadPen from q [n,E], examples ordered by group, and the group sizes (section 5)."""
    q = _f64(q)
    E = q.shape[1]
    f = torch.zeros(E, dtype=torch.float64)
    P = torch.zeros(E, dtype=torch.float64)
    if sum(sizes) != q.shape[0]:
        raise ValueError("the group sizes do not add up to the number of examples")
    start = 0
    for size, w in zip(sizes, sample_weights(sizes), strict=True):
        for n in range(start, start + size):
            P = P + w / size * q[n]
            f[_largest(q[n], 1)[0]] += w / size
        start += size
    return f, P


def loadpen(q: Tensor, sizes: Sequence[int], lambda_load: float) -> Tensor:
    """lambda_load * E * sum_e stopgrad(f_e) P_e at the update level (section 5)."""
    f, P = loadpen_vectors(q, sizes)
    total = torch.zeros((), dtype=torch.float64)
    for e in range(P.shape[0]):
        total = total + f[e].detach() * P[e]
    return lambda_load * P.shape[0] * total


def switchaux_vectors(
    gates: Tensor, chosen: Tensor, mask: Tensor, groups: Sequence[int], M: int, k: int
) -> tuple[Tensor, Tensor]:
    """(f [M,E], P [M,E]) of SwitchAux over the valid units of each group (section 5).

    gates [N,E], chosen [N,E] bool, mask [N] bool and groups [N], one row per routed unit.
    """
    gates = _f64(gates)
    E = gates.shape[1]
    f = torch.zeros(M, E, dtype=torch.float64)
    rows = []
    for m in range(M):
        valid = [i for i in range(gates.shape[0]) if groups[i] == m and bool(mask[i])]
        if not valid:
            raise ValueError(f"group {m} has no valid unit")
        total = torch.zeros(E, dtype=torch.float64)
        for i in valid:
            total = total + gates[i]
            for e in range(E):
                f[m, e] += float(chosen[i, e]) / (k * len(valid))
        rows.append(total / len(valid))
    return f, torch.stack(rows)


def switchaux(
    gates: Tensor,
    chosen: Tensor,
    mask: Tensor,
    groups: Sequence[int],
    u: Sequence[float],
    alpha: float,
    k: int,
) -> Tensor:
    """alpha * sum_m u_m E sum_e stopgrad(f_me) P_me (section 5)."""
    f, P = switchaux_vectors(gates, chosen, mask, groups, len(u), k)
    total = torch.zeros((), dtype=torch.float64)
    for m in range(P.shape[0]):
        for e in range(P.shape[1]):
            total = total + u[m] * P.shape[1] * f[m, e].detach() * P[m, e]
    return alpha * total


# --------------------------------------------------------------------------------------------------
# Terms of other papers
# --------------------------------------------------------------------------------------------------


def z_loss(logits: Tensor) -> Tensor:
    """ST-MoE's L_z of the units' logits [N,E]: 1/N sum_i (log sum_e exp z_ie)^2."""
    total = torch.zeros((), dtype=torch.float64)
    for z in _f64(logits):
        partition = torch.zeros((), dtype=torch.float64)
        for e in range(z.shape[0]):
            partition = partition + torch.exp(z[e])
        total = total + torch.log(partition) ** 2
    return total / logits.shape[0]


def global_balance(logits: Tensor, chosen: Tensor) -> Tensor:
    """E sum_e f_e P_e: e's share of all selections, and the mean softmax of all units; [N,E] both."""
    N, E = logits.shape
    total = torch.zeros((), dtype=torch.float64)
    for e in range(E):
        share = sum(float(chosen[i, e]) for i in range(N)) / float(chosen.sum())
        mass = torch.zeros((), dtype=torch.float64)
        for i in range(N):
            z = _f64(logits[i])
            mass = mass + torch.exp(z[e]) / torch.exp(z).sum()
        total = total + E * share * mass / N
    return total


def task_information(P: Tensor, tasks: Sequence[int], v: Sequence[float]) -> Tensor:
    """I(T;E) = sum_te P(t,e) log(P(t,e) / (P(t) P(e))), P(t,e) = sum_{m of t} v_m P_me; 0 log 0 = 0."""
    P, E = _f64(P), P.shape[1]
    joint = {(t, e): torch.zeros((), dtype=torch.float64) for t in set(tasks) for e in range(E)}
    for m, t in enumerate(tasks):
        for e in range(E):
            joint[t, e] = joint[t, e] + v[m] * P[m, e]
    total = torch.zeros((), dtype=torch.float64)
    for (t, e), both in joint.items():
        of_task = sum(joint[t, other] for other in range(E))
        of_expert = sum(joint[other, e] for other in set(tasks))
        if float(both.detach()) > 0:
            total = total + both * torch.log(both / (of_task * of_expert))
    return total


def simbal(weight: Tensor) -> Tensor:
    """The sum of |<w_a, w_b> - [a = b]| over all ordered pairs of experts, rows of weight [E,d]."""
    weight = _f64(weight)
    total = torch.zeros((), dtype=torch.float64)
    for a in range(weight.shape[0]):
        for b in range(weight.shape[0]):
            total = total + ((weight[a] * weight[b]).sum() - float(a == b)).abs()
    return total


def overlap(y: Tensor, chosen: Tensor, groups: Sequence[int], u: Sequence[float]) -> Tensor:
    """sum_m u_m mean_i 1/k sum_{a != b} |<y_a, y_b> / <y_b, y_b> y_b|^2 over i's chosen; y [N,E,d]."""
    y = _f64(y)
    total = torch.zeros((), dtype=torch.float64)
    for m, weight in enumerate(u):
        units = [i for i, group in enumerate(groups) if group == m]
        for i in units:
            mine = [e for e in range(y.shape[1]) if bool(chosen[i, e])]
            for a in mine:
                for b in mine:
                    squared = (y[i, b] * y[i, b]).sum()
                    if a != b and float(squared.detach()) > 0:
                        shadow = (y[i, a] * y[i, b]).sum() / squared * y[i, b]
                        total = total + weight / len(units) / len(mine) * (shadow * shadow).sum()
    return total


def score_variance(logits: Tensor) -> Tensor:
    """Mean over units [N,E] of 1/E sum_e (s_e - mean s)^2, s the softmax over all experts."""
    total = torch.zeros((), dtype=torch.float64)
    for z in _f64(logits):
        s = torch.exp(z) / torch.exp(z).sum()
        for e in range(s.shape[0]):
            total = total + (s[e] - s.sum() / s.shape[0]) ** 2 / s.shape[0]
    return total / logits.shape[0]


def bias_step(bias: Sequence[float], chosen: Tensor, speed: float) -> list[float]:
    """Loss-free balancing: b_e + u sign(mean load - load_e), loads from the selections [N,E]."""
    loads = [sum(float(chosen[i, e]) for i in range(chosen.shape[0])) for e in range(chosen.shape[1])]
    mean = sum(loads) / len(loads)
    return [b + speed * ((mean > load) - (mean < load)) for b, load in zip(bias, loads, strict=True)]


# --------------------------------------------------------------------------------------------------
# STGC, adapted (section 5)
# --------------------------------------------------------------------------------------------------


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine similarity; 0 if either vector is zero (section 5, the decision on STGC)."""
    peak_a, peak_b = float(a.abs().max()), float(b.abs().max())
    if peak_a == 0.0 or peak_b == 0.0:
        return 0.0
    a, b = a / peak_a, b / peak_b
    return float((a * b).sum()) / (math.sqrt(float((a * a).sum())) * math.sqrt(float((b * b).sum())))


def stgc_scores(
    chosen: Tensor, delta: Tensor, B: Tensor, scale: float, groups: Sequence[int], mask: Tensor | None = None
) -> Tensor:
    """Score [N,E] of every valid selected assignment, NaN elsewhere (section 5).

    delta [N,E,d_out] is the task-loss derivative at each expert's output, the gate included.
    """
    delta, B = _f64(delta).detach(), _f64(B).detach()
    N, E = chosen.shape
    scores = torch.full((N, E), math.nan, dtype=torch.float64)
    for m in sorted(set(groups)):
        for e in range(E):
            units = [i for i in range(N) if groups[i] == m and bool(chosen[i, e])]
            units = [i for i in units if mask is None or bool(mask[i])]
            if not units:
                continue
            first = [scale * (B[e].T @ delta[i, e]) for i in units]
            second = [scale * delta[i, e] for i in units]
            mean_first = torch.stack(first).sum(0) / len(units)
            mean_second = torch.stack(second).sum(0) / len(units)
            for j, i in enumerate(units):
                scores[i, e] = (cosine(first[j], mean_first) + cosine(second[j], mean_second)) / 2
    return scores


def stgc_group_losses(z: Tensor, conflict: Tensor, groups: Sequence[int], M: int) -> list[Tensor]:
    """C_m = -(1/(E max(1,N_m))) sum_ie C_mie log softmax(-z_i)_e, gradient through z only (section 5)."""
    z = _f64(z)
    N, E = z.shape
    losses = []
    for m in range(M):
        count = 0
        total = torch.zeros((), dtype=torch.float64)
        for i in range(N):
            for e in range(E):
                if groups[i] == m and bool(conflict[i, e]):
                    count += 1
                    total = total + (-z[i, e] - torch.logsumexp(-z[i], dim=0))
        losses.append(-total / (E * max(1, count)))
    return losses


def stgc(
    z: Tensor,
    chosen: Tensor,
    delta: Tensor,
    B: Tensor,
    scale: float,
    groups: Sequence[int],
    M: int,
    mask: Tensor | None = None,
    threshold: float = 0.0,
) -> tuple[Tensor, list[Tensor]]:
    """(conflict mask [N,E], list of C_m): an assignment conflicts if its score < threshold (section 5)."""
    scores = stgc_scores(chosen, delta, B, scale, groups, mask)
    conflict = torch.zeros(scores.shape, dtype=torch.bool)
    for i in range(scores.shape[0]):
        for e in range(scores.shape[1]):
            conflict[i, e] = float(scores[i, e]) < threshold  # NaN (not assigned) is never below
    return conflict, stgc_group_losses(z, conflict, groups, M)


def stgc_total(v: Sequence[float], losses: Sequence[Tensor]) -> Tensor:
    """sum_m v_m C_m (section 5)."""
    total = torch.zeros((), dtype=torch.float64)
    for weight, loss in zip(v, losses, strict=True):
        total = total + weight * loss
    return total


# --------------------------------------------------------------------------------------------------
# CAGrad (section 5)
# --------------------------------------------------------------------------------------------------


def project_simplex(x: Tensor) -> Tensor:
    """Euclidean projection onto the simplex: max(x - theta, 0) with theta found by bisection."""
    values = [float(t) for t in x]
    low, high = min(values) - 1.0, max(values)
    for _ in range(200):
        theta = (low + high) / 2
        if sum(max(t - theta, 0.0) for t in values) > 1.0:
            low = theta
        else:
            high = theta
    return torch.tensor([max(t - high, 0.0) for t in values], dtype=torch.float64)


def cagrad_rows(group_gradients: Tensor, v: Sequence[float]) -> Tensor:
    """Row m times M v_m, so that the mean row is the gradient of L_task (section 5)."""
    M = len(v)
    return torch.stack([M * v[m] * _f64(group_gradients)[m] for m in range(M)])


def _combine(rows: Tensor, w: Tensor) -> Tensor:
    """g_w = sum_m w_m R_m."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    for m in range(rows.shape[0]):
        total = total + w[m] * rows[m]
    return total


def _norm(x: Tensor) -> float:
    """Euclidean norm."""
    return math.sqrt(float((x * x).sum()))


def _uniform(M: int) -> Tensor:
    """The centre of the simplex."""
    return torch.full((M,), 1.0 / M, dtype=torch.float64)


def cagrad_objective(rows: Tensor, w: Tensor, c: float) -> float:
    """<g_w, g_0> + c ||g_0|| ||g_w|| (section 5)."""
    rows = _f64(rows)
    g_0, g_w = _combine(rows, _uniform(rows.shape[0])), _combine(rows, _f64(w))
    return float((g_w * g_0).sum()) + c * _norm(g_0) * _norm(g_w)


def cagrad_gradient(rows: Tensor, w: Tensor, c: float) -> Tensor:
    """Derivative of ``cagrad_objective`` by w; the norm's part is 0 where g_w = 0 (section 5)."""
    rows = _f64(rows)
    g_0, g_w = _combine(rows, _uniform(rows.shape[0])), _combine(rows, _f64(w))
    out = torch.zeros(rows.shape[0], dtype=torch.float64)
    for m in range(rows.shape[0]):
        out[m] = (rows[m] * g_0).sum()
        if _norm(g_w) > 0.0:
            out[m] += c * _norm(g_0) * (rows[m] * g_w).sum() / _norm(g_w)
    return out


def cagrad_direction(rows: Tensor, w: Tensor, c: float, eps: float = 1e-8) -> Tensor:
    """g_0 + c ||g_0|| g_w / (||g_w|| + eps), not rescaled (section 5)."""
    rows = _f64(rows)
    g_0, g_w = _combine(rows, _uniform(rows.shape[0])), _combine(rows, _f64(w))
    return g_0 + c * _norm(g_0) * g_w / (_norm(g_w) + eps)


def cagrad(
    rows: Tensor, c: float, inner_lr: float = 0.1, inner_steps: int = 10, eps: float = 1e-8
) -> tuple[Tensor, Tensor]:
    """(direction, w) after projected-simplex steps of size inner_lr / trace(R R^T) from uniform (section 5).

    ``rows`` are already scaled (see ``cagrad_rows``). All-zero rows leave w uniform and the direction zero.
    """
    rows = _f64(rows).detach()
    w = _uniform(rows.shape[0])
    trace = float((rows * rows).sum())
    if trace > 0.0:
        for _ in range(inner_steps):
            w = project_simplex(w - inner_lr / trace * cagrad_gradient(rows, w, c))
    return cagrad_direction(rows, w, c, eps), w


def cagrad_exact(rows: Tensor, c: float) -> Tensor:
    """Near-exact minimiser w of the inner problem of CAGrad, for a few rows, by SLSQP (section 5)."""
    rows = _f64(rows).detach()
    M, trace = rows.shape[0], float((rows * rows).sum())
    if trace == 0.0:
        return _uniform(M)
    rows = rows / math.sqrt(trace)
    best, best_value = _uniform(M), cagrad_objective(rows, _uniform(M), c)
    starts = [_uniform(M), *(0.5 * _uniform(M) + 0.5 * row for row in torch.eye(M, dtype=torch.float64))]
    for start in starts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            found = minimize(
                lambda w: cagrad_objective(rows, torch.as_tensor(w, dtype=torch.float64), c),
                start.numpy(),
                jac=lambda w: cagrad_gradient(rows, torch.as_tensor(w, dtype=torch.float64), c).numpy(),
                method="SLSQP",
                bounds=[(0.0, 1.0)] * M,
                constraints=[
                    {"type": "eq", "fun": lambda w: np.sum(w) - 1.0, "jac": lambda w: np.ones_like(w)}
                ],
                options={"ftol": 1e-15, "maxiter": 1000},
            )
        w = project_simplex(torch.as_tensor(found.x, dtype=torch.float64))
        value = cagrad_objective(rows, w, c)
        if value < best_value:
            best, best_value = w, value
    return best


# --------------------------------------------------------------------------------------------------
# Clip, schedule and optimizer (section 1.5)
# --------------------------------------------------------------------------------------------------


def warmup_updates(total: int, ratio: str = "0.1") -> int:
    """Length of the warmup: the share ``ratio`` of all updates, rounded up (section 1.5).

    The share is taken exactly: in floating point 0.1 * 70 is above 7 and would round up to 8.
    """
    return math.ceil(Fraction(ratio) * total)


def warmup_factor(u: int, total: int, ratio: str = "0.1") -> float:
    """Learning-rate factor of update u = 0, 1, ...: (u + 1) / W while u < W, then 1 (section 1.5).

    W is the number of warmup updates. The first update thus gets 1/W, not 0, and update W - 1 is the first
    to get the full rate.
    """
    W = warmup_updates(total, ratio)
    return 1.0 if u >= W else (u + 1) / W


def global_norm(grads: Sequence[Tensor]) -> float:
    """Euclidean norm of all gradients joined into one vector (section 1.5)."""
    total = 0.0
    for grad in grads:
        total += float((_f64(grad) ** 2).sum())
    return math.sqrt(total)


def clip_global(grads: Sequence[Tensor], max_norm: float, slack: float = 0.0) -> list[Tensor]:
    """All gradients times min(1, max_norm / (norm + slack)) (section 1.5).

    torch's own clip has slack 1e-6.
    """
    norm = global_norm(grads)
    factor = 1.0 if norm + slack == 0.0 else min(1.0, max_norm / (norm + slack))
    return [factor * _f64(grad) for grad in grads]


def adamw_step(
    param: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: int,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor, Tensor]:
    """(param, first moment, second moment) after AdamW update ``step`` = 1, 2, ... (section 1.5)."""
    param, grad, first, second = _f64(param), _f64(grad), _f64(first), _f64(second)
    decayed = param - lr * weight_decay * param
    first = betas[0] * first + (1 - betas[0]) * grad
    second = betas[1] * second + (1 - betas[1]) * grad * grad
    first_hat = first / (1 - betas[0] ** step)
    second_hat = second / (1 - betas[1] ** step)
    return decayed - lr * first_hat / (torch.sqrt(second_hat) + eps), first, second
