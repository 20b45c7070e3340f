"""The runs of a comparison: one configuration with several methods, each with the same seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gar.config import Config, build, set_key
from gar.data import identity
from gar.data.load import resolve
from gar.errors import UserError
from gar.methods import COMPARED, REFERENCE, REGISTRY, check_name, label_of
from gar.runs.directory import first_difference
from gar.runs.files import read_json, write_json
from gar.runs.names import path_part
from gar.sweeps.store import SWEEP
from gar.sweeps.suite import MANY_SEEDS, Combination, PlannedRun, Tree

RECORD = "comparison.json"
#: Share of every training split that is held out to choose the model by.
SELECTION = 0.1


@dataclass(frozen=True)
class Arms:
    """What is compared: a configuration for each method, Baseline first; the runs of a sweep.

    ``setting`` and ``mixture`` are names of directories, ``trees`` has full configurations by method.
    """

    setting: str
    mixture: str
    trees: Mapping[str, Tree]
    seeds: tuple[int, ...]
    name: str = "compare"

    @property
    def methods(self) -> list[str]:
        return list(self.trees)

    @property
    def labels(self) -> dict[str, str]:
        """What readers call the methods."""
        return {method: label_of(method) for method in self.trees}

    def __len__(self) -> int:
        return len(self.trees) * len(self.seeds)

    def runs(self) -> Iterator[PlannedRun]:
        """Every run; those of one seed come together, so that an unfinished comparison has whole pairs."""
        combinations = [
            Combination(self.setting, self.mixture, method, dict(tree), {})
            for method, tree in self.trees.items()
        ]
        return (PlannedRun(combination, seed) for seed in self.seeds for combination in combinations)


def make_arms(
    config: Config, setting: str, methods: Sequence[str] | None, seeds: int | Sequence[int]
) -> Arms:
    """The arms of a configuration; its own method keeps its coefficients, the others have their defaults.

    Without ``methods`` they are :data:`gar.methods.COMPARED` and the configuration's own. Baseline is always
    among them.
    """
    chosen = [*COMPARED, config.method.name] if methods is None else list(methods)
    if not chosen:
        raise UserError(f"--methods names none; expected some of {', '.join(REGISTRY)}")
    for name in chosen:
        check_name(name, "--methods")
    name, entries = resolve(config.mixture)
    selection = config.evaluation.selection or SELECTION
    trees = {}
    for method in dict.fromkeys([REFERENCE, *chosen]):
        tree = config.to_dict()
        set_key(tree, "method.name", method)
        set_key(tree, "evaluation.selection", selection)
        if method != config.method.name:
            tree["preset"] = None  # it is no longer the published row
        found = build(tree, method)
        found.check_method(len(entries))
        trees[method] = found.to_dict()
    return Arms(path_part(setting), path_part(name), trees, _seeds(seeds))


def _seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    found = tuple(range(seeds)) if isinstance(seeds, int) and 0 < seeds <= MANY_SEEDS else seeds
    if isinstance(found, int) or not found or len(set(found)) < len(found) or min(found) < 0:
        raise UserError(
            f"--seeds is {seeds!r}; expected a count of 1 or more, or distinct seeds from 0 upwards"
        )
    return tuple(found)


def check_record(out: Path, arms: Arms, search: Mapping[str, Any] | None) -> str | None:
    """Refuse a directory with another comparison, and say in which key it differs.

    More or fewer methods and seeds are the same comparison: what differs in them is returned in words.
    """
    before = read_json(out / SWEEP / RECORD)
    if before is None:
        return None
    expected = "expected the same, or another --out"
    place = [arms.setting, arms.mixture]
    if (found := before.get("place")) != place:
        raise UserError(f"{out}: holds a comparison of {found}, found {place}; {expected}")
    for method, tree in arms.trees.items():
        stored = before["methods"].get(method)
        if stored is not None and (change := first_difference({**stored, "seed": 0}, {**tree, "seed": 0})):
            key, was, now = change
            raise UserError(f"{out}: the comparison there has {key}: {was!r}, found {now!r}; {expected}")
    for task, digest in _data(arms).items():
        if before["data"].get(task, digest) != digest:
            raise UserError(
                f"{out}: the comparison there is on other data (the examples of task {task} are not the "
                f"same); {expected}"
            )
    if before.get("search") != search:
        was, now = (_searched(s) for s in (before.get("search"), search))
        raise UserError(f"{out}: the comparison there was made {was}, found {now}; {expected}")
    changed = [
        f"{what} were {', '.join(map(str, was))} and are {', '.join(map(str, now))}"
        for what, was, now in (
            ("methods", before["asked"]["methods"], arms.methods),
            ("seeds", before["asked"]["seeds"], list(arms.seeds)),
        )
        if list(was) != list(now)
    ]
    return "; ".join(changed) or None


def write_record(out: Path, arms: Arms, search: Mapping[str, Any] | None) -> None:
    """Note what is compared in a directory, for :func:`check_record`."""
    before = (read_json(out / SWEEP / RECORD) or {}).get("methods", {})
    (out / SWEEP).mkdir(parents=True, exist_ok=True)
    facts = {
        "place": [arms.setting, arms.mixture],
        "methods": {**before, **arms.trees},
        "asked": {"methods": arms.methods, "seeds": list(arms.seeds)},
        "data": _data(arms),
        "search": search,
    }
    write_json(out / SWEEP / RECORD, facts)


def _data(arms: Arms) -> dict[str, str]:
    config = build(next(iter(arms.trees.values())))
    return identity(config.mixture, config.data_dir)


def _searched(search: Mapping[str, Any] | None) -> str:
    return "without --search" if search is None else f"with --search of {search['updates']} updates"
