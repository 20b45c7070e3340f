"""The pictures of a page by two processes: they are most of a report's time."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection

from gar.report._page import Picture

#: Fewer pictures are not worth a process.
LEAST = 6


def draw(pictures: Sequence[Picture], pdf: bool = False) -> None:
    """Fill ``reason``, ``drawn`` and ``svg``, and ``pdf`` where wanted, of all pictures."""
    begin(pictures, pdf)()


def begin(pictures: Sequence[Picture], pdf: bool = False) -> Callable[[], None]:
    """As :func:`draw`; another process begins now, and the caller may do something else before it helps.

    The other one is a fork, which has all numbers and nothing to import; each takes the next picture that
    nobody has. Only a process of one thread on Linux forks: in a notebook, or where another thread may hold a
    lock, what is returned does all.
    """
    kinds = ("reason", "drawn", "svg", "pdf") if pdf else ("reason", "drawn", "svg")
    if len(pictures) < LEAST or not _forks():
        return lambda: _fill(pictures, kinds)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    taken = context.Value("i", 0)

    def take() -> Iterator[int]:
        """Numbers that no other process has."""
        while True:
            with taken.get_lock():
                number, taken.value = taken.value, taken.value + 1
            if number >= len(pictures):
                return
            yield number

    child = context.Process(target=_send, args=(sender, pictures, kinds, take), daemon=True)
    child.start()
    sender.close()

    def finish() -> None:
        _fill((pictures[number] for number in take()), kinds)
        try:
            found = receiver.recv()
        except EOFError:  # the fork ended early, of memory or a fault: drawn here, where a fault is seen
            found = {}
        child.join()
        for number, contents in found.items():
            vars(pictures[number]).update(contents)  # where a cached property keeps its value
        _fill(pictures, kinds)

    return finish


def _forks() -> bool:
    alone = threading.active_count() == 1 and not multiprocessing.current_process().daemon
    return sys.platform == "linux" and alone and len(os.sched_getaffinity(0)) > 1


def _fill(pictures: Iterable[Picture], kinds: Sequence[str]) -> None:
    for picture in pictures:
        for kind in kinds:
            getattr(picture, kind)


def _send(
    sender: Connection, pictures: Sequence[Picture], kinds: Sequence[str], take: Callable[[], Iterator[int]]
) -> None:
    found = {}
    for number in take():
        _fill([pictures[number]], kinds)
        found[number] = {kind: getattr(pictures[number], kind) for kind in kinds}
    sender.send(found)
    sender.close()
