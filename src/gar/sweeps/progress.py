"""How far a sweep or a search is: a live table on a terminal, plain lines everywhere else."""

from __future__ import annotations

import itertools
import time
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gar.sweeps.executors import Event


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(42), duration(150), duration(5400), duration(200_000)
    ('42 s', '2 min 30 s', '1 h 30 min', '2 d 7 h')
    """
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    whole = round(seconds)
    for (large, size), (small, part) in itertools.pairwise(units):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {large}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


class View:
    """Follows events; ``total`` runs, ``done`` of which were there before."""

    def __init__(self, total: int, done: int = 0, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.total, self.done, self.failed = total, done, 0
        self.now: dict[str, dict[str, float | str]] = {}
        self._began, self._before = time.monotonic(), done
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
        )
        self._task = self._bar.add_task("runs", total=total, completed=done)
        self._live = Live(
            get_renderable=self._render, console=self.console, refresh_per_second=2, transient=True
        )

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def follow(self, event: Event) -> None:
        """Show one event."""
        name, facts = event.job.id, event.facts
        if event.kind == "started":
            self.now[name] = {"stage": "starting"}
        elif event.kind == "progress":
            self.now[name] = facts
        elif event.kind == "message":
            self.say(f"{name}: {facts['line']}")
        elif event.kind == "lost":
            self.now[name] = {"stage": "starting"}
            self.say(f"lost {name}: {facts['reason']}; it goes on from {facts['checkpoint']}")
        if not event.ends:
            return
        self.now.pop(name, None)
        took = f" in {duration(facts['seconds'])}" if "seconds" in facts else ""
        if event.kind == "finished":
            self.ended(f"finished {name}{took}, accuracy {facts['accuracy']:.4f}")
        elif event.kind == "failed":
            self.failed += 1
            self.ended(f"FAILED {name}{took}: {facts['reason']}", "red")
        else:
            self.say(f"stopped {name}; it goes on with the next start")

    def ended(self, line: str, style: str = "") -> None:
        """One more run is over."""
        self.done += 1
        self._bar.update(self._task, completed=self.done)
        self.say(f"[{self.done}/{self.total}] {line}", style)

    def say(self, line: str, style: str = "") -> None:
        """A line that stays."""
        self.console.print(line, style=style or None, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Group:
        rows = Table.grid(padding=(0, 2))
        for name, facts in self.now.items():
            stage = str(facts["stage"])
            if "done" in facts:
                stage = f"{stage} {facts['done']}/{facts['total']}"
            loss = f"loss {float(facts['loss']):.4f}" if "loss" in facts else ""
            rows.add_row(Text(name, overflow="ellipsis"), stage, loss)
        ended = self.done - self._before
        left = (time.monotonic() - self._began) / ended * (self.total - self.done) if ended else None
        note = f"{self.failed} failed" if self.failed else ""
        if left is not None and self.done < self.total:
            note += f"{', ' if note else ''}about {duration(left)} left"
        return Group(rows, self._bar, Text(note, style="dim"))
