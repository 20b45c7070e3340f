"""One update, whole: forwards, the method's contributions, clip, step; nothing asks which method it is."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import AdamW

from gar.config import Config, OptimizerConfig
from gar.data.batches import Group, Updates, passes
from gar.distributed import Job
from gar.distributed.exchange import has_few_rows
from gar.distributed.overlap import OverlappedSum
from gar.errors import UserError
from gar.features.sources import Part, Source
from gar.methods import GroupWeights, Share, Update
from gar.model import MultiTaskModel
from gar.observation import Grouping, WholeGradients
from gar.seeds import derive_seed
from gar.training.checkpoint import state_tensors
from gar.training.dropout import keep_mask, row_words
from gar.training.failure import TrainingFailure as TrainingFailure
from gar.training.gradients import fill_gradients, total_norm
from gar.training.memory import PassLimit
from gar.training.rows import ChosenRows

#: Padded tokens that take about as long as the fixed cost of one more pass, by device type.
PASS_COST = {"cpu": 512, "cuda": 16384}
ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class Outcome:
    """What one update tells: mean losses of groups and of tasks, the norm before the clip, the rate."""

    losses: list[float]
    tasks: dict[str, float]
    gradient_norm: float
    learning_rate: float


class Updater:
    """THE optimizer update of a run: what the loop runs, the benchmark times and the tests check.

    It owns what goes from update to update beside the weights: the optimizer and the method's own state.
    ``names`` are the tasks of the source's splits, in order. ``total`` is the update budget, ``schedule``
    the groups of every update, ``limit`` what a pass may take (default: what the configuration says). For a
    seed and a limit, batches and dropout are the same whatever the method. Each rank of a ``job`` has some
    of the groups, and makes the same step.
    """

    #: Updates that best go together in one :meth:`block`.
    stride: ClassVar[int] = 1

    def __init__(
        self,
        model: MultiTaskModel,
        source: Source,
        config: Config,
        names: Sequence[str],
        limit: PassLimit | None = None,
        job: Job | None = None,
    ) -> None:
        self.model, self.source, self.config, self.names = model, source, config, list(names)
        self.job = job or Job.alone()
        self.limit = limit or PassLimit(config.max_tokens_per_pass, job=self.job)
        self.method, self.seed = config.method, config.seed
        if self.job.count > 1 and not self.method.spreads:
            raise UserError(
                f"method {self.method.name} has its own backward or finish and does not say that it spreads "
                "over ranks; expected one process, or a property spreads that is true where it is exact"
            )
        sizes = [len(lengths) for lengths in source.lengths]
        mixture = config.mixture
        self.schedule = Updates(self.names, sizes, mixture.batch_size, mixture.group_size, self.seed)
        self.total = total_updates(config.optimizer, self.schedule)
        self.parameters = model.trainable_parameters()
        #: Bytes that this rank has sent in updates.
        self.sent = 0
        self.optimizer = make_optimizer(model, config.optimizer)
        with _stream(model.device, self.seed, "method"):
            self.state = self.method.initial_state(model)
        #: Sums gradients over ranks while a backward still runs.
        self.overlapped: OverlappedSum | None = None
        if self.job.count > 1 and self.method.one_backward:
            # A router's gradient ends after the passes; not every pass reaches every task's head; of word
            # embeddings, which a backward makes last, some rows are sent.
            heads: nn.Module = getattr(model, "heads", nn.Module())
            apart = {*model.bank.router.parameters(), *heads.parameters()}
            steady = [p for p in self.parameters if p not in apart and not has_few_rows(p)]
            self.overlapped = OverlappedSum(steady, self.job.ranks)
        one_pass = config.observation.backward == "one_pass"
        self.whole = (
            WholeGradients([model], self.parameters, one_pass) if self.method.whole_gradients else None
        )

    def block(self, start: int, stop: int) -> Iterator[Outcome]:
        """Run updates ``start`` to ``stop - 1``; yields what each tells."""
        return map(self.run, range(start, stop))

    def run(self, number: int) -> Outcome:
        """Update ``number`` = 0, 1, …; raises :class:`TrainingFailure` before a non-finite step is taken."""
        groups = self.schedule.groups(number)
        before = self.job.ranks.bytes
        update = self.gradients(groups, number)
        norm = total_norm([p.grad for p in self.parameters if p.grad is not None])
        rate = self.learning_rate(number)
        told = torch.cat([update.losses.double(), norm.double().reshape(1)])
        self.job.wait(self.model.device)
        outcome = self._checked(groups, told, rate, number)
        clip_grads_with_norm_(self.parameters, self.config.optimizer.clip, norm)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        with torch.no_grad():
            self.method.after_step(update)
        self.sent += self.job.ranks.bytes - before
        return outcome

    def gradients(self, groups: Sequence[Group], number: int) -> Update:
        """Fill ``.grad`` for update ``number``; returns what the method saw of it.

        The update may be split into several passes of whole groups; but for the dropout of a trained
        backbone, the result does not depend on the split.
        """
        self.limit.settle(self)
        own, share = self.share(groups)
        rows = self.rows(groups, number)
        if share is not None and rows is not None:
            units = rows.layout(groups, share.numbers)
            share = replace(share, units=units, row_tasks=rows.tasks(groups, self.model.device))
        if number:
            return self._in_passes(own, number, share, rows)
        return self.limit.halving(
            lambda ready: self._in_passes(own, 0, share, rows, ready), lambda: self._largest(own)
        )

    def rows(self, groups: Sequence[Group], number: int) -> ChosenRows | None:
        """The rows of update ``number``'s observation where they are no groups, and its method reads them."""
        if "gradients" not in self.method.observes:
            return None
        return ChosenRows.of(groups, self.source.lengths, self.config.observation, self.seed, number)

    def share(self, groups: Sequence[Group]) -> tuple[Sequence[Group], Share | None]:
        """This rank's groups of an update, and where the others are; one process has them all."""
        ranks = self.job.ranks
        if self.job.count == 1:
            return groups, None
        lengths, costs = self.source.lengths, [len(group) for group in groups]
        if self.model.device.type != "cuda":
            # On a GPU texts are mostly padded to the longest of an update anyway, and shares that repeat can
            # be captured.
            costs = [n * int(lengths[g.task][g.examples].max()) for n, g in zip(costs, groups, strict=True)]
        numbers = balanced(costs, ranks.count)
        tasks, sizes = [group.task for group in groups], [len(group) for group in groups]
        share = Share(ranks, numbers, tasks, sizes, len(self.names))
        return [groups[m] for m in numbers[ranks.rank]], share

    def split(self, groups: Sequence[Group]) -> list[list[Group]]:
        """The passes of an update, as memory and padding make sensible."""
        cost = PASS_COST.get(self.model.device.type, 0)
        return [] if not groups else list(passes(groups, self.source.lengths, self.limit.tokens, cost))

    def _in_passes(
        self,
        groups: Sequence[Group],
        number: int,
        share: Share | None,
        rows: ChosenRows | None,
        ready: Callable[[], None] = lambda: None,
    ) -> Update:
        """``ready`` is called once the passes are over; for update 0 nothing is exchanged before it."""
        total = len(groups) if share is None else len(share.sizes)

        def forward(part: Sequence[Group]) -> tuple[Tensor, GroupWeights]:
            losses, weights = self.group_losses(part, number, total)
            here = None if share is None else len(groups)
            units = None if rows is None else rows.of_pass(part, self.model.device)
            return losses, replace(weights, here=here, units=units)

        if self.overlapped is not None:
            # The first update may turn out to need smaller passes; nothing is exchanged before that is known.
            self.overlapped.begin(early=number > 0)
        forwards = (partial(forward, part) for part in self.split(groups))
        with self.model.products():
            return fill_gradients(
                self.method,
                forwards,
                self.parameters,
                [self.model.bank],
                observation=self.config.observation.backward,
                state=self.state,
                whole=self.whole,
                share=share,
                overlapped=self.overlapped,
                ready=ready,
            )

    def _largest(self, groups: Sequence[Group]) -> int | None:
        """Padded tokens of the largest pass; None where every group has its own."""
        split, lengths = self.split(groups), self.source.lengths
        if all(len(part) == 1 for part in split):
            return None
        widths = [max(int(lengths[g.task][g.examples].max()) for g in part) for part in split]
        return max(sum(map(len, part)) * width for part, width in zip(split, widths, strict=True))

    def group_losses(self, groups: Sequence[Group], number: int, total: int) -> tuple[Tensor, GroupWeights]:
        """One pass: the mean cross-entropy [M] of some of the update's ``total`` groups; their weights."""
        model, lengths = self.model, self.source.lengths
        parts = task_parts(groups)
        segments = [(self.names[task], len(rows)) for task, rows in parts]
        with self.backbone_stream(number, groups[0].number):
            state = self.source.state(parts)
            keep = dropout_mask(model, lengths, groups, number, self.seed, state.mask.shape[1])
            labels = [
                self.source.labels[task][torch.from_numpy(rows).to(model.device)] for task, rows in parts
            ]
            losses = model.losses(state, segments, torch.cat(labels), keep)

        def of_groups(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=model.dtype, device=model.device)

        weights = GroupWeights(
            Grouping.consecutive([len(group) for group in groups], model.device),
            of_groups([group.task_weight for group in groups]),
            of_groups([group.sample_weight for group in groups]),
            total,
            torch.tensor([group.task for group in groups], device=model.device),
            len(self.names),
        )
        return weights.grouping.mean(losses), weights

    def backbone_stream(self, number: int, first: int) -> contextlib.AbstractContextManager[None]:
        """A trained backbone's own dropout: the stream of a pass of update ``number``, by its first group."""
        if not self.model.config.trainable:
            return contextlib.nullcontext()
        return _stream(self.model.device, self.seed, "backbone", number, first)

    def learning_rate(self, number: int) -> float:
        """Of update ``number`` = 0, 1, …"""
        optimizer = self.config.optimizer
        return optimizer.learning_rate * warmup_factor(number, self.total, optimizer.warmup)

    def broken_group(self, groups: Sequence[Group], number: int) -> Group | None:
        """The first group whose own task loss has a non-finite gradient.

        Every group runs alone: in one pass, a zero times what is not finite in one group spoils them all. The
        dropout is the same, but for that of a trained backbone.
        """
        for group in groups:
            with self.model.products():
                losses, _ = self.group_losses([group], number, len(groups))
                found = torch.autograd.grad(losses[0], self.parameters, allow_unused=True)
            if not total_norm([gradient for gradient in found if gradient is not None]).isfinite():
                return group
        return None

    def check(self, done: int) -> None:
        """Refuse to keep or measure what update ``done`` (counted from 1) made non-finite."""
        owned = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        for name, tensor in {**owned, **state_tensors(self.state)}.items():
            if not tensor.isfinite().all():
                raise TrainingFailure(f"{name} is no longer finite; expected a smaller learning rate", done)
        if (place := self.job.differing([*{**owned, **state_tensors(self.state)}.values()])) is not None:
            name = [*owned, *state_tensors(self.state)][place]
            raise TrainingFailure(
                f"{name} is not the same on all ranks; expected machines of one kind, and a method that "
                "computes the same on each",
                done,
            )

    def outcome(self, groups: Sequence[Group], losses: list[float], norm: float, rate: float) -> Outcome:
        """What an update of these groups tells."""
        tasks = dict.fromkeys(self.names, 0.0)
        for loss, group in zip(losses, groups, strict=True):
            tasks[self.names[group.task]] += group.task_weight * len(tasks) * loss
        return Outcome(losses, tasks, norm, rate)

    def _checked(self, groups: Sequence[Group], told: Tensor, rate: float, number: int) -> Outcome:
        """Losses and gradient norm as numbers (the update's only read-back), or a failure that says where."""
        *losses, norm_value = told.tolist()
        for group, loss in zip(groups, losses, strict=True):
            if not math.isfinite(loss):
                raise TrainingFailure(
                    f"the loss of task {self.names[group.task]}, group {group.number} is {loss}; "
                    "expected finite losses (a smaller learning rate, or inputs without extreme values)",
                    number + 1,
                )
        if not math.isfinite(norm_value):
            gradients = ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)
            broken = (name for name, grad in gradients if not grad.isfinite().all())
            where = next(broken, "all parameters together")
            guilty = self.broken_group(groups, number)
            whose = (
                "the method's own terms (no group's task loss has such a gradient alone)"
                if guilty is None
                else f"task {self.names[guilty.task]}, group {guilty.number}"
            )
            raise TrainingFailure(
                f"the gradient of {whose} is not finite in {where}; "
                "expected finite gradients (a smaller learning rate, or inputs without extreme values)",
                number + 1,
            )
        return self.outcome(groups, losses, norm_value, rate)


def balanced(costs: Sequence[int], count: int) -> list[list[int]]:
    """Which of things with these costs each of ``count`` ranks takes: the dearest first, to who has least.

    >>> balanced([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    >>> balanced([1], 2)
    [[0], []]
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number in sorted(range(len(costs)), key=lambda m: (-costs[m], m)):
        rank = loads.index(min(loads))
        shares[rank].append(number)
        loads[rank] += costs[number]
    return [sorted(share) for share in shares]


def total_updates(optimizer: OptimizerConfig, schedule: Updates) -> int:
    """The update budget; epochs count passes over the largest task."""
    if optimizer.epochs is None:
        return optimizer.updates
    return max(1, round(optimizer.epochs * schedule.updates_per_epoch))


def warmup_factor(update: int, total: int, warmup: float) -> float:
    """Share of the learning rate at update 0, 1, …: linear over the first ``warmup`` share, then 1.

    >>> [warmup_factor(u, 40, 0.1) for u in range(6)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """
    length = math.ceil(total * warmup - 1e-9)
    return min(1.0, (update + 1) / length) if length else 1.0


def make_optimizer(model: MultiTaskModel, config: OptimizerConfig) -> AdamW:
    """AdamW with one parameter group over everything trainable."""
    return AdamW(
        model.trainable_parameters(),
        lr=config.learning_rate,
        betas=ADAM_BETAS,
        eps=ADAM_EPS,
        weight_decay=config.weight_decay,
        fused=model.device.type == "cuda",
        capturable=model.device.type == "cuda",
    )


def task_parts(groups: Sequence[Group]) -> list[Part]:
    """Neighbouring groups of one task as one run of examples."""
    runs = groupby(groups, key=lambda group: group.task)
    return [(task, np.concatenate([group.examples for group in run])) for task, run in runs]


def dropout_mask(
    model: MultiTaskModel,
    lengths: Sequence[NDArray[np.int64]],
    groups: Sequence[Group],
    number: int,
    seed: int,
    width: int | None = None,
) -> Tensor | None:
    """The experts' dropout mask of a pass of ``width`` tokens (default: as many as the longest example has).

    None where the bank has no dropout.
    """
    width = width or max(int(lengths[group.task][group.examples].max()) for group in groups)
    shape = model.site.dropout_shape(sum(map(len, groups)), width) if model.training else None
    if shape is None:
        return None
    words = torch.from_numpy(row_words(groups, number, seed)).to(model.device)
    return keep_mask(words, shape, model.site.dropout)


@contextlib.contextmanager
def _stream(device: torch.device, *purpose: int | str) -> Iterator[None]:
    """Torch's own generator draws from a stream of this purpose; afterwards it is as it was."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derive_seed(*purpose))
        yield
