"""The multi-task model: kept and loaded again, its precision, the shared head, and prediction."""

from __future__ import annotations

import ast
import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel

from gar.cli.app import run
from gar.config import BackboneConfig, Config, ExpertsConfig
from gar.data.task import Split, Task
from gar.errors import UserError
from gar.model import (
    MultiTaskModel,
    Output,
    SiteState,
    TaskInfo,
    _saved,
    example_losses,
    length_bucketed,
    multitask,
    sites,
)
from gar.model.backbone import fingerprint
from gar.model.sites import LoRAFFN
from gar.routing import Routing
from gar.runs.files import checksum, sync
from support.tiny import relative_error
from support.tiny_backbones import (
    KINDS,
    MAX_LENGTH,
    SENTENCES,
    SITES,
    TASKS,
    WIDTH,
    Directories,
    all_tokens,
    logits_of,
    make_model,
    make_splits,
    save_backbone,
    scatter_weights,
)

every_site = pytest.mark.parametrize("site", SITES)
frozen_or_not = pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])

READ_LOGITS = """
import sys
import torch
import gar
from safetensors.torch import save_file
sys.path.insert(0, {tests!r})
from support.tiny_backbones import logits_of
results = {{}}
for number, directory in enumerate(sys.argv[2:]):
    model = gar.MultiTaskModel.from_pretrained(directory)
    for task, logits in enumerate(logits_of(model)):
        results[f"{{number}}.{{task}}"] = logits
save_file(results, sys.argv[1])
"""


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return Directories(tmp_path_factory.mktemp("backbones"))


def same_logits(a: MultiTaskModel, b: MultiTaskModel) -> bool:
    return all(torch.equal(x, y) for x, y in zip(logits_of(a), logits_of(b), strict=True))


# --------------------------------------------------------------------------------------------------
# Keeping and loading
# --------------------------------------------------------------------------------------------------


def test_a_new_process_reads_bitwise_equal_logits(directories: Directories, tmp_path: Path) -> None:
    """Every backbone and site, frozen and trainable, in one process that has never seen the model."""
    expected: list[list[Tensor]] = []
    saved: list[str] = []
    for number, (kind, site, trainable) in enumerate(
        (k, SITES[(i + j) % 3], bool(j)) for i, k in enumerate(KINDS) for j in range(2)
    ):
        dtype = "bfloat16" if number % 4 == 0 and not trainable else "float32"
        model = make_model(directories[kind], site, trainable, dtype)
        scatter_weights(model)
        expected.append(logits_of(model))
        saved.append(str(tmp_path / f"{number}"))
        model.save_pretrained(saved[-1])
    script = READ_LOGITS.format(tests=str(Path(__file__).parent))
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out.safetensors"), *saved],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        cwd=tmp_path,
    )
    found = load_file(tmp_path / "out.safetensors")
    assert len(found) == 2 * len(saved)
    for number, logits in enumerate(expected):
        for task, value in enumerate(logits):
            assert torch.equal(found[f"{number}.{task}"], value), saved[number]


@every_site
@frozen_or_not
def test_what_a_saved_model_holds(
    directories: Directories, tmp_path: Path, site: str, trainable: bool
) -> None:
    model = make_model(directories["bert"], site, trainable, "float32")
    scatter_weights(model)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == model.owned_state().keys()
    assert any(key.startswith("backbone.") for key in stored) == trainable
    if not trainable:
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert stored.keys() == trained
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["backbone_fingerprint"] is None) == trainable
    assert saved["backbone"]["name"] == str(Path(directories["bert"]).resolve())
    assert not [p for p in tmp_path.rglob("*") if p.suffix in {".bin", ".pt", ".pkl", ".pth"}]
    loaded = MultiTaskModel.from_pretrained(tmp_path)
    assert not loaded.training
    assert loaded.tasks == model.tasks
    assert (loaded.config, loaded.experts_config) == (
        model.config.model_copy(update={"name": saved["backbone"]["name"]}),
        model.experts_config,
    )
    assert same_logits(model, loaded)
    # Kept again from the loaded model, it is the same.
    loaded.save_pretrained(tmp_path / "again")
    assert same_logits(model, MultiTaskModel.from_pretrained(str(tmp_path / "again")))


@every_site
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_and_precision_come_back(
    directories: Directories, tmp_path: Path, site: str, precision: str, dtype: str
) -> None:
    model = make_model(directories["bert"], site, dtype=dtype, precision=precision)
    scatter_weights(model)
    model.save_pretrained(tmp_path)
    loaded = MultiTaskModel.from_pretrained(tmp_path)
    assert (loaded.precision, loaded.dtype) == (precision, model.dtype)
    assert same_logits(model, loaded)


@every_site
@frozen_or_not
@pytest.mark.parametrize("kind", ["bert", "modernbert", "llama"])
def test_a_changed_backbone_is_refused(tmp_path: Path, kind: str, site: str, trainable: bool) -> None:
    directory = save_backbone(kind, tmp_path / "backbone")
    model = make_model(str(directory), site, trainable, "float32")
    model.save_pretrained(tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    for key in tensors:  # one number in the final FFN, which full_ffn takes out
        if key.endswith(("1.output.dense.weight", "1.mlp.Wo.weight", "1.mlp.down_proj.weight")):
            tensors[key].view(-1)[0] += 1e-3
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if trainable:
        assert same_logits(model, MultiTaskModel.from_pretrained(tmp_path / "model"))
    else:
        with pytest.raises(UserError, match=r"trained on another .*had fingerprint"):
            MultiTaskModel.from_pretrained(tmp_path / "model")


@every_site
@pytest.mark.parametrize("random_weights", [False, True])
def test_a_model_that_holds_its_backbone_needs_no_other_directory(
    tmp_path: Path, site: str, random_weights: bool
) -> None:
    """Trained backbones and random ones are kept whole; the model may move, and be kept again."""
    directory = save_backbone("bert", tmp_path / "backbone")
    model = make_model(
        str(directory), site, not random_weights, "float32", backbone={"random_weights": random_weights}
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "model")
    shutil.rmtree(directory)
    (tmp_path / "model").rename(tmp_path / "moved")
    loaded = MultiTaskModel.from_pretrained(tmp_path / "moved")
    assert same_logits(model, loaded)
    loaded.save_pretrained(tmp_path / "again")
    assert same_logits(model, MultiTaskModel.from_pretrained(tmp_path / "again"))
    assert loaded.predict("first", ["the cat"])


def test_a_frozen_model_without_its_backbone_is_refused(tmp_path: Path) -> None:
    directory = save_backbone("bert", tmp_path / "backbone")
    make_model(str(directory), dtype="float32").save_pretrained(tmp_path / "model")
    shutil.rmtree(directory)
    with pytest.raises(UserError, match="no such directory"):
        MultiTaskModel.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize(
    ("site", "key"),
    [
        ("lora_ffn", "bank.router.weight"),
        ("lora_ffn", "heads.task_first.bias"),
        ("full_ffn", "bank.experts.W2"),
        ("lora_head", "head.base.weight"),
        ("lora_head", "head.deltas.experts.A"),
    ],
)
def test_missing_extra_and_misshapen_keys_are_named(
    directories: Directories, tmp_path: Path, site: str, key: str
) -> None:
    make_model(directories["bert"], site, dtype="float32").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    seal(tmp_path, files=False)
    for changed, reason in [
        ({k: v for k, v in stored.items() if k != key}, f"lacks '{key}'"),
        ({**stored, key + "2": torch.zeros(1)}, f"unknown key '{key}2'"),
        (
            {**stored, "heads.router.selection_bias": torch.zeros(1)},
            "unknown key 'heads.router.selection_bias'",
        ),
        ({**stored, key: torch.zeros(7, 7, 7, 7)}, f"'{key}' has shape .7, 7, 7, 7., expected"),
        ({}, "lacks .* and [0-9]+ more"),
    ]:
        save_file(changed, path)
        with unchecked, pytest.raises(UserError, match=reason) as refused:
            MultiTaskModel.from_pretrained(tmp_path)
        assert str(path) in str(refused.value)
    path.write_bytes(b"nothing")
    with unchecked, pytest.raises(UserError, match="cannot be read"):
        MultiTaskModel.from_pretrained(tmp_path)
    path.unlink()
    with unchecked, pytest.raises(UserError, match="cannot be read"):
        MultiTaskModel.from_pretrained(tmp_path)


def test_a_failed_load_changes_nothing(directories: Directories) -> None:
    model = make_model(directories["bert"], dtype="float32")
    before = copy.deepcopy(model.state_dict())
    stored = {k: v + 1 for k, v in model.owned_state().items()}
    del stored["bank.router.bias"]
    experts = len(stored["bank.router.weight"])
    biased = {**stored, "bank.router.selection_bias": torch.ones(experts)}  # as a method may add it
    for refused in (stored, biased):
        with pytest.raises(UserError, match="lacks"):
            model.load_owned_state(refused, "here")
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


# --------------------------------------------------------------------------------------------------
# A saved model that is not as it was written
# --------------------------------------------------------------------------------------------------


def seal(directory: Path, tree: dict[str, Any] | None = None, files: bool = True) -> None:
    """Write config.json anew with the right checksums, or without any, as an older version did."""
    path = directory / "config.json"
    tree = json.loads(path.read_text()) if tree is None else tree
    listed = tree.pop("files", {})
    if files:
        sums = {name: checksum(directory / name) for name in listed if name != "config.json"}
        tree["files"] = {**sums, "config.json": _saved._digest(tree)}
    path.write_text(json.dumps(tree))


unchecked = pytest.warns(UserWarning, match="has no checksums of the model's files")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, directories: Directories) -> Path:
    """A saved model, to be copied."""
    model = make_model(directories["bert"], dtype="float32")
    scatter_weights(model)
    directory = tmp_path_factory.mktemp("saved") / "model"
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copied"))


def test_keys_of_a_newer_version_are_told(saved: Path, copied: Path) -> None:
    tree = json.loads((copied / "config.json").read_text())
    tree["experts"] |= {"shape": "round", "colour": "red"}
    tree["tasks"][1]["weight"] = 2
    tree["quantised"] = {"bits": 4}
    seal(copied, tree)
    ignored = "ignoring experts.colour, experts.shape, quantised, tasks.1.weight, saved by a newer version"
    with pytest.warns(UserWarning, match=ignored):
        loaded = MultiTaskModel.from_pretrained(copied)
    assert same_logits(MultiTaskModel.from_pretrained(saved), loaded)


def test_an_edited_configuration_is_told_and_used(saved: Path, copied: Path) -> None:
    path = copied / "config.json"
    path.write_text(path.read_text().replace('"alpha": 3.0', '"alpha": 6.0'))
    with pytest.warns(UserWarning, match=r"config\.json: was changed after the model was saved"):
        loaded = MultiTaskModel.from_pretrained(copied)
    assert loaded.experts_config.alpha == 6
    assert not same_logits(MultiTaskModel.from_pretrained(saved), loaded)


def paths_in(tree: Any, *above: Any) -> list[tuple[Any, ...]]:
    """The place of every key below a JSON object."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found: list[tuple[Any, ...]] = []
    for key, value in items:
        found += [(*above, key)] * isinstance(tree, dict) + paths_in(value, *above, key)
    return found


def test_nothing_is_defaulted(copied: Path) -> None:
    """Every key must be there: a default could change, silently, what the model predicts."""
    intact = json.loads((copied / "config.json").read_text())
    places = [place for place in paths_in(intact) if place[0] != "files"]
    assert {("experts", "alpha"), ("experts", "top_k"), ("backbone", "pooling"), ("precision",)} <= {*places}
    for place in places:
        tree = copy.deepcopy(intact)
        node = tree
        for key in place[:-1]:
            node = node[key]
        del node[place[-1]]
        seal(copied, tree)
        with pytest.raises(UserError) as refused:
            MultiTaskModel.from_pretrained(copied)
        name = ".".join(map(str, place))
        assert str(refused.value) == f"{copied / 'config.json'}: missing key {name!r}"


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("precision", "float16", "precision is 'float16'; expected 'float32', 'tf32' or 'bfloat16'"),
        ("precision", "float23", "did you mean 'float32'"),
        ("format", "gar-multitask-modem", "expected 'gar-multitask-model'"),
        ("gar_version", 2, "gar_version is 2; input should be a valid string"),
        ("backbone", "minilm", "backbone is 'minilm'; input should be an object"),
        ("backbone", None, "backbone is None"),
        ("backbone.pooling", "max", "backbone.pooling is 'max'; expected 'mean', 'first' or 'last'"),
        ("backbone.max_length", "24", "backbone.max_length is '24'; input should be a valid integer"),
        ("backbone.trainable", "no", "backbone.trainable is 'no'; input should be a valid boolean"),
        ("backbone_fingerprint", 12, "backbone_fingerprint is 12"),
        ("experts", [], "experts is .*; input should be an object"),
        ("experts.count", 3.5, "experts.count is 3.5; input should be a valid integer"),
        ("experts.count", True, "experts.count is True; input should be a valid integer"),
        ("experts.top_k", 9, "experts.top_k is 9 but experts.count is 3; expected top_k <= count"),
        ("experts.site", "lora_fn", "did you mean 'lora_ffn'"),
        ("experts.alpha", "3", "experts.alpha is '3'; input should be a valid number"),
        ("experts.alpha", float("nan"), "not valid JSON .found NaN"),
        ("experts.alpha", float("inf"), "not valid JSON .found Infinity"),
        ("tasks", [], "tasks is .*; tuple should have at least 1 item"),
        ("tasks", {}, "tasks is .*; input should be a valid"),
        ("tasks.0.labels", [], "tasks.0.labels is .*; tuple should have at least 1 item"),
        ("tasks.0.labels", [1, 2], "tasks.0.labels.0 is 1; input should be a valid string"),
        ("tasks.0.text", ["a", "b", "c"], "tasks.0.text is .*; tuple should have at most 2 items"),
        ("tasks.0.name", "second", "tasks: names must be distinct, found second, second"),
        ("files", [], "files is .*; input should be an object"),
        # Valid alone, but not with the weights or the backbone.
        ("experts.count", 4, "model.safetensors: 'bank.router.weight' has shape"),
        ("backbone.trainable", True, "model.safetensors: lacks 'backbone"),
        ("tasks.0.labels", ["a", "b", "c"], "'heads.task_first.weight' has shape .2, 8., expected .3, 8."),
        ("backbone.max_length", 41, "positions for 40 tokens"),
        ("backbone_fingerprint", "0", "trained on another .*had fingerprint 0, those found now"),
    ],
)
def test_wrong_values_are_one_line(copied: Path, place: str, value: Any, reason: str) -> None:
    tree = json.loads((copied / "config.json").read_text())
    node = tree
    *above, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    for key in above:
        node = node[key]
    node[last] = value
    if place == "files":
        (copied / "config.json").write_text(json.dumps(tree))
    else:
        seal(copied, tree)
    with pytest.raises(UserError, match=reason) as refused:
        MultiTaskModel.from_pretrained(copied)
    assert str(copied) in str(refused.value) or place == "backbone.max_length"
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "config.json: not valid JSON"),
        (b'{"format": "gar-multitask-model", ', "config.json: not valid JSON"),
        (b"[]", "config.json: expected a JSON object, found list"),
        (b'{"format": "gar-multitask-model"}', "config.json: missing key"),
        (b'{"experts": {}}', "config.json: missing key"),
        (b'{"name": "\xff"}', "config.json: not UTF-8 at byte 10"),
    ],
)
def test_broken_configurations_are_said_to_be_broken(copied: Path, content: bytes, reason: str) -> None:
    (copied / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=reason) as refused:
        MultiTaskModel.from_pretrained(copied)
    assert "\n" not in str(refused.value)


def test_mistakes_in_a_saved_model_end_the_command_line_with_2(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = json.loads((copied / "config.json").read_text())
    del tree["experts"]["alpha"]
    tree["colour"] = "red"  # told only of a model that is loaded
    seal(copied, tree)
    assert run(["predict", str(copied), "the cat"]) == 2
    assert capsys.readouterr().err == f"error: {copied / 'config.json'}: missing key 'experts.alpha'\n"


def damages(content: bytes, number: int) -> list[bytes]:
    """The content with one bit flipped, at places spread over it; cut short; and empty."""
    places = [i * (len(content) - 1) // (number - 1) for i in range(number)]
    flipped = [content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :] for at in places]
    return [*flipped, content[:-1], b""]


def test_every_file_of_a_saved_model_is_checked(saved: Path, copied: Path) -> None:
    files = json.loads((saved / "config.json").read_text())["files"]
    assert files.keys() == {path.name for path in saved.iterdir()}
    assert files.keys() >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    for name in files.keys() - {"config.json"}:
        intact = (copied / name).read_bytes()
        for content in damages(intact, 31):
            (copied / name).write_bytes(content)
            with pytest.raises(UserError, match="damaged: its checksum is") as refused:
                MultiTaskModel.from_pretrained(copied)
            assert str(refused.value).startswith(f"{copied / name}: ")
        (copied / name).unlink()
        with pytest.raises(UserError, match=f"{name}: No such file or directory; expected it"):
            MultiTaskModel.from_pretrained(copied)
        (copied / name).write_bytes(intact)
    (copied / "README.md").write_text("A card of the user's own.")
    assert same_logits(MultiTaskModel.from_pretrained(copied), MultiTaskModel.from_pretrained(saved))


def test_no_flipped_bit_of_the_configuration_passes(saved: Path, copied: Path) -> None:
    """It is refused, or told in a warning (here an error): a number may be another valid one."""
    intact = (saved / "config.json").read_bytes()
    *changed, without_newline, empty = damages(intact, 200)
    for content in (*changed, empty):
        (copied / "config.json").write_bytes(content)
        with pytest.raises((UserError, UserWarning)):
            MultiTaskModel.from_pretrained(copied)
    (copied / "config.json").write_bytes(without_newline)
    MultiTaskModel.from_pretrained(copied)


def test_a_model_of_an_older_version_loads_with_a_warning(saved: Path, copied: Path) -> None:
    seal(copied, files=False)
    with unchecked:
        loaded = MultiTaskModel.from_pretrained(copied)
    assert same_logits(MultiTaskModel.from_pretrained(saved), loaded)


def test_a_directory_may_be_saved_to_again(directories: Directories, tmp_path: Path) -> None:
    """What an earlier model left there is not taken for a part of the new one."""
    for trainable in (True, False, True):
        model = make_model(directories["bert"], trainable=trainable, dtype="float32")
        scatter_weights(model)
        model.save_pretrained(tmp_path / "model")
        assert (tmp_path / "model" / "backbone").is_dir() == trainable
        assert same_logits(model, MultiTaskModel.from_pretrained(tmp_path / "model"))


@pytest.mark.parametrize("stage", ["files", "config"])
def test_a_save_that_fails_leaves_nothing_that_loads_as_another_model(
    directories: Directories, saved: Path, copied: Path, tmp_path: Path, monkeypatch: Any, stage: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    model = make_model(directories["bert"], dtype="float32", tasks={"other": ["a", "b"]})
    with monkeypatch.context() as patch:
        patch.setattr(*((multitask, "save_file") if stage == "files" else (_saved, "write_json")), fail)
        for directory in (copied, tmp_path / "new"):
            with pytest.raises(OSError, match="No space"):
                model.save_pretrained(directory)
            assert not list(directory.glob(".*"))
    with pytest.raises(UserError, match="backbone without heads"):
        MultiTaskModel.from_pretrained(tmp_path / "new")
    if stage == "files":
        loaded = MultiTaskModel.from_pretrained(copied)
        assert same_logits(MultiTaskModel.from_pretrained(saved), loaded)
    else:
        with pytest.raises(UserError, match="damaged: its checksum is"):
            MultiTaskModel.from_pretrained(copied)
    (copied / ".partial").mkdir()  # of a process that was killed
    (copied / ".partial" / "model.safetensors").write_bytes(b"half")
    model.save_pretrained(copied)
    assert not list(copied.glob(".*"))
    assert MultiTaskModel.from_pretrained(copied).tasks == model.tasks


def test_a_saved_model_is_on_the_disk_before_its_configuration(
    directories: Directories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def watched(path: Path) -> None:
        assert not (tmp_path / "model" / "config.json").exists() or path == tmp_path
        synced.append(path.name)
        sync(path)

    monkeypatch.setattr(_saved, "sync", watched)
    make_model(directories["bert"], trainable=True, dtype="float32").save_pretrained(tmp_path / "model")
    files = json.loads((tmp_path / "model" / "config.json").read_text())["files"]
    names = {Path(name).name for name in files}
    assert {*synced} == names | {"backbone", tmp_path.name}


# --------------------------------------------------------------------------------------------------
# A frozen backbone whose weights were changed in memory
# --------------------------------------------------------------------------------------------------


@every_site
@pytest.mark.parametrize("part", ["backbone", "tail"])
@pytest.mark.parametrize("kind", ["bert", "distilbert", "llama"])
def test_a_frozen_backbone_changed_in_memory_is_saved_with_its_weights(
    directories: Directories, tmp_path: Path, kind: str, site: str, part: str
) -> None:
    model = make_model(directories[kind], site, dtype="float32")
    scatter_weights(model)
    if part not in dict(model.named_children()):
        pytest.skip("no norm outside of the backbone")
    model.save_pretrained(tmp_path / "before")
    assert not (tmp_path / "before" / "backbone").exists()
    weight = next(iter(model.get_submodule(part).parameters()))
    kept = weight.data.clone()
    weight.data.view(-1)[3:6] += 0.5  # torch's own version counters do not see this
    changed = logits_of(model)
    model.save_pretrained(tmp_path / "after")
    loaded = MultiTaskModel.from_pretrained(tmp_path / "after")
    assert all(torch.equal(a, b) for a, b in zip(changed, logits_of(loaded), strict=True))
    assert not loaded.config.trainable
    assert loaded.trainable_parameters()
    assert len(loaded.trainable_parameters()) == len(model.trainable_parameters())
    loaded.save_pretrained(tmp_path / "again")
    assert same_logits(loaded, MultiTaskModel.from_pretrained(tmp_path / "again"))
    # Into a model that was made as this one was, before the change.
    other = make_model(directories[kind], site, dtype="float32")
    other.load_weights(tmp_path / "after")
    assert same_logits(loaded, other)
    # Changed back, it needs its name alone again.
    weight.data.copy_(kept)
    model.save_pretrained(tmp_path / "after")
    assert not (tmp_path / "after" / "backbone").exists()


@every_site
def test_the_fingerprint_is_that_of_the_weights_as_they_are(directories: Directories, site: str) -> None:
    model = make_model(directories["bert"], site, dtype="float32")
    before = model.backbone_fingerprint
    assert model.backbone_fingerprint == before
    weight = next(model.backbone.parameters())
    kept = weight.data.clone()
    weight.data[0] += 1
    assert model.backbone_fingerprint != before
    weight.data = kept
    assert model.backbone_fingerprint == before


def test_weights_are_taken_over_from_a_saved_model_alone(
    directories: Directories, saved: Path, tmp_path: Path
) -> None:
    model = make_model(directories["bert"], dtype="float32")
    model.load_weights(saved)
    assert same_logits(model, MultiTaskModel.from_pretrained(saved))
    with pytest.raises(UserError, match="holds no saved model"):
        model.load_weights(directories["bert"])
    damaged = Path(shutil.copytree(saved, tmp_path / "damaged"))
    content = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=r"model\.safetensors: damaged"):
        model.load_weights(damaged)
    assert same_logits(model, MultiTaskModel.from_pretrained(saved))


def test_saved_models_bring_their_own_tasks(directories: Directories, tmp_path: Path) -> None:
    make_model(directories["bert"], dtype="float32").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="brings its own tasks"):
        MultiTaskModel.from_pretrained(tmp_path, TASKS)
    with pytest.raises(UserError, match="backbone without heads; give tasks"):
        MultiTaskModel.from_pretrained(directories["bert"])


@every_site
@frozen_or_not
def test_task_names_may_be_anything(
    directories: Directories, tmp_path: Path, site: str, trainable: bool
) -> None:
    names = [
        "glue.rte",
        "glue%2Erte",
        "a b/c",
        "mañana 日本",
        "keys",
        "train",
        "forward",
        "weight",
        "task_keys",
        "0",
    ]
    tasks = {name: ["no", "yes", "open"][: 2 + i % 2] for i, name in enumerate(names)}
    model = make_model(directories["bert"], site, trainable, "float32", tasks)
    scatter_weights(model)
    if site != "lora_head":
        assert len(model.heads) == len(names)
    model.save_pretrained(tmp_path)
    loaded = MultiTaskModel.from_pretrained(tmp_path)
    assert list(loaded.tasks) == names
    probabilities = []
    for name in names:
        before, after = (m.predict_probabilities(name, SENTENCES) for m in (model, loaded))
        assert torch.equal(before, after)
        assert after.shape == (len(SENTENCES), len(tasks[name]))
        probabilities.append(after[0, 0].item())
    if site != "lora_head":
        assert len(set(probabilities)) == len(names)  # each task has a head of its own


@pytest.mark.parametrize("tasks", [[], [TASKS[0], TASKS[0]]])
def test_tasks_must_be_distinct(directories: Directories, tasks: list[TaskInfo]) -> None:
    with pytest.raises(UserError, match="task names must be distinct"):
        make_model(directories["bert"], tasks=tasks)


def test_ways_to_name_tasks_and_experts(directories: Directories) -> None:
    split = Split(["a"], np.array([0]))
    task = Task("rte", ("no", "yes"), split, split, text=("premise", "hypothesis"))
    config = BackboneConfig(name=directories["bert"], max_length=MAX_LENGTH)
    for experts in (ExpertsConfig(count=2, top_k=1, rank=2), {"count": 2, "top_k": 1, "rank": 2}):
        model = MultiTaskModel.from_pretrained(config, [task], experts)
        assert model.tasks == {"rte": TaskInfo("rte", ("no", "yes"), ("premise", "hypothesis"))}
        assert model.bank.experts.count == 2
    with pytest.raises(ValidationError):
        MultiTaskModel.from_pretrained(config, [task], {"count": 2, "top_k": 3})


@every_site
def test_new_weights_depend_on_the_seed_alone(directories: Directories, site: str) -> None:
    def build(seed: int) -> dict[str, Tensor]:
        config = BackboneConfig(name=directories["bert"], max_length=MAX_LENGTH)
        experts = ExpertsConfig(site=site, count=3, top_k=2, rank=2)
        return MultiTaskModel.from_pretrained(config, TASKS, experts, seed=seed).owned_state()

    state = torch.random.get_rng_state()
    first = build(1)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(99)
    second, third = build(1), build(2)
    assert all(torch.equal(first[key], second[key]) for key in first)
    router = "head.deltas.router" if site == "lora_head" else "bank.router"
    weight = first[f"{router}.weight"]
    assert not torch.equal(weight, third[f"{router}.weight"])
    assert 0 < weight.abs().max() < 0.1  # N(0, 0.02^2), not zero: no tie at the first update
    assert not first[f"{router}.bias"].any()


def test_deep_copies_are_independent(directories: Directories) -> None:
    for site in SITES:
        model = make_model(directories["bert"], site, trainable=True)
        scatter_weights(model)
        twin = copy.deepcopy(model)
        expected = logits_of(model)
        assert same_logits(model, twin)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert all(torch.equal(a, b) for a, b in zip(expected, logits_of(model), strict=True))


def test_fingerprints_see_names_dtypes_shapes_and_bytes() -> None:
    def digest(**tensors: Tensor) -> str:
        module = torch.nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        return fingerprint(module)

    zeros = torch.zeros(2, 3)
    seen = [
        digest(a=zeros),
        digest(b=zeros),
        digest(a=zeros.T.contiguous()),
        digest(a=zeros.int()),
        digest(a=zeros.to(torch.bfloat16)),
        digest(a=zeros + 1),
        digest(a=zeros, b=torch.tensor(1.0)),
        digest(a=zeros, b=torch.empty(0)),
    ]
    assert len(set(seen)) == len(seen)
    assert digest(a=zeros, b=torch.ones(1)) == digest(b=torch.ones(1), a=zeros.clone())
    assert digest(a=torch.arange(6.0).reshape(3, 2).T) == digest(a=torch.tensor([[0.0, 2, 4], [1, 3, 5]]))


# --------------------------------------------------------------------------------------------------
# Precision
# --------------------------------------------------------------------------------------------------


@every_site
@frozen_or_not
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_computation_is_close_and_routes_in_float32(
    directories: Directories, kind: str, site: str, trainable: bool
) -> None:
    exact, half = (
        make_model(directories[kind], site, trainable, "float32", precision=precision).eval()
        for precision in ("float32", "bfloat16")
    )
    losses = []
    for model in (exact, half):
        scatter_weights(model, 0.1)
        model.bank.router.top_k = 3  # rounding must not decide which expert is chosen
        splits = make_splits(model)
        tokens, segments = all_tokens(model, splits)
        output = model.suffix(model.prefix(*tokens).to(model.device, model.dtype), segments)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert output.routing.logits.dtype == output.routing.gates.dtype == torch.float32
        parts = zip(output.logits, splits, strict=True)
        losses.append(
            torch.cat(
                [
                    functional.cross_entropy(logits.float(), torch.from_numpy(split.labels), reduction="none")
                    for logits, split in parts
                ]
            )
        )
        losses[-1].sum().backward()
        assert all(
            p.grad is None or (p.grad.isfinite().all() and p.grad.dtype == torch.float32)
            for p in model.parameters()
        )
    losses = [loss.detach() for loss in losses]
    assert relative_error(losses[1], losses[0]) < 2e-2
    assert not torch.equal(losses[1], losses[0])
    found, expected = (model.bank.router.weight.grad for model in (half, exact))
    assert found is not None
    assert expected is not None
    assert relative_error(found, expected) < 0.15


@every_site
def test_float64_is_float64_throughout(directories: Directories, site: str) -> None:
    model = make_model(directories["bert"], site)
    tokens, segments = all_tokens(model, make_splits(model))
    output = model.suffix(model.prefix(*tokens), segments)
    tensors = (*model.parameters(), *output.logits, output.routing.gates)
    assert {tensor.dtype for tensor in tensors} == {torch.float64}


# --------------------------------------------------------------------------------------------------
# Heads and experts
# --------------------------------------------------------------------------------------------------


@every_site
@pytest.mark.parametrize("order", [[0, 1], [1, 0], [0, 1, 0], [1]])
def test_losses_are_those_of_the_logits(directories: Directories, site: str, order: list[int]) -> None:
    """Of tasks with two and with three labels, in any order, and their gradients."""
    model = make_model(directories["bert"], site, dropout=0.0)
    scatter_weights(model)
    splits = make_splits(model)
    parts = [(splits[i], np.arange(len(splits[i]) - i)) for i in order]
    segments = [(list(model.tasks)[i], len(rows)) for i, (_, rows) in zip(order, parts, strict=True)]
    labels = [torch.from_numpy(split.labels[rows]) for split, rows in parts]
    state = model.prefix(*model.tokens(parts))
    expected = example_losses(model.suffix(state, segments), labels)
    found = model.losses(state, segments, torch.cat(labels))
    assert torch.allclose(found, expected, atol=1e-12)
    weights = torch.rand(len(found), dtype=found.dtype)
    parameters = model.trainable_parameters()
    for a, b in zip(
        torch.autograd.grad(found @ weights, parameters, materialize_grads=True),
        torch.autograd.grad(expected @ weights, parameters, materialize_grads=True),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-12)


def test_the_shared_head_is_as_wide_as_the_widest_task(directories: Directories) -> None:
    model = make_model(directories["bert"], "lora_head").eval()
    scatter_weights(model)
    assert model.head.base.weight.shape == (3, WIDTH)
    first, second = logits_of(model)
    assert (first.shape[1], second.shape[1]) == (3, 3)  # also of the task with two labels
    assert not hasattr(model, "heads")
    # The third logit takes part in the loss of the binary task; its predictions stay among its two labels.
    output = Output([first], Routing(first, first, first > 0))
    labels = torch.from_numpy(make_splits(model)[0].labels)
    losses = torch.stack([torch.logsumexp(row, 0) - row[y] for row, y in zip(first, labels, strict=True)])
    assert torch.allclose(example_losses(output, [labels]), losses, atol=1e-12)
    before = model.predict_probabilities("first", SENTENCES)
    with torch.no_grad():
        model.head.base.bias[2] += 200
    (raised, _) = logits_of(model)
    assert (raised.argmax(1) == 2).all()
    assert before.shape == (6, 2)
    assert torch.allclose(model.predict_probabilities("first", SENTENCES), before, atol=1e-6)
    assert {answer.label for answer in model.predict("first", SENTENCES)} <= {"no", "yes"}
    # Measured, the third logit counts: see test_evaluation.


def test_the_shared_head_is_base_plus_gated_deltas(directories: Directories) -> None:
    model = make_model(directories["bert"], "lora_head").eval()
    scatter_weights(model)
    tokens, segments = all_tokens(model, make_splits(model))
    with torch.no_grad():
        state = model.prefix(*tokens)
        output = model.suffix(state, segments)
        experts: Any = model.head.deltas.experts
        h = state.base
        deltas = torch.stack([1.5 * (h @ a.T) @ b.T for a, b in zip(experts.A, experts.B, strict=True)], 1)
        expected = h @ model.head.base.weight.T + model.head.base.bias
        expected = expected + (output.routing.gates.unsqueeze(-1) * deltas).sum(1)
    assert output.routing.gates.shape == (8, 3)
    assert (torch.cat(output.logits) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["bert", "distilbert", "modernbert", "qwen3"])
def test_one_expert_is_plain_lora(directories: Directories, kind: str) -> None:
    """E = 1: the gate is 1, the router has no gradient, the delta is one adapter's."""
    model = make_model(directories[kind], "lora_ffn", count=1, top_k=1).eval()
    scatter_weights(model)
    tokens, segments = all_tokens(model, make_splits(model))
    state = model.prefix(*tokens)
    output = model.suffix(state, segments)
    assert (output.routing.gates[state.mask] == 1).all()
    experts = model.bank.experts
    assert state.x is not None
    delta = 1.5 * (state.x @ experts.A[0].T) @ experts.B[0].T
    if model.site.tail is None:
        pooled = state.base + torch.stack([d[m].mean(0) for d, m in zip(delta, state.mask, strict=True)])
    else:
        states = model.site.tail(state.base + delta)
        pooled = torch.stack([s[m].mean(0) for s, m in zip(states, state.mask, strict=True)])
    start = 0
    for (_, size), head, logits in zip(segments, model.heads.values(), output.logits, strict=True):
        tolerance = 1e-6 if kind == "qwen3" else 1e-10
        assert (head(pooled[start : start + size]) - logits).abs().max() < tolerance
        start += size
    torch.cat([logits.flatten() for logits in output.logits]).square().sum().backward()
    router = model.bank.router.weight.grad
    assert router is None or not router.any()
    assert experts.A.grad is not None
    assert experts.A.grad.any()


@pytest.mark.parametrize("site", ["full_ffn", "lora_head"])
def test_one_expert_needs_no_router(directories: Directories, site: str) -> None:
    model = make_model(directories["bert"], site, count=1, top_k=1).eval()
    scatter_weights(model)
    before = logits_of(model)
    with torch.no_grad():
        model.bank.router.weight.normal_()
    assert all(torch.equal(a, b) for a, b in zip(before, logits_of(model), strict=True))


def test_segments_choose_the_heads(directories: Directories) -> None:
    model = make_model(directories["bert"]).eval()
    scatter_weights(model)
    tokens, _ = all_tokens(model, make_splits(model))
    with torch.no_grad():
        state = model.prefix(*tokens)
        logits = model.suffix(state, [("second", 3), ("first", 4), ("second", 1)]).logits
        other = model.suffix(state, [("first", 8)]).logits[0]
    assert [tuple(t.shape) for t in logits] == [(3, 3), (4, 2), (1, 3)]
    assert torch.allclose(logits[1], other[3:7], atol=1e-12)


def test_segments_of_unknown_tasks(directories: Directories) -> None:
    """Without a head of its own a task is refused; a shared head answers for any."""
    for site in SITES:
        model = make_model(directories["bert"], site)
        tokens, _ = all_tokens(model, make_splits(model))
        state = model.prefix(*tokens)
        if site == "lora_head":
            assert model.suffix(state, [("third", 8)]).logits[0].shape == (8, 3)
        else:
            with pytest.raises(UserError, match=r"task: unknown name 'secnd'.*did you mean 'second'"):
                model.suffix(state, [("first", 4), ("secnd", 4)])


# --------------------------------------------------------------------------------------------------
# Sites
# --------------------------------------------------------------------------------------------------


@every_site
def test_a_model_describes_itself(directories: Directories, site: str) -> None:
    model = make_model(directories["bert"], site, precision="bfloat16")
    assert model.description == {
        "backbone": model.config,
        "experts": model.experts_config,
        "precision": "bfloat16",
    }
    assert Config.model_validate(model.description).experts.site == site
    with pytest.raises(
        UserError, match="precision: unknown name 'float16'; expected one of float32, tf32, bfloat16"
    ):
        make_model(directories["bert"], site, precision="float16")


@every_site
def test_what_a_site_says_of_itself(directories: Directories, site: str) -> None:
    model = make_model(directories["bert"], site, dropout=0.25)
    gates, counts = np.array([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]]), np.array([3, 1, 4])
    at_head = site == "lora_head"
    assert model.site.unit == ("example" if at_head else "token")
    assert model.site.units(5, 7) == ((5,) if at_head else (5, 7))
    expected = [3 / 8, 1 / 8, 1 / 2] if at_head else [0.25, 0.375, 0.375]
    assert model.site.load(gates, counts).tolist() == expected
    assert model.site.dropout == (0.0 if site == "full_ffn" else 0.25)
    shape = None if site == "full_ffn" else (*model.site.units(5, 7), WIDTH)
    assert model.site.dropout_shape(5, 7) == shape
    assert make_model(directories["bert"], site, dropout=0.0).site.dropout_shape(5, 7) is None
    assert model.site.bank is model.bank


def test_a_site_of_ones_own_is_one_class(directories: Directories, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts at the final FFN and a head shared by all tasks, made of the parts of two other sites."""

    class SharedHead(LoRAFFN):
        def output(self, state: SiteState, segments: Any, keep: Tensor | None) -> Output:
            return super().output(state, [("second", size) for _, size in segments], keep)

    monkeypatch.setitem(sites.SITES, "lora_ffn", SharedHead)
    model = make_model(directories["bert"])
    scatter_weights(model)
    assert [logits.shape[1] for logits in logits_of(model)] == [3, 3]


def test_nobody_else_asks_which_site_it_is() -> None:
    package = Path(sites.__file__).parents[1]
    for path in package.rglob("*.py"):
        if path.parent.name == "methods":  # a method may say at which sites it cannot run
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                names = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                assert not names & {*SITES}, f"{path}, line {node.lineno}"


def test_states_move_and_change_dtype() -> None:
    state = SiteState(torch.ones(1, 2, 3), torch.ones(1, 3), torch.ones(1, 2, dtype=torch.bool))
    moved = state.to(torch.device("cpu"), torch.float64)
    assert moved.x is not None
    assert (moved.x.dtype, moved.base.dtype, moved.mask.dtype) == (torch.float64, torch.float64, torch.bool)
    assert SiteState(None, state.base, state.mask).to(torch.device("cpu"), torch.float64).x is None


# --------------------------------------------------------------------------------------------------
# Prediction
# --------------------------------------------------------------------------------------------------


@every_site
@pytest.mark.parametrize("kind", ["bert", "roberta", "llama"])
def test_predictions_keep_order_and_mode(directories: Directories, kind: str, site: str) -> None:
    labels = {"one": ["no", "yes"], "two": ["low", "middle", "high"]}
    model = make_model(directories[kind], site, dtype="float32", tasks=labels, dropout=0.5)
    scatter_weights(model, 1.0)
    assert model.training
    texts = [SENTENCES[i % 6] + " cat" * (i % 5) for i in range(20)]
    for task, names in labels.items():
        answers = model.predict(task, texts)
        assert len({tuple(answer.probabilities.values()) for answer in answers}) > 10
        assert model.training
        assert not any(p.grad is not None for p in model.parameters())
        for text, answer in zip(texts, answers, strict=True):
            assert list(answer.probabilities) == names
            total = sum(answer.probabilities.values())
            assert total == pytest.approx(1, abs=1e-6)
            assert answer.label == max(answer.probabilities, key=answer.probabilities.__getitem__)
            (alone,) = model.predict(task, [text])
            assert alone.probabilities == pytest.approx(answer.probabilities, abs=1e-5)
        small = model.predict_probabilities(task, texts, batch_tokens=1)
        assert torch.allclose(small, model.predict_probabilities(task, texts), atol=1e-5)
    model.eval()
    model.predict("one", texts[:1])
    assert [module.training for module in (model, model.bank)] == [False, False]
    assert model.predict("one", []) == []


def test_pairs_are_predicted_as_in_training(directories: Directories) -> None:
    for kind in ("bert", "qwen3"):
        model = make_model(directories[kind]).eval()
        scatter_weights(model)
        splits = make_splits(model)
        first = [SENTENCES[i] for i in range(3)]
        second = [SENTENCES[3], SENTENCES[0], SENTENCES[1]]
        found = model.predict_probabilities("second", first, second)
        with torch.no_grad():
            state = model.prefix(*model.tokens([(splits[1], np.arange(3))]))
            (logits,) = model.suffix(state, [("second", 3)]).logits
        assert torch.allclose(found, logits.softmax(-1).float(), atol=1e-6)
        swapped = model.predict_probabilities("second", second, first)
        assert not torch.allclose(found, swapped)


@every_site
@frozen_or_not
def test_every_module_gets_its_own_mode_back(directories: Directories, site: str, trainable: bool) -> None:
    """Whatever the user put in eval mode stays there, and so does a frozen backbone put in training mode."""
    model = make_model(directories["bert"], site, trainable, dtype="float32")
    model.bank.eval()
    model.backbone.train(not trainable)
    model.backbone.get_submodule("embeddings").train(trainable)
    modes = {name: module.training for name, module in model.named_modules()}
    assert len(set(modes.values())) == 2
    seen: list[set[bool]] = []
    model.bank.register_forward_hook(lambda *_: seen.append({m.training for m in model.modules()}))
    model.predict("first", ["no"])
    assert seen == [{False}]
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_a_failing_prediction_restores_the_mode(directories: Directories) -> None:
    model = make_model(directories["bert"])

    def fail(*_: Any) -> None:
        raise RuntimeError("stop")

    handle = model.backbone.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        model.predict("first", ["no"])
    handle.remove()
    assert model.training
    assert not model.backbone.training


def test_wrong_forms_and_names_are_refused(directories: Directories) -> None:
    model = make_model(directories["bert"])
    with pytest.raises(UserError, match=r"task second takes a pair of texts \(question, answer\)"):
        model.predict("second", ["no"])
    with pytest.raises(UserError, match=r"task first takes one text \(text\)"):
        model.predict("first", ["no"], ["yes"])
    with pytest.raises(UserError, match="did you mean 'second'"):
        model.predict("secnd", ["no"], ["yes"])
    with pytest.raises(ValueError, match="one length"):
        model.predict("second", ["no", "yes"], ["yes"])


def test_length_buckets_hold_every_example_once() -> None:
    lengths = np.array([3, 9, 4, 9, 1, 30, 2])
    for budget in (1, 10, 18, 1000):
        batches = list(length_bucketed(lengths, budget))
        assert sorted(np.concatenate(batches).tolist()) == list(range(7))
        assert all(len(b) == 1 or len(b) * lengths[b].max() <= budget for b in batches)


def test_the_frozen_backbone_is_the_one_of_its_directory(directories: Directories) -> None:
    """The frozen backbone holds exactly the weights of its directory, full_ffn aside from the taken FFN."""
    dense = AutoModel.from_pretrained(directories["bert"])
    for site in SITES:
        model = make_model(directories["bert"], site, dtype="float32")
        own = model.backbone.state_dict()
        assert len(own) < len(dense.state_dict())  # no pooler
        assert all(torch.equal(own[key], dense.state_dict()[key]) for key in own)
