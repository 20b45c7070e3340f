"""GAR inside transformers' Trainer, against the plain Trainer and an update in plain loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy

import gar
from gar.integrations import GARArguments
from gar.integrations._checks import refuse_setting
from gar.integrations._groups import GroupCollator, Groups, automatic_size, label_id
from gar.observation._native import NativeSiteObservation
from support.tiny import relative_error
from support.tiny_moe import tiny_moe
from support.tiny_training import (
    Gradients,
    cut,
    examples_of,
    gradients,
    make,
    olmoe,
    pad,
    slow_router_gradient,
    texts,
)

Trainer: Any = transformers.Trainer


def is_router(name: str) -> bool:
    return ".gate." in name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Gradients:
    torch.manual_seed(0)
    return gradients(make(tmp_path_factory.mktemp("plain"), trainer=Trainer))


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "the paper's": {"gradients": "raw"},
    "one group a label": {"group_size": 0},
    "an example a group": {"group_size": 1},
    "numerator only": {"objective": "numerator_only"},
    "entropy": {"entropy_weight": 0.3},
    "unit rows": {"gradients": "unit"},
    "rows of one label's scale": {"gradients": "label_scale", "group_size": 1},
    "distinct pairs": {"self_pairs": False},
    "softmax": {"probabilities": "softmax"},
    "one layer": {"layers": [1]},
    "balanced": {"balance_coefficient": 0.5},
    "balance alone": {"coefficient": 0.0, "balance_coefficient": 0.5},
    "rows held": {"rows_dtype": "float64", "rows_device": "cpu"},
}


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("name", "sizes"),
    [(name, (4, 2)) for name in OPTIONS]
    + [(name, sizes) for name in ("the paper's", "rows held", "balanced") for sizes in ((8, 1), (2, 4))],
    ids=str,
)
def test_a_router_gets_the_objective_of_the_whole_update(
    name: str, sizes: tuple[int, int], plain: Gradients, tmp_path: Path
) -> None:
    """And every other parameter exactly what the plain trainer gives it."""
    options = {"coefficient": 2.0, "group_size": 2, **OPTIONS[name]}
    trainer = make(tmp_path, sizes={"rows": sizes[0], "steps": sizes[1]}, **options)
    examples = examples_of(trainer, 8)
    found = gradients(trainer)
    groups = cut(examples, options["group_size"] or 8)
    expected = slow_router_gradient(olmoe(), examples, groups, options)
    assert found.keys() == plain.keys()
    for key, grad in found.items():
        if key in expected:
            assert relative_error(grad - plain[key], expected[key]) < 1e-5
            assert float(expected[key].norm()) > 1e-4
        elif sizes == (8, 1):
            assert torch.equal(grad, plain[key])
        else:
            assert relative_error(grad, plain[key]) < 1e-6


@pytest.mark.parametrize("options", [{"coefficient": 0.0}, {"layers": [1]}])
def test_layers_below_everything_that_is_trained_are_seen_too(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Nothing has a gradient there; statistics count them, and the others train as ever."""
    trainer = make(tmp_path, **options)
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad_("layers.1." in name)
    trainer.train()
    logged = next(log for log in trainer.state.log_history if "moe/nmi" in log)
    assert logged["moe/load_entropy"] > 0


@pytest.mark.parametrize(("cell", "said"), [(None, "6 of the training dataset: None"), (0.5, "0.5")])
def test_a_bad_group_is_found_before_training(cell: object, said: str, tmp_path: Path) -> None:
    rows = texts(16)
    groups = [cell if n == 5 and cell is None else float(n) + 0.5 if cell else n % 2 for n in range(16)]
    rows = rows.remove_columns("group").add_column("group", groups)
    with pytest.raises(gar.UserError, match=rf"group_column 'group', row .*{said}"):
        make(tmp_path, more={"train_dataset": rows})


@pytest.mark.parametrize("short", [False, True])
def test_accumulation_changes_nothing(short: bool, tmp_path: Path) -> None:
    """Two micro-batches of four are one of eight; parts of these models are float32, whatever the rest is."""
    found = []
    for rows, steps in ((8, 1), (4, 2), (1, 8)):
        trainer = make(
            tmp_path, coefficient=2.0, balance_coefficient=0.1, sizes={"rows": rows, "steps": steps},
            more={"train_dataset": texts(64, short=short)},
        )  # fmt: skip
        trainer.train()
        found.append(trainer.model.state_dict())
    for other in found[1:]:
        for name, value in found[0].items():
            assert relative_error(other[name], value) < 1e-6, name


def test_the_trainers_own_losses_weigh_groups_right(tmp_path: Path) -> None:
    """Without a count of items a micro-batch's loss is its own mean; rows are still those of the update."""
    examples = examples_of(make(tmp_path), 8)
    expected = slow_router_gradient(olmoe(), examples, cut(examples, 2), {"coefficient": 2.0})
    for accepts in (True, False):
        added = []
        for coefficient in (0.0, 2.0):
            trainer = make(
                tmp_path, coefficient=coefficient, group_size=2, sizes={"rows": 4, "steps": 2},
                more={"compute_loss_func": None},
            )  # fmt: skip
            trainer.model_accepts_loss_kwargs = accepts
            added.append(gradients(trainer))
        for key, value in expected.items():
            assert relative_error(added[1][key] - added[0][key], value) < 1e-4


@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_heads_of_classes_weigh_their_micro_batches_alike(kind: str, tmp_path: Path) -> None:
    """They take the number of items and do not use it: each loss is a mean, and none is divided."""
    config = tiny_moe("qwen3_moe").config
    config.update({"num_labels": 3, "pad_token_id": 0, "router_aux_loss_coef": 0.0})
    torch.manual_seed(0)
    head = getattr(transformers, f"Qwen3MoeFor{kind}Classification")(config).double().train()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.4)

    def collate(examples: Any) -> dict[str, Tensor]:
        batch = pad(examples)
        classes = batch["input_ids"] % 3
        return batch | {"labels": classes[:, 0] if kind == "Sequence" else classes}

    found = {}
    for sizes in ((8, 1), (4, 2), (2, 4), (5, 2)):
        trainer = make(
            tmp_path, copy.deepcopy(head), coefficient=2.0, sizes={"rows": sizes[0], "steps": sizes[1]},
            gradients="raw", group_size=0,
            more={
                "compute_loss_func": None, "data_collator": collate,
                "train_dataset": texts(8, short=kind == "Sequence"),
            },
        )  # fmt: skip
        trainer.args.max_steps = 1
        trainer.train()
        found[sizes] = trainer.state.log_history[0]["gar/coherence"]
        assert "_loss_function" not in vars(trainer.model)
    assert found[8, 1] > 0
    for coherence in found.values():
        assert coherence == pytest.approx(found[8, 1], rel=1e-5)


def state(trainer: Any) -> Gradients:
    trainer.train()
    return dict(trainer.model.state_dict())


@pytest.mark.parametrize(
    "options",
    [{"coefficient": 0.0}, {"coefficient": 0.0, "statistics": "off"}, {"freeze_router": True}],
    ids=str,
)
def test_without_the_objective_a_training_is_the_plain_one_to_the_bit(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = olmoe(attention_dropout=0.2)
    model.requires_grad_(True)
    if "freeze_router" in options:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not is_router(name))
    plain = state(make(tmp_path, copy.deepcopy(model), trainer=Trainer, sizes={"rows": 4, "steps": 2}))
    model.requires_grad_(True)
    ours = state(make(tmp_path, copy.deepcopy(model), sizes={"rows": 4, "steps": 2}, **options))
    assert all(torch.equal(ours[name], value) for name, value in plain.items())


def test_a_resumed_training_is_the_uninterrupted_one(tmp_path: Path) -> None:
    def run(out: Path, updates: int, resume: bool = False) -> Any:
        more = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
        trainer = make(
            out, olmoe(attention_dropout=0.2), sizes={"rows": 4, "steps": 2, "updates": updates, **more},
            coefficient=2.0, warmup=4, in_order=False,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=str(out / "checkpoint-3") if resume else None)
        return trainer

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "parts", 3)
    resumed = run(tmp_path / "parts", 6, resume=True)
    other = resumed.model.state_dict()
    assert all(torch.equal(other[name], value) for name, value in whole.model.state_dict().items())
    losses = [[h["gar/router_loss"] for h in t.state.log_history if "loss" in h] for t in (whole, resumed)]
    assert losses[0] == losses[1]


def test_gradient_checkpointing_is_the_same_training(tmp_path: Path) -> None:
    found = [
        state(make(tmp_path, sizes={"updates": 2, "gradient_checkpointing": on}, coefficient=2.0))
        for on in (False, True)
    ]
    for name, value in found[0].items():
        assert relative_error(found[1][name], value) < 1e-6


def test_a_gradient_scaler_is_undone(tmp_path: Path) -> None:
    """As under fp16: the loss is scaled, and so is what the router gets; the objective is not."""
    found = []
    for scale in (None, 2.0**12):
        trainer = make(tmp_path, coefficient=2.0, group_size=2)
        if scale is not None:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        found.append({n: grad / (scale or 1) for n, grad in gradients(trainer).items()})
    for name, value in found[0].items():
        assert relative_error(found[1][name], value) < 1e-6


def test_bfloat16_autocast_trains(tmp_path: Path) -> None:
    trainer = make(tmp_path, olmoe(torch.float32), sizes={"bf16": True}, coefficient=2.0)
    trainer.train()
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())
    assert trainer.state.log_history[0]["gar/router_loss"] < 0


def test_the_gradient_is_clipped_once_with_the_routers_part(tmp_path: Path) -> None:
    unclipped = gradients(make(tmp_path, coefficient=50.0))
    norm = torch.stack([grad.norm() for grad in unclipped.values()]).norm()
    trainer = make(tmp_path, coefficient=50.0, sizes={"updates": 1, "max_grad_norm": 0.5})
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-6)


# ------------------------------------------------------------------------------ groups


def test_groups_are_cut_by_label_and_size() -> None:
    labels, items = [1, 1, 2, 1, 2, 1, 1], [3, 1, 2, 0, 5, 1, 1]
    found = Groups.of(labels, items, 2)
    assert found == Groups([0, 0, 1, -1, 1, 2, 2], [4, 7, 2], [1, 2, 1])
    assert Groups.of(labels, items, 0) == Groups([0, 0, 1, -1, 1, 0, 0], [6, 7], [1, 2])
    assert Groups.of([], [], 2).count == 0


def test_numbers_of_labels() -> None:
    """The same in every process; whole numbers may come as tensors."""
    assert label_id("a") == label_id("a") != label_id("b")
    assert label_id(3) == label_id(torch.tensor(3)) == label_id("3")
    assert -(2**63) <= label_id("\ud800") < 2**63
    for wrong in (None, 0.5, ["a"]):
        with pytest.raises(gar.UserError, match="a text or a whole number"):
            label_id(wrong)


def test_the_automatic_size_leaves_twice_the_groups_that_could_be_alone() -> None:
    assert [automatic_size(n, 4) for n in (1, 8, 16, 32, 64, 1000)] == [1, 1, 2, 4, 8, 8]


def test_examples_without_the_column_are_named() -> None:
    collate: Callable[[list[Any]], Any] = GroupCollator(lambda rows: {}, "group", keep=True, required=True)
    with pytest.raises(
        gar.UserError, match=r"'group'.*come to the collator with x, grup.*did you mean 'grup'"
    ):
        collate([{"x": 1, "grup": "a"}])


# ------------------------------------------------------------------------------ the column's way


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """A dataset of torch's own."""

    def __init__(self, rows: Any) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.rows[index])


@pytest.mark.parametrize(
    ("kind", "remove"),
    [
        ("datasets", True),
        ("datasets", False),
        ("torch", True),
        ("torch", False),
        ("stream", True),
        ("workers", True),
    ],
)
def test_the_column_reaches_the_update_and_not_the_model(kind: str, remove: bool, tmp_path: Path) -> None:
    rows = texts(64).remove_columns("note")
    data = {"datasets": rows, "workers": rows, "torch": Rows(rows), "stream": rows.to_iterable_dataset()}[
        kind
    ]
    more = {"remove_unused_columns": remove, "dataloader_num_workers": 1 if kind == "workers" else 0}
    trainer = make(
        tmp_path, sizes={"updates": 2, "eval_strategy": "steps", "eval_steps": 1, **more},
        coefficient=2.0, group_size=2, more={"train_dataset": data, "eval_dataset": rows.select(range(8))},
    )  # fmt: skip
    trainer.train()
    logs = [h for h in trainer.state.log_history if "loss" in h]
    assert all(h["gar/groups"] >= 4 and h["moe/purity"] >= 0.5 for h in logs)
    assert sum("eval_loss" in h for h in trainer.state.log_history) == 2
    assert len(trainer.predict(rows.select(range(3))).predictions) == 3
    assert trainer.data_collator is pad


def test_evaluation_is_the_plain_trainers(tmp_path: Path) -> None:
    data = {"eval_dataset": texts(12, seed=3).remove_columns("group")}
    ours = make(tmp_path, more=data).evaluate()
    plain = make(tmp_path, trainer=Trainer, more=data).evaluate()
    assert ours["eval_loss"] == plain["eval_loss"]


def test_the_last_update_of_an_epoch_may_be_short(tmp_path: Path) -> None:
    """Five micro-batches in updates of two: the third has one alone."""
    trainer = make(
        tmp_path, sizes={"rows": 4, "steps": 2, "updates": 6}, coefficient=2.0, group_size=1,
        more={"train_dataset": texts(20)},
    )  # fmt: skip
    trainer.train()
    assert [h["gar/groups"] for h in trainer.state.log_history if "loss" in h] == [8, 8, 4] * 2


@pytest.mark.parametrize("held", [None, "float64"])
def test_examples_without_a_loss_are_in_no_group(held: str | None, tmp_path: Path) -> None:
    """A micro-batch of them, and an update of them."""
    rows = list(texts(24))
    for row in rows[4:16]:
        row["labels"] = [-100] * len(row["labels"])
    trainer = make(
        tmp_path, sizes={"rows": 4, "steps": 2, "updates": 3}, coefficient=2.0, balance_coefficient=0.1,
        group_size=1, rows_dtype=held, more={"train_dataset": type(texts(1)).from_list(rows)},
    )  # fmt: skip
    trainer.train()
    assert [h.get("gar/groups") for h in trainer.state.log_history if "loss" in h] == [4, None, 8]
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())


def test_default_collators_get_no_text(tmp_path: Path) -> None:
    """transformers' own default collator, and whole numbers as groups."""
    data = texts(16, short=False).map(lambda row: {"group": int(row["group"] == "a")}).remove_columns("note")
    trainer = make(
        tmp_path, more={"train_dataset": data, "data_collator": None}, group_size=2, coefficient=1.0
    )
    trainer.train()
    assert trainer.state.log_history[0]["gar/groups"] > 2


# ------------------------------------------------------------------------------ what is logged


def test_statistics_are_those_of_the_selections(tmp_path: Path) -> None:
    """The contingency table by hand: a router's k largest logits, by label."""
    trainer = make(
        tmp_path, coefficient=1.0, statistics="layers", sizes={"updates": 1, "rows": 4, "steps": 2}
    )
    model, examples = olmoe(), examples_of(trainer, 8)
    trainer.train()
    log = trainer.state.log_history[0]
    seen: list[Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(lambda module, args, out: seen.append(out[2])) for gate in gates]
    tables = torch.zeros(2, 2, 4, dtype=torch.long)
    for example in examples:
        seen.clear()
        model(input_ids=torch.tensor([example["input_ids"]]))
        for n, index in enumerate(seen):
            tables[n, "ab".index(example["group"])] += torch.bincount(index.flatten(), minlength=4)
    for hook in hooks:
        hook.remove()
    for n, counts in enumerate(tables.numpy()):
        load = counts.sum(0) / counts.sum()
        assert log[f"moe/layer_{n}/nmi"] == pytest.approx(gar.metrics.normalized_mutual_information(counts))
        assert log[f"moe/layer_{n}/purity"] == pytest.approx(counts.max(0).sum() / counts.sum())
        assert log[f"moe/layer_{n}/load_variance"] == pytest.approx(float(((load - 0.25) ** 2).mean()))
        assert log[f"moe/layer_{n}/dead_experts"] == (load < 0.0025).sum()
    assert log["moe/nmi"] == pytest.approx((log["moe/layer_0/nmi"] + log["moe/layer_1/nmi"]) / 2)
    assert 0 < log["gar/coherence"] <= 1


def test_a_router_that_draws_is_refused_at_its_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later ones do not wait for the device to see it once more."""
    model = olmoe()
    gate = model.model.layers[1].mlp.gate
    gate.register_forward_pre_hook(lambda module, args: (args[0] + torch.randn_like(args[0]), *args[1:]))
    with pytest.raises(gar.UserError, match="router called again gives other gates than the model used"):
        make(tmp_path, model).train()
    compare, asked = NativeSiteObservation._refuse_other_gates, []
    trainer = make(tmp_path, sizes={"rows": 4, "steps": 2})

    def counted(site: NativeSiteObservation, *pairs: Tensor) -> None:
        asked.append(trainer.state.global_step)
        compare(site, *pairs)

    monkeypatch.setattr(NativeSiteObservation, "_refuse_other_gates", counted)
    trainer.train()
    assert trainer.state.global_step == 4
    assert asked == [0] * 4  # two layers, two micro-batches


def test_statistics_can_be_off(tmp_path: Path) -> None:
    trainer = make(tmp_path, statistics="off")
    trainer.train()
    assert not [key for key in trainer.state.log_history[0] if "/" in key]


def test_few_groups_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, group_size=0).train()
    found = [record.message for record in caplog.records if "E/k" in record.message]
    assert len(found) == 1
    assert "2 groups" in found[0]
    caplog.clear()
    make(tmp_path, group_size=1).train()
    assert not [record for record in caplog.records if "E/k" in record.message]


# ------------------------------------------------------------------------------ what is refused


def refused(out: Path, model: Any = None, **options: Any) -> str:
    with pytest.raises(gar.UserError) as caught:
        make(out, model, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused_training(out: Path, **options: Any) -> str:
    trainer = make(out, **options)
    with pytest.raises(gar.UserError) as caught:
        trainer.train()
    return str(caught.value)


def test_a_model_without_a_trainable_router(tmp_path: Path) -> None:
    model = olmoe()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_router(name))
    text = refused(tmp_path, model)
    for way in (
        'modules_to_save=["gate"]',
        'target_parameters=["mlp.gate.weight"]',
        'target_modules=["gate"]',
    ):
        assert way in text
    make(tmp_path, model, freeze_router=True).train()


def test_an_optimizer_made_by_hand_without_the_routers(tmp_path: Path) -> None:
    def trained(of: Callable[[str], bool], **options: Any) -> Any:
        model = olmoe()
        parameters = [p for name, p in model.named_parameters() if of(name)]
        own = {"optimizers": (torch.optim.SGD(parameters, lr=0.1), None)}
        trainer = make(tmp_path, model, more=own, **options)
        trainer.train()
        return trainer

    with pytest.raises(
        gar.UserError, match=r"no parameter of a router \(model\.layers\.0\.mlp.*none would move"
    ):
        trained(lambda name: not is_router(name))
    trained(lambda name: not is_router(name), coefficient=0.0)
    trained(lambda name: ".1." in name)  # of one layer


def test_what_else_is_refused(tmp_path: Path) -> None:
    assert "did you mean 'group'" in refused(tmp_path, group_column="groups")
    assert "expected a text or a whole number" in refused(tmp_path, group_column="labels")
    stream = datasets.IterableDataset.from_generator(lambda: iter(texts(16).to_list()))
    said = refused_training(tmp_path, group_column="groups", more={"train_dataset": stream})
    assert "its examples come to the collator with input_ids, labels)" in said
    named = {"train_dataset": texts(16).rename_column("group", "position_ids")}
    assert "is an input of the model" in refused_training(tmp_path, group_column="position_ids", more=named)
    assert "no MoE layer 7; expected some of 0, 1" in refused(tmp_path, layers=[7])
    assert "balance_coefficient" in refused(
        tmp_path, olmoe(output_router_logits=True, router_aux_loss_coef=0.01)
    )
    make(tmp_path, olmoe(output_router_logits=True, router_aux_loss_coef=0.01), coefficient=0.0)
    dense = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=29, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
    )
    assert "LlamaForCausalLM has no MoE layer" in refused(tmp_path, dense)
    assert "torch_compile" in refused(tmp_path, sizes={"torch_compile": True})
    for options, text in (
        ({"objective": "load_normalised"}, "did you mean 'load_normalized'"),
        ({"coefficient": -1.0}, "coefficient must be a number of at least 0"),
        ({"coefficient": "0.3"}, "GARArguments.coefficient must be a number, got '0.3'"),
        ({"coefficient": None}, "GARArguments.coefficient must be a number, got None"),
        ({"warmup": 0.1}, "GARArguments.warmup must be a whole number, got 0.1"),
        ({"group_size": 2.5}, "GARArguments.group_size must be int or None, got 2.5"),
        ({"layers": 1}, r"GARArguments.layers must be list\[int\] or None, got 1"),
        ({"layers": ["1"]}, r"GARArguments.layers must be list\[int\] or None"),
        ({"router_losses": {"zloss": 5.0}}, r"GARArguments.router_losses must be list\[str\] or None"),
        ({"freeze_router": "yes"}, "GARArguments.freeze_router must be true or false, got 'yes'"),
        ({"rows_device": "gpu"}, "GARArguments.rows_device is 'gpu'; expected a device of torch"),
        ({"rows_dtype": "bfloat"}, "did you mean 'bfloat16'"),
        ({"layers": []}, "layers is empty"),
        ({"statistics": "all"}, "expected one of mean, layers, off"),
    ):
        with pytest.raises(gar.UserError, match=text):
            GARArguments(**options)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"is_deepspeed_enabled": True}, "DeepSpeed"),
        ({"is_fsdp_enabled": True, "fsdp_version": 1}, "FSDP1 flattens"),
        ({"is_fsdp_enabled": True, "cpu_offload": CPUOffloadPolicy()}, "leave cpu_offload off"),
        ({"is_fsdp_xla_enabled": True}, "FSDP of XLA"),
        ({"tp_enabled": True}, "tp parallelism"),
        ({"optim": "lomo"}, "steps during the backward"),
        ({"optim": "galore_adamw_layerwise"}, "steps during the backward"),
    ],
)
def test_what_changes_gradients_elsewhere_is_refused(changes: dict[str, Any], text: str) -> None:
    args = SimpleNamespace(**{"optim": "adamw_torch", "torch_compile": False, **changes})
    plugin = SimpleNamespace(**{"fsdp_version": 2, "cpu_offload": None, **changes})
    trainer = SimpleNamespace(
        args=args,
        accelerator=SimpleNamespace(
            parallelism_config=SimpleNamespace(**changes), state=SimpleNamespace(fsdp_plugin=plugin)
        ),
        **{"is_deepspeed_enabled": False, "is_fsdp_enabled": False, **changes},
    )  # fmt: skip
    with pytest.raises(gar.UserError, match=text):
        refuse_setting(trainer)


@pytest.mark.parametrize("coefficient", [0.0, 1.0])
def test_copies_of_the_model_are_refused(
    coefficient: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Statistics too would be of what the model itself does: nothing."""
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
    with pytest.raises(gar.UserError, match="copies of the model on 2 GPUs"):
        make(tmp_path, coefficient=coefficient)
    make(tmp_path, coefficient=0.0, statistics="off")


def test_statistics_without_the_objective_ask_for_no_column(tmp_path: Path) -> None:
    """Examples without a group, or with something else there, are counted without one."""
    rows = [{**row, "group": None if n % 2 else 0.5} for n, row in enumerate(texts(16))]
    for data in (texts(16).remove_columns("group"), Rows(rows)):
        trainer = make(tmp_path, coefficient=0.0, sizes={"updates": 1}, more={"train_dataset": data})
        trainer.train()
        log = trainer.state.log_history[0]
        assert log["moe/utilization"] > 0
        assert "moe/nmi" not in log


def test_a_step_by_hand_is_an_update(tmp_path: Path) -> None:
    """Without the trainer's loop, and with groups as they are."""
    trainer = make(tmp_path, coefficient=2.0, group_size=2)
    trainer.create_optimizer()
    examples = examples_of(trainer, 8)
    batch = pad([{k: v for k, v in example.items() if k != "group"} for example in examples])
    items = int(batch["labels"][:, 1:].ne(-100).sum())
    found = []
    for coefficient in (2.0, 0.0):
        trainer.gar = GARArguments(coefficient=coefficient, group_size=2)
        trainer.model.zero_grad()
        groups: Any = {"group": [example["group"] for example in examples]}
        trainer.training_step(trainer.model, {**batch, **groups}, items)
        found.append({n: p.grad.clone() for n, p in trainer.model.named_parameters()})
    expected = slow_router_gradient(olmoe(), examples, cut(examples, 2), {"coefficient": 2.0})
    for key, value in expected.items():
        assert relative_error(found[0][key] - found[1][key], value) < 1e-5


def test_an_example_without_a_group(tmp_path: Path) -> None:
    rows = [{**row, "group": None} for row in texts(16)]
    trainer = make(tmp_path, more={"train_dataset": Rows(rows)})
    with pytest.raises(gar.UserError, match="a text or a whole number, got None"):
        trainer.train()


def test_options_are_read_from_a_command_line() -> None:
    parser = transformers.HfArgumentParser(GARArguments)
    (options,) = parser.parse_args_into_dataclasses(
        ["--coefficient", "0.5", "--layers", "1", "2", "--group_size", "4"]
    )
    assert options == GARArguments(coefficient=0.5, layers=[1, 2], group_size=4)
    assert all(f.metadata["help"] for f in GARArguments.__dataclass_fields__.values())


def test_a_collator_that_returns_no_dictionary_is_named() -> None:
    collator = GroupCollator(list, "group", keep=True, required=True)
    with pytest.raises(gar.UserError, match=r"the data collator returns list, .*expected a dictionary"):
        collator([{"x": 1, "group": "a"}])
