"""Update time of the shipped loop: every line is its :class:`~gar.training.Updater`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch

from gar.benchmark.report import Line, compared
from gar.benchmark.settings import Bench, Setting, published
from gar.benchmark.timing import Plan, Runner, Shipped, measure
from gar.methods import Baseline


def step_lines(
    settings: Iterable[Setting], methods: Sequence[str], device: torch.device, plan: Plan
) -> Iterator[list[Line]]:
    """Of one setting after the other, a line a method; ratios are to Baseline, where it is among them."""
    for setting in settings:
        yield compared(
            measure(
                partial(Bench, setting, device, len(methods)),
                {method: partial(shipped, setting, method) for method in methods},
                device,
                plan,
            ),
            {method: {**setting.labels, "method": method} for method in methods},
            reference=Baseline.name,
            theirs={method: published(setting, method) for method in methods},
        )


def shipped(setting: Setting, method: str, bench: Bench) -> Runner:
    """The loop as a run has it."""
    return Shipped(bench.model, bench.source, setting.config(method))
