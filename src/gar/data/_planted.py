"""Planted tasks: made-up texts whose right grouping into experts is known. No download, no label noise.

``planted.yaml`` has the words. With C classes the categories in use form :data:`~gar.config.PARTS` parts of C
categories each. In cluster c the j-th category of a part has label ``j``; in the first ``strength * PARTS``
parts it has ``(j + c) mod C`` and, in every second of them, ``(j - c) mod C``. Any two clusters thus give
different labels to a share ``strength`` of the texts, exactly, and the same to all others; the rules are
alike in form, so that no cluster is harder than another. A rule is a table from categories to labels: where a
frozen backbone separates the categories, one linear map can learn it, whatever the strength. A linear map of
topic and category apart cannot hold two rules. Experts may divide the texts by category in place of topic,
each with a map from topics to labels; with three clusters or more the two signs make that need more experts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TypeVar

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from gar.config import PARTS, MixtureConfig, PlantedConfig, explain
from gar.data._permutation import fixed_permutation
from gar.data.registry import PLANTED
from gar.data.task import Mixture, Split, Task
from gar.errors import UserError

T = TypeVar("T")


class Words(BaseModel):
    """``planted.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    times: tuple[str, ...]
    verbs: tuple[str, ...]
    topics: dict[str, tuple[str, ...]]
    categories: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class PlantedTask:
    """One task of a planted mixture, not made yet: its topic and its cluster."""

    name: str
    cluster: int
    section: PlantedConfig

    @property
    def labels(self) -> tuple[str, ...]:
        """``"A"``, ``"B"``, …: they mean different things in different clusters, as they must."""
        return tuple("ABCDEF"[: self.section.classes])

    def make(self) -> Task:
        """The task with its data."""
        section, parts = self.section, _parts(self.section)
        splits: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
        sizes = (section.train_examples, section.validation_examples)
        for number, part in enumerate(parts):
            sign = (1, -1)[number % 2] if number < round(section.strength * PARTS) else 0
            for j, category in enumerate(part):
                texts = self._texts(category)
                for rows, size in zip(splits, sizes, strict=True):
                    some, texts = texts[: size // section.cells], texts[size // section.cells :]
                    rows += [(text, (j + sign * self.cluster) % section.classes) for text in some]
        train, validation = (
            _split(_shuffled(rows, f"{self._key}/{name}"))
            for name, rows in zip(("train", "validation"), splits, strict=True)
        )
        return Task(self.name, self.labels, train, validation, cluster=self.cluster)

    @property
    def _key(self) -> str:
        return f"{PLANTED}/{self.section.seed}/{self.name}"

    def _texts(self, category: str) -> list[str]:
        """All distinct texts of a category under this task's topic, in an order of its own."""
        known = words()
        slots = (known.times, known.topics[self.name], known.verbs, known.categories[category])
        texts = [
            f"{self.name.capitalize()} notes: {time} the {who} {verb} the {thing}."
            for time, who, verb, thing in itertools.product(*slots)
        ]
        return _shuffled(texts, f"{self._key}/{category}")


@functools.cache
def words() -> Words:
    """The packaged words."""
    text = resources.files("gar.data").joinpath("planted.yaml").read_text(encoding="utf-8")
    return Words.model_validate(yaml.safe_load(text))


def planted_tasks(section: PlantedConfig) -> tuple[PlantedTask, ...]:
    """The tasks by cluster. Which topics they have, the seed decides."""
    topics = _shuffled(list(words().topics), f"{PLANTED}/{section.seed}/topics")
    n = section.tasks_per_cluster
    return tuple(PlantedTask(topics[i], i // n, section) for i in range(section.clusters * n))


def planted(
    clusters: int = 6,
    tasks_per_cluster: int = 2,
    strength: float = 1.0,
    *,
    train_examples: int = 240,
    validation_examples: int = 240,
    seed: int = 0,
    batch_size: int = 32,
    group_size: int = 8,
) -> Mixture:
    """A mixture of tasks in clusters that share a labelling rule; ``mixture.clusters`` is the truth.

    ``clusters`` rules for ``tasks_per_cluster`` tasks each (24 tasks at most, 6 clusters), any two of which
    give different labels to a share ``strength`` of the texts (0, 0.25, 0.5, 0.75 or 1), without noise. All
    tasks have the same ``max(2, clusters)`` labels, equally often in both splits, and a text tells its task,
    but not the cluster. Splits of a task have no text in common. The same arguments give the same texts
    everywhere; ``seed`` draws topics, categories and texts anew. A wrong argument is a
    :class:`~gar.errors.UserError`.
    """
    section = {
        "clusters": clusters,
        "tasks_per_cluster": tasks_per_cluster,
        "strength": strength,
        "train_examples": train_examples,
        "validation_examples": validation_examples,
        "seed": seed,
    }
    try:
        config = MixtureConfig.model_validate(
            {"planted": section, "batch_size": batch_size, "group_size": group_size}
        )
    except ValidationError as error:
        raise UserError(f"planted: {explain(error, MixtureConfig)}") from None
    assert config.planted is not None
    tasks = tuple(task.make() for task in planted_tasks(config.planted))
    return Mixture(PLANTED, tasks, batch_size, group_size)


def _parts(section: PlantedConfig) -> list[list[str]]:
    """The categories in use, C in each part."""
    drawn = _shuffled(list(words().categories), f"{PLANTED}/{section.seed}/categories")
    return [drawn[i : i + section.classes] for i in range(0, section.cells, section.classes)]


def _shuffled(items: Sequence[T], name: str) -> list[T]:
    return [items[i] for i in fixed_permutation(len(items), name)]


def _split(rows: Sequence[tuple[str, int]]) -> Split:
    return Split([text for text, _ in rows], np.array([label for _, label in rows], dtype=np.int64))
