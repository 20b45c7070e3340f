"""Metrics as pure functions on arrays; usable alone, with the arrays of any mixture-of-experts model.

Inputs are anything ``numpy.asarray`` takes or torch tensors of any dtype and device; everything is computed
in float64 and returned as a Python float. Degenerate inputs have a documented value and never NaN; inputs
that make no sense (wrong shape, empty, negative, not finite) raise ``ValueError``.

:data:`METRICS` lists those that every result holds; :func:`register` adds one of one's own.
"""

from gar.metrics.accuracy import TASK_METRICS, accuracy, f1, macro_accuracy, matthews_correlation
from gar.metrics.association import (
    adjusted_rand_index,
    cluster_mixing,
    main_expert,
    normalized_mutual_information,
    recovery,
    recovery_ceiling,
    recovery_chance,
    shuffled_information,
    structure_purity,
    structure_purity_floor,
)
from gar.metrics.catalogue import METRICS, OBJECTIVES, Measured, Metric, register, summarize
from gar.metrics.gradient import (
    cancelled_by_expert,
    cancelled_energy,
    expert_cosines,
    gradient_mass_floor,
    gradient_mass_purity,
    gradient_mass_shares,
    inter_expert_similarity,
    intra_expert_coherence,
    live_gradient_mass_purity,
    observed_cosine,
    purity_above_floor,
    task_conflict,
    task_cosine,
    task_cosines,
)
from gar.metrics.load import (
    describe_collapse,
    effective_experts,
    load_variance,
    routing_entropy,
    task_preference,
    utilization,
)
from gar.metrics.prediction import Prediction, holm, predicts, rank_correlation
from gar.metrics.statistics import (
    PairedDifference,
    paired_difference,
    pareto_front,
    population_std,
    seed_means,
    t_test,
)

__all__ = [
    "METRICS",
    "OBJECTIVES",
    "TASK_METRICS",
    "Measured",
    "Metric",
    "PairedDifference",
    "Prediction",
    "accuracy",
    "adjusted_rand_index",
    "cancelled_by_expert",
    "cancelled_energy",
    "cluster_mixing",
    "describe_collapse",
    "effective_experts",
    "expert_cosines",
    "f1",
    "gradient_mass_floor",
    "gradient_mass_purity",
    "gradient_mass_shares",
    "holm",
    "inter_expert_similarity",
    "intra_expert_coherence",
    "live_gradient_mass_purity",
    "load_variance",
    "macro_accuracy",
    "main_expert",
    "matthews_correlation",
    "normalized_mutual_information",
    "observed_cosine",
    "paired_difference",
    "pareto_front",
    "population_std",
    "predicts",
    "purity_above_floor",
    "rank_correlation",
    "recovery",
    "recovery_ceiling",
    "recovery_chance",
    "register",
    "routing_entropy",
    "seed_means",
    "shuffled_information",
    "structure_purity",
    "structure_purity_floor",
    "summarize",
    "t_test",
    "task_conflict",
    "task_cosine",
    "task_cosines",
    "task_preference",
    "utilization",
]
