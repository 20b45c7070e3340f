"""history.jsonl: one JSON object per logged update, without anything that a rerun would not repeat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gar.data.batches import Group


class History:
    """Appends to a file, or only remembers when ``path`` is None.

    Lines: ``{"update", "loss", "tasks": {name: loss}, "gradient_norm", "learning_rate"}`` after an update
    (1-based) and ``{"update", "evaluation": {...}}`` at trajectory checkpoints.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.last_loss = float("nan")
        self._pending: list[str] = []

    def rewind(self, update: int) -> None:
        """Drop what was written after ``update``: the part that a resumed run computes again."""
        if self.path is None:
            return
        kept = [line for line in read_lines(self.path) if line["update"] <= update] if update else []
        text = "".join(json.dumps(line) + "\n" for line in kept)
        self.path.write_text(text, encoding="utf-8")

    def update(
        self,
        update: int,
        losses: Sequence[float],
        groups: Sequence[Group],
        names: Sequence[str],
        norm: float,
        rate: float,
    ) -> None:
        """Note the update's losses; the task loss is ``sum_m v_m l_m``."""
        tasks = dict.fromkeys(names, 0.0)
        for loss, group in zip(losses, groups, strict=True):
            tasks[names[group.task]] += group.task_weight * len(names) * loss
        self.last_loss = sum(tasks.values()) / len(tasks)
        self._add(
            {
                "update": update,
                "loss": self.last_loss,
                "tasks": tasks,
                "gradient_norm": norm,
                "learning_rate": rate,
            }
        )

    def evaluation(self, update: int, sections: dict[str, Any]) -> None:
        """Note an evaluation during training."""
        self._add({"update": update, "evaluation": sections})
        self.flush()

    def flush(self) -> None:
        if self.path is not None and self._pending:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(self._pending))
        self._pending.clear()

    def _add(self, line: dict[str, Any]) -> None:
        self._pending.append(json.dumps(line) + "\n")
        if len(self._pending) >= 25:
            self.flush()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a history; a last line cut short by a kill is passed over."""
    lines: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return lines
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines
