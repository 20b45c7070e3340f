"""Update time of the shipped loop: every line is its :class:`~gar.training.Updater`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gar.benchmark.report import Line, compared
from gar.benchmark.settings import Bench, Setting, published
from gar.benchmark.timing import Plan, Runner, Shipped, measure
from gar.methods import Baseline

#: Whether cached updates on a GPU are replayed, and what is added to a method's name where they are not.
CAPTURE = {"on": "", "off": ", not captured"}


def step_lines(
    settings: Iterable[Setting],
    methods: Sequence[str],
    device: torch.device,
    plan: Plan,
    captures: Sequence[str] = ("on",),
) -> Iterator[list[Line]]:
    """Of one setting after the other, a line a method (a method and capture, where there are both).

    Ratios are to Baseline, where it is among them, with the first of the ``captures``.
    """
    variants = {method + CAPTURE[how]: (method, how) for method in methods for how in captures}
    for setting in settings:
        makers = {
            name: partial(shipped, setting, method, {"capture": how == "on"})
            for name, (method, how) in variants.items()
        }
        yield compared(
            measure(partial(Bench, setting, device, len(variants)), makers, device, plan),
            {name: {**setting.labels, "method": name} for name in variants},
            reference=Baseline.name + CAPTURE[captures[0]],
            theirs={name: published(setting, method) for name, (method, _) in variants.items()},
        )


def shipped(setting: Setting, method: str, changes: Mapping[str, Any], bench: Bench) -> Runner:
    """The loop as a run has it; ``changes`` are configuration keys."""
    return Shipped(bench.model, bench.source, setting.config(method, changes))
