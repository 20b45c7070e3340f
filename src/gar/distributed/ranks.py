"""The processes that make one update together, and the two ways in which bytes go between them.

Everything that is exchanged is moved, never reduced, by the library below: sums are taken here, each in one
place and in the order of the ranks. So every rank has the same bits of a sum, whatever the backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

#: Its name in newer versions of torch, and in older ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class RankLost(RuntimeError):
    """Another rank does not answer: it was killed, it failed, or its machine is out of reach.

    ``elsewhere``: the reason has been looked for; ``speaks``: no rank before this one is left to tell it.
    """

    elsewhere = speaks = False


class Ranks:
    """The ranks of one process group, by default of the whole job; without one there is a single rank.

    ``bytes`` counts what this rank has sent to others. Tensors may lie anywhere; they travel on the group's
    own kind of device (CUDA for nccl, the CPU for gloo).
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank, self.count = (dist.get_rank(group), dist.get_world_size(group)) if joined else (0, 1)
        self.bytes = 0
        parts = dist.get_backend_config(group).split(",") if joined else []
        # gloo is said to take CUDA tensors, but not in every exchange.
        self._cuda = any(part.startswith("cuda:") and not part.endswith(":gloo") for part in parts)
        self._cpu = not parts or any(part.startswith("cpu:") for part in parts)

    @classmethod
    def alone(cls) -> Self:
        """One rank that exchanges nothing, whatever torch.distributed has begun."""
        ranks = cls.__new__(cls)
        ranks.group, ranks.rank, ranks.count, ranks.bytes = None, 0, 1, 0
        ranks._cuda, ranks._cpu = False, True
        return ranks

    @property
    def uses_gpus(self) -> bool:
        """Whether tensors can travel from GPU to GPU."""
        return self._cuda

    def __repr__(self) -> str:
        return f"Ranks(rank {self.rank} of {self.count})"

    def gather(self, x: Tensor) -> Tensor:
        """``x`` of every rank, [W, *x.shape]; all have the same shape and dtype. Without a gradient."""
        x = x.detach()
        if self.count == 1:
            return x.unsqueeze(0)
        own = self._bytes(x)
        everyone = own.new_empty(self.count * len(own))
        with _answering():
            _all_gather(everyone, own, group=self.group)
        self.bytes += len(own) * (self.count - 1)
        return everyone.to(x.device).view(x.dtype).view(self.count, *x.shape)

    def swap(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Part r goes to rank r; returns what every rank has for this one, of the given ``shapes``.

        All parts have one dtype and device. Parts may be empty, and of different sizes.
        """
        like = parts[0]
        if self.count == 1:
            return [like.detach()]
        sent = [self._bytes(part.detach()) for part in parts]
        sizes = [like.element_size() * torch.Size(shape).numel() for shape in shapes]
        received = sent[0].new_empty(sum(sizes))
        with _answering():
            dist.all_to_all_single(received, torch.cat(sent), sizes, list(map(len, sent)), group=self.group)
        self.bytes += sum(len(part) for rank, part in enumerate(sent) if rank != self.rank)
        # Every piece is a whole number of elements, so each begins at an aligned place.
        found = (
            received.to(like.device).view(like.dtype).split([size // like.element_size() for size in sizes])
        )
        return [piece.view(shape) for piece, shape in zip(found, shapes, strict=True)]

    def turn(self, x: Tensor) -> Tensor:
        """``x`` [W, ...]: row r goes to rank r; returns what every rank has for this one, alike."""
        x = x.detach()
        if self.count == 1:
            return x
        sent = self._bytes(x)
        received = torch.empty_like(sent)
        with _answering():
            dist.all_to_all_single(received, sent, group=self.group)
        self.bytes += len(sent) // self.count * (self.count - 1)
        return received.to(x.device).view(x.dtype).view(x.shape)

    def copy(self, tensors: Iterable[Tensor], source: int = 0) -> None:
        """Every tensor takes, in place, the values of rank ``source``; shapes and dtypes are the same."""
        if self.count == 1:
            return
        for tensor in tensors:
            own = self._bytes(tensor.detach())
            with _answering():
                dist.broadcast(own, group=self.group, group_src=source)
            if self.rank == source:
                self.bytes += len(own) * (self.count - 1)
            else:
                tensor.detach().copy_(own.to(tensor.device).view(tensor.dtype).view(tensor.shape))

    def tell(self, thing: T, source: int = 0) -> T:
        """What rank ``source`` has, on every rank; pickled, and not counted: for what is small."""
        if self.count == 1:
            return thing
        things = [thing]
        with _answering():
            dist.broadcast_object_list(things, group=self.group, group_src=source)
        return things[0]

    def collect(self, thing: T) -> list[T]:
        """What every rank has, on every rank; pickled, and not counted: for what is small."""
        if self.count == 1:
            return [thing]
        things: list[Any] = [None] * self.count
        with _answering():
            dist.all_gather_object(things, thing, group=self.group)
        return things

    def _bytes(self, x: Tensor) -> Tensor:
        """The bytes of a tensor, where the group takes them."""
        flat = x.contiguous().view(-1)
        if (flat.is_cuda and not self._cuda) or (not flat.is_cuda and not self._cpu):
            flat = flat.to("cuda" if self._cuda else "cpu")
        return flat.view(torch.uint8)


@contextmanager
def _answering() -> Iterator[None]:
    """What the backends raise when a peer is gone or too late, as :class:`RankLost`."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise RankLost(f"another rank does not answer ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
