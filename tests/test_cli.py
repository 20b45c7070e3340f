"""The command line: help, one clear line for every mistake, and the way from files to predictions."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from gar.cli.app import VERBS, run
from support import tiny_runs

FINISHED = ("method.name=gar", "optimizer.updates=40", "optimizer.learning_rate=0.03")
FIRST, SECOND = "w1 w2 w3", "w11 w14"


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture(scope="module")
def file(world: Path) -> Path:
    """A YAML file with paths relative to itself."""
    tree = tiny_runs.tree(world)
    for task in tree["mixture"]["tasks"]:
        task["train"], task["validation"] = Path(task["train"]).name, Path(task["validation"]).name
    tree["backbone"]["name"], tree["cache"]["directory"] = "./bert", "cache"
    path = world / "own.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def finished(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "gar"
    assert run(["train", str(file), *FINISHED, "--out", str(out)]) == 0
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command line that is refused with exit code 2."""
    capsys.readouterr()
    assert run([*arguments]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert "Traceback" not in errors
    return errors.removeprefix("error: ").rstrip("\n")


# ---------------------------------------------------------------------- help


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert run([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Usage" in text
    assert f"gar {verb}" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?\n", capsys.readouterr().out)


def test_no_verb_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    output, errors = capsys.readouterr()
    assert "Usage" in output
    assert errors == ""


def test_help_needs_no_model_library() -> None:
    code = (
        "import sys\nfrom gar.cli.app import run\ncode = run(['--help'])\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\nsys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], r"unknown command 'trian'; did you mean 'train'\?; see gar --help"),
        (["train"], r"Missing argument.*; see gar train --help"),
        (["train", "FILE", "--sed", "1"], r"No such option: --sed.*--seed.*; see gar train --help"),
        (
            ["train", "FILE", "--seed", "x"],
            r"Invalid value for '--seed'.*valid integer.*; see gar train --help",
        ),
        (["train", "FILE", "updates"], r"override 'updates': expected key\.sub=value"),
        (["train", "FILE", "optimizer.updats=3"], r"unknown key 'optimizer\.updats'.*'updates'"),
        (["train", "FILE", "optimizer.updates=many"], r"optimizer\.updates is 'many'"),
        (["train", "FILE", "method.name=garr"], r"method\.name: unknown name 'garr'.*did you mean 'gar'"),
        (["train", "FILE", "experts.top_k=9"], r"top_k is 9.*expected top_k <= count"),
        (["train", "FILE", "seed=-1"], r"seed is -1"),
        (["train", "FILE", "device=gpu"], r"device is 'gpu'; expected auto, cpu, cuda"),
        (["train", "FILE", "--device", "cuda:77"], r"device is 'cuda:77', but \d+ CUDA devices"),
        (["train", "FILE", "--resume"], r"--resume: which run\? name its directory with --out"),
        (["train", "FILE", "backbone.name=./nowhere"], r"backbone\.name.*nowhere.*no such directory"),
        (["train", "fiv"], r"'fiv' is no file, preset, registered mixture or task.*did you mean 'five'"),
        (
            ["train", "paper/roberta_head/five/garr"],
            r"no file, preset.*did you mean 'paper/roberta_head/five/gar'",
        ),
        (["train", "nowhere.yaml"], r"nowhere\.yaml: no such file"),
        (["predict", "nowhere", "text"], r"nowhere: no such directory"),
        (["predict", "RUN"], r"give either texts as arguments or --file"),
        (["predict", "RUN", "a", "--file", "x.csv"], r"give either texts as arguments or --file"),
        (["predict", "RUN", "a", "--format", "jsn"], r"--format: unknown name 'jsn'.*did you mean 'json'"),
        (["predict", "RUN", "a", "--task", "mod"], r"task: unknown name 'mod'.*did you mean 'mood'"),
        (["predict", "RUN", "a", "--task", "nli"], r"task nli takes pairs \(premise, hypothesis\), found 1"),
        (["predict", "RUN", " ", "--task", "mood"], r"a text is empty"),
        (["predict", "RUN", "--file", "nowhere.csv"], r"nowhere\.csv: no such file"),
        (["evaluate", "nowhere"], r"nowhere"),
        (["evaluate", "RUN", "--format", "xml"], r"--format"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    file: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"FILE": str(file), "RUN": str(finished)}
    line = refused(capsys, *(places.get(word, word) for word in arguments))
    assert re.search(expected, line), line
    assert os.listdir(tmp_path) == [], "nothing half-written"


def test_bad_data_is_refused_before_a_directory_is_made(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.csv").write_text("review,label\nw1,bad\nw2,goood\n", encoding="utf-8")
    tree = yaml.safe_load(file.read_text())
    tree["mixture"]["tasks"] = [
        {
            "name": "mood",
            "train": str(file.parent / "mood-train.csv"),
            "validation": "bad.csv",
            "text": "review",
        }
    ]
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    line = refused(capsys, "train", str(tmp_path / "bad.yaml"), "--out", str(tmp_path / "run"))
    assert "bad.csv, line 3" in line
    assert "did you mean 'good'" in line
    assert not (tmp_path / "run").exists()


def test_a_bug_keeps_its_traceback(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gar.training.sharing.load_mixture", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(["train", str(file), "--out", str(tmp_path / "run")])


# ---------------------------------------------------------------------- the way through


def test_paths_in_a_file_are_relative_to_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", os.path.relpath(file), "optimizer.updates=1", "--seed", "7", "--out", "x"]) == 0
    result = json.loads((tmp_path / "x" / "result.json").read_text())
    assert (result["seed"], result["updates"], result["mixture"]) == (7, 1, "tiny")
    assert "run directory: x" in capsys.readouterr().out
    assert (file.parent / "cache" / "features").is_dir()
    assert os.listdir(tmp_path) == ["x"]


def test_the_default_directory_names_mixture_method_and_seed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", str(file), "optimizer.updates=1", "--seed", "2"]) == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"tiny-gar-seed2-\d{8}-\d{6}", made.name)


def test_runs_that_start_in_the_same_second_have_their_own_directories(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260102-030405")
    for _ in range(3):
        assert run(["train", str(file), "optimizer.updates=1"]) == 0
    name = "tiny-gar-seed0-20260102-030405"
    assert sorted(os.listdir("runs")) == [name, f"{name}-2", f"{name}-3"]
    assert all((Path("runs") / made / "result.json").is_file() for made in os.listdir("runs"))


def test_a_run_that_never_began_leaves_no_directory(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", True
    )  # where no hub answers it is asked again
    assert run(["train", str(file), "backbone.name=nowhere"]) == 2
    assert not Path("runs").exists()
    Path("runs").mkdir()
    assert run(["train", str(file), "backbone.name=nowhere"]) == 2
    assert os.listdir("runs") == []  # it was there before
    Path("runs").rmdir()
    Path("runs").touch()
    assert run(["train", str(file)]) == 2
    assert "runs" in capsys.readouterr().err.splitlines()[-1]


def test_train_without_the_cache_reaches_the_same(file: Path, tmp_path: Path) -> None:
    results = []
    for n, more in enumerate(([], ["--no-cache", f"cache.directory={tmp_path / 'cache'}"])):
        out = tmp_path / str(n)
        assert run(["train", str(file), "method.name=gar", "--out", str(out), *more]) == 0
        results.append(json.loads((out / "result.json").read_text()))
    assert results[0]["accuracy"] == results[1]["accuracy"]
    assert results[0]["routing"]["load"] == pytest.approx(results[1]["routing"]["load"], abs=1e-5)
    assert not (tmp_path / "cache").exists()


def test_a_finished_run_is_refused_and_resumed_to_its_result(
    file: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(file), *FINISHED, "--out", str(finished)]
    assert "holds a finished run" in refused(capsys, *arguments)
    assert run([*arguments, "--resume"]) == 0
    assert "macro accuracy" in capsys.readouterr().out
    assert "seed: 0, found 3" in refused(capsys, *arguments, "--resume", "--seed", "3")


def test_resume_where_no_run_is_starts_one_and_says_so(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    assert run(["train", str(file), "optimizer.updates=1", "--out", out, "--resume"]) == 0
    assert f"{out}: no run to continue; a new one starts" in capsys.readouterr().err


def test_evaluate_gives_the_numbers_of_the_result(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = json.loads((finished / "result.json").read_text())
    capsys.readouterr()
    assert run(["evaluate", str(finished), "--format", "json", "--device", "cpu"]) == 0
    sections: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert sections["accuracy"] == result["accuracy"]
    for key, value in result["routing"].items():
        if isinstance(value, float | list):
            np.testing.assert_allclose(sections["routing"][key], value, 1e-6, 1e-9, err_msg=key)
    assert sections["routing"]["counts"] == result["routing"]["counts"]
    assert run(["evaluate", str(finished / "model"), "--no-cache"]) == 0
    assert f"{result['accuracy']['macro']:.4f}" in capsys.readouterr().out


def test_evaluate_notices_a_configuration_that_was_changed(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("group_size: 3", "group_size: 4"))
    for place in ("run", "run/model"):
        assert "config.yaml: its checksum differs" in refused(capsys, "evaluate", str(tmp_path / place))


# ---------------------------------------------------------------------- predictions


def predictions(capsys: pytest.CaptureFixture[str], finished: Path, *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(["predict", str(finished), "--format", "json", "--device", "cpu", *arguments]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_predict_texts(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = predictions(capsys, finished, FIRST, SECOND, "--task", "mood")
    assert [(row["task"], row["text"]) for row in rows] == [("mood", FIRST), ("mood", SECOND)]
    for row in rows:
        assert set(row["probabilities"]) == {"bad", "good"}
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-6)
        assert row["label"] == max(row["probabilities"], key=row["probabilities"].get)


def test_predictions_are_as_good_as_the_result_says(
    finished: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracy = json.loads((finished / "result.json").read_text())["accuracy"]["tasks"]
    with (world / "mood-dev.csv").open(encoding="utf-8") as rows:
        labels = {"mood": [row["label"] for row in csv.DictReader(rows)]}
    lines = (world / "nli-dev.jsonl").read_text(encoding="utf-8").splitlines()
    labels["nli"] = [str(json.loads(line)["label"]) for line in lines]
    for task, name in (("mood", "mood-dev.csv"), ("nli", "nli-dev.jsonl")):
        found = predictions(capsys, finished, "--file", str(world / name), "--task", task)
        right = [row["label"] == label for row, label in zip(found, labels[task], strict=True)]
        assert sum(right) / len(right) == pytest.approx(accuracy[task])


def test_predict_pairs(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = predictions(capsys, finished, FIRST, SECOND, SECOND, FIRST, "--task", "nli")
    assert [row["text"] for row in rows] == [[FIRST, SECOND], [SECOND, FIRST]]
    assert set(rows[0]["probabilities"]) == {"0", "1", "2"}


def test_predict_for_all_tasks_passes_over_those_of_another_form(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [row["task"] for row in predictions(capsys, finished, FIRST)] == ["mood"]
    assert [row["task"] for row in predictions(capsys, finished, FIRST, SECOND)] == ["mood", "mood", "nli"]


def test_predict_files(
    finished: Path, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = predictions(capsys, finished, FIRST, SECOND, "--task", "mood")
    (tmp_path / "new.csv").write_text(f"number,review\n1,{FIRST}\n2,{SECOND}\n", encoding="utf-8")
    for more in ([], ["--task", "mood"]):
        rows = predictions(capsys, finished, "--file", str(tmp_path / "new.csv"), *more)
        assert [row["label"] for row in rows] == [row["label"] for row in alone]
        for row, other in zip(rows, alone, strict=True):
            assert row["probabilities"] == pytest.approx(other["probabilities"], abs=1e-6)
    rows = predictions(capsys, finished, "--file", str(world / "nli-dev.jsonl"))
    assert [row["task"] for row in rows] == ["nli"] * 9
    line = refused(capsys, "predict", str(finished), "--file", str(tmp_path / "new.csv"), "--task", "nli")
    assert "no column 'premise'" in line


def test_every_format_says_the_same(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = predictions(capsys, finished, FIRST, SECOND)
    texts: dict[str, str] = {}
    for form in ("jsonl", "csv", "table"):
        assert run(["predict", str(finished), FIRST, SECOND, "--format", form, "--device", "cpu"]) == 0
        texts[form] = capsys.readouterr().out
    assert [json.loads(line) for line in texts["jsonl"].splitlines()] == expected
    rows = list(csv.DictReader(io.StringIO(texts["csv"])))
    assert [(row["task"], row["label"]) for row in rows] == [(row["task"], row["label"]) for row in expected]
    assert [row["pair"] for row in rows] == ["", "", SECOND]
    assert [json.loads(row["probabilities"]) for row in rows] == [row["probabilities"] for row in expected]
    for row in expected:
        assert f"{row['label']} {row['probabilities'][row['label']]:.3f}" in texts["table"]


def test_predict_reads_the_model_directory_too(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predictions(capsys, finished / "model", FIRST) == predictions(capsys, finished, FIRST)


# ---------------------------------------------------------------------- single tasks


@pytest.mark.parametrize(
    ("task", "columns", "extra"),
    [
        ("mrpc", ["sentence1", "sentence2"], "f1"),
        ("qqp", ["question1", "question2"], "f1"),
        ("cola", ["sentence"], "mcc"),
    ],
)
def test_a_single_task_counts_epochs_and_has_its_own_metric(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, columns: list[str], extra: str
) -> None:
    folder = tmp_path / "data" / task
    folder.mkdir(parents=True)
    for split, size in (("train", 20), ("validation", 8)):
        rows = [{**dict.fromkeys(columns, f"w{10 * (i % 2)} w{i % 9}"), "label": i % 2} for i in range(size)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    arguments = [
        *("train", task, "--data-dir", "data", "--out", "run"),
        *(f"backbone.name={world / 'bert'}", "backbone.max_length=16", f"cache.directory={world / 'cache'}"),
        *("experts.count=4", "experts.top_k=2", "optimizer.epochs=3", "mixture.batch_size=8", "device=cpu"),
    ]
    assert run(arguments) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["updates"] == 3 * 3
    assert result["mixture"] == task
    assert set(result["accuracy"]["extra"]) == {f"{task}_{extra}"}
    assert len(result["routing"]["load"]) == 4
    monkeypatch.chdir(world)
    assert run(["evaluate", str(tmp_path / "run")]) == 0, "the run remembers where its data are"
