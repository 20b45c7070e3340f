"""Processes that wait for work to do together: started once, for many cases."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gar.distributed import Ranks

LIMIT = timedelta(seconds=60)
_groups: dict[int, Any] = {}


def ranks_of(count: int) -> Ranks | None:
    """The first ``count`` ranks of a pool; None for a process that is none of them."""
    return Ranks(_groups[count]) if dist.get_rank() < count else None


class Pool:
    """``count`` processes; :meth:`run` has them call ``do(ranks, *arguments)`` on the first W."""

    def __init__(self, pipes: list[Any]) -> None:
        self._pipes = pipes

    def run(self, world: int, do: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each of ``world`` ranks returned; the first error is raised with its traceback."""
        for pipe in self._pipes:
            pipe.send((world, do, arguments))
        answers = [pipe.recv() for pipe in self._pipes]
        for ok, told in answers:
            if not ok:
                raise AssertionError(f"a rank failed:\n{told}")
        return [told for _, told in answers[:world]]


@contextmanager
def pool(count: int, backend: str = "gloo", patience: float = 60.0) -> Iterator[Pool]:
    """A pool of processes, ended with the block, or in ``patience`` seconds; with nccl each has a GPU."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as where:
        pipes, processes = [], []
        for rank in range(count):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_work, args=(there, rank, count, where, backend), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            yield Pool(pipes)
        finally:
            for pipe in pipes:
                pipe.send(None)
            for process in processes:
                process.join(patience)
                process.kill()


def _work(pipe: Any, rank: int, count: int, where: str, backend: str) -> None:
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    store = Path(where) / "store"
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=count, timeout=LIMIT)
    for world in range(1, count + 1):
        _groups[world] = dist.new_group(list(range(world)), timeout=LIMIT)
    while (work := pipe.recv()) is not None:
        world, do, arguments = work
        ranks = ranks_of(world)
        torch.manual_seed(0)
        try:
            pipe.send((True, None if ranks is None else do(ranks, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
