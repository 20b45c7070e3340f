"""Named configurations: the paper's, its coefficient sweeps, and our own."""

from gar.presets import paper
from gar.presets.catalogue import (
    Preset,
    check,
    deviations,
    find,
    is_preset,
    names,
    resolve_config,
    write,
)

__all__ = ["Preset", "check", "deviations", "find", "is_preset", "names", "paper", "resolve_config", "write"]
