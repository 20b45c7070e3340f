"""Jobs as tasks of a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gar.errors import UserError
from gar.plugins import plugin_sources, preload
from gar.runs.directory import checkpoints
from gar.runs.names import CHECKPOINTS
from gar.runs.packing import pack, unpack
from gar.sweeps import store
from gar.sweeps.executors import THREAD_VARIABLES, Closing, Event, Job, threads_of


@dataclass(frozen=True)
class _Attempt:
    """A job on the cluster, after how many that were lost, and when it was submitted."""

    job: Job
    lost: int
    since: float


class RayExecutor(Closing):
    """Jobs as Ray tasks; their run directories come back as bytes and are written here.

    ``address`` is a cluster's (``auto``: the one of this machine; ``local``: start one). Checkpoints come
    back while a run goes on. One whose node is lost is submitted again, up to ``retries`` times, with the
    last of them; so is one that was interrupted and is started again.
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
        self.cpus, self.gpus, self.jobs, self.retries = cpus, gpus, jobs, retries
        self._task = ray.remote(_task)
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )
        self._mailbox = (
            ray.remote(_Mailbox).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()
        )
        errors = ray.exceptions
        self._losses = (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.LocalRayletDiedError,
            errors.ObjectLostError,
            errors.OutOfMemoryError,
        )
        self._running: dict[Any, _Attempt] = {}
        self._stopping = False

    @property
    def busy(self) -> int:
        return len(self._running)

    @property
    def free(self) -> int:
        """From the cluster as it is now: nodes may join and leave."""
        return self._capacity() - self.busy

    def submit(self, job: Job) -> None:
        self._send(job, lost=0)

    def events(self, timeout: float) -> list[Event]:
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=timeout)
        return [*self._told(), *(self._ended(reference) for reference in ready)]

    def stop(self) -> None:
        self._stopping = True
        for reference in self._running:
            self._ray.cancel(reference, force=False)

    def close(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running.clear()
        self._ray.kill(self._mailbox)
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

    def _send(self, job: Job, lost: int) -> None:
        kept = pack(job.out, checkpoint=True) if checkpoints(job.out / CHECKPOINTS) else None
        plugins = job.config.get("plugins") or ()
        threads = threads_of(job.config, max(1, int(self.cpus)))
        surroundings: dict[str, Any] = {"env_vars": dict.fromkeys(THREAD_VARIABLES, str(threads))}
        if packages := _packages(plugins):
            surroundings["py_modules"] = packages
        # Ray itself would start a lost task again from its beginning, and not say so.
        task = self._task.options(
            num_cpus=self.cpus, num_gpus=self.gpus, max_retries=0, runtime_env=surroundings
        )
        reference = task.remote(
            replace(job, threads=threads), kept, plugin_sources(plugins), self._mailbox, lost
        )
        self._running[reference] = _Attempt(job, lost, time.monotonic())

    def _told(self) -> list[Event]:
        """What running tasks put into the mailbox; what a lost one still says is passed over."""
        attempts = {(attempt.job.id, attempt.lost): attempt.job for attempt in self._running.values()}
        events = []
        try:
            collected = self._ray.get(self._mailbox.collect.remote())
        except self._ray.exceptions.RayActorError:  # it starts again; only progress is lost
            return []
        for key, told in collected:
            if (job := attempts.get(key)) is None:
                continue
            if (kind := told.pop("kind")) == "checkpoint":
                unpack(told["archive"], job.out)
            else:
                events.append(Event(job, kind, told))
        return events

    def _ended(self, reference: Any) -> Event:
        attempt = self._running.pop(reference)
        job, seconds = attempt.job, time.monotonic() - attempt.since
        errors = self._ray.exceptions
        try:
            outcome, archive = self._ray.get(reference)
        except errors.TaskCancelledError:
            return Event(job, "interrupted", {"seconds": seconds})
        except Exception as error:
            if self._stopping:
                return Event(job, "interrupted", {"seconds": seconds})
            name, reason = type(error).__name__, " ".join(str(error).split())[:500]
            if isinstance(error, errors.OutOfMemoryError):
                name, reason = "OutOfMemory", f"out of memory: {reason}"
            if isinstance(error, self._losses) and attempt.lost < self.retries:
                self._send(job, attempt.lost + 1)
                kept = checkpoints(job.out / CHECKPOINTS)
                last = f"{CHECKPOINTS}/{kept[-1].name}" if kept else "its beginning"
                return Event(job, "lost", {"reason": reason, "checkpoint": last, "seconds": seconds})
            store.note_failure(job.out, name, reason)
            return Event(job, "failed", {"error": name, "reason": reason, "seconds": seconds})
        unpack(archive, job.out)
        return Event(job, outcome.pop("kind"), outcome)


class _Mailbox:
    """An actor beside the coordinator: what tasks tell, until it is collected."""

    def __init__(self) -> None:
        self._told: list[tuple[tuple[str, int], dict[str, Any]]] = []

    def tell(self, key: tuple[str, int], event: dict[str, Any]) -> None:
        self._told.append((key, event))

    def collect(self) -> list[tuple[tuple[str, int], dict[str, Any]]]:
        told, self._told = self._told, []
        return told


def _task(
    job: Job, kept: bytes | None, plugins: Mapping[str, str], mailbox: Any, lost: int
) -> tuple[dict[str, Any], bytes]:
    """What a node runs."""
    import ray

    from gar.sweeps._worker import run_remote  # the coordinator never imports it

    def emit(event: dict[str, Any]) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # without a mailbox the run is still worth its end
            told = mailbox.tell.remote((job.id, lost), event)
            if event["kind"] == "checkpoint":
                ray.get(told)  # no second one is on its way before the first has arrived

    for name, source in plugins.items():
        preload(name, source)
    return run_remote(job, kept, emit)


def _packages(plugins: Any) -> list[str]:
    """Directories of the packages among a configuration's plugins, which Ray brings to the nodes."""
    sources = plugin_sources(plugins)
    found = (importlib.util.find_spec(name.split(".")[0]) for name in plugins if name not in sources)
    return sorted(
        {str(Path(place)) for spec in found if spec for place in spec.submodule_search_locations or ()}
    )
