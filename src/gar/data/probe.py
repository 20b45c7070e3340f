"""The development probe: 10 % of a task's training split, on which a search scores its candidates.

The validation split has no part in it: it is dropped here, before a model exists.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gar.data._permutation import fixed_permutation
from gar.data.task import Mixture, Task
from gar.errors import UserError


def probe_mixture(mixture: Mixture, fraction: float = 0.1) -> Mixture:
    """The mixture with every task's training split divided, see :func:`probe_task`."""
    return replace(mixture, tasks=tuple(probe_task(task, fraction) for task in mixture.tasks))


def probe_task(task: Task, fraction: float = 0.1) -> Task:
    """The task with ``validation`` the probe and ``train`` the rest, both from its training split.

    The probe is the first ``round(fraction n)`` examples (one at least) of a fixed permutation that depends
    on the task's name and n alone: it is the same for every seed, method and candidate. It is not stratified.
    Both parts keep the order of the training split.
    """
    n = len(task.train)
    if n < 2:
        raise UserError(f"task {task.name!r}: {n} training example; a development probe needs two or more")
    order = fixed_permutation(n, f"{task.name}/development probe")
    held = min(n - 1, max(1, round(n * fraction)))
    probe, rest = np.sort(order[:held]), np.sort(order[held:])
    return replace(task, train=task.train.select(rest), validation=task.train.select(probe))
