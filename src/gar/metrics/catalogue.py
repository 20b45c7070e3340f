"""Every metric of a result once: its name, bounds, direction, how it is computed, read and printed.

result.json, the report, its figures, ``gar diagnose`` and the tables of single results all read
:data:`METRICS`. A metric of one's own is a function of :class:`Measured` and one line::

    register(Metric("top_share", "largest load", lambda m: float(m.load.max()), better=-1))
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gar.errors import UserError
from gar.metrics._arrays import Floats
from gar.metrics.association import (
    adjusted_rand_index,
    cluster_mixing,
    normalized_mutual_information,
    recovery,
    recovery_ceiling,
    recovery_chance,
    structure_purity,
    structure_purity_floor,
)
from gar.metrics.gradient import (
    gradient_mass_floor,
    gradient_mass_purity,
    inter_expert_similarity,
    intra_expert_coherence,
    live_gradient_mass_purity,
    observed_cosine,
    purity_above_floor,
    task_conflict,
    task_cosine,
)
from gar.metrics.load import effective_experts, load_variance, routing_entropy, utilization

Bounds = tuple[float, float]
#: Differences that are smaller are rounding.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Measured:
    """What one evaluation of a model saw: T tasks, E experts, N examples.

    ``load`` [E] sums to 1; ``counts`` [T, E] are selection events, in int64, all else is in float64;
    ``gates`` [N, E] are each example's; ``norms`` [T, E] the lengths of the tasks' expert gradients,
    ``by_expert`` [E, T, T] their inner products within an expert, ``between`` [E, E] those of the experts'
    mean gradients, ``observed`` [T, T] those of the tasks' gradients summed over the experts. ``shares``
    [T, E] are the tasks' mean gates; ``clusters`` [T] the tasks' true groups, None where nobody knows them.
    """

    load: Floats
    counts: Any
    gates: Floats
    norms: Floats
    by_expert: Floats
    between: Floats
    observed: Floats
    shares: Floats | None = None
    clusters: Sequence[int] | None = None


@dataclass(frozen=True)
class Metric:
    """One metric of a result.

    ``name`` is its key in result.json, under ``routing`` unless ``where`` gives another dotted path; one
    without ``compute`` is written there by something else. ``better`` is 1 (higher), -1 (lower) or 0.
    ``bounds`` are the ends of its range, or a function of the numbers of tasks and experts that gives them.
    A ``compute`` that returns None has no value there, and the result lacks the metric.

    Shown is ``scale`` times the value with ``digits`` decimals, in ``unit``. ``meaning`` says in a few words
    what the value means; ``{low}`` and ``{high}`` in it are the bounds. ``paper`` is its column in the
    paper's tables, ``short`` a heading for narrow tables. ``brief`` ones stand in the table of a single
    result too; those not ``listed`` are in result.json and the report's CSV alone, those not ``drawn`` have
    no panel in figures over training unless they are asked for. ``recover`` computes the value from the
    sections of an older result that lacks it.
    """

    name: str
    label: str
    compute: Callable[[Measured], float | None] | None = None
    better: int = 0
    bounds: Bounds | Callable[[int, int], Bounds] = (-math.inf, math.inf)
    digits: int = 4
    scale: float = 1.0
    unit: str = ""
    meaning: str = ""
    paper: str = ""
    short: str = ""
    where: str = ""
    brief: bool = False
    listed: bool = True
    drawn: bool = True
    recover: Callable[[Mapping[str, Any]], float] | None = None

    def __post_init__(self) -> None:
        if self.compute is not None and self.where:
            raise UserError(f"metric {self.name}: what is computed is written under routing; drop where")

    @property
    def path(self) -> tuple[str, ...]:
        """The keys that lead to the value in result.json."""
        return tuple((self.where or f"routing.{self.name}").split("."))

    @property
    def arrow(self) -> str:
        """↑ or ↓ for the better direction; empty where there is none."""
        return {1: "↑", -1: "↓"}.get(self.better, "")

    def range(self, tasks: int, experts: int) -> Bounds:
        """Smallest and largest possible value."""
        return self.bounds(tasks, experts) if callable(self.bounds) else self.bounds

    def read(self, sections: Mapping[str, Any]) -> float:
        """The value in a result, an evaluation or a diagnosis; NaN where it has none."""
        found: Any = sections
        for key in self.path:
            found = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(found, int | float) and not isinstance(found, bool):
            return float(found)
        return self.recover(sections) if self.recover else math.nan

    def text(self, value: float, sign: bool = False) -> str:
        """The value as it is shown, without its unit; a dash for one that is not finite."""
        if not math.isfinite(value):
            return "–"
        return self._fixed(value, sign, self.digits)

    def bound(self, value: float, sign: bool = False) -> str:
        """The end of an interval as :meth:`text`, with one digit that counts where that would read as 0.

        On which side of 0 an end lies is what an interval says; below :data:`ROUNDING` it is 0.

        >>> METRICS["nmi"].bound(0.00002, True), METRICS["nmi"].bound(0.12, True)
        ('+0.00002', '+0.1200')
        """
        size = self.scale * abs(value)
        if math.isfinite(size) and abs(value) > ROUNDING and not round(size, self.digits):
            return self._fixed(value, sign, -math.floor(math.log10(size)))
        return self.text(value, sign)

    def _fixed(self, value: float, sign: bool, digits: int) -> str:
        return f"{self.scale * value:{'+' if sign else ''}z.{digits}f}".replace("-", "−")


def _entropy_share(sections: Mapping[str, Any]) -> float:
    """Results once held the entropy alone."""
    experts, entropy = (
        len((sections.get("routing") or {}).get("load") or ()),
        METRICS["entropy"].read(sections),
    )
    return entropy / math.log(experts) if experts > 1 else (0.0 if experts else math.nan)


def _from(table: str, metric: Callable[[Any], float]) -> Callable[[Mapping[str, Any]], float]:
    """Computes a metric that an older result lacks from a table of its routing section; NaN without one."""

    def recover(sections: Mapping[str, Any]) -> float:
        found: Any = (sections.get("routing") or {}).get(table)
        rows = list(found.values()) if isinstance(found, Mapping) else found
        return metric(rows) if rows else math.nan

    return recover


def _of_clusters(metric: Callable[[Any, Any], float]) -> Callable[[Measured], float | None]:
    """Of the tasks' shares and true groups; no value where nobody knows these."""

    def compute(measured: Measured) -> float | None:
        known = measured.shares is not None and measured.clusters is not None
        return metric(measured.shares, measured.clusters) if known else None

    return compute


#: By name, in the order of result.json.
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "accuracy", better=1, bounds=(0, 1), digits=2, scale=100, unit="%", paper="acc",
               short="acc.", where="accuracy.macro"),
        Metric("load_variance", "load variance", lambda m: load_variance(m.load), better=-1,
               bounds=lambda tasks, experts: (0, (experts - 1) / experts**2), digits=5, paper="lvar",
               short="load var.", brief=True,
               drawn=False, meaning="0: all experts equal; {high:.5f}: one has everything"),
        Metric("utilization", "utilization", lambda m: utilization(m.load), better=1,
               bounds=lambda tasks, experts: (1 / experts, 1), digits=3, paper="util", short="util.",
               brief=True, drawn=False, meaning="share of the experts with at least half the uniform load"),
        Metric("effective_experts", "effective experts", lambda m: effective_experts(m.load), better=1,
               bounds=lambda tasks, experts: (1 / experts, 1), digits=3, short="eff. experts", brief=True,
               recover=_from("load", effective_experts),
               meaning="exp of the load's entropy, as a share of the experts"),
        Metric("gradient_mass_purity", "gradient-mass purity", lambda m: gradient_mass_purity(m.norms),
               better=1, bounds=(0, 1), paper="purity", short="purity", brief=True,
               drawn=False, meaning="largest task's share of an expert's gradient"),
        Metric("gradient_mass_floor", "gradient-mass floor", lambda m: gradient_mass_floor(m.norms),
               bounds=(0, 1), short="floor", drawn=False,
               recover=_from("gradient_norms", gradient_mass_floor),
               meaning="what purity is where all experts have the same mix of tasks"),
        Metric("live_gradient_mass_purity", "purity of live experts",
               lambda m: live_gradient_mass_purity(m.norms), better=1, bounds=(0, 1), drawn=False,
               recover=_from("gradient_norms", live_gradient_mass_purity),
               meaning="gradient-mass purity without the experts that receive no gradient"),
        Metric("purity_above_floor", "purity above floor", lambda m: purity_above_floor(m.norms), better=1,
               bounds=(-math.inf, 1), brief=True, recover=_from("gradient_norms", purity_above_floor),
               meaning="of live experts; 0: all have the same mix of tasks; 1: one task each"),
        Metric("structure_purity", "structure purity", lambda m: structure_purity(m.counts), bounds=(0, 1),
               paper="struct_purity", drawn=False,
               meaning="selections that belong to their expert's largest task"),
        Metric("structure_purity_floor", "structure floor",
               lambda m: structure_purity_floor(m.counts), bounds=(0, 1), drawn=False,
               recover=_from("counts", structure_purity_floor),
               meaning="the largest task's share of all selections"),
        Metric("nmi", "NMI", lambda m: normalized_mutual_information(m.counts), bounds=(0, 1), paper="nmi",
               brief=True, meaning="0: the expert says nothing about the task"),
        Metric("ari", "ARI", lambda m: adjusted_rand_index(m.counts), bounds=(-0.5, 1), paper="ari",
               drawn=False, meaning="0: as by chance; 1: tasks and experts coincide"),
        Metric("entropy", "routing entropy", lambda m: routing_entropy(m.gates), unit="nats",
               bounds=lambda tasks, experts: (0, math.log(experts)), listed=False),
        Metric("normalized_entropy", "normalized entropy", lambda m: routing_entropy(m.gates, normalize=True),
               bounds=(0, 1), paper="norm_routing_entropy", recover=_entropy_share,
               drawn=False, meaning="of an example's gates; 1: uniform over all experts"),
        Metric("intra_expert_coherence", "intra-expert coherence",
               lambda m: intra_expert_coherence(gram=m.by_expert), paper="intra_coherence",
               short="coherence in experts",
               bounds=lambda tasks, experts: (-1 / (tasks - 1) if tasks > 1 else 0, 1),
               drawn=False, meaning="cosine of tasks' gradients within an expert"),
        Metric("inter_expert_similarity", "inter-expert similarity",
               lambda m: inter_expert_similarity(gram=m.between), paper="inter_similarity",
               bounds=lambda tasks, experts: (-1 / (experts - 1) if experts > 1 else 0, 1),
               drawn=False, meaning="cosine of gradients between experts"),
        Metric("task_cosine", "cosine between tasks", lambda m: task_cosine(gram=m.by_expert),
               bounds=lambda tasks, experts: (-1 / (tasks - 1) if tasks > 1 else 0, 1), listed=False,
               meaning="of the tasks' gradients in all experts; below 0: conflict"),
        Metric("observed_cosine", "cosine between observations", lambda m: observed_cosine(gram=m.observed),
               bounds=lambda tasks, experts: (-1 / (tasks - 1) if tasks > 1 else 0, 1), listed=False),
        Metric("task_conflict", "task pairs in conflict", lambda m: task_conflict(gram=m.by_expert),
               bounds=(0, 1), listed=False),
        Metric("recovery", "recovery (ARI)", _of_clusters(recovery), better=1, bounds=(-0.5, 1), digits=3,
               listed=False, meaning="0: as by chance; 1: the tasks' known groups have experts of their own"),
        Metric("recovery_chance", "recovery by chance", _of_clusters(recovery_chance), bounds=(-0.5, 1),
               digits=3, listed=False,
               meaning="exceeded once in twenty times by tasks dealt to the experts at random"),
        Metric("recovery_ceiling", "recovery's ceiling",
               _of_clusters(lambda shares, clusters: recovery_ceiling(clusters, shares.shape[1])),
               bounds=(0, 1), digits=3, listed=False, meaning="the highest that so many experts can reach"),
        Metric("cluster_mixing", "mixing of clusters", _of_clusters(cluster_mixing), better=-1, bounds=(0, 1),
               digits=3, listed=False, meaning="share of an expert's routing that is of other clusters"),
        Metric("step_seconds", "time per update", better=-1, bounds=(0, math.inf), digits=1, scale=1000,
               unit="ms", where="timing.step_seconds_mean", listed=False),
        Metric("updates_per_second", "updates per second", better=1, bounds=(0, math.inf), digits=2,
               where="timing.updates_per_second", listed=False),
    )
}  # fmt: skip

#: The objectives of the paper's Pareto front in its order: what ``pareto_front`` calls each, and its metric.
OBJECTIVES: Mapping[str, str] = {
    "accuracy": "accuracy",
    "purity": "gradient_mass_purity",
    "utilization": "utilization",
    "load_variance": "load_variance",
}

_OWN = frozenset(
    {
        *METRICS,
        "load",
        "load_by_task",
        "counts",
        "gradient_norms",
        "task_cosines",
        "gradient_grams",
        "nmi_shuffled",
    }
)


def register(metric: Metric) -> Metric:
    """Measure and show a metric of one's own from now on, also in figures and trajectories.

    A value that is not finite is left out of the result. A name that the package's own results use is
    refused, and one that is no plain name.
    """
    if metric.name in _OWN or not metric.name.isidentifier():
        raise UserError(
            f"metric {metric.name!r} is a key of every result or no plain name; expected one of its own"
        )
    METRICS[metric.name] = metric
    return metric


def listed() -> dict[str, Metric]:
    """The metrics that every full table and figure shows, by name."""
    return {name: metric for name, metric in METRICS.items() if metric.listed}


def summarize(measured: Measured) -> dict[str, float]:
    """The metrics that are computed from these arrays, by name, in the order of result.json."""
    computed = {name: m.compute(measured) for name, m in METRICS.items() if m.compute is not None}
    values = {name: float(value) for name, value in computed.items() if value is not None}
    for name, value in values.items():
        if not math.isfinite(value):
            warnings.warn(f"metric {name} is {value}; it is left out of the result", stacklevel=2)
    return {name: value for name, value in values.items() if math.isfinite(value)}
