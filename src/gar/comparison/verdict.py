"""What paired seeds allow to say: a verdict per method in words, and which model to recommend."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from gar.methods import REFERENCE
from gar.metrics import paired_difference
from gar.report.comparison import LEAST_SEEDS, Paired

COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class Kind(enum.StrEnum):
    """How a method stands to Baseline by the 95 % interval of the paired difference in macro accuracy."""

    BETTER = "better"
    """The interval lies above 0."""
    WORSE = "worse"
    """The interval lies below 0."""
    OPEN = "open"
    """The interval holds 0."""
    SAME = "same"
    """Every seed has the same accuracy under both."""
    UNTOLD = "untold"
    """No interval to judge by: too few seeds, differences without spread, or runs that are missing."""


@dataclass(frozen=True)
class Verdict:
    """One method against Baseline: the difference in macro accuracy (a fraction), and a sentence."""

    method: str
    kind: Kind
    text: str
    difference: Paired | None


def judge(method: str, label: str, found: Paired | None, reference: str = "Baseline") -> Verdict:
    """The verdict on a paired difference ``method - reference``; None where no seed has both.

    What an interval excludes is what lies outside of it: gains above its upper end, losses beyond its lower.
    """
    if found is None:
        return Verdict(
            method,
            Kind.UNTOLD,
            f"{label} is not compared: no seed has finished under it and {reference}.",
            None,
        )
    count, mean = len(found.seeds), 100 * found.mean
    seeds = f"{number(count)} seed{'s' if count > 1 else ''}"
    if count == 1:
        kind = Kind.UNTOLD
        text = (
            f"{label} and {reference} have one seed in common, which cannot compare them: two runs of one "
            "method differ as well."
        )
    elif not found.has_interval:
        same = abs(mean) < 1e-7
        kind = Kind.SAME if same else Kind.UNTOLD
        text = (
            f"{label} and {reference} have the same accuracy in each of {seeds}."
            if same
            else f"{label} differs from {reference} by {signed(mean)} points in each of {seeds}; without any "
            "spread there is no interval to judge that by."
        )
    elif count < LEAST_SEEDS:
        kind = Kind.UNTOLD
        text = (
            f"{label} differs from {reference} by {signed(mean)} points in {seeds}, which are too few to "
            "judge by: they may agree by chance."
        )
    else:
        low, high = 100 * found.low, 100 * found.high
        if found.side:
            kind = Kind.BETTER if found.side > 0 else Kind.WORSE
            size, (a, b) = abs(mean), sorted((abs(low), abs(high)))
            text = (
                f"{label} is {kind} than {reference} by {points(size)} points (95 % interval {points(a)} to "
                f"{points(b)}, {seeds})."
            )
        else:
            kind = Kind.OPEN
            text = (
                f"No difference between {label} and {reference} was found ({signed(mean)} points, 95 % "
                f"interval {signed(low)} to {signed(high)}, {seeds}); gains of more than {points(high)} "
                f"points and losses of more than {points(-low)} can be excluded at that level."
            )
    return Verdict(method, kind, text, found)


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
        common = [seed for seed in seeds if seed in found and seed in base]
        if method == reference or not common:
            continue
        ours, theirs = [found[s] for s in common], [base[s] for s in common]
        mean, low, high = paired_difference(ours, theirs, confidence)
        nan = float("nan")
        paired = Paired(mean, nan if low is None else low, nan if high is None else high, tuple(common))
        differences[method] = paired
        if len(common) == len(seeds) and paired.side > 0:
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


def number(count: int) -> str:
    """Small numbers as words.

    >>> number(5), number(12)
    ('five', '12')
    """
    return COUNTS[count] if count < len(COUNTS) else str(count)


def points(value: float) -> str:
    """Percentage points with two digits; more where it would read as 0 and is not.

    >>> points(0.934), points(0.0012), points(0.0)
    ('0.93', '0.001', '0.00')
    """
    if abs(value) < 1e-7:
        return "0.00"
    return f"{value:.2f}" if abs(value) >= 0.005 else f"{value:.1g}"


def signed(value: float) -> str:
    """As :func:`points`, with its sign.

    >>> signed(0.934), signed(-0.4), signed(0.0)
    ('+0.93', '−0.40', '0.00')
    """
    sign = "" if abs(value) < 1e-7 else "−" if value < 0 else "+"
    return sign + points(abs(value))


def listing(names: Sequence[str]) -> str:
    """Names as a part of a sentence.

    >>> listing(["a"]), listing(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
