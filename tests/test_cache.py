"""The frozen-prefix feature cache: the same training with and without it, and no way to be misled by it."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gar.config import CacheConfig, Config
from gar.data.tokenize import TokenizedSplit
from gar.errors import UserError
from gar.evaluation.measure import evaluate
from gar.features import Features, _cache, sources
from gar.features._cache import Writer, key_of, open_or_build
from gar.features.sources import CachedSource, RawSource, make_source, make_sources, prefix_facts, tokenized
from gar.model.multitask import MultiTaskModel
from gar.training import fit
from support import tiny_runs
from support.tiny_runs import largest_difference, make_config, small_file_system, weights
from support.waiting import until

FACTS = {"backbone": "abc", "site": "lora_ffn"}
TOKENS = TokenizedSplit(
    np.arange(9, dtype=np.int32), np.array([0, 4, 6, 9], np.int64), None, np.array([0, 1, 0], np.int64)
)


def fill(writer: Writer) -> None:
    """Three examples of 4, 2 and 3 tokens, out of order; the padding must not reach the file."""
    for i, length in ((2, 3), (0, 4), (1, 2)):
        x = torch.full((1, 5, 2), torch.inf)
        x[0, :length] = 10.0 * i + torch.arange(length).unsqueeze(1)
        writer.put(np.array([i]), x, torch.full((1, 2), float(i)))


def check(features: Features) -> None:
    assert features.offsets.tolist() == [0, 4, 6, 9]
    assert features.x is not None
    assert features.x[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 22]
    assert features.base.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert features.pooled


def entry_of(root: Path) -> Path:
    (entry,) = (path for path in (root / "features").iterdir() if path.is_dir())
    return entry


# ---------------------------------------------------------------------- the same training


@pytest.mark.parametrize("site", ["lora_ffn", "full_ffn", "lora_head"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_training_with_and_without_the_cache_agrees(world: Path, site: str, dtype: str) -> None:
    """In float64, where another order of sums stays below 1e-9; float16 features are rounded all the same.

    In float32 the two differ by rounding, which AdamW may amplify to its whole step where a gradient is zero.
    """
    found = []
    for enabled in (True, False):
        config = make_config(
            world,
            backbone__dtype="float64",
            method__name="gar",
            experts__site=site,
            cache__enabled=enabled,
            cache__dtype=dtype,
        )
        model, mixture = tiny_runs.load(config)
        source, _ = make_sources(model, mixture, config.cache)
        assert isinstance(source, CachedSource if enabled else RawSource)
        sections = fit(model, mixture, config)
        found.append((weights(model), sections))
    assert largest_difference(found[0][0], found[1][0]) < 1e-9
    assert found[0][1]["accuracy"] == found[1][1]["accuracy"]
    assert found[0][1]["routing"]["load"] == pytest.approx(found[1][1]["routing"]["load"], abs=1e-9)


def test_half_precision_features_are_rounded(world: Path) -> None:
    """The control: float16 features train another model than float32 ones, so both sides did round."""
    models = []
    for dtype in ("float32", "float16"):
        config = make_config(world, method__name="gar", cache__dtype=dtype)
        model, mixture = tiny_runs.load(config)
        fit(model, mixture, config)
        models.append(weights(model))
    assert largest_difference(*models) > 1e-5


def test_a_float64_model_has_float64_features(world: Path) -> None:
    found = []
    for enabled in (True, False):
        config = make_config(world, method__name="gar", cache__enabled=enabled, backbone__dtype="float64")
        model, mixture = tiny_runs.load(config)
        fit(model, mixture, config)
        found.append(weights(model))
    assert largest_difference(*found) < 1e-12


def test_a_trainable_backbone_has_no_cache(world: Path) -> None:
    config = make_config(world, backbone__trainable=True)
    model, mixture = tiny_runs.load(config)
    source, _ = make_sources(model, mixture, config.cache)
    assert isinstance(source, RawSource)


def test_a_second_start_computes_nothing(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(world, cache__directory=str(tmp_path))
    model, mixture = tiny_runs.load(config)
    make_sources(model, mixture, config.cache)
    monkeypatch.setattr(model, "prefix", lambda *tokens: pytest.fail("computed again"))
    evaluate(model, mixture, cache=config.cache)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("width", [1, 3, 384, 10**6])
def test_mapped_features_are_aligned(tmp_path: Path, dtype: str, width: int) -> None:
    """As torch's own buffers are: vector instructions then take the same path, and give the same bits."""

    def wide(writer: Writer) -> None:
        writer.put(np.arange(3), torch.ones(3, 4, width), torch.ones(3, width))

    features = open_or_build(tmp_path, FACTS, TOKENS, dtype, wide)
    assert features.x is not None
    assert features.x.data_ptr() % 64 == 0
    assert features.base.data_ptr() % 64 == 0


# ---------------------------------------------------------------------- the key


def key(config: Config, tokens: TokenizedSplit | None = None, model: MultiTaskModel | None = None) -> str:
    loaded, mixture = tiny_runs.load(config)
    model = model or loaded
    tokens = tokens or tokenized(model, [mixture.tasks[0].train])[0]
    return key_of({**prefix_facts(model), "dtype": config.cache.dtype}, tokens)


@pytest.mark.parametrize(
    "changes",
    [
        {"experts__site": "full_ffn"},
        {"backbone__pooling": "first"},
        {"backbone__max_length": 8},
        {"backbone__dtype": "float64"},
        {"backbone__random_weights": True},
        {"cache__dtype": "float16"},
        {"precision": "bfloat16"},
    ],
)
def test_every_fact_of_the_configuration_has_an_entry_of_its_own(
    world: Path, changes: dict[str, Any]
) -> None:
    assert key(make_config(world)) == key(make_config(world))
    assert key(make_config(world)) != key(make_config(world, **changes))


@pytest.mark.parametrize("change", [{"experts__count": 2}, {"seed": 3}, {"method__name": "gar"}])
def test_what_lies_behind_the_prefix_shares_the_entry(world: Path, change: dict[str, Any]) -> None:
    assert key(make_config(world)) == key(make_config(world, **change))


def test_one_changed_weight_has_another_entry(world: Path) -> None:
    model, _ = tiny_runs.load(make_config(world))
    with torch.no_grad():
        next(model.backbone.parameters())[0, 0] += 1e-7
    assert key(make_config(world), model=model) != key(make_config(world))


@pytest.mark.parametrize("site", ["lora_ffn", "full_ffn", "lora_head"])
def test_weights_changed_in_place_have_other_features(world: Path, tmp_path: Path, site: str) -> None:
    """A model that has used the cache and is changed then does not get the states of before."""
    config = make_config(world, experts__site=site, cache__directory=str(tmp_path))
    model, mixture = tiny_runs.load(config)
    splits, rows = [mixture.tasks[0].train], [(0, np.arange(4))]

    def states() -> tuple[torch.Tensor, ...]:
        options = (config.cache, CacheConfig(enabled=False))
        cached, raw = (make_source(model, splits, cache).state(rows) for cache in options)
        return tuple(s.base if s.base.dim() == 2 else s.base[s.mask] for s in (cached, raw))

    first, _ = states()
    weight = next(model.backbone.parameters())
    kept = weight.data.clone()
    weight.data.mul_(1.5)
    changed, computed = states()
    assert not torch.allclose(changed, first, atol=1e-3)
    assert torch.allclose(changed, computed, atol=1e-5)
    weight.data.copy_(kept)
    assert torch.equal(states()[0], first)
    assert len([entry for entry in (tmp_path / "features").iterdir() if entry.is_dir()]) == 2


def test_both_splits_are_found_by_one_fingerprint(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads all weights, so it is computed once a start."""
    computed: list[int] = []
    original = sources.prefix_facts

    def watched(model: MultiTaskModel) -> dict[str, Any]:
        computed.append(1)
        return original(model)

    monkeypatch.setattr(sources, "prefix_facts", watched)
    config = make_config(world)
    make_sources(*tiny_runs.load(config), config.cache)
    assert computed == [1]


def test_texts_order_and_type_ids_have_entries_of_their_own(world: Path) -> None:
    model, mixture = tiny_runs.load(make_config(world))
    (split,) = tokenized(model, [mixture.tasks[1].train])
    assert split.types is not None
    ids = split.ids.copy()
    ids[1] += 1
    changed = [
        replace(split, ids=ids),
        replace(split, types=1 - split.types),
        replace(split, types=None),
        replace(split, offsets=np.array([0, *split.offsets[2:]])),
        tokenized(model, [mixture.tasks[1].train.select(range(10, -1, -1))])[0],
    ]
    keys = {key_of(FACTS, tokens) for tokens in (split, *changed)}
    assert len(keys) == 1 + len(changed)
    assert key_of(FACTS, replace(split, labels=1 - split.labels)) == key_of(FACTS, split)


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_another_library_version_has_another_entry(
    world: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    before = key(make_config(world))
    monkeypatch.setattr(f"gar.features.sources.{library}.__version__", "0.0.1")
    assert key(make_config(world)) != before


# ---------------------------------------------------------------------- damage


def files_and_damages() -> Iterator[tuple[str, str]]:
    for name in ("x.npy", "base.npy", "offsets.npy", _cache.MANIFEST):
        for damage in ("flip first", "flip middle", "flip last", "truncate", "empty", "remove"):
            yield name, damage


def apply_damage(path: Path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    if damage.startswith("flip"):
        at = {"first": 0, "middle": len(content) // 2, "last": len(content) - 1}[damage.split()[1]]
        content[at] ^= 0x15
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[: len(content) - 3])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize(("name", "damage"), files_and_damages())
def test_a_damaged_entry_is_built_again(tmp_path: Path, name: str, damage: str) -> None:
    built: list[int] = []

    def counting(writer: Writer) -> None:
        built.append(1)
        fill(writer)

    check(open_or_build(tmp_path, FACTS, TOKENS, "float32", counting))
    check(open_or_build(tmp_path, FACTS, TOKENS, "float32", counting))
    assert len(built) == 1
    apply_damage(entry_of(tmp_path) / name, damage)
    check(open_or_build(tmp_path, FACTS, TOKENS, "float32", counting))
    assert len(built) == 2


def test_an_entry_of_another_layout_is_built_again(tmp_path: Path) -> None:
    open_or_build(tmp_path, FACTS, TOKENS, "float32", fill)
    manifest = entry_of(tmp_path) / _cache.MANIFEST
    tree = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**tree, "version": 1}))
    built: list[int] = []

    def again(writer: Writer) -> None:
        built.append(1)
        fill(writer)

    check(open_or_build(tmp_path, FACTS, TOKENS, "float32", again))
    assert built == [1]
    assert json.loads(manifest.read_text()) == tree


def test_any_flipped_byte_of_the_manifest_is_seen_or_harmless(tmp_path: Path) -> None:
    check(open_or_build(tmp_path, FACTS, TOKENS, "float32", fill))
    path = entry_of(tmp_path) / _cache.MANIFEST
    intact = path.read_bytes()
    for at in range(len(intact)):
        for bit in (0x01, 0x80):
            content = bytearray(intact)
            content[at] ^= bit
            path.write_bytes(content)
            features = _cache._open(path.parent)
            if features is not None:
                check(features)


# ---------------------------------------------------------------------- interruption and company

FORK = multiprocessing.get_context("fork")


def _build_slowly(root: Path, log: Path, wait: float) -> None:
    def slow(writer: Writer) -> None:
        with log.open("a") as file:
            file.write("begun\n")
        fill(writer)
        with log.open("a") as file:
            file.write("filled\n")
        time.sleep(wait)

    check(open_or_build(root, FACTS, TOKENS, "float32", slow))
    os._exit(0)


def test_a_killed_build_leaves_nothing_usable_and_is_cleared_away(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = FORK.Process(target=_build_slowly, args=(tmp_path, log, 600.0))
    child.start()
    until(lambda: log.exists() and "filled" in log.read_text())
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    names = [path.name for path in (tmp_path / "features").iterdir() if path.is_dir()]
    assert all(name.endswith(".partial") for name in names)
    assert names
    check(open_or_build(tmp_path, FACTS, TOKENS, "float32", fill))
    assert entry_of(tmp_path).name == key_of({**FACTS, "dtype": "float32"}, TOKENS)


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    children = [FORK.Process(target=_build_slowly, args=(tmp_path, log, 0.3)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert log.read_text().count("begun") == 1


# ---------------------------------------------------------------------- the disk and the numbers


def test_a_directory_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"feature cache .*Not a directory; expected a writable directory"):
        open_or_build(tmp_path / "file", FACTS, TOKENS, "float32", fill)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_one_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied; expected a writable directory"):
        open_or_build(tmp_path, FACTS, TOKENS, "float32", fill)


def test_a_disk_that_is_full_is_one_clear_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(self: Any, row: int, values: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_cache._Array, "put", no_space)
    with pytest.raises(UserError, match=r"No space left on device.*cache.directory=DIR, or --no-cache"):
        open_or_build(tmp_path, FACTS, TOKENS, "float32", fill)
    assert not [path for path in (tmp_path / "features").iterdir() if path.is_dir()]
    monkeypatch.undo()
    check(open_or_build(tmp_path, FACTS, TOKENS, "float32", fill))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "disk", "64k") as where:
        yield where


def test_a_file_system_that_is_full_is_one_clear_error(world: Path, small_disk: Path) -> None:
    """A real one: a memory-mapped file would end the process with a bus error here."""
    config = make_config(world, cache__directory=str(small_disk))
    model, mixture = tiny_runs.load(config)
    with pytest.raises(UserError, match="No space left on device"):
        make_sources(model, mixture, config.cache)
    assert not list((small_disk / "features").glob("*.partial"))


def overflowing(world: Path) -> tuple[MultiTaskModel, Callable[[CacheConfig], None]]:
    model, mixture = tiny_runs.load(make_config(world))
    original = model.prefix

    def large(*tokens: Any) -> Any:
        state = original(*tokens)
        return replace(state, base=state.base * 1e6)

    model.prefix = large  # type: ignore[method-assign, assignment]

    def run(options: CacheConfig) -> None:
        source = make_source(model, [mixture.tasks[0].train], options)
        source.state([(0, np.arange(4))])

    return model, run


@pytest.mark.parametrize("enabled", [True, False])
def test_states_beyond_half_precision_are_refused(world: Path, tmp_path: Path, enabled: bool) -> None:
    _, run = overflowing(world)
    run(CacheConfig(directory=str(tmp_path), enabled=enabled))
    with pytest.raises(UserError, match=r"do not fit float16 .*expected cache.dtype=float32"):
        run(CacheConfig(directory=str(tmp_path), enabled=enabled, dtype="float16"))


def test_bytes_that_read_back_otherwise_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cache, "_open", lambda entry: None)
    with pytest.raises(UserError, match="the disk may be failing"):
        open_or_build(tmp_path, FACTS, TOKENS, "float32", fill)
