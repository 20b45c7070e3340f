"""The names of the files in a run directory; nobody else spells them."""

import re

SCHEMA = 1
CONFIG, ENVIRONMENT, HISTORY, RESULT, FAILURE = (
    "config.yaml",
    "environment.json",
    "history.jsonl",
    "result.json",
    "failure.json",
)
CHECKPOINTS, MODEL, LOCK, LOG = "checkpoints", "model", ".lock", "log.txt"
DIAGNOSTICS, CHECKSUMS = "diagnostics.json", "checksums.json"
#: What an inspection was asked for; its directory is no run.
INSPECTION = "inspection.json"


def path_part(name: str) -> str:
    """A name of a mixture or task as one part of a path.

    >>> path_part("../my tasks")
    '.._my_tasks'
    """
    return re.sub(r"[^A-Za-z0-9._+-]", "_", name)[:80]
