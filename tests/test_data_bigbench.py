"""BIG-bench on a tiny archive of the same layout; pip is replaced, nothing is downloaded."""

import hashlib
import io
import json
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gar.data import _bigbench as bigbench
from gar.data import load, load_task, overlap, registry
from gar.data._identity import contents
from gar.data.registry import find_task
from gar.errors import UserError


def examples(labels, n=50):
    """Texts with duplicates; the label is the best-scored choice."""
    return [
        {
            "input": f"text {i % 40}",
            "target_scores": {name: float(i % len(labels) == k) for k, name in enumerate(labels)},
        }
        for i in range(n)
    ]


def archive(path, without=()):
    with tarfile.open(path, "w:gz") as tar:
        for task in registry().tasks.values():
            if task.bigbench and task.name not in without:
                add(
                    tar,
                    f"{task.bigbench}/task.json",
                    json.dumps({"examples": examples(task.labels)}).encode(),
                )
        add(tar, "other/task.json", b"{}")
    return path


def add(tar, name, data):
    member = tarfile.TarInfo(f"bigbench-1.0.0/bigbench/benchmark_tasks/{name}")
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def trust(monkeypatch, path):
    monkeypatch.setattr(bigbench, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Stands in for pip; the list counts the downloads."""
    source = archive(tmp_path / "source.tar.gz")
    trust(monkeypatch, source)
    calls = []

    def download(directory):
        calls.append(directory)
        target = directory / "bigbench-1.0.0.tar.gz"
        target.write_bytes(source.read_bytes())
        return target

    monkeypatch.setattr(bigbench, "download", download)
    return calls


def test_one_download_serves_every_mixture(pip, tmp_path):
    cache = tmp_path / "cache"
    mixture = load("bigbench_five", cache_dir=cache)
    load("bigbench_eight", cache_dir=cache)
    assert len(pip) == 1
    assert mixture.tasks[0].labels == ("True", "False", "Neither")
    kept = sorted(path.name for path in (cache / "bigbench-1.0.0").iterdir())
    assert "fact_checker--fever.json" in kept
    assert (
        len(kept) == 10 + 1
    )  # the tasks and the lock: no archive, no partial files, nothing else of the archive


def test_split_is_disjoint_fixed_and_a_fifth(pip, tmp_path):
    task, again = (load_task("fever", cache_dir=tmp_path) for _ in range(2))
    assert overlap(task) == 0
    assert task.validation.texts == again.validation.texts
    assert len(set(task.validation.texts)) == 8
    assert len(task.train) + len(task.validation) == 50
    # Written down, so that neither a new numpy nor a new release of ours moves the split.
    assert set(task.validation.texts) == {f"text {i}" for i in (7, 10, 12, 17, 22, 25, 32, 35)}


def test_split_depends_on_the_task(pip):
    texts = [f"text {i}" for i in range(100)]
    assert bigbench.validation_inputs(texts, "fever") != bigbench.validation_inputs(texts, "winowhy")


def test_parallel_users_download_once(pip, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda name: load_task(name, cache_dir=tmp_path), ["fever", "winowhy", "vitaminc", "fever"]
            )
        )
    assert len(pip) == 1


def test_an_archive_put_by_hand_is_used_and_kept(pip, tmp_path):
    folder = tmp_path / "cache" / "bigbench-1.0.0"
    folder.mkdir(parents=True)
    (tmp_path / "source.tar.gz").rename(folder / "bigbench-1.0.0.tar.gz")
    load_task("fever", cache_dir=tmp_path / "cache")
    assert not pip
    assert (folder / "bigbench-1.0.0.tar.gz").is_file()


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({"true": 1, "false": 0, "maybe": 0}, r"example 51: choices \['false', 'maybe', 'true'\], expected"),
        ({"true": 1, "false": 1}, "example 51: true and false score equally"),
    ],
)
def test_choices_must_be_shared_and_decided(tmp_path, scores, message):
    folder = tmp_path / "bigbench-1.0.0"
    folder.mkdir()
    rows = [*examples(("true", "false")), {"input": "x", "target_scores": scores}]
    (folder / "fact_checker--fever.json").write_text(json.dumps({"examples": rows}))
    with pytest.raises(UserError, match=message):
        load_task("fever", cache_dir=tmp_path)


def test_bad_archives(pip, tmp_path, monkeypatch):
    source = tmp_path / "source.tar.gz"
    whole = source.read_bytes()
    source.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="SHA-256"):
        load_task("fever", cache_dir=tmp_path)
    trust(monkeypatch, source)
    with pytest.raises(UserError, match="not a readable archive"):
        load_task("fever", cache_dir=tmp_path)
    trust(monkeypatch, archive(source, without=["winowhy"]))
    with pytest.raises(UserError, match=r"has no .*winowhy"):
        load_task("fever", cache_dir=tmp_path / "again")


def test_pip_failure_says_what_to_do(tmp_path, monkeypatch):
    stderr = "WARNING: Retrying\nERROR: No matching distribution found for bigbench==1.0.0\n"
    failed = subprocess.CompletedProcess([], 1, stderr=stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        UserError, match=r"\(No matching distribution .*\); check the network .* put bigbench-1.0.0.tar.gz"
    ):
        load_task("fever", cache_dir=tmp_path)
    assert [path.name for path in (tmp_path / "bigbench-1.0.0").iterdir()] == ["lock"]


def test_exported_tasks_stand_in_also_where_runs_share_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of a sweep ask for a task's digest before they read it: nothing may be fetched for that."""
    folder = tmp_path / "data" / "fever"
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text('{"input": "a claim", "label": "Supports"}\n')

    def fetch(*_: object) -> Path:
        raise AssertionError("fetched")

    monkeypatch.setattr(bigbench, "fetch", fetch)
    entry = find_task("fever")
    here = contents(entry, tmp_path / "data", tmp_path)
    (folder / "train.jsonl").write_text('{"input": "another claim", "label": "Supports"}\n')
    assert contents(entry, tmp_path / "data", tmp_path) != here
    with pytest.raises(AssertionError, match="fetched"):
        contents(entry, None, tmp_path)
