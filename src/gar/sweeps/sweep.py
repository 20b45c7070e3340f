"""Run a suite: skip what is finished, go on with what is not, and outlive whatever fails."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gar.errors import UserError
from gar.runs.directory import write_failure
from gar.runs.files import read_json
from gar.runs.names import FAILURE
from gar.runs.state import State, state_of
from gar.runs.stopping import StopSignals
from gar.sweeps import store
from gar.sweeps.executors import Executor, Job, drive
from gar.sweeps.local import GpuUse
from gar.sweeps.progress import View
from gar.sweeps.stored import PACE as STORE_PACE
from gar.sweeps.stored import Store
from gar.sweeps.suite import PlannedRun, Runs

#: Seconds between writes of what runs now, for `gar sweep status`.
PACE = 2.0

Key = tuple[str, ...]


@dataclass
class Times:
    """Mean seconds of finished runs, by (setting, mixture, method) and its beginnings."""

    totals: dict[Key, tuple[float, int]] = field(default_factory=dict)

    def add(self, key: Key, seconds: float) -> None:
        for length in range(1, len(key) + 1):
            total, count = self.totals.get(key[:length], (0.0, 0))
            self.totals[key[:length]] = total + seconds, count + 1

    def expected(self, key: Key) -> float | None:
        """Of runs like it, or at least of its setting; None when there are none."""
        for length in range(len(key), 0, -1):
            if found := self.totals.get(key[:length]):
                return found[0] / found[1]
        return None


@dataclass
class Plan:
    """What a suite means for a directory: states by (setting, mixture), and how long the rest may take.

    ``uses`` says what its runs take of a GPU, ``keep`` where lines of its finished runs are kept: those that
    are there count as finished.
    """

    suite: Runs
    out: Path
    retry_failed: bool
    cells: dict[Key, Counter[State]] = field(default_factory=dict)
    todo: Counter[Key] = field(default_factory=Counter)
    uses: set[GpuUse] = field(default_factory=set)
    times: Times = field(default_factory=Times)
    refused: dict[str, str] = field(default_factory=dict)
    keep: Store | None = None

    def state(self, run: PlannedRun) -> State:
        """Of a run, which need not have a directory to be finished."""
        stored = self.keep is not None and run.combination.id not in self.refused and self.keep.has(run)
        return State.FINISHED if stored else state_of(self.out / run.id)

    @property
    def states(self) -> Counter[State]:
        return sum(self.cells.values(), start=Counter())

    @property
    def total(self) -> int:
        return self.states.total()

    @property
    def remaining(self) -> int:
        return self.todo.total()

    def estimate(self, jobs: int) -> tuple[float, int]:
        """Seconds for the remaining runs that can be estimated, and the number of those that cannot."""
        seconds, unknown = 0.0, 0
        for key, count in self.todo.items():
            expected = self.times.expected(key)
            if expected is None:
                unknown += count
            else:
                seconds += count * expected
        return seconds / jobs, unknown


def make_plan(suite: Runs, out: Path, retry_failed: bool = False, keep: Store | None = None) -> Plan:
    """Look at every run's directory. Memory is that of the combinations counted, not of the runs.

    A combination that makes no valid configuration is noted in ``refused``; only when none is valid, or a
    directory holds a run with another configuration, there is nothing to run.
    """
    plan, valid = Plan(suite, out, retry_failed, keep=keep), 0
    for run in suite.runs():
        combination = run.combination
        key = (combination.setting, combination.mixture, combination.method)
        if combination.id not in plan.refused:
            try:
                plan.uses.add(GpuUse.of(combination.tree))
                valid += 1
            except UserError as error:
                plan.refused[combination.id] = str(error).removeprefix(f"{combination.id}: ")
        directory, state = out / run.id, plan.state(run)
        plan.cells.setdefault(key[:2], Counter())[state] += 1
        if is_due(state, retry_failed):
            plan.todo[key] += 1
        if state is State.FINISHED and state_of(directory) is not State.FINISHED:
            assert keep is not None
            plan.times.add(key, keep.seconds(run))
        elif state in (State.FINISHED, State.UNFINISHED) and combination.id not in plan.refused:
            if change := store.difference(directory, run):
                raise UserError(f"{directory}: {change}; expected another --out")
            if state is State.FINISHED and (record := read_json(directory / store.RECORD)):
                plan.times.add(key, record["seconds"])
    if not valid:
        raise UserError(next(iter(plan.refused.values())))
    return plan


def is_due(state: State, retry_failed: bool) -> bool:
    """Whether a run in this state is to be run."""
    return state in (State.NEW, State.UNFINISHED) or (state is State.FAILED and retry_failed)


@dataclass
class Outcome:
    """How a sweep ended."""

    finished: int = 0
    failed: int = 0
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        return 130 if self.interrupted else int(self.failed > 0)


def run_sweep(
    plan: Plan,
    executor: Executor,
    *,
    keep_models: bool = True,
    view: View | None = None,
    stopping: Callable[[], bool] | None = None,
) -> Outcome:
    """Run everything that is due. Failures are recorded and counted, with those of earlier sweeps."""
    states = plan.states
    outcome = Outcome(states[State.FINISHED], 0 if plan.retry_failed else states[State.FAILED])
    with contextlib.ExitStack() as stack:
        stack.enter_context(store.hold(plan.out))
        view = view or stack.enter_context(View(plan.total, outcome.finished + outcome.failed))
        stop = stopping or stack.enter_context(StopSignals())
        carry_out(plan, executor, outcome, keep_models=keep_models, view=view, stopping=stop)
    return outcome


def carry_out(
    plan: Plan,
    executor: Executor,
    outcome: Outcome,
    *,
    keep_models: bool,
    view: View,
    stopping: Callable[[], bool],
) -> None:
    """Run everything that is due in a directory that the caller holds, and count it in ``outcome``."""
    store.write_planned(plan.out, plan.suite.name, (run.id for run in plan.suite.runs()))
    told, keep = 0.0, plan.keep
    if keep is not None:
        for run in plan.suite.runs():  # what finished when it could not be written down
            if state_of(plan.out / run.id) is State.FINISHED:
                keep.add(plan.out / run.id)
        keep.save()
    for event in drive(executor, _jobs(plan, keep_models, view, outcome), stopping):
        view.follow(event)
        if event.ends or event.kind == "lost":
            store.spent(event.job.out, event.facts.get("seconds", 0.0), starts=event.kind == "lost")
            outcome.finished += event.kind == "finished"
            outcome.failed += event.kind == "failed"
        if keep is not None:
            if event.kind == "finished":
                keep.add(event.job.out)
            keep.save(STORE_PACE)
        if event.ends or time.monotonic() - told > PACE:
            told = time.monotonic()
            store.write_running(plan.out, view.now)
    if keep is not None:
        keep.save()
    store.write_running(plan.out, {})
    outcome.interrupted = stopping()


def _jobs(plan: Plan, keep_models: bool, view: View, outcome: Outcome) -> Iterator[Job]:
    """The due runs, one at a time; one whose configuration is refused fails here."""
    for run in plan.suite.runs():
        directory = plan.out / run.id
        state = plan.state(run)  # looked at again: much may have happened since the plan
        if not is_due(state, plan.retry_failed):
            continue
        if reason := plan.refused.get(run.combination.id):
            write_failure(directory, "UserError", reason)
            outcome.failed += 1
            view.failed += 1
            view.ended(f"FAILED {run.id}: {reason}", "red")
            continue
        store.begin(directory, run, retry=state is State.FAILED)
        yield Job(run.id, run.tree(), directory.resolve(), probe=run.probe, keep_model=keep_models)


# ---------------------------------------------------------------------- status


@dataclass
class Status:
    """The runs planned in a directory, by (setting, mixture) and state; ``running`` and failures by id."""

    cells: dict[Key, Counter[State]]
    running: dict[str, dict[str, object]]
    failures: dict[str, str]


def read_status(out: Path) -> Status:
    """What became of every run that a sweep planned in ``out``."""
    now = store.running(out)
    status = Status({}, {}, {})
    for run_id in store.planned_ids(out):
        setting, mixture, *_ = run_id.split("/")
        state = state_of(out / run_id)
        if state in (State.NEW, State.UNFINISHED) and run_id in now:
            state, status.running[run_id] = State.RUNNING, dict(now[run_id])
        status.cells.setdefault((setting, mixture), Counter())[state] += 1
        if state is State.FAILED:
            told = read_json(out / run_id / FAILURE) or {}
            after = f" (last checkpoint: {told['checkpoint']})" if told.get("checkpoint") else ""
            status.failures[run_id] = f"{told.get('reason', 'failure.json cannot be read')}{after}"
    return status
