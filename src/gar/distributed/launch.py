"""Several processes of one command on this machine, as ``torchrun`` starts them, but for what it prints."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

INTERRUPTED = 130


def launch(command: Sequence[str], count: int) -> int:
    """Run ``command`` as ``count`` ranks; the exit code of the whole: what the first rank said, or others.

    When one rank fails the others are ended. Each gets its share of the cores, unless
    ``OMP_NUM_THREADS`` says how many.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    for name in logging.root.manager.loggerDict:  # the ranks say themselves what is wrong
        if name.startswith("torch.distributed."):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        run_id=uuid.uuid4().hex,
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        codes = [error.failures[rank].exitcode for rank in sorted(error.failures)]
        return next((code for code in codes if code > 0), 1)
    except SignalException:
        return INTERRUPTED
    return 0
