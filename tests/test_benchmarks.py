"""``gar bench`` and the scripts in benchmarks/, on tiny models: what they find, never how fast."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import multiprocessing
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from gar import config as configuration
from gar import presets
from gar.benchmark import others, sweep, timing
from gar.benchmark.models import SIZES, count_parameters
from gar.benchmark.others import Engine, TrainerRunner, candidates
from gar.benchmark.report import COLUMNS, Line, Report, Spread, compared
from gar.benchmark.settings import FEATURES, Bench, Setting, published
from gar.benchmark.timing import Measured, Plan, Shipped, measure
from gar.cli.app import run
from gar.data import load_mixture
from gar.data.batches import Group
from gar.errors import UserError
from gar.features.sources import make_sources
from gar.model.sites import SITES
from gar.training import TrainingFailure, Updater
from gar.training.updater import Outcome
from support import tiny_runs
from support.scripts import script

CPU = torch.device("cpu")
SMALL = {"mixture.batch_size": 3, "mixture.group_size": 2, "experts.count": 3, "experts.top_k": 2}
OVERRIDES = [f"{key}={value}" for key, value in SMALL.items()]


def setting(**changes: Any) -> Setting:
    fields: dict[str, Any] = {"model": "tiny", "length": 8, "overrides": SMALL} | changes
    return Setting(**fields)


def bench(*arguments: str) -> int:
    return run(["bench", *arguments, *OVERRIDES, "--length", "8", "--device", "cpu"])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """How many updates the shipped loop made, by method and observation path."""
    counts: Counter[tuple[str, str]] = Counter()
    real = Updater.run

    def counting(updater: Updater, number: int) -> Outcome:
        assert type(updater) is Updater
        counts[updater.config.method.name, updater.config.observation.backward] += 1
        return real(updater, number)

    monkeypatch.setattr(Updater, "run", counting)
    return counts


# ---------------------------------------------------------------------- gar bench step


def test_every_line_of_step_is_the_shipped_loop(
    made: Counter[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ("baseline", "gar", "gar/per_group", "cagrad")
    options = [
        *(f"--features={name}" for name in FEATURES),
        *(f"--site={name}" for name in SITES),
        *(f"--method={name}" for name in methods),
        "--repeats=1",
        "--updates=2",
    ]
    out = tmp_path / "step.json"
    assert bench("step", "--model=tiny", *options, f"--out={out}") == 0
    report = Report.read(out)
    settings = len(FEATURES) * len(SITES)
    assert len(report.lines) == settings * len(methods)
    labels = [tuple(line.labels.values()) for line in report.lines]
    assert len(set(labels)) == len(labels)
    assert list(report.lines[0].labels) == ["model", "site", "features", "precision", "method"]
    each = settings * (1 + 1) * 2  # with the warm-up
    assert made == {
        ("baseline", "one_pass"): each,
        ("gar", "one_pass"): each,
        ("gar", "per_group"): each,
        ("cagrad", "one_pass"): each,
    }
    for line in report.lines:
        assert line.problem == ""
        assert line.ms is not None
        assert 0 < line.ms.lowest <= line.ms.median <= line.ms.highest
        assert line.ratio is not None
        assert (line.ratio == 1) >= (line.labels["method"] == "baseline")
        assert (line.kernels, line.device_ms, line.peak_gib) == (None, None, None)  # no CUDA here
    printed = capsys.readouterr().out
    assert printed == report.markdown()
    heading, blank, header, rule, *rows = printed.splitlines()
    assert "five tasks, 3 examples each, groups of 2, E3K2, up to 8 tokens" in heading
    assert "timings a line: 1 of 2 updates" in heading
    assert blank == ""
    assert {row.count("|") for row in (header, rule, *rows)} == {9}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--model=minilmm"], "did you mean 'minilm'"),
        (["step", "--site=lora_fn"], "did you mean 'lora_ffn'"),
        (["step", "--method=garr"], "did you mean 'gar'"),
        (["step", "--method=gar/per_grup"], "did you mean 'gar/per_group'"),
        (["step", "--precision=float23"], "did you mean 'float32'"),
        (["step", "--features=cashed"], "did you mean 'cached'"),
        (["step", "--workload=fife"], "did you mean 'five'"),
        (["step", "--capture=of"], "did you mean 'off'"),
        (["step", "--out=times.jsn"], "did you mean '.json'"),
        (["step", "mixture.bach_size=2"], "did you mean 'batch_size'"),
        (["step", "experts.top_k=9"], "expected top_k <= count"),
        (["others", "--features=uncachd"], "did you mean 'uncached'"),
        (["sweep", "--method=gaar"], "did you mean 'gar'"),
        (["sweep", "--jobs=0"], "--jobs"),
        (["step", "--device=cudda"], "did you mean 'cuda'"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_captured_and_not_captured_are_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model=tiny", "--features=cached", "--method=baseline", "--repeats=1"]
    assert bench("step", *options, "--capture=off", "--capture=on") == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert "| baseline, not captured |" in lines[0]
    assert "| baseline |" in lines[1]
    assert "| 1.00 |" in lines[0]


def test_hub_ids_are_sizes_too() -> None:
    assert count_parameters("tiny") < count_parameters("minilm")
    assert setting(model="FacebookAI/roberta-base").config().backbone.name == "FacebookAI/roberta-base"
    published_names = {
        presets.find(name).config().backbone.name for name in presets.names("paper/*/five/gar")
    }
    assert {name.lower().rpartition("/")[2] for name in published_names} <= {*SIZES}


def test_a_combination_that_cannot_be_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model=tiny", "--site=full_ffn", "--features=cached", "--repeats=1"]
    assert bench("step", *options, "--method=stgc", "--method=baseline") == 0
    refused, baseline = capsys.readouterr().out.splitlines()[-2:]
    assert "expected experts.site lora_ffn or lora_head" in refused
    assert refused.count("|") == baseline.count("|") == 9
    assert "| 1.00 |" in baseline


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (MemoryError(), "out of memory"),
        (
            TrainingFailure("the loss of task task0, group 0 is nan", 3),
            "not finite: update 3: the loss of task",
        ),
    ],
)
@pytest.mark.parametrize("at", [0, 2])  # in the warm-up; later
def test_what_fails_is_a_line_and_leaves_the_others_alone(
    problem: Exception, told: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = timing.advance

    def failing(updater: Updater, first: int, last: int) -> None:
        if updater.config.method.name == "gar" and first == at:
            raise problem
        real(updater, first, last)

    monkeypatch.setattr(timing, "advance", failing)
    makers = {name: partial(timing_maker, setting(), name) for name in ("gar", "baseline")}
    found = measure(partial(Bench, setting(), CPU, 2), makers, CPU, Plan(3, 1))
    assert found["gar"].problem.startswith(told)
    assert len(found["baseline"].seconds) == 3
    gar, baseline = compared(found, {name: {"method": name} for name in found}, "baseline")
    assert (gar.ms, gar.ratio) == (None, None)
    assert baseline.ratio == 1


def timing_maker(setting: Setting, method: str, bench: Bench) -> Shipped:
    return Shipped(bench.model, bench.source, setting.config(method))


def test_a_non_finite_loss_is_marked() -> None:
    def broken(bench: Bench) -> Shipped:
        with torch.no_grad():
            bench.model.bank.router.weight.fill_(math.nan)
        return timing_maker(setting(), "gar", bench)

    found = measure(partial(Bench, setting(), CPU, 1), {"gar": broken}, CPU, Plan(1, 1))
    assert found["gar"].problem.startswith("not finite: update 1: the loss of task task0")


def test_a_mistake_of_ours_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(updater: Updater, first: int, last: int) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(timing, "advance", broken)
    makers = {"gar": partial(timing_maker, setting(), "gar")}
    with pytest.raises(RuntimeError, match="shapes differ"):
        measure(partial(Bench, setting(), CPU, 1), makers, CPU, Plan(1, 1))


def test_memory_that_runs_out_in_a_capture_is_told_by_the_error_before() -> None:
    last = RuntimeError("the capture was invalidated")
    last.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert timing.out_of_memory(last)
    assert not timing.out_of_memory(RuntimeError("shapes differ"))


def test_a_model_that_does_not_fit_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 1)
    makers = {"gar": partial(timing_maker, setting(), "gar")}
    found = measure(partial(Bench, setting(), CPU, 1), makers, CPU, Plan(1, 1))
    assert found["gar"].problem == "out of memory"


@pytest.mark.parametrize(
    ("method", "workload", "site", "features", "expected"),
    [
        ("gar", "five", "lora_ffn", "uncached", (0.584, 1.04)),
        ("baseline", "five", "lora_ffn", "cached", (0.561, 1.00)),
        ("gar", "single", "lora_ffn", "uncached", (0.0593, 1.12)),
        ("gar", "single", "full_ffn", "trained", (0.329, 1.03)),
        ("gar", "five", "full_ffn", "trained", None),
        ("gar", "single", "lora_ffn", "trained", None),
        ("cagrad", "five", "lora_ffn", "cached", None),
        ("gar/per_group", "five", "lora_ffn", "cached", None),
    ],
)
def test_the_papers_times_stand_beside_the_same_work(
    method: str, workload: str, site: str, features: str, expected: tuple[float, float] | None
) -> None:
    found = published(Setting("deberta-v3-base", site, features, workload=workload), method)
    assert (found and (float(found.step_s), float(found.factor))) == expected
    other_work = Setting("deberta-v3-base", site, features, workload=workload, overrides=SMALL)
    assert published(other_work, method) is None


def test_numbers_of_a_device_are_shown() -> None:
    found = {
        "baseline": Measured([0.010, 0.012, 0.022], 2**30, 300, 0.004),
        "gar": Measured([0.020, 0.024, 0.033], 3 * 2**29, 400, 0.006),
    }
    theirs = {"gar": published(Setting("minilm"), "gar")}
    lines = compared(found, {name: {"method": name} for name in found}, "baseline", theirs)
    report = Report(
        command="gar bench step",
        note="Of a test.",
        machine={"device": "none"},
        reference="Baseline",
        columns=tuple(name for name in COLUMNS if name != "per_second"),
        lines=lines,
    )
    *_, header, _, baseline, gar = report.markdown().splitlines()
    assert baseline == "| baseline | 12.0 (10.0 to 22.0) | 1.00 | 300 | 4.00 | 1.00 | 1.00 |  |"
    assert gar == "| gar | 24.0 (20.0 to 33.0) | 2.00 | 400 | 6.00 | 1.50 | 1.50 | 1.04 (584.0 ms) |"
    assert header.count("|") == gar.count("|")


def test_who_is_compared_takes_turns() -> None:
    order: list[str] = []

    class Noting:
        parameters: tuple[nn.Parameter, ...] = ()
        stretch, brings_model = 1, False

        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, updates: int, watch: contextlib.AbstractContextManager[Any]) -> None:
            order.append(self.name * updates)

    makers = {name: lambda _, name=name: Noting(name) for name in "abc"}
    measure(lambda: None, makers, CPU, Plan(4, 2, warmup=1))
    assert order == [name * 2 for name in "abcabcbcacababc"]


# ---------------------------------------------------------------------- gar bench others


def test_others_has_a_line_for_everything(
    made: Counter[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "others.json"
    kinds = [f"--features={name}" for name in FEATURES]
    assert bench("others", "--model=tiny", *kinds, "--repeats=1", f"--out={out}") == 0
    report = Report.read(out)
    assert capsys.readouterr().out == report.markdown()
    for features in FEATURES:
        lines = {line.labels["update"]: line for line in report.lines if line.labels["features"] == features}
        assert lines.keys() == candidates(setting(features=features), CPU).keys()
        for name, line in lines.items():
            if line.problem:
                assert line.problem.startswith("not installed: ")
                assert "pip install" in line.problem
                assert "TorchJD" in name or "PEFT" in name
            else:
                assert line.ms is not None
        assert lines["gar: Baseline"].ratio == 1
    ours = 2 * len(FEATURES)  # warm-up and one stretch
    assert made["gar", "one_pass"] == made["gar", "per_group"] == ours
    assert made["baseline", "one_pass"] == made["cagrad", "one_pass"] == 2 * ours


def test_one_group_a_pass_is_the_papers_way(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    bench = Bench(setting(features="uncached"), CPU, 1)
    runner = candidates(setting(features="uncached"), CPU)["one group a pass: GAR, M autograd calls"](bench)
    assert isinstance(runner, Shipped)
    real = runner.updater.group_losses

    def noting(groups: Sequence[Group], *rest: int) -> Any:
        rows.append(len(groups))
        return real(groups, *rest)

    monkeypatch.setattr(runner.updater, "group_losses", noting)
    runner.run(1, contextlib.nullcontext())
    assert rows == [1] * 10  # five tasks with a group of two and one of one
    assert runner.updater.config.observation.backward == "per_group"


@pytest.mark.parametrize(
    ("site", "features"), [*((site, "cached") for site in SITES), ("full_ffn", "trained")]
)
@pytest.mark.parametrize("rows_at_once", [None, 1])
def test_torchjds_engine_gets_the_updates_rows(site: str, features: str, rows_at_once: int | None) -> None:
    """The mean of the rows is Baseline's gradient, here in float64."""
    pytest.importorskip("torchjd")
    this = setting(site=site, features=features, overrides=SMALL | {"backbone.dtype": "float64"})
    gradients = []
    for method in (None, Engine(aggregator="Mean", options={}, rows_at_once=rows_at_once)):
        bench, config = Bench(this, CPU, 1), this.config()
        if method is not None:
            config = config.model_copy(update={"method": method})
        updater = Updater(bench.model, bench.source, config, list(bench.model.tasks))
        updater.run(0)  # the starting B = 0 leaves A without a gradient
        updater.gradients(updater.schedule.groups(1), 1)
        gradients.append([p.grad.clone() for p in updater.parameters if p.grad is not None])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("aggregator", ["CAGrad", "Mean"])
def test_without_torchjd_its_lines_say_so(aggregator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchjd", None)
    with pytest.raises(UserError, match=r"not installed: .*torchjd.*pip install"):
        Engine(aggregator=aggregator, options={}).build()


def test_without_peft_its_lines_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    this = setting(features="uncached")
    with pytest.raises(UserError, match=r"not installed: peft; pip install"):
        candidates(this, CPU)["Trainer: PEFT LoRA at the last FFN"](Bench(this, CPU, 1))


def test_the_trainer_takes_the_batches_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    this = setting(features="trained")
    bench = Bench(this, CPU, 1)
    runner = candidates(this, CPU)["Trainer: all weights, no experts"](bench)
    assert isinstance(runner, TrainerRunner)
    updater = timing_maker(this, "baseline", bench).updater
    for number in (0, 3):
        expected = [(group.task, int(i)) for group in updater.schedule.groups(number) for i in group.examples]
        batch = runner.batch(number)
        assert [example["input_ids"].tolist() for example in batch] == [
            bench.splits[task].ids[slice(*bench.splits[task].offsets[i : i + 2])].tolist()
            for task, i in expected
        ]
        assert [int(example["labels"]) for example in batch] == [
            int(bench.splits[task].labels[i]) for task, i in expected
        ]
    seen: list[str] = []
    real = runner.model.forward

    def forward(**inputs: Tensor) -> Any:
        seen.append(f"{len(inputs['input_ids'])} rows")
        return real(**inputs)

    monkeypatch.setattr(runner.model, "forward", forward)

    @contextlib.contextmanager
    def watch() -> Iterator[None]:
        seen.append("began")
        yield
        seen.append("ended")

    before = [p.detach().clone() for p in runner.parameters]
    precision = torch.get_float32_matmul_precision()
    state = torch.random.get_rng_state()
    runner.run(2, watch())
    assert seen == ["15 rows", "began", "15 rows", "15 rows", "ended"]
    assert any(not torch.equal(old, new) for old, new in zip(before, runner.parameters, strict=True))
    assert runner.number == 2
    assert torch.get_float32_matmul_precision() == precision
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.no_grad():
        for parameter in runner.parameters:
            parameter.fill_(math.nan)
    with pytest.raises(TrainingFailure, match="update 4: the mean loss is nan"):
        runner.run(2, contextlib.nullcontext())


@pytest.mark.parametrize("size", ["tiny", "roberta", "deberta", "qwen3"])
def test_lora_at_the_last_ffn(size: str) -> None:
    pytest.importorskip("peft")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
    import transformers

    architecture = {
        "tiny": transformers.BertConfig,
        "roberta": transformers.RobertaConfig,
        "deberta": transformers.DebertaV2Config,
        "qwen3": partial(transformers.Qwen3Config, num_key_value_heads=2, head_dim=16),
    }[size](vocab_size=50, num_labels=2, pad_token_id=0, **small)
    model = transformers.AutoModelForSequenceClassification.from_config(architecture)
    adapted: nn.Module = others._lora_at_last_ffn(model)
    places = {name.split(".lora_")[0] for name, _ in adapted.named_parameters() if ".lora_" in name}
    layer = {"qwen3": "model.layers.1.mlp"}.get(size)
    assert len(places) == (3 if layer else 2)
    for place in places:
        assert ".1." in place
        assert "att" not in place


# ---------------------------------------------------------------------- gar bench sweep


def test_sweep_counts_updates_of_several_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep.json"
    options = ["--model=tiny", "--jobs=2", "--jobs=1", "--seconds=0.05", "--repeats=2", f"--out={out}"]
    assert bench("sweep", *options) == 0
    report = Report.read(out)
    assert [line.labels["jobs"] for line in report.lines] == ["1", "2"]
    one, two = report.lines
    assert one.per_second is not None
    assert two.per_second is not None
    assert one.ratio == 1
    assert two.ratio is not None
    assert two.ratio > 0
    assert capsys.readouterr().out == report.markdown()


def test_threads_are_those_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    options = ["--model=tiny", "--features=cached", "--method=baseline", "--repeats=1"]
    assert bench("step", *options, f"threads={before + 1}") == 0
    assert f"threads {before + 1}," in capsys.readouterr().out
    assert torch.get_num_threads() == before


def test_a_process_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *arguments: None)  # this is no process of its own
    for overrides, message in (({"experts.top_k": 9}, "expected top_k <= count"), ({}, "out of memory")):
        if not overrides:
            monkeypatch.setattr("os.sysconf", lambda name: 1)
        ours, theirs = multiprocessing.Pipe()
        sweep._work(theirs, setting(overrides=SMALL | overrides), "gar", "cpu", Plan(1, 1))
        assert message in ours.recv()


# ---------------------------------------------------------------------- files and tables


def report_of(*lines: Line) -> Report:
    return Report(
        command="gar bench step",
        note="A test.",
        machine={"device": "none", "torch": "0"},
        reference="Baseline",
        columns=("ms", "ratio"),
        lines=list(lines),
    )


MEASURED = Line(
    labels={"model": "tiny", "method": "gar"},
    ms=Spread(median=1.23456789, lowest=1.0, highest=1e4),
    ratio=1 / 3,
)
FAILED = Line(labels={"model": "tiny", "method": "cagrad"}, problem="out of | memory, at “once”")


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    report = report_of(MEASURED, FAILED)
    report.write(tmp_path / "times.json")
    assert Report.read(tmp_path / "times.json") == report
    report.write(tmp_path / "times.csv")
    with (tmp_path / "times.csv").open(newline="", encoding="utf-8") as file:
        measured, failed = csv.DictReader(file)
    assert float(measured["ms_median"]) == 1.23456789
    assert float(measured["ratio"]) == 1 / 3
    assert (measured["method"], measured["device"], measured["command"]) == ("gar", "none", "gar bench step")
    assert (failed["problem"], failed["ms_median"]) == (FAILED.problem, "")


def test_a_table_may_be_a_part(tmp_path: Path) -> None:
    report = report_of(MEASURED, FAILED)
    assert report.markdown({"method": "gar"}).splitlines()[2:] == [
        "| model | method | ms per update (fastest to slowest) | ratio to Baseline |",
        "|---|---|---|---|",
        "| tiny | gar | 1.2 (1.0 to 10000.0) | 0.33 |",
    ]
    assert (
        report.markdown({"method": "cagrad"}).splitlines()[-1].endswith(r"| out of \| memory, at “once” |  |")
    )
    with pytest.raises(UserError, match="no line with"):
        report.markdown({"method": "other"})


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}', json.dumps({"format": 1, "lines": [{}]})])
def test_what_is_no_report_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"x\.json: .*; expected a file of gar bench --out"):
        Report.read(tmp_path / "x.json")
    with pytest.raises(UserError, match=r"none\.json: no such file"):
        Report.read(tmp_path / "none.json")


# ---------------------------------------------------------------------- the scripts


def test_the_page_has_the_tables_of_its_files(tmp_path: Path) -> None:
    module = script("tables.py")
    pages = [page.read_text(encoding="utf-8") for page in module["PAGES"]]
    for page in pages:
        assert module["filled"](page, module["RESULTS"]) == page
    assert {path.name for path in module["RESULTS"].glob("*.json")} <= set().union(
        *map(module["used"], pages)
    )
    text = "before\n<!-- table: a.json method=gar -->\nold\n<!-- end -->\nafter"
    nothing = module["filled"](text, tmp_path)
    assert "Not measured yet (a.json)" in nothing
    report_of(MEASURED, FAILED).write(tmp_path / "a.json")
    filled = module["filled"](nothing, tmp_path)
    assert report_of(MEASURED).markdown() in filled
    assert filled.startswith("before\n<!-- table: a.json method=gar -->\n")
    assert filled.endswith("<!-- end -->\nafter")
    assert module["filled"](filled, tmp_path) == filled


def test_the_page_of_ranks_has_a_line_a_file(tmp_path: Path) -> None:
    module = script("tables.py")
    ranks = [
        {
            "ranks": 1,
            "ms": 100.0,
            "lowest": 99.0,
            "highest": 101.0,
            "bytes": 0.0,
            "peak_gib": 3.0,
            "speedup": 1.0,
            "captured": 0,
        },
        {
            "ranks": 2,
            "ms": 62.5,
            "lowest": 60.0,
            "highest": 70.0,
            "bytes": 5e6,
            "peak_gib": 2.0,
            "speedup": 1.6,
            "captured": 2,
        },
    ]
    for name, setting in (
        ("a", {"precision": "tf32"}),
        ("b", {"precision": "tf32", "mixture.batch_size": 8}),
    ):
        told = {"setting": setting, "machine": "a machine", "lines": ranks}
        (tmp_path / f"{name}.json").write_text(json.dumps(told), encoding="utf-8")
    text = module["filled"]("<!-- ranks: a.json b.json -->\nold\n<!-- end -->\n", tmp_path)
    numbers = "100.0 (99.0 to 101.0) | 62.5 (60.0 to 70.0) | 1.60 | 5 | 3.0, 2.0 | no, yes |"
    assert text.count("a machine") == 1
    assert f"| tf32 | 32 | {numbers}\n| tf32 | 8 | {numbers}\n\n<!-- end -->" in text
    assert module["used"](text) == {"a.json", "b.json"}


def test_the_page_of_the_trainer_has_paired_differences(tmp_path: Path) -> None:
    module = script("tables.py")
    names = [*module["ARM"], "seed", *module["EFFECT"]]
    arms = {
        ("relative", "0.0"): [0.1, 0.2, 0.3],
        ("raw", "0.5"): [0.2, 0.4, 0.3],
        ("unit", "1.0"): [0.3, 0.4],
    }
    lines = [f"texts,{','.join(names)}"]
    for (gradients, coefficient), values in arms.items():
        for seed, value in enumerate(values):
            arm = f"4,0.01,1.0,{gradients},{coefficient}"
            lines.append(f"a,{arm},{seed},{value},{1 - value},1.5")
            lines.append(f"b,{arm},{seed},0,0,0")
    (tmp_path / "x.csv").write_text("\n".join(lines), encoding="utf-8")
    text = module["filled"]("<!-- trainer: x.csv a -->\nold\n<!-- end -->\n", tmp_path)
    half = stats.t.ppf(0.975, 2) * statistics.stdev([0.1, 0.2, 0.0]) / 3**0.5
    assert "| `gradients` | coefficient | NMI | purity | loss |" in text
    assert "| none | 0 | 0.200 | 0.800 | 1.500 |" in text
    assert f"| raw | 0.5 | +0.100 ± {half:.3f} | −0.100 ± {half:.3f} | +0.000 ± 0.000 |" in text
    assert "| unit | 1 | +0.200 ± 0.000 | −0.200 ± 0.000 |" in text
    assert "old" not in text
    assert module["used"](text) == {"x.csv"}


def test_the_script_of_the_presets() -> None:
    module = script("presets.py")
    assert len(module["chosen"](["paper/*/eight/*", "paper/*/MRPC/*"])) > 30
    with pytest.raises(UserError, match="no preset matches nothing"):
        module["chosen"](["nothing"])
    config = configuration.build(
        {
            "backbone": {"name": "tiny", "max_length": 8},
            "mixture": {"batch_size": 2, "group_size": 2, "tasks": ["rte", "cb"]},
        }
    )
    name, plan = "paper/roberta_head/five/gar", Plan(1, 1, 0)
    line, backbone = module["one_preset"](name, config, CPU, plan, None)
    assert line.problem == ""
    assert line.labels == {"setting": "roberta_head", "subject": "five", "method": "gar"}
    assert line.ms is not None
    again, same = module["one_preset"](name, config, CPU, plan, backbone)
    assert same is backbone
    assert again.problem == ""


def test_the_script_of_the_methods(tmp_path: Path) -> None:
    config = tiny_runs.make_config(tiny_runs.make_world(tmp_path), experts__count=4)
    mixture = load_mixture(config.mixture)
    short_run = script("methods.py")["short_run"]
    line = short_run(config, mixture, CPU, 2, "lora_ffn", 4, "gar")
    first, last = line.labels["loss, first to last update"].split(" to ")
    assert min(float(first), float(last)) > 0
    assert line.ms is not None
    refused = short_run(config, mixture, CPU, 2, "full_ffn", 4, "stgc")
    assert "expected experts.site lora_ffn or lora_head" in refused.problem
    assert refused.labels.keys() == line.labels.keys()


def test_the_script_of_the_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"backbone": {"name": "minilm", "max_length": 8}, "mixture": {"batch_size": 2, "group_size": 2}}
    module = script("precision.py")
    base = {**tree, "experts": {"dropout": 0.0}, "method": {"name": "gar", "coefficient": 1.0}}
    cells = [line.split(" | ") for line in module["lines"](configuration.build(base), CPU)]
    assert [cell[0] for cell in cells] == ["float32", "tf32", "bfloat16"]
    assert cells[1][1] == "computes as float32 here"
    errors = [float(cells[n][1].split(" ")[0]) for n in (0, 2)]
    assert 0 < errors[0] < 1e-4 < 1e-3 < errors[1] < 0.2


def test_the_script_of_the_rows(capsys: Any) -> None:
    script("rows.py")["main"](length=8, repeats=1, device="cpu")
    lines = capsys.readouterr().out.splitlines()
    cells = {row[0]: row for row in ([c.strip() for c in line.split("|")[1:-1]] for line in lines[4:])}
    assert [cells[name][1] for name in ("Baseline", "groups", "examples", "64 examples")] == [
        "",
        "20",
        "160",
        "64",
    ]
    assert float(cells["256 tokens"][4]) < float(cells["256 tokens"][5])


def test_the_script_of_the_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    module = script("starts.py")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    module["main"](runs=2, updates=2, share=0.001, width=32, device="cpu")
    lines = capsys.readouterr().out.splitlines()
    heads, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in (lines[2], *lines[4:]))
    assert [row[0] for row in rows] == ["0, gar", "1, baseline"]
    for row in rows:
        seconds = dict(zip(heads[1:], map(float, row[1:]), strict=True))
        assert all(value > 0 for part, value in seconds.items() if part != "rest")
        # Nothing is counted twice, or there would be less than nothing left for the rest.
        assert seconds["rest"] > -0.01


SIGNAL = {"method__name": "gar", "optimizer__updates": 6, "experts__top_k": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": {"name": "gar", "coefficient": 0.5, "gradients": "unit", "warmup": 3}},
        {"method": {"name": "gar", "coefficient": 0.5, "probabilities": "softmax", "entropy_weight": 0.1}},
        {"method": {"name": "gar", "coefficient": 0.5}, "experts__top_k": 1, "optimizer__clip": 0.01},
        {"method": "baseline"},
    ],
    ids=str,
)
def test_watching_the_router_changes_no_step(tmp_path: Path, changes: dict[str, Any]) -> None:
    """And the two parts of AdamW's step are the optimizer's own moments."""
    found = script("router_signal.py")
    config = tiny_runs.make_config(
        tiny_runs.make_world(tmp_path), **SIGNAL | {"backbone__dtype": "float64"} | changes
    )
    watched = config.model_copy(update={"method": found["Watched"].of(config)})
    updaters = []
    for each in (config, watched):
        model, mixture = tiny_runs.load(each)
        source, _ = make_sources(model, mixture, each.cache)
        updaters.append(Updater(model.train(), source, each, ["mood", "nli"]))
        list(updaters[-1].block(0, 6))
    plain, other = updaters
    assert tiny_runs.largest_difference(*(tiny_runs.weights(u.model) for u in updaters)) < 1e-12
    state = [plain.optimizer.state[p] for p in plain.model.bank.router.parameters()]
    kept: Any = other.state
    method: Any = other.method
    for key, parts in (("exp_avg", ("task", "pull")), ("exp_avg_sq", ("square",))):
        expected = torch.cat([each[key].flatten() for each in state])
        torch.testing.assert_close(sum(kept[part] for part in parts), expected, rtol=1e-9, atol=1e-15)
    told = dict(zip(found["COLUMNS"], method.taken(kept, 6), strict=False))
    assert all(math.isfinite(value) for value in told.values())
    if config.method.name == "baseline":
        assert told["ratio"] == told["step_share"] == 0
        assert told["step_cosine"] == pytest.approx(5 / 6), "B = 0: the first update has no task gradient"


def test_what_the_router_is_told_of_its_groups() -> None:
    """Two groups of task 0 that agree and share an expert, one of task 1 against them, a silent one."""
    found = script("router_signal.py")
    p = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]).double()
    rows = torch.tensor([[3.0, 0.0], [3.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]).double()
    update: Any = SimpleNamespace(
        tasks=torch.tensor([0, 0, 1, 1]),
        task_count=2,
        state={"before": torch.tensor([[1.0, 0.0]] * 2).double()},
    )
    told, lengths = found["_groups"](p, rows, rows, update)
    assert {key: round(float(value), 6) for key, value in told.items()} == {
        "variation_same": 0,
        "variation_other": 1,
        "entropy": 0,
        "length": 7 / 4,
        "cosine_same": 0.5,  # a zero row has cosine 0 with its neighbour
        "cosine_other": -0.5,
        "cosine_next": 0,  # 1 and -1
        "association": 18.5,
        "attained": 1,
        "self_association": round(9.5 / 18.5, 6),
        "contrast": told["contrast"].round(decimals=6),
        "leader_energy": round(18 / 19, 6),
        "leader_association": round(18 / 18.5, 6),
        "leader_contrast": told["leader_contrast"].round(decimals=6),
    }
    assert lengths.tolist() == [3, 0.5]
    assert update.state["before"].tolist() == [[3, 0], [-0.5, 0]]
    alike, _ = found["_groups"](torch.full_like(p, 0.5), rows, rows, update)
    assert float(alike["attained"]) == pytest.approx(0, abs=1e-6)
    assert float(alike["contrast"]) == pytest.approx(0, abs=1e-6)
    nothing, _ = found["_groups"](p, 0 * rows, 0 * rows, update)
    assert all(math.isfinite(float(value)) for value in nothing.values())


def test_the_script_of_the_signal(tmp_path: Path, capsys: Any) -> None:
    """One line for each stretch of updates; what the file has already is not run again."""
    found = script("router_signal.py")
    config, out = tmp_path / "tiny.yaml", tmp_path / "signal.csv"
    config.write_text(json.dumps(tiny_runs.tree(tiny_runs.make_world(tmp_path / "world"), **SIGNAL)))
    arms = ["method.coefficient=0.1", "experts.top_k=1 method=baseline"]
    found["main"](str(config), arm=arms[:1], seeds=2, every=4, out=out)
    first = out.read_text()
    found["main"](str(config), arm=arms, seeds=2, every=4, out=out)
    assert out.read_text().startswith(first)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["seed"], row["update"]) for row in rows] == [
        (arm, seed, update) for arm in arms for seed in "01" for update in "46"
    ]
    assert {f"length {name}" for name in ("mood", "nli")} | {*found["COLUMNS"]} <= rows[0].keys()
    out.write_text("arm,seed\n")
    with pytest.raises(UserError, match="has other columns"):
        found["main"](str(config), arm=arms, seeds=1, every=4, out=out)
    with pytest.raises(UserError, match="expected gar or baseline"):
        found["main"](str(config), overrides=["method=stgc"], every=4, out=tmp_path / "other.csv")
