"""Updates per second of several processes on one device, each with the shipped loop on cached features.

The processes are started once, with a model each. For every number of jobs so many of them run at the same
time, the numbers in turn, so that a slow spell hits all alike.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from types import ModuleType

import torch

from gar.benchmark.report import Line, Spread, paired_ratio
from gar.benchmark.settings import Bench, Setting
from gar.benchmark.step import shipped
from gar.benchmark.timing import Plan, out_of_memory, synchronize
from gar.errors import UserError
from gar.sweeps.executors import available_cores, threads_of
from gar.training import TrainingFailure

_SPAWN = multiprocessing.get_context("spawn")


def sweep_lines(
    setting: Setting, method: str, jobs: Sequence[int], device: torch.device, plan: Plan, seconds: float
) -> Iterator[list[Line]]:
    """A line for every number of jobs. A stretch lasts ``seconds``, rounded up to whole stretches of updates.

    CPU threads are those of a sweep's workers. The ratio is to one job, where that is among the numbers.
    """
    told = setting.config(method).threads
    with ExitStack() as stack:
        workers = [
            stack.enter_context(contextlib.closing(_Worker(setting, method, str(device), plan)))
            for _ in range(max(jobs))
        ]
        problems = [worker.ready() for worker in workers]  # all wait for the slowest
        rates: dict[int, list[float]] = {count: [] for count in jobs}
        for _ in range(plan.repeats):
            for count in jobs:
                if not any(problems[:count]):
                    threads = threads_of({"threads": told}, max(1, available_cores() // count))
                    rates[count].append(_together(workers[:count], problems, threads, seconds))
    yield [
        Line(
            labels={**setting.labels, "method": method, "jobs": str(count)},
            problem=(problem := next(filter(None, problems[:count]), "")),
            per_second=None if problem else Spread.of(rates[count]),
            ratio=None if problem else paired_ratio(rates[count], rates.get(1, [])),
        )
        for count in jobs
    ]


def _together(workers: Sequence[_Worker], problems: list[str], threads: int, seconds: float) -> float:
    """Updates per second of workers that run at the same time; what went wrong goes into ``problems``."""
    for worker in workers:
        worker.start(threads, seconds)
    rates = [worker.rate() for worker in workers]
    for place, rate in enumerate(rates):
        if isinstance(rate, str):
            problems[place] = rate
    return sum(rate for rate in rates if not isinstance(rate, str))


class _Worker:
    """One process and its pipe."""

    def __init__(self, setting: Setting, method: str, device: str, plan: Plan) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=_work, args=(theirs, setting, method, device, plan), daemon=True
        )
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # a script would be run again in the process
        try:
            self._process.start()
        finally:
            sys.modules["__main__"] = main
        theirs.close()

    def ready(self) -> str:
        """Why it cannot run, or nothing."""
        found = self._answer()
        return found if isinstance(found, str) else ""

    def start(self, threads: int, seconds: float) -> None:
        with contextlib.suppress(OSError):  # its answer will say that it is gone
            self._connection.send((threads, seconds))

    def rate(self) -> float | str:
        """Updates per second of what was started, or why there are none."""
        return self._answer()

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.join()

    def _answer(self) -> float | str:
        try:
            answer: float | str = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            return f"the process ended with exit status {self._process.exitcode}"
        return answer


def _work(connection: Connection, setting: Setting, method: str, where: str, plan: Plan) -> None:
    """What a process does: get ready, then run whenever it is told to, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the command, which ends its processes
    device = torch.device(where)
    try:
        runner = shipped(setting, method, {}, Bench(setting, device, runs=1))
        for _ in range(plan.warmup):
            runner.run(plan.stretch(runner), contextlib.nullcontext())
        connection.send(0.0)
        while True:
            threads, seconds = connection.recv()
            torch.set_num_threads(threads)
            synchronize(device)
            began, done, taken = time.perf_counter(), 0, 0.0
            while taken < seconds:
                runner.run(plan.stretch(runner), contextlib.nullcontext())
                synchronize(device)
                done, taken = done + plan.stretch(runner), time.perf_counter() - began
            connection.send(done / taken)
    except (EOFError, BrokenPipeError):
        return
    except (TrainingFailure, UserError) as refusal:
        connection.send(str(refusal))
    except Exception as error:
        connection.send("out of memory" if out_of_memory(error) else f"{type(error).__name__}: {error}")
        if not out_of_memory(error):
            raise
