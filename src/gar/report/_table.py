"""A table that Markdown, LaTeX and HTML can show; cells are finished text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gar.metrics import Metric

Record: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """Text as shown, and the unrounded value behind it where there is one; without it a number sorts last."""

    text: str
    value: float | None = None

    @classmethod
    def of(cls, content: Cell | str | int | float) -> Cell:
        if isinstance(content, Cell):
            return content
        return cls(content) if isinstance(content, str) else cls(str(content), float(content))


@dataclass(frozen=True)
class Column:
    """What a table shows of each record: the value under a key, or a function of the record.

    ``title`` explains the label; ``number`` columns are right-aligned and sorted by value.
    """

    label: str
    show: str | Callable[[Record], Cell | str | int | float]
    number: bool = False
    title: str = ""

    def cell(self, record: Record) -> Cell:
        return Cell.of(record[self.show] if isinstance(self.show, str) else self.show(record))


@dataclass(frozen=True)
class Row:
    """A reader hides rows by ``variants``; ``group`` separates blocks; ``strong`` rows stand out."""

    cells: tuple[Cell, ...]
    variants: tuple[str, ...]
    group: str
    strong: bool


@dataclass
class Table:
    """Records in columns. ``name`` is its id in the page; ``notes`` belong below it.

    A record may say under ``variants`` which methods it is about (one alone under ``variant``), under ``group``
    and ``strong`` how its row is set. ``folded`` tables are details that a reader opens, ``record`` ones are
    opened in print; ``absent`` names the files that do not have it.
    """

    name: str
    caption: str
    columns: Sequence[Column]
    records: Iterable[Record]
    notes: list[str] = field(default_factory=list)
    folded: bool = False
    record: bool = False
    absent: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.rows = [
            Row(
                tuple(column.cell(record) for column in self.columns),
                record.get("variants", (record["variant"],) if "variant" in record else ()),
                record.get("group", ""),
                record.get("strong", False),
            )
            for record in self.records
        ]


def measure(metric: Metric, key: str = "", sign: bool = False) -> Callable[[Record], Cell]:
    """Shows a record's value of the metric, or the one under another key in the same digits."""

    def show(record: Record) -> Cell:
        value = record[key or metric.name]
        return Cell(metric.text(value, sign), value if math.isfinite(value) else None)

    return show


def interval(
    metric: Metric, low: str = "low", high: str = "high", sign: bool = False
) -> Callable[[Record], Cell]:
    """Shows ``[low, high]`` from two keys of a record, or a dash where there is no interval."""

    def show(record: Record) -> Cell:
        if math.isnan(record[low]):
            return Cell("–")
        return Cell(f"[{metric.text(record[low], sign)}, {metric.text(record[high], sign)}]", record[low])

    return show
