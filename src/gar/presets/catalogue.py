"""Named configurations: every row of the paper's configuration tables, its coefficient sweeps, and our own.

``paper/<setting>/<mixture or task>/<method>`` and
``paper/lambda_sweep/<setting>/<mixture>/<objective>/<lambda>`` are generated from the packaged tables
(:mod:`gar.presets.paper`), ``bigbench/<mixture>/<method>`` from ``presets.yaml``.

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
from typing import Any, NamedTuple

import yaml

from gar import config as configuration
from gar.config import Config, set_key
from gar.data.load import resolve
from gar.data.registry import find_mixture, find_task, is_task, registry
from gar.errors import UserError, nearest
from gar.methods import Choices
from gar.presets import paper

Tree = dict[str, Any]

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

#: Rows of the sweeps that the paper prints in percent, and their metric.
SWEEP_PERCENT: Mapping[str, str] = {"macro": "acc", "seed_std": "seed_std"}

#: Keys that leave the trained model and its measured values as they are, up to rounding.
NEUTRAL = (
    "preset", "seed", "device", "data_dir", "tracking", "observation", "max_tokens_per_pass",
    "cache.enabled", "cache.directory", "checkpoint.*", "evaluation.every", "evaluation.batch_tokens",
    "backbone.gradient_checkpointing",
)  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """One named configuration.

    ``setting``, ``subject`` (a mixture or task, as the paper's tables spell it) and ``method`` say what it
    is, ``origin`` where it comes from, ``choices`` what the paper leaves open and what was chosen, ``seeds``
    the final runs. ``published`` has the paper's means over its seeds, by metric (keys of
    :data:`gar.presets.paper.METRICS`), accuracies as fractions; empty for presets of our own.
    """

    name: str
    setting: str
    subject: str
    method: str
    origin: str
    tree: Mapping[str, Any]
    choices: Mapping[str, str]
    seeds: tuple[int, ...]
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
    wanted = _plain(pattern)
    if not any(sign in wanted for sign in "*?["):
        wanted = f"*{wanted}*"
    return [name for name in _presets() if fnmatch.fnmatchcase(_plain(name), wanted)]


def find(name: str) -> Preset:
    """The preset called ``name``; case does not matter, ``_`` and ``-`` are one, ``sst2`` is ``SST-2``."""
    if (known := _spellings().get(_plain(name))) is None:
        raise UserError(f"unknown preset {name!r}{_hint(name, names()) or '; `gar presets ls` lists them'}")
    return _presets()[known]


def is_preset(name: str) -> bool:
    """Whether :func:`find` knows the name."""
    return _plain(name) in _spellings()


def resolve_config(what: str, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Config:
    """The configuration behind one word: a YAML file, a preset, a registered mixture or task.

    ``overrides`` are ``key.sub=value`` strings, or a mapping with dotted keys.
    """
    path = Path(what)
    if path.is_file() or path.suffix.lower() in {".yaml", ".yml"}:
        return configuration.load(path, overrides)
    if is_preset(what):
        return find(what).config().override(overrides)
    if mixture := find_mixture(what):
        return configuration.build({"mixture": {"name": mixture}}).override(overrides)
    if is_task(what):
        return configuration.build({"mixture": {"tasks": [find_task(what).name]}}).override(overrides)
    if path.exists():
        return configuration.load(path, overrides)  # says what is wrong with it
    known = [*registry().mixtures, *registry().tasks, *names()]
    raise UserError(f"{what!r} is no file, preset, registered mixture or task{_hint(what, known)}")


def check(what: str) -> Config:
    """:func:`resolve_config`, and whether the tasks are known and the method can run with them."""
    config = resolve_config(what)
    _, entries = resolve(config.mixture)
    groups = -(-config.mixture.batch_size // config.mixture.group_size) * len(entries)
    experts = config.experts
    if problem := config.method.check(Choices(experts.site, experts.count, experts.top_k, groups)):
        raise UserError(f"method.name is {config.method.name}: {problem}")
    return config


def deviations(config: Config) -> list[str]:
    """Keys in which a configuration differs from the preset it names, apart from :data:`NEUTRAL` ones.

    >>> deviations(resolve_config("paper/roberta_head/five/gar", ["optimizer.updates=10", "seed=3"]))
    ['optimizer.updates']
    """
    if config.preset is None or not is_preset(config.preset):
        return []
    own, published = _flat(config.to_dict()), _flat(find(config.preset).config().to_dict())
    keys = [*own, *(key for key in published if key not in own)]
    changed = [key for key in keys if own.get(key) != published.get(key)]
    return [key for key in changed if not any(fnmatch.fnmatchcase(key, neutral) for neutral in NEUTRAL)]


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


# ---------------------------------------------------------------------- generation


class _Row(NamedTuple):
    """A row of a configuration table, whichever table it is from."""

    learning_rate: str
    grad_clip: str
    weight_decay: str
    updates: str


@functools.cache
def _presets() -> dict[str, Preset]:
    return {preset.name: preset for source in (_selected, _sweeps, _own) for preset in source()}


def _selected() -> Iterator[Preset]:
    for row in paper.configs():
        setting = paper.settings()[row.setting]
        cells = row._asdict()
        method = {field: float(cells[column]) for field, column in METHOD_FIELDS[row.method].items()}
        values = _Row(row.learning_rate, row.grad_clip, row.weight_decay, setting.optimizer_updates)
        yield _preset(
            f"paper/{row.setting}/{row.mixture_or_task}/{row.method}",
            row.mixture_or_task,
            _paper_tree(setting, row.mixture_or_task, values, {"name": row.method, **method}),
            setting,
            setting.config_tables,
            paper.endpoint(row.setting, row.mixture_or_task, row.method),
        )


def _sweeps() -> Iterator[Preset]:
    arms: dict[tuple[str, str, str, str], dict[str, str]] = {}
    for cell in paper.lambda_sweep():
        arms.setdefault(cell[:4], {})[cell.row] = cell.value
    fixed = {(row.setting, row.mixture): row for row in paper.lambda_sweep_configs()}
    for (setting_id, mixture, objective, coefficient), printed in arms.items():
        if (row := fixed.get((setting_id, mixture))) is None:
            continue  # the mean over mixtures
        setting = paper.settings()[setting_id]
        values = _Row(row.learning_rate, row.grad_clip, row.weight_decay, row.optimizer_updates)
        method = {"name": "gar", "coefficient": float(coefficient), "objective": objective}
        percent = {metric: str(Decimal(printed[key]) / 100) for key, metric in SWEEP_PERCENT.items()}
        yield _preset(
            f"paper/lambda_sweep/{setting_id}/{mixture}/{objective}/{coefficient}",
            mixture,
            _paper_tree(setting, mixture, values, method),
            setting,
            setting.sweep_config_tables,
            {metric: printed[metric] for metric in ("lvar", "purity", "util")} | percent,
        )


def _own() -> Iterator[Preset]:
    text = resources.files("gar.presets").joinpath("own.yaml").read_text(encoding="utf-8")
    for family, entry in yaml.safe_load(text).items():
        for short, mixture in entry["mixtures"].items():
            for method, fields in entry["methods"].items():
                tree = copy.deepcopy(entry["config"])
                tree["mixture"]["name"] = mixture
                tree["method"] = {"name": method, **fields}
                yield _preset(f"{family}/{short}/{method}", mixture, tree)


def _paper_tree(setting: paper.Setting, subject: str, row: _Row, method: Tree) -> Tree:
    """The tables' cells as a configuration tree."""
    trainable = setting.backbone_trainable == "trainable"
    half = setting.precision.startswith("bf16")
    tree: Tree = {
        "backbone": {
            "name": paper.open_choices()["backbones"][setting.backbone_name_in_text],
            "trainable": trainable,
            # A frozen backbone is stored in half precision; a trained one computes in it, on float32 weights.
            "dtype": "bfloat16" if half and not trainable else "float32",
            "pooling": "mean",
            "max_length": int(setting.max_seq_len),
        },
        "experts": {"site": setting.expert_kind, "count": int(setting.experts), "top_k": int(setting.top_k)},
        "method": method,
        "mixture": {"batch_size": int(setting.per_task_batch_size), "group_size": int(setting.group_size)},
        "optimizer": {
            "learning_rate": float(row.learning_rate),
            "weight_decay": float(row.weight_decay),
            "clip": float(row.grad_clip),
            "warmup": float(setting.warmup_ratio),
        },
        "precision": "bfloat16" if half and trainable else "float32",
    }
    if setting.rank:
        tree["experts"]["rank"] = int(setting.rank)
        tree["experts"]["alpha"] = float(setting.lora_alpha)
        tree["experts"]["dropout"] = float(setting.lora_dropout)
    if subject in paper.mixtures():
        tree["mixture"]["name"] = subject
        tree["optimizer"]["updates"] = int(row.updates)
    else:
        epochs = dict(entry.split("=") for entry in setting.epochs.split(";"))
        tree["mixture"]["tasks"] = [find_task(subject).name]
        tree["optimizer"]["epochs"] = float(epochs[subject])
    return tree


def _preset(
    name: str,
    subject: str,
    tree: Tree,
    setting: paper.Setting | None = None,
    tables: str = "",
    published: Mapping[str, str] | None = None,
) -> Preset:
    choices = _decide(tree, setting)
    return Preset(
        name=name,
        setting=setting.setting if setting else name.split("/")[0],
        subject=subject,
        method=tree["method"]["name"],
        origin=f"paper, {tables.replace(';', ', ')}" if setting else "not from the paper",
        tree=tree,
        choices=choices,
        seeds=tuple(paper.open_choices()["seeds"]),
        published=published or {},
    )


def _decide(tree: Tree, setting: paper.Setting | None) -> dict[str, str]:
    """Fill the choices of ``choices.yaml`` into the tree; returns them in words."""
    known = registry()
    mixture = tree["mixture"]
    facts = _flat(tree | ({"setting": setting._asdict()} if setting else {}))
    facts["tasks"] = known.mixtures[mixture["name"]] if "name" in mixture else mixture["tasks"]
    facts["preset"] = "paper" if setting else "own"
    choices: dict[str, str] = {}
    for entry in paper.open_choices()["choices"]:
        if not all(_set(facts.get(key)) & _set(wanted) for key, wanted in entry.get("when", {}).items()):
            continue
        key = entry["key"]
        if "value" in entry:
            set_key(tree, key, entry["value"])
        value = entry.get("value", facts.get(key))
        note = entry["note"].format(setting=setting)
        choices[key] = note if value is None else f"{value}; {note}"
    return choices


# ---------------------------------------------------------------------- names


@functools.cache
def _spellings() -> dict[str, str]:
    spellings = {_plain(name): name for name in _presets()}
    for name, preset in _presets().items():
        if is_task(preset.subject):
            spellings[_plain(name.replace(preset.subject, find_task(preset.subject).name))] = name
    return spellings


def _plain(name: str) -> str:
    return name.strip("/").lower().replace("_", "-")


def _hint(name: str, known: Iterable[str]) -> str:
    start = _plain(name) + "/"
    below = {preset[len(start) :].split("/")[0] for preset in names() if _plain(preset).startswith(start)}
    return f"; below it are {', '.join(sorted(below))}" if below else nearest(name, known)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _set(value: Any) -> set[Any]:
    return set(value) if isinstance(value, list | tuple) else {value}
