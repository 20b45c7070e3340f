"""Base of methods that combine whole group gradients (CAGrad, torchjd aggregators)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from gar.errors import UserError
from gar.methods.base import Choices, Method
from gar.methods.update import Pass, Share, Update
from gar.observation import WholeGradients


class GradientCombination(Method):
    """Rows are the gradients of each group's mean loss in all P trainable parameters.

    They come from the one forward that every method runs (:class:`gar.observation.WholeGradients`). Row m is
    scaled by ``M v_m``, so that the mean row is the gradient of ``L_task``. The M x P matrix is kept on the
    model's device while it takes at most half of the free memory there, else in host memory; the combination
    then streams over columns. A matrix that fits nowhere is refused at the first update. Over ranks each has
    the rows of its groups; :meth:`combine_spread` says what is exchanged.
    """

    whole_gradients: ClassVar[bool] = True

    def check(self, choices: Choices) -> str | None:
        if choices.groups == 1:
            return (
                "every update has one group only, so there is nothing to combine; "
                "expected mixture.batch_size > mixture.group_size or more tasks"
            )
        return None

    def backward(self, pass_: Pass) -> None:
        if pass_.whole is None:
            raise RuntimeError("whole group gradients were not recorded during the forward")
        weights = pass_.weights
        if "rows" not in pass_.scratch:
            pass_.scratch["rows"], pass_.scratch["filled"] = _allocate(pass_, pass_.whole), 0
        first: int = pass_.scratch["filled"]
        pass_.scratch["filled"] = first + len(pass_.losses)
        rows: Tensor = pass_.scratch["rows"][first : pass_.scratch["filled"]]
        # Another's observation of the same forward expects the one ordinary backward.
        quiet = pass_.sites[0].observation.paused() if pass_.sites else contextlib.nullcontext()
        with quiet:
            pass_.whole.fill(pass_.losses, weights.total * weights.task_weights, weights.grouping, rows)

    @property
    def spreads(self) -> bool:
        own, base = type(self), GradientCombination
        return own.backward is base.backward and own.finish is base.finish

    def finish(self, update: Update) -> None:
        rows, filled = update.scratch.pop("rows", None), update.scratch.get("filled", 0)
        if rows is None:  # a rank without groups
            first = update.parameters[0]
            size = sum(p.numel() for p in update.parameters)
            rows = first.new_empty(0, size, dtype=torch.promote_types(first.dtype, torch.float32))
        if filled != len(rows):
            raise RuntimeError(f"{filled} of {len(rows)} group gradients were computed")
        share = update.share
        update.assign(self.combine(rows) if share is None else self.combine_spread(rows, share))

    def combine(self, rows: Tensor) -> Tensor:
        """The update direction [P] from the group rows [M, P]."""
        raise NotImplementedError

    def combine_spread(self, rows: Tensor, share: Share) -> Tensor:
        """The direction [P], on every rank, from this rank's rows: the first rank combines them all.

        It needs the memory for them. What it draws at random is what one process draws.
        """
        ranks, size = share.ranks, rows.shape[1]
        rows = share.filled(rows if len(rows) else None, rows.device)
        none = rows.new_empty(0, size)
        here = [(own if ranks.rank == 0 else 0, size) for own in share.groups.sizes]
        parts = ranks.swap([rows, *[none] * (ranks.count - 1)], here)
        direction = rows.new_empty(size)
        if ranks.rank == 0:
            whole = rows.new_empty(share.groups.count, size)
            for part, numbers in zip(parts, share.groups.numbers, strict=True):
                whole[numbers.to(whole.device)] = part
            direction = self.combine(whole).to(direction)
        ranks.copy([direction])
        return direction


def gram_matrix(rows: Tensor) -> Tensor:
    """``R R^T`` [M, M] in float64, where the rows are.

    Rows that nearly cancel leave of float32 products nothing but rounding. Both functions take float64
    copies of some columns at a time, so that the rows themselves may stay float32.
    """
    return sum((_squared(block) for block in _blocks(rows)), start=rows.new_zeros((), dtype=torch.float64))


def mixtures(rows: Tensor, coefficients: Tensor) -> Tensor:
    """``coefficients`` [K, M] times R in float64, [K, P], where the rows are."""
    coefficients = coefficients.to(rows.device, torch.float64)
    mixed = coefficients.new_empty(len(coefficients), rows.shape[1])
    filled = 0
    for block in _blocks(rows):
        torch.mm(coefficients, block, out=mixed[:, filled : filled + block.shape[1]])
        filled += block.shape[1]
    return mixed


def _squared(block: Tensor, columns: int = 1024) -> Tensor:
    """``B B^T``, summed over parts: one long and thin product would leave a GPU idle."""
    even = block.shape[1] // columns * columns
    rest = block[:, even:]
    if not even:
        return rest @ rest.T
    parts = block[:, :even].unflatten(1, (-1, columns)).transpose(0, 1)
    total: Tensor = (parts @ parts.mT).sum(0)
    return torch.addmm(total, rest, rest.T) if even < block.shape[1] else total


def _blocks(rows: Tensor, entries: int | None = None) -> Iterator[Tensor]:
    """The columns in float64, 32 MiB at a time; on a GPU 128 MiB, which take longer than their launches."""
    entries = entries or (1 << 24 if rows.is_cuda else 1 << 22)
    return (block.double() for block in rows.split(max(1, entries // max(1, len(rows))), dim=1))


def _allocate(pass_: Pass, whole: WholeGradients) -> Tensor:
    """Room for the rows of the update's groups here, every row aligned; the device is chosen once."""
    total, size = pass_.weights.own, whole.size
    dtype = torch.promote_types(pass_.losses.dtype, torch.float32)
    stride = -(-size // 64) * 64
    if total not in whole.devices:
        whole.devices[total] = _row_device(pass_, stride, dtype)
    return torch.empty(total, stride, dtype=dtype, device=whole.devices[total])[:, :size]


def _row_device(pass_: Pass, size: int, dtype: torch.dtype) -> torch.device:
    device = pass_.losses.device
    needed = pass_.weights.own * size * dtype.itemsize
    if device.type == "cuda" and needed <= torch.cuda.mem_get_info(device)[0] // 2 + _reusable(device):
        return device
    free = _host_memory()
    if free is not None and needed > free:
        raise UserError(
            f"method: {pass_.weights.own} group gradients of {size} parameters take "
            f"{needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB of host memory are free; "
            "expected a larger mixture.group_size or fewer trainable parameters (backbone.trainable=false)"
        )
    return device if device.type == "cpu" else torch.device("cpu")


def _reusable(device: torch.device) -> int:
    # Memory that torch's allocator holds but does not use is free for us.
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _host_memory() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            values = dict(line.split(":", 1) for line in lines)
        return int(values["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: let the allocation itself decide
        return None
