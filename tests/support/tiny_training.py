"""Trainers on the smallest MoE models; and the routers' part of an update in plain loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from gar.integrations import GARArguments, GARMixin, GARTrainer
from support import oracles
from support.tiny_moe import tiny_moe

VOCABULARY = 29
Gradients = dict[str, Tensor]


def texts(count: int, seed: int = 0, short: bool = True) -> datasets.Dataset:
    """Random token ids with a group ("a" or "b") and another column; with ``short`` of 4 to 9 tokens."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        length = 4 + int(torch.randint(6, (1,), generator=draw)) if short else 9
        ids = torch.randint(3, VOCABULARY, (length,), generator=draw).tolist()
        labels = [-100, -100, *ids[2:]] if number % 3 == 0 else ids
        rows.append({"input_ids": ids, "labels": labels, "group": "ab"[number * number % 5 % 2], "note": "x"})
    return datasets.Dataset.from_list(rows)


def pad(examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A collator that knows its own columns only, and chokes on text; token 0 is padding."""
    width = max(len(example["input_ids"]) for example in examples)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for example in examples:
        assert "group" not in example
        free = width - len(example["input_ids"])
        rows["input_ids"].append([*example["input_ids"], *[0] * free])
        rows["labels"].append([*example["labels"], *[-100] * free])
        rows["attention_mask"].append([*(int(token != 0) for token in example["input_ids"]), *[0] * free])
    return {name: torch.tensor(values) for name, values in rows.items()}


def arguments(
    out: Path, rows: int = 8, steps: int = 1, updates: int = 4, **more: Any
) -> transformers.TrainingArguments:
    """``updates`` updates of ``steps`` micro-batches of ``rows`` examples, on the CPU, quiet."""
    return transformers.TrainingArguments(str(out), **{**common(rows, steps, updates), **more})


def common(rows: int, steps: int, updates: int) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": rows, "gradient_accumulation_steps": steps, "max_steps": updates,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "learning_rate": 1e-2,
        "save_strategy": "no",
    }  # fmt: skip


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The usual loss, in the logits' own precision: transformers' is float32."""
    losses = token_losses(outputs.logits, labels)
    return losses.sum() / (num_items_in_batch or 1)


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """[B, L - 1], 0 where nothing is asked."""
    flat = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none"
    )
    return flat.view(len(labels), -1)


def olmoe(dtype: torch.dtype = torch.float64, **config: Any) -> Any:
    model = tiny_moe("olmoe", "eager", dtype)
    model.config.update({"router_aux_loss_coef": 0.0, **config})
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = model.config.attention_dropout
    return model.train()


def make(out: Path, model: Any = None, trainer: Any = GARTrainer, **options: Any) -> Any:
    """A trainer with float64 losses; ``options`` of GARArguments, ``sizes`` and ``more`` of its own."""
    sizes, in_order = options.pop("sizes", {}), options.pop("in_order", True)
    more = options.pop("more", {})
    if issubclass(trainer, GARMixin):
        more = {"gar": GARArguments(**options), **more}
    more = {"compute_loss_func": summed, "data_collator": pad, "train_dataset": texts(64), **more}
    made = trainer(model=olmoe() if model is None else model, args=arguments(out, **sizes), **more)
    if in_order:
        made._get_train_sampler = lambda data: torch.utils.data.SequentialSampler(data)
    return made


def gradients(trainer: Any) -> Gradients:
    """Of the first update, before clipping: what the optimizer's step would find without it."""
    found: Gradients = {}

    class Stop(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            found.update(
                {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
            )
            control.should_training_stop = True

    trainer.args.max_grad_norm = 0
    trainer.add_callback(Stop())
    trainer.train()
    assert found
    return found


def examples_of(trainer: Any, count: int) -> list[dict[str, Any]]:
    """The first examples in the order of training."""
    return [trainer.train_dataset[n] for n in range(count)]


def cut(examples: Sequence[Mapping[str, Any]], size: int) -> list[int]:
    """Groups by hand: the n-th example of a label is in its group n // size."""
    seen: dict[str, int] = {}
    numbers: dict[tuple[str, int], int] = {}
    found = []
    for example in examples:
        n = seen[example["group"]] = seen.get(example["group"], -1) + 1
        found.append(numbers.setdefault((example["group"], n // size), len(numbers)))
    return found


def slow_router_gradient(
    model: Any, examples: Sequence[Mapping[str, Any]], groups: Sequence[int], options: Mapping[str, Any]
) -> dict[str, Tensor]:
    """What the objective adds to the gradient of OLMoE's routers in one update of ``examples``, float64."""
    layers, seen = model.model.layers, dict[int, Tensor]()
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda module, args, out, n=n: seen.__setitem__(n, args[0].detach())
        )
        for n, layer in enumerate(layers)
    ]
    batch = pad([{k: v for k, v in e.items() if k != "group"} for e in examples])
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    for hook in hooks:
        hook.remove()
    losses = token_losses(logits, batch["labels"])
    counts = batch["labels"][:, 1:].ne(-100).sum(1)
    distinct = sorted({group for group in groups if group >= 0})
    rows_of = {m: [n for n, group in enumerate(groups) if group == m] for m in distinct}
    labels = {m: examples[rows_of[m][0]]["group"] for m in distinct}
    found = {}
    for n, layer in enumerate(layers):
        if options.get("layers") is not None and n not in options["layers"]:
            continue
        experts = [layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj]
        g = {}
        for m, rows in rows_of.items():
            mean = losses[rows].sum() / counts[rows].sum()
            grads = torch.autograd.grad(mean, experts, retain_graph=True)
            g[m] = torch.cat([grad.sum(0).flatten() for grad in grads])
        squares = {m: float(row.square().sum()) for m, row in g.items()}
        for m in distinct:
            if options.get("gradients", "relative") == "unit":
                g[m] = g[m] / squares[m] ** 0.5
            if options.get("gradients", "relative") == "relative":
                g[m] = g[m] / sum(squares.values()) ** 0.5
            if options.get("gradients", "relative") == "label_scale":
                same = [squares[i] for i in distinct if labels[i] == labels[m]]
                g[m] = g[m] / (sum(same) / len(same)) ** 0.5
        weight = layer.mlp.gate.weight
        z = functional.linear(seen[n], weight)
        full, own = z.softmax(-1), z.softmax(-1, dtype=torch.float32)  # the model's gates are float32
        value, chosen = own.topk(2, -1)
        gates = torch.zeros_like(full).scatter(1, chosen, value.double())
        soft = options.get("probabilities") == "softmax"
        by_row = (full if soft else gates).view(*batch["input_ids"].shape, -1)
        p = {}
        for m, rows in rows_of.items():
            means = [by_row[r][batch["attention_mask"][r].bool()].mean(0) for r in rows]
            p[m] = torch.stack(means).mean(0)
            p[m] = p[m] / p[m].sum()
        loss = torch.zeros((), dtype=torch.float64)
        for k in range(full.shape[1]):
            mass = sum((p[m][k] for m in distinct), start=torch.zeros((), dtype=torch.float64))
            pairs = sum(
                p[i][k] * p[j][k] * (g[i] @ g[j])
                for i in distinct
                for j in distinct
                if options.get("self_pairs", True) or i != j
            )
            loss = loss - pairs / (1 if options.get("objective") == "numerator_only" else mass + 1e-8)
            for m in distinct:
                if float(p[m][k].detach()) > 0:
                    loss = loss + options.get("entropy_weight", 0.0) * p[m][k] * p[m][k].log()
        loss = options.get("coefficient", 1e-3) * loss
        valid = batch["attention_mask"].flatten().bool()
        tokens = int(valid.sum())
        share = torch.bincount(chosen[valid].flatten(), minlength=full.shape[1]) / tokens
        loss = (
            loss
            + options.get("balance_coefficient", 0.0) * full.shape[1] * (share * full[valid].mean(0)).sum()
        )
        found[f"model.layers.{n}.mlp.gate.weight"] = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    return found


SLOW: dict[str, Callable[..., Tensor]] = {
    "zloss": oracles.z_loss,
    "global_balance": oracles.global_balance,
    "simbal": oracles.simbal,
}


def slow_losses(
    losses: Sequence[str], examples: Sequence[Mapping[str, Any]], model: Any = None
) -> tuple[float, Gradients]:
    """The losses in one update of ``examples``, and what they add to the gradient of each router; float64."""
    model = olmoe() if model is None else model
    seen: dict[int, Tensor] = {}
    for n, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(
            lambda module, args, out, n=n: seen.__setitem__(n, args[0].detach())
        )
    batch = pad([{k: v for k, v in e.items() if k != "group"} for e in examples])
    model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    valid = batch["attention_mask"].flatten().bool()
    found, value = {}, 0.0
    for n, layer in enumerate(model.model.layers):
        weight = layer.mlp.gate.weight
        z = functional.linear(seen[n], weight)[valid]
        chosen = torch.zeros_like(z).scatter(1, z.topk(model.config.num_experts_per_tok, -1).indices, 1.0)
        total = torch.zeros((), dtype=torch.float64)
        for name, _, coefficient in (text.partition("=") for text in losses):
            arguments = {"zloss": (z,), "global_balance": (z, chosen), "simbal": (weight,)}[name]
            total = total + float(coefficient) * SLOW[name](*arguments)
        value += float(total.detach())
        found[f"model.layers.{n}.mlp.gate.weight"] = torch.autograd.grad(total, weight)[0]
    return value, found
