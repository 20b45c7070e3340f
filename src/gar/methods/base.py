"""What a training method may contribute to one update.

A method is a frozen pydantic model whose fields are its hyper-parameters, and any of three hooks:

* :meth:`Method.terms` - differentiable terms added to the task loss before the one backward of a pass;
* :meth:`Method.router_loss` - a loss over detached captures, back-propagated after the last pass;
* :meth:`Method.backward` and :meth:`Method.finish` - its own backward (CAGrad).

It declares in ``observes`` what has to be captured. The training loop never asks which method runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict
from torch import Tensor

if TYPE_CHECKING:
    from gar.methods.update import Pass, Update


class Method(BaseModel):
    """Base of all methods; see ``gar/methods/gar.py`` for a small one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    #: Captures a method asks for: ``"gradients"`` (group gradients of the experts), ``"outputs"``
    #: (the task-loss derivative at the experts' output, before the backward).
    observes: ClassVar[frozenset[str]] = frozenset()

    @property
    def captures(self) -> frozenset[str]:
        """What this configuration of the method needs; a zero coefficient needs nothing."""
        return self.observes

    def check(self, site: str, experts: int, batch_size: int, group_size: int) -> str | None:
        """Why this method cannot run with these choices, or None. Called before anything is loaded."""
        return None

    def terms(self, step: Pass) -> Tensor | None:
        """A scalar added to the task loss of one pass before its backward."""
        return None

    def backward(self, step: Pass) -> None:
        """Fill ``.grad`` from one pass; the default is one ordinary backward."""
        loss = step.task_loss
        extra = self.terms(step)
        (loss if extra is None else loss + extra).backward()  # type: ignore[no-untyped-call]

    def router_loss(self, update: Update) -> Tensor | None:
        """A scalar of the whole update that depends on router parameters alone."""
        return None

    def finish(self, update: Update) -> None:
        """After the last pass of an update."""
        loss = self.router_loss(update)
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]

    def to_config(self) -> dict[str, Any]:
        """``{"name": ..., hyper-parameters}``."""
        return {"name": self.name, **self.model_dump(mode="json")}
