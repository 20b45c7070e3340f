"""A mixture's examples as files that ``data_dir`` takes, for a machine without hub or BIG-bench."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from gar.data.registry import RegisteredTask, registry
from gar.data.task import Mixture, Split, Task
from gar.errors import UserError, path_errors
from gar.runs.files import write_bytes

#: How the columns of a planted task are called: as those of a task of one's own.
_MADE = RegisteredTask(name="planted", labels=(), text=("text",), bigbench="none")


def export(mixture: Mixture, out: Path) -> dict[Path, int]:
    """Write ``OUT/<task>/{train,validation}.jsonl.gz`` of registered or planted tasks; the files, their rows.

    The rows are those that were loaded, in their order, under the task's own column names.
    Read again, they are the same examples. Equal content gives equal bytes on one version of zlib.
    """
    written = {}
    for task in mixture.tasks:
        known = _MADE if task.cluster is not None else registry().tasks.get(task.name)
        if known is None or not all(isinstance(column, str) for column in known.text):
            raise UserError(
                f"task {task.name!r}: cannot be exported; expected a registered one whose texts are columns"
            )
        for name, split in (("train", task.train), ("validation", task.validation)):
            path = out / task.name / f"{name}.jsonl.gz"
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in _rows(task, split, known)]
            with path_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(path, gzip.compress("".join(lines).encode(), mtime=0))
            written[path] = len(lines)
    return written


def _rows(task: Task, split: Split, known: RegisteredTask) -> Iterator[dict[str, object]]:
    columns = (split.texts,) if split.pairs is None else (split.texts, split.pairs)
    for texts, number in zip(zip(*columns, strict=True), split.labels.tolist(), strict=True):
        label = task.labels[number] if known.hub is None else number  # the hub's label columns are indices
        yield {**dict(zip(map(str, known.text), texts, strict=True)), known.label: label}
