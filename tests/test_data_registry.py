"""Registered tasks and mixtures, from a data directory and from the hub."""

import gzip
import json

import datasets
import pytest

from gar.config import TaskConfig
from gar.data import find_task, load, load_task, registry
from gar.errors import UserError

LABELS = {
    "qnli": ("entailment", "not_entailment"),
    "boolq": ("no", "yes"),
    "rte": ("entailment", "not_entailment"),
    "paws": ("not_paraphrase", "paraphrase"),
    "wic": ("different", "same"),
    "anli": ("entailment", "neutral", "contradiction"),
    "cb": ("entailment", "contradiction", "neutral"),
    "cola": ("unacceptable", "acceptable"),
    "sst2": ("negative", "positive"),
    "mrpc": ("not_equivalent", "equivalent"),
    "qqp": ("not_duplicate", "duplicate"),
}
TEXT = {
    "qnli": ("question", "sentence"),
    "boolq": ("question", "passage"),
    "wic": ("word: sentence1", "sentence2"),
    "anli": ("premise", "hypothesis"),
    "cb": ("premise", "hypothesis"),
    "cola": ("sentence",),
    "sst2": ("sentence",),
    "qqp": ("question1", "question2"),
}
EXTRA = {"cola": ("mcc",), "mrpc": ("f1",), "qqp": ("f1",)}


def rows_of(name, n=6):
    columns = find_task(name).recipe().columns[:-1]
    classes = len(LABELS[name])
    return [{column: f"{column} {i}" for column in columns} | {"label": i % classes} for i in range(n)]


def fill(directory, name, suffix=".jsonl", rows=None):
    (directory / name).mkdir()
    for split in ("train", "validation"):
        data = "".join(json.dumps(row) + "\n" for row in rows or rows_of(name)).encode()
        path = directory / name / f"{split}{suffix}"
        path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)


@pytest.mark.parametrize("name", LABELS)
def test_data_dir_has_the_benchmarks_labels_and_fields(tmp_path, name):
    fill(tmp_path, name, ".jsonl.gz" if name == "rte" else ".jsonl")
    task = load_task(name, data_dir=tmp_path)
    assert task.labels == LABELS[name]
    assert task.text == TEXT.get(name, ("sentence1", "sentence2"))
    assert task.extra == EXTRA.get(name, ())
    assert task.train.labels.tolist() == [i % len(task.labels) for i in range(6)]
    assert (task.train.pairs is None) == (name in ("cola", "sst2"))


def test_wic_puts_the_word_first(tmp_path):
    fill(tmp_path, "wic")
    split = load_task("wic", data_dir=tmp_path).train
    assert (split.texts[0], split.pairs[0]) == ("word 0: sentence1 0", "sentence2 0")


def test_the_papers_mixtures():
    mixtures = registry().mixtures
    assert mixtures["five"] == ("qnli", "boolq", "rte", "paws", "wic")
    assert mixtures["six"] == ("qnli", "boolq", "rte", "paws", "anli", "cb")
    assert mixtures["seven_paws"] == ("qnli", "boolq", "rte", "paws", "wic", "cola", "sst2")
    assert mixtures["seven_mrpc"] == ("qnli", "boolq", "rte", "wic", "cola", "sst2", "mrpc")
    assert mixtures["eight"] == ("qnli", "boolq", "rte", "paws", "wic", "cola", "sst2", "cb")
    assert mixtures["bigbench_five"] == ("vitaminc", "fever", "epistemic_reasoning", "hyperbaton", "winowhy")
    sizes = [len(mixtures[f"bigbench_{size}"]) for size in ("five", "six", "seven", "eight")]
    assert sizes == [5, 6, 7, 8]


def test_a_named_mixture_loads_from_a_data_dir(tmp_path):
    for name in registry().mixtures["five"]:
        fill(tmp_path, name)
    mixture = load("Five", data_dir=tmp_path, batch_size=4, group_size=2)
    assert (mixture.name, mixture.batch_size, mixture.group_size) == ("five", 4, 2)
    assert [task.name for task in mixture.tasks] == list(registry().mixtures["five"])
    assert load(["RTE", "Wic"], data_dir=tmp_path).name == "rte+wic"


def test_spelling_of_names():
    assert find_task("SST-2").name == find_task("sst_2").name == "sst2"
    assert find_task("vitaminc_fact_verification").name == "vitaminc"
    with pytest.raises(UserError, match=r"unknown name 'rtee'.*did you mean 'rte'"):
        find_task("rtee")
    with pytest.raises(UserError, match=r"'sevn_paws' is no file.*did you mean 'seven_paws'"):
        load("sevn_paws")
    with pytest.raises(UserError, match="two tasks are named 'sst2'"):
        load(["sst2", "SST-2"])


def test_unlabelled_rows(tmp_path):
    unlabelled = {"sentence": "x", "label": -1}
    fill(tmp_path, "cola", rows=[*rows_of("cola"), unlabelled])
    with pytest.raises(UserError, match=r"validation.jsonl, line 7: label is -1, unlabelled"):
        load_task("cola", data_dir=tmp_path)
    good = "".join(json.dumps(row) + "\n" for row in rows_of("cola"))
    (tmp_path / "cola" / "validation.jsonl").write_text(good)
    assert load_task("cola", data_dir=tmp_path).notes == ("cola train: dropped 1 unlabelled of 7 rows",)


def test_data_dir_mistakes(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such directory"):
        load_task("rte", data_dir=tmp_path / "nowhere")
    fill(tmp_path, "rte")
    (tmp_path / "rte").rename(tmp_path / "rtee")
    with pytest.raises(UserError, match="no such directory for task 'rte'; did you mean 'rtee'"):
        load_task("rte", data_dir=tmp_path)
    (tmp_path / "rtee").rename(tmp_path / "rte")
    (tmp_path / "rte" / "validation.jsonl").rename(tmp_path / "rte" / "dev.jsonl")
    with pytest.raises(UserError, match=r"task 'rte' has no validation split.*found dev.jsonl, train.jsonl"):
        load_task("rte", data_dir=tmp_path)
    (tmp_path / "rte" / "dev.jsonl").rename(tmp_path / "rte" / "validation.jsonl")
    bad = {"sentence1": "a", "sentence2": "b", "label": 2}
    (tmp_path / "rte" / "train.jsonl").write_text(json.dumps(bad) + "\n")
    with pytest.raises(UserError, match=r"line 1: label '2' is not a declared one.*index from 0 to 1"):
        load_task("rte", data_dir=tmp_path)


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the hub: data sets by (id, config, split)."""
    stored: dict[tuple[str, str | None, str], datasets.Dataset] = {}

    def load_dataset(path, name=None, *, split):
        if (path, name, split) not in stored:
            raise ValueError(f"Unknown split {split!r}.\nMore lines.")
        return stored[path, name, split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return stored


def dataset_of(rows, names, label="label"):
    features = {column: datasets.Value("string") for column in rows[0] if column != label}
    features[label] = datasets.ClassLabel(names=list(names))
    return datasets.Dataset.from_list(rows, features=datasets.Features(features))


def test_registered_hub_task(hub):
    for split in ("train", "validation"):
        hub["nyu-mll/glue", "rte", split] = dataset_of(
            [{**row, "idx": "0"} for row in rows_of("rte")], LABELS["rte"]
        )
    task = load_task("rte")
    assert task.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert task.train.pairs[3] == "sentence2 3"


def test_anli_joins_its_rounds(hub):
    for i in (1, 2, 3):
        hub["facebook/anli", None, f"train_r{i}"] = dataset_of(rows_of("anli", 3 * i), LABELS["anli"])
        hub["facebook/anli", None, f"dev_r{i}"] = dataset_of(rows_of("anli", 3), LABELS["anli"])
    task = load_task("anli")
    assert (len(task.train), len(task.validation)) == (18, 9)
    assert task.train.texts[:4] == ["premise 0", "premise 1", "premise 2", "premise 0"]


def test_own_hub_task_takes_the_hubs_class_names(hub):
    rows = [{"body": "x", "stars": 0}, {"body": "y", "stars": 1}, {"body": "z", "stars": -1}]
    hub["org/reviews", None, "train"] = dataset_of(rows, ["1", "2"], "stars")
    hub["org/reviews", None, "test"] = dataset_of(rows[:2], ["1", "2"], "stars")
    own = TaskConfig(name="reviews", hub="org/reviews", text="body", label="stars", validation_split="test")
    task = load_task(own)
    assert (task.labels, task.train.labels.tolist()) == (("1", "2"), [0, 1])
    assert task.notes == ("reviews train: dropped 1 unlabelled of 3 rows",)
    assert load_task(own.model_copy(update={"labels": ("low", "high")})).labels == ("low", "high")
    with pytest.raises(UserError, match="3 declared labels, but the hub's are 1, 2"):
        load_task(own.model_copy(update={"labels": ("a", "b", "c")}))
    with pytest.raises(UserError, match=r"org/reviews \[train\]: no column 'text'; found 'body', 'stars'"):
        load_task(own.model_copy(update={"text": "text"}))
    with pytest.raises(UserError, match=r"\[dev\]: cannot be loaded from the hub \(Unknown split 'dev'\)"):
        load_task(own.model_copy(update={"validation_split": "dev"}))


def test_no_network_names_the_way_out(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'nyu-mll/glue' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"Couldn't reach 'nyu-mll/glue' on the Hub.*--data-dir"):
        load_task("rte")


def test_a_loading_script_gives_way_to_the_converted_copy(monkeypatch):
    asked = []

    def load_dataset(path, name=None, *, split, revision=None):
        asked.append((path, name, split, revision))
        if revision is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found super_glue.py")
        return dataset_of(rows_of("cb"), LABELS["cb"])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_task("cb").labels == LABELS["cb"]
    assert ("aps/super_glue", "cb", "train", "refs/convert/parquet") in asked
