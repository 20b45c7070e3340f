"""A table that Markdown, LaTeX and HTML can show; cells are finished text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Column:
    """``title`` explains the label; ``number`` columns are right-aligned and sorted by value."""

    label: str
    number: bool = False
    title: str = ""


@dataclass(frozen=True)
class Cell:
    """Text as shown, and the unrounded value behind it where there is one."""

    text: str
    value: float | None = None

    @classmethod
    def of(cls, content: Cell | str | int | float) -> Cell:
        if isinstance(content, Cell):
            return content
        return cls(content) if isinstance(content, str) else cls(str(content), float(content))


@dataclass(frozen=True)
class Row:
    """A reader hides rows by ``variants``; ``group`` separates blocks; ``strong`` rows stand out."""

    cells: tuple[Cell, ...]
    variants: tuple[str, ...] = ()
    group: str = ""
    strong: bool = False


@dataclass
class Table:
    """``name`` is its id in the page; ``notes`` belong below it."""

    name: str
    caption: str
    columns: Sequence[Column]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self,
        *cells: Cell | str | int | float,
        variants: tuple[str, ...] = (),
        group: str = "",
        strong: bool = False,
    ) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{self.name}: {len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(Row(tuple(map(Cell.of, cells)), variants, group, strong))


def number(value: float, text: str) -> Cell:
    """A numeric cell; one without a value sorts last."""
    return Cell(text, value if math.isfinite(value) else None)
