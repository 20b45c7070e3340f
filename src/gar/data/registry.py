"""The tasks and mixtures known by name; their definitions are in ``tasks.yaml``."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from importlib import resources

import yaml
from pydantic import BaseModel, ConfigDict, model_validator

from gar.data._rows import Recipe, Segment
from gar.errors import UserError, nearest, one_of

#: The mixture that is made, not read: :func:`gar.data.planted`.
PLANTED = "planted"


class RegisteredTask(BaseModel):
    """One entry of ``tasks.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    labels: tuple[str, ...]
    text: tuple[str | tuple[str, ...], ...] = ("input",)
    label: str = "label"
    extra: tuple[str, ...] = ()
    drop_empty: bool = False
    hub: str | None = None
    config: str | None = None
    train: tuple[str, ...] = ("train",)
    validation: tuple[str, ...] = ("validation",)
    bigbench: str | None = None
    skill: str = ""

    @model_validator(mode="after")
    def _one_source(self) -> RegisteredTask:
        if (self.hub is None) == (self.bigbench is None):
            raise ValueError(f"{self.name}: needs either hub or bigbench")
        return self

    @property
    def origin(self) -> str:
        """Where the data comes from, for people."""
        if self.bigbench is not None:
            return f"BIG-bench {self.bigbench}"
        return f"hub {self.hub}" + (f" ({self.config})" if self.config else "")

    def recipe(self) -> Recipe:
        segments: tuple[Segment, ...] = tuple((s,) if isinstance(s, str) else s for s in self.text)
        return Recipe(
            name=self.name,
            text=segments,
            label=self.label,
            labels=self.labels,
            drop_empty=self.drop_empty,
            hub_codes=self.hub is not None,
            extra=self.extra,
        )


class Registry(BaseModel):
    """Every registered task and mixture."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: dict[str, RegisteredTask]
    mixtures: dict[str, tuple[str, ...]]

    @model_validator(mode="before")
    @classmethod
    def _keys_are_names(cls, tree: dict[str, dict[str, dict[str, object]]]) -> dict[str, object]:
        return {**tree, "tasks": {name: {"name": name, **entry} for name, entry in tree["tasks"].items()}}

    @model_validator(mode="after")
    def _mixtures_know_their_tasks(self) -> Registry:
        for mixture, names in self.mixtures.items():
            if unknown := set(names) - set(self.tasks):
                raise ValueError(f"mixture {mixture} names unknown tasks {sorted(unknown)}")
        return self


@functools.cache
def registry() -> Registry:
    """The packaged registry."""
    text = resources.files("gar.data").joinpath("tasks.yaml").read_text(encoding="utf-8")
    return Registry.model_validate(yaml.safe_load(text))


def find_task(name: str) -> RegisteredTask:
    """The registered task called ``name``; case and hyphens do not matter, BIG-bench's own paths work too.

    >>> find_task("SST-2").name, find_task("fact_checker/fever").name
    ('sst2', 'fever')
    """
    if (task := _spellings().get(_folded(name))) is None:
        raise one_of("task", name, registry().tasks)
    return task


def is_task(name: str) -> bool:
    """Whether :func:`find_task` knows the name."""
    return _folded(name) in _spellings()


def find_mixture(name: str) -> str | None:
    """The registered spelling of a mixture's name, or None.

    >>> find_mixture("Seven-PAWS")
    'seven_paws'
    """
    return {_folded(known): known for known in mixture_names()}.get(_folded(name))


def mixture_names() -> tuple[str, ...]:
    """The registered mixtures, and the planted one."""
    return (*registry().mixtures, PLANTED)


def unknown_mixture(name: str) -> UserError:
    return one_of("mixture", name, mixture_names())


def unknown_name(name: str) -> UserError:
    """For a word that is neither a registered mixture nor a registered task."""
    hint = nearest(name, [*mixture_names(), *registry().tasks]) or "; `gar data ls` lists them"
    return UserError(f"{name!r} is no file and no registered mixture or task{hint}")


def bigbench_paths() -> Iterable[str]:
    """The folders of every registered BIG-bench task."""
    return [task.bigbench for task in registry().tasks.values() if task.bigbench]


def _spellings() -> dict[str, RegisteredTask]:
    tasks = registry().tasks.values()
    paths = {_folded(task.bigbench): task for task in tasks if task.bigbench}
    return paths | {_folded(task.name): task for task in tasks}


def _folded(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).lower()
