"""Tables as Markdown; text in Markdown and LaTeX, with everything that comes from data escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gar.report._table import Table

_MARKDOWN = re.compile(r"([\\`*_\[\]|~#$])")
#: The last sign that pdfLaTeX has in its T1 fonts; others need LuaLaTeX or XeLaTeX.
LATIN = 0x17F
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
    "⁺": r"\ensuremath{^{+}}",
    "⁻": r"\ensuremath{^{-}}",
    "λ": r"\ensuremath{\lambda}",
    "…": r"\dots{}",
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
    signs = (_LATEX.get(sign, sign) for sign in " ".join(text.split()))
    return "".join(rf"\garsign{{{sign}}}" if len(sign) == 1 and ord(sign) > LATIN else sign for sign in signs)


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


def _pipes(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
