"""Parts of the training split that are held out: the development probe, and the selection part.

A search scores its candidates on the probe, a choice between trained models is made on the selection part;
the validation split has no part in either. Both are the first ``round(fraction n)`` examples (one at least)
of a fixed permutation that depends on the part's and the task's name and on n alone: they are the same for
every seed, method and candidate. They are not stratified; they keep the order of the training split, as the
rest does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gar.data._permutation import fixed_permutation
from gar.data.task import Mixture, Split, Task
from gar.errors import UserError


def probe_mixture(mixture: Mixture, fraction: float = 0.1) -> Mixture:
    """The mixture with every task's training split divided, see :func:`probe_task`."""
    return replace(mixture, tasks=tuple(probe_task(task, fraction) for task in mixture.tasks))


def probe_task(task: Task, fraction: float = 0.1) -> Task:
    """The task with ``validation`` the probe and ``train`` the rest, both from its training split.

    The validation split is dropped here, before a model exists.
    """
    rest, probe = _held_out(task, fraction, "development probe")
    return replace(task, train=rest, validation=probe)


def selection_mixture(mixture: Mixture, fraction: float) -> tuple[Mixture, Mixture | None]:
    """The mixture without the selection part of its training splits, and that part as validation splits.

    With a fraction of 0 it is the mixture itself, and no part.
    """
    if not fraction:
        return mixture, None
    parts = [_held_out(task, fraction, "selection") for task in mixture.tasks]
    pairs = list(zip(mixture.tasks, parts, strict=True))
    rest = replace(mixture, tasks=tuple(replace(task, train=rest) for task, (rest, _) in pairs))
    kept = tuple(replace(task, train=rest, validation=held) for task, (rest, held) in pairs)
    return rest, replace(mixture, tasks=kept)


def _held_out(task: Task, fraction: float, part: str) -> tuple[Split, Split]:
    """The rest of the training split, and the part of this name."""
    n = len(task.train)
    if n < 2:
        raise UserError(f"task {task.name!r}: {n} training example; a {part} needs two or more")
    order = fixed_permutation(n, f"{task.name}/{part}")
    held = min(n - 1, max(1, round(n * fraction)))
    return task.train.select(np.sort(order[held:])), task.train.select(np.sort(order[:held]))
