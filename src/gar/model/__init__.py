"""The multi-task model in two halves, its expert sites, and the backbones under it."""

from gar.model.multitask import (
    MultiTaskModel,
    Output,
    Prediction,
    SiteState,
    TaskInfo,
    evaluating,
    example_losses,
    length_bucketed,
)

__all__ = [
    "MultiTaskModel",
    "Output",
    "Prediction",
    "SiteState",
    "TaskInfo",
    "evaluating",
    "example_losses",
    "length_bucketed",
]
