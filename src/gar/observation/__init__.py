"""From ONE backward to group gradients and Gram matrices, and the slow reference path beside it."""

from gar.observation.observe import (
    Grouping,
    Observed,
    SiteObservation,
    mean_over_units,
    observe,
    per_group_gradients,
)

__all__ = [
    "Grouping",
    "Observed",
    "SiteObservation",
    "mean_over_units",
    "observe",
    "per_group_gradients",
]
