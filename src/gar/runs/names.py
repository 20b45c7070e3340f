"""The names of the files in a run directory; nobody else spells them."""

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
