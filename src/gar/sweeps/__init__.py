"""Suites of runs on one machine or many; :mod:`gar.sweeps.search` is the hyper-parameter search on top."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gar.sweeps.executors import Event, Executor, Job
    from gar.sweeps.local import LocalExecutor
    from gar.sweeps.ray import RayExecutor
    from gar.sweeps.suite import PlannedRun, Suite, build_suite, load_suite
    from gar.sweeps.sweep import make_plan, read_status, run_sweep

# Resolved on first use, so that a worker process begins before it imports torch.
_EXPORTS = {
    "executors": ("Event", "Executor", "Job"),
    "local": ("LocalExecutor",),
    "ray": ("RayExecutor",),
    "suite": ("PlannedRun", "Suite", "build_suite", "load_suite"),
    "sweep": ("make_plan", "read_status", "run_sweep"),
}


def __getattr__(name: str) -> Any:
    for module, names in _EXPORTS.items():
        if name in names:
            return getattr(importlib.import_module(f"gar.sweeps.{module}"), name)
    raise AttributeError(f"module 'gar.sweeps' has no attribute {name!r}")


__all__ = [
    "Event",
    "Executor",
    "Job",
    "LocalExecutor",
    "PlannedRun",
    "RayExecutor",
    "Suite",
    "build_suite",
    "load_suite",
    "make_plan",
    "read_status",
    "run_sweep",
]
