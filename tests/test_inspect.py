"""``gar inspect``: what it loads and reads, how it goes on, what it writes and says, and every refusal."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.nn import functional

import gar
from gar.cli.app import run as gar_command
from gar.inspection import Chance, Group, Inspection, Layer, Request, inspect, inspect_to
from gar.inspection import _load as loading
from gar.inspection import run as running
from gar.inspection._measure import Meter
from gar.inspection._store import Files
from gar.inspection._words import findings, ranges, verdict
from gar.inspection.inspect import AVERAGED
from gar.report.inspection import inspection_page, write_inspection
from gar.runs.reading import find_runs
from support.pages import read
from support.saved_moe import save_moe, some_texts, word_tokenizer, write_jsonl, write_texts

QUICK = ("--permutations", "19")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and texts of two groups in one file."""
    root = tmp_path_factory.mktemp("world")
    save_moe(root / "moe")
    write_texts(root / "texts.jsonl", some_texts(12))
    return root


def quick(world: Path, **changes: Any) -> Request:
    known = {"permutations": 19, "device": "cpu", **changes}
    return Request(str(world / "moe"), (str(world / "texts.jsonl"),), **known)


def check_page(text: str) -> None:
    """Balanced tags, distinct ids, links that lead somewhere inside."""
    page = read(text)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)


def numbers(result: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on where it was computed."""
    return {key: result[key] for key in ("groups", "layers", "overall", "findings", "verdict", "units")}


# --------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------


def test_a_table_a_page_and_a_sentence(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    data = str(world / "texts.jsonl")
    assert gar_command(["inspect", str(world / "moe"), "--data", data, *QUICK]) == 0
    shown = capsys.readouterr().out
    out = tmp_path / "inspect" / "moe"
    result = json.loads((out / "result.json").read_text())
    assert result["verdict"] in shown
    assert all(f"- {line}" in shown for line in result["findings"])
    assert "…" not in shown
    for layer in result["layers"]:
        assert f"{layer['nmi']['value']:.3f}" in shown
    assert sorted(path.name for path in out.iterdir()) == [
        ".lock", "figures", "inspect.html", "inspect.md", "inspection.json", "result.json",
    ]  # fmt: skip
    page = (out / "inspect.html").read_text(encoding="utf-8")
    check_page(page)
    assert sorted(path.name for path in (out / "figures").iterdir()) == ["depth.svg", "load.svg"]
    assert "OlmoeForCausalLM" in page
    assert "Gradients are exact" in page
    assert gar_command(["inspect", str(world / "moe"), "--data", data, *QUICK, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == result


def test_the_result_is_that_of_the_function_in_memory(world: Path, tmp_path: Path) -> None:
    _, result = inspect_to(quick(world), tmp_path / "out")
    source = loading.find_source(str(world / "moe"))
    loaded = loading.load(source, "lm")
    found = inspect(loaded.model, some_texts(12), loaded.tokenizer, permutations=19, name="moe").to_dict()
    assert json.loads(json.dumps(found["layers"])) == result["layers"]
    assert found["verdict"] == result["verdict"]
    assert [group["name"] for group in result["groups"]] == ["fruit", "tool"]
    for group in result["groups"]:
        assert group["perplexity"] == pytest.approx(np.exp(group["loss"]))
    assert result["environment"]["dtype"] == "float32"


def test_the_example_of_the_docs_runs(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[1] / "docs" / "inspect.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    loaded = loading.load(loading.find_source(str(world / "moe")), "lm")
    news, lines = some_texts(6).values()
    exec(code, {"model": loaded.model, "tokenizer": loaded.tokenizer, "news": news, "code": lines})
    assert "layer 0" in capsys.readouterr().out


def test_a_run_is_none(world: Path, tmp_path: Path) -> None:
    inspect_to(quick(world), tmp_path / "runs" / "inspected")
    assert find_runs([tmp_path / "runs"]) == []


def test_a_model_in_bfloat16_with_sketches(world: Path, tmp_path: Path) -> None:
    model = loading.load(loading.find_source(str(world / "moe")), "lm").model.bfloat16()
    model.save_pretrained(tmp_path / "half")
    word_tokenizer().save_pretrained(tmp_path / "half")
    budget = 24 * 8 * 4 * 64
    request = dataclasses.replace(quick(world), model=str(tmp_path / "half"), max_bytes=budget)
    _, result = inspect_to(request, tmp_path / "out")
    assert (result["dimension"], result["environment"]["dtype"]) == (64, "bfloat16")
    assert "sketches of 64 numbers" in inspection_page_text(result)
    whole = inspect_to(dataclasses.replace(request, max_bytes=2**30), tmp_path / "whole")[1]
    for layer, own in zip(result["layers"], whole["layers"], strict=True):
        assert layer["counts"] == own["counts"]
        assert np.square(layer["norms"]).sum() == pytest.approx(np.square(own["norms"]).sum(), rel=0.6)


def inspection_page_text(result: dict[str, Any]) -> str:
    items = [item for block in inspection_page(result).sections[0].blocks for item in block.items]
    return " ".join(line for item in items for line in getattr(item, "lines", ()))


# --------------------------------------------------------------------------------------------------
# Going on
# --------------------------------------------------------------------------------------------------


def counting(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None] = lambda n: None) -> list[int]:
    """Every unit that is measured, in a list; ``before`` is called with how many were."""
    measured: list[int] = []
    own = Meter.measure

    def measure(self: Meter, encoded: Any, unit: Any) -> Any:
        before(len(measured))
        measured.append(len(unit.texts))
        return own(self, encoded, unit)

    monkeypatch.setattr(Meter, "measure", measure)
    return measured


def test_interrupted_it_goes_on_and_gives_the_same(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, whole = inspect_to(quick(world), tmp_path / "whole")
    out, command = (
        tmp_path / "out",
        ["inspect", str(world / "moe"), "--data", str(world / "texts.jsonl"), *QUICK],
    )

    def stop(done: int) -> None:
        if done == 9:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        first = counting(patch, stop)
        assert gar_command([*command, "--out", str(out)]) == 130
    assert "interrupted after 10 of 24 units; the same command goes on" in capsys.readouterr().err
    assert not (out / "result.json").exists()
    (out / "units" / "00003.safetensors").write_bytes(b"cut short")
    second = counting(monkeypatch)
    # Where it is computed, and in which batches, may change.
    assert gar_command([*command, "--out", str(out), "--batch-tokens", "16", "--device", "cpu"]) == 0
    assert (len(first), len(second)) == (10, 15)
    result = json.loads((out / "result.json").read_text())
    for layer, own in zip(result["layers"], whole["layers"], strict=True):
        assert layer["counts"] == own["counts"]
        np.testing.assert_allclose(layer["norms"], own["norms"], rtol=1e-4)
        assert layer["nmi"] == own["nmi"]
    assert not (out / "units").exists()


def test_killed_it_goes_on(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    slow = (
        "import time\nfrom gar.inspection._measure import Meter\nown = Meter.measure\n"
        "def measure(self, *args):\n    time.sleep(0.2)\n    return own(self, *args)\n"
        "Meter.measure = measure\nfrom gar.cli import main\nmain()"
    )
    data = str(world / "texts.jsonl")
    command = ["inspect", str(world / "moe"), "--data", data, *QUICK, "--out", str(out), "--device", "cpu"]
    process = subprocess.Popen([sys.executable, "-c", slow, *command], stderr=subprocess.DEVNULL)
    while not (out / "units" / "00002.safetensors").is_file():
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not (out / "result.json").exists()
    measured = counting(monkeypatch)
    assert gar_command(command) == 0
    assert len(measured) <= 24 - 3
    _, whole = inspect_to(quick(world), tmp_path / "whole")
    assert numbers(json.loads((out / "result.json").read_text())) == numbers(whole)


def test_a_finished_one_is_read_and_other_arguments_are_refused(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    _, result = inspect_to(quick(world), out)
    monkeypatch.setattr(loading, "load", None)  # nothing is loaded again
    assert inspect_to(quick(world), out)[1] == result
    for changes, message in (
        ({"seed": 1}, "has seed: 0, found 1; expected the same"),
        ({"max_length": 9}, "has max_length: 512, found 9"),
        ({"max_texts": 5}, "the texts are others than those it began with"),
    ):
        with pytest.raises(gar.UserError, match=message):
            inspect_to(quick(world, **changes), out)
    weights = world / "moe" / "model.safetensors"
    content = weights.read_bytes()
    try:
        weights.write_bytes(content[:-1] + b"x")
        with pytest.raises(gar.UserError, match="the model's files are others"):
            inspect_to(quick(world), out)
    finally:
        weights.write_bytes(content)


def test_another_revision_of_a_hub_id_is_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the cache or the hub know: files of a hub id are in neither's name."""
    found = []
    for commit in ("1f3c", "1f3c", "9a20"):
        monkeypatch.setattr(
            loading, "_call", lambda function, name, commit=commit: SimpleNamespace(_commit_hash=commit)
        )
        found.append(loading.digest(loading.Source("someone/moe", None)))
    assert found[0] == found[1] != found[2]


def test_one_group_has_dashes_where_groups_are_compared(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.loads(line) for line in (world / "texts.jsonl").read_text().splitlines()]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in lines))
    command = ["inspect", str(world / "moe"), "--data", str(tmp_path / "one.jsonl"), *QUICK]
    assert gar_command([*command, "--out", str(tmp_path / "out")]) == 0
    last = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("all"))
    assert last.split()[-3:] == ["–", "–", "–"]
    page = (tmp_path / "out" / "inspect.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| **all"))
    assert row.count("–") == 5


def test_a_directory_of_something_else_is_refused(world: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(gar.UserError, match="holds something else"):
        inspect_to(quick(world), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(gar.UserError, match=r"is a file; expected a directory \(--out\)"):
        inspect_to(quick(world), tmp_path / "notes.txt")


def test_two_processes_do_not_share_a_directory(world: Path, tmp_path: Path) -> None:
    from filelock import FileLock

    with FileLock(tmp_path / ".lock"), pytest.raises(gar.UserError, match="another process is running"):
        inspect_to(quick(world), tmp_path)


# --------------------------------------------------------------------------------------------------
# Other data, other models
# --------------------------------------------------------------------------------------------------


def test_files_are_groups_and_messages_are_texts(tmp_path: Path) -> None:
    save_moe(tmp_path / "moe", chat=True)
    texts = some_texts(4)
    (tmp_path / "tool.txt").write_text("\n".join(texts["tool"]) + "\n\n")
    chats = [{"messages": [{"role": "user", "content": text}]} for text in texts["fruit"]]
    write_jsonl(tmp_path / "fruit.jsonl", chats)
    data = (str(tmp_path / "fruit.jsonl"), str(tmp_path / "tool.txt"))
    _, result = inspect_to(Request(str(tmp_path / "moe"), data, permutations=0), tmp_path / "out")
    loaded = loading.load(loading.find_source(str(tmp_path / "moe")), "lm")
    plain = inspect(loaded.model, texts, loaded.tokenizer, permutations=0)
    assert [g["tokens"] for g in result["groups"]] == [group.tokens for group in plain.groups]
    assert result["layers"][0]["counts"] == plain.layers[0].counts.tolist()
    assert result["notes"] == ["1 empty text left out"]


def test_tasks_of_a_yaml_file_are_groups(world: Path, tmp_path: Path) -> None:
    texts = some_texts(6)
    for name, found in texts.items():
        rows = [{"text": text, "more": "saw fig", "label": "ab"[i % 2]} for i, text in enumerate(found)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
        write_jsonl(tmp_path / f"{name}_train.jsonl", rows)
    columns = {"fruit": "text", "tool": ["text", "more"]}
    tasks = [
        {"name": name, "train": f"{name}_train.jsonl", "validation": f"{name}.jsonl", "text": text}
        for name, text in columns.items()
    ]
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"mixture": {"tasks": tasks}}))
    request = Request(str(world / "moe"), (str(tmp_path / "own.yaml"),), permutations=0)
    _, result = inspect_to(request, tmp_path / "out")
    assert [group["name"] for group in result["groups"]] == ["fruit", "tool"]
    plain = [sum(len(text.split()) for text in found) for found in texts.values()]
    assert [g["tokens"] for g in result["groups"]] == [plain[0], plain[1] + 6 * 2]
    with pytest.raises(gar.UserError, match=r"--group-by: the tasks of .* say this themselves"):
        inspect_to(dataclasses.replace(request, group_by="x"), tmp_path / "other")


def test_a_classifier(tmp_path: Path) -> None:
    directory = save_moe(tmp_path / "moe", "mixtral", "SequenceClassification", num_labels=2)
    texts = some_texts(6)
    rows = [
        {"text": text, "group": name, "label": i % 2}
        for name, own in texts.items()
        for i, text in enumerate(own)
    ]
    write_jsonl(tmp_path / "texts.jsonl", rows)
    request = Request(str(directory), (str(tmp_path / "texts.jsonl"),), permutations=0)
    _, result = inspect_to(request, tmp_path / "out")
    assert result["loss"] == "classification"
    assert result["groups"][0]["perplexity"] is None
    loaded = loading.load(loading.find_source(str(directory)), "classification")
    experts = [layer.mlp.experts for layer in loaded.model.model.layers]
    for layer, module in zip(result["layers"], experts, strict=True):
        parameters = [module.gate_up_proj.requires_grad_(), module.down_proj.requires_grad_()]
        for t, own in enumerate(texts.values()):
            total, loss = torch.zeros(4, 1), 0.0
            for i, text in enumerate(own):
                ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
                single = functional.cross_entropy(loaded.model(input_ids=ids).logits, torch.tensor([i % 2]))
                grads = torch.autograd.grad(single, parameters)
                total = total + torch.cat([g.reshape(4, -1) for g in grads], 1) / len(own)
                loss += single.item() / len(own)
            np.testing.assert_allclose(layer["norms"][t], total.norm(dim=1), rtol=1e-3, atol=1e-6)
            assert result["groups"][t]["loss"] == pytest.approx(loss, rel=1e-4)
    with pytest.raises(gar.UserError, match=r"--loss lm: moe has a sequence classification head"):
        inspect_to(dataclasses.replace(request, loss="lm"), tmp_path / "other")
    write_jsonl(tmp_path / "texts.jsonl", [{"text": "apple fig", "label": "good"}])
    with pytest.raises(gar.UserError, match="label 'good' is no class of the model; expected one of LABEL_0"):
        inspect_to(request, tmp_path / "other")


def adapted(world: Path, directory: Path) -> Any:
    """An adapter on attention, on experts and on the router, saved; returns the model."""
    peft = pytest.importorskip("peft")
    base = loading.load(loading.find_source(str(world / "moe")), "lm").model
    base.config._name_or_path = str(world / "moe")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        modules_to_save=["gate"],
    )  # fmt: skip
    model = peft.get_peft_model(base, config)
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(directory)
    return model


def test_an_adapter_is_merged(world: Path, tmp_path: Path) -> None:
    with pytest.raises(gar.UserError, match="has an adapter on its experts; expected it merged"):
        inspect(adapted(world, tmp_path / "adapter"), some_texts(3), word_tokenizer())
    merged = adapted(world, tmp_path / "adapter").merge_and_unload()
    plain = inspect(merged, some_texts(12), word_tokenizer(), permutations=0)
    data = (str(world / "texts.jsonl"),)
    alone = Request(str(tmp_path / "adapter"), data, permutations=0)
    beside = Request(str(world / "moe"), data, adapter=str(tmp_path / "adapter"), permutations=0)
    base = inspect_to(Request(str(world / "moe"), data, permutations=0), tmp_path / "base")[1]
    for name, request in (("alone", alone), ("beside", beside)):
        _, result = inspect_to(request, tmp_path / name)
        assert "is merged into the weights" in result["notes"][0]
        for layer, own, before in zip(result["layers"], plain.layers, base["layers"], strict=True):
            assert layer["counts"] == own.counts.tolist() != before["counts"]
            np.testing.assert_allclose(layer["norms"], own.norms, rtol=1e-4)


def test_an_adapter_without_peft_is_one_line(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        gar.UserError, match="an adapter needs peft, which is not installed; pip install peft"
    ):
        inspect_to(Request(str(tmp_path), ("x.jsonl",)))


def test_an_adapter_whose_base_is_elsewhere_says_so(tmp_path: Path) -> None:
    for base in ("/nowhere/at/all", "out/deep/base", "./base"):
        (tmp_path / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "base_model_name_or_path": base})
        )
        with pytest.raises(gar.UserError, match=re.escape(f"its base model is {base!r}")) as said:
            loading.find_source(str(tmp_path))
        assert f"expected the base model as MODEL and --adapter {tmp_path}" in str(said.value)
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "owner/model"})
    )
    assert loading.find_source(str(tmp_path)).base == "owner/model"


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------


def _made(root: Path, world: Path) -> dict[str, str]:
    """Names of wrong things for the commands below."""
    (root / "empty").mkdir()
    (root / "run").mkdir()
    (root / "run" / "config.yaml").write_text("{}")
    (root / "blank.jsonl").write_text('{"text": " "}\n')
    (root / "none.jsonl").write_text("")
    (root / "bad.jsonl").write_text('{"text": "apple fig", "group": "a"}\n{"text": 3, "group": "a"}\n')
    (root / "both.jsonl").write_text('{"text": "apple fig", "group": "a", "task": "b"}\n')
    (root / "many.jsonl").write_text("".join(f'{{"text": "apple fig", "id": {i}}}\n' for i in range(101)))
    (root / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "apple fig"}]}\n')
    (root / "odd.jsonl").write_text('{"messages": ["apple fig"]}\n')
    (root / "texts.xlsx").write_text("")
    dense = root / "dense"
    dense.mkdir()
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=15, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(dense)
    word_tokenizer().save_pretrained(dense)
    shutil.copytree(world / "moe", root / "wordless", ignore=shutil.ignore_patterns("*token*"))
    broken = root / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    return {"root": str(root), "moe": str(world / "moe"), "texts": str(world / "texts.jsonl")}


@pytest.fixture(scope="module")
def made(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _made(tmp_path_factory.mktemp("wrong"), world)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("{moe}", "Missing option '--data'"),
        ("{root}/nothing --data {texts}", "nothing: no such directory; expected a saved model or a hub id"),
        ("{root}/empty --data {texts}", "has no config.json and no adapter_config.json"),
        ("{root}/run --data {texts}", "is a run or a model of gar"),
        ("{root}/wordless --data {texts}", "wordless: its tokenizer knows no word; expected tokenizer.json"),
        ("{root}/broken --data {texts}", "broken: cannot be loaded ("),
        ("{texts} --data {texts}", "is a file; expected the directory of a saved model"),
        ("{root}/dense --data {texts}", "LlamaForCausalLM has no MoE layer; expected a model with routed"),
        ("{moe} --data {texts} --adapter {root}/empty", "no adapter_config.json in it"),
        ("{moe} --data {texts} --loss lmm", "--loss: unknown name 'lmm'"),
        ("{moe} --data {texts} --loss classification", "moe has no classification head; expected --loss lm"),
        ("{moe} --data {texts} --label x", "--label x: a language model has no classes"),
        ("{moe} --data {texts} --device cude", "device is 'cude'"),
        (
            "{moe} --data {texts} --group-by grop",
            "no key 'grop'; found 'text', 'group'; did you mean 'group'?",
        ),
        ("{moe} --data {texts} --text txt", "no key 'txt'; found 'text', 'group'; did you mean 'text'?"),
        (
            "{moe} --data {texts} --max-bytes 1000",
            "max_bytes is 1000, too little for 24 units of texts and 8",
        ),
        ("{moe} --data {texts} --max-texts 0", "Invalid value for '--max-texts'"),
        ("{moe} --data {root}/txts.jsonl", "txts.jsonl: no such file"),
        ("{moe} --data {root}/empty", "empty: no .jsonl, .csv, .tsv, .parquet or .txt file in it"),
        ("{moe} --data {root}/texts.xlsx", "unknown extension '.xlsx'"),
        ("{moe} --data {root}/none.jsonl", "none.jsonl: no rows; expected texts"),
        ("{moe} --data {root}/blank.jsonl", "blank.jsonl: every text is empty"),
        (
            "{moe} --data {root}/bad.jsonl",
            "bad.jsonl, line 2: column 'text' holds 3 (int), expected a string",
        ),
        ("{moe} --data {root}/both.jsonl", "columns 'group' and 'task' may both be groups"),
        ("{moe} --data {root}/many.jsonl --group-by id", "column 'id' has more than 100 different values"),
        ("{moe} --data {root}/chat.jsonl", "the tokenizer has no chat template"),
        ("{moe} --data {root}/odd.jsonl", "expected a list of messages with role and content"),
        ("{moe} --data {texts} --data {texts}", "two files are named 'texts'"),
        ("{moe} --data {root}/own.yaml", "own.yaml"),
        ("{moe} --data {texts} --data {root}/own.yaml", "a YAML file with tasks stands alone"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(
    made: dict[str, str], command: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code = gar_command(["inspect", *command.format(**made).split(), *QUICK, "--out", str(out)])
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("[transformers]")]
    assert (code, captured.out) == (2, "")
    assert len(lines) == 1
    assert message in lines[0]
    assert not out.exists()


def test_a_model_whose_weights_lack_something_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = save_moe(tmp_path / "moe") / "model.safetensors"
    weights = load_file(path)
    del weights["lm_head.weight"]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(gar.UserError, match=r"its weights lack 'lm_head.weight'"):
        loading.load(loading.find_source(str(tmp_path / "moe")), "lm")


def test_a_full_disk_is_one_line(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device", "units/00000.safetensors")

    monkeypatch.setattr(Files, "put", full)
    with pytest.raises(gar.UserError, match="No space left on device; complete files are kept"):
        inspect_to(quick(world), tmp_path / "out")


def test_what_was_begun_without_a_unit_is_no_beginning(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(running, "_forget", lambda path, new: None)  # as if killed
        with pytest.raises(gar.UserError, match="max_bytes is 9"):
            inspect_to(quick(world, max_bytes=9), tmp_path / "out")
    assert (tmp_path / "out" / "inspection.json").is_file()
    assert inspect_to(quick(world), tmp_path / "out")[1]["permutations"] == 19


# --------------------------------------------------------------------------------------------------
# What is said
# --------------------------------------------------------------------------------------------------

LOW, HIGH = Chance(0.004, 0.003, 0.0, 0.01, 0.4), Chance(0.12, 0.003, 0.0, 0.01, 0.005)
LITTLE = Chance(0.02, 0.003, 0.0, 0.01, 0.005)


def layer(number: int, nmi: Chance, used: float = 1.0, counts: Any = None, conflict: Chance = LOW) -> Layer:
    table = np.full((2, 4), 50) if counts is None else np.array(counts)
    return Layer(
        name=f"layers.{number}.mlp", layer=number, experts=4, top_k=2.0, parameters=9, counts=table,
        load=np.full((2, 4), 0.25), gate=np.ones(4), load_variance=0.0, utilization=1.0,
        effective_experts=used, entropy=1.0, normalized_entropy=0.7, ari=0.0,
        structure_purity=0.5, norms=np.ones((2, 4)), cosines=np.eye(2),
        cancelled=np.zeros(4), gradient_mass_purity=0.5, gradient_mass_floor=0.5, nmi=nmi,
        intra_expert_coherence=0.0, inter_expert_similarity=0.0,
        purity_above_floor=LOW, cancelled_energy=conflict,
    )  # fmt: skip


def inspection(*layers: Layer, groups: int = 2, tells: bool = True, permutations: int = 199) -> Inspection:
    return Inspection(
        model="m", architecture="A", loss="lm", groups=[Group(f"g{t}", 9, 90, 2.0) for t in range(groups)],
        units=9, permutations=permutations, tells=tells, dimension=None, relative_error=0.0,
        layers=list(layers), overall={},
    )  # fmt: skip


DEAD = [[50, 50, 0, 0], [50, 50, 0, 0]]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (inspection(layer(0, LOW), groups=1, tells=False), "there is one group of texts"),
        (inspection(layer(0, LOW), tells=False), "9 units of texts can be shuffled in too few ways"),
        (inspection(layer(0, LOW), tells=False, permutations=0), "labels were not shuffled"),
        (inspection(layer(0, LOW), tells=False, permutations=18), "labels were shuffled 18 times"),
        (
            inspection(layer(0, LOW), layer(1, HIGH, counts=DEAD)),
            "2 of 8 experts were never selected, most of them in layer 1 (2 of 4): look there first; they do "
            "nothing on these texts.",
        ),
        (inspection(layer(0, HIGH), layer(1, LOW, 0.25)), "Layer 1: few experts do most of the work"),
        (
            inspection(layer(0, HIGH), *(layer(n, LOW) for n in (3, 4, 5, 7))),
            "Layers 3–5 and 7 balance their load but mix groups: NMI no higher than for shuffled labels, "
            "though the groups' gradients cancel no more than by chance; training the router with GAR acts "
            "on these.",
        ),
        (
            inspection(layer(0, HIGH), layer(2, LOW, conflict=HIGH)),
            "Layer 2 balances its load but mixes groups: NMI no higher than for shuffled labels, and there "
            "the groups' gradients cancel more than by chance; training the router with GAR acts on it.",
        ),
        (inspection(layer(0, HIGH), layer(1, LITTLE)), "Layer 1: experts tell the groups apart more than by"),
        (
            inspection(layer(0, HIGH), layer(1, dataclasses.replace(HIGH, value=0.3))),
            "Experts of every layer tell the groups apart, least in layer 0 (NMI 0.120): nothing here asks",
        ),
        (
            inspection(layer(0, HIGH), layer(1, LOW, 0.75)),
            "Layer 1: NMI is no higher than for shuffled labels,",
        ),
    ],
)
def test_the_last_sentence_follows_the_rules(found: Inspection, said: str) -> None:
    assert said in verdict(found)


def test_findings_say_what_the_numbers_carry_and_no_more() -> None:
    said = findings(inspection(layer(0, HIGH, conflict=HIGH), layer(1, LOW, counts=DEAD), layer(2, LOW)))
    assert said == [
        "Experts 2 and 3 of layer 1: never selected (an even share would be 50 of 200 selections).",
        "Layers 1 and 2: the load is balanced, but groups are mixed (NMI no higher than for shuffled "
        "labels).",
        "Layer 0: which expert is chosen tells something about the group (NMI 0.120, above shuffled labels).",
        "In no layer purity above its floor beyond that of shuffled labels.",
        "Layer 0: conflict 0.120, beyond shuffled labels.",
    ]
    few = findings(inspection(layer(0, LOW, counts=[[1, 1, 0, 0], [0, 0, 0, 0]]), tells=False))
    assert few[0] == "Layer 0: too few tokens to call an expert dead; give more texts."
    many = [layer(n, LOW, counts=DEAD) for n in range(12)]
    assert "Layers 8–11: more experts that were never selected." in findings(inspection(*many))


def test_layers_without_a_number_of_their_own_go_by_name() -> None:
    own = dataclasses.replace(layer(0, LOW), layer=None, name="encoder.bank")
    assert verdict(inspection(own)).startswith("encoder.bank balances its load")
    assert ranges([1, 2, 4, 5, 6]) == ["1", "2", "4–6"]


def test_the_page_of_one_group_and_of_many_experts(tmp_path: Path) -> None:
    plain = dataclasses.replace(
        layer(0, Chance(0.0)), purity_above_floor=Chance(0.0), cancelled_energy=Chance(0.0)
    )
    many = dataclasses.replace(
        plain,
        layer=1,
        experts=40,
        counts=np.full((1, 40), 9),
        load=np.full((1, 40), 1 / 40),
        cosines=np.eye(1),
    )
    single = dataclasses.replace(plain, load=np.full((1, 4), 0.25), cosines=np.eye(1))
    overall: dict[str, Any] = {
        "nmi": Chance(0.0),
        "purity_above_floor": Chance(0.0),
        "cancelled_energy": Chance(0.0),
    }
    overall |= dict.fromkeys(AVERAGED, 0.0)
    other = dataclasses.replace(many, layer=2, load=np.arange(40)[None] / 780)
    for name, layers in (("same", [many, other]), ("different", [single, many])):
        found = dataclasses.replace(
            inspection(*layers, groups=1, tells=False, permutations=0),
            overall=overall,
            verdict="One <group>.",
        )
        files = write_inspection(found.to_dict(), tmp_path / name)
        page = files["inspect.html"].read_text(encoding="utf-8")
        check_page(page)
        assert "One &lt;group&gt;" in page
        assert ("different numbers of experts" in page) == (name == "different")


def test_the_page_survives_long_and_odd_names_of_groups(tmp_path: Path) -> None:
    overall: dict[str, Any] = dict.fromkeys(("nmi", "purity_above_floor", "cancelled_energy"), LOW)
    overall |= dict.fromkeys(AVERAGED, 0.0)
    found = inspection(*(layer(n, LOW) for n in range(5)))
    groups = [Group("a$b_<i>" * 12, 1, 9, 2.0), Group("x|y\\z`*" * 12, 1, 9, 800.0)]
    result = dataclasses.replace(found, groups=groups, overall=overall, notes=("n",)).to_dict()
    files = write_inspection(result, tmp_path)
    check_page(files["inspect.html"].read_text(encoding="utf-8"))
    assert "<i>" not in files["inspect.md"].read_text(encoding="utf-8")
