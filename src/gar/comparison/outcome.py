"""What came of a comparison: the numbers, their sentences, and the content of compare.json."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gar.comparison.alone import ALONE
from gar.comparison.arms import Arms
from gar.comparison.recommend import Recommendation
from gar.config import build
from gar.methods import REFERENCE
from gar.report.comparison import Beside, Line
from gar.report.results import Results
from gar.report.verdict import Verdict, counted
from gar.version import __version__

SCHEMA = 1


@dataclass(frozen=True)
class Recommended:
    """The model to use: its run, ``path`` for ``gar predict``, and a command that works as it stands."""

    choice: Recommendation
    run: Path
    path: Path
    command: str


@dataclass(frozen=True)
class Comparison:
    """What came of a comparison.

    ``lines`` are the rows of its table, ``verdicts`` one a method beside Baseline; ``selection`` has the
    accuracies on the selection part by method and seed, ``failures`` the reasons of runs without a result, by
    id. ``beside`` has each task by itself, where that was asked for. ``files`` are written below ``out``.
    """

    out: Path
    arms: Arms
    results: Results
    lines: Sequence[Line]
    verdicts: Sequence[Verdict]
    selection: Mapping[str, Mapping[int, float]]
    recommended: Recommended | None
    failures: Mapping[str, str]
    files: Mapping[str, Path]
    notes: Sequence[str]
    beside: Beside | None = None

    @property
    def exit_code(self) -> int:
        """1 where a run has no result."""
        return int(bool(self.failures))


def failure_lines(comparison: Comparison) -> list[str]:
    """A sentence for every method of which a run has no result."""
    arms, found = comparison.arms, []
    for method, label in arms.labels.items():
        mine = {
            run.seed: comparison.failures[run.id]
            for run in arms.runs()
            if run.combination.method == method and run.id in comparison.failures
        }
        if mine:
            seed, reason = next(iter(mine.items()))
            found.append(f"{label}: {len(mine)} of {counted(len(arms.seeds))} failed; seed {seed}: {reason}")
    if alone := {name: why for name, why in comparison.failures.items() if name.startswith(f"{ALONE}/")}:
        name, reason = next(iter(alone.items()))
        found.append(f"{counted(len(alone))} of a task by itself failed; {name}: {reason}")
    return found


def recommendation_lines(comparison: Comparison) -> list[str]:
    """Which model, why, and how to use it."""
    if (found := comparison.recommended) is None:
        return ["No model is recommended: no run of Baseline has finished."]
    choice, label = found.choice, comparison.arms.labels[found.choice.method]
    share = build(comparison.arms.trees[REFERENCE]).evaluation.selection
    several = len(comparison.selection[choice.method]) > 1
    best = "; this seed is the best of its method there" if several else ""
    return [
        f"Recommended: {label}, seed {choice.seed}. Chosen by accuracy on the {100 * share:g} % of the "
        f"training splits that no run trained on: {choice.reason}{best} ({100 * choice.accuracy:.2f} %).",
        f"Model: {found.path}",
        f"Use it: {found.command}",
    ]


def content(comparison: Comparison) -> dict[str, Any]:
    """The content of compare.json; what is not a number is null."""
    arms, found = comparison.arms, comparison.recommended
    tree = {
        "schema": SCHEMA,
        "gar": __version__,
        "setting": arms.setting,
        "mixture": arms.mixture,
        "seeds": list(arms.seeds),
        "methods": {
            method: {"label": arms.labels[method], "configuration": tree}
            for method, tree in arms.trees.items()
        },
        "table": _lines_tree(comparison.lines),
        "alone": comparison.beside
        and {"table": _lines_tree(comparison.beside.lines), "text": comparison.beside.said[0]},
        "verdicts": [
            {"method": verdict.method, "kind": str(verdict.kind), "text": verdict.text}
            for verdict in comparison.verdicts
        ],
        "selection": {
            "share": build(arms.trees[REFERENCE]).evaluation.selection,
            "accuracy": {
                m: {str(s): a for s, a in by_seed.items()} for m, by_seed in comparison.selection.items()
            },
            "differences": {m: d._asdict() for m, d in found.choice.differences.items()} if found else {},
        },
        "recommended": found
        and {
            "method": found.choice.method,
            "seed": found.choice.seed,
            "accuracy": found.choice.accuracy,
            "reason": found.choice.reason,
            "run": os.path.relpath(found.run, comparison.out),
            "command": found.command,
        },
        "failures": dict(comparison.failures),
    }
    return dict(_plain(tree))


def _lines_tree(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [
        {
            "metric": line.name,
            "label": line.label,
            "majority": line.majority,
            "methods": {
                method: {
                    "mean": mean,
                    "difference": line.differences[method]._asdict() if method in line.differences else None,
                }
                for method, mean in line.means.items()
            },
        }
        for line in lines
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
