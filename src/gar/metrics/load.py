"""How evenly the experts are used.

``load`` [E] is the share of each expert and sums to 1: the mean router probability over all examples, or
normalised selection counts. A vector that sums to something else (counts, say) is refused. An all-zero
load, meaning that nothing was routed, is allowed. Paper: appendix "Metric Definitions and Aggregation".
"""

from __future__ import annotations

import math

import numpy as np

from gar.metrics._arrays import Floats, Values, distributions

COLLAPSE_SHARE = 0.9  # above it, one expert does the work
DEAD_SHARE = 0.01  # below this part of the uniform share 1/E, an expert is dead


def load_variance(load: Values) -> float:
    """Load variance ``(1/E) sum_e (l_e - 1/E)^2`` of ``load`` [E].

    Range: 0 (uniform) to ``(E-1)/E^2`` (one expert holds everything). Source: paper, "Load variance".

    Degenerate: one expert with all load gives 0; an all-zero load gives ``1/E^2``, the formula's value.

    >>> load_variance([0.25, 0.25, 0.25, 0.25])
    0.0
    >>> load_variance([1.0, 0.0, 0.0, 0.0])  # (E-1)/E^2
    0.1875
    """
    shares = distributions(load, "load", "E")
    return float(np.mean((shares - 1 / len(shares)) ** 2))


def utilization(load: Values) -> float:
    """Share of the experts whose load is at least half the uniform one, ``l_e >= 1/(2E)``; ``load`` [E].

    Range: ``1/E`` to 1, a multiple of ``1/E``. Source: paper, "Expert utilization".

    Degenerate: one expert with all load gives 1; an all-zero load gives 0.

    >>> utilization([0.5, 0.25, 0.125, 0.125])  # 1/(2E) itself counts as used
    1.0
    >>> utilization([0.7, 0.3, 0.0, 0.0])
    0.5
    """
    shares = distributions(load, "load", "E")
    return float(np.mean(shares >= 1 / (2 * len(shares))))


def effective_experts(load: Values) -> float:
    """``exp(H(l)) / E``: the number of equally used experts with the entropy of ``load`` [E], as a share.

    Range: ``1/E`` (one expert holds everything) to 1 (uniform). Not in the paper.

    Degenerate: one expert gives 1, an all-zero load 0.

    >>> effective_experts([0.5, 0.5, 0.0, 0.0])
    0.5
    """
    shares = distributions(load, "load", "E")
    used = shares[shares > 0]
    return float(np.exp(-(used * np.log(used)).sum()) / len(shares)) if len(used) else 0.0


def routing_entropy(probabilities: Values, normalize: bool = False) -> float:
    """Mean over examples of the entropy ``-sum_e q_ne log q_ne`` (natural log); ``probabilities`` [N, E].

    For token routing, a row is the token-mean of an example, so this is the entropy of the mean and not
    the mean of token entropies. Range: 0 to ``log E``; with ``normalize=True``, divided by ``log E``, 0 to
    1. Source: paper, "Routing entropy".

    Degenerate: ``0 log 0 = 0``; an all-zero row counts as 0 and stays in the mean; one expert gives 0, also
    when normalised. Rows that sum to something other than 1 or 0 are refused.

    >>> round(routing_entropy([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]), 4)  # (log 2 + 0) / 2
    0.3466
    >>> routing_entropy([[0.5, 0.5, 0.0, 0.0]], normalize=True)
    0.5
    """
    q = distributions(probabilities, "probabilities", "N", "E")
    experts = q.shape[1]
    if experts == 1:
        return 0.0
    entropy = max(0.0, float(-(q * np.log(np.where(q > 0, q, 1.0))).sum(1).mean()))
    return entropy / math.log(experts) if normalize else entropy


def task_preference(by_task: Values, load: Values) -> Floats:
    """``log2 P(e|t) / P(e)`` [T, E]: how much more of a task goes to an expert than of all; 0: no more.

    ``by_task`` [T, E] holds the tasks' loads, rows that sum to 1, ``load`` [E] that of all. Range: minus
    infinity, where a task never goes to an expert, to ``log2 1/P(e)``. Not in the paper.

    Degenerate: an expert without load, and a task of which nothing was routed, have 0.

    >>> task_preference([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]], [0.25, 0.75, 0.0]).round(3).tolist()
    [[1.0, -0.585, 0.0], [-inf, 0.415, 0.0]]
    """
    rows, whole = distributions(by_task, "by_task", "T", "E"), distributions(load, "load", "E")
    if len(whole) != rows.shape[1]:
        raise ValueError(f"load must have the {rows.shape[1]} experts of by_task, got {len(whole)}")
    told = (whole > 0) & (rows.sum(1, keepdims=True) > 0)
    with np.errstate(divide="ignore"):
        return np.where(told, np.log2(rows) - np.log2(np.where(whole > 0, whole, 1.0)), 0.0)


def describe_collapse(load: Values) -> str | None:
    """What is wrong with ``load`` [E] in plain words, or ``None`` when nothing is.

    Said: one expert holds more than 90 % of the load; experts are dead, that is below 1 % of the uniform
    share ``1/E`` (zero included); nothing was routed at all. Experts are numbered from 0. One expert alone
    cannot collapse: ``None``. The thresholds are this library's, not the paper's.

    >>> describe_collapse([0.95, 0.05, 0.0, 0.0])
    'expert 0 holds 95.0 % of the load; experts 2 and 3 are dead (below 1 % of a uniform share)'
    >>> describe_collapse([0.4, 0.3, 0.2, 0.1]) is None
    True
    """
    shares = distributions(load, "load", "E")
    experts = len(shares)
    if not shares.any():
        return "nothing was routed to any expert"
    if experts == 1:
        return None
    found = []
    top = int(shares.argmax())
    if shares[top] > COLLAPSE_SHARE:
        found.append(f"expert {top} holds {100 * shares[top]:.1f} % of the load")
    dead = [str(e) for e in np.flatnonzero(shares < DEAD_SHARE / experts)]
    if len(dead) == 1:
        found.append(f"expert {dead[0]} is dead (below 1 % of a uniform share)")
    elif dead:
        listed = f"{', '.join(dead[:-1])} and {dead[-1]}"
        found.append(f"experts {listed} are dead (below 1 % of a uniform share)")
    return "; ".join(found) or None
