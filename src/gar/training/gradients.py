"""The gradients of one update under any method; knows neither the model's parts nor the data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from gar.distributed import sum_tensors
from gar.distributed.overlap import OverlappedSum
from gar.methods import GroupWeights, Method, Pass, Share, Update
from gar.nn import expert_banks
from gar.observation import Observed, WholeGradients, observe
from gar.precision import float32_products

#: Runs one pass: the groups' mean losses [M], attached to the graph, and what the groups weigh.
Forward = Callable[[], tuple[Tensor, GroupWeights]]


def fill_gradients(
    method: Method,
    forwards: Iterable[Forward],
    parameters: Sequence[nn.Parameter],
    observed: Sequence[nn.Module],
    *,
    observation: str = "one_pass",
    state: Any = None,
    whole: WholeGradients | None = None,
    share: Share | None = None,
    overlapped: OverlappedSum | None = None,
    ready: Callable[[], None] = lambda: None,
    most_rows: Callable[[nn.Parameter], int] | None = None,
) -> Update:
    """Fill ``.grad`` of ``parameters`` from the passes of one update; returns what the method saw of it.

    ``observed`` holds the expert banks (or modules with banks inside), ``observation`` is ``one_pass`` or
    ``per_group`` (which has no rows of examples or tokens), ``state`` the method's own
    (:meth:`gar.methods.Method.initial_state`). ``whole`` serves a method with ``whole_gradients`` from update
    to update; without it ``observed`` are the modules it knows. With a ``share`` the passes are those of this
    rank's groups, and ``.grad`` is that of all ranks; ``ready`` is called after the passes, before anything
    is exchanged but by ``overlapped``: with it sums begin during the last pass, which needs a method with
    ``one_backward``. ``most_rows`` says of a parameter how many rows of its gradient are not zero, at most:
    see :func:`gar.distributed.sum_tensors`.
    """
    for parameter in parameters:
        parameter.grad = None
    of_groups = "gradients" in method.observes
    if not method.whole_gradients:
        whole = None
    elif whole is None:
        whole = WholeGradients(observed, parameters, factors=observation == "one_pass")
    passes: list[Pass] = []
    scratch: dict[str, Any] = {}
    forwards = list(forwards)
    for number, forward in enumerate(forwards, 1):
        watching: contextlib.AbstractContextManager[Observed | None] = contextlib.nullcontext()
        if method.observes:
            watching = observe(
                *observed,
                gradients=of_groups and observation == "one_pass",
                router_apart=method.router_apart,
                outputs="outputs" in method.observes,
            )
        with watching as seen, whole.recording() if whole is not None else contextlib.nullcontext():
            pass_ = Pass.of(*forward(), parameters, seen, scratch, state, whole)
            if of_groups and observation == "per_group":
                pass_.capture_per_group()
            last = number == len(forwards)
            with overlapped.listening() if overlapped and last else contextlib.nullcontext():
                method.backward(pass_)
            if of_groups and observation == "one_pass":
                pass_.capture_one_pass()
        pass_.release()
        passes.append(pass_)
    banks = list(dict.fromkeys(bank for module in observed for bank in expert_banks(module)))
    update = Update(passes, parameters, banks if method.observes else [], scratch, state, share)
    ready()
    if overlapped is not None:
        overlapped.rest()
    with float32_products(parameters[0].device):  # whatever precision the passes had
        method.finish(update)
    summed = overlapped.end() if overlapped is not None else set()
    for parameter in parameters:
        if parameter.grad is None:  # AdamW skips None, which would tie its moments to what a method computes
            parameter.grad = torch.zeros_like(parameter)
    if share is not None and not update.complete:
        rest = [parameter for parameter in parameters if parameter not in summed]
        bounds = None if most_rows is None else [most_rows(parameter) for parameter in rest]
        grads = [parameter.grad for parameter in rest if parameter.grad is not None]
        sum_tensors(grads, share.ranks, most_rows=bounds)
    return update


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The global norm of gradients; on a CPU in float64, where float32 sums differ with the threads."""
    if gradients[0].device.type != "cpu":
        return get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm
