"""A saved model, the data to measure it on, and the labels it gives to texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gar import config as configuration
from gar.config import Config
from gar.data import Mixture, check_mixture, load_mixture, read_texts
from gar.errors import UserError, path_kind
from gar.model.multitask import CONFIG_FILE, MultiTaskModel, TaskInfo
from gar.runs.environment import resolve_device
from gar.runs.names import CONFIG, MODEL
from gar.runs.result import DamagedFile, check_files


@dataclass(frozen=True)
class Saved:
    """A saved model, a mixture of its tasks, and the configuration that both are measured under."""

    model: MultiTaskModel
    mixture: Mixture
    config: Config


def load_model(path: Path, device: str = "auto") -> MultiTaskModel:
    """The model of a finished run's directory, or of its own directory, on a device."""
    return MultiTaskModel.from_pretrained(_model_directory(path)).to(resolve_device(device))


def load_saved(
    path: Path, config: Config | None = None, overrides: Mapping[str, Any] | None = None, device: str = "auto"
) -> Saved:
    """A model and the mixture to measure it on: that of ``config``, or the run's own with ``overrides``.

    Batches and groups of the gradient probe are those of the training, where the run tells them.
    """
    directory = _model_directory(path)
    own = next((file for file in (path / CONFIG, path.parent / CONFIG) if file.is_file()), None)
    if own is not None:
        try:
            check_files(own.parent, CONFIG)
        except DamagedFile as error:
            raise UserError(f"{own.parent}: {error}") from None
    if config is None:
        if own is None:
            raise UserError(f"{path}: no {CONFIG} beside the model; name the data with --mixture")
        config = configuration.load(own, overrides or {})
    model = load_model(directory, device)
    data = load_mixture(config.mixture, data_dir=config.data_dir, cache_dir=config.cache.directory)
    if own is not None:
        trained = configuration.load(own).mixture
        data = replace(data, batch_size=trained.batch_size, group_size=trained.group_size)
    check_mixture(model.tasks, data)
    return Saved(model, data, config)


def label(
    model: MultiTaskModel, texts: Sequence[str] | Path, task: str | None = None
) -> Iterator[dict[str, Any]]:
    """Rows with task, text, label and probabilities, for texts or for a file with the tasks' text columns.

    The texts of a task on pairs are ``first, second, first, second, …``. Without ``task``, every task of the
    right form answers, and those of another form are passed over.
    """
    tasks = [model.task(task)] if task is not None else list(model.tasks.values())
    refused: list[UserError] = []
    for info in tasks:
        try:
            columns = _columns(info, texts)
        except UserError as error:
            refused.append(error)
            continue
        for *text, prediction in zip(*columns, model.predict(info.name, *columns), strict=True):
            yield {
                "task": info.name,
                "text": text[0] if len(text) == 1 else text,
                "label": prediction.label,
                "probabilities": prediction.probabilities,
            }
    if len(refused) == len(tasks):
        raise refused[0]


def _model_directory(path: Path) -> Path:
    kind = path_kind(path)
    for directory in (path / MODEL, path):
        if (directory / CONFIG_FILE).is_file():
            return directory
    if kind == "missing":
        raise UserError(f"{path}: no such directory; expected a run or a saved model")
    raise UserError(
        f"{path}: holds no saved model; expected a finished run or a directory with {CONFIG_FILE}"
    )


def _columns(info: TaskInfo, texts: Sequence[str] | Path) -> list[list[str]]:
    """One list of texts, or for pairs two."""
    if isinstance(texts, Path):
        return [column for column in read_texts(info.text, texts) if column is not None]
    if any(not text.strip() for text in texts):
        raise UserError("a text is empty; expected something to classify")
    fields = len(info.text)
    if len(texts) % fields:
        raise UserError(
            f"task {info.name} takes pairs ({', '.join(info.text)}), found {len(texts)} texts; "
            "expected an even number"
        )
    return [list(texts[field::fields]) for field in range(fields)]
