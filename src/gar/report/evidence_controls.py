"""What a difference from Baseline is made of: learning rate, the objective's form, the number of experts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from gar.methods import REFERENCE
from gar.metrics import Prediction, holm, predicts, t_test
from gar.report._table import Row, Table, interval, shown
from gar.report.evidence import ALONE, FEW, FORMS, KINDS, RATES, Cell, Evidence, kind, label, verdict
from gar.report.evidence_columns import (
    RHO,
    Part,
    accuracies_of,
    accuracy_of,
    gain_columns,
    gain_text,
    routing_columns,
    values_of,
)
from gar.report.verdict import LEAST_SEEDS, POINTS, Paired, counted, listing

#: An adjusted p-value below it is a finding.
LEVEL = 0.05


def tally(found: Iterable[tuple[Paired, str]]) -> str:
    """How many differences are of each of :data:`KINDS`; those that are told apart by their names."""
    named: dict[str, list[str]] = defaultdict(list)
    for difference, name in found:
        named[kind(difference)].append(f"{name}, {shown(POINTS, difference.mean, sign=True).text}")
    counts = [
        f"{len(named[each])} {each}" + (f" ({'; '.join(named[each])})" if each in KINDS[:2] else "")
        for each in KINDS
        if named[each]
    ]
    return ", ".join(counts)


# ---------------------------------------------------------------------- learning rates


class Rate(NamedTuple):
    """A method in a cell, and Baseline's update at that method's learning rate."""

    cell: Cell
    method: str
    learning_rate: str
    usual: str  # Baseline's
    whole: Paired  # the method − Baseline
    alone: Paired  # its rate alone − Baseline
    rest: Paired  # the method − its rate alone
    p: float  # of the rest, of a paired t-test

    @property
    def label(self) -> str:
        return label(self.method)


def at_their_rates(evidence: Evidence) -> Iterator[Rate]:
    searched_in = evidence.suites[RATES].file.chosen_from.settings
    for setting, mixture in evidence.cells([RATES]):
        cell = searched_in[setting], mixture
        usual = evidence.values("accuracy", *cell, REFERENCE)
        for method in evidence.methods((setting, mixture)):
            alone = evidence.values("accuracy", setting, mixture, method)
            with_it = evidence.values("accuracy", *cell, method)
            yield Rate(
                cell,
                method,
                values_of(evidence.rows(setting, mixture, method)["learning_rate"]),
                values_of(evidence.rows(*cell, REFERENCE)["learning_rate"]),
                Paired.of(with_it, usual),
                Paired.of(alone, usual),
                rest := Paired.of(with_it, alone),
                p_value(with_it, alone, rest),
            )


def p_value(ours: Mapping[int, float], theirs: Mapping[int, float], found: Paired) -> float:
    """Of the paired t-test behind a difference of values by seed; NaN where nothing is claimed of it."""
    own = [ours[seed] - theirs[seed] for seed in found.seeds]
    return t_test(own) if len(own) >= LEAST_SEEDS else math.nan


def survivors(ps: Sequence[float], names: Sequence[str]) -> str:
    """What is left after Holm's correction for all of these tests; ``names`` is empty where none counts."""
    left = [name for name, p in zip(names, holm(ps), strict=True) if name and p < LEVEL]
    tested = sum(not math.isnan(p) for p in ps)
    return f"{listing(left) if left else 'none of these'} after Holm's correction for {tested}"


ABOUT_RATES = """\
`evidence_rates` has Baseline's update at the searched learning rate of each other method. GAR was not
switched off at its own, so its differences from Baseline hold its learning rate too.
"""


def rates(evidence: Evidence) -> list[Part]:
    """What is left of a method's difference beside its update without the method, at the same rate."""
    rows, notes = [], []
    for rate in at_their_rates(evidence):
        contents = {
            "setting": rate.cell[0],
            "mixture": rate.cell[1],
            "method": rate.label,
            "learning rate": rate.learning_rate,
            "Baseline's": rate.usual,
            **{
                f"{what}, pp": gain_text(d)
                for what, d in (
                    ("method − Baseline", rate.whole),
                    ("its rate alone − Baseline", rate.alone),
                    ("method − its rate alone", rate.rest),
                )
            },
        }
        rows.append(Row(contents))
        said = verdict(rate.label, rate.rest, "Baseline's update at its learning rate")
        notes.append(f"{', '.join(rate.cell)}: {said}.")
    if not rows:
        return ["Not run.\n"]
    return [ABOUT_RATES, Table("rates", "The methods switched off, at their learning rates", rows, notes)]


def rates_in_short(evidence: Evidence) -> list[str]:
    """How many of the other methods' differences are those of their learning rates."""
    found_rates = list(at_their_rates(evidence))
    if not found_rates:
        return []
    places = [f"{rate.label} in {', '.join(rate.cell)}" for rate in found_rates]
    found = tally((rate.rest, place) for rate, place in zip(found_rates, places, strict=True))
    apart = [
        place if kind(rate.rest) in KINDS[:2] else "" for rate, place in zip(found_rates, places, strict=True)
    ]
    if any(apart):
        found += f"; {survivors([rate.p for rate in found_rates], apart)}"
    told = [rate for rate in found_rates if kind(rate.whole) in KINDS[:2]]
    alike = sum(kind(rate.alone) == kind(rate.whole) for rate in told)
    return [
        "- The other methods against Baseline's update at their own learning rates "
        f"([below](#the-learning-rates-alone)): {found}. Of their {len(told)} differences from "
        f"Baseline that are told apart, {alike} are there with the method switched off, too."
    ]


# ---------------------------------------------------------------------- the objective's form

ABOUT_FORMS = """\
`evidence_top4` explores: 19 forms and coefficients of GAR at one learning rate, five seeds. `evidence_strong`
asks again: the three forms at coefficient 1, fixed before it ran, on ten other seeds, at Baseline's searched
learning rate, on two more mixtures. `evidence_few` is Baseline with about as many experts as raw and unit
rows left in use on `six_complete`: what fewer experts gain alone. On the other mixtures these forms left
other numbers of them in use (utilization, below): there it has fewer experts, but not as many. p-values are
of paired t-tests, adjusted by Holm's method for all lines of a suite.
"""


class Form(NamedTuple):
    """A form of GAR in a cell, beside Baseline."""

    cell: Cell
    method: str
    gain: Paired
    p: float  # of a paired t-test, not adjusted
    adjusted: float  # by Holm's method, for all forms of its suite

    @property
    def place(self) -> str:
        return f"{self.method} in {', '.join(self.cell)}"


def forms_of(evidence: Evidence, suite: str) -> list[Form]:
    """All forms of a suite in all its cells."""
    found = [
        (cell, method)
        for cell in evidence.cells([suite])
        for method in evidence.methods(cell)
        if method != REFERENCE
    ]
    gains = [evidence.difference("accuracy", cell, method, REFERENCE) for cell, method in found]
    ps = []
    for (cell, method), gain in zip(found, gains, strict=True):
        ours, theirs = (evidence.values("accuracy", *cell, name) for name in (method, REFERENCE))
        ps.append(p_value(ours, theirs, gain))
    return [
        Form(*place, gain, p, own) for place, gain, p, own in zip(found, gains, ps, holm(ps), strict=True)
    ]


def forms(evidence: Evidence) -> list[Part]:
    """A table for every cell of the suites of forms, with adjusted p-values; fewer experts beside them."""
    parts: list[Part] = []
    for suite in FORMS:
        found = forms_of(evidence, suite)
        for cell in dict.fromkeys(form.cell for form in found):
            usual = evidence.rows(*cell, REFERENCE)
            rows = [Row({"form": label(REFERENCE), **_columns(usual, Paired(), math.nan)})]
            for form in (form for form in found if form.cell == cell):
                runs = evidence.rows(*cell, form.method)
                rows.append(Row({"form": form.method, **_columns(runs, form.gain, form.adjusted)}))
            parts.append(Table("forms", f"{suite}: {', '.join(cell)}", rows))
            if suite == FORMS[-1]:  # the other one has too many forms
                own = [form.method for form in found if form.cell == cell]
                parts.append(_forms_by_task(evidence, cell, own))
        if found:
            parts.append(f"{_told(suite, found)}\n")
    return [ABOUT_FORMS, *parts, *_few(evidence)] if parts else ["Not run.\n"]


def _forms_by_task(evidence: Evidence, cell: Cell, methods: Sequence[str]) -> Table:
    usual, rows = evidence.rows(*cell, REFERENCE), []
    for name in accuracies_of(usual):
        gains = {method: evidence.difference(name, cell, method, REFERENCE) for method in methods}
        contents = {"task": name.removeprefix("accuracy."), "Baseline": accuracy_of(usual, name)}
        rows.append(Row({**contents, **{f"{method}, pp": gain_text(gain) for method, gain in gains.items()}}))
    return Table("forms-tasks", "Differences by task", rows)


def _columns(runs: pd.DataFrame, gain: Paired, adjusted: float) -> dict[str, Any]:
    return {
        "seeds": str(len(runs)),
        "accuracy": accuracy_of(runs),
        **gain_columns(gain),
        "p, adjusted": "–" if math.isnan(adjusted) else f"{adjusted:.2g}",
        **routing_columns(runs),
        "learning rate": values_of(runs["learning_rate"]),
        "own": ", ".join(dict.fromkeys(map(str, runs["hyperparameters"].fillna("")))),
    }


def forms_in_short(evidence: Evidence) -> list[str]:
    """What the suites of forms say, in a line each."""
    return [f"- {_told(suite, found)}" for suite in FORMS if (found := forms_of(evidence, suite))]


def _told(suite: str, found: Sequence[Form]) -> str:
    """How many forms their own interval tells apart from Baseline, and how many all of them together."""
    apart = [form.place if kind(form.gain) in KINDS[:2] else "" for form in found]
    after = f"; {survivors([form.p for form in found], apart)}"
    return (
        f"Forms of GAR in `{suite}` ([forms](#forms-of-gar)) against Baseline: "
        f"{tally((form.gain, form.place) for form in found)}{after if any(apart) else ''}."
    )


def _few(evidence: Evidence) -> list[Part]:
    beside = {"few_top4": "strong_top4", "few_top1": "strong_top1"}
    rows = []
    for setting, mixture in evidence.cells([FEW]):
        runs = evidence.rows(setting, mixture, REFERENCE)
        ours = evidence.values("accuracy", setting, mixture, REFERENCE)
        gain = Paired.of(ours, evidence.values("accuracy", beside[setting], mixture, REFERENCE))
        contents = {
            "setting": setting,
            "mixture": mixture,
            "seeds": str(len(runs)),
            "accuracy": accuracy_of(runs),
            **gain_columns(gain),
        }
        rows.append(Row(contents))
    return [Table("few", "Baseline with fewer experts, − Baseline with eight", rows)] if rows else []


# ---------------------------------------------------------------------- an expert to itself

ABOUT_ALONE = """\
A router that follows the tasks gives each of them experts of its own; what is left of routing is then which
task it is. `evidence_alone` trains each task by itself, with the eight experts of top-1 and with one, at the
same learning rate and for as many updates as in the mixtures: what a task loses there, it loses by having one
expert. Beside it stands what the task loses in its mixture under GAR at coefficient 1 (`evidence_strong`,
top-1). No task was trained by itself at top-4: the mixtures of top-4 stand beside the tasks of top-1, at
another learning rate.
"""

EIGHT, ONE = "alone_eight", "alone_one"
#: Where a task stands beside others with as many experts a token, and the paper's form of GAR there.
TOGETHER, ALIGNED = "strong_top1", "raw-1"


class Alone(NamedTuple):
    """A task by itself, and in the mixture that has it."""

    task: str
    one: Paired  # one expert − eight
    p: float  # of it
    mixture: str
    aligned: Paired  # GAR at coefficient 1 − Baseline


def tasks_alone(evidence: Evidence, setting: str = TOGETHER, form: str = ALIGNED) -> Iterator[Alone]:
    """Every task that was trained by itself with both numbers of experts, and the first mixture with it."""
    for task in dict.fromkeys(mixture for _, mixture in evidence.cells([ALONE])):
        one, eight = (evidence.values("accuracy", own, task, REFERENCE) for own in (ONE, EIGHT))
        if not one or not eight:
            continue
        name = f"accuracy.{task}"
        mixture, aligned = "–", Paired()
        for cell in evidence.cells(FORMS):
            if cell[0] == setting and name in accuracies_of(evidence.rows(*cell, REFERENCE)):
                mixture, aligned = cell[1], evidence.difference(name, cell, form, REFERENCE)
                break
        yield Alone(task, gain := Paired.of(one, eight), p_value(one, eight, gain), mixture, aligned)


def alone_predicts(evidence: Evidence, setting: str = TOGETHER, form: str = ALIGNED) -> Prediction | None:
    """How what one expert does to a task by itself goes with what GAR at coefficient 1 does to it.

    None where no task has both.
    """
    found = [each for each in tasks_alone(evidence, setting, form) if each.aligned.seeds]
    if not found:
        return None
    return predicts(
        [each.one.mean for each in found],
        [each.aligned.mean for each in found],
        [{each.task} for each in found],
    )


def alone(evidence: Evidence) -> list[Part]:
    """What each task loses with one expert, beside what it loses when experts follow the tasks."""
    rows = []
    for found in tasks_alone(evidence):
        eight, one = (evidence.rows(setting, found.task, REFERENCE) for setting in (EIGHT, ONE))
        contents = {
            "task": found.task,
            "seeds": str(len(found.one.seeds)),
            "eight experts": accuracy_of(eight),
            "one": accuracy_of(one),
            "one − eight, pp": gain_text(found.one),
            "mixture": found.mixture,
            "GAR at coefficient 1 − Baseline there, pp": gain_text(found.aligned),
        }
        rows.append(Row(contents))
    if not rows:
        return ["Not run.\n"]
    table = Table("alone", "A task by itself, and in its mixture", rows)
    return [ABOUT_ALONE, table, *_alone_said(evidence), *_alone_forms(evidence)]


def _alone_forms(evidence: Evidence) -> list[Part]:
    """The correlation of every form and setting; the tasks by themselves are top-1 throughout."""
    places = dict.fromkeys(
        (cell[0], method)
        for cell in evidence.cells(FORMS[-1:])
        for method in evidence.methods(cell)
        if method != REFERENCE
    )
    rows = []
    for setting, form in places:
        if (going := alone_predicts(evidence, setting, form)) is not None:
            contents = {
                "setting": setting,
                "form": form,
                "tasks": str(going.tasks),
                "Spearman": shown(RHO, going.rho, sign=True),
                "95 %, over tasks": interval(RHO, going.low, going.high, sign=True),
                "leaving a task out": interval(RHO, *going.without, sign=True),
            }
            rows.append(Row(contents))
    caption = "One expert − eight by itself against GAR at coefficient 1 − Baseline in the mixture"
    return [Table("alone-forms", caption, rows)] if rows else []


def _alone_said(evidence: Evidence) -> list[str]:
    found = [each for each in tasks_alone(evidence) if each.aligned.seeds]
    if (going := alone_predicts(evidence)) is None:
        return []
    lost = [each for each in found if kind(each.one) == KINDS[1]]
    gained = [each for each in found if kind(each.one) == KINDS[0]]
    worse = [each for each in found if kind(each.aligned) == KINDS[1]]
    both = sum(each in lost for each in worse)
    told = [
        f"{len(own)} {'is' if len(own) == 1 else 'are'} {what}{f' ({names})' if names else ''}"
        for what, own in (("better", gained), ("worse", lost))
        for names in [listing([each.task for each in own]) if own else ""]
    ]
    apart = [each.task if each in lost or each in gained else "" for each in found]
    after = f"; {survivors([each.p for each in found], apart)}" if any(apart) else ""
    rho, low, high = (RHO.bound(value, True) for value in (going.rho, going.low, going.high))
    what = f"Over the tasks the two differences go together (Spearman {rho}, 95 % interval {low} to {high})."
    if not (going.found and going.rho > 0):
        what = f"That the two differences go together is not shown (Spearman {rho}, {low} to {high})."
    return [
        f"By itself, of {counted(len(found), 'task')} {' and '.join(told)} with one expert than with "
        f"eight{after}. In their mixtures {both} of those that are worse and {len(worse) - both} of the "
        f"other {len(found) - len(lost)} are worse under GAR at coefficient 1 than under Baseline. {what}\n"
    ]


def alone_in_short(evidence: Evidence) -> list[str]:
    """The sentence on tasks with an expert to themselves."""
    return [f"- {said.strip()} ([A task by itself](#an-expert-to-itself).)" for said in _alone_said(evidence)]
