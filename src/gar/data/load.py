"""From a configuration, or just a name, to tasks in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from gar.config import MixtureConfig, TaskConfig
from gar.data import _bigbench, _hub, _rows
from gar.data._files import open_table
from gar.data._permutation import fixed_permutation
from gar.data._planted import PlantedTask, planted_tasks
from gar.data._rows import Recipe, build_task
from gar.data.paths import cache_root
from gar.data.registry import (
    PLANTED,
    RegisteredTask,
    find_mixture,
    find_task,
    is_task,
    registry,
    unknown_mixture,
    unknown_name,
)
from gar.data.task import Mixture, Split, Task, check_labels
from gar.errors import UserError, name_problem, nearest, path_errors, path_kind, real_path, user_path

#: What a mixture names: tasks whose data are still to be read, or made.
Entry: TypeAlias = RegisteredTask | TaskConfig | PlantedTask


def load(
    what: str | TaskConfig | Sequence[str | TaskConfig],
    *,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    batch_size: int = 32,
    group_size: int = 8,
    max_train_examples: int | None = None,
    max_validation_examples: int | None = None,
) -> Mixture:
    """A mixture by name (``"five"``), or from registered task names and task descriptions of one's own."""
    name = find_mixture(what) if isinstance(what, str) else None
    if isinstance(what, str) and not name and not is_task(what):
        raise unknown_name(what)
    tasks = (what,) if isinstance(what, str | TaskConfig) else tuple(what)
    config = MixtureConfig(
        name=name,
        tasks=() if name else tasks,
        batch_size=batch_size,
        group_size=group_size,
        max_train_examples=max_train_examples,
        max_validation_examples=max_validation_examples,
    )
    return load_mixture(config, data_dir=data_dir, cache_dir=cache_dir)


def load_mixture(
    config: MixtureConfig, *, data_dir: str | Path | None = None, cache_dir: str | Path | None = None
) -> Mixture:
    """Read and check every task of a mixture. The first problem is a :class:`~gar.errors.UserError`."""
    name, entries = resolve(config)
    tasks = tuple(
        load_task(
            entry,
            data_dir=data_dir,
            cache_dir=cache_dir,
            max_train_examples=config.max_train_examples,
            max_validation_examples=config.max_validation_examples,
        )
        for entry in entries
    )
    notes = tuple(note for task in tasks for note in task.notes)
    return Mixture(name, tasks, config.batch_size, config.group_size, notes)


def resolve(config: MixtureConfig) -> tuple[str, tuple[Entry, ...]]:
    """The mixture's name and its tasks, nothing read yet. Without a name it is the task names joined by +."""
    registered = find_mixture(config.name) if config.name else None
    if config.planted is not None:
        return _planted_name(config, registered), planted_tasks(config.planted)
    if registered and config.tasks:
        raise UserError(
            f"mixture.name {registered!r} is a registered mixture with its own tasks; "
            "leave mixture.tasks out or choose another name"
        )
    if config.name and not registered and not config.tasks:
        raise unknown_mixture(config.name)
    tasks = registry().mixtures[registered] if registered else config.tasks
    if not tasks:
        raise UserError(
            "mixture has no tasks; set mixture.tasks, or mixture.name to a registered one, e.g. five"
        )
    entries = tuple(find_task(task) if isinstance(task, str) else task for task in tasks)
    names = [entry.name for entry in entries]
    _check_names("mixture.name", *filter(None, [config.name]))
    _check_names("mixture.tasks: the name", *names)
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"mixture.tasks: two tasks are named {repeated[0]!r}; expected distinct names")
    return registered or config.name or "+".join(names), entries


def _planted_name(config: MixtureConfig, registered: str | None) -> str:
    if config.tasks:
        raise UserError("mixture has both tasks and planted; expected one of them: planted makes its own")
    if registered not in (None, PLANTED):
        raise UserError(
            f"mixture.name {registered!r} is a registered mixture with its own tasks; "
            "leave mixture.planted out or choose another name"
        )
    _check_names("mixture.name", *filter(None, [config.name]))
    return registered or config.name or PLANTED


def load_task(
    task: str | Entry,
    *,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    max_train_examples: int | None = None,
    max_validation_examples: int | None = None,
) -> Task:
    """Read and check one task.

    ``data_dir`` replaces the hub by ``DIR/<task>/{train,validation}.jsonl[.gz]``, and BIG-bench for the tasks
    that it has. The maxima take the first
    examples of a fixed shuffle, so a smaller sample is part of a larger one.
    """
    entry = find_task(task) if isinstance(task, str) else task
    loaded = _load(entry, local_files(entry, data_dir), cache_dir)
    validation = _sample(loaded.validation, max_validation_examples, f"{loaded.name}/validation")
    notes = loaded.notes
    if (taken := len(validation)) < len(loaded.validation):
        notes += (f"{loaded.name} validation: {taken} of {len(loaded.validation)} rows, as configured",)
    return dataclasses.replace(
        loaded,
        train=_sample(loaded.train, max_train_examples, f"{loaded.name}/train"),
        validation=validation,
        notes=notes,
    )


def _load(task: Entry, files: tuple[Path, Path] | None, cache_dir: str | Path | None) -> Task:
    if isinstance(task, PlantedTask):
        return task.make()
    recipe = task.recipe() if isinstance(task, RegisteredTask) else _own_recipe(task)
    if files is not None:
        train, validation = map(open_table, files)
        return build_task(recipe, [train], [validation])
    if isinstance(task, TaskConfig):
        assert task.hub is not None
        train, classes = _hub.open_split(task.hub, task.hub_config, task.train_split, recipe.columns)
        validation, _ = _hub.open_split(task.hub, task.hub_config, task.validation_split, recipe.columns)
        return build_task(_with_hub_classes(recipe, classes.get(task.label)), [train], [validation])
    if task.hub is None:
        train, validation = _bigbench.open_splits(task, cache_root(cache_dir))
        return build_task(recipe, [train], [validation])
    tables = {
        split: _hub.open_split(task.hub, task.config, split, recipe.columns)[0]
        for split in (*task.train, *task.validation)
    }
    return build_task(
        recipe, [tables[split] for split in task.train], [tables[split] for split in task.validation]
    )


def local_files(task: Entry, data_dir: str | Path | None = None) -> tuple[Path, Path] | None:
    """The training and validation file of a task that is not made, or read from the hub or BIG-bench."""
    if isinstance(task, PlantedTask):
        return None
    if isinstance(task, TaskConfig):
        if task.hub is None:
            return _own_files(task)
        if task.train is not None or task.validation is not None:
            raise UserError(f"task {task.name!r}: has both files and hub {task.hub!r}; expected one of them")
    if data_dir is None:
        return None
    directory = user_path(data_dir)
    if task.hub is None and path_kind(directory / task.name) != "directory":
        return None  # BIG-bench needs no hub
    return _data_dir_file(directory, task.name, "train"), _data_dir_file(directory, task.name, "validation")


def _own_files(task: TaskConfig) -> tuple[Path, Path]:
    if task.train is None:
        raise UserError(f"task {task.name!r}: no training data; set train to a file or hub to a data set id")
    if task.validation is None:
        raise UserError(f"task {task.name!r}: no validation split; set validation to a file")
    if real_path(task.train) == real_path(task.validation):
        raise UserError(f"task {task.name!r}: train and validation are one file, {task.train}; expected two")
    return user_path(task.train), user_path(task.validation)


def _data_dir_file(data_dir: Path, task: str, split: str) -> Path:
    if (kind := path_kind(data_dir)) != "directory":
        found = "no such directory" if kind == "missing" else f"is a {kind}"
        raise UserError(f"{data_dir}: {found}; expected <task>/{{train,validation}}.jsonl[.gz] in it")
    folder = data_dir / task
    if path_kind(folder) != "directory":
        present = [child for child in _children(data_dir) if (data_dir / child).is_dir()]
        raise UserError(f"{folder}: no such directory for task {task!r}{nearest(task, present)}")
    for name in (f"{split}.jsonl", f"{split}.jsonl.gz"):
        if path_kind(folder / name) == "file":
            return folder / name
    raise UserError(
        f"{folder}: task {task!r} has no {split} split; expected {split}.jsonl or {split}.jsonl.gz, "
        f"found {', '.join(_children(folder)) or 'nothing'}"
    )


def _children(directory: Path) -> list[str]:
    with path_errors(directory):
        return sorted(child.name for child in directory.iterdir())


def read_texts(text: Sequence[str], file: str | Path) -> tuple[list[str], list[str] | None]:
    """Rows of a local file to predict: the texts under a task's field names, and their pairs."""
    return _rows.read_texts(text, open_table(file))


def _own_recipe(task: TaskConfig) -> Recipe:
    columns = (task.text,) if isinstance(task.text, str) else task.text
    _check_names("task", task.name)
    if task.labels is not None:
        check_labels(f"task {task.name!r}", task.labels)
    return Recipe(
        name=task.name,
        text=tuple((column,) for column in columns),
        label=task.label,
        labels=task.labels,
        drop_empty=task.drop_empty,
    )


def _with_hub_classes(recipe: Recipe, classes: tuple[str, ...] | None) -> Recipe:
    if classes is None:
        return recipe
    if recipe.labels is not None and len(recipe.labels) != len(classes):
        hub_names = ", ".join(classes)
        raise UserError(
            f"task {recipe.name!r}: {len(recipe.labels)} declared labels, but the hub's are {hub_names}"
        )
    return dataclasses.replace(recipe, labels=recipe.labels or classes, hub_codes=True)


def _sample(split: Split, maximum: int | None, name: str) -> Split:
    if maximum is None or maximum >= len(split):
        return split
    return split.select(fixed_permutation(len(split), name)[:maximum])


def _check_names(what: str, *names: str) -> None:
    for name in names:
        if (problem := name_problem(name)) is not None:
            raise UserError(f"{what} {name!r} {problem}")
