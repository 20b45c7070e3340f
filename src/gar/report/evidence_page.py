"""The page of the evidence: what the stored runs say, in words that follow the numbers.

Nothing on it is typed but what the data and the methods are. What the suites plan and no line holds is listed
as not run.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean, median

from matplotlib.figure import Figure

from gar.methods import PROPOSED, REFERENCE
from gar.metrics import METRICS, holm
from gar.presets import paper
from gar.report._style import svg
from gar.report._table import Row, Table, interval, shown
from gar.report._text import markdown
from gar.report.evidence import (
    APART,
    COEFFICIENTS,
    DENOMINATOR,
    FORMS,
    KINDS,
    OTHERS,
    PAIRS,
    Cell,
    Evidence,
    asked_beforehand,
    gains,
    kind,
    label,
    predictor,
    questions,
    verdict,
)
from gar.report.evidence_columns import (
    RHO,
    Part,
    accuracies_of,
    accuracy_of,
    gain_columns,
    mean_of,
    routing_columns,
    values_of,
)
from gar.report.evidence_controls import (
    alone,
    alone_in_short,
    forms,
    forms_in_short,
    rates,
    rates_in_short,
)
from gar.report.evidence_figures import FIGURES
from gar.report.verdict import POINTS, Paired, counted, listing

#: A suite's setting, and the paper's that is nearest to it.
NEAREST = {
    "frozen_top4": "roberta_frozen_lora_ffn",
    "frozen_top1": "roberta_frozen_lora_ffn_top1",
    "minilm_frozen_lora_ffn": "roberta_frozen_lora_ffn",
    "trained_full_ffn": "deberta_full_ffn",
    "trained_head_top4": "roberta_head",
    "trained_head_top1": "roberta_head_top1",
}
#: The share of experts in use below which a run has hardly any.
COLLAPSED = 0.25

INTRODUCTION = """\
# What GAR does on real tasks

Made by `python benchmarks/results.py` from the CSV files in [results](results); nothing below is typed but
what the data and the terms are. [The suites](sweep.md#the-evidence) have the commands that ran it.

**Data.** `six_complete` are the complete public splits of RTE, MRPC, WiC, CoLA, SST-2 and CB. In
`six_reduced`, in the paper's mixtures `five` to `eight` and in the pairs some tasks are not the published
ones: QNLI, BoolQ and QQP train on samples (10,475, 2,000 and 23,496 rows), QQP is measured on a sample too,
and **PAWS and ANLI train on their official labelled test splits**, since their training splits were not at
hand; their numbers compare with nothing published. Validation is up to 2,000 examples a task. CB has 56 of
them, RTE 277: single accuracies there are coarse.

**Hyper-parameters.** Where a table has another learning rate for each method, `gar search` chose by the
paper's protocol on `six_complete` (two seeds a candidate); a setting's other mixtures take these choices.
So a difference is that of the method *and* of its learning rate, and on a mixture that was not searched the
rate may be what decides: see [below](#the-learning-rates-alone).

**Terms.** Differences are paired by seed: both methods have the same start, data order and dropout.
Intervals are 95 % Student-t intervals over seeds, nominal: not corrected for their number, so of 20 true
zeros one is expected to look like a difference. They tell of other seeds on these data, not of other data.
"Better" and "worse" are said only where the interval of three seeds or more excludes 0. Accuracies in %,
differences in percentage points (pp).
"""

ASKED = """\
Asked beforehand: does GAR gain more where the tasks' gradients conflict more under Baseline (a negative
correlation of its gain with the cosine between tasks)? Mixtures share tasks, so intervals draw tasks with
replacement; a correlation counts as found only if that interval excludes 0 and no single task's removal
turns its sign. All other rows explore; their p-values are permutations over mixtures, adjusted by Holm's
method.
"""


def page(evidence: Evidence) -> tuple[str, dict[str, str]]:
    """The page as Markdown, and its figures as SVG by file name."""
    figures = {name: figure for name, draw in FIGURES.items() if (figure := draw(evidence)) is not None}
    parts: list[Part] = [INTRODUCTION, _made_on(evidence), "## In short\n", *_short(evidence)]
    for suite in (name for name in evidence.suites if name not in APART):
        cells = list(evidence.cells([suite]))
        fresh = [
            cell
            for cell in cells
            if cell not in {c for s in _before(evidence, suite) for c in evidence.cells([s])}
        ]
        single = [cell for cell in fresh if len(_tasks(evidence, cell)) == 1]
        for setting, own in groupby(single, key=lambda cell: cell[0]):
            parts += [f"## {setting}, single tasks\n", _single_tasks(evidence, list(own))]
        for cell in (cell for cell in fresh if cell not in single):
            parts += [f"## {cell[0]}, {cell[1]}\n", *_cell_tables(evidence, cell)]
    parts += ["## The learning rates alone\n", *rates(evidence)]
    parts += ["## Forms of GAR\n", *forms(evidence)]
    parts += ["## An expert to itself\n", *alone(evidence)]
    parts += ["## Beside the paper\n", *_beside(evidence)]
    parts += ["## Coefficient and denominator\n", *_coefficients(evidence)]
    parts += _picture(figures, "coefficients", "Difference from coefficient 0 with its 95 % interval.")
    parts += ["## Over training\n"] + (
        _picture(figures, "trajectories", "Means over seeds.") or ["Not run.\n"]
    )
    parts += ["## Load balance, purity and accuracy\n", *_balance(evidence)]
    parts += _picture(
        figures, "balance", "Differences from Baseline, means over seeds; a mark a method and mixture."
    )
    parts += ["## When does alignment help\n", *_when(evidence)]
    parts += _picture(
        figures, "conflict", "A mark a mixture: Baseline's cosine between tasks, and GAR's gain."
    )
    parts += ["## Not run\n", *_not_run(evidence)]
    text = "\n".join(markdown(part) if isinstance(part, Table) else part for part in parts)
    return text.rstrip() + "\n", {f"{name}.svg": svg(f, name, name) + "\n" for name, f in figures.items()}


def _before(evidence: Evidence, suite: str) -> list[str]:
    names = [name for name in evidence.suites if name not in APART]
    return names[: names.index(suite)]


def _picture(figures: Mapping[str, Figure], name: str, caption: str) -> list[Part]:
    return [f"![{caption}](results/{name}.svg)\n\n*{caption}*\n"] if name in figures else []


def _made_on(evidence: Evidence) -> str:
    runs, planned = evidence.runs, {run.id for suite in evidence.suites.values() for run in suite.runs()}
    said = [f"{len(evidence.stored)} of {len(planned)} planned runs are stored."]
    if len(runs):
        devices = runs.groupby(["device", "gar", "torch"]).size()
        made = [
            f"{count} on {device} (gar {gar}, torch {torch})"
            for (device, gar, torch), count in devices.items()
        ]
        said.append(
            f"They were made on: {'; '.join(made)}. "
            f"Together they took {runs['seconds'].sum() / 3600:.1f} hours."
        )
    if evidence.deviating:
        what, verb = counted(evidence.deviating), "differs" if evidence.deviating == 1 else "differ"
        said.append(
            f"**{what} {verb} from their suite in more than hyper-parameters** (length, "
            "samples, backbone, or a version with other keys)."
        )
    if evidence.repeated:
        what = counted(evidence.repeated, "stored run")
        verb = "does" if evidence.repeated == 1 else "do"
        said.append(f"{what} {verb} not count: stored again, or another configuration.")
    if evidence.foreign:
        what, verb = counted(evidence.foreign, "stored run"), "belongs" if evidence.foreign == 1 else "belong"
        said.append(f"{what} {verb} to no packaged suite, and left out.")
    return "**Runs.** " + " ".join(said) + "\n"


def _short(evidence: Evidence) -> list[Part]:
    """What is told apart of GAR and Baseline in words; all cells, and all methods, in a table each."""
    found: dict[str, dict[Cell, Paired]] = defaultdict(dict)
    for cell in evidence.cells(name for name in evidence.suites if name not in APART):
        methods = evidence.methods(cell)
        for method in (m for m in methods if m != REFERENCE and REFERENCE in methods):
            found[method][cell] = evidence.difference("accuracy", cell, method, REFERENCE)
    if not found[PROPOSED]:
        return ["Nothing was run yet.\n"]
    kinds = Counter(map(kind, found[PROPOSED].values()))
    total = kinds.total()
    head = (
        f"GAR, at its searched or default coefficient, against Baseline in {total} "
        f"{'cells' if total > 1 else 'cell'} of setting and mixture: "
        + ", ".join(f"{kinds[each]} {each}" for each in KINDS if kinds[each])
    )
    apart = [
        f"- {', '.join(cell)}: {verdict('GAR', gain)}."
        for each in KINDS[:2]
        for cell, gain in found[PROPOSED].items()
        if kind(gain) == each
    ]
    rows = [
        Row(
            {
                "setting": cell[0],
                "mixture": cell[1],
                "seeds": str(len(gain.seeds)),
                **gain_columns(gain),
                "": kind(gain),
            }
        )
        for cell, gain in found[PROPOSED].items()
    ]
    return [
        f"{head}.\n",
        *apart,
        *rates_in_short(evidence),
        *forms_in_short(evidence),
        *alone_in_short(evidence),
        *_without_experts(evidence),
        "",
        Table("short", "GAR − Baseline in every cell, at its searched or default coefficient", rows),
        "Pairs and triples of tasks ([below](#when-does-alignment-help)) and other forms and coefficients of "
        "GAR ([below](#forms-of-gar)) are not among these cells.\n",
        Table("methods", "Every method against Baseline, in numbers of cells", _all_methods(found)),
    ]


def _without_experts(evidence: Evidence) -> list[str]:
    """Whether experts are of any use at all: the forms that collapsed, against the coefficient 0."""
    kinds: Counter[str] = Counter()
    mixtures: dict[str, None] = {}
    for cell in evidence.cells([COEFFICIENTS, DENOMINATOR]):
        for method in evidence.methods(cell):
            if method != "gar-0" and mean_of(evidence.rows(*cell, method), "utilization") < COLLAPSED:
                kinds[kind(evidence.difference("accuracy", cell, method, "gar-0"))] += 1
                mixtures[cell[1]] = None
    if not kinds:
        return []
    said = ", ".join(f"{kinds[each]} {each}" for each in KINDS if kinds[each])
    one_way = kinds["better"] and not kinds["worse"]
    better = (
        f" Where they are told apart, on {listing(list(mixtures))}, hardly any experts do better than eight; "
        "what fewer do on other mixtures is [below](#forms-of-gar), too."
    )
    return [
        "- Forms of GAR that leave fewer than a quarter of the experts in use, against coefficient 0 "
        f"([below](#coefficient-and-denominator)): {said}.{better if one_way else ''}"
    ]


def _all_methods(found: Mapping[str, Mapping[Cell, Paired]]) -> list[Row]:
    rows = []
    for method, gains_of in found.items():
        cells: dict[str, list[str]] = defaultdict(list)
        for cell, gain in gains_of.items():
            cells[kind(gain)].append(f"{', '.join(cell)} ({shown(POINTS, gain.mean, sign=True).text})")
        contents = {each: str(len(cells[each])) for each in KINDS[:3]}
        told = {f"where {each}": "; ".join(cells[each]) for each in KINDS[:2]}
        rows.append(Row({"method": label(method), "cells": str(len(gains_of)), **contents, **told}))
    return rows


def _single_tasks(evidence: Evidence, cells: Sequence[Cell]) -> Table:
    """Mixtures of one task each: what tells of several tasks is trivial there."""
    rows = []
    for cell in cells:
        for method in evidence.methods(cell):
            runs = evidence.rows(*cell, method)
            gain = evidence.difference("accuracy", cell, method, REFERENCE)
            contents = {
                "task": cell[1],
                "method": label(method),
                "seeds": str(len(runs)),
                "accuracy": accuracy_of(runs),
                **gain_columns(Paired() if method == REFERENCE else gain),
                "load variance": shown(METRICS["load_variance"], mean_of(runs, "load_variance")),
                "utilization": shown(METRICS["utilization"], mean_of(runs, "utilization")),
                "learning rate": values_of(runs["learning_rate"]),
                "own": ", ".join(dict.fromkeys(map(str, runs["hyperparameters"].fillna("")))),
            }
            rows.append(Row(contents))
    return Table("single", "Means over seeds; differences from Baseline", rows)


def _tasks(evidence: Evidence, cell: Cell) -> list[str]:
    """The tasks that a cell's runs have an accuracy of."""
    return accuracies_of(evidence.rows(*cell, evidence.methods(cell)[0]))


def _cell_tables(evidence: Evidence, cell: Cell) -> list[Part]:
    rows = []
    for method in evidence.methods(cell):
        runs = evidence.rows(*cell, method)
        gain = Paired() if method == REFERENCE else evidence.difference("accuracy", cell, method, REFERENCE)
        contents = {
            "method": label(method),
            "seeds": str(len(runs)),
            "accuracy": accuracy_of(runs),
            "− Baseline, pp": shown(POINTS, gain.mean, sign=True),
            "95 % interval": interval(POINTS, gain.low, gain.high, sign=True),
            **routing_columns(runs),
            "updates": values_of(runs["updates"]),
            "learning rate": values_of(runs["learning_rate"]),
            "own": ", ".join(dict.fromkeys(map(str, runs["hyperparameters"].fillna("")))),
        }
        rows.append(Row(contents))
    notes = [
        f"{verdict(label(method), evidence.difference('accuracy', cell, method, REFERENCE))}."
        for method in evidence.methods(cell)
        if method != REFERENCE
    ]
    forms: dict[str, list[str]] = defaultdict(list)
    for method in evidence.methods(cell):
        forms[str(evidence.rows(*cell, method)["name"].iloc[0])].append(method)
    for name, tried in forms.items():
        if len(tried) > 1:
            best = max(tried, key=lambda method: evidence.rows(*cell, method)["accuracy"].mean())
            notes.append(
                f"The best of {len(tried)} forms of {label(name)} is {best}; it was picked by the accuracies "
                "above, which flatters it."
            )
    parts: list[Part] = [Table("runs", "Means over seeds", rows, notes)]
    if {PROPOSED, REFERENCE} <= set(evidence.methods(cell)):
        parts.append(_by_task(evidence, cell))
    return parts


def _by_task(evidence: Evidence, cell: Cell) -> Table:
    own = evidence.rows(*cell, REFERENCE)
    rows = []
    for name in _tasks(evidence, cell):
        gain = evidence.difference(name, cell, PROPOSED, REFERENCE)
        contents = {
            "task": name.removeprefix("accuracy."),
            "Baseline": accuracy_of(own, name),
            "GAR": accuracy_of(evidence.rows(*cell, PROPOSED), name),
            **gain_columns(gain),
        }
        rows.append(Row(contents))
    return Table("tasks", "GAR and Baseline by task", rows)


def _beside(evidence: Evidence) -> list[Part]:
    rows = []
    for setting, theirs in NEAREST.items():
        for cell in evidence.cells(evidence.suites):
            if cell[0] != setting:
                continue
            for metric, column in (
                ("accuracy", "acc"),
                ("load_variance", "lvar"),
                ("gradient_mass_purity", "purity"),
            ):
                printed = next(
                    (
                        row
                        for row in paper.paired()
                        if row[:4] == (theirs, "five_mixtures", "gar-baseline", column)
                    ),
                    None,
                )
                found = evidence.difference(metric, cell, PROPOSED, REFERENCE)
                if printed is None or not found.seeds:
                    continue
                shape, scale = (POINTS, 100.0) if metric == "accuracy" else (METRICS[metric], 1.0)
                mean, low, high = (
                    float(x) / scale for x in (printed.estimate, printed.ci_low, printed.ci_high)
                )
                contents = {
                    "here": f"{setting}, {cell[1]}",
                    "paper": theirs,
                    "metric": shape.label if metric != "accuracy" else "accuracy, pp",
                    "GAR − Baseline here": shown(shape, found.mean, sign=True),
                    "95 % interval": interval(shape, found.low, found.high, sign=True),
                    "in the paper": shown(shape, mean, sign=True),
                    "its interval": interval(shape, low, high, sign=True),
                    "the two intervals": _overlap(found, low, high),
                }
                rows.append(Row(contents))
    if not rows:
        return ["Not run.\n"]
    note = (
        "No reproduction: another backbone (MiniLM-L6), other mixtures and 128 tokens; the paper's numbers "
        "are means over its five mixtures."
    )
    return [Table("paper", "GAR − Baseline beside the paper's", rows, [note])]


def _overlap(found: Paired, low: float, high: float) -> str:
    if math.isnan(found.low):
        return "one seed"
    return "overlap" if found.low <= high and low <= found.high else "are apart"


def _coefficients(evidence: Evidence) -> list[Part]:
    parts: list[Part] = []
    for cell in evidence.cells([COEFFICIENTS, DENOMINATOR]):
        rows, notes = [], []
        for method in evidence.methods(cell):
            runs = evidence.rows(*cell, method)
            gain = Paired() if method == "gar-0" else evidence.difference("accuracy", cell, method, "gar-0")
            contents = {
                "coefficient": method.removeprefix("gar-"),
                "seeds": str(len(runs)),
                "accuracy": accuracy_of(runs),
                "− coefficient 0, pp": shown(POINTS, gain.mean, sign=True),
                "95 % interval": interval(POINTS, gain.low, gain.high, sign=True),
                **routing_columns(runs),
            }
            rows.append(Row(contents))
            if method.endswith("-numerator"):
                whole = method.removesuffix("-numerator")
                said = verdict(
                    "GAR without its denominator", evidence.difference("accuracy", cell, method, whole), "GAR"
                )
                notes.append(f"Coefficient {whole.removeprefix('gar-')}: {said}.")
            if gain.seeds and mean_of(runs, "utilization") < COLLAPSED:
                said = verdict(method.removeprefix("gar-"), gain, "coefficient 0")
                notes.append(f"Fewer than a quarter of the experts are in use, and {said}.")
        parts.append(Table("coefficients", f"{cell[0]}, {cell[1]}", rows, notes))
    return parts or ["Not run.\n"]


def _balance(evidence: Evidence) -> list[Part]:
    """Of all compared methods, and of the forms of GAR that align the most."""
    whose = {
        "compared methods": [s for s in evidence.suites if s not in APART],
        f"`{FORMS[-1]}`": FORMS[-1:],
    }
    rows = [
        Row({"of": of, **_became(evidence, suites, name, down)})
        for of, suites in whose.items()
        if any(True for _ in evidence.cells(suites))
        for name, down in (("load_variance", True), ("gradient_mass_purity", False), ("nmi", False))
    ]
    caption = "What became of accuracy where experts are more evenly used, or specialise more"
    return [Table("balance", caption, rows)] if rows else ["Not run.\n"]


def _became(evidence: Evidence, suites: Sequence[str], name: str, down: bool) -> dict[str, str]:
    """Accuracy of the methods and mixtures whose metric their own interval tells to be ``down`` (or up)."""
    told: dict[str, int] = dict.fromkeys(("better", "worse", "neither"), 0)
    for cell in evidence.cells(suites):
        for method in evidence.methods(cell):
            change = evidence.difference(name, cell, method, REFERENCE)
            gain = evidence.difference("accuracy", cell, method, REFERENCE)
            if method == REFERENCE or math.isnan(gain.low) or change.side != (-1 if down else 1):
                continue
            told["better" if gain.side > 0 else "worse" if gain.side < 0 else "neither"] += 1
    return {
        "measured": f"{METRICS[name].label} {'lower' if down else 'higher'} than Baseline's, by its interval",
        "methods and mixtures": str(sum(told.values())),
        **{f"accuracy {word}": str(count) for word, count in told.items()},
    }


def _range(cosines: Sequence[float]) -> str:
    """How much conflict there was to begin with."""
    known = [value for value in cosines if not math.isnan(value)]
    if not known:
        return ""
    low, middle, high = (METRICS["task_cosine"].text(f(known), True) for f in (min, median, max))
    return f" Under Baseline the cosine between tasks is {low} to {high}, median {middle}."


def _when(evidence: Evidence) -> list[Part]:
    asked = questions(evidence)
    if not asked:
        return ["Not run.\n"]
    own = gains(evidence, PROPOSED)
    conflict = _range(own.predictors.get(("task_cosine", None), ()))
    seeds = " to ".join(map(str, sorted({min(own.seeds, default=0), max(own.seeds, default=0)})))
    parts: list[Part] = [
        ASKED,
        f"{len(own.mixtures)} mixtures, {seeds} seeds.{conflict}\n",
    ]
    adjusted = holm([question.answer.p for question in asked])
    rows = []
    for question, p in zip(asked, adjusted, strict=True):
        found = question.answer
        contents = {
            "of Baseline": METRICS[question.predictor].label,
            "when": question.when,
            "gain of": label(question.method),
            "mixtures": str(found.mixtures),
            "Spearman": shown(RHO, found.rho, sign=True),
            "95 %, over tasks": interval(RHO, found.low, found.high, sign=True),
            "95 %, over mixtures": interval(RHO, *found.naive, sign=True),
            "leaving a task out": interval(RHO, *found.without, sign=True),
            "p, adjusted": shown(RHO, p),
            "": "found" if found.found else "not found",
        }
        rows.append(Row(contents))
    parts.append(Table("when", "What goes with the gain over mixtures", rows))
    parts.append(_answer(evidence))
    parts.append(_gain_table(evidence))
    return parts


def _answer(evidence: Evidence) -> str:
    question = asked_beforehand(evidence)
    if question is None:
        return (
            "The question asked beforehand was not measured: it needs GAR's gain and Baseline's gradients.\n"
        )
    first = question.answer
    rho, low, high = (RHO.bound(value, True) for value in (first.rho, first.low, first.high))
    known = f"Spearman {rho}, 95 % interval {low} to {high}"
    if not first.found:
        said = f"The question asked beforehand has no answer here: a correlation is not shown ({known})."
    elif first.rho < 0:
        said = f"GAR gains more where tasks conflict more ({known})."
    else:
        said = f"GAR gains more where tasks agree more ({known}), against the expectation."
    carried = predictor(evidence)
    if carried is None:
        return (
            f"{said} Nothing measured under Baseline was found to predict GAR's gain over these mixtures.\n"
        )
    return (
        f"{said} Carried as a predictor: {METRICS[carried.predictor].label} {carried.when}, "
        f"Spearman {RHO.text(carried.answer.rho, True)}.\n"
    )


def _gain_table(evidence: Evidence) -> Table:
    rows = []
    for method in OTHERS:
        cells = list(evidence.cells([PAIRS]))
        found = [evidence.difference("accuracy", cell, method, REFERENCE) for cell in cells]
        told = [each for each in found if not math.isnan(each.low)]
        by_seed = [evidence.values("accuracy", *cell, method) for cell in cells]
        bases = [evidence.values("accuracy", *cell, REFERENCE) for cell in cells]
        seeds = (
            set.intersection(*(set(a) & set(b) for a, b in zip(by_seed, bases, strict=True)))
            if cells
            else set()
        )
        whole = Paired.of(
            {s: fmean(values[s] for values in by_seed) for s in seeds},
            {s: fmean(values[s] for values in bases) for s in seeds},
        )
        contents = {
            "gain of": label(method),
            "mixtures": str(len(told)),
            "better": str(sum(each.side > 0 for each in told)),
            "worse": str(sum(each.side < 0 for each in told)),
            "mean over mixtures, pp": shown(POINTS, whole.mean, sign=True),
            "95 % interval over seeds": interval(POINTS, whole.low, whole.high, sign=True),
            "seeds with all mixtures": str(len(whole.seeds)),
        }
        rows.append(Row(contents))
    return Table("gains", "Gains over Baseline in pairs and triples", rows)


def _not_run(evidence: Evidence) -> list[Part]:
    """What the suites plan and no line holds, by suite and setting."""
    rows = []
    for name, suite in evidence.suites.items():
        counts: dict[str, list[int]] = {}
        absent: dict[str, dict[str, int]] = {}
        for run in suite.runs():
            planned = counts.setdefault(run.combination.setting, [0, 0])
            planned[0] += 1
            planned[1] += run.id in evidence.stored
            if run.id not in evidence.stored:
                there = absent.setdefault(run.combination.setting, {})
                there[run.combination.method] = there.get(run.combination.method, 0) + 1
        for setting, (planned_runs, stored) in counts.items():
            if missing := absent.get(setting):
                listed = ", ".join(f"{label(method)} {count}" for method, count in missing.items())
                contents = {
                    "suite": name,
                    "setting": setting,
                    "planned": str(planned_runs),
                    "stored": str(stored),
                    "not run": listed if stored else "all",
                }
                rows.append(Row(contents))
    return (
        [Table("absent", "Planned runs without a result", rows)]
        if rows
        else ["All planned runs are stored.\n"]
    )
