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
    """Fill ``reason`` and ``drawn``, and ``pdf`` where wanted, of all pictures.

    A fork, which has all numbers and nothing to import, makes and draws as many as it can beside this
    process. Only a process of one thread on Linux forks: in a notebook, or where another thread may hold a
    lock, this process does all.
    """
    kinds = ("reason", "drawn", "pdf") if pdf else ("reason", "drawn")
    left = [picture for picture in pictures if any(kind not in vars(picture) for kind in kinds)]
    if len(left) >= LEAST and _forks():
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        taken = context.Value("i", 0)

        def take() -> Iterator[int]:
            """Numbers that no other process has."""
            while True:
                with taken.get_lock():
                    number, taken.value = taken.value, taken.value + 1
                if number >= len(left):
                    return
                yield number

        child = context.Process(target=_send, args=(sender, left, kinds, take), daemon=True)
        child.start()
        sender.close()
        _fill((left[number] for number in take()), kinds)
        try:
            found = receiver.recv()
        except EOFError:  # the fork ended early, of memory or a fault: drawn here, where a fault is seen
            found = {}
        child.join()
        for number, contents in found.items():
            vars(left[number]).update(contents)  # where a cached property keeps its value
    _fill(left, kinds)


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
