"""Which runs may be compared, and what they are called.

*Setting*: everything that a result depends on, except what a comparison varies. Two runs are of one setting
when their configurations agree in all keys but

* ``seed``, ``method`` and ``optimizer.learning_rate`` (what methods and their searches vary);
* ``mixture.name``, ``mixture.tasks`` and ``mixture.planted`` (a setting has several mixtures; they are kept
  apart inside it, and so are those of one name with other tasks or other data, by the digests in
  environment.json);
* ``optimizer.clip``, ``optimizer.weight_decay`` and ``optimizer.epochs``, which a protocol may choose for
  each mixture - but where one mixture has runs with different values, they are different settings too, and
  so are runs on splits of different sizes;
* where and how a run was made: all keys that are of the kinds place and bookkeeping (:mod:`gar.config`).

*Variant*: a method, with its hyper-parameters in the name where one setting and mixture has it with several:
``GAR λ=0.01``.

Finished runs alone decide what differs; the others are placed among them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from gar.config import flat, result_only
from gar.data.registry import PLANTED, registry
from gar.methods import JOIN, REGISTRY, WITH, label_of
from gar.runs import Run, State

VARIED = {
    *("seed", "method", "observation", "optimizer.learning_rate"),
    *("mixture.name", "mixture.tasks", "mixture.planted"),
}
#: Keys of a method in the name of a variant, which stands in narrow columns.
SYMBOLS = {
    **{"coefficient": "λ", "load_coefficient": "λ_load", "learning_rate": "lr"},
    **{"observation.unit": "unit", "observation.rows": "rows"},
}
PER_MIXTURE = {"optimizer.clip", "optimizer.weight_decay", "optimizer.epochs"}


class Names(NamedTuple):
    """What a run is called."""

    setting: str
    mixture: str
    variant: str


def name_runs(runs: Iterable[Run]) -> dict[Run, Names]:
    """The names of all runs that have a configuration; different settings have different names."""
    ordered = sorted(runs, key=lambda run: run.state != State.FINISHED)
    contents = _contents(ordered)
    settings = _name_settings(ordered, contents)
    mixtures = _name_mixtures(ordered, settings, contents)
    variants = _name_variants(ordered, settings, mixtures)
    return {run: Names(settings[run], mixtures[run], variants[run]) for run in ordered}


def method_of(run: Run) -> str:
    return str((run.config.get("method") or {}).get("name") or run.result.get("method") or "?")


def seed_of(run: Run) -> int:
    return int(run.result.get("seed", run.config.get("seed", 0)))


def mixture_of(run: Run) -> str:
    """The mixture's name, or its tasks joined by +."""
    mixture = run.config.get("mixture") or {}
    names = [task["name"] if isinstance(task, Mapping) else str(task) for task in mixture.get("tasks") or ()]
    made = PLANTED if mixture.get("planted") else ""
    return str(run.result.get("mixture") or mixture.get("name") or made or "+".join(names) or "?")


def hyperparameters(run: Run) -> dict[str, Any]:
    """The method's own keys and the learning rate, what a search varies; and rows that are no groups."""
    own = flat(run.config.get("method") or {})
    own = {key.removeprefix(f"{WITH}."): value for key, value in own.items() if key != "name"}
    section = (result_only(run.config).get("observation") or {}) if _reads_rows(method_of(run)) else {}
    rows = flat({"observation": section})
    return {**own, **rows, "learning_rate": (run.config.get("optimizer") or {}).get("learning_rate")}


def _reads_rows(method: str) -> bool:
    """Whether rows of examples or tokens change anything in it; of an unknown method that is not known."""
    parts = [REGISTRY.get(name) for name in method.split(JOIN)]
    return any(part is None or part.finer_observations for part in parts)


def paper_setting(run: Run) -> str | None:
    """The paper's setting behind a run of one of its presets."""
    room, *below = str(run.config.get("preset")).replace("paper/lambda_sweep/", "paper/").split("/")
    return below[0] if room == "paper" and below else None


def _name_settings(runs: Sequence[Run], contents: Mapping[Run, str]) -> dict[Run, str]:
    groups: dict[str, list[Run]] = defaultdict(list)
    for run, key in zip(runs, _setting_keys(runs, contents), strict=True):
        groups[key].append(run)
    known = [key for key, members in groups.items() if members[0].state == State.FINISHED]
    names = {key: _base_name(_defining(members)) for key, members in groups.items()}
    shown = {key: _leaves(members[0], VARIED) for key, members in groups.items()}
    named = {}
    for key, members in groups.items():
        rivals = [other for other in (known if key in known else groups) if names[other] == names[key]]
        suffix = _difference(shown, key, rivals) if len(rivals) > 1 else ""
        named.update(dict.fromkeys(members, names[key] + suffix))
    return named


def _setting_keys(runs: Sequence[Run], contents: Mapping[Run, str]) -> list[str]:
    """Equal for runs of one setting. Keys chosen by mixture count where one mixture has several values."""
    table = pd.DataFrame(
        {
            "key": [_text(_leaves(run, VARIED | PER_MIXTURE)) for run in runs],
            "mixture": [contents[run] for run in runs],
            "chosen": [_text([flat(run.config).get(key) for key in sorted(PER_MIXTURE)]) for run in runs],
            "examples": [_text(run.result.get("examples") or None) for run in runs],
            "finished": [run.state == State.FINISHED for run in runs],
        },
        dtype=object,
    )
    # What a run does not tell (an unfinished one its split sizes) is as in all others, where these agree.
    told = table["examples"].where(table["examples"] != "null")
    sizes = told.groupby([table["key"], table["mixture"]])
    only = sizes.transform("first").where(sizes.transform("nunique") == 1, "")
    kinds = table["chosen"] + told.fillna(only)
    counts = kinds[table["finished"].astype(bool)].groupby([table["key"], table["mixture"]]).nunique()
    split = set(counts[counts > 1].index.get_level_values("key"))
    return [key + (kind if key in split else "") for key, kind in zip(table["key"], kinds, strict=True)]


def _name_mixtures(
    runs: Sequence[Run], settings: Mapping[Run, str], contents: Mapping[Run, str]
) -> dict[Run, str]:
    """The mixture of every run; equal names for other tasks or data get a number."""
    seen: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    named = {}
    for run in runs:
        name = mixture_of(run)
        numbers = seen[settings[run], name]
        number = numbers.setdefault(contents[run], len(numbers) + 1)
        named[run] = name if number == 1 else f"{name} ({number})"
    return named


def _name_variants(
    runs: Sequence[Run], settings: Mapping[Run, str], mixtures: Mapping[Run, str]
) -> dict[Run, str]:
    """Methods, with those hyper-parameters named that differ inside one setting and mixture."""
    cells: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    own = {run: hyperparameters(run) for run in runs}
    for run in runs:
        cells[settings[run], method_of(run), mixtures[run]].append(run)
    varied: dict[tuple[str, str], set[str]] = defaultdict(set)
    for (setting, method, _), members in cells.items():
        varied[setting, method] |= _differing([own[run] for run in _defining(members)])
    named = {}
    for run in runs:
        setting, method, values = settings[run], method_of(run), own[run]
        defining = _defining(cells[setting, method, mixtures[run]])
        keys = varied[setting, method] | _differing([values, *(own[other] for other in defining)])
        told = [f"{SYMBOLS.get(key, key)}={_short(values[key])}" for key in values if key in keys]
        named[run] = " ".join([label_of(method), *told])
    return named


def _defining(members: Sequence[Run]) -> Sequence[Run]:
    return [run for run in members if run.state == State.FINISHED] or members


def _leaves(run: Run, without: Collection[str]) -> dict[str, Any]:
    leaves = flat(result_only(run.config))
    return {k: v for k, v in leaves.items() if not any(f"{k}.".startswith(f"{key}.") for key in without)}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _contents(runs: Sequence[Run]) -> dict[Run, str]:
    """What a run's mixture is: its name, its tasks and, wherever the files lie, the digests of their data.

    A run that tells no digests (of a version before 0.2) has those of the others on the same files, if these
    agree; else the paths stand for the data.
    """
    places = {run: _text([mixture_of(run), _tasks(run.config)]) for run in runs}
    told = {run: _text(data) for run in runs if (data := run.environment.get("data"))}
    known: dict[str, set[str]] = defaultdict(set)
    for run, data in told.items():
        known[places[run]].add(data)
    found = {}
    for run in runs:
        digests = {told[run]} if run in told else known[places[run]]
        content = [mixture_of(run), _tasks(result_only(run.config)), *digests]
        found[run] = _text(content) if len(digests) == 1 else places[run]
    return found


def _tasks(config: Mapping[str, Any]) -> list[Any]:
    mixture = config.get("mixture") or {}
    if planted := mixture.get("planted"):
        return [planted]
    return list(mixture.get("tasks") or registry().mixtures.get(str(mixture.get("name")), ()))


def _base_name(members: Sequence[Run]) -> str:
    config = members[0].config
    backbone, experts = config.get("backbone") or {}, config.get("experts") or {}
    model = str(backbone.get("name", "?")).rstrip("/").rsplit("/", 1)[-1]
    trained = "trained" if backbone.get("trainable") else "frozen"
    size = f"E{experts.get('count', '?')}K{experts.get('top_k', '?')}"
    name = f"{model} {trained}, {experts.get('site', '?')}, {size}"
    only, *more = {paper_setting(run) for run in members}
    return f"{only}: {name}" if only and not more else name


def _difference(shown: Mapping[str, Mapping[str, Any]], key: str, rivals: Sequence[str]) -> str:
    """What tells one setting from others of the same name; a number where that is too much to say."""
    differing = sorted(_differing([shown[other] for other in rivals]))[:4]
    said = {o: ", ".join(f"{name}={_short(shown[o].get(name))}" for name in differing) for o in rivals}
    alone = said[key] and list(said.values()).count(said[key]) == 1
    return (f", {said[key]}" if said[key] else "") + ("" if alone else f" #{rivals.index(key) + 1}")


def _differing(values: Sequence[Mapping[str, Any]]) -> set[str]:
    names = {name for value in values for name in value}
    return {n for n in names if len({_text(v.get(n)) for v in values}) > 1}


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
