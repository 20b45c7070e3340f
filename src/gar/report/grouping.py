"""Which runs may be compared, and what they are called.

*Setting*: everything that a result depends on, except what a comparison varies. Two runs are of one setting
when their configurations agree in all keys but

* ``seed``, ``method`` and ``optimizer.learning_rate`` (what methods and their searches vary);
* ``mixture.name`` and ``mixture.tasks`` (a setting has several mixtures; they are kept apart inside it);
* ``optimizer.clip``, ``optimizer.weight_decay`` and ``optimizer.epochs``, which a protocol may choose for
  each mixture - but where one mixture has runs with different values, they are different settings too, and
  so are runs on splits of different sizes;
* where and how a run was made: device, directories, cache, checkpoints, tracking, the evaluation interval,
  the observation path, the split of updates into passes, and the preset's name.

*Variant*: a method, with its hyper-parameters in the name where one setting and mixture has it with several.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gar.data.registry import registry
from gar.runs.reading import Run

METHODS = {
    "baseline": "Baseline",
    "cagrad": "CAGrad",
    "gar": "GAR",
    "stgc": "STGC",
    "loadpen": "LoadPen",
    "switchaux": "SwitchAux",
    "stgc_load": "STGC+Load",
    "torchjd": "TorchJD",
}
VARIED = {"seed", "method", "optimizer.learning_rate", "mixture.name", "mixture.tasks"}
PER_MIXTURE = {"optimizer.clip", "optimizer.weight_decay", "optimizer.epochs"}
NO_MATTER = {"device", "data_dir", "tracking", "preset", "observation", "max_tokens_per_pass"}
NO_MATTER |= {"evaluation.every", "evaluation.batch_tokens", "cache.enabled", "cache.directory"}
NO_MATTER |= {"checkpoint.every", "checkpoint.keep", "backbone.gradient_checkpointing"}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; lists stay whole.

    >>> flat({"experts": {"count": 8}, "seed": 1})
    {'experts.count': 8, 'seed': 1}
    """
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        leaves.update(flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return leaves


def method_label(name: str) -> str:
    """The name as the paper writes it."""
    return METHODS.get(name, name)


def method_rank(name: str) -> tuple[int, str]:
    """Sorts methods in the paper's order, unknown ones behind."""
    order = list(METHODS)
    return (order.index(name) if name in order else len(order), name)


def method_of(run: Run) -> str:
    return str((run.config.get("method") or {}).get("name") or run.result.get("method") or "?")


def seed_of(run: Run) -> int:
    return int(run.result.get("seed", run.config.get("seed", 0)))


def mixture_of(run: Run) -> str:
    """The mixture's name, or its tasks joined by +."""
    mixture = run.config.get("mixture") or {}
    names = [task["name"] if isinstance(task, Mapping) else str(task) for task in mixture.get("tasks") or ()]
    return str(run.result.get("mixture") or mixture.get("name") or "+".join(names) or "?")


def hyperparameters(run: Run) -> dict[str, Any]:
    """The method's own keys and the learning rate: what a search varies."""
    own = {key: value for key, value in (run.config.get("method") or {}).items() if key != "name"}
    rate = (run.config.get("optimizer") or {}).get("learning_rate")
    return {**own, "learning_rate": rate}


def paper_setting(run: Run) -> str | None:
    """The paper's setting behind a run of one of its presets."""
    parts = (
        str(run.config.get("preset") or "")
        .removeprefix("paper/lambda_sweep/")
        .removeprefix("paper/")
        .split("/")
    )
    return parts[0] if str(run.config.get("preset")).startswith("paper/") else None


def name_settings(runs: Sequence[Run]) -> dict[Run, str]:
    """The readable name of every run's setting; different settings have different names."""
    groups = _comparable(runs)
    keys = {key: _shown(members[0]) for key, members in groups.items()}
    names = {key: _base_name(members) for key, members in groups.items()}
    named: dict[Run, str] = {}
    for key, members in groups.items():
        alike = [other for other in groups if names[other] == names[key]]
        suffix = _difference(keys, key, alike) if len(alike) > 1 else ""
        named.update(dict.fromkeys(members, names[key] + suffix))
    return named


def name_mixtures(runs: Sequence[Run], settings: Mapping[Run, str]) -> dict[Run, str]:
    """The mixture of every run; equal names for different tasks or data files get a number."""
    seen: dict[tuple[str, str], list[str]] = defaultdict(list)
    named = {}
    for run in runs:
        name = mixture_of(run)
        contents = seen[settings[run], name]
        identity = _mixture_identity(run)
        if identity not in contents:
            contents.append(identity)
        number = contents.index(identity) + 1
        named[run] = name if number == 1 else f"{name} ({number})"
    return named


def name_variants(
    runs: Sequence[Run], settings: Mapping[Run, str], mixtures: Mapping[Run, str]
) -> dict[Run, str]:
    """Methods, with those hyper-parameters named that differ inside one setting and mixture."""
    cells: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        cells[settings[run], method_of(run), mixtures[run]].append(run)
    varied: dict[tuple[str, str], set[str]] = defaultdict(set)
    for (setting, method, _), members in cells.items():
        varied[setting, method] |= _differing([hyperparameters(run) for run in members])
    named = {}
    for run in runs:
        method, values = method_of(run), hyperparameters(run)
        keys = [key for key in values if key in varied[settings[run], method]]
        suffix = ", ".join(f"{key}={_short(values[key])}" for key in keys)
        named[run] = method_label(method) + (f" ({suffix})" if suffix else "")
    return named


def _comparable(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by setting. Per-mixture keys count where one mixture has several values of them."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[_key(run, VARIED | PER_MIXTURE | NO_MATTER)].append(run)
    refined: dict[str, list[Run]] = {}
    for key, members in groups.items():
        sizes: dict[str, set[str]] = defaultdict(set)
        for run in members:
            if examples := _examples(run):
                sizes[_mixture_identity(run)].add(examples)
        kinds: list[str] = []
        chosen: dict[str, set[str]] = defaultdict(set)
        for run in members:
            known = sizes[_mixture_identity(run)]
            # An unfinished run does not tell its split sizes yet; where all others agree it is like them.
            examples = _examples(run) or (next(iter(known)) if len(known) == 1 else "")
            kinds.append(_per_mixture(run) + examples)
            chosen[_mixture_identity(run)].add(kinds[-1])
        several = any(len(values) > 1 for values in chosen.values())
        for run, kind in zip(members, kinds, strict=True):
            refined.setdefault(key + (kind if several else ""), []).append(run)
    return refined


def _examples(run: Run) -> str:
    """The sizes of the splits a finished run was trained and measured on."""
    examples = run.result.get("examples")
    return json.dumps(examples, sort_keys=True) if examples else ""


def _key(run: Run, without: Iterable[str]) -> str:
    return json.dumps(_shown(run, without), sort_keys=True, default=str)


def _shown(run: Run, without: Iterable[str] = VARIED | NO_MATTER) -> dict[str, Any]:
    dropped = set(without)
    return {k: v for k, v in flat(run.config).items() if k not in dropped and k.split(".")[0] not in dropped}


def _per_mixture(run: Run) -> str:
    leaves = flat(run.config)
    return json.dumps({key: leaves.get(key) for key in sorted(PER_MIXTURE)})


def _mixture_identity(run: Run) -> str:
    """Name, tasks and, for a user's own tasks, where their data come from."""
    mixture = run.config.get("mixture") or {}
    tasks = mixture.get("tasks") or registry().mixtures.get(str(mixture.get("name")), ())
    return json.dumps([mixture_of(run), list(tasks)], sort_keys=True, default=str)


def _base_name(members: Sequence[Run]) -> str:
    config = members[0].config
    backbone, experts = config.get("backbone") or {}, config.get("experts") or {}
    model = str(backbone.get("name", "?")).rstrip("/").rsplit("/", 1)[-1]
    trained = "trained" if backbone.get("trainable") else "frozen"
    size = f"E{experts.get('count', '?')}K{experts.get('top_k', '?')}"
    name = f"{model} {trained}, {experts.get('site', '?')}, {size}"
    settings = {paper_setting(run) for run in members}
    only = next(iter(settings)) if len(settings) == 1 else None
    return f"{only}: {name}" if only else name


def _difference(keys: Mapping[str, Mapping[str, Any]], key: str, alike: Sequence[str]) -> str:
    """What tells one setting from others of the same name; a number where that is too much to say."""
    differing = sorted(_differing([keys[other] for other in alike]))
    parts = [f"{name}={_short(keys[key].get(name))}" for name in differing]
    shown = ", ".join(parts[:4])
    others = [", ".join([f"{n}={_short(keys[o].get(n))}" for n in differing][:4]) for o in alike if o != key]
    number = f" #{alike.index(key) + 1}" if not shown or shown in others else ""
    return (f", {shown}" if shown else "") + number


def _differing(values: Sequence[Mapping[str, Any]]) -> set[str]:
    names = {name for value in values for name in value}
    return {n for n in names if len({json.dumps(v.get(n), default=str, sort_keys=True) for v in values}) > 1}


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
