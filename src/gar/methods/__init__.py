"""Training methods and their registry: a new method is one file here and one line below."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from gar.errors import UserError, nearest, one_of
from gar.methods._finer import UnitChoice
from gar.methods._rows import GradientCombination
from gar.methods.base import Choices, Method, MethodState, Range
from gar.methods.baseline import Baseline
from gar.methods.cagrad import CAGrad
from gar.methods.combined import JOIN, WITH, Combined, carried, joined_label
from gar.methods.gar import GAR
from gar.methods.global_balance import GlobalBalance
from gar.methods.load_penalty import LoadPenalty
from gar.methods.loss_free import LossFreeBias
from gar.methods.ortho_variance import OrthogonalityVariance
from gar.methods.router_z import RouterZLoss
from gar.methods.simbal import SimBal
from gar.methods.stgc import STGC
from gar.methods.stgc_load import STGCLoad
from gar.methods.switch_aux import SwitchAux
from gar.methods.task_information import TaskInformation
from gar.methods.term import PassTerm, RouterTerm
from gar.methods.torchjd import TorchJD
from gar.methods.update import GroupWeights, Pass, PassSite, Share, Update, UpdateSite

REGISTRY: dict[str, type[Method]] = {
    cls.name: cls
    for cls in (
        *(Baseline, CAGrad, GAR, STGC, LoadPenalty, SwitchAux, STGCLoad),  # the paper's, in its order
        *(RouterZLoss, LossFreeBias, GlobalBalance, TaskInformation, SimBal),
        *(OrthogonalityVariance, TorchJD),
    )
}

#: The method that every other is compared with, and the one that is set against every other.
REFERENCE = next(name for name, cls in REGISTRY.items() if cls.reference)
PROPOSED = next(name for name, cls in REGISTRY.items() if cls.proposed)
#: What a comparison has where nothing else is asked for.
COMPARED = tuple(name for name, cls in REGISTRY.items() if cls.compared)


def register(cls: type[Method]) -> type[Method]:
    """Make a method class available by its ``name`` (usable as a decorator).

    A name of letters, digits, ``.``, ``_`` and ``-`` and a label that no other class has; a module that is
    imported again may register its classes again.
    """
    where = f"method class {cls.__module__}.{cls.__qualname__}"
    if not issubclass(cls, Method):
        raise UserError(f"{where} cannot be registered; expected a subclass of gar.methods.Method")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        found = "no name" if name is None else f"the name {name!r}"
        raise UserError(f"{where} has {found}; expected name = \"…\" of letters, digits, '.', '_' and '-'")
    other = REGISTRY.get(name, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise UserError(
            f"{where} has the name {name!r}, which {other.__module__}.{other.__qualname__} has already; "
            "expected a name of its own"
        )
    for other in REGISTRY.values():
        if other.label == cls.label and other.name != name:
            raise UserError(
                f"{where} has the label {cls.label!r}, which {other.name} has already; "
                "expected one of its own, since tables could not tell them apart"
            )
    REGISTRY[name] = cls
    return cls


def from_config(value: str | Mapping[str, Any]) -> Method:
    """``"gar"`` or ``{"name": "gar", "coefficient": 1e-3}`` to a method.

    ``"gar+zloss"``, or ``{"name": "gar", "with": {"zloss": {"coefficient": 0.01}}}``, to their combination.
    """
    if not isinstance(value, str | Mapping):
        raise UserError(
            f"method is {value!r}; expected a name or a mapping with the key name, e.g. {{name: gar}}"
        )
    fields = {"name": value} if isinstance(value, str) else dict(value)
    name = fields.pop("name", PROPOSED)
    first, *others = check_name(name, "method.name")
    below = _below(fields.pop(WITH, None))
    parts = {first: fields, **{other: below.pop(other, {}) for other in others}}
    for other, own in below.items():
        if other in parts:
            raise UserError(f"method.{WITH} names {other}, which is the method itself; expected another one")
        parts[other] = own
    check_name(JOIN.join(parts), f"method.{WITH}")
    made = [
        _method(part, own, "method" if part == first else f"method.{WITH}.{part}")
        for part, own in parts.items()
    ]
    return made[0] if len(made) == 1 else Combined(parts=tuple(made))


def check_name(name: object, where: str) -> list[str]:
    """The registered methods that a name stands for: one, or the several that it joins by +."""
    parts = name.split(JOIN) if isinstance(name, str) else []
    if not parts:
        raise one_of(where, name, REGISTRY)
    for part in parts:
        if part not in REGISTRY:
            raise one_of(where, part, REGISTRY)
        if len(parts) > 1 and REGISTRY[part].reference:
            raise UserError(f"{where} is {name!r}: {part} adds nothing to another; expected the others alone")
        if parts.count(part) > 1:
            raise UserError(f"{where} is {name!r}: {part} stands there twice; expected distinct methods")
    return parts


def label_of(name: str) -> str:
    """What tables call a method, or several joined by +; the name itself of one that is not registered."""
    return joined_label([REGISTRY[part].label if part in REGISTRY else part for part in name.split(JOIN)])


def _below(others: object) -> dict[str, Any]:
    """The section ``with``: names, or a mapping from names to hyper-parameters."""
    if isinstance(others, str):
        others = [others]
    if isinstance(others, list | tuple) and all(isinstance(name, str) for name in others):
        return {name: {} for name in others}
    if others is None:
        return {}
    if isinstance(others, Mapping) and all(
        own is None or isinstance(own, Mapping) for own in others.values()
    ):
        return {str(name): dict(own or {}) for name, own in others.items()}
    raise UserError(
        f"method.{WITH} is {others!r}; expected names, or a mapping like {{zloss: {{coefficient: 0.01}}}}"
    )


def _method(name: str, fields: Mapping[str, Any], where: str) -> Method:
    """One method of its hyper-parameters, which stand at the key ``where``."""
    cls = REGISTRY[name]
    for key in fields:
        if key not in cls.model_fields:
            known = ", ".join(cls.model_fields) or "none"
            raise UserError(
                f"unknown key '{where}.{key}' for method {name}; its keys: {known}"
                f"{nearest(key, cls.model_fields)}"
            )
    try:
        return cls(**fields)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join([where, *map(str, problem["loc"])])
        raise UserError(
            f"{key} is {problem['input']!r}; {problem['msg'][0].lower()}{problem['msg'][1:]}"
        ) from None


__all__ = [
    "COMPARED",
    "GAR",
    "JOIN",
    "PROPOSED",
    "REFERENCE",
    "REGISTRY",
    "STGC",
    "WITH",
    "Baseline",
    "CAGrad",
    "Choices",
    "Combined",
    "GlobalBalance",
    "GradientCombination",
    "GroupWeights",
    "LoadPenalty",
    "LossFreeBias",
    "Method",
    "MethodState",
    "OrthogonalityVariance",
    "Pass",
    "PassSite",
    "PassTerm",
    "Range",
    "RouterTerm",
    "RouterZLoss",
    "STGCLoad",
    "Share",
    "SimBal",
    "SwitchAux",
    "TaskInformation",
    "TorchJD",
    "UnitChoice",
    "Update",
    "UpdateSite",
    "carried",
    "check_name",
    "from_config",
    "label_of",
    "register",
]
