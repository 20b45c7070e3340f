"""Exact data parallelism: one update on several ranks is that of one process on the same batch."""

from gar.distributed.exchange import (
    Layout,
    gather_probabilities,
    gather_rows,
    global_gram,
    sum_gradients,
    sum_tensors,
)
from gar.distributed.job import Job, RankFailed, device_of_rank, joined
from gar.distributed.launch import launch
from gar.distributed.ranks import RankLost, Ranks

__all__ = [
    "Job",
    "Layout",
    "RankFailed",
    "RankLost",
    "Ranks",
    "device_of_rank",
    "gather_probabilities",
    "gather_rows",
    "global_gram",
    "joined",
    "launch",
    "sum_gradients",
    "sum_tensors",
]
