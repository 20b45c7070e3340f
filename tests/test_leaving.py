"""A rank that leaves, for whatever reason, leaves no thread of torch.distributed behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.torchrun import on_ranks


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are listed by /proc")
def test_an_error_ends_the_groups_threads(tmp_path: Path) -> None:
    """Else one that holds a tensor when Python ends may abort the process: its exit code would be lost."""
    found = on_ranks(2, "leaving.py", tmp_path)
    for rank, message in enumerate(("rank 1: no such thing", "no such thing")):
        told = found("left", rank)
        assert told["message"] == message
        assert told["inside"]
        assert told["after"] == []
