"""Several methods in one update: what each adds to the task loss adds up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from pydantic import SerializeAsAny
from torch import Tensor, nn

from gar.distributed import sum_tensors
from gar.methods.base import Choices, Method, MethodState
from gar.methods.update import Pass, Update

#: Joins the names of methods to that of their combination.
JOIN = "+"
#: The key of a method's section under which the others stand.
WITH = "with"

_Seen = TypeVar("_Seen", Pass, Update)


class Combined(Method):
    """The methods ``parts`` in one update: ``L_task`` plus all their terms, ``gar+zloss`` for short.

    Every parameter gets the sum of what the parts' terms and router losses give it. One part may have a
    backward of its own (CAGrad): its direction stands in the place of the task loss's gradient, and the
    others' terms are added to it. Each part keeps its own state, under its name.

    In a configuration the first part's hyper-parameters are the method's, the others' stand below ``with``:
    ``{name: gar, coefficient: 1e-3, with: {zloss: {coefficient: 0.01}}}``.
    """

    parts: tuple[SerializeAsAny[Method], ...]

    # What a class says of itself elsewhere, the parts say here.
    @property
    def name(self) -> str:  # type: ignore[override]
        return JOIN.join(part.name for part in self.parts)

    @property
    def label(self) -> str:  # type: ignore[override]
        return joined_label([part.label for part in self.parts])

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        return all(part.capturable for part in self.parts)

    @property
    def whole_gradients(self) -> bool:  # type: ignore[override]
        return any(part.whole_gradients for part in self.parts)

    @property
    def finer_rows(self) -> bool:
        return all(part.finer_rows for part in self.parts)

    @property
    def observes(self) -> frozenset[str]:
        return frozenset().union(*(part.observes for part in self.parts))

    @property
    def router_apart(self) -> bool:
        # A part that captures nothing adds nothing (its coefficient is zero), or says so by its own hooks.
        return "gradients" in self.observes and not any(_has_own(part, _HOOKS) for part in self.parts)

    @property
    def one_backward(self) -> bool:
        return all(part.one_backward for part in self.parts)

    @property
    def spreads(self) -> bool:
        return all(part.spreads for part in self.parts)

    def check(self, choices: Choices) -> str | None:
        own = [part.name for part in self.parts if _has_own(part, _BACKWARDS)]
        if len(own) > 1:
            return f"{' and '.join(own)} have a backward of their own each; expected one such method at most"
        rows = [part.name for part in self.parts if "gradients" in part.observes]
        if own and rows:
            return (
                f"{rows[0]} reads the gradients of groups out of the one ordinary backward, which {own[0]} "
                "replaces; expected one of the two"
            )
        found = ((part.name, part.check(choices)) for part in self.parts)
        return next((f"{name}: {problem}" for name, problem in found if problem), None)

    def initial_state(self, model: nn.Module) -> MethodState | None:
        made: dict[str, Any] = {part.name: part.initial_state(model) for part in self.parts}
        return {name: state for name, state in made.items() if state is not None} or None

    def terms(self, pass_: Pass) -> Tensor | None:
        return _sum(part.terms(seen) for part, seen in self._each(pass_))

    def backward(self, pass_: Pass) -> None:
        if (own := self._own) is None:
            super().backward(pass_)
            return
        others = (part.terms(seen) for part, seen in self._each(pass_) if part is not own)
        if (terms := _sum(others)) is not None and terms.requires_grad:
            with pass_.sites[0].observation.paused() if pass_.sites else contextlib.nullcontext():
                found = torch.autograd.grad(terms, pass_.parameters, retain_graph=True, allow_unused=True)
            before = pass_.scratch.setdefault(self.name, [None] * len(found))
            pass_.scratch[self.name] = [_sum(pair) for pair in zip(before, found, strict=True)]
        own.backward(self._seen_by(own, pass_))

    def router_loss(self, update: Update) -> Tensor | None:
        return _sum(part.router_loss(seen) for part, seen in self._each(update))

    def finish(self, update: Update) -> None:
        if (own := self._own) is None:
            super().finish(update)
            return
        seen = self._seen_by(own, update)
        own.finish(seen)
        update.complete = seen.complete
        direction = [parameter.grad for parameter in update.parameters]
        terms = update.scratch.pop(self.name, None) or [None] * len(direction)
        for parameter, term in zip(update.parameters, terms, strict=True):
            parameter.grad = term
        # The part with its own backward has no router loss: its finish has been.
        others = (part.router_loss(seen) for part, seen in self._each(update) if part is not own)
        update.backward(_sum(others))
        if update.share is not None and update.complete:
            for parameter in update.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            sum_tensors([p.grad for p in update.parameters if p.grad is not None], update.share.ranks)
        for parameter, first in zip(update.parameters, direction, strict=True):
            parameter.grad = _sum([first, parameter.grad])

    def after_step(self, update: Update) -> None:
        for part, seen in self._each(update):
            part.after_step(seen)

    def to_config(self) -> dict[str, Any]:
        first, *others = (part.to_config() for part in self.parts)
        below = {fields.pop("name"): fields for fields in others}
        return {**first, "name": self.name, WITH: below}

    @property
    def _own(self) -> Method | None:
        """The part with a backward of its own."""
        return next((part for part in self.parts if _has_own(part, _BACKWARDS)), None)

    def _each(self, seen: _Seen) -> Iterator[tuple[Method, _Seen]]:
        """Every part with the pass or update as it sees it."""
        return ((part, self._seen_by(part, seen)) for part in self.parts)

    @staticmethod
    def _seen_by(part: Method, seen: _Seen) -> _Seen:
        return seen.seen_with((seen.state or {}).get(part.name))


_BACKWARDS = ("backward", "finish")
_HOOKS = ("terms", *_BACKWARDS)


def _has_own(part: Method, hooks: Sequence[str]) -> bool:
    return any(getattr(type(part), hook) is not getattr(Method, hook) for hook in hooks)


def _sum(values: Any) -> Tensor | None:
    """Of those that are there; None of none."""
    total: Tensor | None = None
    for value in values:
        if value is not None:
            total = value if total is None else total + value
    return total


def joined_label(labels: Sequence[str]) -> str:
    """What tables call a combination."""
    return " + ".join(labels)


def carried(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The hyper-parameters of a method's section that stay when it becomes the method ``name``.

    Those of methods that both have, wherever they stand in either.

    >>> carried({"name": "gar", "coefficient": 0.1}, "gar+zloss")
    {'coefficient': 0.1}
    >>> carried({"name": "gar", "coefficient": 0.1}, "zloss")
    {}
    """
    before = str(section.get("name", "")).split(JOIN)
    own = {key: value for key, value in section.items() if key not in ("name", WITH)}
    below = section.get(WITH)
    known: dict[str, Any] = {before[0]: own, **(below if isinstance(below, Mapping) else {})}
    first, *others = name.split(JOIN)
    kept = {other: dict(known[other]) for other in others if isinstance(known.get(other), Mapping)}
    mine = known.get(first)
    return {**(mine if isinstance(mine, Mapping) else {}), **({WITH: kept} if kept else {})}
