"""Training methods and their registry: a new method is one file here and one line below."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from gar.errors import UserError, nearest, one_of
from gar.methods._rows import GradientCombination
from gar.methods.base import Choices, Method, MethodState
from gar.methods.baseline import Baseline
from gar.methods.cagrad import CAGrad
from gar.methods.gar import GAR
from gar.methods.load_penalty import LoadPenalty
from gar.methods.stgc import STGC
from gar.methods.stgc_load import STGCLoad
from gar.methods.switch_aux import SwitchAux
from gar.methods.torchjd import TorchJD
from gar.methods.update import GroupWeights, Pass, PassSite, Share, Update, UpdateSite

REGISTRY: dict[str, type[Method]] = {
    cls.name: cls for cls in (Baseline, CAGrad, GAR, STGC, LoadPenalty, SwitchAux, STGCLoad, TorchJD)
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
    """``"gar"`` or ``{"name": "gar", "coefficient": 1e-3}`` to a method."""
    if not isinstance(value, str | Mapping):
        raise UserError(
            f"method is {value!r}; expected a name or a mapping with the key name, e.g. {{name: gar}}"
        )
    fields = {"name": value} if isinstance(value, str) else dict(value)
    name = fields.pop("name", "gar")
    if not isinstance(name, str) or name not in REGISTRY:
        raise one_of("method.name", name, REGISTRY)
    cls = REGISTRY[name]
    for key in fields:
        if key not in cls.model_fields:
            known = ", ".join(cls.model_fields) or "none"
            raise UserError(
                f"unknown key 'method.{key}' for method {name}; its keys: {known}"
                f"{nearest(key, cls.model_fields)}"
            )
    try:
        return cls(**fields)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(["method", *map(str, problem["loc"])])
        raise UserError(
            f"{key} is {problem['input']!r}; {problem['msg'][0].lower()}{problem['msg'][1:]}"
        ) from None


__all__ = [
    "COMPARED",
    "GAR",
    "PROPOSED",
    "REFERENCE",
    "REGISTRY",
    "STGC",
    "Baseline",
    "CAGrad",
    "Choices",
    "GradientCombination",
    "GroupWeights",
    "LoadPenalty",
    "Method",
    "MethodState",
    "Pass",
    "PassSite",
    "STGCLoad",
    "Share",
    "SwitchAux",
    "TorchJD",
    "Update",
    "UpdateSite",
    "from_config",
    "register",
]
