"""GAR inside TRL's SFTTrainer with adapters of PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from torch import Tensor

import gar
from gar.integrations import GARArguments, GARMixin, GARTrainer
from support.tiny import relative_error
from support.tiny_moe import tiny_moe
from support.tiny_training import common, gradients

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
tokenizers = pytest.importorskip("tokenizers")

#: The ways of training a router under PEFT.
WAYS: dict[str, dict[str, Any]] = {
    "modules_to_save": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["gate"]},
    "target_parameters": {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]},
    "target_modules": {"target_modules": ["q_proj", "gate"]},
    "experts too": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["gate"],
        "target_parameters": ["mlp.experts.gate_up_proj"],
    },
}


class Tuned(GARMixin, trl.SFTTrainer):  # type: ignore[misc, name-defined]
    """As in the documentation."""


def tokenizer() -> Any:
    words = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<s>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<s>"
    )


def data(count: int = 32) -> datasets.Dataset:
    draw = torch.Generator().manual_seed(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    rows = []
    for number in range(count):
        size = 4 + int(torch.randint(5, (1,), generator=draw))
        chosen = torch.randint(26, (size,), generator=draw).tolist()
        rows.append({"text": " ".join(letters[n] for n in chosen), "group": ["code", "prose"][number % 2]})
    return datasets.Dataset.from_list(rows)


def make(out: Path, way: str | None, trainer: Any = Tuned, model: Any = None, **options: Any) -> Any:
    sizes = {
        **common(4, 2, 4),
        "bf16": False,
        "router_aux_loss_coef": 0.0,
        "max_length": 16,
        **options.pop("sizes", {}),
    }
    texts = options.pop("texts", None)
    more: dict[str, Any] = {"gar": GARArguments(**options)} if issubclass(trainer, GARMixin) else {}
    if way is not None:
        more["peft_config"] = peft.LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, **WAYS[way])
    torch.manual_seed(5)
    return trainer(
        model=tiny_moe("qwen3_moe", "eager", torch.float32) if model is None else model,
        args=trl.SFTConfig(str(out), **sizes), train_dataset=data() if texts is None else texts,
        processing_class=tokenizer(), **more,
    )  # fmt: skip


def trained(trainer: Any) -> dict[str, Tensor]:
    trainer.train()
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("way", [None, "modules_to_save", "target_parameters", "target_modules"])
def test_only_the_routers_train_otherwise(way: str | None, tmp_path: Path) -> None:
    """One update, with a huge coefficient: everything else moves as in plain SFT."""
    base = tiny_moe("qwen3_moe", "eager", torch.float32)
    sizes = {"max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0}
    plain = trained(make(tmp_path, way, trl.SFTTrainer, copy.deepcopy(base), sizes=sizes))
    zero = trained(make(tmp_path, way, model=copy.deepcopy(base), sizes=sizes, coefficient=0.0))
    assert all(torch.equal(zero[name], value) for name, value in plain.items())
    ours = trained(
        make(tmp_path, way, model=copy.deepcopy(base), sizes=sizes, coefficient=100.0, group_size=2)
    )
    moved = {name for name, value in plain.items() if not torch.equal(ours[name], value)}
    assert moved == {name for name in plain if ".gate." in name}


@pytest.mark.parametrize("way", ["modules_to_save", "target_parameters", "target_modules"])
def test_a_router_with_an_adapter_gets_the_gradient_of_the_merged_one(way: str, tmp_path: Path) -> None:
    """The gradient at the adapter's parts follows from that at the weight which they make up."""
    trainer = make(
        tmp_path,
        way,
        coefficient=100.0,
        group_size=2,
        sizes={"max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0},
    )
    plain = make(tmp_path, way, coefficient=0.0, sizes={"max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0})
    merged = copy.deepcopy(trainer.model).merge_and_unload().requires_grad_(True)
    found = first_gradients(trainer)
    without = first_gradients(plain)
    whole = make(
        tmp_path,
        None,
        model=copy.deepcopy(merged),
        coefficient=100.0,
        group_size=2,
        sizes={"max_steps": 1, "max_grad_norm": 0.0},
    )
    bare = make(tmp_path, None, model=merged, coefficient=0.0, sizes={"max_steps": 1, "max_grad_norm": 0.0})
    expected, base = first_gradients(whole), first_gradients(bare)
    parameters = dict(trainer.model.named_parameters())
    for layer in range(2):
        at_weight = (
            expected[f"model.layers.{layer}.mlp.gate.weight"] - base[f"model.layers.{layer}.mlp.gate.weight"]
        )
        prefix = f"base_model.model.model.layers.{layer}.mlp.gate."
        names = [name for name in found if name.startswith(prefix)]
        assert names
        for name in names:
            added = found[name] - without[name]
            if "lora_A" in name:
                b = parameters[name.replace("lora_A", "lora_B")]
                right = 4.0 * b.T @ at_weight
            elif "lora_B" in name:
                right = 4.0 * at_weight @ parameters[name.replace("lora_B", "lora_A")].T
            else:
                right = at_weight
            assert relative_error(added, right.detach()) < 1e-3, name


def test_groups_weigh_as_in_trainer(tmp_path: Path) -> None:
    """TRL makes its loss itself, in chunks: routers get what they get under Trainer's."""
    sizes = {"max_steps": 1, "max_grad_norm": 0.0}
    base = tiny_moe("qwen3_moe", "eager", torch.float32)
    added = []
    for kind in ("sft", "trainer"):
        found = []
        for coefficient in (0.0, 100.0):
            trainer = make(
                tmp_path, None, model=copy.deepcopy(base), sizes=sizes, coefficient=coefficient, group_size=2
            )
            if kind == "trainer":
                data, collator = trainer.train_dataset, trainer.data_collator
                options = {**common(4, 2, 1), "gradient_checkpointing": True, **sizes}
                trainer = GARTrainer(
                    model=copy.deepcopy(base), args=transformers.TrainingArguments(str(tmp_path), **options),
                    train_dataset=data, data_collator=collator, gar=trainer.gar,
                )  # fmt: skip
            found.append(first_gradients(trainer))
        added.append({n: found[1][n] - found[0][n] for n in found[0] if ".gate." in n})
    for name, value in added[0].items():
        assert relative_error(added[1][name], value) < 1e-3


def first_gradients(trainer: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    class Note(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            found.update(
                {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
            )
            for parameter in trainer.model.parameters():
                parameter.grad = None  # what was asked for is this update's beginning

    trainer.add_callback(Note())
    trainer.train()
    return found


@pytest.mark.parametrize("way", ["modules_to_save", "experts too"])
def test_a_training_resumes_and_its_adapters_load_in_plain_peft(way: str, tmp_path: Path) -> None:
    """With TRL's defaults: gradient checkpointing is on."""
    sizes = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    base = tiny_moe("qwen3_moe", "eager", torch.float32)

    def run(out: Path, updates: int, resume: bool = False) -> Any:
        trainer = make(
            out, way, model=copy.deepcopy(base), sizes={**sizes, "max_steps": updates}, coefficient=10.0
        )
        trainer.train(resume_from_checkpoint=str(out / "checkpoint-2") if resume else None)
        return trainer

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    resumed = run(tmp_path / "parts", 4, resume=True)
    assert whole.args.gradient_checkpointing
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    loaded = peft.PeftModel.from_pretrained(
        copy.deepcopy(base), str(tmp_path / "whole" / "checkpoint-4")
    ).eval()
    ids = torch.arange(3, 19).view(2, 8)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, whole.model.eval()(input_ids=ids).logits)
    log = whole.state.log_history[0]
    assert log["adapters/reached"] == log["adapters/total"] > 2
    assert log["gar/groups"] >= 4
    assert {"mean_token_accuracy", "moe/nmi"} <= log.keys()


def test_prompts_and_completions(tmp_path: Path) -> None:
    """A group's mean is over what is asked of it, completions alone."""
    rows = [{"prompt": row["text"], "completion": " a b", "group": row["group"]} for row in data()]
    trainer = make(tmp_path, None, coefficient=1.0)
    trainer = Tuned(
        model=tiny_moe("qwen3_moe", "eager", torch.float32), train_dataset=datasets.Dataset.from_list(rows),
        args=trainer.args, processing_class=tokenizer(), gar=GARArguments(coefficient=1.0),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["gar/groups"] >= 4


def test_bfloat16_as_trl_has_it_by_default(tmp_path: Path) -> None:
    trainer = make(tmp_path, "modules_to_save", sizes={"bf16": True}, coefficient=10.0)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    after = trained(trainer)
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert any(not torch.equal(after[n], value) for n, value in before.items() if ".gate." in n)


def test_unreached_adapters_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Adapters whose output is cut off from the loss: trained, and never reached."""
    trainer = make(tmp_path, "target_modules", coefficient=0.0, sizes={"gradient_checkpointing": False})
    model = trainer.model.get_base_model()
    model.model.register_forward_hook(lambda module, args, out: _cut(out))
    model.lm_head.weight.requires_grad_(True)
    trainer.train()
    assert trainer.state.log_history[0]["adapters/reached"] == 0
    found = [
        record.message
        for record in caplog.records
        if "no gradient reached any of the 4 adapters" in record.message
    ]
    assert len(found) == 1


def _cut(output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state.detach()
    return output


@pytest.mark.numerics
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("softmax", [False, True])
def test_packed_texts_are_groups_as_in_own_rows(packing: bool, softmax: bool, tmp_path: Path) -> None:
    """One update of the same 16 texts; every token's gradient counts for its own text's group."""
    options: dict[str, Any] = {"coefficient": 5.0, "group_size": 0, "balance_coefficient": 0.1}
    options |= {"probabilities": "softmax"} if softmax else {}
    layouts: dict[str, dict[str, Any]] = {
        "rows": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
        "packed": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
    }
    if packing:
        layouts["packed"] |= {"packing": True, "gradient_accumulation_steps": 64}
    else:
        layouts["packed"] |= {"padding_free": True, "max_length": None}
    found, logs = {}, {}
    for name, sizes in layouts.items():
        trainer = make(
            tmp_path, None, model=tiny_moe("qwen3_moe", "eager", torch.float64), texts=data(16),
            sizes={**sizes, "max_steps": 1}, **options,
        )  # fmt: skip
        found[name] = gradients(trainer)
        logs[name] = next(log for log in trainer.state.log_history if "loss" in log)
    if packing:
        assert len(trainer.train_dataset) < 12
        assert any(len(row["group"]) > 1 for row in trainer.train_dataset)
    assert found["rows"].keys() == found["packed"].keys()
    for key, value in found["rows"].items():  # TRL's loss is float32
        assert relative_error(found["packed"][key], value) < 1e-5, key
    for key in ("gar/router_loss", "gar/groups", "moe/nmi", "moe/load_entropy"):
        assert logs["packed"][key] == pytest.approx(logs["rows"][key], rel=1e-5), key


def test_packing_without_the_objective_is_trls(tmp_path: Path) -> None:
    packed = [
        make(tmp_path, None, kind, sizes={"packing": True}, **options).train_dataset
        for kind, options in (
            (Tuned, {"coefficient": 1.0}),
            (trl.SFTTrainer, {}),
            (Tuned, {"coefficient": 0.0}),
            (Tuned, {"coefficient": 0.0, "statistics": "off"}),
        )
    ]
    assert packed[0].remove_columns("group").to_dict() == packed[1].to_dict() == packed[3].to_dict()
    assert packed[2].to_dict() == packed[0].to_dict()  # statistics are by group, too
    assert list(map(len, packed[0]["group"])) == list(map(len, packed[0]["seq_lengths"]))


@pytest.mark.parametrize("kind", ["DPOTrainer", "RewardTrainer", "GRPOTrainer"])
def test_trainers_of_several_texts_an_example_are_refused(kind: str) -> None:
    mixed = type("Mixed", (GARMixin, getattr(trl, kind)), {})
    with pytest.raises(gar.UserError, match=f"{kind}: .*supports Trainer and TRL's SFTTrainer"):
        mixed(gar=GARArguments())
    with pytest.raises(gar.UserError, match=r"expected GARArguments\(\.\.\.\)"):
        mixed(gar={"coefficient": 0.3})


def test_what_is_refused(tmp_path: Path) -> None:
    for way, options, text in (
        (None, {"sizes": {"router_aux_loss_coef": 1e-3}}, r"router_aux_loss_coef=0\.0 .*balance_coefficient"),
        (None, {"sizes": {"packing": True, "packing_strategy": "wrapped"}}, "packing_strategy='bfd'"),
        (None, {"group_column": "grup"}, "did you mean 'group'"),
    ):
        with pytest.raises(gar.UserError, match=text):
            make(tmp_path, way, **options)
    WAYS["none"] = {"target_modules": ["q_proj"]}
    try:
        with pytest.raises(gar.UserError, match=r"no router of the 2 MoE layers.*modules_to_save"):
            make(tmp_path, "none")
    finally:
        del WAYS["none"]
