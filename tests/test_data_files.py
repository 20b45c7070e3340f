"""Local files: every format, and every way in which one can be wrong."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gar.config import MixtureConfig, TaskConfig
from gar.data import load, load_mixture, load_task
from gar.errors import UserError

ROWS = [("fine, really", "good"), ("awful", "bad"), ('he said "no"', "bad"), ("zwölf ✓", "good")]


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def csv_text(rows, header="review,mood"):
    return "\n".join(
        [header, *(",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows), ""]
    )


def tsv_text(rows, header="review\tmood"):
    return "\n".join([header, *("\t".join(row) for row in rows), ""])


def jsonl_text(rows):
    return "".join(json.dumps({"review": a, "mood": b}, ensure_ascii=False) + "\n" for a, b in rows)


def parquet_bytes(rows):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"review": [a for a, _ in rows], "mood": [b for _, b in rows]}), sink)
    return sink.getvalue().to_pybytes()


WRITERS = {".csv": csv_text, ".tsv": tsv_text, ".jsonl": jsonl_text, ".parquet": parquet_bytes}


@pytest.fixture
def mood(tmp_path):
    """A task over two files of good content; keyword arguments replace files or settings."""

    def make(
        train: str | bytes | None = None, validation: str | bytes | None = None, suffix=".csv", **settings
    ):
        default = WRITERS[suffix.removesuffix(".gz")](ROWS)
        for name, content in (("train", train), ("validation", validation)):
            write(tmp_path / f"{name}{suffix}", default if content is None else content)
        files = {
            "train": str(tmp_path / f"train{suffix}"),
            "validation": str(tmp_path / f"validation{suffix}"),
        }
        return TaskConfig(**{"name": "mood", "text": "review", "label": "mood", **files, **settings})

    return make


def refusal(task: TaskConfig, **options) -> str:
    with pytest.raises(UserError) as caught:
        load_task(task, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("suffix", [s + gz for s in WRITERS for gz in ("", ".gz")])
def test_every_format_gives_the_same_split(mood, suffix):
    task = load_task(mood(suffix=suffix))
    assert task.labels == ("bad", "good")
    for split in (task.train, task.validation):
        assert split.texts == [text for text, _ in ROWS]
        assert split.labels.tolist() == [1, 0, 0, 1]
        assert split.pairs is None


def test_tsv_quotes_are_text(mood):
    rows = [('"unbalanced', "a"), ('x "" y"', "b"), ("'", "a")]
    task = load_task(mood(tsv_text(rows), tsv_text(rows), suffix=".tsv"))
    assert task.train.texts == ['"unbalanced', 'x "" y"', "'"]


def test_pairs_and_byte_order_mark_and_crlf(mood):
    content = "\ufeffreview,reply,mood\r\nhello,there,a\r\nbye,now,b\r\n"
    task = load_task(mood(content, content, text=("review", "reply")))
    assert (task.text, task.train.texts, task.train.pairs) == (
        ("review", "reply"),
        ["hello", "bye"],
        ["there", "now"],
    )


def test_csv_fields_may_span_lines_and_be_long(mood):
    content = 'review,mood\n"two\nlines",a\n' + "x" * 200_000 + ",b\n"
    assert load_task(mood(content, content)).train.texts == ["two\nlines", "x" * 200_000]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["10", "9", "10"], ("9", "10")),
        (["b", "10", "9"], ("10", "9", "b")),
        (["1", "01", "2"], ("01", "1", "2")),
        (["-1", "1", "1"], ("-1", "1")),
        (["-2", "0", "-1", "1"], ("-2", "-1", "0", "1")),
        (["9" * 5000, "1"], ("1", "9" * 5000)),
    ],
)
def test_undeclared_labels_are_sorted(mood, labels, expected):
    content = csv_text([(f"text {i}", label) for i, label in enumerate(labels)])
    assert load_task(mood(content, content)).labels == expected


def test_declared_labels_keep_their_order_and_take_indices(mood):
    task = load_task(mood(labels=("good", "bad")))
    assert (task.labels, task.train.labels.tolist()) == (("good", "bad"), [0, 1, 1, 0])
    by_index = jsonl_text([("x", 1), ("y", 0)])
    task = load_task(mood(by_index, by_index, suffix=".jsonl", labels=("good", "bad")))
    assert task.train.labels.tolist() == [1, 0]


def test_declared_integer_names_are_names_not_indices(mood):
    content = csv_text([("x", "2"), ("y", "1")])
    assert load_task(mood(content, content, labels=("1", "2"))).train.labels.tolist() == [1, 0]


def test_integers_booleans_and_whole_floats_are_labels(mood):
    numbers = '{"review": "x", "mood": 1}\n{"review": "y", "mood": 0.0}\n'
    booleans = '{"review": "x", "mood": true}\n{"review": "y", "mood": false}\n'
    assert load_task(mood(numbers, numbers, suffix=".jsonl")).labels == ("0", "1")
    assert load_task(mood(booleans, booleans, suffix=".jsonl")).labels == ("false", "true")


@pytest.mark.parametrize(
    ("suffix", "content", "expected"),
    [
        (".csv", "", ["train.csv: is empty"]),
        (".csv", "review,mood\n", ["train.csv: no rows"]),
        (".jsonl", "", ["train.jsonl: no rows"]),
        (".csv", "review,mod\nx,a\n", ["no column 'mood'", "found 'review', 'mod'", "did you mean 'mod'"]),
        (".jsonl", '{"review": "x", "mood": "a"}\n\n{"review": "x"}\n', ["line 3", "no key 'mood'"]),
        (".csv", "review,mood\nx,a\ny,b,c\n", ["line 3", "3 fields", "expected 2"]),
        (".tsv", "review\tmood\nx\ta\n\ny\n", ["line 4", "1 field,", "expected 2"]),
        (".csv", 'review,mood\n"a\nb",a\nz\n', ["line 4", "1 field"]),
        (".csv", 'review,mood\nx,a\n"never,b\n', ["line 3", "never closed"]),
        (".csv", 'review,mood\n"x"y,a\n', ["line 2", "not valid CSV"]),
        (".csv", "review,mood,mood\nx,a,b\n", ["line 1", "'mood'", "twice"]),
        (".csv", b"review,mood\nx,a\ncaf\xe9,b\n", ["line 3", "not UTF-8", "0xe9"]),
        (".csv", "review,mood\nx,a\n  ,b\n", ["line 3", "'review'", "empty", "drop_empty"]),
        (".csv", "review,mood\nx,a\ny,\n", ["line 3", "'mood'", "empty"]),
        (".jsonl", '{"review": null, "mood": "a"}\n', ["line 1", "'review'", "empty"]),
        (".jsonl", '{"review": NaN, "mood": "a"}\n', ["line 1", "'review'", "empty"]),
        (".jsonl", '{"review": "x", "mood": null}\n', ["line 1", "'mood'", "empty"]),
        (".jsonl", '{"review": 5, "mood": "a"}\n', ["line 1", "'review' holds 5 (int)", "expected a string"]),
        (".jsonl", '{"review": "x", "mood": [1]}\n', ["line 1", "'mood' holds [1] (list)"]),
        (".jsonl", '{"review": "x", "mood": 0.5}\n', ["line 1", "0.5 (float)"]),
        (".jsonl", '{"review": "x", "mood": "a"}\n{"review": \n', ["line 2", "not valid JSON"]),
        (".jsonl", '["x", "a"]\n', ["line 1", "JSON list", "expected an object"]),
        (".jsonl", "[" * 100_000, ["line 1", "not readable JSON", "recursion"]),
        (".jsonl", '{"mood": ' + "1" * 5000 + "}", ["line 1", "not readable JSON", "digits"]),
        (".jsonl", '{"review": "\\ud800 x", "mood": "a"}', ["line 1", "'review'", "U+D800 at character 1"]),
        (
            ".jsonl",
            '{"review": "x\\u0000", "mood": "a"}',
            ["line 1", "NUL (U+0000) at character 2"],
        ),
        (".jsonl", '{"review": "x", "mood": "a\\nb"}', ["line 1", "'mood'", "U+000A", "on one line"]),
        (".jsonl", '{"review": "x", "mood": "\\u2028a\\u0000"}', ["line 1", "'mood'", "U+0000"]),
        (".jsonl", '{"review": "x", "mood": "a\\ud800"}', ["line 1", "'mood'", "U+D800"]),
        (".csv", 'review,mood\nx,"a\nb"\n', ["line 2", "'mood'", "U+000A"]),
        (".csv", "review,mood\nx,a\n".encode("utf-16"), ["line 1", "UTF-16; save it as UTF-8"]),
        (".csv", "review,mood\nx,a\n".encode("utf-16-le"), ["line 1", "UTF-16; save it as UTF-8"]),
        (".jsonl", jsonl_text(ROWS).encode("utf-16"), ["line 1", "UTF-16; save it as UTF-8"]),
        (".csv", "review;mood\nx;a\n", ["no column 'review'", "';'", "expected commas in .csv"]),
        (".csv", "review\tmood\nx\ta\n", ["no column 'review'", r"'\t'", "tabs in .tsv"]),
        (".tsv", "review,mood\nx,a\n", ["no column 'review'", "','", "tabs in .tsv"]),
        (".csv", "review,mood\nx,a\ny,a\n", ["every training label", "'a'", "two or more classes"]),
        (".parquet", b"PAR1 nonsense", ["train.parquet", "not a readable Parquet file"]),
    ],
)
def test_bad_training_file(mood, suffix, content, expected):
    message = refusal(mood(content, suffix=suffix))
    for part in ("train" + suffix, *expected):
        assert part in message


def test_parquet_with_a_repeated_column_or_other_bytes(mood):
    columns = [pa.array(["a", "b"])] * 3
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(columns, names=["review", "review", "mood"]), sink)
    assert "column 'review' stands twice" in refusal(mood(sink.getvalue().to_pybytes(), suffix=".parquet"))
    raw = pa.array([b"\xff\xfe", b"ok"])
    text = pa.StringArray.from_buffers(2, *raw.buffers()[1:])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"review": text, "mood": ["a", "b"]}), sink)
    assert "not a readable Parquet file" in refusal(mood(sink.getvalue().to_pybytes(), suffix=".parquet"))


def test_empty_parquet_text_names_its_row(mood):
    assert "row 2: column 'review' is empty" in refusal(
        mood(parquet_bytes([("x", "a"), (None, "b")]), suffix=".parquet")
    )


@pytest.mark.parametrize("suffix", [".csv.gz", ".jsonl.gz", ".parquet.gz"])
def test_corrupt_gzip(mood, tmp_path, suffix):
    task = mood(suffix=suffix)
    whole = (tmp_path / f"train{suffix}").read_bytes()
    for broken in (b"plain text", whole[: len(whole) // 2]):
        (tmp_path / f"train{suffix}").write_bytes(broken)
        assert "not a readable gzip file" in refusal(task)


def test_label_outside_the_declared_set(mood):
    train = csv_text([("x", "good"), ("y", "bda")])
    message = refusal(mood(train, labels=("good", "bad")))
    for part in ("train.csv, line 3", "'bda'", "expected one of 'good', 'bad'", "did you mean 'bad'"):
        assert part in message
    assert "line 2: label '7'" in refusal(mood(csv_text([("x", "7"), ("y", "good")]), labels=("good", "bad")))


@pytest.mark.parametrize("settings", [{}, {"labels": ("good", "bad", "goood")}])
def test_validation_label_never_seen_in_training(mood, settings):
    message = refusal(mood(validation=csv_text([*ROWS[:2], ("x", "goood")]), **settings))
    for part in ("validation.csv, line 4", "'goood'", "never occurs in training", "did you mean 'good'"):
        assert part in message


def test_dropping_empty_rows_is_noted(mood):
    content = csv_text([*ROWS, ("", "good"), ("x", "")])
    task = load_task(mood(content, drop_empty=True))
    assert len(task.train) == 4
    assert task.notes == ("mood train: dropped 2 empty of 6 rows",)
    nothing = csv_text([(" ", "good"), ("", "bad")])
    assert "no rows left after dropping 2 empty" in refusal(mood(nothing, drop_empty=True))


def test_dropped_and_sampled_validation_rows_are_noted(mood):
    """An option never changes silently on how many rows a model is measured."""
    content = csv_text([*ROWS, ("", "good")])
    task = load_task(mood(None, content, drop_empty=True), max_validation_examples=3)
    assert len(task.validation) == 3
    assert task.notes == (
        "mood validation: dropped 1 empty of 5 rows; it is measured on the other 4",
        "mood validation: 3 of 4 rows, as configured",
    )
    assert "validation.csv, line 6: column 'review' is empty" in refusal(mood(None, content))


@pytest.mark.parametrize(
    "labels", [[0, 1, -1], [1, 0, -1, 2], ["a", "-1", "b"], [0, -1], [0, 1, -100], [-1, 0, 1]]
)
def test_a_lone_minus_one_is_no_class_unless_declared(mood, labels):
    content = csv_text([(f"text {i}", str(label)) for i, label in enumerate(labels)])
    odd = min(label for label in map(str, labels) if label.startswith("-"))
    line = [*map(str, labels)].index(odd) + 2
    message = refusal(mood(content, content))
    for part in (
        f"train.csv, line {line}",
        f"label {odd} marks rows without",
        "drop these rows",
        f"['{odd}'",
    ):
        assert part in message
    names = tuple(sorted(map(str, labels)))
    assert load_task(mood(content, content, labels=names)).labels == names


@pytest.mark.parametrize("settings", [{}, {"labels": ("bad", "good")}])
def test_unlabelled_validation_rows_are_called_so(mood, settings):
    message = refusal(mood(validation=csv_text([*ROWS, ("x", "-1")]), **settings))
    assert "validation.csv, line 6: label '-1'" in message
    assert "-1 marks rows without a label: drop them" in message


def test_a_label_column_that_never_repeats(mood):
    rows = [(f"text {i}", f"user {i}", i % 3, i) for i in range(40)]
    content = "\n".join(["review,mood,stars,id", *(",".join(map(str, row)) for row in rows)])
    message = refusal(mood(content, content))
    for part in (
        "train.csv",
        "'mood' has 40 different values in 40 rows",
        "label: stars (3 different values)?",
    ):
        assert part in message
    declared = tuple(sorted(f"user {i}" for i in range(40)))
    assert load_task(mood(content, content, labels=declared)).labels == declared
    half = csv_text([(f"text {i}", f"{i if i < 31 else 0}") for i in range(60)])
    assert len(load_task(mood(half, half)).labels) == 31, "30 of 60 rows have a label of their own"
    most = csv_text([(f"text {i}", f"{i if i < 32 else 0}") for i in range(60)])
    assert "'mood' has 32 different values in 60 rows, 31 of them once" in refusal(mood(most, most))
    few = csv_text([(f"text {i}", f"{i}") for i in range(20)])
    assert len(load_task(mood(few, few)).labels) == 20, "few classes in few rows are believed"


def test_missing_file_offers_its_neighbour(mood, tmp_path):
    message = refusal(mood(train=None).model_copy(update={"train": str(tmp_path / "trian.csv")}))
    assert "trian.csv: no such file; did you mean 'train.csv'?" in message
    lost = str(tmp_path / "nowhere" / "train.csv")
    assert "nowhere does not exist" in refusal(mood().model_copy(update={"train": lost}))
    (tmp_path / "folder.csv").mkdir()
    assert "is a directory" in refusal(mood().model_copy(update={"train": str(tmp_path / "folder.csv")}))


@pytest.mark.parametrize(
    ("name", "hint"), [("train.json", "did you mean '.jsonl'"), ("train", "no extension")]
)
def test_unknown_extension(mood, tmp_path, name, hint):
    message = refusal(mood().model_copy(update={"train": str(tmp_path / name)}))
    assert hint in message
    assert ".csv, .tsv, .jsonl, .parquet" in message


def test_incomplete_and_contradictory_tasks(mood):
    good = mood()
    assert "no validation split" in refusal(good.model_copy(update={"validation": None}))
    assert "no training data" in refusal(good.model_copy(update={"train": None}))
    assert "one file" in refusal(good.model_copy(update={"validation": good.train}))
    assert "both files and hub" in refusal(good.model_copy(update={"hub": "org/data"}))
    assert "all distinct" in refusal(good.model_copy(update={"labels": ("a", "a")}))
    assert "two or more" in refusal(good.model_copy(update={"labels": ("a",)}))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a\nb", "U+000A"),
        ("a\0", "U+0000"),
        ("a\u2028b", "U+2028"),
        (" ", "blank"),
        (" a", "blank"),
        ("x" * 101, "101 characters"),
    ],
)
def test_names_that_break_tables_and_files(mood, name, reason):
    assert reason in refusal(mood(name=name))
    for config in (
        MixtureConfig(tasks=(mood(name=name),)),
        MixtureConfig(name=name, tasks=(mood(),)),
    ):
        with pytest.raises(UserError) as caught:
            load_mixture(config)
        assert reason in str(caught.value)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["x" * 100, "zwölf ✓", "a/b", "می\u200cخواهم"])
def test_other_names_are_fine(mood, name):
    assert load_task(mood(name=name)).name == name


@pytest.mark.parametrize(("label", "reason"), [("a\nb", "U+000A"), (" ", "blank"), ("\0", "U+0000")])
def test_declared_labels_that_break_tables(mood, label, reason):
    assert reason in refusal(mood(labels=("good", "bad", label)))


def test_own_mixture_names_and_duplicates(mood):
    first, second = mood(), mood(name="tone")
    assert load([first, second], batch_size=4, group_size=2).name == "mood+tone"
    assert load_mixture(MixtureConfig(name="feelings", tasks=(first, second))).name == "feelings"
    with pytest.raises(UserError, match="two tasks are named 'mood'"):
        load([first, first])
    with pytest.raises(UserError, match="mixture has no tasks"):
        load_mixture(MixtureConfig())
    with pytest.raises(UserError, match="'five' is a registered mixture with its own tasks"):
        load_mixture(MixtureConfig(name="five", tasks=(first,)))
    with pytest.raises(UserError, match=r"mixture: unknown name 'fife'.*did you mean 'five'"):
        load_mixture(MixtureConfig(name="fife"))


def test_samples_are_fixed_and_nested(mood):
    content = csv_text([(f"text {i}", "ab"[i % 2]) for i in range(40)])
    task = mood(content, content)
    small, large = (load_task(task, max_train_examples=n).train for n in (5, 20))
    assert small.texts == large.texts[:5]
    assert small.texts == ["text 6", "text 17", "text 24", "text 32", "text 4"]
    whole = load_task(task, max_train_examples=40, max_validation_examples=3)
    assert whole.train.texts[:2] == ["text 0", "text 1"]
    assert len(whole.validation) == 3
