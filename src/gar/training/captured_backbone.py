"""Updates that run the backbone on a GPU, in blocks: :mod:`gar.training.captured` from token ids on.

An update of a backbone is a thousand kernels, which take the host longer than the GPU. Where nothing in it
waits for the device it is replayed as a CUDA graph; elsewhere (float32 products of full FFN experts, whose
sizes the host has to know) kernels are launched one by one, without a look at the losses between updates.

The dropout of a trained backbone depends on the sizes of its tensors. So groups keep their sizes here, and
texts the widths that they have in :meth:`Updater.run`: captured or not, masks are the same.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gar.data.batches import Group
from gar.errors import UserError
from gar.features.sources import RawSource
from gar.methods import GroupWeights, Share
from gar.observation import Grouping
from gar.training.captured import CapturedUpdates, PassShape, RankShape, Shape
from gar.training.dropout import keep_mask
from gar.training.gradients import Forward
from gar.training.updater import Outcome, Updater, task_parts

_log = logging.getLogger(__name__)


class CapturedBackbone(CapturedUpdates):
    """:class:`CapturedUpdates` of a backbone that is trained, or frozen and not cached."""

    #: Of some ten milliseconds each.
    stride: ClassVar[int] = 8

    @classmethod
    def of(cls, updater: Updater) -> Self | None:
        model, config, source = updater.model, updater.config, updater.source
        able = config.capture and config.method.capturable and config.observation.unit == "group"
        # What goes between ranks of one's own kind only: gloo takes it through the host.
        able = able and (updater.job.count == 1 or updater.job.ranks.uses_gpus)
        if not able or model.device.type != "cuda" or not isinstance(source, RawSource):
            return None
        with model.computing():
            fixed = model.bank.experts.capturable
        # A checkpointed layer keeps the generator's state on the host.
        fixed = fixed and not model.config.gradient_checkpointing
        return cls(updater, source, fixed)

    def __init__(self, updater: Updater, source: RawSource, graphs: bool = True) -> None:
        super().__init__(updater, source.table, graphs)
        self._source, self._tokens = source, source.table
        self._groupings: dict[tuple[int, ...], Grouping] = {}
        self._begun, self._number = False, 0
        modules = (module for module in updater.model.modules() if isinstance(module, nn.Embedding))
        self._embeddings = {module.weight for module in modules}

    def block(self, start: int, stop: int) -> Iterator[Outcome]:
        if start < stop and not self._begun:
            # The first one finds out how much memory there is, and lets libraries begin.
            self._begun = True
            with self._on_stream():
                outcome = self.updater.run(start)
            yield outcome
            start += 1
        yield from super().block(start, stop)

    def _shape(self, groups: Sequence[Group], share: Share | None = None) -> Shape:
        shape = super()._shape(groups)._replace(width=0)
        if share is None:
            return shape._replace(passes=self._passes(groups))
        ranks = tuple(
            RankShape(tuple(numbers), self._passes([groups[m] for m in numbers])) for numbers in share.numbers
        )
        shape = shape._replace(passes=ranks[share.ranks.rank].passes, ranks=ranks)
        self._shares.setdefault(shape, share)
        return shape

    def _passes(self, groups: Sequence[Group]) -> tuple[PassShape, ...]:
        return tuple(
            PassShape(
                tuple((group.task, len(group)) for group in part), *self._source.shape(task_parts(part))
            )
            for part in self.updater.split(groups)
        )

    def _tasks_of(self, shape: Shape) -> list[int]:
        return [task for part in shape.passes for task, _ in part.groups]

    @cached_property
    def _distinct(self) -> int:
        """Different tokens in all texts."""
        return len(np.unique(np.concatenate([np.unique(split.ids) for split in self._source.splits])))

    def _most_rows(self, shape: Shape, parameter: nn.Parameter) -> int:
        if parameter not in self._embeddings:
            return super()._most_rows(shape, parameter)
        every = [part for rank in shape.ranks for part in rank.passes]
        tokens = sum(part.width * size for part in every for _, size in part.groups)
        return 1 + min(tokens, self._distinct)  # and the padding's

    def _slots(self, groups: Sequence[Group]) -> NDArray[np.int64]:
        return np.arange(sum(map(len, groups)))

    def _fits_graph(self, shape: Shape) -> bool:
        counts = [len(rank.passes) for rank in shape.ranks] or [len(shape.passes)]
        if shape.ranks and (0 in counts or self.updater.overlapped is None):
            # A rank without groups is told through the host what those of others are like; a method's own
            # backward may exchange through it.
            return False
        # A graph takes one seed; every pass of a trained backbone has its own.
        return self.graphs and (max(counts) == 1 or not self.updater.model.config.trainable)

    def _launch(self, shape: Shape, number: int) -> None:
        self._number = number
        with self.updater.backbone_stream(number, next(iter(self._numbers(shape)), 0)):
            super()._launch(shape, number)

    def _capture(self, shape: Shape) -> None:
        """Or give up capturing; several ranks, which all meet here, end."""
        torch.cuda.empty_cache()  # no memory is set free for a graph while it is captured
        failed = None
        try:
            super()._capture(shape)
        except RuntimeError as error:
            # The backbone goes through the host, or a graph takes too much memory. Nothing was computed yet.
            failed = str(error).partition("\n")[0]
        if self.updater.job.any(failed is not None):
            if self.updater.job.count > 1:
                raise UserError(
                    f"updates cannot be captured ({failed or 'on another rank'}); expected capture=false here"
                )
            _log.warning("updates are not captured from here on: %s", failed)
            self.graphs = False
            self._captured.pop(shape, None)
            torch.cuda.empty_cache()

    def _numbers(self, shape: Shape) -> Sequence[int]:
        """Of this rank's groups, counted over the update."""
        return shape.ranks[self.updater.job.ranks.rank].numbers if shape.ranks else range(sum(shape.groups))

    def _forwards(self, shape: Shape, counts: Tensor, reals: Tensor) -> list[Forward]:
        rows, words, _ = counts.split([self._rows, self._rows, self._groups])
        by_task, by_sample, _ = reals.to(self.updater.model.dtype).split([self._groups, self._groups, 1])
        forwards: list[Forward] = []
        numbers = self._numbers(shape)
        row = first = 0
        for part in shape.passes:
            here = slice(first, first + len(part.groups))
            sizes = tuple(size for _, size in part.groups)
            if sizes not in self._groupings:
                self._groupings[sizes] = Grouping.consecutive(sizes, self._device)
            weights = GroupWeights(
                self._groupings[sizes],
                by_task[here],
                by_sample[here],
                sum(shape.groups),
                self._tasks[shape][here],
                len(shape.groups),
                here=len(numbers),
            )
            of_pass = slice(row, row + sum(sizes))
            forwards.append(partial(self._pass, part, rows[of_pass], words[of_pass], weights, numbers[first]))
            row, first = of_pass.stop, here.stop
        return forwards

    def _pass(
        self, part: PassShape, rows: Tensor, words: Tensor, weights: GroupWeights, first: int
    ) -> tuple[Tensor, GroupWeights]:
        """:meth:`Updater.group_losses` of a pass from group ``first`` on, by rows of the table."""
        model, names = self.updater.model, self.updater.names
        runs = groupby(part.groups, key=lambda group: group[0])
        segments = [(names[task], sum(size for _, size in run)) for task, run in runs]
        units = model.site.dropout_shape(len(rows), part.width) if model.training else None
        keep = None if units is None else keep_mask(words.int(), units, model.site.dropout)
        # Around a graph's replay the stream is that of the update.
        capturing = self._stream is not None and torch.cuda.is_current_stream_capturing()
        stream = contextlib.nullcontext() if capturing else self.updater.backbone_stream(self._number, first)
        with stream:
            state = self._tokens.state(rows, part.width, part.padded)
            if self._source.rounding is not None:  # what it cannot hold shows in the losses
                state = state.to(self._device, self._source.rounding)
            state = state.to(self._device, model.dtype)
            losses = model.losses(state, segments, self._tokens.labels[rows], keep)
        return weights.grouping.mean(losses), weights


def updates_of(updater: Updater) -> Updater | CapturedUpdates:
    """What runs the updates of an updater best: captured, where they can be (key ``capture``)."""
    return CapturedUpdates.of(updater) or CapturedBackbone.of(updater) or updater
