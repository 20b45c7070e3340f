"""From rows of any source to a :class:`~gar.data.task.Task`: the one place that checks texts and labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gar.data.task import Split, Task
from gar.errors import UserError, nearest

Row = tuple[int, Mapping[str, Any]]
Segment = tuple[str, ...]  # columns whose texts are joined by ": "


@dataclass(frozen=True)
class Table:
    """Numbered rows of one source. ``columns`` is None where every row brings its own keys (JSONL)."""

    source: str
    rows: Iterable[Row]
    columns: tuple[str, ...] | None = None
    unit: str = "line"


@dataclass(frozen=True)
class Recipe:
    """How rows become examples of one task.

    ``labels`` are the class names in index order, or None to take the distinct training labels.
    ``hub_codes`` says that the label column holds the hub's class indices, with -1 for rows without a label.
    """

    name: str
    text: tuple[Segment, ...]
    label: str
    labels: tuple[str, ...] | None = None
    drop_empty: bool = False
    hub_codes: bool = False
    extra: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read."""
        return (*(column for segment in self.text for column in segment), self.label)


class _Example(NamedTuple):
    table: Table
    number: int
    segments: tuple[str, ...]
    label: str

    @property
    def where(self) -> str:
        return f"{self.table.source}, {self.table.unit} {self.number}"


def build_task(recipe: Recipe, train: Sequence[Table], validation: Sequence[Table]) -> Task:
    """Read both splits and check them; several tables of one split are joined in order."""
    notes: list[str] = []
    train_examples = _examples(recipe, train, "train", notes)
    names = recipe.labels or _distinct(example.label for example in train_examples)
    train_split = _split(recipe, names, train_examples)
    seen = {names[i] for i in np.unique(train_split.labels)}
    if len(seen) == 1:
        raise UserError(
            f"{_sources(train)}: every training label of task {recipe.name!r} is {seen.pop()!r}; "
            "expected two or more classes"
        )
    validation_examples = _examples(recipe, validation, "validation", notes)
    validation_split = _split(recipe, names, validation_examples, seen)
    return Task(
        name=recipe.name,
        labels=names,
        train=train_split,
        validation=validation_split,
        text=tuple(": ".join(segment) for segment in recipe.text),
        extra=recipe.extra,
        notes=tuple(notes),
    )


def _examples(recipe: Recipe, tables: Sequence[Table], split: str, notes: list[str]) -> list[_Example]:
    examples: list[_Example] = []
    empty = unlabelled = 0
    for table in tables:
        _check_columns(recipe, table)
        for example in _read(recipe, table):
            if missing := _empty_column(recipe, example):
                if not recipe.drop_empty:
                    raise UserError(
                        f"{example.where}: column {missing!r} is empty; drop_empty: true drops such rows"
                    )
                empty += 1
            elif recipe.hub_codes and example.label == "-1":
                if split == "validation":
                    raise UserError(
                        f"{example.where}: label is -1, unlabelled; expected labelled validation rows"
                    )
                unlabelled += 1
            else:
                examples.append(example)
    dropped = [f"{n} {what}" for n, what in ((empty, "empty"), (unlabelled, "unlabelled")) if n]
    if not examples:
        reason = f"no rows left after dropping {' and '.join(dropped)}" if dropped else "no rows"
        raise UserError(f"{_sources(tables)}: {reason}; expected {split} examples of task {recipe.name!r}")
    if dropped:
        total = len(examples) + empty + unlabelled
        notes.append(f"{recipe.name} {split}: dropped {' and '.join(dropped)} of {total} rows")
    return examples


def _check_columns(recipe: Recipe, table: Table) -> None:
    if table.columns is not None:
        for column in recipe.columns:
            if column not in table.columns:
                raise _no_column(table.source, "column", column, table.columns)


def _read(recipe: Recipe, table: Table) -> Iterator[_Example]:
    for number, row in table.rows:
        segments = _segments(recipe.text, table, number, row)
        if recipe.label not in row:
            raise _no_column(f"{table.source}, line {number}", "key", recipe.label, row)
        yield _Example(table, number, segments, _label_name(table, number, recipe.label, row[recipe.label]))


def _segments(
    text: tuple[Segment, ...], table: Table, number: int, row: Mapping[str, Any]
) -> tuple[str, ...]:
    """The one or two texts of a row; a missing key or a value that is no string is refused, null is empty."""
    texts: dict[str, str] = {}
    for column in (column for segment in text for column in segment):
        if column not in row:
            raise _no_column(f"{table.source}, line {number}", "key", column, row)
        value = row[column]
        if not isinstance(value, str) and not _is_null(value):
            where = f"{table.source}, {table.unit} {number}"
            raise UserError(f"{where}: column {column!r} holds {_shown(value)}, expected a string")
        texts[column] = value if isinstance(value, str) else ""
    return tuple(_join(texts[column] for column in segment) for segment in text)


def read_texts(text: Sequence[str], table: Table) -> tuple[list[str], list[str] | None]:
    """Unlabelled rows, for prediction: the texts under a task's field names, and their pairs."""
    segments: tuple[Segment, ...] = tuple(tuple(field.split(": ")) for field in text)
    if table.columns is not None:
        for column in (column for segment in segments for column in segment):
            if column not in table.columns:
                raise _no_column(table.source, "column", column, table.columns)
    rows: list[tuple[str, ...]] = []
    for number, row in table.rows:
        rows.append(_segments(segments, table, number, row))
        if not all(part.strip() for part in rows[-1]):
            raise UserError(
                f"{table.source}, {table.unit} {number}: empty text; expected something to classify"
            )
    if not rows:
        raise UserError(f"{table.source}: no rows; expected texts to classify")
    return [row[0] for row in rows], [row[1] for row in rows] if len(segments) == 2 else None


def _join(parts: Iterable[str]) -> str:
    # One empty part empties the segment, so that the emptiness check sees it.
    parts = list(parts)
    return ": ".join(parts) if all(part.strip() for part in parts) else ""


def _label_name(table: Table, number: int, column: str, value: Any) -> str:
    """A label as a string: ``3``, ``3.0`` and ``"3"`` are one label; null is ``""``."""
    if _is_null(value):
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    raise UserError(
        f"{table.source}, {table.unit} {number}: label column {column!r} holds {_shown(value)}, "
        "expected a string or an integer"
    )


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _empty_column(recipe: Recipe, example: _Example) -> str | None:
    for segment, text in zip(recipe.text, example.segments, strict=True):
        if not text.strip():
            return ": ".join(segment)
    return None if example.label else recipe.label


def _split(
    recipe: Recipe, names: tuple[str, ...], examples: Sequence[_Example], seen: set[str] | None = None
) -> Split:
    index = _label_index(names, recipe.hub_codes)
    labels = np.empty(len(examples), dtype=np.int64)
    for i, example in enumerate(examples):
        found = index.get(example.label)
        if found is None and (seen is None or recipe.labels is not None):
            raise _unknown_label(example, names)
        if found is None or (seen is not None and names[found] not in seen):
            assert seen is not None
            shown = example.label if found is None else names[found]
            raise UserError(
                f"{example.where}: label {shown!r} never occurs in training; expected one of "
                f"{_listed(sorted(seen))}{nearest(shown, seen)}"
            )
        labels[i] = found
    pairs = [example.segments[1] for example in examples] if len(recipe.text) == 2 else None
    return Split([example.segments[0] for example in examples], labels, pairs)


def _label_index(names: tuple[str, ...], hub_codes: bool) -> dict[str, int]:
    """Label string to class index. Integers index the names, unless names of the user's own are integers."""
    index = {name: i for i, name in enumerate(names)}
    if hub_codes or not any(map(_is_integer, names)):
        index |= {str(i): i for i in range(len(names))}
    return index


def _distinct(labels: Iterable[str]) -> tuple[str, ...]:
    distinct = set(labels)
    return tuple(sorted(distinct, key=int) if all(map(_is_integer, distinct)) else sorted(distinct))


def _is_integer(name: str) -> bool:
    digits = name.removeprefix("-")
    return digits.isascii() and digits.isdigit()


def _unknown_label(example: _Example, names: tuple[str, ...]) -> UserError:
    indices = "" if any(map(_is_integer, names)) else f" (or an index from 0 to {len(names) - 1})"
    return UserError(
        f"{example.where}: label {example.label!r} is not a declared one; expected one of "
        f"{_listed(names)}{indices}{nearest(example.label, names)}"
    )


def _no_column(where: str, kind: str, name: str, found: Iterable[str]) -> UserError:
    found = list(found)
    return UserError(f"{where}: no {kind} {name!r}; found {_listed(found)}{nearest(name, found)}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:12])
    return f"{shown}, … ({len(names)} in all)" if len(names) > 12 else shown


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:39] + '…'} ({type(value).__name__})"


def _sources(tables: Sequence[Table]) -> str:
    return ", ".join(table.source for table in tables)
