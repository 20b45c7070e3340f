"""What a diagnosis says, in sentences that one can act on; every number in them comes with its chance level.

The thresholds are this library's, not the paper's; docs/diagnostics.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gar.metrics import METRICS, describe_collapse, expert_cosines
from gar.metrics.load import DEAD_SHARE

#: Experts in effect, as a share, from which on the load counts as balanced.
BALANCED = 0.8
#: What routing says about the task (NMI): below the first it is not specialised, from the second on it is.
INFORMATION = (0.05, 0.3)
#: A negative cosine smaller than this is no conflict worth a sentence.
CONFLICT = 0.05


class Conflict(NamedTuple):
    """Two tasks whose gradients have this cosine within an expert."""

    cosine: float
    expert: int
    first: str
    second: str


def findings(diagnosis: Mapping[str, Any], majority: Mapping[str, float] | None = None) -> list[str]:
    """Sentences about what ``diagnose`` returns, or about a result.json.

    ``majority`` has, by task, the share of the most frequent label. The first sentence is about load and
    specialisation, the second about conflict within the experts; more follow only where there is cause.
    """
    routing, tasks = diagnosis["routing"], diagnosis["accuracy"]["tasks"]
    said = [_usage(diagnosis)]
    if (collapse := describe_collapse(routing["load"])) is not None:
        said.append(f"{collapse[0].upper()}{collapse[1:]}.")
    if len(tasks) > 1 and (found := lowest_cosine(routing)) is not None:
        share = f"{100 * routing['load'][found.expert]:.0f} % of the load"
        pair = f"{found.first} against {found.second} in expert {found.expert}, which has {share}"
        cosine = METRICS["intra_expert_coherence"].text(found.cosine, sign=True)
        said.append(
            f"Strongest conflict: {pair} (gradient cosine {cosine})."
            if found.cosine <= -CONFLICT
            else f"No two tasks pull an expert apart; the lowest gradient cosine is {cosine} ({pair})."
        )
    if low := [task for task, share in (majority or {}).items() if tasks.get(task, 1.0) <= share]:
        said.append(f"Not above the majority class: {', '.join(low)}; more updates or another learning rate?")
    if len(tasks) > 1 and _information(routing) < INFORMATION[0]:
        said.append(
            "Whether another method specialises the experts, and whether that helps, is measured by "
            "`gar compare` with the run's config.yaml."
        )
    return said


def _usage(diagnosis: Mapping[str, Any]) -> str:
    """How many experts are in effect, and what their choice says about the task."""
    routing = diagnosis["routing"]
    count, share = len(routing["load"]), METRICS["effective_experts"].read(diagnosis)
    used = f"{share * count:.1f} of {count} experts in effect"
    balance = "balanced" if share >= BALANCED else "unevenly used"
    if len(diagnosis["accuracy"]["tasks"]) < 2:
        return f"{balance.capitalize()}: {used}; with one task there is nothing to specialise in."
    told, above = _information(routing), METRICS["purity_above_floor"].read(diagnosis)
    low, high = INFORMATION
    kind = "not specialised" if told < low else "specialised" if told >= high else "weakly specialised"
    chance = (diagnosis.get("chance") or {}).get("nmi")
    level = "" if chance is None else f", with shuffled tasks up to {100 * chance:.1f} %"
    return (
        f"{balance.capitalize()}, {kind}: {used}, routing says {100 * told:.1f} % about the task{level}; "
        f"purity {METRICS['purity_above_floor'].text(above)} above the floor of an equal mix."
    )


def _information(routing: Mapping[str, Any]) -> float:
    return METRICS["nmi"].read({"routing": routing})


def lowest_cosine(routing: Mapping[str, Any]) -> Conflict | None:
    """The two tasks with the lowest gradient cosine within one expert; None where nothing tells."""
    return next(iter(conflicts(routing)), None)


def conflicts(routing: Mapping[str, Any]) -> list[Conflict]:
    """The lowest gradient cosine between two tasks within each expert, the lowest first.

    Dead experts, those with the gradient of fewer than two tasks, and tasks without a gradient there are
    passed over. Ties go to the first. Empty where the Gram matrices are missing.
    """
    grams = np.asarray(routing.get("gradient_grams") or (), float)
    names = list(routing.get("load_by_task") or ())
    if grams.ndim != 3 or not grams.shape[1] == grams.shape[2] == len(names):
        return []
    found = []
    for e, cosines in enumerate(expert_cosines(gram=grams)):
        pairs = [
            (float(cosines[i, j]), e, names[i], names[j])
            for i in range(len(names))
            for j in range(i + 1, len(names))
            if cosines[i, i] > 0 and cosines[j, j] > 0
        ]
        if pairs and routing["load"][e] >= DEAD_SHARE / len(grams):
            found.append(Conflict(*min(pairs, key=lambda pair: pair[0])))
    return sorted(found, key=lambda conflict: conflict.cosine)
