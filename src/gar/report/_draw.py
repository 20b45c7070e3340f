"""The drawings of a page by two processes: they are most of a report's time."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from gar.report._page import Picture

#: Fewer pictures are not worth a process.
LEAST = 6


def draw(pictures: Sequence[Picture], pdf: bool = False) -> None:
    """Fill ``drawn``, and ``pdf`` where wanted, of all pictures.

    Half of them are drawn by a fork, which has all figures and nothing to import. Only a process of one
    thread on Linux forks: in a notebook, or where another thread may hold a lock, this process draws all.
    """
    kinds = ("drawn", "pdf") if pdf else ("drawn",)
    if len(pictures) >= LEAST and _forks():
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        half = pictures[1::2]
        child = context.Process(target=_send, args=(sender, half, kinds), daemon=True)
        child.start()
        sender.close()
        _fill(pictures[::2], kinds)
        try:
            drawn = receiver.recv()
        except EOFError:  # the fork ended early, of memory or a fault: drawn here, where a fault is seen
            drawn = []
        child.join()
        for picture, found in zip(half, drawn, strict=False):
            vars(picture).update(found)  # where a cached property keeps its value
    _fill(pictures, kinds)


def _forks() -> bool:
    alone = threading.active_count() == 1 and not multiprocessing.current_process().daemon
    return sys.platform == "linux" and alone and len(os.sched_getaffinity(0)) > 1


def _fill(pictures: Sequence[Picture], kinds: Sequence[str]) -> None:
    for picture in pictures:
        for kind in kinds:
            getattr(picture, kind)


def _send(sender: Connection, pictures: Sequence[Picture], kinds: Sequence[str]) -> None:
    _fill(pictures, kinds)
    sender.send([{kind: getattr(picture, kind) for kind in kinds} for picture in pictures])
    sender.close()
