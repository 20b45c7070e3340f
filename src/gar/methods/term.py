"""Bases of methods that add one weighted term to the task loss."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from gar.methods.base import Method
from gar.methods.update import Pass, PassSite, Update, UpdateSite


class _Term(Method):
    """A coefficient; where it is 0 nothing is captured, and nothing added: exactly Baseline."""

    #: What :attr:`observes` says while the coefficient is not 0.
    captures: ClassVar[frozenset[str]] = frozenset({"routing"})
    coefficient: float = Field(1e-3, ge=0)

    @property
    def observes(self) -> frozenset[str]:
        return self.captures if self.coefficient else frozenset()


class RouterTerm(_Term):
    """``L_task + coefficient * sum over sites of`` :meth:`at`, which reaches the router alone.

    One whose :attr:`reads` says that it knows neither groups nor examples is also a loss for routers that are
    not ours: ``GARArguments(router_losses=[name])``.
    """

    #: What :meth:`at` takes of a site: ``"units"`` for ``unit_sums``, ``unit_count`` and ``selections``,
    #: added up over groups before anything else; ``"weight"`` for ``router_weight``; ``"groups"`` for what
    #: else there is of a site and of the update.
    reads: ClassVar[frozenset[str]] = frozenset({"groups"})

    def at(self, site: UpdateSite, update: Update) -> Tensor:
        """A scalar of one expert site, of detached captures of the whole update."""
        raise NotImplementedError

    def router_loss(self, update: Update) -> Tensor | None:
        if not self.coefficient:
            return None
        return self.coefficient * sum((self.at(site, update) for site in update.sites), start=update.zero)


class PassTerm(_Term):
    """``L_task + coefficient * sum over passes and sites of`` :meth:`at`, before the one backward of each."""

    def at(self, site: PassSite, pass_: Pass) -> Tensor:
        """A scalar of one expert site in one pass, with its graph; passes add up."""
        raise NotImplementedError

    def terms(self, pass_: Pass) -> Tensor | None:
        if not self.coefficient:
            return None
        none = pass_.losses.new_zeros(())
        return self.coefficient * sum((self.at(site, pass_) for site in pass_.sites), start=none)
