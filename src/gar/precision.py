"""What float32 products are computed in: TF32 where it is asked for, and nowhere else.

Torch's switches for TF32 (and, on a CPU, for what oneDNN may do instead) belong to the whole process. Here
they are set for a block and put back, so that a run computes the same whatever a program of a user's has set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, backends
from torch.nn import functional

#: The values of the key ``precision``.
PRECISIONS = ("float32", "tf32", "bfloat16")
#: Where the switch of an operation says so, a float32 product keeps all its digits.
_WHOLE = ("none", "ieee")
_AMPERE = 8
#: Torch's switches by operation; its modules are not typed.
_CUDA_MATMUL: Any = backends.cuda.matmul
_CPU_MATMUL: Any = backends.mkldnn.matmul  # type: ignore[attr-defined]
_CUDNN: tuple[Any, ...] = (backends.cudnn.conv, backends.cudnn.rnn)  # type: ignore[attr-defined]


def precision_on(device: torch.device, precision: str) -> str:
    """What a precision comes to on a device: TF32 needs a CUDA device of compute capability 8 or more.

    >>> precision_on(torch.device("cpu"), "tf32")
    'float32'
    """
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _AMPERE
    return "float32" if precision == "tf32" and not has_tf32 else precision


@contextmanager
def float32_products(device: torch.device, tf32: bool = False) -> Iterator[None]:
    """In this block float32 products, forward and backward, use TF32 (on CUDA alone), or keep all digits."""
    tf32 = tf32 and device.type == "cuda"
    with ExitStack() as stack:
        if is_reduced(device) != tf32:
            stack.enter_context(_matmul("high" if tf32 else "highest"))
        if device.type == "cuda" and not tf32 and any(op.fp32_precision not in _WHOLE for op in _CUDNN):
            stack.enter_context(_whole_convolutions())
        yield


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast and no TF32 in this block."""
    with torch.autocast(device.type, enabled=False), float32_products(device):
        yield


@contextmanager
def computing_in(device: torch.device, precision: str) -> Iterator[None]:
    """The forward of a model in one of :data:`PRECISIONS`.

    Its backward belongs into a block of :func:`float32_products`: torch looks at the switches when it runs.
    """
    with float32_products(device, tf32=precision == "tf32"):
        if precision == "bfloat16":
            with torch.autocast(device.type, torch.bfloat16):
                yield
        else:
            yield


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x W^T + b`` without TF32 or autocast, in its backward too, wherever that is called."""
    if not is_reduced(x.device):
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x, weight, bias)
    rows: Tensor = _Product.apply(x.flatten(0, -2), weight.T)  # type: ignore[no-untyped-call]
    return rows.reshape(*x.shape[:-1], -1) + bias


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a b`` of two matrices without TF32 or autocast, in its backward too, wherever that is called."""
    if not is_reduced(a.device):
        with torch.autocast(a.device.type, enabled=False):
            return a @ b
    product: Tensor = _Product.apply(a, b)  # type: ignore[no-untyped-call]
    return product


class _Product(torch.autograd.Function):
    """``a b``; an ordinary product's backward would follow the switches as they are when it runs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        with full_precision(a.device):
            return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (a, b), (grad,) = ctx.saved_tensors, grads
        with full_precision(grad.device):
            return (
                grad @ b.T if ctx.needs_input_grad[0] else None,
                a.T @ grad if ctx.needs_input_grad[1] else None,
            )


# ---------------------------------------------------------------------- torch's switches


def is_reduced(device: torch.device) -> bool:
    """Whether a float32 product on the device may lose digits as things are."""
    switch = _CUDA_MATMUL if device.type == "cuda" else _CPU_MATMUL
    return switch.fp32_precision not in _WHOLE


@contextmanager
def _matmul(setting: str) -> Iterator[None]:
    # Torch has an older and a newer switch and refuses to answer where they disagree: the older one sets
    # both. Afterwards each is what it was.
    ops = (_CUDA_MATMUL, _CPU_MATMUL)
    newer, older = [op.fp32_precision for op in ops], _matmul_setting()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        _put_back(ops, newer)


def _matmul_setting() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer switch was set alone, and the older one is where it starts
        return "highest"


@contextmanager
def _whole_convolutions() -> Iterator[None]:
    newer = [op.fp32_precision for op in _CUDNN]
    try:
        older = backends.cudnn.allow_tf32
    except RuntimeError:
        older = True
    backends.cudnn.allow_tf32 = False
    _put_back(_CUDNN, ["ieee"] * len(_CUDNN))
    try:
        yield
    finally:
        backends.cudnn.allow_tf32 = older
        _put_back(_CUDNN, newer)


def _put_back(ops: Sequence[Any], values: Sequence[str]) -> None:
    for op, value in zip(ops, values, strict=True):
        if op.fp32_precision != value:
            op.fp32_precision = value
