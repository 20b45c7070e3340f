"""Tables as Markdown and LaTeX, with everything that comes from data escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

from gar.report._table import Cell, Table

_MARKDOWN = re.compile(r"([\\`*_\[\]|~#$])")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "–": "--",
    "−": r"\ensuremath{-}",
    "±": r"\ensuremath{\pm}",
    "×": r"\ensuremath{\times}",
    "↑": r"\ensuremath{\uparrow}",
    "↓": r"\ensuremath{\downarrow}",
    "●": r"\ensuremath{\bullet}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def escape_markdown(text: str) -> str:
    r"""Plain text inside Markdown, on one line.

    >>> escape_markdown("a|b <i>_x_")
    'a\\|b &lt;i&gt;\\_x\\_'
    """
    flat = " ".join(text.split())
    return _MARKDOWN.sub(r"\\\1", flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def escape_latex(text: str) -> str:
    r"""Plain text inside LaTeX, on one line.

    >>> escape_latex("50 % of lora_ffn & {x}")
    '50 \\% of lora\\_ffn \\& \\{x\\}'
    """
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))


def markdown(table: Table) -> str:
    """A pipe table with its caption above and its notes below."""
    lines = [f"**{escape_markdown(table.caption)}**", ""]
    lines.append(_pipes(map(escape_markdown, table.columns)))
    lines.append(_pipes("--:" if number else "---" for number in table.columns.values()))
    for row in table.rows:
        cells = [escape_markdown(cell.text) for cell in row.cells]
        if row.strong:
            cells = [f"**{cell}**" if i in table.strong and cell else cell for i, cell in enumerate(cells)]
        lines.append(_pipes(cells))
    lines += ["", *(f"- {escape_markdown(note)}" for note in table.notes)]
    return "\n".join(lines).rstrip() + "\n"


def latex(table: Table, label: str) -> str:
    """A booktabs table; needs ``\\usepackage{booktabs}``. Blocks of rows are separated by thin rules."""
    layout = "".join("r" if number else "l" for number in table.columns.values())
    lines = [
        r"\begin{table}",
        r"\centering\small",
        rf"\caption{{{escape_latex(table.caption)}}}",
        rf"\label{{{label}}}",
        rf"\begin{{tabular}}{{{layout}}}",
        r"\toprule",
        " & ".join(map(escape_latex, table.columns)) + r" \\",
    ]
    for _, block in groupby(table.rows, key=lambda row: row.group):
        lines.append(r"\midrule")
        for row in block:
            lines.append(
                " & ".join(
                    _latex_cell(cell, row.strong and i in table.strong) for i, cell in enumerate(row.cells)
                )
            )
            lines[-1] += r" \\"
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip\footnotesize {escape_latex(' '.join(table.notes))}"] if table.notes else []
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def _latex_cell(cell: Cell, bold: bool) -> str:
    text = escape_latex(cell.text)
    text = f"{{{text}}}" if text.startswith("[") else text  # a bracket after \\ would be its argument
    return rf"\textbf{{{text}}}" if bold and text else text


def _pipes(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
