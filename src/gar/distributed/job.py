"""A training on several processes that a launcher has started: who they are, and how they agree.

``torchrun`` and ``accelerate launch`` describe a process in its environment. Beside the ranks that exchange
tensors (nccl between GPUs, gloo else) there is a second group, always gloo, over which the processes agree:
whether to stop, whether one of them failed and why. An error of one is everyone's; the first rank speaks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from gar.distributed.ranks import RankLost, Ranks
from gar.errors import UserError

T = TypeVar("T")

#: How long an exchange of tensors may take, and how long ranks wait for what one of them does alone (reading
#: data, features, evaluation). A process that has ended is noticed at once.
TIMEOUT, PATIENCE = timedelta(minutes=10), timedelta(hours=24)
#: Seconds to wait for the reason of a rank that has ended.
REASON = 5.0


class RankFailed(RuntimeError):
    """Another rank failed by a fault that is not the user's; ``rank`` says which, the message why."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank


class Job:
    """The processes of one training; made by :func:`joined`, or :meth:`alone`.

    ``ranks`` exchange tensors, ``control`` what the processes agree on.
    """

    def __init__(self, ranks: Ranks, control: Ranks, store: Any = None) -> None:
        self.ranks, self.control, self.store = ranks, control, store
        self._processes = control.collect((socket.gethostname(), os.getpid()))

    @classmethod
    def alone(cls) -> Job:
        """A single process, whatever torch.distributed has begun."""
        return cls(Ranks.alone(), Ranks.alone())

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return self.control.count

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes, evaluates and speaks."""
        return self.control.rank == 0

    def use(self, device: torch.device) -> None:
        """Exchange tensors between devices of this kind; groups of one's own stay as they are."""
        if self.count > 1 and self.control.group is None:
            backend = "nccl" if device.type == "cuda" else "gloo"
            self.ranks = Ranks(dist.new_group(backend=backend, timeout=TIMEOUT))

    def leave(self) -> None:
        """Leave torch.distributed; who this rank is stays known.

        The threads of its groups end here: one that still holds a tensor when Python ends would abort the
        process (pytorch/pytorch#190489), and a mistake's exit code would be lost.
        """
        self.ranks.group = self.control.group = None
        dist.destroy_process_group()

    # ------------------------------------------------------------------ agreement

    def each(self, do: Callable[[], T]) -> T:
        """What ``do`` returns, called on every rank; an error of one is everyone's."""
        if self.count == 1:
            return do()
        failed, found = None, None
        try:
            found = do()
        except Exception as error:
            failed = error
        told = self.control.collect(None if failed is None else _described(failed))
        if failed is not None:
            raise failed
        for rank, reason in enumerate(told):
            if reason is not None:
                raise _of(rank, reason)
        return found  # type: ignore[return-value]

    def first(self, do: Callable[[], T]) -> T | None:
        """What ``do`` returns, called on the first rank alone while the others wait; None on them."""
        return self.each(lambda: do() if self.is_first else None)

    def told(self, do: Callable[[], T]) -> T:
        """What ``do`` returns on the first rank, on every rank."""
        found = self.first(do)
        return self.control.tell(found)  # type: ignore[return-value]

    def any(self, flag: bool) -> bool:
        """Whether one of the ranks says so."""
        return bool(self.control.gather(torch.tensor([flag])).any())

    def smallest(self, number: int | None) -> int | None:
        """The smallest of the numbers that ranks have; None where none has one."""
        found = [other for other in self.control.collect(number) if other is not None]
        return min(found, default=None)

    def differing(self, tensors: Sequence[Tensor]) -> int | None:
        """The first of these tensors whose bits are not the same on every rank; None where all are."""
        if self.count == 1 or not tensors:
            return None
        own = torch.stack([_sum_of_bits(tensor).cpu() for tensor in tensors])
        everyone = self.control.gather(own)
        return next(iter((everyone != everyone[0]).any(0).nonzero().flatten().tolist()), None)

    # ------------------------------------------------------------------ a rank that is lost

    def wait(self, device: torch.device) -> None:
        """Wait for what was launched on the device, unless a rank on this machine ends meanwhile.

        A GPU that waits for another one's data would wait for ever, and the process with it.
        """
        if self.count == 1 or device.type != "cuda":
            return
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        looked = time.monotonic()
        while not done.query():
            time.sleep(1e-4)
            if time.monotonic() - looked > 1:
                looked = time.monotonic()
                if (gone := self._gone()) and not done.query():
                    raise RankLost(f"rank {gone[0]} has ended")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """In this block a lost rank is an error with that rank's reason; others are told of an own error."""
        try:
            yield
        except KeyboardInterrupt as stop:  # also a launcher's, when a rank has ended
            if type(stop) is KeyboardInterrupt and any(self._told(rank) is None for rank in self._gone()):
                raise self._ending(RankLost()) from stop
            self._tell([None, "interrupted"])
            raise
        except Exception as error:
            if getattr(error, "elsewhere", False):
                raise
            if isinstance(error, RankLost):
                raise self._ending(error) from error
            self._end_in_peace()
            self._tell(_described(error))
            raise

    def _tell(self, reason: list[Any]) -> None:
        if self.store is not None:
            with suppress(RuntimeError):
                self.store.set(f"ended/{self.control.rank}", json.dumps(reason))

    def _told(self, rank: int) -> list[Any] | None:
        with suppress(RuntimeError):
            if self.store is not None and self.store.check([f"ended/{rank}"]):
                told: list[Any] = json.loads(self.store.get(f"ended/{rank}"))
                return told
        return None

    def _end_in_peace(self) -> None:
        """A launcher ends all ranks when one has ended; this one is about to, and says why first.

        It is given :data:`REASON` seconds for that: who handles the error and goes on can still be ended.
        """
        if self.count > 1 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _end_later)

    def _ending(self, lost: RankLost) -> BaseException:
        """Why another rank has ended: what it told, or that it is gone; else what is known here."""
        self._end_in_peace()
        end = time.monotonic() + REASON
        others = [rank for rank in range(self.count) if rank != self.control.rank]
        while time.monotonic() < end:
            gone = self._gone()  # before its reason is looked for, which it may just have told
            reasons = {rank: told for rank in others if (told := self._told(rank)) is not None}
            if reasons:
                rank, told = next(iter(reasons.items()))
                return _of(rank, told)
            if gone:
                pid = self._processes[gone[0]][1]
                lost = RankLost(f"rank {gone[0]} was lost: its process {pid} ended without a reason")
                # Where the first rank is gone, the next one speaks.
                lost.speaks = set(range(self.control.rank)) <= set(gone)
                break
            time.sleep(0.05)
        lost.elsewhere = True
        return lost

    def _gone(self) -> list[int]:
        """Ranks on this machine whose process has ended."""
        here = socket.gethostname()
        return [rank for rank, (host, pid) in enumerate(self._processes) if host == here and not _runs(pid)]


@contextmanager
def joined() -> Iterator[Job]:
    """The job that the environment describes (``WORLD_SIZE``, ``RANK``, …); without one, a single process."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
        yield Job.alone()
        return
    if dist.is_initialized():
        raise UserError("torch.distributed has begun already; expected gar to begin it, or Job(Ranks(), …)")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    try:
        store, rank, world = next(iter(rendezvous("env://", timeout=TIMEOUT)))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"the ranks cannot reach each other ({reason}); expected torchrun's environment"
        ) from error
    job = Job(Ranks.alone(), Ranks(), store)
    left = False
    try:
        with job.explained():
            yield job
        left = True
    finally:
        # A GPU may wait for ever for what a failed rank does not send.
        if left or not job.ranks.uses_gpus:
            job.leave()


def device_of_rank(name: str, job: Job) -> str:
    """The device of this rank for the configuration's ``device``: one GPU a rank of a machine."""
    if job.count == 1 or name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return name
    local, here = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if name not in ("auto", "cuda"):
        raise UserError(
            f"device is {name!r}; expected auto, cuda or cpu on several ranks: each takes its own GPU"
        )
    if here and local >= here:
        raise UserError(
            f"rank {job.control.rank} has no CUDA device of its own: {here} are here; "
            f"expected {here} processes on this machine, or device=cpu"
        )
    return f"cuda:{local}"


def _end_later(number: int, frame: FrameType | None) -> None:
    """End the process as a signal does, in a while."""
    timer = threading.Timer(REASON, os._exit, (128 + number,))
    timer.daemon = True
    timer.start()


def _described(error: Exception) -> list[Any]:
    """Kind and message of an error, as it is told to other ranks."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return [isinstance(error, UserError), text]


def _of(rank: int, told: Sequence[Any]) -> BaseException:
    users, text = told
    if users is None:
        return KeyboardInterrupt()
    error: Any = UserError(f"rank {rank}: {text}") if users else RankFailed(rank, text)
    error.elsewhere = True
    return error  # type: ignore[no-any-return]


def _sum_of_bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(-1).view(kinds[tensor.element_size()]).sum(dtype=torch.int64)


def _runs(pid: int) -> bool:
    """Whether a process of this machine has not ended; one that nobody has waited for yet has."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return status.rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
