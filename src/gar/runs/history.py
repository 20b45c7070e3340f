"""history.jsonl: one JSON object per logged update, without anything that a rerun would not repeat."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gar.runs.files import append_text, write_text
from gar.runs.tracking import Tracker

#: Seconds between writes of the lines noted meanwhile, for whoever follows the file.
PACE = 1.0


class History:
    """Appends to a file, or only remembers when ``path`` is None; a tracker gets every line too.

    Lines are on the disk after :meth:`flush`, which comes before every checkpoint: a run that goes on from
    one computes the later ones again.

    Lines: ``{"update", "loss", "tasks": {name: loss}, "gradient_norm", "learning_rate"}`` after an update
    (1-based) and ``{"update", "evaluation": {...}}`` at trajectory checkpoints.
    """

    def __init__(self, path: Path | None, tracker: Tracker | None = None) -> None:
        self.path, self.tracker = path, tracker
        self.last_update, self.last_loss = 0, float("nan")
        self._pending: list[str] = []
        self._written, self._loose = time.monotonic(), False

    def rewind(self, update: int, warn: Callable[[str], None] = lambda line: None) -> None:
        """Drop what was written after ``update``: the part that a resumed run computes again."""
        self.last_update = update
        if self.path is None:
            return
        kept = [line for line in read_lines(self.path) if line["update"] <= update] if update else []
        if (missing := update - sum("evaluation" not in line for line in kept)) > 0:
            warn(f"{self.path} is damaged: {missing} of the first {update} updates are missing in it")
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def update(self, update: int, tasks: Mapping[str, float], norm: float, rate: float) -> None:
        """Note an update: the loss of every task, whose mean is the task loss ``sum_m v_m l_m``."""
        self.last_update, self.last_loss = update, sum(tasks.values()) / len(tasks)
        self._add(
            {
                "update": update,
                "loss": self.last_loss,
                "tasks": dict(tasks),
                "gradient_norm": norm,
                "learning_rate": rate,
            }
        )

    def evaluation(self, update: int, sections: dict[str, Any]) -> None:
        """Note an evaluation during training."""
        self._add({"update": update, "evaluation": sections})
        self.flush()

    def flush(self) -> None:
        """Bring everything noted onto the disk."""
        self._write(durable=True)

    def _write(self, durable: bool) -> None:
        if self.path is not None and (self._pending or self._loose):
            append_text(self.path, "".join(self._pending), durable)
            self._loose = not durable
        self._pending.clear()
        self._written = time.monotonic()

    def _add(self, line: dict[str, Any]) -> None:
        self._pending.append(json.dumps(line) + "\n")
        if self.tracker is not None:
            self.tracker.log(line["update"], line)
        if time.monotonic() - self._written >= PACE:
            self._write(durable=False)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a history; a last line cut short by a kill is passed over."""
    lines: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return lines
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            break
        if not isinstance(value, dict) or not isinstance(value.get("update"), int):
            break
        lines.append(value)
    return lines
