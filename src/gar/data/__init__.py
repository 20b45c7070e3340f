"""Tasks and mixtures: labelled text from local files, the model hub, a directory of JSONL files or BIG-bench.

``gar.data.load("five", data_dir="data")`` reads a registered mixture; :func:`load_mixture` reads what a
configuration names. Every mistake in the data is one :class:`~gar.errors.UserError` line.
"""

from gar.data.describe import (
    SplitReport,
    TaskReport,
    describe_mixture,
    encode_lengths,
    label_counts,
    majority_shares,
    overlap,
)
from gar.data.load import load, load_mixture, load_task
from gar.data.paths import cache_root
from gar.data.permutation import fixed_permutation
from gar.data.probe import probe_mixture, probe_task
from gar.data.registry import RegisteredTask, find_mixture, find_task, registry
from gar.data.task import Mixture, Split, Task

__all__ = [
    "Mixture",
    "RegisteredTask",
    "Split",
    "SplitReport",
    "Task",
    "TaskReport",
    "cache_root",
    "describe_mixture",
    "encode_lengths",
    "find_mixture",
    "find_task",
    "fixed_permutation",
    "label_counts",
    "load",
    "load_mixture",
    "load_task",
    "majority_shares",
    "overlap",
    "probe_mixture",
    "probe_task",
    "registry",
]
