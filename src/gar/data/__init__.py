"""Tasks and mixtures: labelled text from local files, the model hub, a directory of JSONL files or BIG-bench.
:func:`planted` makes one up, with a known grouping.

``gar.data.load("five", data_dir="data")`` reads a registered mixture; :func:`load_mixture` reads what a
configuration names; :func:`check_mixture` says whether a mixture fits a model, :func:`identity` what its
examples come from. Every mistake in the data is one :class:`~gar.errors.UserError` line.
"""

from gar.data._describe import (
    SplitReport,
    TaskReport,
    describe_mixture,
    encode_lengths,
    label_counts,
    majority_shares,
    overlap,
)
from gar.data._identity import contents, identity
from gar.data._permutation import fixed_permutation
from gar.data._planted import PlantedTask, planted
from gar.data.check import TaskFacts, check_mixture
from gar.data.export import export
from gar.data.load import load, load_mixture, load_task, read_texts
from gar.data.paths import cache_root
from gar.data.probe import probe_mixture, probe_task, selection_mixture
from gar.data.registry import RegisteredTask, find_mixture, find_task, registry
from gar.data.task import Mixture, Split, Task
from gar.data.texts import GroupedTexts, grouped_mixture, read_grouped

__all__ = [
    "GroupedTexts",
    "Mixture",
    "PlantedTask",
    "RegisteredTask",
    "Split",
    "SplitReport",
    "Task",
    "TaskFacts",
    "TaskReport",
    "cache_root",
    "check_mixture",
    "contents",
    "describe_mixture",
    "encode_lengths",
    "export",
    "find_mixture",
    "find_task",
    "fixed_permutation",
    "grouped_mixture",
    "identity",
    "label_counts",
    "load",
    "load_mixture",
    "load_task",
    "majority_shares",
    "overlap",
    "planted",
    "probe_mixture",
    "probe_task",
    "read_grouped",
    "read_texts",
    "registry",
    "selection_mixture",
]
