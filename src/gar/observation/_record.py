"""The forward and backward hooks that live inside an ``observe`` block, and what they capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gar.errors import UserError
from gar.nn import Call, RoutedExperts
from gar.routing import Routing


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread: a forward in it is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def repeats(forwards: int) -> bool:
    """Whether a forward computes again, for a checkpoint, what one of ``forwards`` has recorded.

    It may be another one all the same, of a reentrant checkpoint whose first forward had no graph: then its
    output gets a gradient, and counts.
    """
    return forwards > 0 and in_backward()


def before_backward(output: Tensor, do: Callable[[Tensor], None]) -> None:
    """Call ``do`` with the gradient of ``output`` that its operation is about to take.

    A hook of the tensor would come before those that a user registers later, which may change the gradient.
    One that is another shape of a whole tensor is followed there: changed in place, it loses its operation.
    """
    base = output._base
    whole = base is not None and base.numel() == output.numel() and base.is_contiguous()
    source = base if base is not None and whole and output.is_contiguous() else output
    node, number, shape = source.grad_fn, source.output_nr, output.shape
    if node is None:  # a leaf has no operation
        output.register_hook(do)
        return
    node.register_prehook(lambda grads: None if grads[number] is None else do(grads[number].reshape(shape)))


def version_of(x: Tensor) -> int:
    """How often a tensor was changed in place."""
    return 0 if x.is_inference() else x._version


class Handle(Protocol):
    """What a hook leaves behind; ``remove`` undoes it."""

    def remove(self) -> None: ...


@dataclass
class Record:
    """Captures of one expert bank during one ``observe`` block."""

    bank: RoutedExperts
    #: Whether the factors of group gradients are captured, beside the routing.
    factors: bool = True
    #: Whether the backward stops at the gates, to go on into the router later (:meth:`pending`).
    router_apart: bool = False
    #: Whether the experts' input is kept for :meth:`SiteObservation.expert_outputs`.
    outputs: bool = False
    #: Shared by all banks of one block: a backward crosses every site.
    paused: list[bool] = field(default_factory=lambda: [False])
    routing_input: Tensor | None = None
    routing: Routing | None = None
    #: Where the router is apart: its routing with the graph into it, of which ``routing`` holds the leaf.
    behind: Routing | None = None
    leaf: Tensor | None = None
    output: Tensor | None = None
    arguments: tuple[Tensor, Tensor, Tensor] | None = None
    hidden: Tensor | None = None
    layout: Any = None
    delta: Tensor | None = None
    hidden_grad: Tensor | None = None
    forwards: int = 0
    backwards: int = 0
    #: Forwards inside a backward, after the recorded one, whose outputs had a gradient.
    repeats: int = 0
    #: Of the input of the experts' activation, when it was called.
    _version: int = 0
    #: Inner modules whose hooks were called: code that was compiled before has none.
    _ran: set[str] = field(default_factory=set)

    def hooks(self) -> Iterator[Handle]:
        """Register the hooks; the caller removes them."""
        if self.router_apart:
            yield self.bank.router.register_forward_hook(self._router_hook)
        # Before hooks of others: what these make of the output has another gradient.
        yield self.bank.register_forward_hook(self._bank_hook, with_kwargs=True, prepend=True)
        if self.factors or self.outputs:
            yield self.bank.experts.register_forward_hook(self._experts_hook, prepend=True)
        if self.factors and (inner := self.bank.experts.hidden_module) is not None:
            yield inner.register_forward_pre_hook(self._before_hidden)
            yield inner.register_forward_hook(self._hidden_hook, prepend=True)

    def _router_hook(self, module: nn.Module, args: tuple[Tensor, ...], routing: Routing) -> Routing | None:
        # Where the input has a gradient, what lies below must not see that of detached routing.
        if args[0].requires_grad or not routing.gates.requires_grad:
            return None
        if not repeats(self.forwards):
            self.behind = routing
        return dataclasses.replace(routing.detach(), gates=routing.gates.detach().requires_grad_())

    def _bank_hook(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], result: tuple[Tensor, Routing]
    ) -> None:
        output, routing = result
        if not torch.is_grad_enabled():
            return
        if repeats(self.forwards):
            return
        self.forwards += 1
        self.routing_input = (args[0] if args else kwargs["x"]).detach()
        self.routing, self.output = routing, output

    def _experts_hook(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._ran.add("experts")
        if not output.requires_grad:
            return
        repeated = repeats(self.forwards)
        if self.factors:
            before_backward(output, self._count_repeat if repeated else self._store_delta)
        if not repeated:
            x, gates, active = args[:3]
            self.arguments = (x.detach(), gates.detach(), active)

    def _before_hidden(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._ran.add("hidden")
        self._version = version_of(args[0])

    def _hidden_hook(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad and not repeats(self.forwards):
            if version_of(args[0]) != self._version:
                raise UserError(
                    "the experts' activation works in place; expected one that leaves its input, which is "
                    "observed"
                )
            self.hidden, self.layout = output.detach(), args[1] if len(args) > 1 else None
            args[0].register_hook(self._store_hidden_grad)

    def _store_delta(self, grad: Tensor) -> None:
        if not self.paused[0]:
            self.backwards += 1
            # A copy: a leaf that gets the same gradient keeps its memory as its own .grad, and adds to it.
            with torch.no_grad():
                self.delta = grad.clone()

    def _count_repeat(self, grad: Tensor) -> None:
        if not self.paused[0]:
            self.repeats += 1

    def _store_hidden_grad(self, grad: Tensor) -> None:
        if not self.paused[0]:
            self.hidden_grad = grad.detach()

    def require_forward(self) -> tuple[Tensor, Routing]:
        """The detached routing input and the routing of the one observed forward."""
        if (forwards := self.forwards + self.repeats) > 1:
            raise RuntimeError(
                f"the expert bank ran {forwards} forwards inside one observe block; observe one forward "
                "at a time (a bank shared between layers has no single observation)"
            )
        if self.routing_input is None or self.routing is None:
            raise RuntimeError("nothing was observed: no forward with gradients ran inside the observe block")
        return self.routing_input, self.routing

    def call(self) -> Call:
        """Everything that group gradients need, rows and tokens apart: units [N, d] become [N, 1, d]."""
        self.require_forward()
        if not self.factors:
            raise RuntimeError("group gradients were not recorded: observe(..., gradients=False)")
        expected = {"experts"} if self.bank.experts.hidden_module is None else {"experts", "hidden"}
        if self._ran != expected:
            raise UserError(
                "the hooks inside the expert bank did not run; expected a bank that is compiled "
                "(torch.compile) inside the observe block for the first time, or not at all"
            )
        if self.backwards != 1 or self.delta is None or self.arguments is None:
            raise RuntimeError(
                f"{self.backwards} backward passes ran inside the observe block; "
                "group gradients need exactly one"
            )
        if self.bank.experts.hidden_module is not None and (self.hidden is None or self.hidden_grad is None):
            raise UserError(
                "neither the experts' input nor their first layer has a gradient, so their activations have "
                "none; expected one of them to train, or an input with requires_grad"
            )
        (x, gates, active), delta = self.arguments, self.delta
        if gates.dim() > 3:
            raise ValueError(f"inputs must be [N, d] or [B, L, d], got gates of shape {tuple(gates.shape)}")
        if gates.dim() == 2:
            x, gates, active, delta = (t.unsqueeze(1) for t in (x, gates, active, delta))
        return Call(x, gates, active, delta, self.hidden, self.hidden_grad, self.layout)

    def pending(self) -> tuple[Tensor, Tensor] | None:
        """The gates in the router's graph and what a backward brought to them, once; None without any."""
        behind, self.behind = self.behind, None
        if behind is None or self.leaf is None or self.leaf.grad is None:
            return None
        return behind.gates, self.leaf.grad

    def release(self) -> None:
        """Drop references into the graph; detached captures stay."""
        self.output = None
        if self.routing is not None:
            self.leaf = self.routing.gates
            self.routing = self.routing.detach()

    def forget_factors(self) -> None:
        """Free what only group gradients need; the routing and its input stay."""
        self.arguments = self.hidden = self.delta = self.hidden_grad = self.layout = None
