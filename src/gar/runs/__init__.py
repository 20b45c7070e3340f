"""The run directory: names, states, failures, comparison of configurations, packing, reading.

Nobody else knows its files. ``read_run`` reads one in any state, ``find_runs`` finds those below a directory.
"""

from gar.runs.reading import Run, find_runs, read_run
from gar.runs.result import DamagedFile, RunResult, read_result
from gar.runs.state import State, state_of

__all__ = ["DamagedFile", "Run", "RunResult", "State", "find_runs", "read_result", "read_run", "state_of"]
