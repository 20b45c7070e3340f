"""What a training method may contribute to one update.

A method is a frozen pydantic model whose fields are its hyper-parameters, and any of three hooks:

* :meth:`Method.terms` - differentiable terms added to the task loss before the one backward of a pass;
* :meth:`Method.router_loss` - a loss over detached captures, back-propagated after the last pass;
* :meth:`Method.backward` and :meth:`Method.finish` - its own backward (CAGrad).

It declares in :attr:`Method.observes` what has to be captured; the training loop never asks which one runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict
from torch import Tensor

if TYPE_CHECKING:
    from gar.methods.update import Pass, Update


@dataclass(frozen=True)
class Choices:
    """What :meth:`Method.check` may look at before anything is loaded."""

    site: str
    experts: int
    top_k: int
    #: Groups of a full update; None where the tasks are not known yet.
    groups: int | None


class Method(BaseModel):
    """Base of all methods; see ``gar/methods/gar.py`` for a small one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: ClassVar[str]
    #: What tables and figures call it; the name where a class says nothing.
    label: ClassVar[str]
    #: Colour and marker in figures as matplotlib spells them ("ink": the text's colour); None takes a grey.
    style: ClassVar[tuple[str, str] | None] = None
    #: Whether every other method is compared with it, and whether it is set against every other one.
    reference: ClassVar[bool] = False
    proposed: ClassVar[bool] = False
    #: Whether every group gets a forward and backward of its own (methods that need whole group gradients).
    separate_groups: ClassVar[bool] = False

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """What a method is called, and its part in comparisons, is not inherited: tables tell all apart."""
        defaults = {"label": getattr(cls, "name", ""), "style": None, "reference": False, "proposed": False}
        for key, value in defaults.items():
            if key not in cls.__dict__:
                setattr(cls, key, value)

    @property
    def observes(self) -> frozenset[str]:
        """What has to be captured: ``"routing"``, and ``"gradients"`` for group gradients of the experts.

        A zero coefficient needs nothing, so that it is exactly Baseline.
        """
        return frozenset()

    def check(self, choices: Choices) -> str | None:
        """Why this method cannot run with these choices, or None. Called before anything is loaded."""
        return None

    def terms(self, step: Pass) -> Tensor | None:
        """A scalar added to the task loss of one pass before its backward."""
        return None

    def backward(self, step: Pass) -> None:
        """Fill ``.grad`` from one pass; the default is one ordinary backward."""
        loss = step.task_loss
        extra = self.terms(step)
        (loss if extra is None else loss + extra).backward()

    def router_loss(self, update: Update) -> Tensor | None:
        """A scalar of the whole update that depends on router parameters alone."""
        return None

    def finish(self, update: Update) -> None:
        """After the last pass of an update."""
        loss = self.router_loss(update)
        if loss is not None:
            loss.backward()

    def to_config(self) -> dict[str, Any]:
        """``{"name": ..., hyper-parameters}``."""
        return {"name": self.name, **self.model_dump(mode="json")}
