"""Whether a mixture in memory fits a model: told before the first update, for both splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gar.data.task import Mixture
from gar.errors import UserError, one_of


class TaskFacts(Protocol):
    """What a model knows of a task: its label names in index order, and its one or two text fields."""

    @property
    def labels(self) -> Sequence[str]: ...

    @property
    def text(self) -> Sequence[str]: ...


def check_mixture(tasks: Mapping[str, TaskFacts], mixture: Mixture) -> None:
    """Refuse a mixture that a model with ``tasks`` cannot be trained or measured on.

    Every task of the mixture must be one of the model's, with the same label names in the same order and as
    many text fields, and pass :meth:`Task.check`. The model may have more tasks. The first problem is a
    :class:`~gar.errors.UserError`.
    """
    for task in mixture.tasks:
        if task.name not in tasks:
            raise one_of("task", task.name, tasks)
        known = tasks[task.name]
        if tuple(known.labels) != tuple(task.labels):
            order = ", in this order" if sorted(known.labels) == sorted(map(str, task.labels)) else ""
            raise UserError(
                f"task {task.name}: the model's labels are {', '.join(known.labels)}{order}; "
                f"the data have {', '.join(map(str, task.labels))}"
            )
        if len(known.text) != len(task.text):
            raise UserError(
                f"task {task.name}: the model takes {_fields(known.text)}, the data have {_fields(task.text)}"
            )
    mixture.check()


def _fields(text: Sequence[str]) -> str:
    return f"{'a pair of texts' if len(text) == 2 else 'one text'} ({', '.join(text)})"
