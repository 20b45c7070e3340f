"""Rows that lie on several ranks: their Gram matrix, their gathering, and sums of gradients.

The router's gradient needs of other ranks only their probabilities and the Gram matrix of all rows, since
``d L / d p_mk`` is a function of these. So rows are never gathered: for the Gram matrix each rank gets all
rows of its share of the columns (W times fewer bytes), and each back-propagates its own probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from gar.distributed.ranks import Ranks
from gar.objective import accurate
from gar.precision import full_precision

T = TypeVar("T", bound=Tensor)

#: What a slice of all rows takes at most, and what a bucket of gradients holds.
SLICE_BYTES, BUCKET_BYTES = 2**28, 2**26
#: A matrix with so many rows is the embedding of a vocabulary: its gradient has the rows of a batch's tokens.
VOCABULARY = 2**13


@dataclass(frozen=True)
class Layout:
    """Which rows of a matrix of ``count`` rows lie where: rank r has rows ``numbers[r]``, int64 [m_r].

    A row may lie on several ranks, or several times on one: its parts add up. Made once an update, for all
    that is exchanged of it.
    """

    numbers: tuple[Tensor, ...]
    count: int

    @classmethod
    def agree(cls, ranks: Ranks, numbers: Tensor | int, count: int | None = None) -> Layout:
        """Every rank tells the numbers of its rows, or how many it has (they then follow one another).

        ``count`` is that of all rows; by default one more than the largest number. Waits for the device.
        """
        own = torch.arange(numbers) if isinstance(numbers, int) else numbers.detach().cpu().long()
        sizes = ranks.gather(torch.tensor([len(own)])).flatten().tolist()
        padded = own.new_zeros(max(sizes))
        padded[: len(own)] = own
        found = [part[:size] for part, size in zip(ranks.gather(padded), sizes, strict=True)]
        if isinstance(numbers, int):
            ends = torch.tensor(sizes).cumsum(0).tolist()
            found = [torch.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        every = torch.cat(found)
        if len(every) and (int(every.min()) < 0 or (count is not None and int(every.max()) >= count)):
            raise ValueError(
                f"row numbers must lie in [0, {count}), found {int(every.min())} to {int(every.max())}"
            )
        if count is None:
            count = int(every.max()) + 1 if len(every) else 0
        return cls(tuple(found), count)

    @property
    def sizes(self) -> list[int]:
        """How many rows every rank has."""
        return [len(part) for part in self.numbers]

    def add(self, whole: Tensor, rank: int, rows: Tensor) -> None:
        """Add a rank's rows [m_r, ...] to the whole matrix [M, ...], in their order."""
        for index, numbers in self.on(whole.device).rounds[rank]:
            part = rows if index is None else rows[index]
            whole.index_add_(0, numbers, part.to(whole.dtype))

    def on(self, device: torch.device) -> Placed:
        """Its numbers on a device; only the first time waits for it."""
        if device not in self._placed:
            rounds = [
                [(None if i is None else i.to(device), n.to(device)) for i, n in _rounds(numbers)]
                for numbers in self.numbers
            ]
            self._placed[device] = Placed(tuple(n.to(device) for n in self.numbers), rounds)
        return self._placed[device]

    @cached_property
    def _placed(self) -> dict[torch.device, Placed]:
        return {}


class Placed(NamedTuple):
    """A layout's numbers on one device.

    ``rounds`` are, of every rank, positions and numbers that occur once each: a GPU would add others in any
    order.
    """

    numbers: tuple[Tensor, ...]
    rounds: list[list[tuple[Tensor | None, Tensor]]]


def _rounds(numbers: Tensor) -> Iterator[tuple[Tensor | None, Tensor]]:
    """The first occurrences of every number, the second ones, …; None stands for all positions.

    >>> [numbers.tolist() for _, numbers in _rounds(torch.tensor([4, 2, 4]))]
    [[4, 2], [4]]
    """
    if len(numbers.unique()) == len(numbers):
        yield None, numbers
        return
    seen: dict[int, int] = {}
    rounds: list[list[int]] = []
    for position, number in enumerate(numbers.tolist()):
        turn = seen[number] = seen.get(number, -1) + 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(position)
    for positions in rounds:
        index = torch.tensor(positions)
        yield index, numbers[index]


def gather_rows(x: Tensor, layout: Layout, ranks: Ranks) -> Tensor:
    """The whole matrix [M, ...] of which ``x`` [m, ...] are this rank's rows; the same bits on every rank.

    Differentiable in the own rows alone: gradients of a loss of it, summed over ranks, are those of one
    process that has all rows. A row without any part is zero.
    """
    gathered: Tensor = _GatherRows.apply(x, layout, ranks)  # type: ignore[no-untyped-call]
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, ranks: Ranks) -> Tensor:
        own, sizes = layout.numbers[ranks.rank], layout.sizes
        if x.shape[:1] != (len(own),):
            raise ValueError(f"expected {len(own)} rows as in the layout, got shape {tuple(x.shape)}")
        ctx.numbers = layout.on(x.device).numbers[ranks.rank]
        padded = x
        if len(own) < max(sizes):
            padded = x.new_zeros(max(sizes), *x.shape[1:])
            padded[: len(own)] = x
        whole = x.new_zeros(layout.count, *x.shape[1:])
        for rank, (part, size) in enumerate(zip(ranks.gather(padded), sizes, strict=True)):
            layout.add(whole, rank, part[:size])
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.numbers], None, None


def gather_probabilities(p: Tensor, layout: Layout, ranks: Ranks, weights: Tensor | None = None) -> Tensor:
    """``p_m`` [M, E] of all ranks from this one's ``p`` [m, E], differentiable in the own rows alone.

    Where a group is spread over ranks (or stands several times on one), its row is the mean of its parts by
    ``weights`` [m], say the tokens behind each part; by default all weigh the same. A group without weight
    has a row of zeros.
    """
    if weights is None:
        weights = p.new_ones(len(p))
    weights = weights.detach().to(p).unsqueeze(1)
    total = gather_rows(weights, layout, ranks)
    return gather_rows(p * weights, layout, ranks) / torch.where(total > 0, total, torch.ones_like(total))


@torch.no_grad()
def global_gram(
    rows: Tensor | Iterable[Tensor],
    layout: Layout,
    ranks: Ranks,
    *,
    dtype: torch.dtype | None = None,
    max_bytes: int = SLICE_BYTES,
) -> Tensor:
    """The Gram matrix [M, M] of all ranks' rows, the same bits on every rank; [M, d] never exists.

    ``rows`` are this rank's, [m, d], or an iterable of their slices [m, d_s], columns in order; slices have
    the same widths on every rank, also where m is 0. Parts of one row add up before the product. All rows of
    a slice take ``max_bytes`` at most (but M numbers at least). They travel as they are, multiplied in
    ``dtype``, by default float32 or theirs if that is wider.
    """
    slices = (rows,) if isinstance(rows, Tensor) else rows
    gram: Tensor | None = None
    for columns in slices:
        kind = dtype or accurate(columns[:0]).dtype
        # Cut so that the share of one rank stays small enough.
        width = ranks.count * max(1, max_bytes // (max(1, layout.count) * kind.itemsize))
        gram = _add_gram(gram, columns.split(width, 1), layout, ranks, kind)
    if gram is None:
        raise ValueError("no slice of the rows was given; expected at least one, of width 0 if need be")
    sum_tensors([gram], ranks)
    return gram


def _add_gram(
    gram: Tensor | None, slices: Iterable[Tensor], layout: Layout, ranks: Ranks, dtype: torch.dtype
) -> Tensor | None:
    for columns in slices:
        whole = _own_columns(columns, layout, ranks, dtype)
        with full_precision(whole.device):
            product = whole @ whole.T
        gram = product if gram is None else gram.add_(product)
    return gram


def _own_columns(rows: Tensor, layout: Layout, ranks: Ranks, dtype: torch.dtype) -> Tensor:
    """All M rows of this rank's share of some columns, [M, w / W], parts of a row added up."""
    shares = _shares(rows.shape[1], ranks.count)
    own = shares[ranks.rank]
    parts = ranks.swap(rows.split(shares, 1), [(size, own) for size in layout.sizes])
    whole = rows.new_zeros(layout.count, own, dtype=dtype)
    for rank, part in enumerate(parts):
        layout.add(whole, rank, part)
    return whole


def _shares(size: int, count: int) -> list[int]:
    """A size in ``count`` nearly equal parts, in order.

    >>> _shares(7, 3)
    [3, 2, 2]
    """
    return [size // count + (rank < size % count) for rank in range(count)]


@torch.no_grad()
def sum_tensors(
    tensors: Sequence[Tensor],
    ranks: Ranks,
    bucket_bytes: int = BUCKET_BYTES,
    *,
    most_rows: Sequence[int] | None = None,
) -> None:
    """Every tensor becomes its sum over ranks, in place, in its own dtype; the same bits on every rank.

    All ranks have the same tensors in the same order. A rank sums its share of a bucket, in the order of the
    ranks (half precision in float32), and gives the sum to all: twice ``(W - 1) / W`` of the bytes. Two ranks
    each sum all of it, which takes as many. Of a matrix with 8,192 rows or more only those travel that are
    not zero on some rank, if they are fewer than half. How many these are the host asks the device, unless
    ``most_rows`` says for every tensor how many they can be: then so many travel, and more make the sum NaN.
    """
    if ranks.count == 1:
        return
    most = [None] * len(tensors) if most_rows is None else most_rows
    rows = [_used_rows(tensor, ranks, own) for tensor, own in zip(tensors, most, strict=True)]
    parts = [t if index is None else t[index] for t, index in zip(tensors, rows, strict=True)]
    for bucket in buckets(parts, bucket_bytes):
        sum_bucket(bucket, ranks)
    for tensor, index, part in zip(tensors, rows, parts, strict=True):
        if index is not None:
            tensor.index_copy_(0, index, part)


def has_few_rows(tensor: Tensor) -> bool:
    """Whether most rows of a gradient of this shape may be zero: a vocabulary's embedding has one a token."""
    return tensor.ndim == 2 and len(tensor) >= VOCABULARY


def _used_rows(tensor: Tensor, ranks: Ranks, most: int | None) -> Tensor | None:
    """The rows of a large matrix that are not zero everywhere; None for what travels as it is."""
    if not has_few_rows(tensor) or (most is not None and 2 * most >= len(tensor)):
        return None
    used = tensor.ne(0).logical_or_(tensor.signbit()).any(1)  # -0.0 here may be 0.0 there: their sum is one
    anywhere = ranks.gather(used).any(0)
    if most is not None:
        # Row 0 stands in for rows that there are not; it is summed as often, and written with the same bits.
        tensor[0].masked_fill_(anywhere.sum() > most, torch.nan)
        return anywhere.nonzero_static(size=most, fill_value=0).squeeze(1)
    rows = anywhere.nonzero().squeeze(1)  # waits for the device
    return rows if 2 * len(rows) < len(tensor) else None


@torch.no_grad()
def sum_bucket(bucket: Sequence[Tensor], ranks: Ranks) -> None:
    """:func:`sum_tensors` of some tensors of one dtype and device, in one exchange."""
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    summed = _sum_of(flat, ranks) if ranks.count == 2 else _sum_by_shares(flat, ranks)
    for tensor, own in zip(bucket, summed.split([t.numel() for t in bucket]), strict=True):
        tensor.copy_(own.view(tensor.shape))


def _sum_of(flat: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks, which each takes of all there is: of two, as many bytes in half the exchanges."""
    return _added(ranks.gather(flat))


def _sum_by_shares(flat: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks, of which each takes a share and tells it to all."""
    share = -(-len(flat) // ranks.count)
    padded = functional.pad(flat, (0, share * ranks.count - len(flat)))
    parts = ranks.turn(padded.view(ranks.count, share))
    return ranks.gather(_added(parts)).view(-1)[: len(flat)]


def _added(parts: Tensor) -> Tensor:
    """The sum [n] of parts [W, n] in the order of the ranks, in their dtype; half precision in float32."""
    total = accurate(parts[0]) if parts.is_floating_point() else parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def buckets(tensors: Sequence[T], limit: int) -> Iterator[list[T]]:
    """Tensors of one dtype and device together, in order, up to ``limit`` bytes (but one at least)."""
    kinds: dict[tuple[torch.dtype, torch.device], list[T]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        bucket: list[T] = []
        taken = 0
        for tensor in same:
            if bucket and taken + tensor.nbytes > limit:
                yield bucket
                bucket, taken = [], 0
            bucket.append(tensor)
            taken += tensor.nbytes
        yield bucket


def sum_gradients(parameters: Sequence[nn.Parameter], ranks: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Every ``.grad`` becomes its sum over ranks: see :func:`sum_tensors`.

    Parameters are the same in the same order on all ranks. One without a gradient on this rank counts as
    zero; one without any on every rank keeps none.
    """
    if ranks.count == 1 or not parameters:
        return
    there = torch.tensor([parameter.grad is not None for parameter in parameters])
    anywhere = ranks.gather(there).any(0).tolist()
    used = [parameter for parameter, some in zip(parameters, anywhere, strict=True) if some]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    sum_tensors([parameter.grad for parameter in used if parameter.grad is not None], ranks, bucket_bytes)
