"""Exact data parallelism: one update on several ranks is that of one process on the same batch."""

from gar.distributed.exchange import (
    Layout,
    gather_probabilities,
    gather_rows,
    global_gram,
    sum_gradients,
    sum_tensors,
)
from gar.distributed.ranks import RankLost, Ranks

__all__ = [
    "Layout",
    "RankLost",
    "Ranks",
    "gather_probabilities",
    "gather_rows",
    "global_gram",
    "sum_gradients",
    "sum_tensors",
]
