"""The recipes of CONTRIBUTING.md and docs/add_method.md, followed as they stand there."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModel, ErnieConfig

from gar.config import TaskConfig
from gar.data import _files, load_task
from gar.methods import GAR, REGISTRY, from_config
from gar.model import _architecture, evaluating
from gar.training import train
from support.snippets import blocks
from support.tiny_backbones import CONFIGURATIONS, all_tokens, make_model, make_splits, save_backbone
from support.tiny_runs import largest_difference, load, make_config, make_world, tree, weights


def block(language: str, start: str, page: str = "CONTRIBUTING.md") -> str:
    """The block of a page that begins so."""
    (found,) = (b.text for b in blocks(page) if b.language == language and b.text.startswith(start))
    return found


def test_a_plugin_with_a_method_and_a_metric_trains_and_is_reported(tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(block("python", "# my_methods.py"), encoding="utf-8")
    base = tree(make_world(tmp_path / "world"), optimizer__updates=2)
    own = {**base, **yaml.safe_load(block("yaml", "# own.yaml"))}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
    out = tmp_path / "run"
    command = [sys.executable, "-c", "from gar.cli import main; main()"]
    subprocess.run([*command, "train", str(tmp_path / "own.yaml"), "--out", str(out)], check=True)
    result = json.loads((out / "result.json").read_text())
    assert result["method"] == "router_entropy"
    assert result["routing"]["top_share"] == max(result["routing"]["load"])
    subprocess.run([*command, "report", str(out), "--out", str(tmp_path / "report")], check=True)
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "Router entropy" in page
    assert "largest load" in page


def test_the_method_of_the_documents_is_the_packaged_option(tmp_path: Path) -> None:
    before = dict(REGISTRY)
    try:
        exec(block("python", "# unit_gar.py", "docs/add_method.md"), {})
        own = from_config({"name": "unit_gar", "coefficient": 1.0})
    finally:
        REGISTRY.clear()
        REGISTRY.update(before)
    config = make_config(make_world(tmp_path / "world"))
    trained = []
    for method in (own, GAR(coefficient=1.0, gradients="unit"), GAR(coefficient=1.0)):
        model, mixture = load(config, randomized=True)
        train(model, mixture, method, updates=3, seed=0)
        trained.append(weights(model))
    assert largest_difference(trained[0], trained[1]) < 1e-6
    assert largest_difference(trained[0], trained[2]) > 1e-5


@pytest.mark.parametrize("suffix", [".psv", ".psv.gz"])
def test_a_data_format(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_files, "_READERS", dict(_files._READERS))
    exec(block("python", "# in src/gar/data/_files.py"), {**vars(_files)})
    for name in ("train", "dev"):
        text = "review|label\nfine, really|good\nawful|bad\n"
        data = gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode()
        (tmp_path / f"{name}{suffix}").write_bytes(data)
    files = {"train": str(tmp_path / f"train{suffix}"), "validation": str(tmp_path / f"dev{suffix}")}
    task = load_task(TaskConfig(name="mood", text="review", **files))
    assert task.train.texts == ["fine, really", "awful"]
    assert task.labels == ("bad", "good")


def test_a_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the experts add nothing, the heads get the mean state of the model as transformers runs it."""
    monkeypatch.setattr(_architecture, "ARCHITECTURES", dict(_architecture.ARCHITECTURES))
    exec(block("python", "# in src/gar/model/_architecture.py"), vars(_architecture))
    directory = save_backbone("bert", tmp_path / "ernie")  # for its tokenizer
    vocabulary = AutoModel.from_pretrained(directory).config.vocab_size
    torch.manual_seed(0)
    AutoModel.from_config(ErnieConfig(vocab_size=vocabulary, **CONFIGURATIONS["bert"])).save_pretrained(
        directory
    )
    model = make_model(str(directory))
    ids, mask, types = (tokens := all_tokens(model, make_splits(model)))[0]
    seen: list[torch.Tensor] = []
    for head in model.heads.values():
        head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad(), evaluating(model):
        model.suffix(model.prefix(ids, mask, types).to(model.device, model.dtype), tokens[1])
        dense = AutoModel.from_pretrained(directory, dtype=torch.float64).eval()
        assert dense.config.model_type == "ernie"
        states = dense(input_ids=ids, attention_mask=mask.long(), token_type_ids=types).last_hidden_state
    expected = torch.stack([row[valid].mean(0) for row, valid in zip(states, mask, strict=True)])
    torch.testing.assert_close(torch.cat(seen), expected)
