"""Gradients of every group's mean loss in ALL trainable parameters, from ONE forward and backward.

Most parameters sit in modules whose weight gradient is a sum over units: ``sum_i grad_i x_i^T``. Hooks read
the module's input and the gradient of its output; the sum is then taken group by group, which is the
arithmetic of the ordinary weight gradient and replaces it: the backward itself goes through the activations
alone.

What this does not cover is found by its structure, and taken from the same graph:

* a tensor that all rows share (position embeddings, DeBERTa's relative ones) loses the rows where it is
  copied to them. There the gradient is split, to go down the small shared part for all groups at once;
* any other use of a parameter takes a backward of its own for every group, for those parameters alone.

The first backwards are checked: the rows' sum with uneven weights must be the ordinary gradient of that sum.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gar.nn import Call, Experts
from gar.nn.head import LinearHeads
from gar.objective import accurate
from gar.observation._graph import Cut, Graph
from gar.observation._grouping import Grouping
from gar.observation._modules import Factorization, Rows, factorization, knows_its_experts
from gar.routing import Routing

#: Passes in which each parameter is checked; in the first one LoRA's A has no gradient yet.
CHECKS = 2
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Seen:
    """One call of a module: its detached input, and the tensor whose gradient is its output's (at experts:
    what enters their hidden module).

    Where the input is consecutive rows of another tensor, as heads get theirs, ``whole`` is that tensor and
    ``start`` the first row. Once the batch is known, ``x`` has all its rows, and ``span`` are the call's.
    ``bottom``: nothing with gradients enters it.
    """

    module: nn.Module
    number: int
    edge: GradientEdge
    x: Tensor | None = None
    whole: Tensor | None = None
    start: int = 0
    bottom: bool = False
    span: slice | None = None
    #: What else it was called with; at experts their hidden module.
    more: tuple[Any, ...] = ()
    #: Of experts: gates and active pairs, the hidden module's output, and the gradient of their sum.
    arguments: tuple[Tensor, Tensor] | None = None
    hidden: Tensor | None = None
    delta: Tensor | None = None


class WholeGradients:
    """Records the modules with trainable parameters during a forward, and splits its backward by groups.

    ``modules`` are searched for the owners of ``parameters``, whose order is that of the columns. One object
    serves all passes and updates of a training: it remembers what it found out about the model, and nothing
    of a pass. ``factors=False`` takes a backward a group for everything: slow, obviously right.
    """

    def __init__(
        self, modules: Iterable[nn.Module], parameters: Sequence[nn.Parameter], factors: bool = True
    ) -> None:
        self.parameters, self.factors = list(parameters), factors
        self.places: dict[nn.Parameter, slice] = {}
        self.size = 0
        for parameter in self.parameters:
            self.places[parameter] = slice(self.size, self.size + parameter.numel())
            self.size += parameter.numel()
        self._names: dict[nn.Parameter, str] = {}
        self._owners: dict[nn.Module, tuple[Factorization | None, list[nn.Parameter]]] = {}
        for root in modules if factors else ():
            self._names = {p: name for name, p in root.named_parameters()} | self._names
            for module in root.modules():
                self._add_owner(module)
        #: Where its user keeps the gradients of so many groups.
        self.devices: dict[int, torch.device] = {}
        self._left = dict.fromkeys(self.parameters, CHECKS)
        #: What was found out: calls without rows of their own, and parameters that need more than factors.
        self._shared_calls: set[tuple[nn.Module, int]] = set()
        self._separate: set[nn.Parameter] = set()
        self._ways: Counter[str] = Counter()
        self._calls: dict[nn.Module, list[_Seen]] = {}
        self._open: dict[nn.Module, _Seen] = {}
        self._handles: list[RemovableHandle] = []
        self._recording = False
        self._rows: Rows | None = None
        self._coarsest = 0.0

    def _add_owner(self, module: nn.Module) -> None:
        own = list(module.parameters(recurse=isinstance(module, LinearHeads)))
        trained = [p for p in own if p in self.places]
        how = factorization(module)
        if trained and (how is not None or (knows_its_experts(module) and len(trained) == len(own))):
            self._owners[module] = how, trained

    def __repr__(self) -> str:
        ways = ", ".join(f"{count} {way}" for way, count in self._ways.items() if count)
        return f"{type(self).__name__}({len(self.parameters)} parameters{': ' * bool(ways)}{ways})"

    # ------------------------------------------------------------------ the forward

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record one forward; :meth:`fill` follows inside the block, which leaves nothing behind."""
        hooks: list[RemovableHandle] = []
        for module, (how, _) in self._owners.items():
            hooks.append(module.register_forward_hook(self._after_module, with_kwargs=True))
            if how is None:
                hidden = module.hidden_module
                assert isinstance(hidden, nn.Module)
                hooks.append(hidden.register_forward_hook(partial(self._after_hidden, module)))
        self._recording = True
        try:
            yield
        finally:
            self._recording, self._rows = False, None
            for handle in (*hooks, *self._handles):
                handle.remove()
            self._calls, self._open, self._handles = {}, {}, []

    def _after_module(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not self._recording:
            return
        if isinstance(module, Experts):
            self._after_experts(module, args, output)
            return
        x = next(iter((*args, *kwargs.values())), None)
        y = output.logits if isinstance(output, Routing) else output
        if isinstance(y, Tensor) and y.requires_grad:
            seen = self._note(module, y, x if isinstance(x, Tensor) else None)
            seen.more = args[1:]
            self._handles.append(y.register_hook(partial(self._arrive, seen)))

    def _note(self, module: nn.Module, y: Tensor, x: Tensor | None) -> _Seen:
        number = len(self._calls.setdefault(module, []))
        seen = _Seen(module, number, get_gradient_edge(y))
        self._calls[module].append(seen)
        if x is not None:
            self._set_input(seen, x)
        return seen

    @staticmethod
    def _set_input(seen: _Seen, x: Tensor) -> None:
        seen.bottom = not x.requires_grad
        if isinstance(x, nn.Parameter) or x.dim() == 0:
            return  # a weight is no batch, however many rows it has
        seen.x, whole = x.detach(), x._base
        if whole is not None and whole.shape[1:] == x.shape[1:] and whole.stride() == x.stride():
            seen.whole = whole.detach()
            seen.start = (x.storage_offset() - whole.storage_offset()) // max(1, x.stride(0))

    def _place(self, seen: _Seen, rows: int) -> bool:
        """Find the call's rows among those of the batch, if it has any."""
        if seen.x is None or not len(seen.x) or (seen.module, seen.number) in self._shared_calls:
            return False
        own = len(seen.x)
        if own == rows:
            seen.span = slice(0, rows)
        elif seen.whole is not None and len(seen.whole) == rows:
            seen.x, seen.span = seen.whole, slice(seen.start, seen.start + own)
        seen.whole = None
        return seen.span is not None

    def _after_hidden(
        self, experts: nn.Module, module: nn.Module, args: tuple[Any, ...], output: Tensor
    ) -> None:
        if self._recording and args[0].requires_grad:
            seen = self._note(experts, args[0], None)
            seen.hidden, seen.more = output.detach(), args[1:]
            self._open[experts] = seen
            self._handles.append(args[0].register_hook(partial(self._arrive_at_experts, seen)))

    def _after_experts(self, module: Experts, args: tuple[Any, ...], output: Tensor) -> None:
        seen = self._open.pop(module, None)
        if seen is not None:
            x, gates, active, *_ = args
            self._set_input(seen, x)
            seen.arguments = gates.detach(), active

            def keep(grad: Tensor) -> None:
                if self._rows is not None:
                    seen.delta = grad.detach()

            self._handles.append(output.register_hook(keep))

    # ------------------------------------------------------------------ the backward

    def fill(self, losses: Tensor, scale: Tensor, grouping: Grouping, out: Tensor) -> None:
        """Row m of ``out`` [M, P] becomes ``scale[m]`` times the gradient of ``losses[m]``.

        ``grouping`` says which rows of the forward's batch belong to which group; loss m depends on the rows
        of group m alone. ``out`` is float32 or wider, on any device. The graph is gone afterwards.
        """
        self._recording = False
        scale = scale.to(losses.device, out.dtype)
        with torch.autocast(losses.device.type, enabled=False):
            if len(losses) == 1 or not self.factors:
                self._one_by_one(losses, scale, self.parameters, out)
                self._ways = Counter({"by a backward a group": len(self.parameters)})
            else:
                self._split(losses, scale, grouping, out)

    def _split(self, losses: Tensor, scale: Tensor, grouping: Grouping, out: Tensor) -> None:
        cuts, shared, split = self._plan(losses, grouping)
        separate = [p for p in self.parameters if p in self._separate]
        checked = [] if _capturing() else [p for p in split if self._left[p]]
        uneven = _uneven_weights(len(losses)).to(scale) if checked else scale
        reference: Sequence[Tensor | None] = ()
        if checked:
            loss = (uneven * scale * losses).sum()
            reference = torch.autograd.grad(loss, checked, retain_graph=True, allow_unused=True)
        factored = {p: place for p, place in self.places.items() if p not in self._separate}
        keep = bool(separate or checked)
        rows = Rows(out, factored, grouping)
        self._rows = rows
        caught, handles = self._catch(cuts, grouping)
        try:
            calls = (seen for calls in self._calls.values() for seen in calls)
            ends = [seen.edge for seen in calls if seen.bottom and seen.span is not None]
            ends += [cut.below for cut in cuts] + [get_gradient_edge(p) for p in separate]
            if ends:
                loss = (scale * losses).sum()
                torch.autograd.grad(loss, ends, retain_graph=keep, allow_unused=True)
        finally:
            self._rows = None
            for handle in handles:
                handle.remove()
        below = [(cut.below, grad) for cut, grad in caught.items()]
        if below and shared:
            edges, grads = zip(*below, strict=True)
            found = torch.autograd.grad(
                edges, shared, grads, retain_graph=keep, is_grads_batched=True, allow_unused=True
            )
            for parameter, gradients in zip(shared, found, strict=True):
                if gradients is not None:
                    rows.add(parameter, gradients)
        for parameter in factored.keys() - rows.written:
            rows.room(parameter)  # no loss of this pass depends on it
        wrong = self._wrong(checked, reference, uneven, out)
        self._separate.update(wrong)
        if separate := [*separate, *wrong]:
            self._one_by_one(losses, scale, separate, out)
        self._note_ways(rows, shared, separate)

    def _plan(
        self, losses: Tensor, grouping: Grouping
    ) -> tuple[list[Cut], list[nn.Parameter], list[nn.Parameter]]:
        """Give every call its rows; returns where shared tensors become rows, the parameters behind them, and
        these with all that have factors.
        """
        sources: list[tuple[Any, list[nn.Parameter]]] = []
        called: set[nn.Parameter] = set()
        for module, calls in self._calls.items():
            own = self._owners[module][1]
            called.update(own)
            for seen in calls:
                if not self._place(seen, grouping.rows):
                    self._shared_calls.add((module, seen.number))
                    sources.append((seen.edge.node, own))
        sources += [(get_gradient_edge(p).node, [p]) for p in self.parameters if p not in called]
        sources = [source for source in sources if not self._separate.issuperset(source[1])]
        cuts: dict[Cut, None] = {}
        shared: dict[nn.Parameter, None] = {}
        graph = Graph(losses.grad_fn) if sources else None
        for node, own in sources:
            assert graph is not None
            found = graph.cuts(node, grouping.rows)
            if found is None:
                self._separate.update(own)
            elif found:
                cuts |= dict.fromkeys(found)
                shared |= dict.fromkeys(own)
        for how, own in self._owners.values():
            if how is None and not self._separate.isdisjoint(own):  # experts are all or nothing
                self._separate.update(own)
        split = [p for p in self.parameters if (p in called or p in shared) and p not in self._separate]
        return list(cuts), [p for p in split if p in shared], split

    def _catch(
        self, cuts: Sequence[Cut], grouping: Grouping
    ) -> tuple[dict[Cut, Tensor], list[RemovableHandle]]:
        """The groups' gradients at every cut, as soon as the backward has been there."""
        caught: dict[Cut, Tensor] = {}

        def catch(cut: Cut, grads: Sequence[Tensor | None]) -> None:
            if grads[0] is not None:
                caught[cut] = cut.reduce(grads[0], grouping)

        return caught, [cut.node.register_prehook(partial(catch, cut)) for cut in cuts]

    def _arrive(self, seen: _Seen, grad: Tensor) -> None:
        """The gradient of a module's output is there: its parameters get their rows, its input is dropped."""
        rows = self._rows
        if rows is None or seen.span is None or seen.x is None:
            return
        self._coarsest = max(self._coarsest, _resolution(grad))
        grad = grad.detach()
        if len(grad) < len(seen.x):
            part, grad = grad, grad.new_zeros(len(seen.x), *grad.shape[1:])
            grad[seen.span] = part
        how, _ = self._owners[seen.module]
        assert how is not None
        how(seen.module, seen.x, grad, rows, *seen.more)
        seen.x = None

    def _arrive_at_experts(self, seen: _Seen, grad: Tensor) -> None:
        rows, experts = self._rows, seen.module
        assert isinstance(experts, Experts)
        slots = {slot: getattr(experts, slot) for slot in experts.slots}
        if rows is None or seen.span is None or not rows.places.keys() >= set(slots.values()):
            return
        assert seen.x is not None
        assert seen.arguments is not None
        assert seen.delta is not None
        self._coarsest = max(self._coarsest, _resolution(grad))
        x, delta, (gates, active) = seen.x, seen.delta, seen.arguments
        if gates.dim() == 2:
            x, gates, active, delta = (t.unsqueeze(1) for t in (x, gates, active, delta))
        call = Call(x, gates, active, delta, seen.hidden, grad.detach(), *seen.more)
        here = rows.out.device == grad.device
        count = rows.grouping.count
        into = {
            slot: rows.room(p) if here else rows.out.new_zeros(count, *p.shape, device=grad.device)
            for slot, p in slots.items()
        }
        experts.add_gradients(call, rows.grouping, into)
        if not here:
            for slot, parameter in slots.items():
                rows.add(parameter, into[slot])
        seen.x = seen.hidden = seen.delta = seen.arguments = None

    def _one_by_one(
        self, losses: Tensor, scale: Tensor, parameters: Sequence[nn.Parameter], out: Tensor
    ) -> None:
        """M backwards for these parameters."""
        for m, loss in enumerate(losses.unbind()):
            grads = torch.autograd.grad(
                loss, parameters, retain_graph=m + 1 < len(losses), materialize_grads=True
            )
            for parameter, grad in zip(parameters, grads, strict=True):
                out[m, self.places[parameter]].copy_((scale[m] * accurate(grad)).flatten())

    # ------------------------------------------------------------------ the check

    def _wrong(
        self,
        parameters: Sequence[nn.Parameter],
        reference: Sequence[Tensor | None],
        weights: Tensor,
        out: Tensor,
    ) -> list[nn.Parameter]:
        """Parameters whose rows do not add up, with ``weights`` [M], to the ``reference`` gradients.

        Rounding is measured against the rows' own lengths; and, for gradients that are nothing else, like
        those of a key's bias, against the length of all rows.
        """
        if not parameters:
            return []
        errors, lengths = [], []
        weights = weights.to(out)
        for parameter, grad in zip(parameters, reference, strict=True):
            rows = out[:, self.places[parameter]]
            total = weights @ rows
            if grad is not None:
                total -= grad.flatten().to(total)
            self._left[parameter] -= 1
            errors.append(torch.linalg.vector_norm(total))
            lengths.append(weights @ torch.linalg.vector_norm(rows, dim=1))
        every = torch.stack(lengths)
        eps = max(self._coarsest, torch.finfo(torch.float32).eps)  # parts of a float64 model may be float32
        allowed = eps**0.5 * every + eps**0.75 * torch.linalg.vector_norm(every)
        # What is not finite is for the training to find.
        failed = (torch.stack(errors) > allowed) & every.isfinite().all()
        wrong = [p for p, bad in zip(parameters, failed.tolist(), strict=True) if bad]
        if wrong:
            warnings.warn(
                f"the group gradients of {self._called(wrong)} are not a sum over the rows of its module "
                "(it is used elsewhere too, or mixes rows); from now on they take a backward a group",
                stacklevel=2,
            )
        return wrong

    def _called(self, parameters: Sequence[nn.Parameter]) -> str:
        first = self._names.get(parameters[0], "a parameter")
        return first if len(parameters) == 1 else f"{first} and {len(parameters) - 1} more parameters"

    def _note_ways(
        self, rows: Rows, shared: Sequence[nn.Parameter], separate: Sequence[nn.Parameter]
    ) -> None:
        ways = Counter(
            {
                "from factors": len(rows.written) - len(shared),
                "with a shared part": len(shared),
                "by a backward a group": len(separate),
            }
        )
        if ways != self._ways:
            self._ways = ways
            _log.info("%r%s", self, f", first {self._called(separate)}" if separate else "")


def _uneven_weights(count: int) -> Tensor:
    """Weights in [0.5, 1.5) that are well apart, so that swapped rows show; drawn from no random stream."""
    return 0.5 + (torch.arange(1, count + 1, dtype=torch.float64) * (5**0.5 - 1) / 2) % 1


def _resolution(grad: Tensor) -> float:
    """Relative rounding of products with this tensor."""
    eps: float = torch.finfo(grad.dtype).eps
    tf32 = (
        grad.is_cuda and grad.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    )
    return 2.0**-10 if tf32 else eps


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
