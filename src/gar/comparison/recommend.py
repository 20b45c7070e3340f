"""Which model to recommend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from gar.methods import REFERENCE
from gar.report.verdict import LEAST_SEEDS, Paired, listing, number, points


@dataclass(frozen=True)
class Recommendation:
    """A method, and the seed of its model that is best on the selection part, with the reason in words.

    ``accuracy`` is that model's on the selection part, ``differences`` are each method's from Baseline there,
    with the interval that the choice went by.
    """

    method: str
    seed: int
    accuracy: float
    reason: str
    differences: Mapping[str, Paired]


def recommend(
    accuracies: Mapping[str, Mapping[int, float]],
    seeds: Sequence[int],
    labels: Mapping[str, str],
    reference: str = REFERENCE,
) -> Recommendation | None:
    """Choose by accuracies on the selection part alone, ``{method: {seed: macro}}``; None without Baseline.

    The method with the highest mean among those whose paired interval over Baseline lies above 0, else
    Baseline; of it the seed with the highest accuracy. Intervals have 95 % for all methods together
    (Bonferroni): of many methods without any effect, one would often be better by chance. A method whose runs
    did not all finish is not chosen: it may fail again. Ties go to the method that comes first and to the
    lowest seed.
    """
    base = dict(accuracies.get(reference) or {})
    if not base:
        return None
    differences, winners = {}, {}
    confidence = 1 - 0.05 / max(1, sum(method != reference for method in accuracies))
    for method, found in accuracies.items():
        paired = Paired.of({s: found[s] for s in seeds if s in found}, base, confidence)
        if method == reference or not paired.seeds:
            continue
        differences[method] = paired
        if len(paired.seeds) == len(seeds) and paired.side > 0:
            winners[method] = fmean(found[seed] for seed in seeds)
    chosen = max(winners, key=lambda method: winners[method], default=reference)
    own = accuracies[chosen]
    seed = min(own, key=lambda seed: (-own[seed], seed))
    reason = _reason(chosen, differences, labels, reference, len(seeds), f"{100 * confidence:.3g} %")
    return Recommendation(chosen, seed, own[seed], reason, differences)


def _reason(
    chosen: str,
    differences: Mapping[str, Paired],
    labels: Mapping[str, str],
    reference: str,
    seeds: int,
    level: str,
) -> str:
    """Why this method, of ``seeds`` planned seeds each, by intervals of this level."""
    if chosen == reference:
        if not differences:
            return "there is no other method to choose"
        if seeds < LEAST_SEEDS:
            return f"fewer than {number(LEAST_SEEDS)} seeds cannot show that another method is better"
        lacking = [labels[method] for method, found in differences.items() if len(found.seeds) < seeds]
        missing = f"; not judged, since runs are missing: {listing(lacking)}" if lacking else ""
        if len(lacking) == len(differences):
            return f"no other method has all its runs{missing}"
        return f"no other method is better than it there with a {level} interval above 0{missing}"
    found = differences[chosen]
    return (
        f"better than {labels[reference]} there by {points(100 * found.mean)} points ({level} interval "
        f"{points(100 * found.low)} to {points(100 * found.high)}, {number(len(found.seeds))} seeds)"
    )
