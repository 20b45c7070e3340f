"""What the experts of an MoE language model do on groups of texts, without training: ``gar inspect``.

:func:`inspect` looks at a model in memory; :func:`inspect_to` loads one by its name and works in a directory
from which it goes on when it was interrupted. Definitions and rules: docs/inspect.md.
"""

from gar.inspection._statistics import Chance
from gar.inspection.inspect import inspect
from gar.inspection.result import Group, Inspection, Layer
from gar.inspection.run import Request, inspect_to

__all__ = ["Chance", "Group", "Inspection", "Layer", "Request", "inspect", "inspect_to"]
