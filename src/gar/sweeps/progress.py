"""How far a sweep or a search is: a live table on a terminal, plain lines everywhere else."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gar.sweeps.executors import Event

#: Seconds between lines of progress where nothing is drawn.
PACE = 30.0
#: Of the work: before so much is done, its pace says little.
TELLING = 0.02


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
    """Follows events; ``total`` runs, ``done`` of which were there before.

    ``expected`` are the seconds that the other runs may take by id, ``guess`` those of all of them together:
    the time left is then told from the beginning on, and in plain lines too.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        console: Console | None = None,
        expected: Mapping[str, float] | None = None,
        guess: float | None = None,
    ) -> None:
        self.console = console or Console(stderr=True)
        self._expected, self._guess, self._ended, self._told = expected or {}, guess, 0.0, time.monotonic()
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
            self._tell()
        elif event.kind == "message":
            self.say(f"{name}: {facts['line']}")
        elif event.kind == "lost":
            self.now[name] = {"stage": "starting"}
            self.say(f"lost {name}: {facts['reason']}; it goes on from {facts['checkpoint']}")
        if not event.ends:
            return
        self.now.pop(name, None)
        self._ended += self._weight(name)
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
        left = f"; {self._words(left)}" if (left := self.left()) and self._guess is not None else ""
        self.say(f"[{self.done}/{self.total}] {line}{left}", style)

    def left(self) -> float | None:
        """Seconds that the rest may take, by the pace so far and, the less is done, by the guess; or None."""
        if self.done >= self.total:
            return None
        elapsed, share = time.monotonic() - self._began, self.share()
        rest = None if self._guess is None else max(0.0, self._guess - elapsed)
        if share < TELLING:
            return rest
        measured = elapsed * (1 - share) / share
        return measured if rest is None else share * measured + (1 - share) * rest

    def share(self) -> float:
        """How much of the work is done, between 0 and 1; a run in its updates counts in part."""
        running = sum(self._weight(name) * _part(facts) for name, facts in self.now.items())
        whole = sum(self._expected.values()) or self.total - self._before
        return min(1.0, (self._ended + running) / whole) if whole > 0 else 0.0

    def _weight(self, name: str) -> float:
        return self._expected.get(name, 0.0) if self._expected else 1.0

    def _tell(self) -> None:
        """Now and then a line, where there is no live table."""
        quiet = self.console.is_terminal or self._guess is None or time.monotonic() - self._told < PACE
        if not quiet and (left := self.left()) is not None:
            self.say(f"{100 * self.share():.0f} % done; {self._words(left)}")

    @staticmethod
    def _words(left: float) -> str:
        return f"about {duration(left)} left"

    def say(self, line: str, style: str = "") -> None:
        """A line that stays."""
        self._told = time.monotonic()
        self.console.print(line, style=style or None, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Group:
        rows = Table.grid(padding=(0, 2))
        for name, facts in self.now.items():
            stage = str(facts["stage"])
            if "done" in facts:
                stage = f"{stage} {facts['done']}/{facts['total']}"
            loss = f"loss {float(facts['loss']):.4f}" if "loss" in facts else ""
            rows.add_row(Text(name, overflow="ellipsis"), stage, loss)
        note = f"{self.failed} failed" if self.failed else ""
        if (left := self.left()) is not None:
            note += f"{', ' if note else ''}{self._words(left)}"
        return Group(rows, self._bar, Text(note, style="dim"))


def _part(facts: Mapping[str, float | str]) -> float:
    """Of a run's updates, how many are done."""
    if facts.get("stage") != "update":
        return 0.0
    return float(facts["done"]) / max(1.0, float(facts["total"]))
