"""What each expert sees: lifts against plain counting, readable tokens, and ``gar diagnose``."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import gar
from gar import report
from gar.cli.app import run as gar_command
from gar.config import CacheConfig, EvaluationConfig
from gar.data import Mixture, Split, Task
from gar.data.tokenize import tokenize_split
from gar.evaluation.diagnosis import collapse_notes, diagnose, gradient_shares, most_lifted, readable_token
from gar.evaluation.measure import evaluate
from gar.features import make_source
from gar.model.multitask import MultiTaskModel
from gar.report import _tables as tables
from gar.report import figures
from gar.runs.result import check_files
from support.tiny_backbones import SITES, WORDS, Directories, make_model, scatter_weights

UNCACHED = CacheConfig(enabled=False)
LABELS = {"mood": ("bad", "good"), "same": ("no", "maybe", "yes")}


@pytest.fixture(scope="module")
def backbones(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return Directories(tmp_path_factory.mktemp("backbones"))


def make_mixture(count: int = 24) -> Mixture:
    rng = np.random.default_rng(3)

    def texts() -> list[str]:
        return [" ".join(rng.choice(WORDS, rng.integers(2, 9))) for _ in range(count)]

    def a_split(name: str) -> Split:
        labels = np.arange(count) % len(LABELS[name])
        return Split(texts(), labels, texts() if name == "same" else None)

    fields = {"mood": ("text",), "same": ("first", "second")}
    tasks = [Task(name, LABELS[name], a_split(name), a_split(name), fields[name]) for name in LABELS]
    return Mixture("tiny", tuple(tasks), 8, 4)


def model_for(directory: str, mixture: Mixture, **options: Any) -> MultiTaskModel:
    model = make_model(
        directory, tasks=mixture.tasks, **{"count": 4, "top_k": 2, "dtype": "float32", **options}
    )
    scatter_weights(model, 1.0)
    return model.eval()


# --------------------------------------------------------------------------------------------------
# Lifts
# --------------------------------------------------------------------------------------------------


def counted(model: MultiTaskModel, mixture: Mixture) -> tuple[Counter, list[Counter], int, list[int]]:
    """Occurrences of items, by expert its selections for each, units, and selections by expert."""
    experts = model.bank.experts.count
    occurrences: Counter = Counter()
    chosen: list[Counter] = [Counter() for _ in range(experts)]
    units, totals = 0, [0] * experts
    for task in mixture.tasks:
        split = task.validation
        for n in range(len(split)):
            encoded = model.tokenizer(split.texts[n], *([] if split.pairs is None else [split.pairs[n]]))
            ids = torch.tensor([encoded["input_ids"]])
            types = encoded.get("token_type_ids")
            mask = torch.ones_like(ids, dtype=torch.bool)
            with torch.no_grad():
                state = model.prefix(ids, mask, None if types is None else torch.tensor([types]))
                _, routing = model.suffix(state, [(task.name, 1)])
            for position, selected in enumerate(routing.selected.reshape(-1, experts).tolist()):
                if model.site.unit == "token":
                    items: list[Any] = [int(ids[0, position])]
                else:
                    items = [(task.name, None), (task.name, task.labels[int(split.labels[n])])]
                units += 1
                occurrences.update(items)
                for e in range(experts):
                    totals[e] += selected[e]
                    chosen[e].update(items * selected[e])
    return occurrences, chosen, units, totals


@pytest.mark.parametrize("site", SITES)
def test_seen_is_what_plain_counting_finds(backbones: Directories, site: str) -> None:
    mixture = make_mixture()
    model = model_for(backbones["bert"], mixture, site=site)
    if site == "lora_head":  # pooled examples are much alike; their differences shall decide
        split = tokenize_split(model.tokenizer, mixture.tasks[0].validation, model.config.max_length)
        with torch.no_grad():
            mean = model.prefix(*model.tokens([(split, np.arange(len(split)))])).base.mean(0)
            model.bank.router.bias.copy_(-model.bank.router.weight @ mean)
    found = diagnose(model, mixture, cache=UNCACHED, top=1000, minimum_count=5)
    occurrences, chosen, units, totals = counted(model, mixture)
    assert sum(totals) == 2 * units
    for e, seen in enumerate(found["seen"]):
        expected = {}
        for item, n in occurrences.items():
            lift = (chosen[e][item] / n) / (totals[e] / units) if totals[e] else 0.0
            if n >= 5 and lift > 1 + 1e-9:
                expected[item] = (n, chosen[e][item] / n, lift)
        mine = {
            entry["id"] if "id" in entry else (entry["task"], entry["label"]): (
                entry["count"],
                entry["chosen"],
                entry["lift"],
            )
            for entry in seen
        }
        assert mine.keys() == expected.keys()
        for item, values in expected.items():
            assert mine[item] == pytest.approx(values, rel=1e-12)
        lifts = [entry["lift"] for entry in seen]
        assert lifts == sorted(lifts, reverse=True)
    assert any(found["seen"])


@pytest.mark.parametrize("site", SITES)
def test_holds_all_that_evaluate_measures(backbones: Directories, site: str) -> None:
    mixture = make_mixture()
    model = model_for(backbones["bert"], mixture, site=site)
    found, sections = diagnose(model, mixture, cache=UNCACHED), evaluate(model, mixture, cache=UNCACHED)
    assert {key: found[key] for key in sections} == sections
    assert (found["site"], found["experts"], found["top_k"]) == (site, 4, 2)
    assert found["unit"] == ("example" if site == "lora_head" else "token")
    assert json.loads(json.dumps(found)) == found
    assert all(entry["count"] >= 20 for seen in found["seen"] for entry in seen)


def test_cached_features_count_alike(backbones: Directories, tmp_path: Path) -> None:
    mixture = make_mixture()
    model = model_for(backbones["bert"], mixture)
    cached = diagnose(model, mixture, cache=CacheConfig(directory=str(tmp_path)), minimum_count=3)
    assert cached["seen"] == diagnose(model, mixture, cache=UNCACHED, minimum_count=3)["seen"]


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_batches_do_not_matter_and_nothing_is_tokenized_again(
    backbones: Directories, monkeypatch: pytest.MonkeyPatch, site: str, batch_tokens: int
) -> None:
    mixture = make_mixture()
    model = model_for(backbones["bert"], mixture, site=site)
    source = make_source(model, [task.validation for task in mixture.tasks], UNCACHED)
    expected = diagnose(model, mixture, cache=UNCACHED, minimum_count=2)
    monkeypatch.setattr(type(model.tokenizer), "__call__", lambda *_, **__: pytest.fail("tokenized again"))
    options = EvaluationConfig(batch_tokens=batch_tokens)
    found = diagnose(model, mixture, source=source, options=options, minimum_count=2)
    assert found["seen"] == expected["seen"]
    assert found["routing"]["counts"] == expected["routing"]["counts"]


def test_most_lifted_degenerate() -> None:
    assert most_lifted([0, 0], [[0, 0], [0, 0]]) == [[], []]
    assert most_lifted([50, 50], [[50, 0], [50, 0]]) == [[], []]  # always, and never: no item stands out
    assert most_lifted([19, 81], [[19, 0], [0, 81]])[0] == []  # too rare to judge
    tied = most_lifted([20, 30, 50], [[20, 0], [30, 0], [0, 50]], top=1)
    assert [lifted.item for lifted in tied[0]] == [1]  # equal lifts: the more frequent one
    assert most_lifted([20, 80], [[20, 0], [0, 80]], top=0) == [[], []]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("bert", "cat dogs", ["[CLS]", "cat", "dog", "##s", "[SEP]"]),
        ("roberta", "the cat", ["<s>", "the", "␣cat", "</s>"]),
        ("qwen3", "a the\n", ["a", "␣the", "\\n"]),
    ],
)
def test_tokens_are_readable(backbones: Directories, kind: str, text: str, expected: list[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(backbones[kind])
    shown = [readable_token(tokenizer, i) for i in tokenizer(text)["input_ids"]]
    if kind == "bert":  # the tiny vocabulary has no ##s
        shown = [s for s in shown if s not in ("[UNK]", "dog", "##s")]
        expected = [s for s in expected if s not in ("dog", "##s")]
    assert shown == expected


def test_no_token_breaks_a_terminal(backbones: Directories) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(backbones["qwen3"])
    shown = [readable_token(tokenizer, i) for i in range(len(tokenizer))]
    assert all(text and text.isprintable() for text in shown)
    escape = tokenizer.convert_tokens_to_ids("ě")  # how byte-level vocabularies write the escape byte
    assert readable_token(tokenizer, escape) == "\\x1b"
    part = tokenizer.convert_tokens_to_ids("Ã")  # one byte of two
    assert readable_token(tokenizer, part) == "Ã"


def test_collapse_in_plain_words(backbones: Directories) -> None:
    mixture = make_mixture()
    model = model_for(backbones["bert"], mixture, top_k=1)
    with torch.no_grad():
        model.bank.router.bias[2] = 1e3
    said = "expert 2 holds 100.0 % of the load; experts 0, 1 and 3 are dead (below 1 % of a uniform share)"
    found = diagnose(model, mixture, cache=UNCACHED)
    assert found["collapse"] == said
    assert found["seen"] == [[], [], [], []]
    assert collapse_notes([{"method": "gar", **found}]) == [f"gar: {said}"]


def test_gradient_shares_add_up() -> None:
    shares = gradient_shares({"a": [3.0, 0.0, 1e-13], "b": [1.0, 0.0, 0.0]})
    assert shares == {"a": [0.75, 0.0, 0.0], "b": [0.25, 0.0, 0.0]}


# --------------------------------------------------------------------------------------------------
# The verb and the report
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(backbones: Directories, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on files, with batches and groups of its own."""
    root = tmp_path_factory.mktemp("trained")
    tasks = []
    for task in make_mixture().tasks:
        names: dict[str, Any] = {"name": task.name, "label": "label", "labels": list(task.labels)}
        names["text"] = "text" if len(task.text) == 1 else list(task.text)
        for part, split in (("train", task.train), ("validation", task.validation)):
            columns = [split.texts] if split.pairs is None else [split.texts, split.pairs]
            lines = [
                json.dumps({**dict(zip(task.text, texts, strict=True)), "label": task.labels[label]})
                for *texts, label in zip(*columns, split.labels, strict=True)
            ]
            path = root / f"{task.name}-{part}.jsonl"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            names[part] = str(path)
        tasks.append(names)
    tree = {
        "backbone": {"name": backbones["bert"], "max_length": 24},
        "experts": {"count": 4, "top_k": 2, "rank": 2},
        "mixture": {"tasks": tasks, "batch_size": 6, "group_size": 2},
        "optimizer": {"updates": 3},
        "cache": {"enabled": False},
    }
    (root / "own.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert gar_command(["train", str(root / "own.yaml"), "--device", "cpu", "--out", str(root / "run")]) == 0
    return root


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = gar_command([str(a) for a in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_table(trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = command(capsys, "diagnose", trained / "run", "--device", "cpu", "--minimum-count", 3)
    assert (code, err) == (0, "")
    result = json.loads((trained / "run/result.json").read_text())
    for name, load in result["routing"]["load_by_task"].items():
        shown = [f"{100 * share:.1f}" for share in load]
        assert re.search(rf"{name} +{result['accuracy']['tasks'][name]:.3f} +{' +'.join(shown)}", out)
    assert re.search(rf"gradient-mass purity +{result['routing']['gradient_mass_purity']:.4f}", out)
    assert "×" in out
    assert max(map(len, out.splitlines())) <= 100


def test_json_and_files(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = command(
        capsys, "diagnose", trained / "run", "--device", "cpu", "--format", "json", "--out", tmp_path / "d"
    )
    found, result = json.loads(out), json.loads((trained / "run/result.json").read_text())
    assert code == 0
    assert found["accuracy"] == result["accuracy"]
    # The probe's batches and groups are the run's own.
    for key in ("load_by_task", "counts", "gradient_norms"):
        for name, row in result["routing"][key].items():
            assert found["routing"][key][name] == pytest.approx(row, rel=1e-4), key
    assert json.loads((tmp_path / "d/diagnostics.json").read_text()) == found
    assert (tmp_path / "d/heatmap.svg").read_text(encoding="utf-8").startswith("<svg")
    assert (tmp_path / "d/heatmap.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "d/conflict.svg").read_text(encoding="utf-8").startswith("<svg")
    assert (tmp_path / "d/conflict.png").read_bytes().startswith(b"\x89PNG")


def test_other_mixture_keeps_the_training_groups(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = yaml.safe_load((trained / "own.yaml").read_text())
    del tree["mixture"]["tasks"][1], tree["mixture"]["group_size"], tree["mixture"]["batch_size"]
    (trained / "alone.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    arguments = ["--mixture", trained / "alone.yaml", "--device", "cpu", "--format", "json"]
    code, out, _ = command(capsys, "diagnose", trained / "run", *arguments)
    assert code == 0
    result = json.loads((trained / "run/result.json").read_text())
    norms = json.loads(out)["routing"]["gradient_norms"]
    assert norms["mood"] == pytest.approx(result["routing"]["gradient_norms"]["mood"], rel=1e-4)
    assert list(norms) == ["mood"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "--format", "yaml"], "--format: unknown name 'yaml'; expected one of table, json"),
        (["RUN/nowhere"], "no such directory; expected a run or a saved model"),
        (["RUN", "--mixture", "fife"], "did you mean 'five'?"),
        (["RUN", "--out", "RUN/result.json"], "result.json: cannot be written"),
        (["RUN", "--minimum-count", "0"], "--minimum-count"),
    ],
)
def test_mistakes_are_one_line(
    trained: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    filled = [a.replace("RUN", str(trained / "run")) for a in arguments]
    code, out, err = command(capsys, "diagnose", *filled, "--device", "cpu")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_report_shows_what_the_experts_see(
    trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = trained / "run"
    guarded = json.loads((out / "checksums.json").read_text())["files"].keys()
    assert command(capsys, "diagnose", out, "--device", "cpu", "--minimum-count", 3, "--out", out)[0] == 0
    diagnosis = json.loads((out / "diagnostics.json").read_text())
    results = gar.results(out)
    check_files(out)  # the run vouches for the new diagnosis, and for all that it did before
    assert json.loads((out / "checksums.json").read_text())["files"].keys() == guarded
    files = report.write(results, tmp_path)
    page = files["report.html"].read_text(encoding="utf-8")
    assert "what each expert sees most" in page
    entry = next(entry for seen in diagnosis["seen"] for entry in seen)
    assert f"{entry['token']} ×{entry['lift']:.1f}" in page
    assert "what each expert sees most" in files["report.md"].read_text(encoding="utf-8")

    (out / "checksums.json").unlink()  # a run of before, whose files nothing vouches for
    diagnosis["seen"][0] = [{"token": "<script>alert(1)</script>", "lift": 2.0}]
    (out / "diagnostics.json").write_text(json.dumps(diagnosis))
    page = report.write(gar.results(out), tmp_path)["report.html"].read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert(1)" not in page

    for broken in ("", "[]", '{"seen": 3}', '{"seen": [[{"token": 1}]]}', '{"seen": [[{"task": "a"}]]}'):
        (out / "diagnostics.json").write_text(broken)
        results = gar.results(out)
        assert tables.seen(results, results.settings[0]) == []
    (out / "diagnostics.json").unlink()


def test_the_documented_notebook(
    backbones: Directories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parent.parent / "docs/diagnostics.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert snippets
    mixture = make_mixture()
    names: dict[str, Any] = {"model": model_for(backbones["bert"], mixture), "mixture": mixture}
    monkeypatch.chdir(tmp_path)
    for snippet in snippets:
        exec(snippet, names)
    assert names["found"]["unit"] == "token"
    assert (tmp_path / "diagnosis/diagnostics.json").is_file()
    assert figures.load_heatmap(names["found"])._repr_svg_().startswith("<svg")  # type: ignore[attr-defined]
