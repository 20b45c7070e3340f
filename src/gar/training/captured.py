"""Updates of cached features on a GPU: planned in blocks, replayed as CUDA graphs, read back once a block.

A frozen update is some hundred small kernels, which a CPU cannot launch as fast as a GPU runs them. Here the
host plans a block of updates (rows, group sizes, weights, dropout words, learning rates) as one table on the
device; the update itself, from gathering features to AdamW, reads its line of that table and writes its
losses and norm into another, so that nothing passes between host and device inside a block.

Groups are padded to one size and examples to a few widths, so that few shapes occur. A shape is launched
kernel by kernel when it is first met and captured at the second time; both run the same kernels. Where a loss
or the norm is not finite, that update and all later ones of the block leave the weights as they are, and
:meth:`Updater.run` then repeats it to say where it went wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_

from gar.data.batches import Group
from gar.features.sources import CachedSource, Table, TokenTable, width_step
from gar.methods import GroupWeights, Share, Update
from gar.observation import Grouping
from gar.training.checkpoint import state_tensors
from gar.training.dropout import keep_mask, row_words
from gar.training.gradients import Forward, fill_gradients, total_norm
from gar.training.memory import whole_update
from gar.training.updater import Outcome, Updater

#: Updates between two looks at the device: what a signal or a failure has to wait for, some 0.1 s.
BLOCK = 64
#: Shapes that are captured; later ones are rare, and every graph keeps some memory.
GRAPHS = 64


class PassShape(NamedTuple):
    """A pass of a trained backbone: task and size of its groups, padded tokens, whether any is padding."""

    groups: tuple[tuple[int, int], ...]
    width: int
    padded: bool


class RankShape(NamedTuple):
    """The groups of one rank, counted over the update, and its passes."""

    numbers: tuple[int, ...]
    passes: tuple[PassShape, ...]


class Shape(NamedTuple):
    """What decides the sizes of all tensors of an update: the groups of every task, and padded tokens.

    ``passes`` are this rank's; where there are several, ``ranks`` has those of all: the same on each of them.
    """

    groups: tuple[int, ...]
    width: int
    passes: tuple[PassShape, ...] = ()
    ranks: tuple[RankShape, ...] = ()


class Plan(NamedTuple):
    """A block of updates, one line each, as host and device need it."""

    start: int
    groups: list[list[Group]]
    shapes: list[Shape]
    #: Of this rank's groups, per padded row its row of the table and its dropout word, per group its size:
    #: int64 [N, 2 R + M].
    counts: NDArray[np.int64]
    #: Task weight and sample weight of each of them, and the learning rate: float64 [N, 2 M + 1].
    reals: NDArray[np.float64]


class CapturedUpdates:
    """The updates of an :class:`Updater` in blocks; ``graphs=False`` launches the same kernels one by one."""

    stride: ClassVar[int] = BLOCK

    @classmethod
    def of(cls, updater: Updater) -> CapturedUpdates | None:
        """For an updater whose updates can be captured; None where they cannot."""
        model, config = updater.model, updater.config
        able = config.capture and config.method.capturable and model.bank.experts.capturable
        able = able and config.observation.unit == "group"  # which others count, the host has to know
        able = able and updater.job.count == 1  # groups of other ranks are no part of its lines
        if not able or model.device.type != "cuda" or not isinstance(updater.source, CachedSource):
            return None
        limit = config.max_tokens_per_pass
        if isinstance(limit, int) and whole_update(updater) > limit:  # captured updates are one pass
            return None
        return None if updater.source.table is None else cls(updater, updater.source.table)

    def __init__(self, updater: Updater, table: Table | TokenTable, graphs: bool = True) -> None:
        self.updater, self.table, self.graphs = updater, table, graphs
        self._size = updater.config.mixture.group_size
        self._groups = sum(updater.schedule.full_groups)
        self._rows = self._groups * self._size
        longest = max(int(lengths.max()) for lengths in updater.source.lengths)
        self._step = width_step(longest) if longest > 1 else 1
        self._device = device = updater.model.device
        self._counts = torch.zeros(BLOCK, 2 * self._rows + self._groups, dtype=torch.int64, device=device)
        self._reals = torch.zeros(BLOCK, 2 * self._groups + 1, dtype=torch.float64, device=device)
        self._told = torch.zeros(BLOCK, self._groups + 1, dtype=torch.float64, device=device)
        self._line = torch.zeros(1, dtype=torch.int64, device=device)
        self._rate = torch.zeros((), device=device)
        #: 1 from the first update on that is not finite: AdamW then changes nothing.
        self._skip = updater.optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
        self._tasks: dict[Shape, Tensor] = {}
        self._captured: dict[Shape, torch.cuda.CUDAGraph] = {}
        #: Where the groups of several ranks are, and what this one sends to others.
        self._shares: dict[Shape, Share] = {}
        self._sent: dict[Shape, int] = {}
        self._stream = _side_stream(device) if device.type == "cuda" else None
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._ahead: Plan | None = None

    @property
    def captured(self) -> int:
        """Shapes whose updates are replayed."""
        return len(self._captured)

    # ------------------------------------------------------------------ the host's part

    def block(self, start: int, stop: int) -> Iterator[Outcome]:
        """What updates ``start`` to ``stop - 1`` tell, in order; raises like :meth:`Updater.run`."""
        while start < stop:
            plan = self._plan(start, min(start + BLOCK, stop))
            count = len(plan.groups)
            with self._on_stream():
                self._launch_all(plan)
                # While the device works. The next block is mostly as long as this one.
                stop_ahead = min(start + 2 * count, self.updater.total)
                self._ahead = self._plan(start + count, stop_ahead) if start + count < stop_ahead else None
                self.updater.job.wait(self._device)
                told = self._told[:count].cpu().numpy()
            finite = np.isfinite(told).all(1)
            good = count if finite.all() else int(finite.argmin())
            for groups, values, reals in zip(plan.groups[:good], told, plan.reals, strict=False):
                losses, norm = values[: len(groups)].tolist(), float(values[-1])
                yield self.updater.outcome(groups, losses, norm, float(reals[-1]))
            start += good
            if good < count:
                # The weights are those before this update. Repeated, it says what is not finite; should it be
                # so by rounding alone, training goes on behind it.
                self._skip.zero_()
                yield self.updater.run(start)
                start += 1

    def _plan(self, start: int, stop: int) -> Plan:
        ahead, count = self._ahead, stop - start
        if ahead is not None and (ahead.start, len(ahead.groups)) == (start, count):
            return ahead
        plan = Plan(
            start,
            [self.updater.schedule.groups(number) for number in range(start, stop)],
            [],
            np.zeros((count, self._counts.shape[1]), np.int64),
            np.zeros((count, self._reals.shape[1])),
        )
        for i, every in enumerate(plan.groups):
            groups, share = self.updater.share(every)
            plan.shapes.append(self._shape(every, share))
            rows, words, sizes = np.split(plan.counts[i], [self._rows, 2 * self._rows])
            task_weights, sample_weights, rate = np.split(plan.reals[i], [self._groups, 2 * self._groups])
            rate[:] = self.updater.learning_rate(start + i)
            if not groups:
                continue
            slots = self._slots(groups)
            # A row that pads its group is the group's first one once more.
            rows[: len(groups) * self._size] = np.repeat(
                [self.table.first[group.task] + group.examples[0] for group in groups], self._size
            )
            rows[slots] = self.table.rows([(group.task, group.examples) for group in groups])
            words[slots] = row_words(groups, start + i, self.updater.seed)
            sizes[: len(groups)] = [len(group) for group in groups]
            task_weights[: len(groups)] = [group.task_weight for group in groups]
            sample_weights[: len(groups)] = [group.sample_weight for group in groups]
        return plan

    def _shape(self, groups: Sequence[Group], share: Share | None = None) -> Shape:
        lengths = self.updater.source.lengths
        longest = max(int(lengths[group.task][group.examples].max()) for group in groups)
        counts = np.bincount([group.task for group in groups], minlength=len(lengths))
        return Shape(tuple(counts.tolist()), self._step * math.ceil(longest / self._step))

    def _slots(self, groups: Sequence[Group]) -> NDArray[np.int64]:
        """Where the examples of the groups lie among padded rows."""
        return np.concatenate([m * self._size + np.arange(len(group)) for m, group in enumerate(groups)])

    # ------------------------------------------------------------------ launching

    def _launch_all(self, plan: Plan) -> None:
        for table, values in ((self._counts, plan.counts), (self._reals, plan.reals)):
            host = torch.from_numpy(values)
            host = host.pin_memory() if self._device.type == "cuda" else host
            table[: len(values)].copy_(host, non_blocking=True)
        self._line.zero_()
        for number, shape in enumerate(plan.shapes, plan.start):
            self._launch(shape, number)

    def _launch(self, shape: Shape, number: int) -> None:
        new = shape not in self._tasks
        captures = not new and shape not in self._captured and self._fits_graph(shape)
        captures = captures and len(self._captured) < GRAPHS
        if new or captures:  # both wait for the device, on which updates may wait for a rank that is lost
            self.updater.job.wait(self._device)
        if new:
            self._tasks[shape] = torch.tensor(self._tasks_of(shape), dtype=torch.int64, device=self._device)
        if captures:
            self._capture(shape)
        if shape in self._captured:
            self._captured[shape].replay()
        else:
            self._update(shape)
        self.updater.sent += self._sent[shape]

    def _capture(self, shape: Shape) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode=self._errors)
        failed: BaseException | None = None
        try:
            self._update(shape)
        except BaseException as error:
            failed = error
        try:
            graph.capture_end()
        except RuntimeError as error:
            failed = failed or error
            _end_failed_capture(self._device, self._pool)
        if failed is not None:
            raise failed
        self._captured[shape] = graph

    @property
    def _errors(self) -> str:
        """Whose calls end a capture: threads of NCCL's ask at any time whether a kernel has ended."""
        return "global" if self.updater.job.count == 1 else "thread_local"

    def _tasks_of(self, shape: Shape) -> list[int]:
        """The task of each of this rank's groups."""
        return [task for task, count in enumerate(shape.groups) for _ in range(count)]

    def _fits_graph(self, shape: Shape) -> bool:
        """Whether updates of a shape may be captured."""
        return self.graphs

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Everything of a block runs on one stream: a graph cannot be captured on the default one."""
        if self._stream is None:
            yield
            return
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            yield
        outer.wait_stream(self._stream)

    # ------------------------------------------------------------------ the device's part

    def _update(self, shape: Shape) -> None:
        """The update of the next line; the host has to know no tensor's size or value."""
        updater, optimizer = self.updater, self.updater.optimizer
        counts = self._counts.index_select(0, self._line).squeeze(0)
        reals = self._reals.index_select(0, self._line).squeeze(0)
        rate = reals[-1]
        before = updater.job.ranks.bytes
        if updater.overlapped is not None:
            updater.overlapped.begin()
        with updater.model.products():
            update = fill_gradients(
                updater.method,
                self._forwards(shape, counts, reals),
                updater.parameters,
                [updater.model.bank],
                observation=updater.config.observation.backward,
                state=updater.state,
                whole=updater.whole,
                share=self._shares.get(shape),
                overlapped=updater.overlapped,
                most_rows=functools.partial(self._most_rows, shape),
            )
        losses = update.losses.double()  # between ranks an exchange
        norm = total_norm([p.grad for p in updater.parameters if p.grad is not None])
        told = torch.cat([functional.pad(losses, (0, self._groups - len(losses))), norm.double()[None]])
        self._told.index_copy_(0, self._line, told[None])
        # What is not finite is not 0 when multiplied by 0.
        self._skip.add_((told.sum() * 0).ne(0)).clamp_(max=1)
        clip_grads_with_norm_(updater.parameters, updater.config.optimizer.clip, norm)
        optimizer.param_groups[0]["lr"] = self._rate.copy_(rate)
        optimizer.step()
        with torch.no_grad():
            self._after_step(update)
        self._line.add_(1)
        self._sent[shape] = updater.job.ranks.bytes - before

    def _most_rows(self, shape: Shape, parameter: nn.Parameter) -> int:
        """Rows of a parameter's gradient that are not zero after an update of this shape, at most."""
        return len(parameter) if parameter.dim() else 1

    def _forwards(self, shape: Shape, counts: Tensor, reals: Tensor) -> list[Forward]:
        """The passes of an update, from its line of the two tables."""
        m = sum(shape.groups)
        rows, words, sizes = counts.split([self._rows, self._rows, self._groups])
        task_weights, sample_weights, _ = reals.split([self._groups, self._groups, 1])
        weights = GroupWeights(
            Grouping.padded(sizes[:m], self._size),
            task_weights[:m].to(self.updater.model.dtype),
            sample_weights[:m].to(self.updater.model.dtype),
            m,
            self._tasks[shape],
            len(shape.groups),
        )
        count = m * self._size
        return [lambda: (self._losses(shape, rows[:count], words[:count], weights.grouping), weights)]

    def _losses(self, shape: Shape, rows: Tensor, words: Tensor, grouping: Grouping) -> Tensor:
        """The groups' mean losses [M]; rows that pad a group route nothing and lose nothing."""
        model = self.updater.model
        assert isinstance(self.table, Table)
        counted = torch.arange(self._size, device=self._device) < grouping.sizes.unsqueeze(1)
        counted = counted.flatten()
        state = self.table.state(rows, shape.width).to(self._device, model.dtype)
        state = dataclasses.replace(state, mask=state.mask & counted.unsqueeze(1), rows=counted)
        units = model.site.dropout_shape(len(rows), shape.width) if model.training else None
        keep = None if units is None else keep_mask(words.int(), units, model.site.dropout)
        sizes = [count * self._size for count in shape.groups]
        segments = [(name, size) for name, size in zip(self.updater.names, sizes, strict=True) if size]
        losses = model.losses(state, segments, self.table.labels[rows], keep)
        return grouping.mean(losses.masked_fill(~counted, 0))

    def _after_step(self, update: Update) -> None:
        """The method's own change of its state, undone where the step was."""
        kept = list(state_tensors(self.updater.state).values())
        if (bias := self.updater.model.bank.router.selection_bias) is not None:
            kept.append(bias)
        before = [tensor.clone() for tensor in kept]
        self.updater.method.after_step(update)
        for tensor, old in zip(kept, before, strict=True):
            tensor.copy_(torch.where(self._skip > 0, old, tensor))


def _end_failed_capture(device: torch.device, pool: Any) -> None:
    """Undo what torch leaves of a capture that CUDA refused to end.

    Its generator would go on counting for a graph, and refuse every dropout outside of one; memory would stay
    with the graph. Only the first has a public way out.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())
    with contextlib.suppress(AttributeError, RuntimeError):
        torch.cuda.memory._cuda_endAllocateToPool(index, pool)  # type: ignore[attr-defined]
        torch.cuda.memory._cuda_releasePool(index, pool)  # type: ignore[attr-defined]


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all runs of a process: what cuBLAS keeps for a stream (64 MB on an H200) stays."""
    return torch.cuda.Stream(device)
