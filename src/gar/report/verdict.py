"""What paired seeds allow to say of two methods, in words."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from gar.metrics import paired_difference
from gar.metrics.catalogue import ROUNDING, Metric

#: Fewer seeds carry no winner: accuracies are counts, and two may agree by chance.
LEAST_SEEDS = 3


def side(low: float, high: float) -> int:
    """1 where the whole interval lies above 0, -1 where it lies below, else 0; 0 where it is NaN."""
    return (low > ROUNDING) - (high < -ROUNDING)


class Paired(NamedTuple):
    """Mean difference over the seeds that both have; ``low`` and ``high`` are NaN where one seed is all.

    Accuracies are counts: with two seeds, or where all differences are equal, an interval of width 0 is no
    certainty, and neither better nor worse is said.
    """

    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    seeds: tuple[int, ...] = ()

    @classmethod
    def of(cls, a: Mapping[int, float], b: Mapping[int, float], confidence: float = 0.95) -> Self:
        """``a - b``, values by seed, with its t interval; NaN where no seed has both."""
        common = tuple(seed for seed in a if seed in b)
        if not common:
            return cls()
        mean, low, high = paired_difference([a[s] for s in common], [b[s] for s in common], confidence)
        return cls(mean, math.nan if low is None else low, math.nan if high is None else high, common)

    @property
    def has_interval(self) -> bool:
        """Whether the seeds tell a spread: several, whose differences are not all the same."""
        return math.isfinite(self.low) and self.high - self.low > ROUNDING

    @property
    def side(self) -> int:
        """1 where the whole interval lies above 0, -1 where it lies below, else 0; 0 for too few seeds."""
        if not self.has_interval or len(self.seeds) < LEAST_SEEDS:
            return 0
        return side(self.low, self.high)


POINTS = Metric("difference", "difference", better=1, digits=2, scale=100, unit="pp")
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
    return POINTS.bound(value / POINTS.scale)


def signed(value: float) -> str:
    """As :func:`points`, with its sign.

    >>> signed(0.934), signed(-0.4), signed(0.0)
    ('+0.93', '−0.40', '0.00')
    """
    text = POINTS.bound(value / POINTS.scale, sign=True)
    return text.removeprefix("+") if text == "+0.00" else text


def counted(count: int, noun: str = "run") -> str:
    """A count with its noun.

    >>> counted(1), counted(3)
    ('1 run', '3 runs')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listing(names: Sequence[str]) -> str:
    """Names as a part of a sentence.

    >>> listing(["a"]), listing(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
