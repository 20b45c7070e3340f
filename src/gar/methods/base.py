"""What a training method may contribute to one update.

A method is a frozen pydantic model whose fields are its hyper-parameters, and any of four hooks:

* :meth:`Method.terms` - differentiable terms added to the task loss before the one backward of a pass;
* :meth:`Method.router_loss` - a loss over detached captures, back-propagated after the last pass;
* :meth:`Method.backward` and :meth:`Method.finish` - its own backward (CAGrad);
* :meth:`Method.initial_state` and :meth:`Method.after_step` - saved state of its own, changed after the
  optimizer's step.

It declares in :attr:`Method.observes` what has to be captured; the training loop never asks which one runs.
An update runs in passes, each one forward of whole same-task groups; all passes make one optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

if TYPE_CHECKING:
    from gar.methods.update import Pass, Update

#: What a method keeps from update to update: named tensors, or a module (its ``state_dict`` is kept).
MethodState = dict[str, Tensor] | nn.Module


@dataclass(frozen=True)
class Choices:
    """What :meth:`Method.check` may look at before anything is loaded."""

    site: str
    experts: int
    top_k: int
    #: Groups of a full update; None where the tasks are not known yet.
    groups: int | None
    #: Tasks of the mixture; None likewise.
    tasks: int | None = None


class Range(NamedTuple):
    """Between which limits, and on which scale, `gar search` varies a hyper-parameter."""

    low: float
    high: float
    scale: Literal["log", "linear"] = "log"


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
    #: Whether a comparison has it where nothing else is asked for.
    compared: ClassVar[bool] = False
    #: Fields that `gar search` varies beside the learning rate, and between which limits.
    ranges: ClassVar[Mapping[str, Range]] = {}
    #: Whether it needs every group's gradient in all parameters (:attr:`Pass.whole` in its own backward).
    whole_gradients: ClassVar[bool] = False

    #: Whether its rows may be examples or tokens (``observation.unit``): it reads them by
    #: :meth:`UpdateSite.observations` and :meth:`UpdateSite.row_probabilities`. A method without observations
    #: has no rows, whatever the unit.
    finer_observations: ClassVar[bool] = False

    #: Whether an update can be captured as a CUDA graph: the hooks never read a tensor's value on the host,
    #: draw no random numbers, and change the state in place.
    capturable: ClassVar[bool] = False

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """What a method is called, its part in comparisons and what it promises are not inherited."""
        defaults = {
            "label": getattr(cls, "name", ""),
            "style": None,
            "reference": False,
            "proposed": False,
            "compared": False,
            "capturable": False,
            "finer_observations": False,
        }
        for key, value in defaults.items():
            if key not in cls.__dict__:
                setattr(cls, key, value)

    @property
    def observes(self) -> frozenset[str]:
        """What has to be captured: ``"routing"``; ``"gradients"`` for group gradients of the experts;
        ``"outputs"`` for what each chosen expert makes of its unit.

        A zero coefficient needs nothing, so that it is exactly Baseline.
        """
        return frozenset()

    @property
    def finer_rows(self) -> bool:
        """Whether nothing here needs rows of groups."""
        return not self.whole_gradients and (self.finer_observations or "gradients" not in self.observes)

    @property
    def router_apart(self) -> bool:
        """Whether a router gets one backward an update: the method makes only a router loss of its captures.

        The task loss then stops at the gates, and :meth:`finish` brings both into the router.
        """
        own = (getattr(type(self), hook) is getattr(Method, hook) for hook in ("terms", "backward", "finish"))
        return "gradients" in self.observes and all(own)

    @property
    def one_backward(self) -> bool:
        """Whether a pass is one ordinary backward, after which routers alone get gradients."""
        return all(getattr(type(self), hook) is getattr(Method, hook) for hook in ("backward", "finish"))

    @property
    def spreads(self) -> bool:
        """Whether an update's groups may be spread over ranks, whose gradients are summed.

        True where the gradient is a sum over passes, and a router loss is made of what an update's sites
        give: both are of the whole update there. A method with its own backward says so itself.
        """
        return self.one_backward

    def check(self, choices: Choices) -> str | None:
        """Why this method cannot run with these choices, or None. Called before anything is loaded."""
        return None

    def initial_state(self, model: nn.Module) -> MethodState | None:
        """The state that this method keeps, made before the first update; None: it keeps none.

        ``model`` is the one in training, on its device (:func:`gar.nn.expert_banks` finds its experts). The
        state is found as ``state`` in every :class:`Pass` and :class:`Update`, is part of checkpoints, and a
        resumed run goes on from it: what a method remembers belongs there, never on the method itself.
        """
        return None

    def terms(self, pass_: Pass) -> Tensor | None:
        """A scalar added to the task loss of one pass before its backward."""
        return None

    def backward(self, pass_: Pass) -> None:
        """Add one pass to every ``.grad``; the default is one ordinary backward."""
        loss = pass_.task_loss
        extra = self.terms(pass_)
        (loss if extra is None else loss + extra).backward()

    def router_loss(self, update: Update) -> Tensor | None:
        """A scalar of the whole update that depends on router parameters alone."""
        return None

    def finish(self, update: Update) -> None:
        """After the last pass of an update, before the gradients are clipped."""
        update.backward(self.router_loss(update))

    def after_step(self, update: Update) -> None:
        """Change ``update.state`` after the optimizer's step, without gradients.

        The routing of the update's forwards is still there (:meth:`UpdateSite.selections`); anything
        recomputed now, like ``probabilities()``, comes from the new weights.
        """

    def to_config(self) -> dict[str, Any]:
        """``{"name": ..., hyper-parameters}``."""
        return {"name": self.name, **self.model_dump(mode="json")}
