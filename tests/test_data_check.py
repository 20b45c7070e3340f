"""`gar data ls` and `gar data check`, with a small tokenizer of our own."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import gar.model.backbone
from gar.cli.data import app
from gar.data import Split, cache_root, encode_lengths, load
from gar.errors import UserError

runner = CliRunner()


def word_tokenizer(pair_form=True):
    """One token a word, framed as by BERT, or bare as by a decoder."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if not pair_form:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", model_max_length=8)
    frame = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B [SEP]"}
    tokenizer.post_processor = processors.TemplateProcessing(
        **frame, special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        sep_token="[SEP]",
        cls_token="[CLS]",
        model_max_length=8,
    )


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(gar.model.backbone, "load_tokenizer", lambda config: word_tokenizer())
    long = "word " * 30
    (tmp_path / "train.csv").write_text(f"review,mood\none two,good\nthree,bad\n{long},bad\n")
    (tmp_path / "dev.csv").write_text("review,mood\none two,good\nfour,bad\n")
    path = tmp_path / "own.yaml"
    path.write_text(
        "backbone: {max_length: 16}\n"
        "mixture:\n  tasks:\n"
        "    - {name: mood, train: train.csv, validation: dev.csv, text: review, label: mood}\n"
    )
    return path


def test_lengths_are_those_before_truncation():
    one = Split(["a b", "c " * 20], np.array([0, 1]))
    two = Split(["a b", "c"], np.array([0, 1]), ["d", "e f"])
    assert encode_lengths(word_tokenizer(), one).tolist() == [4, 22]
    assert encode_lengths(word_tokenizer(), two).tolist() == [6, 6]
    assert encode_lengths(word_tokenizer(pair_form=False), two).tolist() == [3, 3]


def test_check_json(own):
    result = runner.invoke(app, ["check", str(own), "--format", "json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["mixture"], report["max_length"]) == ("mood", 16)
    task = report["tasks"][0]
    assert task["overlap"] == 1
    train = {
        "rows": 3,
        "labels": {"bad": 2, "good": 1},
        "tokens_mean": 13.0,
        "tokens_max": 32,
        "truncated": 1,
    }
    assert train.items() <= task["train"].items()
    assert task["validation"]["truncated"] == 0


def test_check_notes_dropped_validation_rows(own, tmp_path):
    (tmp_path / "dev.csv").write_text("review,mood\none two,good\n,bad\nfour,bad\n")
    own.write_text(own.read_text().replace("label: mood}", "label: mood, drop_empty: true}"))
    note = "mood validation: dropped 1 empty of 3 rows; it is measured on the other 2"
    result = runner.invoke(app, ["check", str(own), "--format", "json"])
    assert json.loads(result.stdout)["notes"] == [note]
    result = runner.invoke(app, ["check", str(own)], env={"COLUMNS": "120"})
    assert f"note: {note}" in result.stdout


def test_check_table_and_overrides(own):
    result = runner.invoke(app, ["check", str(own), "backbone.max_length=40"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for part in (
        "mood",
        "truncated at 40",
        "bad 2",
        "good 1",
        "0 (0.0%)",
        "warning: 1 of 2 validation inputs",
    ):
        assert part in result.stdout


def test_check_a_registered_task_from_a_data_dir(own, tmp_path):
    (tmp_path / "data" / "sst2").mkdir(parents=True)
    for split in ("train", "validation"):
        rows = [{"sentence": f"{split} {i}", "label": i % 2} for i in range(4)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "data" / "sst2" / f"{split}.jsonl").write_text(text)
    result = runner.invoke(app, ["check", "SST-2", "--data-dir", str(tmp_path / "data"), "--format", "json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tasks"][0]["train"]["labels"] == {"negative": 2, "positive": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["fivee"], "did you mean 'five'"), (["absent.yaml"], "absent.yaml: no such file")],
)
def test_check_mistakes_are_user_errors(arguments, message):
    result = runner.invoke(app, ["check", *arguments])
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_ls():
    result = runner.invoke(app, ["ls"], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    for part in ("seven_paws", "hub nyu-mll/glue (rte)", "BIG-bench fact_checker/fever"):
        assert part in result.stdout
    tree = json.loads(runner.invoke(app, ["ls", "--format", "json"]).stdout)
    assert tree["mixtures"]["bigbench_five"][0] == "vitaminc"
    assert tree["tasks"]["cb"]["labels"] == ["entailment", "contradiction", "neutral"]


def test_cache_root(monkeypatch, tmp_path):
    monkeypatch.setenv("GAR_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    assert cache_root(tmp_path / "x") == tmp_path / "x"
    monkeypatch.delenv("GAR_CACHE")
    assert cache_root().parts[-2:] == (".cache", "gar")


def test_unknown_name_in_python():
    with pytest.raises(UserError, match="did you mean 'rte'"):
        load("rtee")
