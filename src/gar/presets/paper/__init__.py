"""The paper's tables as data, with the digits it prints.

Cells are strings; an empty one does not apply or is not printed. Mixtures are ``five``, ``six``,
``seven_paws``, ``seven_mrpc`` and ``eight``; tasks have the paper's spelling (``SST-2``). Besides the
settings of :func:`settings`, summaries know ``frozen_two_backbone`` (DeBERTa and Qwen3-1.7B),
``frozen_three_backbone`` (and RoBERTa) and ``single_task_equal_adaptation``; the subject ``aggregate`` is
the paper's own summary row of a setting.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, NamedTuple, TypeVar

import yaml

Row = TypeVar("Row")

#: Metric of the endpoint and paired tables: where result.json has it. ``seed_std`` is the population standard
#: deviation of ``accuracy.macro`` over the seeds, ``norm_routing_entropy`` is divided by log E.
METRICS: Mapping[str, str] = {
    "acc": "accuracy.macro",
    "seed_std": "accuracy.macro",
    "lvar": "routing.load_variance",
    "util": "routing.utilization",
    "purity": "routing.gradient_mass_purity",
    "struct_purity": "routing.structure_purity",
    "nmi": "routing.nmi",
    "ari": "routing.ari",
    "norm_routing_entropy": "routing.entropy",
    "intra_coherence": "routing.intra_expert_coherence",
    "inter_similarity": "routing.inter_expert_similarity",
    "task_metric_mcc": "accuracy.extra.{task}_mcc",
    "task_metric_f1": "accuracy.extra.{task}_f1",
}


class Setting(NamedTuple):
    """Fixed choices of one setting; ``epochs`` reads ``CoLA=5;MRPC=5``, table labels are joined by ``;``."""

    setting: str
    backbone_hub_id: str
    backbone_name_in_text: str
    backbone_trainable: str
    expert_kind: str
    routed_unit: str
    experts: str
    top_k: str
    gate: str
    rank: str
    lora_alpha: str
    lora_dropout: str
    max_seq_len: str
    precision: str
    per_task_batch_size: str
    group_size: str
    optimizer_updates: str
    epochs: str
    warmup_ratio: str
    prediction_head: str
    methods: str
    load_vector: str
    final_seeds: str
    config_tables: str
    endpoint_tables: str
    sweep_config_tables: str


class Selected(NamedTuple):
    """The selected hyper-parameters of one setting, mixture or task, and method."""

    setting: str
    mixture_or_task: str
    method: str
    learning_rate: str
    grad_clip: str
    weight_decay: str
    cagrad_c: str
    cagrad_inner_lr: str
    lambda_align: str
    beta_stgc: str
    tau_stgc: str
    lambda_load: str
    alpha_switch: str


class SweepConfig(NamedTuple):
    """What stays fixed in a coefficient sweep."""

    setting: str
    mixture: str
    learning_rate: str
    grad_clip: str
    weight_decay: str
    per_task_batch_size: str
    group_size: str
    max_seq_len: str
    optimizer_updates: str
    seeds: str


class SweepValue(NamedTuple):
    """One cell of the coefficient sweeps.

    ``row`` is a task or ``macro`` (in percent), ``seed_std`` (percentage points), or lvar, purity, util.
    """

    setting: str
    mixture: str
    objective: str
    coefficient: str
    row: str
    value: str


class Endpoint(NamedTuple):
    """One endpoint; accuracies are fractions."""

    setting: str
    mixture_or_task: str
    method: str
    metric: str
    value: str


class Paired(NamedTuple):
    """A paired difference with its 95 % interval.

    ``comparison`` a-b is a minus b; ``unit`` is pp (percentage points of accuracy), native, or p_value.
    """

    setting: str
    scope: str
    comparison: str
    metric: str
    estimate: str
    ci_low: str
    ci_high: str
    unit: str


class Runtime(NamedTuple):
    """Update and wall-clock times; ``factor`` is relative to Baseline."""

    setting: str
    mixture_or_task: str
    method: str
    step_s: str
    step_s_std: str
    wall_s: str
    wall_s_std: str
    factor: str
    budget: str
    seeds: str
    gradient_observations_per_update: str


@functools.cache
def settings() -> Mapping[str, Setting]:
    """The ten settings by id."""
    return {row.setting: row for row in _table("settings", Setting)}


@functools.cache
def mixtures() -> Mapping[str, tuple[str, ...]]:
    """The five mixtures' tasks, in the paper's order and spelling."""
    return dict(_table("mixtures", lambda mixture_id, tasks: (mixture_id, tuple(tasks.split(";")))))


@functools.cache
def configs() -> tuple[Selected, ...]:
    """The 230 selected configurations."""
    return _table("configs", Selected)


@functools.cache
def lambda_sweep_configs() -> tuple[SweepConfig, ...]:
    """The ten fixed configurations of the coefficient sweeps."""
    return _table("lambda_sweep_configs", SweepConfig)


@functools.cache
def lambda_sweep() -> tuple[SweepValue, ...]:
    """Both coefficient sweeps and the denominator ablation. Coefficient 0 is listed under load_normalized."""
    return _table("lambda_sweep", _sweep_value)


@functools.cache
def endpoints() -> tuple[Endpoint, ...]:
    """All endpoint results.

    >>> tuple(endpoints()[0])
    ('roberta_frozen_lora_ffn', 'five', 'baseline', 'acc', '0.6406')
    """
    return _table("endpoints", Endpoint)


def endpoint(setting: str, mixture_or_task: str, method: str) -> Mapping[str, str]:
    """The printed values of one cell of the comparison by metric; empty where the paper has none.

    >>> endpoint("roberta_head", "aggregate", "gar")["acc"], dict(endpoint("roberta_head", "nine", "gar"))
    ('0.8008', {})
    """
    return _endpoint_cells().get((setting, mixture_or_task, method), {})


@functools.cache
def paired() -> tuple[Paired, ...]:
    """All paired differences, over scopes five_mixtures, five_six, seven_eight, five_tasks and the sweeps.

    >>> [(p.estimate, p.ci_low, p.ci_high) for p in paired()
    ...  if (p.setting, p.comparison, p.metric) == ("deberta_frozen_lora_ffn", "gar-baseline", "acc")]
    [('1.176', '0.687', '1.666')]
    """
    return _table("paired", Paired)


@functools.cache
def runtime() -> tuple[Runtime, ...]:
    """The runtime table."""
    return _table("runtime", Runtime)


@functools.cache
def hpo() -> Mapping[str, Any]:
    """The hyper-parameter search: ranges, budgets, what each method searches."""
    tree: dict[str, Any] = yaml.safe_load(_text("hpo.yaml"))
    return tree


@functools.cache
def _endpoint_cells() -> dict[tuple[str, str, str], dict[str, str]]:
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in endpoints():
        cells.setdefault(row[:3], {})[row.metric] = row.value
    return cells


def _sweep_value(**cells: str) -> SweepValue:
    return SweepValue(coefficient=cells.pop("lambda"), **cells)  # lambda is no name in Python


def _table(name: str, row: Callable[..., Row]) -> tuple[Row, ...]:
    return tuple(row(**cells) for cells in csv.DictReader(_text(f"{name}.csv").splitlines()))


def _text(name: str) -> str:
    return resources.files("gar.presets.paper").joinpath(name).read_text(encoding="utf-8")
