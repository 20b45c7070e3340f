"""Suites: settings x mixtures x methods x overrides x seeds, expanded into runs one at a time.

A suite is a short YAML file::

    title: GAR against Baseline on my own tasks
    settings: {small: base.yaml}              # preset prefixes, files or inline configuration trees
    mixtures: [five, six]                     # default: the preset's, or the file's own
    methods: [baseline, gar]                  # default: likewise
    seeds: 5                                  # 0, 1, 2, 3, 4; or a list
    set: {optimizer.updates: 500}             # for all runs
    overrides: {short: {optimizer.updates: 50}, long: {}}    # one run for each of them
    order: seed                               # all runs of one seed before the next; default: setting
    chosen_from: {mixtures: {six: five}}      # whose search, where a cell has none of its own
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gar import config as configuration
from gar.config import MixtureConfig, explain, load_tree, parse_overrides, set_key
from gar.data import identity
from gar.data.load import resolve
from gar.data.registry import find_mixture, find_task, is_task, unknown_name
from gar.errors import UserError, one_of, path_errors, path_kind, real_path, user_path
from gar.methods import from_config
from gar.presets import catalogue as presets
from gar.runs.names import path_part

Tree = dict[str, Any]

#: Checkpoints where neither configuration nor suite asks for any: a sweep survives a crash, and a run of a
#: few seconds is sooner computed again than written down on the way.
CHECKPOINTING = {"checkpoint.every": 200, "checkpoint.pause": 10.0}
MANY_SEEDS = 100_000  # a larger count is a mistake
#: What `gar search` leaves for each cell, below its directory.
CHOSEN = "chosen.yaml"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


class ChosenFrom(BaseModel):
    """Whose chosen hyper-parameters a run takes where its own cell was not searched: from name to name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: dict[str, str] = Field(default_factory=dict)
    mixtures: dict[str, str] = Field(default_factory=dict, description="`all` stands for those not named")
    methods: dict[str, str] = Field(default_factory=dict)

    def places(self, setting: str, mixture: str, method: str) -> list[Path]:
        """Where a choice may lie below the search's directory, the nearest first."""
        other = self.mixtures.get(mixture, self.mixtures.get("all", mixture))
        settings = dict.fromkeys((setting, self.settings.get(setting, setting)))
        methods = dict.fromkeys((method, self.methods.get(method, method)))
        places = itertools.product(settings, dict.fromkeys((mixture, other)), methods)
        return [Path(*place, CHOSEN) for place in places]


class SuiteFile(BaseModel):
    """A suite as it is written. Lists are short for mappings from a name to itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = ""
    settings: dict[str, str | Tree] = Field(
        min_length=1, description="name: preset prefix, file or inline tree"
    )
    mixtures: dict[str, str | Tree] | None = Field(
        None, description="name: mixture, task, or a mixture section"
    )
    methods: dict[str, str | Tree] | None = Field(None, description="name: method, or a method section")
    seeds: tuple[int, ...] = (0,)
    set: Tree = Field(default_factory=dict, description="dotted keys for all runs")
    overrides: dict[str, Tree] = Field(
        default_factory=dict, description="name: dotted keys; one run for each"
    )
    order: Literal["setting", "seed"] = Field("setting", description="what is finished first")
    chosen_from: ChosenFrom = ChosenFrom()

    @field_validator("settings", "mixtures", "methods", mode="before")
    @classmethod
    def _list_of_names(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple):
            return value
        named: Tree = {}
        for item in value:
            key = (
                Path(item).name.removesuffix(".yaml").removesuffix(".yml") if isinstance(item, str) else item
            )
            if not isinstance(key, str):
                raise ValueError(f"{item!r} in a list; expected names, or a mapping from names to sections")
            if key in named:
                raise ValueError(f"{key!r} stands there twice; expected distinct names")
            named[key] = item
        return named

    @field_validator("seeds", mode="before")
    @classmethod
    def _count_of_seeds(cls, value: Any) -> Any:
        seeds = value
        if isinstance(value, int) and not isinstance(value, bool):
            seeds = range(value) if value <= MANY_SEEDS else ()
        right = isinstance(seeds, list | tuple | range) and all(isinstance(s, int) and s >= 0 for s in seeds)
        if not right or not seeds or len(set(seeds)) < len(seeds):
            raise ValueError(f"is {value!r}; expected a positive count, or distinct seeds from 0 upwards")
        return tuple(seeds)

    @field_validator("settings", "mixtures", "methods", "overrides")
    @classmethod
    def _names_are_path_parts(cls, value: Tree | None) -> Tree | None:
        for name in value or ():
            if not NAME.fullmatch(name):
                raise ValueError(
                    f"the name {name!r} becomes a directory; expected letters, digits and . _ + -"
                )
        return value

    @field_validator("set", "overrides")
    @classmethod
    def _seeds_are_apart(cls, value: Tree) -> Tree:
        if any("seed" in tree for tree in (value, *value.values()) if isinstance(tree, dict)):
            raise ValueError("seed cannot be set here; expected the suite's own key 'seeds'")
        return value


@dataclass(frozen=True)
class Combination:
    """Everything of a run but its seed. ``tree`` is checked when it is first asked for."""

    setting: str
    mixture: str
    method: str
    base: Tree
    changes: Tree

    @property
    def id(self) -> str:
        return f"{self.setting}/{self.mixture}/{self.method}"

    @functools.cached_property
    def tree(self) -> Tree:
        """The full configuration as a plain tree, or a :class:`~gar.errors.UserError`."""
        tree = copy.deepcopy(self.base)
        for dotted, value in self.changes.items():
            set_key(tree, dotted, copy.deepcopy(value))
        if not (tree.get("checkpoint") or {}).get("every") and "checkpoint.every" not in self.changes:
            for key, value in CHECKPOINTING.items():
                if key not in self.changes:
                    set_key(tree, key, value)
        return configuration.build(tree, self.id).to_dict()

    @functools.cached_property
    def digest(self) -> str:
        """Of what the run computes, seed and data aside."""
        return configuration.digest(self.tree)

    @functools.cached_property
    def data(self) -> dict[str, str]:
        """A digest of every task's examples; empty where they are not here but on the machines that run."""
        try:
            return identity(MixtureConfig.model_validate(self.tree["mixture"]), self.tree["data_dir"])
        except UserError:
            return {}


@dataclass(frozen=True)
class PlannedRun:
    """One run of a suite. ``id`` is also its directory below the suite's."""

    combination: Combination
    seed: int
    probe: bool = False
    """Of a search: train on 90 % of the training split and evaluate on the other 10 %."""

    @property
    def id(self) -> str:
        return f"{self.combination.id}/seed-{self.seed}"

    def tree(self) -> Tree:
        """The run's configuration."""
        return {**self.combination.tree, "seed": self.seed}


class Runs(Protocol):
    """What a sweep does: runs under a name. The runs are made anew each time, so there may be many."""

    @property
    def name(self) -> str: ...

    def runs(self) -> Iterator[PlannedRun]: ...


class Only(NamedTuple):
    """Names that a suite is restricted to; an empty tuple restricts nothing."""

    settings: tuple[str, ...] = ()
    mixtures: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()

    def has(self, *cell: str) -> bool:
        """Whether a cell (setting, mixture, method) is among them."""
        return all(not names or name in names for names, name in zip(self, cell, strict=True))


ALL = Only()


@dataclass(frozen=True)
class Suite:
    """A suite whose names are all known."""

    name: str
    file: SuiteFile
    bases: Mapping[str, Tree | None]
    """A setting's configuration, or None for a preset prefix."""
    changes: Tree
    chosen: Path | None = None
    """A search's directory: hyper-parameters come from there."""
    only: Only = ALL

    def __len__(self) -> int:
        arms = max(1, len(self.file.overrides))
        return sum(1 for _ in self.cells()) * arms * len(self.file.seeds)

    def runs(self) -> Iterator[PlannedRun]:
        """Every run. A combination's configuration is built once; ordered by seed, all are kept for it."""
        if self.file.order == "seed":
            combinations = list(self.combinations())
            return (PlannedRun(found, seed) for seed in self.file.seeds for found in combinations)
        return (PlannedRun(found, seed) for found in self.combinations() for seed in self.file.seeds)

    def combinations(self) -> Iterator[Combination]:
        for cell in self.cells():
            for override in self.file.overrides or [""]:
                yield self.combination(*cell, override)

    def cells(self) -> Iterator[tuple[str, str, str]]:
        """Setting, mixture and method of every combination, in order."""
        for setting in self.file.settings:
            for mixture in self.mixtures(setting):
                for method in self.methods(setting, mixture):
                    if self.only.has(setting, mixture, method):
                        yield setting, mixture, method

    def restricted(
        self, settings: Iterable[str] = (), mixtures: Iterable[str] = (), methods: Iterable[str] = ()
    ) -> Suite:
        """Only the cells of these names; none of a kind: all of it. A name that no cell has is refused."""
        wanted = Only(tuple(settings), tuple(mixtures), tuple(methods))
        cells = list(replace(self, only=ALL).cells())
        for kind, names, known in zip(
            ("setting", "mixture", "method"), wanted, zip(*cells, strict=True), strict=True
        ):
            for name in names:
                if name not in known:
                    raise one_of(f"--{kind}", name, dict.fromkeys(known))
        found = replace(self, name=",".join((self.name, *itertools.chain(*wanted))), only=wanted)
        if not any(True for _ in found.cells()):
            raise UserError(f"{self.name}: has no run with all of {', '.join(itertools.chain(*wanted))}")
        return found

    def combination(self, setting: str, mixture: str, method: str, override: str = "") -> Combination:
        """One combination by its names; the method may be another than the suite's."""
        changes = {**self.file.set, **self.file.overrides.get(override, {}), **self.changes}
        label = f"{method}-{override}" if override else method
        base = self.base(setting, mixture, method)
        if self.chosen is not None:
            base = self._with_choice(base, self.chosen, setting, mixture, method)
        return Combination(setting, mixture, label, base, changes)

    def with_chosen(self, directory: Path) -> Suite:
        """The suite with the hyper-parameters that `gar search` chose; one that is missing is refused here.

        Learning rate, clipping and weight decay come from the choice, and the method's own searched keys too
        where the suite gives the method by its name alone. ``set``, ``overrides`` and the command line win.
        """
        missing = [cell for cell in self.cells() if self._choice_of(directory, *cell) is None]
        if missing:
            first = directory / self.file.chosen_from.places(*missing[0])[-1]
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(
                f"--chosen: no {first}{more}; expected the choices of `gar search` for every cell, "
                "or the suite's key chosen_from to say whose they are"
            )
        found = replace(self, chosen=directory)
        for cell in self.cells():
            found.combination(*cell)  # says what is wrong with a choice
        return found

    def _choice_of(self, directory: Path, *cell: str) -> Path | None:
        places = (directory / place for place in self.file.chosen_from.places(*cell))
        return next((place for place in places if path_kind(place) == "file"), None)

    def _with_choice(self, base: Tree, directory: Path, *cell: str) -> Tree:
        if (path := self._choice_of(directory, *cell)) is None:
            raise UserError(f"--chosen: no choice for {'/'.join(cell)} in {directory}")
        choice, method = _choice(path), base["method"]["name"]
        by_name = isinstance((self.file.methods or {}).get(cell[2], cell[2]), str)
        own = by_name and method == choice["method"].get("name") and presets.is_searched(method)
        tree, chosen = copy.deepcopy(base), configuration.flat(choice)
        for dotted in presets.searched(method) if own else presets.OPTIMIZER_FIELDS:
            if dotted not in chosen:
                raise UserError(f"{path}: has no {dotted}; expected a file that `gar search` wrote")
            set_key(tree, dotted, chosen[dotted])
        tree["preset"] = None  # it is no longer the published row
        return tree

    def mixtures(self, setting: str) -> list[str]:
        """The mixtures' names in a setting."""
        if self.file.mixtures is not None:
            return list(self.file.mixtures)
        base = self.bases[setting]
        if base is None:
            below = len(self._prefix(setting)) + 1
            return list(dict.fromkeys(name[below:].split("/")[0] for name in self._presets(setting)))
        name, _ = resolve(MixtureConfig.model_validate(base["mixture"]))
        return [path_part(name)]

    def methods(self, setting: str, mixture: str) -> list[str]:
        """The methods' names in a setting."""
        if self.file.methods is not None:
            return list(self.file.methods)
        base = self.bases[setting]
        if base is not None:
            return [base["method"]["name"]]
        start = f"{self._prefix(setting)}/{self._mixture(mixture)}/"
        return [name[len(start) :] for name in self._presets(setting) if name.startswith(start)]

    def base(self, setting: str, mixture: str, method: str) -> Tree:
        """The configuration before ``set`` and ``overrides``."""
        chosen = (self.file.methods or {}).get(method, method)
        if (base := self.bases[setting]) is None:
            return self._preset_base(setting, mixture, chosen)
        tree = copy.deepcopy(base)
        _put_method(tree, chosen)
        if self.file.mixtures is not None:
            _put_mixture(tree, mixture, self.file.mixtures[mixture])
        return tree

    def _preset_base(self, setting: str, mixture: str, method: str | Tree) -> Tree:
        word = method if isinstance(method, str) else from_config(method).name
        name = f"{self._prefix(setting)}/{self._mixture(mixture)}/{word}"
        tree = presets.find(name).config().to_dict()
        if not isinstance(method, str):
            _put_method(tree, method)
        return tree

    def _mixture(self, mixture: str) -> str:
        chosen = (self.file.mixtures or {}).get(mixture, mixture)
        if not isinstance(chosen, str):
            raise UserError(f"mixtures.{mixture}: a preset has its own mixtures; expected one of their names")
        return chosen

    def _prefix(self, setting: str) -> str:
        return str(self.file.settings[setting]).strip("/")

    def _presets(self, setting: str) -> list[str]:
        return _below(self._prefix(setting))

    def replace(self, changes: Mapping[str, Any]) -> Suite:
        """The suite with more keys set in all runs."""
        if "seed" in changes:
            raise UserError("seed=…: a suite has its own seeds; expected its key 'seeds'")
        return replace(self, changes={**self.changes, **changes})


def shipped() -> list[str]:
    """Names of the packaged suites."""
    files = resources.files("gar.sweeps").joinpath("suites").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def load_suite(what: str | Path, overrides: Iterable[str] = ()) -> Suite:
    """A suite from a YAML file, or a packaged one by name; ``overrides`` are ``key.sub=value`` strings."""
    path = Path(what)
    if path_kind(path) == "file" or path.suffix.lower() in {".yaml", ".yml"}:
        suite = build_suite(load_tree(path), path.stem, real_path(path).parent, str(path))
    elif str(what) in shipped():
        text = resources.files("gar.sweeps").joinpath("suites", f"{what}.yaml").read_text(encoding="utf-8")
        suite = build_suite(yaml.safe_load(text), str(what), Path.cwd(), f"suite {what}")
    else:
        raise one_of("suite", what, shipped())
    return suite.replace(parse_overrides(overrides))


def build_suite(tree: Tree, name: str, directory: Path, where: str = "suite") -> Suite:
    """A suite from a plain tree; relative paths in it are relative to ``directory``."""
    try:
        file = SuiteFile.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, SuiteFile)}") from None
    try:
        anchored = {
            "set": _anchored(file.set, directory),
            "overrides": {key: _anchored(value, directory) for key, value in file.overrides.items()},
            "mixtures": file.mixtures
            and {
                key: value if isinstance(value, str) else _anchored({"mixture": value}, directory)["mixture"]
                for key, value in file.mixtures.items()
            },
        }
        file = file.model_copy(update=anchored)
        suite = Suite(name, file, {key: _base(value, directory) for key, value in file.settings.items()}, {})
        _check_names(suite)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return suite


def _base(setting: str | Tree, directory: Path) -> Tree | None:
    if isinstance(setting, dict):
        return configuration.build(_anchored(setting, directory), "settings").to_dict()
    if _below(setting.strip("/")):
        return None
    path = directory / user_path(setting)
    return presets.resolve_config(
        str(path) if path_kind(path) != "missing" or path.suffix else setting
    ).to_dict()


def _choice(path: Path) -> Tree:
    """A chosen configuration as a tree."""
    with path_errors(path):
        return _read_choice(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _read_choice(path: Path, changed: int) -> Tree:
    """Read once, and again when it was changed."""
    tree = load_tree(path)
    if not all(isinstance(tree.get(section), dict) for section in ("method", "optimizer")):
        raise UserError(f"{path}: has no sections method and optimizer; expected a file of `gar search`")
    return tree


@functools.cache
def _below(prefix: str) -> list[str]:
    return [name for name in presets.names() if name.startswith(f"{prefix}/")]


def _anchored(tree: Tree, directory: Path) -> Tree:
    return configuration.anchor_paths(copy.deepcopy(tree), directory)


def _put_method(tree: Tree, method: str | Tree) -> None:
    if isinstance(method, str):
        set_key(tree, "method.name", method)  # keeps the coefficients of the base's own method
    else:
        tree["method"] = copy.deepcopy(method)


def _put_mixture(tree: Tree, name: str, mixture: str | Tree) -> None:
    kept = {k: v for k, v in tree["mixture"].items() if k not in ("name", "tasks", "planted")}
    if isinstance(mixture, dict):
        own = mixture.get("tasks") or mixture.get("planted") is not None
        tree["mixture"] = {**kept, "name": name if own else None, **copy.deepcopy(mixture)}
    elif found := find_mixture(mixture):
        tree["mixture"] = {**kept, "name": found}
    elif is_task(mixture):
        tree["mixture"] = {**kept, "tasks": [find_task(mixture).name]}
    else:
        raise unknown_name(mixture)


def _check_names(suite: Suite) -> None:
    """Every mixture, method and preset is valid. Whether they fit together, the single run finds out."""
    for setting in suite.file.settings:
        for mixture in suite.mixtures(setting):
            for method in suite.methods(setting, mixture):
                from_config(suite.base(setting, mixture, method)["method"])
