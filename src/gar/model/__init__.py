"""The multi-task model in two halves, its expert sites, and the backbones under it."""

from gar.model.multitask import (
    Known,
    MultiTaskModel,
    Prediction,
    TaskInfo,
    evaluating,
    length_bucketed,
)
from gar.model.sites import SITES, Blueprint, Output, Site, SiteState, example_losses

__all__ = [
    "SITES",
    "Blueprint",
    "Known",
    "MultiTaskModel",
    "Output",
    "Prediction",
    "Site",
    "SiteState",
    "TaskInfo",
    "evaluating",
    "example_losses",
    "length_bucketed",
]
