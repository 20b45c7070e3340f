"""Where jobs run: worker processes of this machine, or a Ray cluster. The coordinator cannot tell them apart.

An executor takes a job when ``free`` is positive, and tells by :meth:`Executor.events` what became of it:
``progress`` and ``message`` any number of times, then once ``finished``, ``failed`` or ``interrupted``.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from gar.errors import UserError
from gar.runs.directory import write_failure
from gar.runs.packing import unpack

ENDS = frozenset({"finished", "failed", "interrupted"})


@dataclass(frozen=True)
class Job:
    """One run to do: its configuration as a plain tree, and the directory where its files shall be."""

    id: str
    config: dict[str, Any]
    out: Path
    probe: bool = False
    """Train on 90 % of the training split and evaluate on the other 10 %."""
    keep_model: bool = True

    def message(self, **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "config": self.config,
            "out": str(self.out.resolve()),
            "probe": self.probe,
            "keep_model": self.keep_model,
            **more,
        }


@dataclass(frozen=True)
class Event:
    """Something that happened to a job: ``kind`` and its facts (loss, accuracy, reason, seconds, …)."""

    job: Job
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def ends(self) -> bool:
        return self.kind in ENDS


class Executor(Protocol):
    """Runs jobs elsewhere."""

    @property
    def free(self) -> int:
        """How many more jobs may be submitted now."""
        ...

    @property
    def busy(self) -> int:
        """How many jobs have not ended."""
        ...

    def submit(self, job: Job) -> None: ...

    def events(self, timeout: float) -> list[Event]:
        """What happened since the last call; waits up to ``timeout`` seconds for it."""
        ...

    def stop(self) -> None:
        """Ask all jobs to write a checkpoint and stop; each then ends as ``interrupted``."""
        ...

    def close(self) -> None:
        """End everything at once."""
        ...


def drive(executor: Executor, jobs: Iterator[Job], stopping: Callable[[], bool]) -> Iterator[Event]:
    """Keep an executor busy until ``jobs`` is used up; every submitted job ends in one event of ENDS."""
    stopped = False
    while True:
        while not stopping() and executor.free > 0 and (job := next(jobs, None)) is not None:
            executor.submit(job)
            yield Event(job, "started")
        if stopping() and not stopped:
            executor.stop()
            stopped = True
        if not executor.busy:
            return
        yield from executor.events(0.25)


# ---------------------------------------------------------------------- this machine


class _Worker:
    """A worker process and the job that it has."""

    def __init__(self, command: Sequence[str], slot: int, environment: dict[str, str], log: Path) -> None:
        self.slot = slot
        self.job: Job | None = None
        self.since = 0.0
        self.oom_kills = _oom_kills()
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the coordinator alone, which then asks the workers
            )
        self._partial = b""

    def send(self, job: Job, threads: int) -> None:
        self.job, self.since = job, time.monotonic()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job.message(threads=threads)).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it died meanwhile; its closed output tells so

    def read(self) -> list[dict[str, Any]] | None:
        """Complete lines that have arrived, or None at the end."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self, kill: bool = False) -> int:
        """Close both pipes and wait; the exit status."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        if kill:
            self.process.kill()
        return self.process.wait()


class LocalExecutor:
    """``jobs`` worker processes on this machine, the cores divided between them, GPUs dealt in turn."""

    command: Sequence[str] = (sys.executable, "-m", "gar.sweeps.worker")

    def __init__(self, jobs: int, logs: Path) -> None:
        if jobs < 1:
            raise UserError(f"--jobs is {jobs}; expected 1 or more")
        self.jobs, self.threads = jobs, max(1, available_cores() // jobs)
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / "workers.log"
        self._workers: dict[int, _Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._stopping = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def busy(self) -> int:
        return sum(worker.job is not None for worker in self._workers.values())

    @property
    def free(self) -> int:
        return self.jobs - self.busy

    def process_of(self, job_id: str) -> int | None:
        """The process id behind a job."""
        found = (w.process.pid for w in self._workers.values() if w.job is not None and w.job.id == job_id)
        return next(found, None)

    def submit(self, job: Job) -> None:
        idle = next((worker for worker in self._workers.values() if worker.job is None), None)
        (idle or self._start()).send(job, self.threads)

    def events(self, timeout: float) -> list[Event]:
        found: list[Event] = []
        for key, _ in self._selector.select(timeout):
            worker: _Worker = key.data
            told = worker.read()
            if told is None:
                found += self._lost(worker)
            else:
                found += [event for line in told if (event := self._event(worker, line)) is not None]
        return found

    def stop(self) -> None:
        self._stopping = True
        for worker in self._workers.values():
            if worker.job is not None and worker.process.poll() is None:
                worker.process.terminate()

    def close(self) -> None:
        for worker in list(self._workers.values()):
            self._forget(worker)
            worker.end(kill=worker.job is not None)
        self._selector.close()

    def _start(self) -> _Worker:
        slot = next(slot for slot in range(self.jobs) if slot not in self._workers)
        worker = _Worker(self.command, slot, self._environment(slot), self._log)
        self._workers[slot] = worker
        assert worker.process.stdout is not None
        self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        return worker

    def _environment(self, slot: int) -> dict[str, str]:
        threads = dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), str(self.threads)
        )
        environment = {**os.environ, **threads}
        if len(devices := visible_gpus()) > 1:
            environment["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
        return environment

    def _event(self, worker: _Worker, line: dict[str, Any]) -> Event | None:
        kind, job = line.pop("kind"), worker.job
        if job is None or kind == "ready":
            return None
        if kind in ENDS:
            worker.job = None
            if not line.pop("healthy", True):  # it leaves by itself; the next job gets a fresh process
                self._forget(worker)
                worker.end()
        if kind == "interrupted" and not self._stopping:
            # Somebody else stopped the worker. Its checkpoint is there, but the sweep has to say so.
            reason = f"the worker was told to stop by a signal; {line.get('reason', '')}"
            kind, line = "failed", {**line, "error": "Killed", "reason": reason}
            write_failure(job.out, "Killed", reason)
        return Event(job, kind, line)

    def _lost(self, worker: _Worker) -> list[Event]:
        """A worker's output ended: it finished on its own, or it died with the job that it had."""
        self._forget(worker)
        code, job = worker.end(), worker.job
        if job is None:
            return []
        worker.job = None
        seconds = time.monotonic() - worker.since
        if self._stopping:
            return [Event(job, "interrupted", {"seconds": seconds})]
        error, reason = describe_exit(code, _oom_kills() > worker.oom_kills)
        write_failure(job.out, error, reason)
        return [Event(job, "failed", {"error": error, "reason": reason, "seconds": seconds})]

    def _forget(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        self._selector.unregister(worker.process.stdout)
        del self._workers[worker.slot]


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


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


# ---------------------------------------------------------------------- a Ray cluster


class RayExecutor:
    """Jobs as Ray tasks; finished run directories come back as bytes and are written here.

    ``address`` is a cluster's (``auto``: the one of this machine; ``local``: start one). A task whose node is
    lost is run again up to ``retries`` times, from its start: checkpoints stay on the node.
    """

    def __init__(
        self,
        address: str = "auto",
        *,
        jobs: int | None = None,
        cpus: float = 1,
        gpus: float = 0,
        retries: int = 3,
    ) -> None:
        try:
            import ray
        except ImportError:
            raise UserError(
                "--executor ray: ray is not installed; pip install 'gradient-aligned-routing[ray]'"
            ) from None
        if cpus <= 0 or gpus < 0 or retries < 0:
            raise UserError(
                f"--cpus {cpus}, --gpus {gpus}, --retries {retries}: expected cpus > 0, the others >= 0"
            )
        self._ray: Any = ray
        self._started = not ray.is_initialized()
        if self._started:
            try:
                ray.init(address=address, log_to_driver=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                reason = str(error).strip().splitlines()[0]
                raise UserError(f"--address {address}: no Ray cluster answers ({reason})") from None
        self.cpus, self.gpus, self.jobs = cpus, gpus, jobs
        self._threads = max(1, int(cpus))
        self._task = ray.remote(_ray_task).options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_retries=retries,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(self._threads)}},
        )
        self._running: dict[Any, Job] = {}
        self._stopping = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def busy(self) -> int:
        return len(self._running)

    @property
    def free(self) -> int:
        """From the cluster as it is now: nodes may join and leave."""
        return self._capacity() - self.busy

    def submit(self, job: Job) -> None:
        self._running[self._task.remote(job.message(threads=self._threads))] = job

    def events(self, timeout: float) -> list[Event]:
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=timeout)
        return [self._ended(reference, self._running.pop(reference)) for reference in ready]

    def stop(self) -> None:
        self._stopping = True
        for reference in self._running:
            self._ray.cancel(reference, force=False)

    def close(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running.clear()
        if self._started:
            self._ray.shutdown()

    def _capacity(self) -> int:
        if self.jobs is not None:
            return self.jobs
        resources = self._ray.cluster_resources()
        fits = resources.get("CPU", 0) / self.cpus
        if self.gpus:
            fits = min(fits, resources.get("GPU", 0) / self.gpus)
        return max(1, int(fits + 1e-9))

    def _ended(self, reference: Any, job: Job) -> Event:
        errors = self._ray.exceptions
        try:
            outcome: dict[str, Any] = self._ray.get(reference)
        except (errors.TaskCancelledError, KeyboardInterrupt):
            return Event(job, "interrupted")
        except Exception as error:
            if self._stopping:
                return Event(job, "interrupted")
            memory = isinstance(error, errors.OutOfMemoryError)
            name = "OutOfMemory" if memory else type(error).__name__
            reason = " ".join(str(error).split())[:500]
            write_failure(job.out, name, f"out of memory: {reason}" if memory else reason)
            return Event(job, "failed", {"error": name, "reason": reason})
        unpack(outcome.pop("archive"), job.out)
        return Event(job, outcome.pop("kind"), outcome)


def _ray_task(job: dict[str, Any]) -> dict[str, Any]:
    from gar.sweeps.worker import run_remote  # the coordinator never imports it

    return run_remote(job)
