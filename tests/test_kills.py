"""A run killed with its captured updates on the device goes on to the bits of one that never stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from gar.config import Config
from gar.model.multitask import MultiTaskModel
from gar.runs.history import read_lines
from gar.training import Hooks, train_from_config
from support import tiny_runs
from support.tiny_runs import make_config, same_bits, weights

#: Children make a CUDA context of their own.
SPAWN = multiprocessing.get_context("spawn")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def until_killed(config: Config, out: Path, last: int | None) -> None:
    """Train, or go on, in a process that dies when it is told of update ``last``."""

    def update(done: int, *_: float) -> None:
        if last is not None and done >= last:
            os.kill(os.getpid(), signal.SIGKILL)

    train_from_config(config, out, resume=out.exists(), hooks=Hooks(update=update))


@pytest.mark.parametrize("device", DEVICES)
def test_killed_runs_go_on_bit_for_bit(tmp_path: Path, device: str) -> None:
    world = tiny_runs.make_world(tmp_path / "world")
    config = make_config(
        world, method__name="gar", optimizer__updates=200, checkpoint__every=30, device=device
    )
    exits: list[int | None] = []
    plan: dict[str, list[int | None]] = {"whole": [None], "killed": [50, 131, None]}
    for name, stops in plan.items():
        for last in stops:
            child = SPAWN.Process(target=partial(until_killed, config, tmp_path / name, last))
            child.start()
            child.join()
            exits.append(child.exitcode)
    killed = -int(signal.SIGKILL)
    assert exits == [0, killed, killed, 0]
    whole, resumed = (read_lines(tmp_path / name / "history.jsonl") for name in ("whole", "killed"))
    assert resumed == whole
    models = (MultiTaskModel.from_pretrained(tmp_path / name / "model") for name in ("whole", "killed"))
    assert same_bits(*map(weights, models))
