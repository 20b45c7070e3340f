"""Settings of a trainer under which the objective would be wrong or never reach a router: one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from gar.errors import UserError, shown
from gar.integrations._groups import LABELS, missing_column
from gar.integrations._packing import LENGTHS
from gar.nn import RoutedExperts
from gar.observation import SiteObservation

THREE_WAYS = (
    'modules_to_save=["gate"], target_parameters=["mlp.gate.weight"] or target_modules=["gate"] in the '
    "LoraConfig (or `router`, where your model calls it so; for GPT-OSS the first two)"
)


def refuse_column(column: str, dataset: Any) -> None:
    """A dataset that says its columns has to have this one, and a group in every row of it."""
    known = getattr(dataset, "column_names", None)
    if isinstance(known, Sequence) and not isinstance(known, str) and column not in known:
        raise missing_column(column, [str(name) for name in known])
    if not isinstance(dataset, Dataset):
        return
    row, packed = 0, LENGTHS in dataset.column_names
    for batch in dataset.select_columns([column]).with_format("arrow").iter(1 << 16):
        for cell in batch.column(column).to_pylist():
            row += 1
            labels = cell if packed and isinstance(cell, list) else [cell]
            if not all(isinstance(label, LABELS) for label in labels):
                raise UserError(
                    f"group_column {column!r}, row {row} of the training dataset: {shown(cell)}; expected a "
                    "text or a whole number"
                )


def refuse_copies(args: Any) -> None:
    """What a GPU's copy of the model does is not seen in the model."""
    if args.n_gpu > 1:
        raise UserError(
            f"nn.DataParallel runs copies of the model on {args.n_gpu} GPUs, whose experts are not observed; "
            "start a process for every GPU (torchrun, accelerate launch), or make one visible "
            "(CUDA_VISIBLE_DEVICES=0)"
        )


def refuse_setting(trainer: Any) -> None:
    """What changes gradients behind the mixin's back."""
    args, accelerator = trainer.args, trainer.accelerator
    optimizer = str(getattr(args.optim, "value", args.optim))
    plan = getattr(accelerator, "parallelism_config", None)
    split = [
        name for name in ("tp", "cp", "sp") if plan is not None and getattr(plan, f"{name}_enabled", False)
    ]
    plugin = accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    reason = None
    if trainer.is_deepspeed_enabled:
        reason = "DeepSpeed keeps gradients out of reach; use DDP"
    elif getattr(trainer, "is_fsdp_xla_enabled", False):
        reason = "FSDP of XLA shards the parameters; use FSDP2 or DDP"
    elif plugin is not None and plugin.fsdp_version != 2:
        reason = "FSDP1 flattens the parameters; use FSDP2 (fsdp_config={'version': 2}) or DDP"
    elif plugin is not None and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        reason = "FSDP keeps parameters on the CPU; leave cpu_offload off"
    elif split or getattr(trainer, "is_distributed_loading_by_transformers", False):
        reason = f"{' and '.join(split) or 'tensor'} parallelism splits texts or experts; use DDP"
    elif args.torch_compile:
        reason = "torch_compile=True skips the hooks that observe the experts; leave it off"
    elif optimizer in ("lomo", "adalomo") or "layerwise" in optimizer:
        reason = f"optim={optimizer!r} steps during the backward, before the router's gradient is complete"
    if reason is not None:
        raise UserError(f"the routers' objective cannot be added here: {reason}")


def refuse_auxiliary_loss(trainer: Any) -> None:
    """The model's pooled balance loss reaches earlier experts, and is no part of a group's loss."""
    for module in trainer.model.modules():
        config = getattr(module, "config", None)
        if config is None or isinstance(config, Mapping):
            continue
        config = getattr(config, "text_config", None) or config
        coefficient = getattr(config, "router_aux_loss_coef", 0)
        on = getattr(config, "output_router_logits", False) or getattr(trainer, "aux_loss_enabled", False)
        if coefficient and on:
            raise UserError(
                "the model adds its own balance loss (output_router_logits, router_aux_loss_coef "
                f"{coefficient:g}), which pools all layers and reaches earlier experts; set "
                "router_aux_loss_coef=0.0 (in the SFTConfig or the model's config) and "
                "GARArguments(balance_coefficient=...) for one of every layer"
            )


def refuse_sharded_banks(sites: Sequence[SiteObservation]) -> None:
    """What is observed of gar's own experts is computed after the backward, when FSDP has freed weights."""
    own = next((site for site in sites if isinstance(site.bank, RoutedExperts)), None)
    if own is not None:
        raise UserError(
            f"{own.name} is a bank of gar.nn, whose group gradients need whole weights after the backward, "
            "and FSDP shards them; use DDP (MoE layers of transformers work under both)"
        )


def refuse_unequal_counts(counts: Sequence[int]) -> None:
    """Each micro-batch gathers weights from all ranks: with FSDP one that has more of them waits for ever."""
    if len(set(counts)) > 1:
        raise UserError(
            f"ranks have {', '.join(map(str, counts))} micro-batches in an update, and FSDP gathers weights "
            "from all ranks in each; expected as many on every rank (accelerate's even_batches, or examples "
            "without what is left over)"
        )


#: Trainers of TRL that train on the data set's examples, one text each; others put several texts of an
#: example into a batch, or texts that they generate.
OURS = ("SFTTrainer", "KTOTrainer", "_BaseTrainer", "BaseTrainer")


def refuse_trainer(kind: type) -> None:
    """Whose batches are not the data set's examples, one text each."""
    for base in kind.__mro__:
        named = base.__name__.endswith("Trainer") and base.__name__ not in OURS
        if named and base.__module__.startswith("trl."):
            raise UserError(
                f"{base.__name__}: its batches are not one text for each example of the data set; GARMixin "
                "supports Trainer and TRL's SFTTrainer and KTOTrainer (coefficient=0 and statistics='off' "
                "leave any trainer as it is)"
            )


def refuse_optimizer(optimizer: Any, routers: Mapping[str, nn.Module]) -> None:
    """One made by hand that none of the ``routers``, by name, has a parameter in: they would never move."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = [p for router in routers.values() for p in router.parameters() if p.requires_grad]
    if own and not any(id(parameter) in held for parameter in own):
        raise UserError(
            f"the optimizer has no parameter of a router ({next(iter(routers))}, ...), and none would move; "
            "expected one over all parameters that require a gradient, made for this model"
        )


def require_router(sites: Sequence[SiteObservation], layers: Sequence[int] | None) -> list[int]:
    """Which of the ``sites`` the objective is for: those of the ``layers`` whose router can be trained."""
    known = sorted({site.layer for site in sites if site.layer is not None})
    wrong = [layer for layer in layers or () if layer not in known]
    if wrong:
        raise UserError(
            f"GARArguments.layers: the model has no MoE layer {wrong[0]}; expected some of "
            f"{', '.join(map(str, known))}"
        )
    chosen = [n for n, site in enumerate(sites) if layers is None or site.layer in layers]
    trained = [n for n in chosen if any(p.requires_grad for p in sites[n].router.parameters())]
    if not trained:
        raise UserError(
            f"no router of the {len(chosen)} MoE layers can be trained ({sites[chosen[0]].name}, …): there "
            f"is nothing to align; PEFT trains one with {THREE_WAYS}; or train without the objective, with "
            "GARArguments(freeze_router=True)"
        )
    return trained
