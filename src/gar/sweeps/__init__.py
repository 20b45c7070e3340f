"""Suites of runs on one machine or many, and the hyper-parameter search on top of them."""

from gar.sweeps.executors import Event, Executor, Job
from gar.sweeps.local import LocalExecutor
from gar.sweeps.ray import RayExecutor
from gar.sweeps.search import search, search_method, sweeping
from gar.sweeps.suite import PlannedRun, Suite, build_suite, load_suite
from gar.sweeps.sweep import Outcome, Plan, Status, make_plan, read_status, run_sweep

__all__ = [
    "Event",
    "Executor",
    "Job",
    "LocalExecutor",
    "Outcome",
    "Plan",
    "PlannedRun",
    "RayExecutor",
    "Status",
    "Suite",
    "build_suite",
    "load_suite",
    "make_plan",
    "read_status",
    "run_sweep",
    "search",
    "search_method",
    "sweeping",
]
