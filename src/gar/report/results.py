"""Any number of runs as one set of results; what it holds is in :mod:`gar.report._numbers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup, escape

from gar.errors import UserError
from gar.report._numbers import Numbers, Scope
from gar.report._opening import opening
from gar.report._table import Table
from gar.runs import find_runs, read_run

__all__ = ["Results", "Scope", "load"]

#: Settings that a notebook shows; the report has all.
SETTINGS = 3


def load(paths: str | Path | Sequence[str | Path]) -> Results:
    """Read run directories: the given ones, and all below the given ones."""
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found = find_runs(given)
    if not found:
        raise UserError(
            f"no run directories in {', '.join(map(str, given))}; expected some written by gar train --out"
        )
    return Results([read_run(path) for path in found])


class Results(Numbers):
    """Runs with their settings, mixtures and variants named; see :func:`load`.

    Notebooks show the sentences and the one table that a report opens with.
    """

    def __repr__(self) -> str:
        return f"Results({self.summary})"

    def _repr_html_(self) -> str:
        """Needs nothing around it, and takes its colours from the notebook, light or dark."""
        return "\n".join(["<div>", f"<p>{escape(self.summary)}</p>", *self._openings(), "</div>"])

    def _openings(self) -> Iterator[str]:
        endpoints, compared = self.endpoints(), self.comparisons()
        for setting in self.settings[:SETTINGS]:
            said, table = opening(self, setting, endpoints, compared)
            yield f"<h4>{escape(setting)}</h4>"
            yield from (f"<p>{escape(line)}</p>" for line in said)
            if table.rows:
                yield _html(table)
        if (more := len(self.settings) - SETTINGS) > 0:
            yield f"<p>{more} more: gar.report.write(results, 'report/') writes the page of all.</p>"


def _html(table: Table) -> str:
    """A table whose only colour is that of the text around it."""
    line = "border-bottom: 1px solid currentColor"

    def cell(kind: str, text: str, number: bool, strong: bool = False) -> str:
        style = f"text-align: {'right' if number else 'left'}; padding: .15em .6em"
        style += "; font-weight: bold" * strong + f"; {line}" * (kind == "th")
        return Markup("<{0} style='{1}'>{2}</{0}>").format(kind, style, text)

    head = "".join(cell("th", name, number) for name, number in table.columns.items())
    body = "\n".join(
        "<tr>"
        + "".join(
            cell("td", found.text, found.number, row.strong and at in table.strong)
            for at, found in enumerate(row.cells)
        )
        + "</tr>"
        for row in table.rows
    )
    notes = "".join(f"<p><small>{escape(note)}</small></p>" for note in table.notes)
    return (
        "<div style='overflow-x: auto'><table style='border-collapse: collapse'>\n"
        f"<caption style='text-align: left'>{escape(table.caption)}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>{notes}"
    )
