"""What the tests of several ranks train, one process a rank: ``torchrun … trainer_ranks.py DIRECTORY``."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gar.integrations import GARTrainer
from gar.objective import alignment_loss
from support.tiny_training import gradients, make, olmoe, texts
from support.torchrun import leave

#: Name: options of the trainer; every one a training of 3 updates, of 4 examples a rank and micro-batch.
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {"coefficient": 2.0, "group_size": 2, "gradients": "raw"},
    "accumulated": {
        "coefficient": 2.0,
        "steps": 2,
        "balance_coefficient": 0.1,
        "probabilities": "softmax",
        "gradients": "unit",
    },
    "losses": {
        "coefficient": 0.0,
        "steps": 2,
        "router_losses": ["zloss=0.3", "global_balance=0.5", "simbal=0.2"],
    },
    "losses beside": {"coefficient": 2.0, "router_losses": ["zloss=0.3", "global_balance=0.5", "simbal=0.2"]},
    "held": {"coefficient": 2.0, "group_size": 0, "rows_dtype": "float64"},
}


def training(out: Path, name: str, ranks: int, trainer: Any = GARTrainer) -> Any:
    """The training on ``ranks`` ranks, or in one process with as many micro-batches."""
    options = dict(TRAININGS[name])
    steps = options.pop("steps", 1)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        steps *= ranks
    return make(out, trainer=trainer, sizes={"steps": steps, "rows": 4, "updates": 3}, **options)


def adapted(out: Path, ranks: int) -> Any:
    """The same with adapters, one of them on the router, and gradient checkpointing."""
    import peft

    lora = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "gate"])
    model = peft.get_peft_model(olmoe(), lora)
    model.enable_input_require_grads()
    steps = ranks if int(os.environ.get("WORLD_SIZE", "1")) == 1 else 1
    sizes = {"steps": steps, "rows": 4, "updates": 3, "gradient_checkpointing": True}
    return make(out, model, sizes=sizes, coefficient=2.0)


class Naive(GARTrainer):
    """What must not be done: each rank's own groups, and a second backward through DDP's hooks."""

    def _finish(self, update: Any) -> None:
        for place, layer in update.layers.items():
            (sites,), (members,) = update.passes, update.members
            gates, _ = self._sums(sites[place].detached_routing(), members, update.groups.count)
            own = update.present[update.rank]
            shares, rows = gates[own] / gates[own].sum(1, keepdim=True), layer.rows.rows[own]
            (self.gar.coefficient * alignment_loss(shares, rows)).backward()


def main(out: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    for name in TRAININGS:
        trainer = training(out / name, name, 2)
        trainer.train()
        logs = [
            {k: v for k, v in log.items() if "/" in k} for log in trainer.state.log_history if "loss" in log
        ]
        torch.save({"model": trainer.model.state_dict(), "logs": logs}, out / f"{name}-{rank}.pt")
    for name, kind in (("exact", GARTrainer), ("naive", Naive)):
        torch.save(gradients(training(out / name, "plain", 2, kind)), out / f"{name}-{rank}.pt")
    if find_spec("peft") is not None:
        trainer = adapted(out / "adapted", 2)
        trainer.train()
        torch.save(trainer.model.state_dict(), out / f"adapted-{rank}.pt")
    # Unequal shares of tokens, each rank's loss a mean over its own: DDP's mean of means.
    for coefficient in (0.0, 2.0):
        sizes = {"rows": 4, "average_tokens_across_devices": False}
        trainer = make(out / "means", sizes=sizes, coefficient=coefficient, group_size=2)
        torch.save(gradients(trainer), out / f"means-{coefficient}-{rank}.pt")
    # The second rank's examples have no loss at all.
    rows = [
        {**row, "labels": [-100] * len(row["labels"])} if n % 8 > 3 else row
        for n, row in enumerate(texts(64))
    ]
    more = {"train_dataset": type(texts(1)).from_list(rows)}
    trainer = make(out / "empty", sizes={"rows": 4}, coefficient=2.0, group_size=1, more=more)
    torch.save(gradients(trainer), out / f"empty-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
