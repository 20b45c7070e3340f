"""What the test of HSDP trains, on four ranks: ``torchrun … trainer_hsdp.py DIRECTORY``.

Two copies of the model, each sharded over two ranks. accelerate takes such a mesh for GPUs alone; what it
checks of the devices is left out, the mesh and all that is done with it are accelerate's and torch's own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig

from support.torchrun import leave
from support.trainer_fsdp import training, whole

#: Names in ``trainer_fsdp.TRAININGS``.
NAMES = ("plain", "losses beside the objective", "without the objective")


def sizes(name: str) -> dict[str, Any]:
    """What makes an update of one process that of four ranks: twice the micro-batches of two."""
    return {"steps": 4 if name.startswith("losses") else 2}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    for name in NAMES:
        mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        trainer = training(out / name, name, parallelism_config=mesh)
        trainer.train()
        assert next(iter(trainer.model.parameters())).device_mesh.shape == (2, 2)
        logs = [log for log in trainer.state.log_history if "loss" in log]
        torch.save({"model": whole(trainer.model), "logs": logs}, out / f"{name}-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
