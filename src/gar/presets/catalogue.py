"""Named configurations: every row of the paper's configuration tables, its coefficient sweeps, and our own.

``paper/<setting>/<mixture or task>/<method>`` and
``paper/lambda_sweep/<setting>/<mixture>/<objective>/<lambda>`` are rows of the packaged tables
(:mod:`gar.presets.paper`) filled into the base configuration of their setting in ``settings.yaml``, which
also has ``bigbench/<mixture>/<method>``.

>>> find("paper/roberta_head/five/gar").config(seed=1).method.coefficient
0.001
"""

from __future__ import annotations

import copy
import fnmatch
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from gar import config as configuration
from gar.config import Config, flat, overridden, result_only
from gar.data.load import resolve
from gar.data.registry import find_mixture, find_task, is_task, mixture_names, registry
from gar.errors import UserError, nearest, path_kind
from gar.methods import JOIN, REGISTRY, WITH
from gar.presets import paper

Tree = dict[str, Any]

#: Which column of the configuration tables is which key, for all methods.
OPTIMIZER_FIELDS: Mapping[str, str] = {
    "optimizer.learning_rate": "learning_rate",
    "optimizer.clip": "grad_clip",
    "optimizer.weight_decay": "weight_decay",
}

#: Which column of ``configs.csv`` is which field of a method.
METHOD_FIELDS: Mapping[str, Mapping[str, str]] = {
    "baseline": {},
    "cagrad": {"c": "cagrad_c", "inner_learning_rate": "cagrad_inner_lr"},
    "gar": {"coefficient": "lambda_align"},
    "stgc": {"coefficient": "beta_stgc"},
    "loadpen": {"coefficient": "lambda_load"},
    "switchaux": {"coefficient": "alpha_switch"},
    "stgc_load": {"coefficient": "beta_stgc", "load_coefficient": "lambda_load"},
}


def searched(method: str) -> dict[str, str]:
    """Configuration keys that are selected for a method, and what they are called.

    In the paper's methods that is what the paper selects, by the columns of its tables; in others what their
    ``ranges`` name.

    >>> searched("gar")["method.coefficient"]
    'lambda_align'
    >>> searched("gar+zloss")["method.with.zloss.coefficient"]
    'zloss.coefficient'
    """
    own: dict[str, str] = {}
    for part in (parts := method.split(JOIN)):
        section = "method" if part == parts[0] else f"method.{WITH}.{part}"
        own |= {f"{section}.{field}": column for field, column in _columns(part).items()}
    return {**own, **OPTIMIZER_FIELDS}


def is_searched(method: str) -> bool:
    """Whether there are ranges to search a method in."""
    return all(part in METHOD_FIELDS or _columns(part) for part in method.split(JOIN))


def _columns(method: str) -> Mapping[str, str]:
    if method in METHOD_FIELDS:
        return METHOD_FIELDS[method]
    ranges = REGISTRY[method].ranges if method in REGISTRY else {}
    return {field: f"{method}.{field}" for field in ranges}


@dataclass(frozen=True)
class Preset:
    """One named configuration.

    ``setting``, ``subject`` (a mixture or task, as the paper's tables spell it) and ``method`` say what it
    is, ``origin`` where it comes from, ``choices`` what the paper leaves open and what was chosen.
    ``published`` has the paper's means over its seeds, by metric (keys of
    :data:`gar.presets.paper.METRICS`), accuracies as fractions; empty for presets of our own.
    """

    name: str
    setting: str
    subject: str
    method: str
    origin: str
    tree: Mapping[str, Any]
    choices: Mapping[str, str]
    published: Mapping[str, str]

    def config(self, seed: int = 0) -> Config:
        """The configuration, with ``preset`` set to the name."""
        tree = {**copy.deepcopy(dict(self.tree)), "preset": self.name, "seed": seed}
        return configuration.build(tree, f"preset {self.name}")

    def to_yaml(self, seed: int = 0) -> str:
        """The full configuration, with the origin and the choices as comments."""
        body = yaml.safe_dump(self.config(seed).to_dict(), sort_keys=False, allow_unicode=True)
        choices = "".join(f"#   {key}: {choice}\n" for key, choice in self.choices.items())
        return f"# {self.name}\n# {self.origin}\n\n{body}\n# Stated choices:\n{choices}"


def names(pattern: str | None = None) -> list[str]:
    """All preset names, or those that a glob pattern matches or that contain the text.

    >>> names("paper/*_top1/five/gar")
    ['paper/roberta_frozen_lora_ffn_top1/five/gar', 'paper/roberta_head_top1/five/gar']
    """
    if pattern is None:
        return list(_presets())
    wanted = _folded(pattern)
    if not any(sign in wanted for sign in "*?["):
        wanted = f"*{wanted}*"
    return [name for name in _presets() if fnmatch.fnmatchcase(_folded(name), wanted)]


def find(name: str) -> Preset:
    """The preset called ``name``; case does not matter, ``_`` and ``-`` are one, ``sst2`` is ``SST-2``."""
    if (known := _spellings().get(_folded(name))) is None:
        raise UserError(f"unknown preset {name!r}{_hint(name, names()) or '; `gar presets ls` lists them'}")
    return _presets()[known]


def is_preset(name: str) -> bool:
    """Whether :func:`find` knows the name."""
    return _folded(name) in _spellings()


def resolve_config(what: str, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Config:
    """The configuration behind one word: a YAML file, a preset, a registered mixture or task.

    ``overrides`` are ``key.sub=value`` strings, or a mapping with dotted keys.
    """
    path, kind = Path(what), path_kind(what)
    if kind == "file" or path.suffix.lower() in {".yaml", ".yml"}:
        return configuration.load(path, overrides)
    if is_preset(what):
        return find(what).config().override(overrides)
    if mixture := find_mixture(what):
        return configuration.build({"mixture": {"name": mixture}}).override(overrides)
    if is_task(what):
        return configuration.build({"mixture": {"tasks": [find_task(what).name]}}).override(overrides)
    if kind != "missing":
        return configuration.load(path, overrides)  # says what is wrong with it
    known = [*mixture_names(), *registry().tasks, *names()]
    raise UserError(f"{what!r} is no file, preset, registered mixture or task{_hint(what, known)}")


def check(what: str) -> Config:
    """:func:`resolve_config`, and whether the tasks are known and the method can run with them."""
    config = resolve_config(what)
    config.check_method(len(resolve(config.mixture)[1]))
    return config


def deviations(config: Config) -> list[str]:
    """Keys of the result in which a configuration differs from the preset it names; its seed is its own.

    >>> deviations(resolve_config("paper/roberta_head/five/gar", ["optimizer.updates=10", "seed=3"]))
    ['optimizer.updates']
    """
    if config.preset is None or not is_preset(config.preset):
        return []
    own, published = (
        flat(result_only(each.to_dict())) for each in (config, find(config.preset).config(config.seed))
    )
    return [key for key in {**own, **published} if own.get(key) != published.get(key)]


def write(preset: Preset, path: str | Path, force: bool = False) -> Path:
    """Write the preset as a file for ``gar train``."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a directory, expected a file name")
    if path.exists() and not force:
        raise UserError(f"{path}: exists; --force overwrites it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(preset.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    return path


# ---------------------------------------------------------------------- rows on their bases


@functools.cache
def _presets() -> dict[str, Preset]:
    return {preset.name: preset for source in (_selected, _sweeps, _own) for preset in source()}


@functools.cache
def _bases() -> Tree:
    """``settings.yaml``: base configurations and stated choices."""
    text = resources.files("gar.presets").joinpath("settings.yaml").read_text(encoding="utf-8")
    tree: Tree = yaml.safe_load(text)
    return tree


def _selected() -> Iterator[Preset]:
    for row in paper.configs():
        setting, subject, method = row[:3]
        yield _preset(
            f"paper/{setting}/{subject}/{method}",
            setting,
            subject,
            {"method.name": method, **_cells(row, searched(method))},
            _origin(paper.settings()[setting].config_tables),
            paper.endpoint(setting, subject, method),
        )


def _sweeps() -> Iterator[Preset]:
    printed: dict[tuple[str, ...], dict[str, str]] = {}
    for cell in paper.lambda_sweep():
        printed.setdefault(cell[:4], {})[cell.row] = cell.value
    fixed = {row[:2]: row for row in paper.lambda_sweep_configs()}
    for (setting, mixture, objective, coefficient), values in printed.items():
        if (row := fixed.get((setting, mixture))) is None:
            continue  # the mean over mixtures
        gar = {"name": "gar", "coefficient": float(coefficient), "objective": objective}
        percent = {"acc": Decimal(values["macro"]), "seed_std": Decimal(values["seed_std"])}
        yield _preset(
            f"paper/lambda_sweep/{setting}/{mixture}/{objective}/{coefficient}",
            setting,
            mixture,
            {"method": gar, "optimizer.updates": int(row.optimizer_updates), **_cells(row, OPTIMIZER_FIELDS)},
            _origin(paper.settings()[setting].sweep_config_tables),
            {metric: values[metric] for metric in ("lvar", "purity", "util")}
            | {metric: str(value / 100) for metric, value in percent.items()},
        )


def _own() -> Iterator[Preset]:
    for family, base in _bases()["settings"].items():
        for short, mixture in base.get("mixtures", {}).items():
            for method, fields in base["methods"].items():
                values = {"method": {"name": method, **fields}}
                yield _preset(f"{family}/{short}/{method}", family, mixture, values, "not from the paper")


def _preset(
    name: str,
    setting: str,
    subject: str,
    values: Tree,
    origin: str,
    published: Mapping[str, str] = MappingProxyType({}),
) -> Preset:
    """The setting's base with a row's values, by dotted keys, and the choices in words."""
    bases = _bases()
    base = bases["settings"][setting]
    tree = overridden(copy.deepcopy(base["config"]), values)
    if "epochs" in base:
        tasks = [find_task(subject).name]
        tree["mixture"]["tasks"], tree["optimizer"]["epochs"] = tasks, base["epochs"][subject]
    else:
        tasks = list(registry().mixtures[subject])
        tree["mixture"]["name"] = subject
    method = tree["method"]["name"]
    notes = dict(base["choices"])
    for more in (*(bases["tasks"].get(task, {}) for task in tasks), bases["methods"].get(method, {})):
        notes |= more
    chosen = flat(tree)
    choices = {key: f"{chosen[key]}; {note}" if key in chosen else note for key, note in notes.items()}
    return Preset(name, setting, subject, method, origin, tree, choices, published)


def _cells(row: NamedTuple, columns: Mapping[str, str]) -> dict[str, float]:
    return {key: float(getattr(row, column)) for key, column in columns.items()}


def _origin(tables: str) -> str:
    return f"paper, {tables.replace(';', ', ')}"


# ---------------------------------------------------------------------- names


@functools.cache
def _spellings() -> dict[str, str]:
    spellings = {_folded(name): name for name in _presets()}
    for name, preset in _presets().items():
        if is_task(preset.subject):
            spellings[_folded(name.replace(preset.subject, find_task(preset.subject).name))] = name
    return spellings


def _folded(name: str) -> str:
    return name.strip("/").lower().replace("_", "-")


def _hint(name: str, known: Iterable[str]) -> str:
    start = _folded(name) + "/"
    below = {preset[len(start) :].split("/")[0] for preset in names() if _folded(preset).startswith(start)}
    return f"; below it are {', '.join(sorted(below))}" if below else nearest(name, known)
