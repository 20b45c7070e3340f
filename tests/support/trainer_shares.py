"""Trainings whose ranks have unequal shares, one process a rank: ``torchrun … trainer_shares.py DIRECTORY``.

accelerate gives every rank as many examples, and repeats some for it, unless ``even_batches`` is off.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers

from gar.integrations import GARTrainer
from gar.integrations._terms import able
from support.tiny_training import gradients, make, olmoe, texts
from support.torchrun import leave

ROWS = 4  # examples a micro-batch

#: Name: what of GARArguments is on.
LOSSES: dict[str, dict[str, Any]] = {
    "balance": {"coefficient": 0.0, "balance_coefficient": 0.3},
    **{name: {"coefficient": 0.0, "router_losses": [f"{name}=0.3"]} for name in able()},
    "all": {
        "coefficient": 2.0,
        "group_size": 2,
        "balance_coefficient": 0.3,
        "router_losses": [f"{name}=0.3" for name in able()],
    },
}

#: Name: the names of the losses that it is trained with.
SHARES: dict[str, tuple[str, ...]] = {
    "two examples less": tuple(LOSSES),  # the second rank's batch is incomplete
    "a micro-batch less": tuple(LOSSES),  # the second rank has one in an update, the first has two
    "only padding": tuple(LOSSES),  # on the second rank
    "one token": ("all",),  # in all of the second rank's texts
    "few tokens": ("all",),  # the second rank's texts have 3, the first one's 20
    "no labels": ("all",),  # no loss is asked for on the second rank
    "nothing at all": ("all",),  # only padding, on both ranks, in the first update
    "packed": ("all",),  # four texts in the first rank's row, two in the second one's
    "repeated": ("all",),  # even_batches is on: the second rank's batch is filled up
}
#: What a first update of unequal means is looked at with.
MEANS = ("nothing", "all")
TRAININGS = [(name, loss) for name, losses in SHARES.items() for loss in losses]


def rows_of(name: str) -> datasets.Dataset:
    """The examples, in their order: four of the first rank, four of the second, and so on."""
    count = {"two examples less": 6, "a micro-batch less": 12, "packed": 6, "repeated": 6}.get(name, 24)
    rows = []
    for n, row in enumerate(texts(count)):
        ids, labels, second = row["input_ids"], row["labels"], n % 8 >= ROWS
        if name == "few tokens":
            ids = ids[:3] if second else (ids * 5)[:20]
            labels = ids
        if second and name == "no labels":
            ids = ids[:4]
        if second and name in ("no labels", "only padding", "one token"):
            labels = [-100] * len(ids)
        if (second and name in ("only padding", "one token")) or (name == "nothing at all" and n < 8):
            ids, labels = [0] * len(ids), [-100] * len(ids)
        if name == "one token" and n % 8 == ROWS:
            ids = [5, *ids[1:]]
        rows.append({**row, "input_ids": ids, "labels": labels})
    if name == "repeated" and alone():
        rows += rows[:2]
    return datasets.Dataset.from_list(rows)


def alone() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) == 1


def training(
    out: Path, name: str, losses: Mapping[str, Any], kind: type[Any] = GARTrainer, **sizes: Any
) -> Any:
    """Three updates of two ranks, or of one process that has both ranks' micro-batches."""
    steps = (2 if name == "a micro-batch less" else 1) * (2 if alone() else 1)
    sizes = {"rows": ROWS, "steps": steps, "updates": 3, **sizes}
    sizes["accelerator_config"] = {"even_batches": name == "repeated"}
    more: dict[str, Any] = {"train_dataset": rows_of(name)}
    if name == "packed":
        more["data_collator"] = transformers.DataCollatorWithFlattening()
    return make(out, model(), trainer=kind, sizes=sizes, more=more, **losses)


def model() -> Any:
    """Whose attention is defined for a text of nothing but padding, as the eager one in float64 is not."""
    made = olmoe()
    made.set_attn_implementation("sdpa")
    return made


def main(out: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    for name, loss in TRAININGS:
        trainer = training(out / name, name, LOSSES[loss])
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        torch.save({"model": trainer.model.state_dict(), "logs": logs}, out / f"{name}, {loss}-{rank}.pt")
    # Each rank's loss a mean over its own tokens, of which the second one has none.
    for loss in MEANS:
        sizes: dict[str, Any] = {"average_tokens_across_devices": False}
        found = gradients(
            training(out / "means", "no labels", LOSSES.get(loss, {"coefficient": 0.0}), **sizes)
        )
        torch.save(found, out / f"means, {loss}-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
