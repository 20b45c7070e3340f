"""Gradients that are summed over ranks while the last backward of their update still runs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gar.distributed.exchange import BUCKET_BYTES, buckets, sum_bucket
from gar.distributed.ranks import Ranks


class OverlappedSum:
    """Sums the gradients of ``parameters`` over ranks, each bucket as soon as a backward has made it.

    An update is :meth:`begin`, :meth:`listening` around the backward of its last pass (a rank without passes
    leaves it out), :meth:`rest` and :meth:`end`. The sums are those of :func:`sum_gradients`, bit for bit.

    Exchanges must come in one order on all ranks: a bucket begins after the one before it, wherever its
    gradients come from. The first update tells which order a backward makes them in; its buckets begin at its
    :meth:`end`. ``parameters`` should be those that every pass reaches, and that nothing reaches after the
    passes; those that the first update shows to be otherwise are left to the caller. A gradient that changes
    after its sum began is a RuntimeError.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], ranks: Ranks, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.parameters, self.ranks, self._limit = list(parameters), ranks, bucket_bytes
        #: None before the first update has shown their order.
        self._buckets: list[list[nn.Parameter]] | None = None
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._stream: torch.cuda.Stream | None = None
        self._listens = False
        self.begin()
        owner = weakref.ref(self)

        def made(parameter: Tensor) -> None:
            found = owner()
            if found is not None and found._listens:
                found._made_one(parameter)  # type: ignore[arg-type]

        # Once, not at every update: two hundred take a millisecond.
        handles = [parameter.register_post_accumulate_grad_hook(made) for parameter in self.parameters]
        weakref.finalize(self, _remove, handles)

    def begin(self, early: bool = True) -> None:
        """Forget the update before. Without ``early`` no bucket begins before :meth:`rest`."""
        self._early = early
        self._begun = 0
        self._missing = [set(bucket) for bucket in self._buckets or []]
        #: Parameters whose gradient the last backward has made, in order.
        self._made: list[nn.Parameter] = []
        #: Gradients that should not change any more, with the versions that they have.
        self._noted: list[tuple[nn.Parameter, Tensor | None, int]] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The backward of the last pass runs in this block; what it raises for a lost rank passes through."""
        self._listens = True
        try:
            yield
        finally:
            self._listens = False

    def rest(self) -> None:
        """Begin all that has not begun; one without a gradient here counts as zero."""
        if self._buckets is None:
            self._note(self.parameters)
            return
        while self._begun < len(self._buckets):
            self._begin_next()

    def end(self) -> set[nn.Parameter]:
        """Parameters whose ``.grad`` is the sum, for what the current stream does from here on."""
        if self._buckets is None:
            self._learn()
        self.rest()
        if self._changed():
            raise RuntimeError(
                "a gradient changed after its sum over ranks had begun; expected one backward a pass, and "
                "nothing but routers in a router_loss"
            )
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._noted = []
        return set(self._bucket_of)

    def _made_one(self, parameter: nn.Parameter) -> None:
        self._made.append(parameter)
        if self._buckets is None or not self._early or parameter not in self._bucket_of:
            return
        self._missing[self._bucket_of[parameter]].discard(parameter)
        while self._begun < len(self._buckets) and not self._missing[self._begun]:
            self._begin_next()

    def _begin_next(self) -> None:
        assert self._buckets is not None
        bucket = self._buckets[self._begun]
        self._begun += 1
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        with self._beside(bucket[0].device):
            sum_bucket([parameter.grad for parameter in bucket if parameter.grad is not None], self.ranks)
        self._note(bucket)

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        """On a GPU this block is launched on a stream of its own, after what was launched before it.

        A collective makes the stream that calls it wait, not the host: the backward goes on. In a hook the
        current stream is the one that made the gradient. Temporary buffers belong to the stream of their own;
        gradients were allocated on the other one, and are not freed or written before that has waited
        (:meth:`end`): the allocator need not know that two streams use them.
        """
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            # Before the backward where both could run: others wait for what is sent.
            self._stream = torch.cuda.Stream(device, priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def _note(self, parameters: Sequence[nn.Parameter]) -> None:
        self._noted += [(parameter, parameter.grad, _version(parameter.grad)) for parameter in parameters]

    def _changed(self) -> set[nn.Parameter]:
        """Parameters whose gradient is no longer as it was noted."""
        return {p for p, grad, seen in self._noted if p.grad is not grad or _version(grad) != seen}

    def _learn(self) -> None:
        """Agree on buckets: in the order of a rank's backward what each rank's has made, then the others."""
        numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
        # More than once: a backward inside the backward, whose gradients are not whole when they come.
        late = {p for p, times in Counter(self._made).items() if times > 1} | self._changed()
        told = self.ranks.collect(([numbers[p] for p in self._made], {numbers[p] for p in late}))
        orders = [order for order, _ in told if order]
        unfit = set[int]().union(*(own for _, own in told))
        steady = [n for n in next(iter(orders), []) if n not in unfit and all(n in own for own in orders)]
        others = [n for n in numbers.values() if n not in unfit and n not in steady]
        self._buckets = [
            bucket
            for part in (steady, others)
            for bucket in buckets([self.parameters[n] for n in part], self._limit)
        ]
        self._bucket_of = {p: place for place, bucket in enumerate(self._buckets) for p in bucket}
        self._noted = []


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
