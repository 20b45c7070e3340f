"""Data in memory: what is refused before a model sees it, and what tells the same data apart from other."""

from __future__ import annotations

import gzip
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from gar.config import MixtureConfig, TaskConfig
from gar.data import Mixture, Split, Task, check_mixture, identity, load_mixture
from gar.errors import UserError


class Facts(NamedTuple):
    labels: tuple[str, ...]
    text: tuple[str, ...] = ("text",)


MODEL = {
    "mood": Facts(("bad", "good")),
    "nli": Facts(("no", "maybe", "yes"), ("premise", "hypothesis")),
}


def split(labels: Any = (0, 1, 1), pairs: bool = False, texts: Any = None) -> Split:
    texts = [f"text {i}" for i in range(len(labels))] if texts is None else texts
    return Split(texts, np.array(labels), [f"pair {i}" for i in range(len(labels))] if pairs else None)


def mood(**changes: Any) -> Task:
    return replace(Task("mood", ("bad", "good"), split(), split((1, 0))), **changes)


def nli(**changes: Any) -> Task:
    three = split((0, 1, 2), pairs=True)
    return replace(Task("nli", MODEL["nli"].labels, three, three, MODEL["nli"].text), **changes)


def refusal(*tasks: Task) -> str:
    with pytest.raises(UserError) as caught:
        check_mixture(MODEL, Mixture("tiny", tasks))
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_a_mixture_that_fits() -> None:
    check_mixture(MODEL, Mixture("tiny", (mood(), nli())))
    check_mixture(MODEL, Mixture("one of them", (nli(text=("question", "answer")),)))


def test_tasks_and_labels_must_be_the_model_s() -> None:
    assert "task: unknown name 'moood'" in (message := refusal(mood(name="moood")))
    assert "did you mean 'mood'" in message
    swapped = refusal(mood(labels=("good", "bad")))
    assert swapped == "task mood: the model's labels are bad, good, in this order; the data have good, bad"
    assert "the data have bad, fine" in refusal(mood(labels=("bad", "fine")))
    assert "the data have bad, good, best" in refusal(mood(labels=("bad", "good", "best")))
    pair = mood(text=("a", "b"), train=split(pairs=True), validation=split(pairs=True))
    assert refusal(pair) == "task mood: the model takes one text (text), the data have a pair of texts (a, b)"


@pytest.mark.parametrize("which", ["train", "validation"])
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (split((0, -100)), "example 1: label -100 is no class, as in 1 of 2 examples; expected 0 to 1"),
        (split((-1, 0, -1)), "example 0: label -1 is no class, as in 2 of 3 examples"),
        (split((0, 1, 2)), "example 2: label 2 is no class"),
        (split(()), "has no examples"),
        (split(pairs=True), "has pairs, but text names one"),
        (split(texts=["a", 5, "c"]), "example 1: text is 5 (int), expected a string"),
        (split(texts=["a", None, "c"]), "example 1: text is None"),
        (split(texts=["a", "b", "\ud800"]), "example 2: the text holds the lone surrogate U+D800"),
        (split(texts=["a", "b\0", "c"]), "example 1: the text holds a NUL"),
    ],
)
def test_both_splits_are_checked(which: str, broken: Split, reason: str) -> None:
    assert f"task 'mood', {which}" in (message := refusal(mood(**{which: broken})))
    assert reason in message


@pytest.mark.parametrize("which", ["train", "validation"])
def test_pairs_are_checked(which: str) -> None:
    assert "has no pairs, but text names two" in refusal(nli(**{which: split((0, 1, 2))}))
    broken = Split(["a", "b"], np.array([0, 1]), ["a", "\ud800"])
    assert "example 1: the text holds" in refusal(nli(**{which: broken}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "a\nb"}, "U+000A"),
        ({"name": ""}, "blank"),
        ({"labels": ("one",)}, "two or more"),
        ({"labels": ("a", "a")}, "all distinct"),
        ({"labels": (0, 1)}, "label name 0 (int)"),
        ({"labels": ("a", "b\n")}, "U+000A"),
        ({"labels": ("a", " ")}, "blank"),
        ({"text": ()}, "names 0 fields"),
        ({"text": ("a", "b", "c")}, "names 3 fields"),
    ],
)
def test_a_task_s_own_names(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        mood(**changes).check()
    assert reason in str(caught.value)
    assert str(caught.value).isprintable()


def test_the_documented_mixture() -> None:
    text = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
    (block,) = [part for part in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "Split(" in part]
    names: dict[str, Any] = {}
    exec(block, names)
    check_mixture({"mood": Facts(("bad", "good"))}, names["mixture"])


def test_a_mixture_s_name() -> None:
    with pytest.raises(UserError, match="mixture 'a"):
        Mixture("a\nb", (mood(),)).check()


def test_labels_become_int64() -> None:
    for labels in ([0, 1], np.array([0, 1], np.int32), np.array([False, True]), torch.tensor([0, 1])):
        found = Split(["a", "b"], labels).labels  # type: ignore[arg-type]
        assert found.dtype == np.int64
        assert found.tolist() == [0, 1]
    kept = np.array([0, 1])
    assert Split(["a", "b"], kept).labels is kept
    for wrong in (np.array([0.0, 1.0]), np.array(["a", "b"])):
        with pytest.raises(UserError, match="expected integers"):
            Split(["a", "b"], wrong)
    for shape in (np.array([0]), np.array([[0], [1]])):
        with pytest.raises(UserError, match="one length"):
            Split(["a", "b"], shape)
    assert Split(("a", "b"), kept, ("c", "d")).pairs == ["c", "d"]  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------
# Fingerprints and identities
# --------------------------------------------------------------------------------------------------


def test_fingerprints_see_all_of_the_content() -> None:
    base = nli()
    same = nli(text=("other", "names"), notes=("a note",), extra=("f1",))
    assert base.fingerprint() == same.fingerprint()
    part = base.train
    others = [
        nli(labels=("no", "yes", "maybe")),
        nli(train=part.select([1, 0, 2])),
        nli(train=replace(part, labels=np.array([0, 1, 1]))),
        nli(train=replace(part, texts=["text 0", "text 1", "text 3"])),
        nli(train=replace(part, pairs=["pair 0", "pair 1", "pair 3"])),
        nli(train=Split(part.pairs or [], part.labels, part.texts)),
        nli(validation=part.select([0, 1])),
        nli(train=replace(part, texts=["text 0text 1", "", "text 2"])),
        nli(train=replace(part, pairs=None)),
    ]
    others.append(nli(train=replace(part, texts=["text 0", "text 1", "\ud800"])))  # refused elsewhere
    found = {task.fingerprint() for task in (base, *others)}
    assert len(found) == 1 + len(others)


def test_fingerprints_of_mixtures_see_names_and_order() -> None:
    one = Mixture("a", (mood(), nli()))
    assert one.fingerprint() == Mixture("b", (mood(), nli()), 4, 2).fingerprint()
    assert one.fingerprint() != Mixture("a", (nli(), mood())).fingerprint()
    assert one.fingerprint() != Mixture("a", (mood(name="tone"), nli())).fingerprint()
    # Written down: it is stored with runs, and must not change between releases or machines.
    assert mood().fingerprint() == "b0f28608ca352a99b26ca6c45271c137"


def write_files(directory: Path, last: str = "b") -> TaskConfig:
    directory.mkdir()
    (directory / "train.csv").write_text("text,label\nx,a\ny,b\n")
    (directory / "dev.csv").write_text(f"text,label\nx,a\ny,{last}\n")
    return TaskConfig(name="mood", train=str(directory / "train.csv"), validation=str(directory / "dev.csv"))


def identity_of(task: TaskConfig | str, data_dir: Path | None = None, **options: Any) -> str:
    (found,) = identity(MixtureConfig(tasks=(task,), **options), data_dir).values()
    return found


def test_identity_is_the_content_of_files_wherever_they_lie(tmp_path: Path) -> None:
    task = write_files(tmp_path / "one")
    base = identity_of(task)
    assert base == identity_of(write_files(tmp_path / "two"))
    assert base == identity_of(task.model_copy(update={"name": "x"}))
    assert base != identity_of(write_files(tmp_path / "three", last="a"))
    # What the configuration says is not the data's.
    assert base == identity_of(task.model_copy(update={"drop_empty": True}), max_train_examples=1)
    tsv = tmp_path / "one" / "train.tsv"
    tsv.write_bytes((tmp_path / "one" / "train.csv").read_bytes())
    assert base != identity_of(task.model_copy(update={"train": str(tsv)})), "read in another way"
    other = write_files(tmp_path / "four", last="a")
    swapped = other.model_copy(update={"train": other.validation, "validation": other.train})
    assert identity_of(other) != identity_of(swapped)


def test_identity_sees_a_file_that_changed(tmp_path: Path) -> None:
    task = write_files(tmp_path / "one")
    base = identity_of(task)
    path = Path(str(task.train))
    before = path.stat()
    path.write_text("text,label\nx,b\ny,a\n")  # of the same size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert identity_of(task) != base


def test_identity_of_other_sources(tmp_path: Path) -> None:
    hub = TaskConfig(name="h", hub="org/data")
    changes: list[dict[str, Any]] = [
        {},
        {"hub": "org/other"},
        {"hub_config": "b"},
        {"train_split": "all"},
        {"validation_split": "test"},
    ]
    assert len({identity_of(hub.model_copy(update=change)) for change in changes}) == len(changes)
    assert identity_of("rte") != identity_of("cb")
    assert identity_of("fever") != identity_of("vitaminc")
    (tmp_path / "rte").mkdir()
    for name in ("train", "validation"):
        row = json.dumps({"sentence1": "a", "sentence2": name, "label": 0}).encode()
        (tmp_path / "rte" / f"{name}.jsonl.gz").write_bytes(gzip.compress(row, mtime=0))
    local = identity_of("rte", tmp_path)
    assert local != identity_of("rte")
    assert identity_of("fever", tmp_path) == identity_of("fever"), "BIG-bench is never read from data_dir"
    with pytest.raises(UserError, match="no such directory for task 'cb'"):
        identity_of("cb", tmp_path)


def test_identity_refuses_what_loading_refuses(tmp_path: Path) -> None:
    task = write_files(tmp_path / "one")
    for change, reason in (({"train": None}, "no training data"), ({"train": "x.csv"}, "no such file")):
        with pytest.raises(UserError, match=reason):
            identity_of(task.model_copy(update=change))
    with pytest.raises(UserError, match="mixture has no tasks"):
        identity(MixtureConfig())


def test_the_same_content_has_the_same_fingerprint(tmp_path: Path) -> None:
    one, two = (load_mixture(MixtureConfig(tasks=(write_files(tmp_path / name),))) for name in ("a", "b"))
    assert one.fingerprint() == two.fingerprint()
    one.check()


def test_an_unknown_task_metric_is_told_before_training() -> None:
    split = Split(["a", "b"], np.array([0, 1]))
    task = Task("mood", ("bad", "good"), split, split, extra=("mcc", "f2"))
    with pytest.raises(UserError, match=r"extra: unknown name 'f2'; expected one of f1, mcc"):
        task.check()
