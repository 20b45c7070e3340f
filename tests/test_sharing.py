"""What runs of one process share: the bits of a run alone, changes noticed, memory bounded."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gar.config import Config
from gar.data import load_task
from gar.features import _cache
from gar.features.sources import sources_of, tokenized
from gar.methods import REGISTRY, Baseline, register
from gar.model import backbone as backbones
from gar.model.backbone import Digest, Pretrained, _bit_sums, fingerprint
from gar.model.multitask import MultiTaskModel
from gar.runs import files
from gar.runs.environment import in_threads
from gar.runs.files import Checksums, checksum, parts_checksum
from gar.training import Shared, sharing, train_from_config
from gar.training.sharing import Shelf
from support import tiny_runs
from support.tiny_runs import make_config

CHANGES: dict[str, dict[str, Any]] = {
    "cached": {},
    "other seed": {"seed": 1, "method__name": "gar"},
    "uncached": {"cache__enabled": False, "method": {"name": "stgc"}},
    "half": {"cache__dtype": "float16"},
    "trained": {"backbone__trainable": True, "method__name": "gar"},
    "trained again": {"backbone__trainable": True, "method__name": "gar", "seed": 1},
    "full_ffn": {"experts__site": "full_ffn"},
    "trained full_ffn": {"experts__site": "full_ffn", "backbone__trainable": True},
    "shorter": {"backbone__max_length": 8},
    "fewer": {"mixture__max_train_examples": 9, "mixture__max_validation_examples": 7},
    "head": {"experts__site": "lora_head", "method": {"name": "cagrad"}},
    "cached again": {"method__name": "loadpen"},
}


@pytest.fixture
def world(tmp_path: Path) -> Path:
    return tiny_runs.make_world(tmp_path / "world")


def what_is_left(out: Path) -> dict[str, bytes]:
    """Every file of a run whose content the run decides, without the times in it."""
    result = json.loads((out / "result.json").read_text())
    del result["timing"]
    saved = sorted(path for path in (out / "model").rglob("*") if path.is_file())
    names = ["history.jsonl", "diagnostics.json", *(str(path.relative_to(out)) for path in saved)]
    data = json.loads((out / "environment.json").read_text())["data"]
    facts = {"result": json.dumps(result).encode(), "data": json.dumps(data).encode()}
    # The card tells nothing of times either, and comes with the model.
    return facts | {name: (out / name).read_bytes() for name in names}


def assert_as_alone(config: Config, out: Path, shared: Shared | None, probe: bool = False) -> None:
    """The run has every byte of the same run with nothing shared."""
    train_from_config(config, out / "shared", shared=shared, probe=probe)
    train_from_config(config, out / "alone", probe=probe)
    found, expected = what_is_left(out / "shared"), what_is_left(out / "alone")
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


# ---------------------------------------------------------------------- the same bits


def test_a_run_after_others_has_every_byte_of_the_run_alone(world: Path, tmp_path: Path) -> None:
    shared = Shared()
    for name, changes in CHANGES.items():
        assert_as_alone(make_config(world, **changes), tmp_path / name, shared)


def test_a_probe_after_the_run_itself_and_the_other_way_round(world: Path, tmp_path: Path) -> None:
    shared, config = Shared(), make_config(world)
    for i, probe in enumerate((False, True, True, False)):
        assert_as_alone(config, tmp_path / str(i), shared, probe)
    result = json.loads((tmp_path / "1" / "shared" / "result.json").read_text())
    assert result["mixture"] == "tiny (development probe)"
    assert result["examples"] == {"mood": [19, 2], "nli": [10, 1]}


@pytest.mark.parametrize("name", ["cached", "uncached", "trained", "full_ffn"])
def test_a_second_run_loads_nothing(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shared = Shared()
    monkeypatch.setattr(files, "RACY", -1.0)  # or files written this moment would be read again
    train_from_config(make_config(world, **CHANGES[name]), tmp_path / "before", shared=shared)
    for module, loader in (
        (sharing, "load_task"),
        (sharing, "tokenize_split"),
        (backbones, "load_backbone"),
        (backbones, "load_tokenizer"),
        (files.remembered_checksum, "_of"),
        (_cache.remembered_checksum, "_of"),
    ):
        monkeypatch.setattr(module, loader, lambda *_, loader=loader: pytest.fail(f"{loader} was called"))
    config = make_config(world, **CHANGES[name], seed=7)
    begun = shared.start(config)
    begun.sources(None)
    assert begun.digests().keys() == {"mood", "nli"}


# ---------------------------------------------------------------------- changes are noticed


def rewrite(path: Path, old: str, new: str) -> None:
    """Another content of the same size, in place, with the time of before."""
    times, content = path.stat(), path.read_bytes()
    assert len(old) == len(new)
    assert old.encode() in content
    with path.open("r+b") as file:
        file.write(content.replace(old.encode(), new.encode(), 1))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("name", ["mood-train.csv", "nli-dev.jsonl"])
def test_data_changed_between_two_runs_are_noticed(world: Path, tmp_path: Path, name: str) -> None:
    shared, config = Shared(), make_config(world)
    train_from_config(config, tmp_path / "before", shared=shared)
    rewrite(world / name, "w1", "w7")
    assert_as_alone(config, tmp_path / "after", shared)
    before, after = (
        json.loads((tmp_path / run / "environment.json").read_text())["data"]
        for run in ("before", "after/shared")
    )
    assert [task for task in before if before[task] != after[task]] == [name.split("-")[0]]


def test_a_backbone_changed_between_two_runs_is_noticed(world: Path, tmp_path: Path) -> None:
    shared, config = Shared(), make_config(world)
    train_from_config(config, tmp_path / "before", shared=shared)
    weights = load_file(world / "bert" / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][5] += 0.1
    save_file(weights, world / "bert" / "model.safetensors", {"format": "pt"})
    assert_as_alone(config, tmp_path / "after", shared)
    assert (tmp_path / "after/shared/model/config.json").read_bytes() != (
        tmp_path / "before/model/config.json"
    ).read_bytes()


def test_what_changes_while_it_is_read_is_not_kept(world: Path) -> None:
    """Else the rows that were read would be those of the content that was looked at before."""
    shared, config, file = Shared(), make_config(world), world / "mood-train.csv"

    def changing(*entry: Any, **options: Any) -> Any:
        if "odd" not in file.read_text(encoding="utf-8"):
            rewrite(file, "bad", "odd")
        return load_task(*entry, **options)

    def labels() -> dict[str, tuple[str, ...]]:
        begun = shared.start(config)
        begun.sources(None)
        return {task.name: task.labels for task in begun.mixture.tasks}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "load_task", changing)
        assert labels()["mood"] == ("bad", "good", "odd")
    rewrite(file, "odd", "bad")
    assert labels()["mood"] == ("bad", "good")


def test_a_frozen_backbone_that_a_method_wrote_into_is_loaded_again(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REGISTRY, "vandal", Baseline)
    del REGISTRY["vandal"]
    seen: list[MultiTaskModel] = []

    @register
    class Vandal(Baseline):
        name: ClassVar[str] = "vandal"
        label: ClassVar[str] = "Vandal"

        def initial_state(self, model: Any) -> None:
            seen.append(model)

        def after_step(self, update: Any) -> None:
            next(seen[-1].backbone.parameters()).data.add_(1e-3)

    shared = Shared()
    train_from_config(make_config(world, method__name="vandal"), tmp_path / "vandal", shared=shared)
    assert_as_alone(make_config(world), tmp_path / "next", shared)
    assert fingerprint(seen[-1].backbone) != shared.start(make_config(world)).model.backbone_fingerprint


def test_no_run_is_given_what_another_has_trained(world: Path) -> None:
    shared = Shared()
    frozen = [shared.start(make_config(world, seed=seed)).model for seed in (0, 1)]
    assert frozen[0].backbone is frozen[1].backbone
    assert not any(p.requires_grad for p in frozen[0].backbone.parameters())
    for changes in ({"backbone__trainable": True}, {"experts__site": "full_ffn"}):
        one, other = (shared.start(make_config(world, **changes)).model for _ in range(2))
        addresses = {tensor.data_ptr() for tensor in one.state_dict().values()}
        assert not addresses & {tensor.data_ptr() for tensor in other.state_dict().values()}


def test_a_backbone_for_another_configuration_is_refused(world: Path) -> None:
    config = make_config(world)
    with pytest.raises(ValueError, match="pretrained is"):
        MultiTaskModel.from_pretrained(
            make_config(world, backbone__max_length=9).backbone,
            {"mood": ("bad", "good")},
            pretrained=Pretrained.load(config.backbone),
        )


# ---------------------------------------------------------------------- memory


def test_the_shelf_lets_the_least_recently_used_go() -> None:
    shelf = Shelf(10)
    for key, size in (("a", 4), ("b", 4), ("c", 2)):
        shelf.put(key, key.upper(), size)
    assert (shelf.get("a"), len(shelf), shelf.nbytes) == ("A", 3, 10)
    shelf.put("d", "D", 5)
    assert [shelf.get(key) for key in "abcd"] == ["A", None, None, "D"]
    assert shelf.nbytes == 9
    shelf.put("a", "new", 1)
    assert (shelf.get("a"), shelf.nbytes) == ("new", 6)
    shelf.put("large", "L", 99)
    assert ([shelf.get(key) for key in ("a", "d", "large")], shelf.nbytes) == ([None, None, "L"], 99)
    shelf.clear()
    assert (len(shelf), shelf.nbytes, shelf.get("large")) == (0, 0, None)


def test_what_is_not_sound_is_made_again() -> None:
    shelf, made = Shelf(10), iter("abc")

    def make() -> str:
        return next(made)

    for sound, expected in ((True, "a"), (True, "a"), (False, "b"), (True, "b")):
        assert shelf.kept(lambda: "key", make, len, (str.isdigit, str.isalpha)[sound]) == (
            "key",
            expected,
        )
    assert shelf.kept(lambda: None, make, len) == (None, "c")


def test_little_memory_changes_no_byte(world: Path, tmp_path: Path) -> None:
    shared = Shared(host_bytes=3000)
    for i in range(2):
        assert_as_alone(make_config(world, seed=i), tmp_path / str(i), shared)
        assert shared._data.nbytes <= 3000 or len(shared._data) == 1
        assert len(shared._backbones) == 1
    whole = Shared()
    whole.start(make_config(world)).sources(None)
    assert whole._data.nbytes > 3000


def test_features_on_a_device_are_kept_for_the_next_run_of_the_same_alone() -> None:
    shared = Shared()
    made = 0

    def make(nbytes: int) -> Any:
        nonlocal made
        made += 1
        return [SimpleNamespace(nbytes=nbytes), SimpleNamespace(nbytes=2 * nbytes)]

    first = shared._resident("a", lambda: make(10))
    assert shared._resident("a", lambda: make(10)) is first
    assert shared._features.nbytes == 30
    shared._resident("b", lambda: make(20))
    assert (shared._features.nbytes, len(shared._features)) == (60, 1)
    assert shared._resident("a", lambda: make(10)) is not first
    for _ in range(2):  # on the host: the files may change under them
        shared._resident("host", lambda: make(0))
    assert (made, len(shared._features)) == (5, 0)


def test_sources_are_told_apart_by_features_labels_and_type(world: Path) -> None:
    seen: list[Any] = []

    def keep(key: Any, make: Any) -> Any:
        seen.append(key)
        return make()

    def told(split: int = 0, **changes: Any) -> None:
        config = make_config(world, **changes)
        model, mixture = tiny_runs.load(config)
        parts = [tokenized(model, [task.train for task in mixture.tasks])]
        parts[0][split].labels[0] += split
        sources_of(model, parts, config.cache, keep=keep)

    for changes in ({}, {"seed": 1}, {"method__name": "gar"}):
        told(**changes)
    assert len(set(seen)) == 1
    told(split=1)
    others = ({"backbone__dtype": "float64"}, {"cache__dtype": "float16"}, {"backbone__max_length": 8})
    for changes in others:
        told(**changes)
    assert len(set(seen)) == 5


# ---------------------------------------------------------------------- digests


def test_a_file_is_read_again_when_it_may_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def reading(file: Path) -> str:
        read.append(file.name)
        return checksum(file)

    monkeypatch.setattr(files, "REMEMBERED", 2)
    remembered, clock = Checksums(reading), SimpleNamespace(time=lambda: 0.0)
    monkeypatch.setattr(files, "time", clock)
    path, now = tmp_path / "a", 0.0
    path.write_text("w1 w2")

    def look(seconds: float) -> bool:
        """Whether it was read at the time of its last change and ``seconds``; what is told is right."""
        nonlocal now
        now = max(path.stat().st_mtime, path.stat().st_ctime) + seconds
        clock.time = lambda: now
        before = len(read)
        assert remembered(path) == checksum(path)
        return len(read) > before

    assert [look(0.1), look(1.9), look(2.1), look(2.2), look(60)] == [True, True, True, False, False]
    rewrite(path, "w1", "w7")  # the same size and time: the inode's own time tells
    assert [look(60), look(60)] == [True, False]
    other = tmp_path / "other"
    other.write_text("w1 w7")
    os.replace(other, path)
    assert [look(60), look(60)] == [True, False]
    for name in ("b", "c"):
        (tmp_path / name).write_text(name)
        remembered(tmp_path / name)
    assert look(60)  # two later ones have taken its place


@pytest.mark.parametrize("part", [1, 7, 100, 1 << 26])
@pytest.mark.parametrize("size", [0, 1, 7, 99, 100, 101])
def test_the_checksum_of_parts_sees_every_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, size: int
) -> None:
    monkeypatch.setattr(files, "PART", part)
    monkeypatch.setattr(files, "BLOCK", 3)
    content = bytes(i * 37 % 256 for i in range(size))
    path = tmp_path / "file"
    changed = [content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in range(size)]
    found = set()
    for other in (content, content + b"\0", content[:-1], content + content, *changed):
        path.write_bytes(other)
        found.add(parts_checksum(path))
        parts = [
            hashlib.blake2b(other[i : i + part], digest_size=16).digest() for i in range(0, len(other), part)
        ]
        whole = b"".join([len(other).to_bytes(8, "little"), *parts])
        assert parts_checksum(path) == hashlib.blake2b(whole, digest_size=16).hexdigest()
    assert len(found) == len({content, content + b"\0", content[:-1], content + content, *changed})


def summed(tensor: torch.Tensor) -> int:
    """The sum of :func:`_bit_sums` by whole numbers of Python, for bytes in words of four."""
    words = np.frombuffer(tensor.contiguous().numpy().tobytes(), np.int32)
    total = 0
    for place, word in enumerate(words.tolist()):
        mixed = (place + 1) * -0x61C8864680B583EB % 2**64
        signed = mixed - 2**64 if mixed >= 2**63 else mixed
        total += word * ((signed ^ (signed >> 29)) | 1)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("block", [1, 5, 1 << 24])
def test_bit_sums_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(backbones, "BLOCK", block)
    tensors = [torch.randn(3, 7), torch.arange(6), torch.zeros(0), torch.randn(4, dtype=torch.float64)]
    assert _bit_sums(tensors) == [summed(tensor) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64])
@pytest.mark.parametrize("count", [1, 5, 8])
def test_every_flipped_bit_shows_in_the_sum(dtype: torch.dtype, count: int) -> None:
    tensor = (torch.arange(count) % 3).to(dtype)
    content = tensor.view(torch.uint8)
    seen = {_bit_sums([tensor])[0]}
    bits = 8 if dtype is not torch.bool else 1
    for byte in range(len(content)):
        for bit in range(bits):
            content[byte] ^= 1 << bit
            seen.add(_bit_sums([tensor])[0])
            content[byte] ^= 1 << bit
    assert len(seen) == 1 + bits * len(content)
    swapped = tensor.flip(0)
    assert torch.equal(swapped, tensor) or _bit_sums([swapped]) != _bit_sums([tensor])


def test_a_digest_is_computed_again_only_for_changed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; here a CPU plays its part."""
    module, computed = torch.nn.Linear(3, 4), []

    def computing(module: torch.nn.Module) -> str:
        computed.append(module)
        return fingerprint(module)

    monkeypatch.setattr(backbones, "_on_gpu", lambda tensors: True)
    monkeypatch.setattr(backbones, "fingerprint", computing)
    digest = Digest()
    assert digest(module) == digest(module) == fingerprint(module)
    assert len(computed) == 1
    module.weight.data[0, 0] += 1e-7
    assert digest(module) == fingerprint(module)
    assert len(computed) == 2
    module.weight.data = module.weight.data.view(-1).clone().view(2, 6)  # the same bytes
    assert digest(module) == fingerprint(module)
    assert digest(torch.nn.Linear(3, 4)) != digest(module)


# ---------------------------------------------------------------------- several threads


@pytest.mark.parametrize("threads", [1, 3])
def test_every_item_is_done_once_with_one_thread_of_torch(threads: int) -> None:
    before, seen = torch.get_num_threads(), []
    in_threads(lambda item: seen.append((item, torch.get_num_threads())), range(50), threads)
    assert sorted(seen) == [(i, 1) for i in range(50)]
    assert torch.get_num_threads() == before


def test_the_first_error_ends_the_work() -> None:
    before, begun = torch.get_num_threads(), []

    def work(item: int) -> None:
        begun.append(item)
        if item == 3:
            raise ValueError("the third")

    with pytest.raises(ValueError, match="the third"):
        in_threads(work, iter(range(10**9)), 2)
    assert len(begun) < 10**9
    assert torch.get_num_threads() == before


def test_features_have_the_same_bits_for_every_number_of_threads(world: Path, tmp_path: Path) -> None:
    """Several forwards of one model run at once, and read the states of their own."""
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            config = make_config(world, cache__directory=str(tmp_path / str(threads)))
            model, mixture = tiny_runs.load(config)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("gar.features.sources.TOKENS_PER_FORWARD", {"cpu": 8})
                sources_of(model, [tokenized(model, [task.train for task in mixture.tasks])], config.cache)
            entries = sorted((tmp_path / str(threads) / "features").glob("*/*.npy"))
            found.append({f"{path.parent.name}/{path.name}": path.read_bytes() for path in entries})
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 6


def test_entries_are_read_ahead_and_not_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tmp_path / "features" / "entry"
    entry.mkdir(parents=True)
    np.save(entry / "base.npy", np.ones(3, np.float32))
    (entry / "lost.npy").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(files, "RACY", -1.0)
    _cache.check_ahead([entry, tmp_path / "features" / "missing"])
    monkeypatch.setattr(_cache.remembered_checksum, "_of", lambda path: pytest.fail("read again"))
    assert _cache.remembered_checksum(entry / "base.npy") == parts_checksum(entry / "base.npy")


# ---------------------------------------------------------------------- a saved tokenizer


def test_a_saved_tokenizer_does_not_tell_what_was_tokenized(world: Path, tmp_path: Path) -> None:
    model, mixture = tiny_runs.load(make_config(world))
    model.save_pretrained(tmp_path / "before")
    tokenized(model, [mixture.tasks[1].train])
    model.predict("mood", ["w1 w2"])
    model.save_pretrained(tmp_path / "after")
    names = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert "tokenizer.json" in names
    for name in names:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes(), name
    shutil.rmtree(tmp_path / "before")
