"""How many padded tokens a pass of an update takes: what the configuration says, or what fits the memory."""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from gar.config import Config
from gar.data.batches import Group
from gar.distributed import Job
from gar.features import Source
from gar.methods import GAR, GroupWeights
from gar.model import MultiTaskModel
from gar.training.failure import OutOfMemory
from gar.training.gradients import fill_gradients

#: ``auto`` for a trained backbone without CUDA: few enough for any machine, many enough for its caches.
TOKENS_ELSEWHERE = 2048
#: Share of the free memory that one pass may take. The rest is for what methods add (CAGrad's rows take up to
#: half of what is free) and for gaps between blocks.
SHARE = 0.5

T = TypeVar("T")


class _DoesNotFitElsewhere(Exception):
    """A pass of another rank ran out of memory."""


class Trained(Protocol):
    """What is looked at of an :class:`gar.training.Updater`."""

    model: MultiTaskModel
    source: Source
    config: Config
    parameters: list[nn.Parameter]
    optimizer: torch.optim.AdamW

    def group_losses(
        self, groups: Sequence[Group], number: int, total: int
    ) -> tuple[Tensor, GroupWeights]: ...


class PassLimit:
    """The key ``max_tokens_per_pass`` in force: ``tokens``, or None where an update is one pass.

    ``auto`` is settled before the first update: a trained backbone on CUDA is measured
    (:func:`fitting_tokens`), one elsewhere takes :data:`TOKENS_ELSEWHERE`, a frozen one has no limit. If
    update 0 runs out of memory all the same, the limit is halved, ``message`` says so, and the update is
    computed again: nothing has been stepped, and every random stream is a function of the update's number.
    ``record`` is told the limit as often as ``auto`` finds one. The ranks of a job have one limit, that
    of the smallest memory.
    """

    def __init__(
        self,
        key: int | Literal["auto"] | None,
        message: Callable[[str], None] | None = None,
        record: Callable[[int | None], None] | None = None,
        job: Job | None = None,
    ) -> None:
        self._job = job or Job.alone()
        self.auto, self.settled = key == "auto", key != "auto"
        self.tokens = None if key == "auto" else key
        self._message, self._record = message or (lambda line: None), record or (lambda tokens: None)

    def settle(self, updater: Trained) -> None:
        """Find what ``auto`` is; of a number, nothing."""
        if self.settled:
            return
        self.settled = True
        if updater.model.config.trainable:
            on_cuda = updater.model.device.type == "cuda"
            self.tokens = self._job.smallest(fitting_tokens(updater) if on_cuda else TOKENS_ELSEWHERE)
        self._record(self.tokens)

    def halving(self, compute: Callable[[Callable[[], None]], T], largest: Callable[[], int | None]) -> T:
        """What ``compute`` returns, under a lower limit each time that it runs out of memory.

        ``largest()`` counts the padded tokens of the largest pass under the limit as it is, None where no
        pass can be split. ``compute`` calls its argument once its passes are over: a rank whose passes fit
        then learns of others' that do not.
        """
        while True:
            asked = False

            def ready() -> None:
                nonlocal asked
                asked = True
                if self._job.any(False):
                    raise _DoesNotFitElsewhere

            tokens, reason = None, ""
            try:
                return compute(ready)
            except torch.OutOfMemoryError as error:
                tokens, reason = largest(), _first_line(error)
                if not self.auto or tokens is None or (asked and self._job.count > 1):
                    raise
            except _DoesNotFitElsewhere:
                pass
            # Outside of the handler: the error's traceback holds the tensors of the failed pass.
            if not asked:
                self._job.any(True)
            tokens = self._job.smallest(tokens)
            assert tokens is not None
            reason = reason or "on another rank"
            release_memory()
            self.tokens = power_of_two_below(tokens)
            self._message(
                f"max_tokens_per_pass: a pass of {tokens} padded tokens does not fit ({reason}); "
                f"the first update is tried again with {self.tokens}"
            )
            self._record(self.tokens)

    def explaining(self, outcomes: Iterable[T], first: int, model: MultiTaskModel) -> Iterator[T]:
        """The outcomes of updates ``first``, …, as they come; running out of memory is told in one line."""
        done = first
        try:
            for outcome in outcomes:
                done += 1
                yield outcome
        except torch.OutOfMemoryError as error:
            # The dropout of a trained backbone keeps a begun run to its split.
            where = " in a new run" if model.draws_by_pass and done else ""
            raise OutOfMemory(
                f"out of memory on {model.device} ({_first_line(error)}); expected more free memory, or a "
                f"smaller max_tokens_per_pass ({'none' if self.tokens is None else self.tokens} now){where}; "
                "where one group does not fit, a smaller mixture.group_size or "
                "backbone.gradient_checkpointing: true",
                done + 1,
            ) from error


def fitting_tokens(updater: Trained) -> int:
    """Padded tokens of a pass that fits the free memory of a CUDA device: a power of two.

    One and two groups of the longest examples go forward and backward; the difference of their peaks is what
    a group takes, the rest is fixed. Both are computed under GAR, whose observations take more than any other
    method's terms, so that the result is the same for every method. It is never more than the least power of
    two that holds a whole update: beyond that, more memory is the same split.
    """
    device, parameters = updater.model.device, updater.parameters
    group = longest_group(updater)
    tokens = len(group) * int(updater.source.lengths[group.task][group.examples].max())

    def peak(count: int) -> int:
        _fill(updater, [group] * count)
        _forget(updater)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _fill(updater, [group] * count)
        taken = torch.cuda.max_memory_allocated(device) - before
        _forget(updater)
        return taken

    ceiling = 1 << (whole_update(updater) - 1).bit_length()
    try:
        one = peak(1)
        two = peak(2)
    except torch.OutOfMemoryError:  # the update itself says whether one group fits
        _forget(updater)
        release_memory()
        return min(ceiling, power_of_two_below(2 * tokens))
    slope = max(1, two - one) / tokens
    # AdamW's two moments come with the first step.
    moments = 0 if updater.optimizer.state else sum(2 * p.nbytes for p in parameters)
    fixed = moments + max(0, 2 * one - two)
    room = SHARE * (_free(device) - fixed)
    return min(ceiling, power_of_two_below(max(tokens, int(room / slope)) + 1))


def longest_group(updater: Trained) -> Group:
    """A full group of the longest examples of one task."""
    lengths = updater.source.lengths
    task = max(range(len(lengths)), key=lambda t: int(lengths[t].max()))
    rows = np.argsort(-lengths[task], kind="stable")[: updater.config.mixture.group_size]
    return Group(0, task, np.resize(rows, updater.config.mixture.group_size), 1.0, 1.0)


def whole_update(updater: Trained) -> int:
    """Padded tokens of the largest possible update."""
    lengths, batch = updater.source.lengths, updater.config.mixture.batch_size
    rows = sum(min(batch, len(of_task)) for of_task in lengths)
    return rows * max(int(of_task.max()) for of_task in lengths)


def power_of_two_below(tokens: int) -> int:
    """The largest power of two below ``tokens``, 1 at least.

    >>> [power_of_two_below(n) for n in (1, 2, 3, 4, 5, 1000)]
    [1, 1, 2, 2, 4, 512]
    """
    return 1 << max(0, (tokens - 1).bit_length() - 1)


def _fill(updater: Trained, groups: Sequence[Group]) -> None:
    model, observation = updater.model, updater.config.observation.backward
    forwards = [lambda: updater.group_losses(groups, 0, len(groups))]
    with model.products():
        fill_gradients(GAR(), forwards, updater.parameters, [model.bank], observation=observation)


def _forget(updater: Trained) -> None:
    for parameter in updater.parameters:
        parameter.grad = None


def _free(device: torch.device) -> int:
    # What torch's allocator holds and does not use is free for us.
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def release_memory() -> None:
    """Give back what this process holds and does not use, of GPUs and of the host: other processes need it.

    torch keeps freed GPU memory, and glibc the heap that reading data and models left in pieces.
    """
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200].partition(". GPU")[0]
