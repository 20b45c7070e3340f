"""What a run starts from, and what the runs of one process share of it.

A run starts from tasks, token ids, a backbone and features. The runs of a sweep, one after the other in a
process, mostly start from the same: :class:`Shared` keeps what was made and gives it to the next run that
needs it. Everything lies under a key of all that determines it, files by their content, so a run has the bits
of the run alone. No run sees what another has trained: a backbone that is trained or changed is a copy of the
loaded one, and a frozen one is looked at again before it is given away.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from gar.config import Config
from gar.data import (
    Mixture,
    Task,
    contents,
    load_mixture,
    load_task,
    probe_mixture,
    selection_mixture,
)
from gar.data.load import Entry, resolve
from gar.data.tokenize import TokenizedSplit, tokenize_split
from gar.features.sources import CachedSource, Progress, Source, make_sources, sources_of
from gar.model import MultiTaskModel
from gar.model import backbone as backbones
from gar.model.backbone import Pretrained
from gar.model.multitask import changes_backbone
from gar.training.memory import release_memory

T = TypeVar("T")

#: Tasks and token ids that are kept, in bytes of host memory.
HOST_BYTES = 2 << 30
#: What a string costs beside its characters.
STRING = 60


@dataclass(frozen=True)
class Start:
    """A fresh model and its data. ``digests`` are the tasks' fingerprints, ``sources`` makes all sources.

    ``mixture`` is without the selection part of its training splits; ``selection`` has that part as its
    validation splits, where the configuration asks for one. The model has to be on its device before
    ``sources(progress)`` is called.
    """

    model: MultiTaskModel
    mixture: Mixture
    digests: Callable[[], dict[str, str]]
    sources: Callable[[Progress | None], Sequence[Source]]
    selection: Mixture | None = None

    @classmethod
    def of(cls, model: MultiTaskModel, mixture: Mixture, config: Config) -> Start:
        """From a model and a mixture in memory."""
        rest, selection = selection_mixture(mixture, config.evaluation.selection)
        return cls(
            model,
            rest,
            lambda: {task.name: task.fingerprint() for task in mixture.tasks},
            partial(make_sources, model, rest, config.cache, selection=selection),
            selection,
        )


def start(config: Config, shared: Shared | None = None, probe: bool = False) -> Start:
    """Load what a configuration names; with ``probe``, the development probe in place of validation."""
    if shared is not None:
        return shared.start(config, probe)
    mixture = load_mixture(config.mixture, data_dir=config.data_dir, cache_dir=config.cache.directory)
    if probe:  # of what a run trains on; its selection part has no part in a search
        mixture = _probed(selection_mixture(mixture, config.evaluation.selection)[0])
        evaluation = config.evaluation.model_copy(update={"selection": 0.0})
        config = config.model_copy(update={"evaluation": evaluation})
    mixture.check()
    return Start.of(_model(config, mixture), mixture, config)


class Shared:
    """What the runs of one process, one at a time, share; see the module.

    Tasks and token ids have ``host_bytes`` of memory, the least recently used go first. Of backbones and of
    features on a device those of the last run are kept. A hub's data set or backbone is asked for once.
    """

    def __init__(self, host_bytes: int = HOST_BYTES) -> None:
        self._data, self._backbones, self._features = Shelf(host_bytes), Shelf(0), Shelf(0)

    def start(self, config: Config, probe: bool = False) -> Start:
        """As :func:`start`."""
        name, entries = resolve(config.mixture)
        loaded = [self._task(entry, config) for entry in entries]
        tasks = tuple(task.task for task in loaded)
        notes = tuple(note for task in tasks for note in task.notes)
        mixture = Mixture(name, tasks, config.mixture.batch_size, config.mixture.group_size, notes)
        fraction = config.evaluation.selection
        held: list[_Loaded] = []
        mixture, selection = selection_mixture(mixture, fraction)
        if selection is not None:  # the whole tasks' fingerprints: the configuration has the fraction
            held = _parts_of(loaded, selection, "selection", fraction)
            loaded = _parts_of(loaded, mixture, "rest", fraction)
        if probe:
            mixture, selection, held = _probed(mixture), None, []
            loaded = [self._probed(whole, task) for whole, task in zip(loaded, mixture.tasks, strict=True)]
        key, pretrained = self._pretrained(config)
        model = _model(config, mixture, pretrained)

        def sources(progress: Progress | None) -> Sequence[Source]:
            splits = [(loaded, "train"), (loaded, "validation"), *([(held, "validation")] if held else [])]
            parts = [[self._tokens(task, part, model, key) for task in tasks] for tasks, part in splits]
            found = sources_of(model, parts, config.cache, progress, self._resident)
            release_memory()  # what reading took; the other workers of a sweep need theirs
            return found

        fingerprints = {task.task.name: task.fingerprint for task in loaded}
        return Start(model, mixture, lambda: fingerprints, sources, selection)

    # ------------------------------------------------------------------ data

    def _task(self, entry: Entry, config: Config) -> _Loaded:
        places = {"data_dir": config.data_dir, "cache_dir": config.cache.directory}
        sample = (config.mixture.max_train_examples, config.mixture.max_validation_examples)

        def load() -> Task:
            task = load_task(entry, **places, max_train_examples=sample[0], max_validation_examples=sample[1])
            task.check()
            return task

        key, (task, fingerprint) = self._data.kept(
            lambda: ("task", entry, *sample, contents(entry, **places)),
            lambda: ((task := load()), task.fingerprint()),
            lambda found: _task_bytes(found[0]),
        )
        return _Loaded(key, task, fingerprint)

    def _probed(self, whole: _Loaded, task: Task) -> _Loaded:
        key, fingerprint = self._data.kept(lambda: whole.key and ("probe", whole.key), task.fingerprint, len)
        return _Loaded(key, task, fingerprint)

    def _tokens(
        self, loaded: _Loaded, part: str, model: MultiTaskModel, backbone: Hashable
    ) -> TokenizedSplit:
        """``backbone`` is the key of the model's, which holds the tokenizer and the maximum length."""
        length, split = model.config.max_length, getattr(loaded.task, part)
        _, tokens = self._data.kept(
            lambda: loaded.key and backbone and ("tokens", loaded.key, part, backbone),
            lambda: tokenize_split(model.tokenizer, split, length),
            _token_bytes,
        )
        return tokens

    # ------------------------------------------------------------------ backbone and features

    def _pretrained(self, config: Config) -> tuple[Hashable, Pretrained]:
        backbone, copied = config.backbone, changes_backbone(config.backbone, config.experts)
        return self._backbones.kept(
            lambda: ("backbone", backbone, backbones.contents(backbone)),
            lambda: Pretrained.load(backbone),
            lambda found: found.nbytes,
            sound=lambda found: copied or found.intact,
        )

    def _resident(self, key: Hashable, make: Callable[[], list[CachedSource]]) -> list[CachedSource]:
        """Sources whose features lie on the device; others are files, which the system keeps in memory."""
        found: list[CachedSource] | None = self._features.get(key)
        if found is None:
            self._features.clear()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            found = make()
            if all(source.nbytes for source in found):
                self._features.put(key, found, sum(source.nbytes for source in found))
        return found


class Shelf:
    """Things by key, of ``limit`` bytes together; the least recently used go, the last one put stays."""

    def __init__(self, limit: int) -> None:
        self.limit, self.nbytes = limit, 0
        self._things: dict[Hashable, tuple[object, int]] = {}

    def __len__(self) -> int:
        return len(self._things)

    def get(self, key: Hashable) -> Any:
        """What was put there, or None."""
        if key not in self._things:
            return None
        self._things[key] = self._things.pop(key)  # now the last one
        return self._things[key][0]

    def put(self, key: Hashable, thing: object, nbytes: int) -> None:
        """Keep a thing that takes so many bytes."""
        self.nbytes += nbytes - self._things.pop(key, (None, 0))[1]
        self._things[key] = thing, nbytes
        while self.nbytes > self.limit and len(self._things) > 1:
            self.nbytes -= self._things.pop(next(iter(self._things)))[1]

    def kept(
        self,
        key: Callable[[], Hashable],
        make: Callable[[], T],
        nbytes: Callable[[T], int],
        sound: Callable[[T], bool] = lambda found: True,
    ) -> tuple[Hashable, T]:
        """What ``make`` makes, or made for this key before and is still ``sound``; and the key.

        ``key`` is asked again afterwards: where a file has changed meanwhile, what was made of it is not
        kept, and its key is None. So is all that is made of a thing with the key None.
        """
        before = key()
        found: T | None = None if before is None else self.get(before)
        if found is not None and sound(found):
            return before, found
        made = make()
        if before is None or key() != before:
            return None, made
        self.put(before, made, nbytes(made))
        return before, made

    def clear(self) -> None:
        """Keep nothing any longer."""
        self._things.clear()
        self.nbytes = 0


class _Loaded(NamedTuple):
    """A task, its fingerprint, and the key of what determines it."""

    key: Hashable
    task: Task
    fingerprint: str


def _parts_of(loaded: Sequence[_Loaded], mixture: Mixture, part: str, fraction: float) -> list[_Loaded]:
    """The tasks of a mixture made of the loaded ones."""
    return [
        _Loaded(whole.key and (part, fraction, whole.key), task, whole.fingerprint)
        for whole, task in zip(loaded, mixture.tasks, strict=True)
    ]


def _model(config: Config, mixture: Mixture, pretrained: Pretrained | None = None) -> MultiTaskModel:
    return MultiTaskModel.from_pretrained(
        config.backbone,
        mixture.tasks,
        config.experts,
        precision=config.precision,
        seed=config.seed,
        pretrained=pretrained,
    )


def _probed(mixture: Mixture) -> Mixture:
    return replace(probe_mixture(mixture), name=f"{mixture.name} (development probe)")


def _task_bytes(task: Task) -> int:
    splits = (task.train, task.validation)
    texts = (text for split in splits for column in (split.texts, split.pairs or ()) for text in column)
    return sum(len(text) + STRING for text in texts) + sum(split.labels.nbytes for split in splits)


def _token_bytes(split: TokenizedSplit) -> int:
    arrays = (split.ids, split.offsets, split.types, split.labels)
    return sum(array.nbytes for array in arrays if array is not None)
