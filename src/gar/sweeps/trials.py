"""Measure the trials of a search with an executor: runs on the development probe, kept only as scores."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from gar.runs.files import read_json
from gar.runs.names import FAILURE, RESULT
from gar.sweeps.executors import Executor, Job, drive
from gar.sweeps.progress import View
from gar.sweeps.search import Evaluate, Measured, Stopped, Trial

#: Updates between the checkpoints of a trial.
CHECKPOINT_EVERY = 100


class TrialError(RuntimeError):
    """A trial failed for a reason that is not its candidate's: the search cannot judge it."""


def evaluator(executor: Executor, stopping: Callable[[], bool], view: View) -> Callable[[Path], Evaluate]:
    """What :func:`gar.sweeps.search.search` takes as ``evaluate``."""

    def of_directory(directory: Path) -> Evaluate:
        def evaluate(trials: Sequence[Trial]) -> Iterable[Measured]:
            return run_trials(trials, directory, executor, stopping, view)

        return evaluate

    return of_directory


def run_trials(
    trials: Sequence[Trial], directory: Path, executor: Executor, stopping: Callable[[], bool], view: View
) -> Iterator[Measured]:
    """Run all trials; non-finite ones are measured as such, any other failure ends the search at the end."""
    folder = directory / "runs"
    by_id = {f"{directory.name}/{trial.key}-seed-{trial.seed}": trial for trial in trials}
    view.total += len(trials)
    failures: list[str] = []

    def jobs() -> Iterator[Job]:
        for name, trial in by_id.items():
            out = folder / Path(name).name
            (out / FAILURE).unlink(missing_ok=True)
            tree = {**trial.tree, "checkpoint": {**trial.tree["checkpoint"], "every": CHECKPOINT_EVERY}}
            if (finished := read_json(out / RESULT)) is not None:
                done.append(Measured(trial, finished["accuracy"]["macro"]))  # killed before it was stored
            else:
                yield Job(name, tree, out, probe=True, keep_model=False)

    done: list[Measured] = []
    for event in drive(executor, jobs(), stopping):
        view.follow(event)
        trial = by_id[event.job.id]
        if event.kind == "finished":
            yield Measured(trial, event.facts["accuracy"])
        elif event.kind == "failed" and event.facts["error"] == "TrainingFailure":
            yield Measured(trial, None, event.facts["reason"])
        elif event.kind == "failed":
            failures.append(f"{event.job.id}: {event.facts['reason']}")
            continue
        if event.ends and event.kind != "interrupted":
            shutil.rmtree(event.job.out, ignore_errors=True)
    for measured in done:
        yield measured
        shutil.rmtree(folder / f"{measured.trial.key}-seed-{measured.trial.seed}", ignore_errors=True)
    if stopping():
        raise Stopped("search stopped; start it again with the same arguments to go on")
    if failures:
        raise TrialError(f"{len(failures)} trials failed; the first: {failures[0]}")
