"""What the tests of FSDP2 train, one process a rank: ``torchrun … trainer_fsdp.py DIRECTORY``.

accelerate takes FSDP for GPUs alone and would use DDP here, without a word. So its state is set to what it
is there; sharding, optimizer, clipping and checkpoints are then accelerate's, Trainer's and torch's own.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

from gar.errors import UserError
from gar.integrations import GARMixin, GARTrainer
from gar.integrations._terms import able
from support import trainer_shares
from support.tiny_training import gradients, make, olmoe
from support.torchrun import leave

#: Name: options of the trainer, of TrainingArguments, and of fsdp_config.
TRAININGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": (
        {"coefficient": 2.0, "group_size": 2, "gradients": "raw"},
        {"lr_scheduler_type": "constant"},
        {},
    ),
    "accumulated, fsdp's checkpoints": (
        {"coefficient": 2.0, "balance_coefficient": 0.1, "probabilities": "softmax", "gradients": "unit"},
        {"steps": 2},
        {"activation_checkpointing": True},
    ),
    "checkpointed": (
        {"coefficient": 2.0},
        {"gradient_checkpointing": True},
        {"reshard_after_forward": False},
    ),
    "one unit, another implementation": (
        {"coefficient": 2.0},
        {"experts": "batched_mm"},
        {"auto_wrap_policy": "NO_WRAP"},
    ),
    "experts apart, rows held": (
        {"coefficient": 2.0, "group_size": 0, "rows_dtype": "float64"},
        {},
        {"transformer_layer_cls_to_wrap": ["OlmoeExperts"]},
    ),
    "without the objective": ({"coefficient": 0.0}, {}, {}),
    **{f"{name} alone": ({"coefficient": 0.0, "router_losses": [f"{name}=0.3"]}, {}, {}) for name in able()},
    "losses beside the objective": (
        {"coefficient": 2.0, "router_losses": [f"{name}=0.3" for name in able()]},
        {"steps": 2},
        {},
    ),
    "the first rank's weights": ({"coefficient": 2.0}, {}, {"cpu_ram_efficient_loading": True}),
}


def sharded(kind: type[Any]) -> type[Any]:
    """A trainer that shards on CPUs, too."""

    class Sharded(kind):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            if self.accelerator.mixed_precision != "no":
                plugin.set_mixed_precision(self.accelerator.mixed_precision)
            for state in (PartialState, AcceleratorState):
                state._shared_state["distributed_type"] = DistributedType.FSDP
            AcceleratorState._shared_state["fsdp_plugin"] = plugin
            self.is_fsdp_enabled = True

    return Sharded


def whole(model: Any) -> dict[str, torch.Tensor]:
    """The state of a model, whole on every rank."""
    found = {}
    for name, value in model.state_dict().items():
        own = value.full_tensor() if isinstance(value, DTensor) else value
        found[name.replace("_checkpoint_wrapped_module.", "")] = own.clone()
    return found


def training(out: Path, name: str, kind: type[Any] = GARTrainer, model: Any = None, **more: Any) -> Any:
    """A training of 3 updates, of 4 examples a rank and micro-batch, sharded over the ranks there are."""
    options, sizes, config = TRAININGS[name]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = {"rows": 4, "updates": 3, "max_grad_norm": 0.5, **sizes, **more}
    model = olmoe() if model is None else model
    model.set_experts_implementation(sizes.pop("experts", "eager"))
    if config.get("cpu_ram_efficient_loading") and os.environ.get("RANK", "0") != "0":
        for parameter in model.parameters():  # as from_pretrained leaves it there: not the weights
            parameter.data.fill_(7.0)
    if ranks > 1:
        sizes |= {"fsdp": True, "fsdp_config": dict(config)}
        kind = sharded(kind)
    else:
        sizes["steps"] = 2 * sizes.get("steps", 1)
    return make(out, model, trainer=kind, sizes=sizes, **(options if issubclass(kind, GARMixin) else {}))


#: Unequal shares; a rank with a micro-batch less is refused.
SHARES = [name for name in trainer_shares.SHARES if name != "a micro-batch less"]


def unequal(out: Path, name: str) -> Any:
    """A training of :mod:`support.trainer_shares`, sharded over its two ranks."""
    sizes: dict[str, Any] = {"fsdp": True, "fsdp_config": {}}
    return trainer_shares.training(out, name, trainer_shares.LOSSES["all"], sharded(GARTrainer), **sizes)


def added(out: Path, **more: Any) -> dict[str, torch.Tensor]:
    """What the objective adds to the routers' gradients in the first update of a float32 model."""
    found = []
    for name in ("plain", "without the objective"):
        trainer = training(out, name, model=olmoe(torch.float32), **more)
        grads = {key: grad for key, grad in gradients(trainer).items() if ".gate." in key}
        found.append({key: g.full_tensor() if isinstance(g, DTensor) else g for key, g in grads.items()})
    return {key: grad - found[1][key] for key, grad in found[0].items()}


#: Adapters: on attention, and one of the ways to train a router, one with adapters on experts.
ADAPTERS: dict[str, dict[str, Any]] = {
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["gate"]},
    "target_parameters": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


def adapted(out: Path, name: str) -> Any:
    import peft

    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, init_lora_weights=False, **ADAPTERS[name])
    return training(out, "plain", model=peft.get_peft_model(olmoe(), lora))


def main(out: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)

    def save(name: str, found: Any) -> None:
        torch.save(found, out / f"{name}-{rank}.pt")

    def trained(name: str, trainer: Any) -> None:
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        save(name, {"model": whole(trainer.model), "logs": logs})

    for name in TRAININGS:
        trained(name, training(out / name, name))
    for name in SHARES:
        trained(name, unequal(out / name, name))
    try:
        unequal(out / "refused", "a micro-batch less").train()
    except UserError as error:
        save("refused", str(error))
    trainer = training(out / "without gar", "without the objective", transformers.Trainer)
    trainer.train()
    save("without gar", {"model": whole(trainer.model)})
    more: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    training(out / "parts", "plain", **more, updates=2).train()
    torch.distributed.barrier()  # the first rank writes the checkpoint's last files
    resumed = training(out / "parts", "plain", **more)
    resumed.train(resume_from_checkpoint=str(out / "parts" / "checkpoint-2"))
    save("resumed", {"model": whole(resumed.model)})
    save("bf16", added(out / "bf16", bf16=True))
    if find_spec("peft") is not None:
        for name in ADAPTERS:
            trained(name, adapted(out / name, name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
