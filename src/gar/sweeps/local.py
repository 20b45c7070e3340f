"""Jobs in worker processes of this machine."""

from __future__ import annotations

import atexit
import enum
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from gar.errors import UserError
from gar.sweeps import _process, store
from gar.sweeps.executors import ENDS, THREAD_VARIABLES, Closing, Event, Job, available_cores, threads_of

#: Runs on cached features that fill one GPU, each in a process of its own: while one starts, is measured or
#: plans its next updates, another computes. More of them only take turns (docs/benchmarks.md).
RUNS_PER_GPU = 3
#: The same where NVIDIA's multi-process service lets kernels of several processes run at once.
RUNS_PER_SHARED_GPU = 6
#: Set by whoever started that service; its programs find it by this (docs/speed.md).
MPS = "CUDA_MPS_PIPE_DIRECTORY"
#: Free memory of a GPU that each of them needs: its CUDA context, its features, its graphs.
MEMORY_OF_A_RUN = 12 << 30

#: Memory of the host that a run on a CPU may need.
HOST_MEMORY_OF_A_RUN = 3 << 30

_SPAWN = multiprocessing.get_context("spawn")


class LocalExecutor(Closing):
    """``jobs`` worker processes on this machine, the cores divided between them, GPUs dealt in turn.

    What workers print outside of runs goes to ``logs/workers.log``. Nothing is written before the first job.
    """

    work = "gar.sweeps._worker:serve"
    """What a worker process calls with its end of the pipe; named, so that only workers import it."""

    def __init__(self, jobs: int, logs: Path) -> None:
        if jobs < 1:
            raise UserError(f"--jobs is {jobs}; expected 1 or more")
        self.jobs, self.logs = jobs, logs
        self._share = max(1, available_cores() // jobs)
        self._workers: list[_Worker] = []
        self._stopping = False
        atexit.register(self.close)

    @property
    def busy(self) -> int:
        return sum(worker.job is not None for worker in self._workers)

    @property
    def free(self) -> int:
        return self.jobs - self.busy

    def submit(self, job: Job) -> None:
        threads = threads_of(job.config, self._share)
        idle = [worker for worker in self._workers if worker.job is None]
        worker = next((worker for worker in idle if worker.threads == threads), None)
        if worker is None:
            if len(self._workers) == self.jobs:
                self._end(idle[0])
            worker = self._start(threads)
        worker.send(replace(job, threads=threads))

    def events(self, timeout: float) -> list[Event]:
        found: list[Event] = []
        by_connection = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection), timeout):
            worker = by_connection[connection]  # type: ignore[index]
            try:
                told = worker.connection.recv()
            except (EOFError, OSError):
                found += self._lost(worker)
            else:
                found += self._told(worker, told)
        return found

    def stop(self) -> None:
        self._stopping = True
        for worker in self._workers:
            if worker.job is not None:
                worker.process.terminate()

    def close(self) -> None:
        for worker in list(self._workers):
            self._end(worker, kill=worker.job is not None)
        atexit.unregister(self.close)

    def _start(self, threads: int) -> _Worker:
        self.logs.mkdir(parents=True, exist_ok=True)
        slot = next(slot for slot in range(self.jobs) if slot not in {w.slot for w in self._workers})
        environment = {name: os.environ.get(name, str(threads)) for name in THREAD_VARIABLES}
        environment["OMP_NUM_THREADS"] = str(threads)
        if len(devices := visible_gpus()) > 1:
            environment["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
        worker = _Worker(self.work, slot, threads, environment, self.logs / "workers.log")
        self._workers.append(worker)
        return worker

    def _told(self, worker: _Worker, told: dict[str, Any]) -> list[Event]:
        kind, job = told.pop("kind"), worker.job
        assert job is not None
        if kind in ENDS:
            worker.job = None
            if not told.pop("healthy", True):  # it leaves by itself; the next job gets a fresh process
                self._end(worker)
        if kind == "interrupted" and not self._stopping:
            # Somebody else stopped the worker. Its checkpoint is there, but the sweep has to say so.
            reason = f"the worker was told to stop by a signal; {told.get('reason', '')}"
            kind, told = "failed", {**told, "error": "Killed", "reason": reason}
            store.note_failure(job.out, "Killed", reason)
        return [Event(job, kind, told)]

    def _lost(self, worker: _Worker) -> list[Event]:
        """A worker's pipe is closed: it finished on its own, or it died with the job that it had."""
        code, job = self._end(worker), worker.job
        if job is None:
            return []
        seconds = time.monotonic() - worker.since
        if self._stopping:
            return [Event(job, "interrupted", {"seconds": seconds})]
        error, reason = describe_exit(code, _oom_kills() > worker.oom_kills)
        store.note_failure(job.out, error, reason)
        return [Event(job, "failed", {"error": error, "reason": reason, "seconds": seconds})]

    def _end(self, worker: _Worker, kill: bool = False) -> int:
        """Let a worker go; its exit status."""
        self._workers.remove(worker)
        worker.connection.close()
        if kill:
            worker.process.kill()
        worker.process.join()
        code = worker.process.exitcode
        assert code is not None
        worker.process.close()
        return code


class _Worker:
    """A worker process and the job that it has."""

    def __init__(self, work: str, slot: int, threads: int, environment: dict[str, str], log: Path) -> None:
        self.slot, self.threads = slot, threads
        self.job: Job | None = None
        self.since = 0.0
        self.oom_kills = _oom_kills()
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_process.begin, args=(work, theirs, log))
        with _process.for_children(environment):
            self.process.start()
        theirs.close()

    def send(self, job: Job) -> None:
        self.job, self.since = job, time.monotonic()
        with suppress(BrokenPipeError):  # it died meanwhile; its closed pipe tells so
            self.connection.send(job)


def describe_exit(code: int, oom_kill: bool) -> tuple[str, str]:
    """Why a worker died, from its exit status and whether the kernel killed a process for memory meanwhile.

    >>> describe_exit(-11, False)
    ('Killed', 'the worker process was killed by SIGSEGV')
    """
    if code >= 0:
        return "Exited", f"the worker process ended with exit status {code}; log.txt may say why"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL" and oom_kill:
        return "OutOfMemory", "out of memory: the system killed the worker process (SIGKILL)"
    return "Killed", f"the worker process was killed by {name}"


class GpuUse(enum.Enum):
    """What a run takes of a GPU."""

    NONE = enum.auto()
    PART = enum.auto()
    WHOLE = enum.auto()

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> GpuUse:
        """Of the run with this configuration: cached features leave room, the backbone itself fills a GPU."""
        if str(tree["device"]).startswith("cpu"):
            return cls.NONE
        return cls.WHOLE if tree["backbone"]["trainable"] or not tree["cache"]["enabled"] else cls.PART


def fitting_jobs(
    uses: Collection[GpuUse], free: Sequence[int] | None = None, cores: int | None = None
) -> int:
    """Runs at a time that fill this machine's GPUs, or 1 where no run uses one: the default of ``--jobs``.

    ``free`` is the free memory of each GPU in bytes, ``cores`` what the host has; asked of the machine where
    they are not given. Every GPU gets the same number: one run if any of them takes a whole GPU, else up to
    ``RUNS_PER_GPU`` (``RUNS_PER_SHARED_GPU`` with NVIDIA's multi-process service), as far as memory and
    cores go, since nothing is shared between processes.

    >>> fitting_jobs({GpuUse.PART}, free=[80 << 30], cores=16)
    3
    >>> fitting_jobs({GpuUse.PART}, free=[80 << 30, 30 << 30], cores=16)
    4
    """
    if not {GpuUse.PART, GpuUse.WHOLE} & set(uses) or not (free := gpu_memory() if free is None else free):
        return 1
    several = RUNS_PER_SHARED_GPU if os.environ.get(MPS) else RUNS_PER_GPU
    most = 1 if GpuUse.WHOLE in uses else several
    cores = available_cores() if cores is None else cores
    return len(free) * max(1, min(most, cores // len(free), min(free) // MEMORY_OF_A_RUN))


def filling_jobs(uses: Collection[GpuUse], runs: int) -> int:
    """As :func:`fitting_jobs`, and on a CPU as many as there are cores, memory for and runs to do.

    Small products gain little from a second thread: on two cores two frozen runs with one thread each made
    1.3 times as many updates as one with two.
    """
    if visible_gpus() and {GpuUse.PART, GpuUse.WHOLE} & set(uses):
        return min(runs, fitting_jobs(uses))
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        memory = HOST_MEMORY_OF_A_RUN
    return max(1, min(runs, available_cores(), memory // HOST_MEMORY_OF_A_RUN))


def gpu_memory() -> list[int]:
    """Free bytes of each visible GPU, 0 where it cannot be told.

    The driver's own tool is asked: torch would take memory on every GPU to answer.
    """
    names = visible_gpus()
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        told = (
            subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
            if names
            else ""
        )
        rows = [[cell.strip() for cell in line.split(",")] for line in told.splitlines()]
        known = [row for row in rows if row[2].isdigit()]
        free = {name: int(mebibytes) << 20 for *both, mebibytes in known for name in both}
    except (OSError, IndexError, subprocess.SubprocessError):
        free = {}
    return [free.get(name, 0) for name in names]


def visible_gpus() -> list[str]:
    """CUDA devices as ``CUDA_VISIBLE_DEVICES`` names them."""
    if (told := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in told.split(",") if name.strip()]
    import torch  # counting does not create a CUDA context

    return [str(i) for i in range(torch.cuda.device_count())]


def _oom_kills() -> int:
    """How often the kernel has killed a process for memory; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
