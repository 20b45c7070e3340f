"""From rows of any source to a :class:`~gar.data.task.Task`: the one place that checks texts and labels."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gar.data.task import Split, Task, check_labels, text_problem
from gar.errors import UserError, nearest, short, shown, unwritable

Row = tuple[int, Mapping[str, Any]]
Segment = tuple[str, ...]  # columns whose texts are joined by ": "

#: What public test splits hold in place of a class index, and what torch ignores.
UNLABELLED = ("-1", "-100")
#: Up to so many classes, each in its own row, are believed without a declaration.
MANY_CLASSES = 20
HEAD = 1000  # rows in which a better label column is looked for


@dataclass(frozen=True)
class Table:
    """Numbered rows of one source. ``columns`` is None where every row brings its own keys (JSONL).

    ``head`` collects the first rows as they are read.
    """

    source: str
    rows: Iterable[Row]
    columns: tuple[str, ...] | None = None
    unit: str = "line"
    head: list[Mapping[str, Any]] = field(default_factory=list, compare=False, repr=False)

    def at(self, number: int) -> str:
        """Where a row stands, for a message."""
        return f"{self.source}, {self.unit} {number}"


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
        return (*itertools.chain(*self.text), self.label)


class _Example(NamedTuple):
    table: Table
    number: int
    segments: tuple[str, ...]
    label: str

    @property
    def where(self) -> str:
        return self.table.at(self.number)


def build_task(recipe: Recipe, train: Sequence[Table], validation: Sequence[Table]) -> Task:
    """Read both splits and check them; several tables of one split are joined in order."""
    notes: list[str] = []
    train_examples = _examples(recipe, train, "train", notes)
    names = recipe.labels or _found_classes(recipe, train_examples)
    train_split = _split(recipe, names, train_examples)
    seen = {names[i] for i in np.unique(train_split.labels)}
    if len(seen) == 1:
        raise UserError(
            f"{_sources(train)}: every training label of task {recipe.name!r} is {seen.pop()!r}; "
            "expected two or more classes"
        )
    check_labels(f"task {recipe.name!r}", names)
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
        check_columns(table, recipe.columns)
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
        # An option may not change silently on how many rows a model is measured.
        rest = f"; it is measured on the other {len(examples)}" if split == "validation" else ""
        notes.append(f"{recipe.name} {split}: dropped {' and '.join(dropped)} of {total} rows{rest}")
    return examples


def check_columns(table: Table, columns: Iterable[str]) -> None:
    if table.columns is not None:
        for column in columns:
            if column not in table.columns:
                raise no_column(table.source, "column", column, table.columns)


def _read(recipe: Recipe, table: Table) -> Iterator[_Example]:
    for number, row in table.rows:
        if len(table.head) < HEAD:
            table.head.append(row)
        segments = row_texts(recipe.text, table, number, row)
        if recipe.label not in row:
            raise no_column(table.at(number), "key", recipe.label, row)
        yield _Example(table, number, segments, label_name(table, number, recipe.label, row[recipe.label]))


def row_texts(
    text: tuple[Segment, ...], table: Table, number: int, row: Mapping[str, Any]
) -> tuple[str, ...]:
    """The one or two texts of a row; a missing key or a value that is no string is refused, null is empty."""
    texts: dict[str, str] = {}
    for column in itertools.chain(*text):
        if column not in row:
            raise no_column(table.at(number), "key", column, row)
        value = row[column]
        if not isinstance(value, str) and not _is_null(value):
            raise UserError(f"{table.at(number)}: column {column!r} holds {shown(value)}, expected a string")
        texts[column] = value if isinstance(value, str) else ""
        if (problem := text_problem(texts[column])) is not None:
            raise UserError(f"{table.at(number)}: column {column!r} holds {problem}")
    return tuple(_join(texts[column] for column in segment) for segment in text)


def read_texts(text: Sequence[str], table: Table) -> tuple[list[str], list[str] | None]:
    """Unlabelled rows, for prediction: the texts under a task's field names, and their pairs."""
    segments: tuple[Segment, ...] = tuple(tuple(name.split(": ")) for name in text)
    check_columns(table, itertools.chain(*segments))
    rows: list[tuple[str, ...]] = []
    for number, row in table.rows:
        rows.append(row_texts(segments, table, number, row))
        if not all(part.strip() for part in rows[-1]):
            raise UserError(f"{table.at(number)}: empty text; expected something to classify")
    if not rows:
        raise UserError(f"{table.source}: no rows; expected texts to classify")
    return [row[0] for row in rows], [row[1] for row in rows] if len(segments) == 2 else None


def _join(parts: Iterable[str]) -> str:
    # One empty part empties the segment, so that the emptiness check sees it.
    parts = list(parts)
    return ": ".join(parts) if all(part.strip() for part in parts) else ""


def label_name(table: Table, number: int, column: str, value: Any) -> str:
    """A label as a string: ``3``, ``3.0`` and ``"3"`` are one label; null is ``""``."""
    if _is_null(value):
        return ""
    if isinstance(value, str):
        if (found := unwritable(label := value.strip())) is not None:
            raise UserError(
                f"{table.at(number)}: label column {column!r} holds {shown(label)} with "
                f"{found}; expected a label of printable characters on one line"
            )
        return label
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    raise UserError(
        f"{table.at(number)}: label column {column!r} holds {shown(value)}, expected a string or an integer"
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
            label = example.label if found is None else names[found]
            raise UserError(
                f"{example.where}: label {short(label)} never occurs in training; expected one of "
                f"{_listed(sorted(seen))}{_unlabelled(label) or nearest(label, seen)}"
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


def _found_classes(recipe: Recipe, examples: Sequence[_Example]) -> tuple[str, ...]:
    """The distinct labels, sorted, where they look like classes; what does not must be declared."""
    counts = Counter(example.label for example in examples)
    names = sorted(counts, key=lambda n: (int(n), n)) if all(map(_is_integer, counts)) else sorted(counts)
    negative = [name for name in names if name.startswith("-") and _is_integer(name)]
    # -1 and 1 alone are the two classes of an older convention.
    if len(negative) == 1 and negative[0] in UNLABELLED and set(names) != {"-1", "1"}:
        first = next(example for example in examples if example.label == negative[0])
        raise UserError(
            f"{first.where}: label {negative[0]} marks rows without a label in public test splits "
            f"({counts[negative[0]]} of {len(examples)} rows); drop these rows, or declare it as a class "
            f"with labels: {names[:3] + ['…'] * (len(names) > 3)}"
        )
    alone = sum(count == 1 for count in counts.values())
    if len(names) > MANY_CLASSES and 2 * alone > len(examples):
        raise UserError(
            f"{examples[0].table.source}: label column {recipe.label!r} has {len(names)} different values in "
            f"{len(examples)} rows, {alone} of them once; expected classes that repeat, or all of them "
            f"declared with labels: […]{_better_label(recipe, examples[0].table)}"
        )
    return tuple(names)


def _better_label(recipe: Recipe, table: Table) -> str:
    """The column, if any, whose first values repeat most, as a sentence part."""
    found: dict[str, int] = {}
    for column in table.head[0].keys() - {recipe.label}:
        values = [row.get(column) for row in table.head]
        if all(isinstance(value, str | int) and value != "" for value in values):
            distinct = len(set(values))
            if 2 <= distinct <= min(MANY_CLASSES, len(values) // 2):
                found[column] = distinct
    if not found:
        return ""
    column = min(found, key=lambda name: (found[name], name))
    return f"; did you mean label: {column} ({found[column]} different values)?"


def _is_integer(name: str) -> bool:
    digits = name.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) < 20


def _unknown_label(example: _Example, names: tuple[str, ...]) -> UserError:
    indices = "" if any(map(_is_integer, names)) else f" (or an index from 0 to {len(names) - 1})"
    return UserError(
        f"{example.where}: label {short(example.label)} is not a declared one; expected one of "
        f"{_listed(names)}{indices}"
        f"{_unlabelled(example.label) or nearest(example.label, names)}"
    )


def _unlabelled(label: str) -> str:
    return f"; {label} marks rows without a label: drop them" if label in UNLABELLED else ""


def no_column(where: str, kind: str, name: str, found: Iterable[str]) -> UserError:
    found = list(found)
    hint = nearest(name, found)
    if kind == "column" and len(found) == 1:
        separator = next((s for s in (";", "\t", ",", "|") if s in found[0]), None)
        if separator is not None:
            hint = f"; separated by {separator!r}, it seems; expected commas in .csv, tabs in .tsv"
    return UserError(f"{where}: no {kind} {name!r}; found {_listed(found)}{hint}")


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(map(short, names[:12]))
    return f"{listed}, … ({len(names)} in all)" if len(names) > 12 else listed


def _sources(tables: Sequence[Table]) -> str:
    return ", ".join(table.source for table in tables)
