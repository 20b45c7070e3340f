"""One update, the loop, checkpoints and run directories."""

from gar.training.loop import Hooks, Interrupted, TrainingFailure, fit
from gar.training.run import train, train_from_config

__all__ = ["Hooks", "Interrupted", "TrainingFailure", "fit", "train", "train_from_config"]
