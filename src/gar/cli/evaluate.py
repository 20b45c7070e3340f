"""``gar evaluate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gar import config as configuration
from gar.cli.common import DataDirOption, DeviceOption, NoCacheOption, model_directory, result_table
from gar.config import Config
from gar.data import Mixture, load_mixture
from gar.errors import UserError
from gar.evaluation import evaluate
from gar.experiments.presets import resolve_config
from gar.model import MultiTaskModel
from gar.training.run import CONFIG, majority_shares, resolve_device


def evaluate_run(
    run: Annotated[Path, typer.Argument(metavar="RUN|MODEL", help="A run directory or a saved model.")],
    mixture: Annotated[
        str | None, typer.Option(help="A YAML file, mixture or preset; default: the run's own mixture.")
    ] = None,
    device: DeviceOption = None,
    data_dir: DataDirOption = None,
    no_cache: NoCacheOption = False,
    output: Annotated[str, typer.Option("--format", help="table or json.")] = "table",
) -> None:
    """Accuracy per task and routing numbers of a saved model on validation data."""
    model, data, sections = measure(run, mixture, device, data_dir, no_cache)
    if output == "json":
        print(json.dumps(sections, indent=2))
        return
    if output != "table":
        raise UserError(f"--format is {output!r}; expected table or json")
    Console().print(result_table([{"method": "model", **sections}], majority_shares(data), data.name))


def measure(
    run: Path, mixture: str | None, device: str | None, data_dir: Path | None, no_cache: bool
) -> tuple[MultiTaskModel, Mixture, dict[str, Any]]:
    """Load a model and a mixture of its tasks, and evaluate."""
    config = mixture_config(run, mixture, data_dir)
    directory = model_directory(run)
    model = MultiTaskModel.from_pretrained(directory)
    data = load_mixture(config.mixture, data_dir=config.data_dir, cache_dir=config.cache.directory)
    for task in data.tasks:
        if model.task(task.name).labels != task.labels:
            raise UserError(
                f"task {task.name}: the model was trained on labels {', '.join(model.task(task.name).labels)}, "
                f"the data have {', '.join(task.labels)}"
            )
    model.to(resolve_device(device or "auto"))
    cache = config.cache.model_copy(update={"enabled": config.cache.enabled and not no_cache})
    return model, data, evaluate(model, data, options=config.evaluation, cache=cache)


def mixture_config(run: Path, mixture: str | None, data_dir: Path | None) -> Config:
    """The configuration that names the data: given, or the run's own."""
    chosen = [] if data_dir is None else [f"data_dir={json.dumps(str(data_dir))}"]
    if mixture is not None:
        return resolve_config(mixture, chosen)
    for path in (run / CONFIG, run.parent / CONFIG):
        if path.is_file():
            return configuration.load(path, chosen)
    raise UserError(f"{run}: no {CONFIG} beside the model; name the data with --mixture")
