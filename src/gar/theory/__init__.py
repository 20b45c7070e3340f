"""The paper's claims about the objective as functions that compute both sides of each.

Every function takes small float64 inputs, computes one side with the objective that trains routers
(:mod:`gar.objective`, :mod:`gar.routing`) and the other from the claim's own formula, and returns both.
``docs/theory.md`` shows them beside a plot and says where a claim needs a condition.

Rows are M observations g_m, columns E experts (the paper's K); ``G_k = sum_m p_mk g_m`` and
``d_k = sum_m p_mk``. Names of equations and theorems are the labels in the paper's source.
"""

from gar.theory.clustering import kmeans_identity, partitions, scatter, stabiliser_cost
from gar.theory.collapse import collapsed, leaving, leaving_rate, over_collapse
from gar.theory.gibbs import critical_temperature, fixed_point, gibbs, linearised_optimum, stationarity
from gar.theory.load import (
    Moments,
    Window,
    equiangular,
    joining_gain,
    member_score,
    moments,
    newcomer_score,
    utility,
    window,
)
from gar.theory.sides import Sides
from gar.theory.spectral import SpectralBound, spectral_bound, spectral_gap
from gar.theory.tilt import MixtureTilt, mixture_tilt, router_tilt

__all__ = [
    "MixtureTilt",
    "Moments",
    "Sides",
    "SpectralBound",
    "Window",
    "collapsed",
    "critical_temperature",
    "equiangular",
    "fixed_point",
    "gibbs",
    "joining_gain",
    "kmeans_identity",
    "leaving",
    "leaving_rate",
    "linearised_optimum",
    "member_score",
    "mixture_tilt",
    "moments",
    "newcomer_score",
    "over_collapse",
    "partitions",
    "router_tilt",
    "scatter",
    "spectral_bound",
    "spectral_gap",
    "stabiliser_cost",
    "stationarity",
    "utility",
    "window",
]
