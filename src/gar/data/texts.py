"""Texts with a group each, from files of one's own or from a mixture: what ``gar inspect`` reads.

Files are read once, line by line; of every group as many texts are kept as asked for, drawn evenly.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gar.data._files import file_format, open_lines, open_table
from gar.data._rows import Row, Segment, Table, check_columns, label_name, no_column, row_texts
from gar.data.task import Mixture, text_problem
from gar.data.tokenize import SEPARATOR
from gar.errors import UserError, path_errors, path_kind, shown, user_path

#: Columns that hold a text's group where nothing is said.
GROUP_COLUMNS = ("group", "task", "source", "domain")
#: More values than this in a column are no groups.
MOST_GROUPS = 100
#: Texts of a group that are kept.
MAX_TEXTS = 256

Chat: TypeAlias = "list[dict[str, Any]]"
Text: TypeAlias = "str | Chat"
"""A text, or the messages of a chat: objects with ``role`` and ``content``."""


@dataclass(frozen=True)
class GroupedTexts:
    """N texts of T groups.

    ``names`` are the groups' names, ``groups`` int64 [N] indices into them. ``labels``, where classes were
    asked for, holds the class of each text by its name, with its index in its task where there is one.
    """

    names: tuple[str, ...]
    groups: NDArray[np.int64]
    texts: list[Text]
    labels: list[tuple[str, int | None]] | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __len__(self) -> int:
        return len(self.texts)

    @classmethod
    def of(cls, texts: Mapping[str, Sequence[Text]]) -> GroupedTexts:
        """From texts in memory, by the name of their group.

        >>> GroupedTexts.of({"a": ["one", "two"], "b": ["three"]}).groups.tolist()
        [0, 0, 1]
        """
        groups = [t for t, found in enumerate(texts.values()) for _ in found]
        return cls(tuple(texts), np.array(groups, np.int64), [x for found in texts.values() for x in found])


def read_grouped(
    files: Sequence[str | Path],
    *,
    text: str | None = None,
    group_by: str | None = None,
    label: str | None = None,
    max_texts: int = MAX_TEXTS,
    seed: int = 0,
) -> GroupedTexts:
    """Texts of files (CSV, TSV, JSONL, Parquet, or .txt with a text a line), or of the files in a directory.

    ``text`` is their column (``text``, or ``messages`` where there is no ``text``). A text's group is in the
    column ``group_by``; of several files it is the file's name; of one file it is in the column named group,
    task, source or domain if there is exactly one of these. ``label`` is the column of classes, if they are
    wanted. Of a group with more than ``max_texts`` texts as many are drawn without replacement.
    """
    if max_texts < 1:
        raise UserError(f"max_texts is {max_texts}; expected 1 or more")
    paths = list(_files(files))
    by_file = group_by is None and len(paths) > 1
    kept: dict[str, _Sample] = {}
    blank, notes = 0, list[str]()
    for path, name in zip(paths, _stems(paths), strict=True):
        table = _open(path)
        rows = iter(table.rows)
        if (first := next(rows, None)) is None:
            raise UserError(f"{table.source}: no rows; expected texts")
        known = tuple(first[1]) if table.columns is None else table.columns
        column = _text_column(known) if text is None else text
        grouped_by = None if by_file else group_by or _group_column(known, table.source, notes)
        wanted = [name for name in (column, grouped_by, label) if name is not None]
        check_columns(table, wanted)
        for number, row in _chain(first, rows):
            found = _text(table, number, row, column)
            if found is None:
                blank += 1
                continue
            group = name if grouped_by is None else _cell(table, number, row, grouped_by)
            if group not in kept:
                if len(kept) == MOST_GROUPS:
                    raise UserError(
                        f"{table.source}: column {grouped_by!r} has more than {MOST_GROUPS} different "
                        "values; expected a column with the names of a few groups (--group-by)"
                    )
                kept[group] = _Sample(max_texts, [seed, zlib.crc32(group.encode())])
            kept[group].add((found, None if label is None else _cell(table, number, row, label)))
    if not kept:
        raise UserError(f"{', '.join(map(str, paths))}: every text is empty; expected texts")
    if blank:
        notes.append(f"{_count(blank, 'empty text')} left out")
    return _joined(kept, label is not None, notes)


def grouped_mixture(
    mixture: Mixture, *, labels: bool = False, max_texts: int = MAX_TEXTS, seed: int = 0
) -> GroupedTexts:
    """The validation texts of a mixture, its tasks as groups; a pair's texts are joined by a newline."""
    kept: dict[str, _Sample] = {}
    for task in mixture.tasks:
        sample = kept[task.name] = _Sample(max_texts, [seed, zlib.crc32(task.name.encode())])
        split = task.validation
        for i, text in enumerate(split.texts):
            joined = text if split.pairs is None else text + SEPARATOR + split.pairs[i]
            index = int(split.labels[i])
            sample.add((joined, task.labels[index], index))
    return _joined(kept, labels, list(mixture.notes))


class _Sample:
    """The first ``size`` of what is added, then an even draw from all of it (algorithm R)."""

    def __init__(self, size: int, seed: Sequence[int]) -> None:
        self._size, self._draw, self.seen = size, np.random.default_rng(seed), 0
        self._kept: list[tuple[int, tuple[Any, ...]]] = []

    def add(self, item: tuple[Any, ...]) -> None:
        self.seen += 1
        if len(self._kept) < self._size:
            self._kept.append((self.seen, item))
        elif (place := int(self._draw.integers(self.seen))) < self._size:
            self._kept[place] = (self.seen, item)

    @property
    def items(self) -> list[tuple[Any, ...]]:
        """In the order of the file."""
        return [item for _, item in sorted(self._kept, key=lambda entry: entry[0])]


def _joined(kept: Mapping[str, _Sample], labels: bool, notes: list[str]) -> GroupedTexts:
    items = [(t, *item) for t, sample in enumerate(kept.values()) for item in sample.items]
    drawn = [f"{len(s.items)} of {s.seen} ({name})" for name, s in kept.items() if s.seen > len(s.items)]
    if drawn:
        notes = [*notes, f"texts drawn by the seed: {', '.join(drawn)}"]
    return GroupedTexts(
        tuple(kept),
        np.array([item[0] for item in items], np.int64),
        [item[1] for item in items],
        [(item[2], item[3] if len(item) > 3 else None) for item in items] if labels else None,
        tuple(notes),
    )


def _files(paths: Sequence[str | Path]) -> Iterator[Path]:
    for given in paths:
        path = user_path(given)
        if path_kind(path) != "directory":
            yield path
            continue
        with path_errors(path):
            inside = sorted(child for child in path.iterdir() if child.is_file())
        found = [child for child in inside if _is_data(child)]
        if not found:
            raise UserError(f"{path}: no .jsonl, .csv, .tsv, .parquet or .txt file in it; expected texts")
        yield from found


def _is_data(path: Path) -> bool:
    if path.suffix.lower() == ".txt":
        return True
    try:
        file_format(path)
    except UserError:
        return False
    return True


def _stems(paths: Sequence[Path]) -> list[str]:
    stems = [path.name.removesuffix(".gz").rpartition(".")[0] or path.name for path in paths]
    if len(set(stems)) < len(stems):
        twice = next(stem for stem in stems if stems.count(stem) > 1)
        raise UserError(f"two files are named {twice!r}, and files are groups; expected distinct names")
    return stems


def _open(path: Path) -> Table:
    return open_lines(path) if path.suffix.lower() == ".txt" else open_table(path)


def _text_column(known: Sequence[str]) -> str:
    return "messages" if "messages" in known and "text" not in known else "text"


def _group_column(known: Sequence[str], source: str, notes: list[str]) -> str | None:
    found = [name for name in GROUP_COLUMNS if name in known]
    if len(found) > 1:
        raise UserError(
            f"{source}: columns {' and '.join(map(repr, found))} may both be groups; "
            "expected one of them to be named (--group-by)"
        )
    return found[0] if found else None


def _chain(first: Row, rest: Iterator[Row]) -> Iterator[Row]:
    yield first
    yield from rest


def _text(table: Table, number: int, row: Mapping[str, Any], column: str) -> Text | None:
    """A row's text, or None where it is blank."""
    value = row.get(column)
    if isinstance(value, list):
        return _chat(table, number, value, column)
    single: tuple[Segment, ...] = ((column,),)
    (found,) = row_texts(single, table, number, row)
    return found if found.strip() else None


def _chat(table: Table, number: int, value: list[Any], column: str) -> Chat | None:
    for message in value:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise UserError(
                f"{table.at(number)}: column {column!r} holds {shown(message)}; expected a list of messages "
                "with role and content"
            )
        content = message["content"]
        if isinstance(content, str) and (problem := text_problem(content)) is not None:
            raise UserError(f"{table.at(number)}: column {column!r} holds {problem}")
    return value or None


def _cell(table: Table, number: int, row: Mapping[str, Any], column: str) -> str:
    """A group's or a class's name."""
    if column not in row:
        raise no_column(table.at(number), "key", column, row)
    if not (found := label_name(table, number, column, row[column])):
        raise UserError(f"{table.at(number)}: column {column!r} is empty; expected a name")
    return found


def _count(n: int, what: str) -> str:
    return f"1 {what}" if n == 1 else f"{n} {what}s"
