"""``gar evaluate``, and how a verb gets at a saved model and the data to measure it on."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gar import config as configuration
from gar.cli.common import (
    DataDirOption,
    DeviceOption,
    MixtureOption,
    NoCacheOption,
    RunArgument,
    model_directory,
    result_table,
)
from gar.config import CacheConfig, Config
from gar.data import Mixture, load_mixture, majority_shares
from gar.errors import UserError, one_of
from gar.evaluation.measure import evaluate
from gar.model.multitask import MultiTaskModel
from gar.presets.catalogue import resolve_config
from gar.runs.environment import resolve_device
from gar.runs.names import CONFIG

FORMATS = ("table", "json")


def evaluate_run(
    run: RunArgument,
    mixture: MixtureOption = None,
    device: DeviceOption = None,
    data_dir: DataDirOption = None,
    no_cache: NoCacheOption = False,
    output: Annotated[str, typer.Option("--format", help="table or json.")] = "table",
) -> None:
    """Accuracy per task and routing numbers of a saved model on validation data."""
    if output not in FORMATS:
        raise one_of("--format", output, FORMATS)
    loaded = load_run(run, mixture, device, data_dir, no_cache)
    sections = evaluate(loaded.model, loaded.mixture, options=loaded.config.evaluation, cache=loaded.cache)
    if output == "json":
        print(json.dumps(sections, indent=2, ensure_ascii=False))
        return
    shares = majority_shares(loaded.mixture)
    Console().print(result_table([{"method": "model", **sections}], shares, loaded.mixture.name))


@dataclass(frozen=True)
class Loaded:
    """A saved model, a mixture of its tasks, and the configuration that both are measured under."""

    model: MultiTaskModel
    mixture: Mixture
    config: Config
    cache: CacheConfig


def load_run(
    run: Path, mixture: str | None, device: str | None, data_dir: Path | None, no_cache: bool
) -> Loaded:
    """Load a model and the mixture to measure it on: the named one, or the run's own.

    Batches and groups of the gradient probe are those of the training, where the run tells them.
    """
    directory = model_directory(run)
    chosen = [] if data_dir is None else [f"data_dir={json.dumps(str(data_dir))}"]
    own = next((path for path in (run / CONFIG, run.parent / CONFIG) if path.is_file()), None)
    if mixture is not None:
        config = resolve_config(mixture, chosen)
    elif own is not None:
        config = configuration.load(own, chosen)
    else:
        raise UserError(f"{run}: no {CONFIG} beside the model; name the data with --mixture")
    model = MultiTaskModel.from_pretrained(directory)
    data = load_mixture(config.mixture, data_dir=config.data_dir, cache_dir=config.cache.directory)
    if own is not None:
        trained = configuration.load(own).mixture
        data = replace(data, batch_size=trained.batch_size, group_size=trained.group_size)
    for task in data.tasks:
        known = model.task(task.name).labels
        if known != tuple(task.labels):
            raise UserError(
                f"task {task.name}: the model was trained on labels {', '.join(known)}, "
                f"the data have {', '.join(task.labels)}"
            )
    model.to(resolve_device(device or "auto"))
    cache = config.cache.model_copy(update={"enabled": config.cache.enabled and not no_cache})
    return Loaded(model, data, config, cache)
