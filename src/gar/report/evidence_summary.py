"""The stored evidence in a paragraph, for pages that have no room for more."""

from __future__ import annotations

from gar.methods import PROPOSED, REFERENCE
from gar.report.evidence import APART, KINDS, Cell, Evidence, kind
from gar.report.evidence_columns import RHO
from gar.report.evidence_controls import alone_predicts
from gar.report.verdict import Paired, listing, number, signed

#: Differences of each kind that are named, the largest.
NAMED = 3


def summary(evidence: Evidence) -> str:
    """What the stored runs say of GAR and Baseline, in plain Markdown of one line."""
    kinds = _kinds(evidence)
    total = sum(map(len, kinds.values()))
    stored, planned = _models(evidence)
    missing = [model for model in planned if model not in stored]
    absent = f" Not run yet: {listing(missing)}." if missing else ""
    if not total:
        return f"No run of GAR beside Baseline is stored yet.{absent}"

    def told(what: str) -> str:
        found = sorted(kinds[what], key=lambda entry: -abs(entry[1].mean))
        named = [f"{', '.join(cell)}: {_differs(difference)}" for cell, difference in found[:NAMED]]
        named += [f"{number(len(found) - NAMED)} more"] * (len(found) > NAMED)
        return f"{number(len(found))} ({'; '.join(named)})" if named else "none"

    where = "setting and mixture" if total == 1 else "settings and mixtures"
    open_, unknown = len(kinds["not told apart"]), len(kinds["not compared"])
    said = (
        f"In {number(total)} {where}, on {listing(stored)}, GAR at its searched or default coefficient is "
        f"better than Baseline in {told('better')}, worse in {told('worse')}, and not told apart from it in "
        f"{number(open_) if open_ else 'none'}."
    )
    if unknown:
        said += f" Too few seeds to compare in {number(unknown)}."
    said += " Intervals are 95 %, over seeds, nominal; where it was searched, each has its own learning rate."
    return f"{said}{_by_itself(evidence)}{absent}"


def _by_itself(evidence: Evidence) -> str:
    found = alone_predicts(evidence)
    if found is None or not (found.found and found.rho > 0):
        return ""
    return (
        " At coefficient 1 and top-1 what a task gains or loses goes with what one expert does to it by "
        f"itself (Spearman {RHO.text(found.rho, sign=True)} over {number(found.tasks)} tasks): "
        "`gar compare --alone` asks that of yours."
    )


def _kinds(evidence: Evidence) -> dict[str, list[tuple[Cell, Paired]]]:
    """GAR against Baseline in every cell that has both, by what their interval says."""
    kinds: dict[str, list[tuple[Cell, Paired]]] = {name: [] for name in KINDS}
    for cell in evidence.cells(name for name in evidence.suites if name not in APART):
        if {PROPOSED, REFERENCE} <= set(evidence.methods(cell)):
            found = evidence.difference("accuracy", cell, PROPOSED, REFERENCE)
            kinds[kind(found)].append((cell, found))
    return kinds


def _differs(found: Paired) -> str:
    low, high = signed(100 * found.low), signed(100 * found.high)
    return f"{signed(100 * found.mean)} points, {low} to {high}, {number(len(found.seeds))} seeds"


def _models(evidence: Evidence) -> tuple[list[str], list[str]]:
    """Backbones with a stored run of the compared suites, and those with a planned one: ``frozen minilm``."""
    stored, planned = dict[str, None](), dict[str, None]()
    for name, suite in evidence.suites.items():
        if name in APART:
            continue
        for run in suite.runs():
            backbone = run.tree().get("backbone") or {}
            place = str(backbone.get("name", "minilm")).rstrip("/").rsplit("/", 1)[-1]
            model = f"{'trained' if backbone.get('trainable') else 'frozen'} {place}"
            planned[model] = None
            if run.id in evidence.stored:
                stored[model] = None
    return list(stored), list(planned)
