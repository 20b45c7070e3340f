"""A mixture's examples as files that ``data_dir`` takes, for a machine without hub or BIG-bench."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gar.data.registry import registry
from gar.data.task import Mixture, Split, Task
from gar.errors import UserError, path_errors
from gar.runs.files import write_bytes


def export(mixture: Mixture, out: Path) -> dict[Path, int]:
    """Write ``OUT/<task>/{train,validation}.jsonl.gz`` of registered or planted tasks; the files, their rows.

    The rows are those that were loaded, in their order, under the task's own column names.
    Read again, they are the same examples. Equal content gives equal bytes on one version of zlib.
    """
    written = {}
    for task in mixture.tasks:
        columns = _columns(task)
        for name, split in (("train", task.train), ("validation", task.validation)):
            path = out / task.name / f"{name}.jsonl.gz"
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in _rows(task, split, columns)]
            with path_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(path, gzip.compress("".join(lines).encode(), mtime=0))
            written[path] = len(lines)
    return written


class _Columns(NamedTuple):
    """What the columns are called, and whether labels are written as indices."""

    text: tuple[str, ...]
    label: str
    indices: bool


def _columns(task: Task) -> _Columns:
    if task.cluster is not None:  # a planted task, read again as one of one's own
        return _Columns(task.text, "label", indices=False)
    known = registry().tasks.get(task.name)
    if known is None or not all(isinstance(column, str) for column in known.text):
        raise UserError(
            f"task {task.name!r}: cannot be exported; expected a registered one whose texts are columns, or "
            "a planted one"
        )
    # The hub's label columns are indices.
    return _Columns(tuple(map(str, known.text)), known.label, indices=known.hub is not None)


def _rows(task: Task, split: Split, columns: _Columns) -> Iterator[dict[str, object]]:
    fields = (split.texts,) if split.pairs is None else (split.texts, split.pairs)
    for texts, number in zip(zip(*fields, strict=True), split.labels.tolist(), strict=True):
        label = number if columns.indices else task.labels[number]
        yield {**dict(zip(columns.text, texts, strict=True)), columns.label: label}
