"""Metrics also go to a tracker that accelerate knows. Off unless ``tracking`` names one."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gar.errors import UserError, one_of

#: Tracker: the class in accelerate.tracking, the packages of which one is needed, and what to install.
TRACKERS = {
    "tensorboard": ("TensorBoardTracker", ("tensorboard", "tensorboardX"), "tensorboard"),
    "wandb": ("WandBTracker", ("wandb",), "wandb"),
    "trackio": ("TrackioTracker", ("trackio",), "trackio"),
    "mlflow": ("MLflowTracker", ("mlflow",), "mlflow"),
}
PROJECT = "gar"


class Tracker:
    """Forwards the lines of a history to a tracker; ``tracking="none"`` forwards nothing.

    ``directory`` is the run's: TensorBoard writes below it, and its name is the name of the run.
    """

    def __init__(
        self, tracking: str, directory: Path | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        self._tracker: Any = None
        if tracking == "none":
            return
        if tracking not in TRACKERS:
            raise one_of("tracking", tracking, ["none", *TRACKERS])
        class_name, packages, install = TRACKERS[tracking]
        if not any(importlib.util.find_spec(package) for package in packages):
            raise UserError(f"tracking is {tracking}, which is not installed; pip install {install}")
        from accelerate import PartialState

        PartialState()  # accelerate's trackers ask it which process they are in
        directory = Path.cwd() if directory is None else directory
        make = getattr(importlib.import_module("accelerate.tracking"), class_name)
        self._tracker = make(**_options(tracking, directory.resolve()))
        self._tracker.start()
        # TensorBoard's table of hyper-parameters needs final metrics.
        if config is not None and tracking != "tensorboard":
            self._tracker.store_init_configuration(_flat(config, ".", texts=True))

    def log(self, update: int, values: Mapping[str, Any]) -> None:
        """Forward the numbers of a history line or result section; nested names are joined by ``/``."""
        if self._tracker is not None:
            numbers = {key: value for key, value in _flat(values, "/").items() if key != "update"}
            if numbers:
                self._tracker.log(numbers, step=update)

    def close(self) -> None:
        """Send what is left."""
        if self._tracker is not None:
            self._tracker.finish()
            self._tracker = None


def _options(tracking: str, directory: Path) -> dict[str, Any]:
    if tracking == "tensorboard":
        return {"run_name": "tensorboard", "logging_dir": str(directory)}
    name = "/".join(directory.parts[-4:])
    if tracking == "mlflow":
        return {"experiment_name": PROJECT, "run_name": name}
    if tracking == "wandb":
        return {"run_name": PROJECT, "name": name, "dir": str(directory)}
    return {"run_name": PROJECT, "name": name}


def _flat(value: Mapping[str, Any], separator: str, prefix: str = "", texts: bool = False) -> dict[str, Any]:
    """Numbers (and texts) of a tree by joined keys; list items by their index.

    >>> _flat({"update": 3, "tasks": {"rte": 0.5}, "load": [0.25, 0.75]}, "/")
    {'update': 3, 'tasks/rte': 0.5, 'load/0': 0.25, 'load/1': 0.75}
    """
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, list | tuple):
            item = {str(index): entry for index, entry in enumerate(item)}
        if isinstance(item, Mapping):
            flat |= _flat(item, separator, f"{name}{separator}", texts)
        elif texts and (item is None or isinstance(item, str | bool)):
            flat[name] = str(item)
        elif isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item):
            flat[name] = item
    return flat
