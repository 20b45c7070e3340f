"""A table that Markdown, LaTeX and HTML can show; cells are finished text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gar.metrics import Metric


@dataclass(frozen=True)
class Cell:
    """Text as shown, and the unrounded value that it is sorted by where there is one.

    Columns of ``number`` cells are set to the right; one without a value is sorted last.
    """

    text: str
    value: float | None = None
    number: bool = True


@dataclass(frozen=True)
class Row:
    """Cells, texts or numbers by heading.

    A reader hides rows by ``variants``; ``group`` separates blocks; ``strong`` rows stand out, by the columns
    that the table names.
    """

    contents: Mapping[str, Any]
    variants: tuple[str, ...] = ()
    group: str = ""
    strong: bool = False

    @property
    def cells(self) -> list[Cell]:
        return list(map(_cell, self.contents.values()))


@dataclass
class Table:
    """Rows of one form. ``name`` is its id in the page; ``titles`` explain headings; ``notes`` go below it.

    ``folded`` tables are details that a reader opens; ``absent`` names the kinds of files (html, md, tex)
    that leave it out. ``strong`` are the columns that are bold in strong rows.
    """

    name: str
    caption: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    titles: Mapping[str, str] = field(default_factory=dict)
    folded: bool = False
    absent: tuple[str, ...] = ()
    strong: tuple[int, ...] = (1, 3)

    @property
    def columns(self) -> dict[str, bool]:
        """The headings, and whether numbers stand below them."""
        return {name: _cell(content).number for name, content in self.rows[0].contents.items()}


def _cell(content: Any) -> Cell:
    if isinstance(content, Cell):
        return content
    return Cell(content, number=False) if isinstance(content, str) else Cell(str(content), float(content))


def shown(metric: Metric, value: float, sign: bool = False) -> Cell:
    """A value in the metric's digits, or a dash."""
    return Cell(metric.text(value, sign), value if math.isfinite(value) else None)


def interval(metric: Metric, low: float, high: float, sign: bool = False) -> Cell:
    """``[low, high]``, or a dash where there is none."""
    if math.isnan(low):
        return Cell("–", number=False)
    return Cell(f"[{metric.bound(low, sign)}, {metric.bound(high, sign)}]", low, number=False)
