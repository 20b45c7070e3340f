"""One command from several labelled files to an answer: does a method help here, and how sure is that?"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from gar.comparison.alone import ALONE, MEANING, TasksAlone
from gar.comparison.arms import Arms, check_record, make_arms, write_record
from gar.comparison.estimate import WORKER_START, Estimate, Prepared, Progress, makespan, updates_of
from gar.comparison.outcome import Comparison, Recommended, content, failure_lines, recommendation_lines
from gar.comparison.recommend import Recommendation, recommend
from gar.config import Config, build, load_tree
from gar.data import Mixture, Task, load_mixture, majority_shares, selection_mixture
from gar.errors import UserError, path_kind
from gar.methods import REFERENCE
from gar.presets.catalogue import resolve_config
from gar.report.comparison import Beside, Line, Words, compared_lines, write_comparison
from gar.report.results import Results
from gar.report.verdict import counted, judge, listing, number
from gar.runs import State, read_run, state_of
from gar.runs.files import write_json
from gar.runs.names import MODEL, RESULT
from gar.runs.stopping import StopSignals
from gar.sweeps.executors import Executor
from gar.sweeps.local import GpuUse, LocalExecutor, filling_jobs
from gar.sweeps.progress import View, duration
from gar.sweeps.search import CANDIDATES, Budget, Wanted, search, space, sweeping
from gar.sweeps.store import SWEEP, hold
from gar.sweeps.suite import Runs
from gar.sweeps.sweep import Outcome, Plan, Times, carry_out, is_due, make_plan
from gar.training.memory import release_memory

RECOMMENDED = "recommended"
SEARCH = "search"


class Stopped(KeyboardInterrupt):
    """The comparison was interrupted; what is finished is used when it starts again."""


def compare(
    what: Config | str | Path,
    methods: Sequence[str] | None = None,
    seeds: int | Sequence[int] = 5,
    out: str | Path = "runs/compare",
    *,
    overrides: Mapping[str, Any] | None = None,
    search: Budget | None = None,
    alone: bool = False,
    jobs: int | None = None,
    retry_failed: bool = False,
    console: Console | None = None,
) -> Comparison:
    """Train methods with the same seeds, and say what the differences show and which model to use.

    ``what`` is a configuration, or a file, mixture or preset as for ``gar train``. ``search`` looks for every
    method's hyper-parameters first, on that budget. ``alone`` also trains each task by itself with Baseline,
    with all experts and with one (:mod:`gar.comparison.alone`). Every run holds ``evaluation.selection`` of
    its training splits out (a tenth where the configuration does not say), by which the recommended model is
    chosen; the validation splits, which the table reports, have no part in the choice. Finished runs in
    ``out`` are not run again. What goes on is told on ``console`` (standard error). Raises
    :class:`~gar.errors.UserError` for wrong input, and :class:`Stopped` after an interruption.
    """
    console, out, began = console or Console(stderr=True), Path(out), time.monotonic()
    arms = _arms(what, overrides or {}, methods, seeds)
    if search is not None:
        for method in arms.methods:
            space(method)
    facts = None if search is None else asdict(search)
    told = _Told(console)
    if changed := check_record(out, arms, facts):
        told(f"goes on with the comparison in {out}: {changed}")
    jobs = jobs or filling_jobs({GpuUse.of(tree) for tree in arms.trees.values()}, len(arms))
    if jobs < 1:
        raise UserError(f"--jobs is {jobs}; expected 1 or more")
    _announce(told, arms, jobs)
    mixture, selection = _data(arms)
    updates = updates_of(build(arms.trees[REFERENCE]), mixture)
    apart = TasksAlone.of(arms, updates) if alone else None
    # What a search will choose is not known yet, so finished runs are compared with it later.
    known = make_plan(arms, out, retry_failed).times if search is None else Times()
    todo = _todo(arms, out, retry_failed)
    todo_apart = {} if apart is None else _todo(apart, out / ALONE, retry_failed)
    estimate = Estimate()
    if todo or todo_apart or (search is not None and not _is_searched(arms, out / SEARCH)):
        prepared = Prepared(arms)
        estimate = _estimate(
            told, arms, list(todo.values()), len(todo_apart), known, prepared, jobs, search, out / SEARCH
        )
        if prepared.absent:
            with _features(console) as progress:
                prepared.compute_features(progress)
            estimate = replace(estimate, features=0.0)
        del prepared
        release_memory()
    else:
        told("Nothing is left to train.")
    with hold(out), LocalExecutor(jobs, out / SWEEP) as executor, StopSignals() as stopping:
        write_record(out, arms, facts)
        if search is not None:
            arms = _searched(arms, executor, stopping, out / SEARCH, search, console)
        plan = make_plan(arms, out, retry_failed)
        _train(plan, out, executor, stopping, estimate, jobs, console)
        if alone:
            apart = TasksAlone.of(arms, updates)  # a search has changed the configurations
            known_length = REFERENCE in estimate.runs
            seconds = {REFERENCE: _alone_seconds(estimate, len(mixture.tasks))} if known_length else {}
            told(f"each task by itself, with {listing([*apart.labels.values()])}: {counted(len(apart))}")
            with hold(out / ALONE):
                plan = make_plan(apart, out / ALONE, retry_failed)
                _train(plan, out, executor, stopping, Estimate(runs=seconds), jobs, console, models=False)
    comparison = _conclude(out, arms, mixture, selection, apart)
    write_json(out / "compare.json", content(comparison))
    if todo or todo_apart:
        told(f"took {duration(time.monotonic() - began)}")
    return comparison


class _Told:
    """Lines about what goes on."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def __call__(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _arms(
    what: Config | str | Path,
    overrides: Mapping[str, Any],
    methods: Sequence[str] | None,
    seeds: int | Sequence[int],
) -> Arms:
    if "seed" in overrides:
        raise UserError("seed=…: a comparison has its own seeds; expected --seeds")
    if isinstance(what, Config):
        config, setting = what.override(overrides), "comparison"
    else:
        word = str(what)
        if path_kind(word) == "file" and "settings" in load_tree(word):
            raise UserError(f"{word}: is a suite, for gar sweep; expected one configuration")
        config = resolve_config(word, overrides)
        file = Path(word).suffix.lower() in {".yaml", ".yml"} or path_kind(word) == "file"
        setting = Path(word).stem if file else config.backbone.name.rstrip("/").split("/")[-1]
    return make_arms(config, setting, methods, seeds)


def _announce(told: _Told, arms: Arms, jobs: int) -> None:
    seeds = f"{number(len(arms.seeds))} seed{'s' if len(arms.seeds) > 1 else ''}"
    names = listing(list(arms.labels.values()))
    told(f"{names} on {arms.mixture}, {seeds}: {counted(len(arms))}, {jobs} at a time")
    if len(arms.seeds) == 1:
        told("One seed cannot compare methods: differences of single runs come and go. --seeds 5 can.")


def _data(arms: Arms) -> tuple[Mixture, Mixture | None]:
    config = build(arms.trees[REFERENCE])
    mixture = load_mixture(config.mixture, data_dir=config.data_dir, cache_dir=config.cache.directory)
    mixture.check()
    return selection_mixture(mixture, config.evaluation.selection)


# ---------------------------------------------------------------------- before it starts


def _todo(arms: Runs, out: Path, retry_failed: bool) -> dict[str, str]:
    """The methods of the runs that are due, by the runs' ids."""
    runs = (run for run in arms.runs() if is_due(state_of(out / run.id), retry_failed))
    return {run.id: run.combination.method for run in runs}


def _is_searched(arms: Arms, out: Path) -> bool:
    folder = out / arms.setting / arms.mixture
    return all((folder / method / "chosen.yaml").is_file() for method in arms.methods)


def _estimate(
    told: _Told,
    arms: Arms,
    todo: Sequence[str],
    todo_alone: int,
    times: Times,
    prepared: Prepared,
    jobs: int,
    budget: Budget | None,
    out: Path,
) -> Estimate:
    """Tell how long it may take: as finished runs did, else as a few updates take now."""
    known = {key[2]: total / count for key, (total, count) in times.totals.items() if len(key) == 3}
    if budget is None and set(todo) <= set(known) and not prepared.absent:
        estimate, how = Estimate(0.0, WORKER_START, known), "as long as finished runs took"
    else:
        estimate, how = prepared.estimate(jobs), "timed here on a few updates"
    total = estimate.total(todo, jobs)
    if total is None:
        told("estimate: unknown; an update failed while it was timed")
        return estimate
    parts = [f"{duration(estimate.features)} for features"] if estimate.features >= 1 else []
    if budget is not None:
        seconds, candidates = _search_seconds(arms, estimate, prepared, budget, jobs, out)
        parts.append(f"{duration(seconds)} for {candidates} short runs of the search")
        total += seconds
    lengths = sorted(round(estimate.runs[method]) for method in set(todo))
    if lengths:
        span = f"{lengths[0]} s" if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]} s"
        parts.append(f"{counted(len(todo))} of {span}")
    if todo_alone and REFERENCE in estimate.runs:
        each = _alone_seconds(estimate, len(prepared.mixture.tasks))
        parts.append(f"{counted(todo_alone)} of a task by itself, {round(each)} s each")
        total += makespan([each] * todo_alone, jobs)
    told(f"estimate: about {duration(total)} ({'; '.join(parts)}; {how})")
    return estimate


def _alone_seconds(estimate: Estimate, tasks: int) -> float:
    """Of a run of one of some tasks; an update of all of them has its batch and the others'."""
    if REFERENCE not in estimate.update:
        return estimate.runs[REFERENCE] / tasks
    return estimate.around + (estimate.runs[REFERENCE] - estimate.around) / tasks


def _search_seconds(
    arms: Arms, estimate: Estimate, prepared: Prepared, budget: Budget, jobs: int, out: Path
) -> tuple[float, int]:
    """Of a search, and its runs at most: stages may share candidates."""
    seconds, count = 0.0, 0
    for combination in {run.combination.method: run.combination for run in arms.runs()}.values():
        free = [coordinate.count for coordinate in space(combination.method).coordinates]
        runs = budget.seeds * (sum(free) + 3 ** len(free))
        done = (out / combination.id / CANDIDATES).glob(f"*/seed-*/{RESULT}")
        runs = max(0, runs - sum(1 for _ in done))
        updates = updates_of(build(budget.apply(combination.tree)), prepared.mixture)
        count += runs
        seconds += runs * (estimate.around + updates * estimate.update[combination.method])
    return seconds / jobs, count


@contextmanager
def _features(console: Console) -> Iterator[Progress]:
    """A bar on a terminal while features are computed."""
    columns = (TextColumn("features"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        bar = bars.add_task("features", total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)


# ---------------------------------------------------------------------- the runs


def _searched(
    arms: Arms, executor: Executor, stopping: StopSignals, out: Path, budget: Budget, console: Console
) -> Arms:
    """The arms with every method's chosen values; their seeds and their budget stay."""
    trees: dict[str, dict[str, Any]] = {}
    with hold(out), View(0, console=console) as view:
        measure = sweeping(out, executor, stopping, view)
        wanted = Wanted(arms.setting, arms.mixture, arms.methods, lambda name: dict(arms.trees[name]))
        for _, one in search([wanted], measure, out, budget=budget):
            values = ", ".join(f"{name} {value:.3g}" for name, value in one.values.items())
            view.say(f"chosen for {one.method}: {values}; accuracy {one.score:.4f} on the search's probe")
            trees[one.method] = one.tree
    return replace(arms, trees=trees)


def _train(
    plan: Plan,
    out: Path,
    executor: Executor,
    stopping: StopSignals,
    estimate: Estimate,
    jobs: int,
    console: Console,
    models: bool = True,
) -> None:
    states = plan.states
    outcome = Outcome(states[State.FINISHED], 0 if plan.retry_failed else states[State.FAILED])
    todo = _todo(plan.suite, plan.out, plan.retry_failed)
    guess = estimate.total(list(todo.values()), jobs)
    expected = {} if guess is None else {name: estimate.runs[method] for name, method in todo.items()}
    done = outcome.finished + outcome.failed
    with View(plan.total, done, console, expected=expected, guess=guess) as view:
        carry_out(plan, executor, outcome, keep_models=models, view=view, stopping=stopping)
    if outcome.interrupted:
        raise Stopped(f"stopped; start again with the same arguments to go on in {out}")


# ---------------------------------------------------------------------- what came of it


def _conclude(
    out: Path, arms: Arms, mixture: Mixture, selection: Mixture | None, apart: TasksAlone | None
) -> Comparison:
    runs = {run.id: read_run(out / run.id) for run in arms.runs()}
    failures = {
        name: str(run.reason or run.state) for name, run in runs.items() if run.state != State.FINISHED
    }
    results = Results(runs.values())
    labels, shares = arms.labels, majority_shares(mixture)
    lines = compared_lines(results, arms.methods, shares, REFERENCE)
    beside = None
    if apart is not None:
        failures |= apart.failures(out)
        own = apart.lines(out, shares)
        said = [apart.sentence(own), MEANING]
        beside = Beside(ALONE, "Each task by itself", own, apart.labels, said)
    macro = next((line for line in lines if line.name == "accuracy"), None)
    verdicts = [
        judge(method, labels[method], macro.differences.get(method) if macro else None, labels[REFERENCE])
        for method in arms.methods
        if method != REFERENCE
    ]
    chosen_by: dict[str, dict[int, float]] = {}
    for run in arms.runs():
        found = runs[run.id].result.get("accuracy", {}).get("selection")
        if found:
            chosen_by.setdefault(run.combination.method, {})[run.seed] = float(found["macro"])
    recommended = _recommended(out, arms, recommend(chosen_by, arms.seeds, labels), mixture.tasks[0])
    notes = _notes(arms, lines, selection, failures)
    comparison = Comparison(
        out, arms, results, lines, verdicts, chosen_by, recommended, failures, {}, notes, beside
    )
    files = write_comparison(out, results, lines, labels, _words(comparison, mixture), beside)
    return replace(comparison, files={**files, "compare.json": out / "compare.json"})


def _recommended(out: Path, arms: Arms, choice: Recommendation | None, task: Task) -> Recommended | None:
    if choice is None:
        return None
    run = out / next(
        r.id for r in arms.runs() if (r.combination.method, r.seed) == (choice.method, choice.seed)
    )
    if not (run / MODEL).is_dir():
        raise UserError(f"{run}: its model is gone; remove the run's directory to train it again")
    path = point(out / RECOMMENDED, run)
    texts = '"a text"' if len(task.text) == 1 else '"a first text" "a second text"'
    command = f"gar predict {shlex.quote(str(path))} {texts} --task {shlex.quote(task.name)}"
    return Recommended(choice, run, path, command)


def point(link: Path, run: Path) -> Path:
    """Make ``link`` lead to a run: a relative symbolic link, or a copy of its model where there are none."""
    if link.is_dir() and not link.is_symlink() and {path.name for path in link.iterdir()} - {MODEL}:
        raise UserError(f"{link}: holds other files; expected none, or those of an earlier comparison")
    working = link.with_name(f".{link.name}.partial")
    shutil.rmtree(working, ignore_errors=True)
    working.unlink(missing_ok=True)
    try:
        os.symlink(os.path.relpath(run, link.parent), working, target_is_directory=True)
    except (OSError, NotImplementedError):
        shutil.copytree(run / MODEL, working / MODEL)
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    elif working.is_dir() and not working.is_symlink():
        link.unlink(missing_ok=True)
    os.replace(working, link)
    return link


def _words(comparison: Comparison, mixture: Mixture) -> Words:
    arms, labels = comparison.arms, comparison.arms.labels
    tasks = listing([task.name for task in mixture.tasks])
    count = f"{number(len(arms.seeds))} seed{'s' if len(arms.seeds) > 1 else ''}"
    summary = f"{listing(list(labels.values()))} on {tasks}, {count}: {comparison.results.summary}"
    finished = [
        seed
        for seed in arms.seeds
        if all(
            f"{arms.setting}/{arms.mixture}/{m}/seed-{seed}" not in comparison.failures for m in arms.methods
        )
    ]
    return Words(
        summary,
        [*failure_lines(comparison), *(verdict.text for verdict in comparison.verdicts)],
        recommendation_lines(comparison),
        comparison.notes,
        finished[0] if finished else None,
    )


def _notes(
    arms: Arms, lines: Sequence[Line], selection: Mixture | None, failures: Mapping[str, str]
) -> list[str]:
    notes = []
    others = [label for method, label in arms.labels.items() if method != REFERENCE]
    if len(arms.seeds) > 1:
        notes.append(
            "Intervals: two-sided 95 % Student-t, paired by seed; nominal, not corrected for their number. "
            "About one in twenty misses the true difference by chance alone."
        )
        notes.append(
            "They hold what the seed changes (start, order of the data, dropout) on these validation "
            "examples, not that other examples would give other numbers."
        )
    else:
        notes.append("One seed has no interval: its differences may be chance alone.")
    notes.append(
        "Intra-expert coherence: cosine between tasks' gradients within an expert; the lower, the more they "
        "conflict."
    )
    low = [
        line.label
        for line in lines
        if line.name.startswith("accuracy.") and line.means and line.majority is not None
        if max(line.means.values()) <= line.majority
    ]
    if low:
        notes.append(
            f"No method is above the majority class on {listing(low)}; more updates or another learning rate "
            "may change that."
        )
    if selection is not None:
        sizes = ", ".join(f"{task.name} {len(task.validation)}" for task in selection.tasks)
        notes.append(
            f"All numbers are of the validation splits; held out of training to choose the model by: {sizes}."
        )
    if failures and others:
        notes.append(
            "Where a run failed, a difference is over the seeds that both sides have. Runs do not fail at "
            "random, so such a difference may flatter the method."
        )
    return notes
