"""Texts with groups: files, columns, draws, and what a row may hold."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gar import UserError
from gar.data import GroupedTexts, Mixture, Split, Task, grouped_mixture, read_grouped
from support.saved_moe import write_jsonl

ROWS: list[dict[str, Any]] = [{"text": f"text {i}", "source": "ab"[i % 2], "n": i % 3} for i in range(10)]


def by_group(found: GroupedTexts) -> dict[str, list[Any]]:
    texts: dict[str, list[Any]] = {name: [] for name in found.names}
    for text, group in zip(found.texts, found.groups, strict=True):
        texts[found.names[group]].append(text)
    return texts


def test_a_column_of_groups_is_found_by_its_name_or_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ROWS)
    assert by_group(read_grouped([path])) == {
        "a": [f"text {i}" for i in range(0, 10, 2)],
        "b": [f"text {i}" for i in range(1, 10, 2)],
    }
    named = read_grouped([path], group_by="n", text="source")
    assert named.names == ("0", "1", "2")
    assert by_group(named)["0"] == ["a", "b", "a", "b"]
    single = write_jsonl(tmp_path / "single.jsonl", [{"text": "x y"}])
    assert read_grouped([single]).names == ("single",)


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl.gz", "parquet", "txt"])
def test_every_format_gives_the_same(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"texts.{form}"
    texts = [row["text"] for row in ROWS]
    if form == "txt":
        path.write_text("\r\n".join(["", *texts, ""]))
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode()))
    elif form == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": texts}), path)
    else:
        with path.open("w", newline="") as file:
            csv.writer(file, delimiter="," if form == "csv" else "\t").writerows(
                [["text"], *([t] for t in texts)]
            )
    found = read_grouped([path])
    assert by_group(found) == {"texts": texts}
    assert found.notes == (("1 empty text left out",) if form == "txt" else ())


def test_several_files_and_directories_are_a_group_a_file(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    write_jsonl(tmp_path / "all" / "one.jsonl", ROWS)
    (tmp_path / "all" / "two.txt").write_text("x y")
    (tmp_path / "all" / "readme.md").write_text("no texts")
    found = read_grouped([tmp_path / "all"])
    assert (found.names, Counter(found.groups.tolist())) == (("one", "two"), {0: 10, 1: 1})
    # A column that is named comes first.
    with pytest.raises(UserError, match="no column 'source'"):
        read_grouped([tmp_path / "all"], group_by="source")


def test_a_large_group_is_drawn_evenly_and_alike_whatever_else_is_there(tmp_path: Path) -> None:
    rows = [{"text": f"text {i}", "group": "large"} for i in range(40)]
    alone = write_jsonl(tmp_path / "alone.jsonl", rows)
    both = [row for own in rows for row in (own, {"text": "x", "group": "z"})]
    mixed = write_jsonl(tmp_path / "mixed.jsonl", both)
    found = read_grouped([alone], max_texts=8, seed=3)
    assert found.notes == ("texts drawn by the seed: 8 of 40 (large)",)
    assert by_group(read_grouped([mixed], max_texts=8, seed=3))["large"] == found.texts
    numbers = [int(str(text).split()[1]) for text in found.texts]
    assert numbers == sorted(numbers)
    drawn = Counter(
        str(text) for seed in range(300) for text in read_grouped([alone], max_texts=8, seed=seed).texts
    )
    # Each with probability 8 / 40: 60 of 300, standard deviation 7.
    assert len(drawn) == 40
    assert max(abs(count - 60) for count in drawn.values()) < 28


def test_labels_are_kept_by_name(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "x", "label": 1.0},
        {"text": "y", "label": "good"},
        {"text": "z", "label": True},
    ]
    found = read_grouped([write_jsonl(tmp_path / "x.jsonl", rows)], label="label")
    assert found.labels == [("1", None), ("good", None), ("true", None)]
    with pytest.raises(
        UserError, match=r"line 1: no key 'lable'; found 'text', 'label'; did you mean 'label'"
    ):
        read_grouped([tmp_path / "x.jsonl"], label="lable")


def test_messages_are_texts(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    path = write_jsonl(tmp_path / "x.jsonl", [{"messages": chat}, {"messages": []}])
    found = read_grouped([path])
    assert found.texts == [chat]
    assert found.notes == ("1 empty text left out",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a\0b"}, "column 'text' holds a NUL"),
        ({"text": ["x"]}, "expected a list of messages with role and content"),
        ({"text": {"a": 1}}, "expected a string"),
        ({"text": "x", "group": ""}, "column 'group' is empty; expected a name"),
        ({"text": "x", "group": [1]}, r"holds \[1\] \(list\), expected a string or an integer"),
        ({"messages": [{"role": "user", "content": "a\0"}]}, "column 'messages' holds a NUL"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    first = (
        {"text": "fine", "group": "g"} if "text" in row else {"messages": [{"role": "user", "content": "x"}]}
    )
    path = write_jsonl(
        tmp_path / "x.jsonl", [first, {"group": "g", **row}] if "text" in row else [first, row]
    )
    with pytest.raises(UserError, match=rf"x.jsonl, line 2: .*{message}"):
        read_grouped([path])


def test_a_mixture_has_its_tasks_as_groups_and_pairs_joined() -> None:
    def task(name: str, pairs: bool) -> Task:
        split = Split([f"{name} {i}" for i in range(4)], np.arange(4) % 2, ["second"] * 4 if pairs else None)
        return Task(name, ("no", "yes"), split, split, ("a", "b") if pairs else ("a",))

    mixture = Mixture("m", (task("one", False), task("two", True)))
    found = grouped_mixture(mixture, labels=True)
    assert by_group(found) == {
        "one": [f"one {i}" for i in range(4)],
        "two": [f"two {i}\nsecond" for i in range(4)],
    }
    assert found.labels == [("no", 0), ("yes", 1)] * 4
    assert grouped_mixture(mixture).labels is None
    assert len(grouped_mixture(mixture, max_texts=3)) == 6
