"""Each task by itself, with all experts and with one: what experts of its own would do to it.

A router that follows the tasks leaves each of them as good as one expert. What that does to a task is found
without any method: Baseline's update on that task alone, with one expert in the place of all. The runs are
those of a sweep below the comparison's directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gar.comparison.arms import Arms
from gar.config import build, set_key
from gar.data.load import resolve
from gar.errors import UserError
from gar.methods import REFERENCE
from gar.metrics import METRICS
from gar.report.comparison import Line
from gar.report.verdict import Paired, listing
from gar.runs import State, read_run
from gar.runs.names import path_part
from gar.sweeps.suite import Combination, PlannedRun, Tree

#: The directory below the comparison's.
ALONE = "alone"
ALL, ONE = "all_experts", "one_expert"


@dataclass(frozen=True)
class TasksAlone:
    """The runs; ``trees`` has full configurations by task, and by the number of experts."""

    trees: Mapping[str, Mapping[str, Tree]]
    seeds: tuple[int, ...]
    experts: int
    name: str = "compare_alone"

    @classmethod
    def of(cls, arms: Arms, updates: int) -> TasksAlone:
        """Those of a comparison; as many ``updates`` as its mixture has, whatever a task's own epochs are."""
        config = build(arms.trees[REFERENCE])
        if config.mixture.planted is not None:
            raise UserError("--alone: planted tasks are made together; expected registered tasks or your own")
        if config.experts.count == 1:
            raise UserError("--alone: the configuration has one expert; expected experts.count of 2 or more")
        names = [entry.name for entry in resolve(config.mixture)[1]]
        given = config.to_dict()["mixture"]["tasks"] or names  # a registered mixture names its own
        trees: dict[str, dict[str, Tree]] = {}
        for name, task in zip(names, given, strict=True):
            own = config.to_dict()
            own["mixture"] |= {"name": None, "tasks": [task]}
            own["optimizer"] |= {"epochs": None, "updates": updates}
            own["preset"] = None
            single = build(own, name).to_dict()
            set_key(own, "experts.count", 1)
            set_key(own, "experts.top_k", 1)
            trees[name] = {ALL: single, ONE: build(own, name).to_dict()}
        return cls(trees, arms.seeds, config.experts.count)

    @property
    def labels(self) -> dict[str, str]:
        """What readers call the two, all experts first."""
        return {ALL: f"{self.experts} experts", ONE: "one expert"}

    def __len__(self) -> int:
        return 2 * len(self.trees) * len(self.seeds)

    def runs(self) -> Iterator[PlannedRun]:
        """Every run; both of a task and seed come together."""
        combinations = [
            Combination(setting, path_part(task), REFERENCE, dict(tree), {})
            for task, both in self.trees.items()
            for setting, tree in both.items()
        ]
        return (PlannedRun(combination, seed) for seed in self.seeds for combination in combinations)

    def failures(self, out: Path) -> dict[str, str]:
        """The reasons of runs without a result, by their place below the comparison's directory."""
        runs = ((run.id, read_run(out / ALONE / run.id)) for run in self.runs())
        return {
            f"{ALONE}/{name}": str(run.reason or run.state)
            for name, run in runs
            if run.state != State.FINISHED
        }

    def lines(self, out: Path, majority: Mapping[str, float]) -> list[Line]:
        """Every task's accuracy with all experts and with one; ``majority`` is by task."""
        found = []
        for task in self.trees:
            values = {setting: self._accuracies(out, setting, task) for setting in (ALL, ONE)}
            means = {name: float(np.mean([*own.values()])) for name, own in values.items() if own}
            gain = Paired.of(values[ONE], values[ALL])
            differences = {ONE: gain} if gain.seeds else {}
            metric = METRICS["accuracy"]
            found.append(Line(f"accuracy.{task}", task, metric, majority[task], means, differences))
        return found

    def _accuracies(self, out: Path, setting: str, task: str) -> dict[int, float]:
        runs = {seed: read_run(out / ALONE / setting / path_part(task) / REFERENCE / f"seed-{seed}")
                for seed in self.seeds}  # fmt: skip
        finished = {seed: run.result for seed, run in runs.items() if run.state == State.FINISHED}
        return {seed: float(result["accuracy"]["macro"]) for seed, result in finished.items()}

    def sentence(self, lines: Sequence[Line]) -> str:
        """On which tasks one expert is better, worse, or not told apart from all."""
        kinds: dict[str, list[str]] = {"better": [], "worse": [], "not told apart": []}
        words = {1: "better", -1: "worse", 0: "not told apart"}
        for line in lines:
            kinds[words[line.differences[ONE].side if ONE in line.differences else 0]].append(line.label)
        told = [f"{what} on {listing(tasks)}" for what, tasks in kinds.items() if tasks]
        return f"By itself, with one expert in the place of {self.experts}: {'; '.join(told)}."


#: What the sentence is good for.
MEANING = (
    "A router that follows the tasks gives each of them experts of its own, so this is what a task may gain "
    "or lose by that. On the tasks of docs/results.md it went with what GAR at coefficient 1 did to them."
)
