"""Scripts of this directory on ranks of one machine, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

HERE = Path(__file__).parent
LIMIT = 300  # seconds for all that a script does


def on_ranks(count: int, script: str, out: Path) -> Callable[[str, int], Any]:
    """Run ``script`` with one thread a rank on the CPU; what rank r saved as ``out/name-r.pt``."""
    paths = os.pathsep.join([str(HERE.parent), *sys.path])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    done = subprocess.run(
        [*launch, HERE / script, out],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return lambda name, rank: torch.load(out / f"{name}-{rank}.pt", weights_only=True)


def saved_by(script: str) -> Any:
    """A fixture of what two ranks saved: a function of the name and the rank."""

    @pytest.fixture(scope="module")
    def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Any]:
        return on_ranks(2, script, tmp_path_factory.mktemp("ranks"))

    return ranks


def leave() -> NoReturn:
    """End a rank's process here, without Python's own end.

    A gloo thread that still holds a tensor then would abort the process (pytorch/pytorch#190489), and a
    process group that DistributedDataParallel has used keeps its threads after it is destroyed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
