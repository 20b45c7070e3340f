"""The rule that chooses the quickstart's tasks, on tiny tasks and a tiny encoder."""

from __future__ import annotations

import csv
import io
import json
import random
import runpy
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from gar.data import Split, registry
from support import tiny_runs

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "learnable.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    if not SCRIPT.is_file():
        pytest.skip("not a source checkout")
    return runpy.run_path(str(SCRIPT), run_name="learnable")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    directory = tiny_runs.make_world(tmp_path_factory.mktemp("world")) / "bert"
    return AutoTokenizer.from_pretrained(directory), AutoModel.from_pretrained(directory).eval()


def examples(count: int, learnable: bool, choices: tuple[str, ...] = ("no", "yes")) -> list[dict[str, Any]]:
    """Distinct texts of tiny_runs' words; a learnable label shows in which words a text has."""
    numbers = random.Random(0)
    made = []
    for number in range(count):
        label = numbers.randrange(2)
        low = 15 * label if learnable else 0
        words = [f"w{numbers.randrange(low, 15 if learnable and not label else 30)}" for _ in range(9)]
        text = " ".join([*words, *(f"w{digit}" for digit in f"{number:04d}")])
        made.append({"input": text, "target_scores": {c: float(i == label) for i, c in enumerate(choices)}})
    return made


def archive(path: Path, tasks: dict[str, dict[str, Any]]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in tasks.items():
            data = json.dumps(content).encode()
            member = tarfile.TarInfo(f"bigbench-1.0.0/bigbench/benchmark_tasks/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def test_the_whole_rule(
    script: dict[str, Any],
    encoder: tuple[Any, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = {"keywords": ["multiple choice", "common sense"]}
    easy = {"examples": examples(150, learnable=True), **facts}
    tasks: dict[str, dict[str, Any]] = {
        "easy/task.json": easy,
        "hard/task.json": {"examples": examples(150, learnable=False), **facts},
        "small/task.json": {"examples": examples(60, learnable=True), **facts},
        "many/easy_de/task.json": easy,
        "pixels/task.json": {**easy, "keywords": ["non-language"]},
        "open/task.json": {"examples": [{"input": "w1", "target": "w2"}]},
        "programmatic/task.json": {},
        "easy/README.md": {},
    }
    monkeypatch.setitem(script["main"].__globals__, "load_tokenizer", lambda config: encoder[0])
    monkeypatch.setitem(script["main"].__globals__, "load_backbone", lambda config: encoder[1])
    monkeypatch.setitem(script["main"].__globals__, "VALIDATION", 20)
    script["main"](archive=archive(tmp_path / "bigbench.tar.gz", tasks), out=tmp_path / "found.csv")
    text = (tmp_path / "found.csv").read_text(encoding="utf-8")
    rows = {row["folder"]: row for row in csv.DictReader(text.splitlines())}
    assert {folder: row["verdict"] for folder, row in rows.items()} == {
        "easy": "chosen",
        "hard": "not learnable",
        "small": "validation under 20",
        "many/easy_de": "not English",
        "pixels": "no language",
    }
    assert rows["easy"]["skill"] == "common sense"
    assert (rows["easy"]["train"], rows["easy"]["validation"]) == ("120", "30")
    assert float(rows["easy"]["probe"]) >= float(rows["easy"]["majority"]) + 0.05
    assert rows["small"]["probe"] == ""
    assert "| easy | easy | common sense | 2 | 120 | 30 |" in capsys.readouterr().out


def test_what_can_be_read(script: dict[str, Any]) -> None:
    choices = script["shared_choices"]
    assert choices(examples(3, True, ("b", "a"))) == ("b", "a")
    assert choices([]) == ()
    assert choices([*examples(3, True), {"input": "w1", "target": "yes"}]) == ()
    assert choices([*examples(3, True), *examples(3, True, ("no", "maybe"))]) == ()
    assert choices([{"input": "w1", "target_scores": {"no": 1.0, "yes": 1.0}}]) == ()


def test_the_probes_features_are_the_mean_of_a_texts_own_states(
    script: dict[str, Any], encoder: tuple[Any, Any]
) -> None:
    texts = ["w1", "w2 w3 w4 w5", "w1 w2s", "w9 w8 w7 w6 w5 w4"]
    found = script["pooled"](Split(texts, np.zeros(len(texts), np.int64)), *encoder)
    tokenizer, model = encoder
    for text, row in zip(texts, found, strict=True):
        states = model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0]
        mean = sum(state.detach().numpy().astype(np.float64) for state in states) / len(states)
        np.testing.assert_allclose(row, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("met", "chosen"),
    [
        ([("a", 1), ("a", 2), ("b", 3), ("c", 4), ("d", 5)], ["a1", "b3", "c4", "d5"]),
        ([("a", 2), ("a", 1), ("b", 3), ("c", 4)], ["a1", "a2", "b3", "c4"]),  # too few skills: the next ones
        ([("a", 2), ("a", 1)], ["a1", "a2"]),
        ([], []),
    ],
)
def test_one_of_every_skill_the_shortest_first(
    script: dict[str, Any], met: list[tuple[str, int]], chosen: list[str]
) -> None:
    candidate = script["Candidate"]
    found = [candidate(f"{s}{t}", f"{s}{t}", s, 2, 9, 9, float(t), verdict="met") for s, t in met]
    unlearnable = candidate("a0", "a0", "a", 2, 9, 9, 0.5, verdict="not learnable")
    marked = script["marked"]([*found, unlearnable])
    assert [each.folder for each in marked if each.verdict == "chosen"] == chosen
    assert len(marked) == len(met) + 1


def test_registered_tasks_are_read_under_their_names(script: dict[str, Any], tmp_path: Path) -> None:
    fever = registry().tasks["fever"]
    content = {"examples": examples(5, True, ("true", "false"))}
    packed = archive(
        tmp_path / "a.tar.gz", {"fact_checker/fever/task.json": content, "new/one/task.json": content}
    )
    (known, _), (new, _) = script["readable"](packed)
    assert known == fever
    assert (new.name, new.labels, new.bigbench) == ("new_one", ("true", "false"), "new/one")
