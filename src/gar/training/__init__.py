"""One update, the loop, checkpoints and run directories."""

from gar.training.failure import OutOfMemory, TrainingFailure
from gar.training.gradients import fill_gradients
from gar.training.loop import Hooks, Interrupted, fit
from gar.training.run import train, train_from_config
from gar.training.sharing import Shared
from gar.training.updater import Updater

__all__ = [
    "Hooks",
    "Interrupted",
    "OutOfMemory",
    "Shared",
    "TrainingFailure",
    "Updater",
    "fill_gradients",
    "fit",
    "train",
    "train_from_config",
]
