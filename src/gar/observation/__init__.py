"""From ONE backward to group gradients and Gram matrices, and the slow reference path beside it."""

from gar.observation._balance import balance_loss
from gar.observation._grouping import Grouping, mean_over_units
from gar.observation._reference import per_group_gradients
from gar.observation._row_sum import GateSum, RowSum
from gar.observation._site import SiteObservation
from gar.observation._units import Unit, UnitRows
from gar.observation._whole import WholeGradients
from gar.observation.observe import Observed, observe

__all__ = [
    "GateSum",
    "Grouping",
    "Observed",
    "RowSum",
    "SiteObservation",
    "Unit",
    "UnitRows",
    "WholeGradients",
    "balance_loss",
    "mean_over_units",
    "observe",
    "per_group_gradients",
]
