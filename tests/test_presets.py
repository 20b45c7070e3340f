"""Every preset against the packaged tables, and the tables against what the paper says of them."""

from __future__ import annotations

import csv
import itertools
import json
import pkgutil
import re
import sys
from collections import Counter, defaultdict
from importlib import resources
from pathlib import Path

import pytest
import yaml

from gar import config as configuration
from gar.cli.app import run
from gar.data import find_task, registry
from gar.errors import UserError
from gar.methods import stgc
from gar.presets import catalogue as presets
from gar.presets import paper

SELECTED = paper.configs()
SWEEP = [name for name in presets.names() if name.startswith("paper/lambda_sweep/")]
OWN = [name for name in presets.names() if not name.startswith("paper/")]


def packaged(name):
    """A table once more, without the readers under test."""
    text = resources.files("gar.presets.paper").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


SETTINGS = {row["setting"]: row for row in packaged("settings.csv")}
BASES = yaml.safe_load(resources.files("gar.presets").joinpath("settings.yaml").read_text(encoding="utf-8"))
ROWS = packaged("configs.csv")


# ---------------------------------------------------------------------- the tables


@pytest.mark.parametrize(
    ("read", "rows"),
    [
        (paper.settings, 10),
        (paper.mixtures, 5),
        (paper.configs, 230),
        (paper.endpoints, 1455),
        (paper.paired, 118),
        (paper.lambda_sweep, 626),
        (paper.lambda_sweep_configs, 10),
        (paper.runtime, 6),
    ],
)
def test_row_counts(read, rows):
    assert len(read()) == rows


def test_tables_keep_the_printed_digits_and_no_prose():
    assert paper.lambda_sweep_configs()[0].weight_decay == "0.010"
    assert paper.endpoint("roberta_frozen_lora_ffn", "five", "baseline")["acc"] == "0.6406"
    for name in (
        "settings",
        "configs",
        "endpoints",
        "paired",
        "lambda_sweep",
        "lambda_sweep_configs",
        "runtime",
    ):
        for row in packaged(f"{name}.csv"):
            assert all(len(cell.split()) <= 4 for cell in row.values()), row  # "bf16 with fp32 router"


def test_number_cells_are_numbers():
    for row in (*paper.configs(), *paper.lambda_sweep_configs()):
        assert all(float(cell) >= 0 for cell in row[3:] if cell)
    for endpoint in paper.endpoints():
        assert float(endpoint.value) <= 1
    for pair in paper.paired():
        if pair.unit != "p_value":
            low, mid, high = float(pair.ci_low), float(pair.estimate), float(pair.ci_high)
            assert low < mid < high
            assert (low + high) / 2 == pytest.approx(mid, abs=0.011 if pair.unit == "pp" else 1e-3)


def test_every_metric_has_a_place_in_the_result():
    printed = {row.metric for row in paper.endpoints()} | {
        row.metric for row in paper.paired() if row.unit != "p_value"
    }
    assert printed == set(paper.METRICS)


def test_rows_are_settings_times_subjects_times_methods():
    expected = {
        (setting, subject, method)
        for setting, row in SETTINGS.items()
        for subject in (
            dict(e.split("=") for e in row["epochs"].split(";")) if row["epochs"] else paper.mixtures()
        )
        for method in row["methods"].split(";")
    }
    assert Counter(row[:3] for row in SELECTED) == Counter(expected)
    assert len(expected) == 230


def test_methods_share_clip_and_weight_decay():
    groups = defaultdict(set)
    for row in SELECTED:
        groups[row.setting, row.mixture_or_task].add((row.grad_clip, row.weight_decay))
    assert len(groups) == 50
    assert all(len(shared) == 1 for shared in groups.values())


def test_a_method_has_its_own_columns_and_no_other():
    extra = {"stgc": {"tau_stgc"}, "stgc_load": {"tau_stgc"}}
    special = set(paper.Selected._fields[6:])
    for row in SELECTED:
        filled = {column for column in special if row._asdict()[column]}
        assert filled == set(presets.METHOD_FIELDS[row.method].values()) | extra.get(row.method, set())
    assert {float(row.tau_stgc) for row in SELECTED if row.tau_stgc} == {stgc.THRESHOLD}


def test_selected_values_lie_in_their_ranges_and_twelve_on_an_edge():
    edges: Counter[str] = Counter()
    for row in SELECTED:
        for column, bounds in paper.hpo()["coordinates"].items():
            if cell := row._asdict()[column]:
                assert bounds["low"] <= float(cell) <= bounds["high"]
                edges[column] += float(cell) in (bounds["low"], bounds["high"])
    found = {column: n for column, n in edges.items() if n and column not in ("grad_clip", "weight_decay")}
    assert found == {"beta_stgc": 8, "alpha_switch": 2, "lambda_load": 1, "lambda_align": 1}


def test_search_budgets():
    for entry in paper.hpo()["methods"].values():
        d = len(entry["free"])
        assert (entry["coordinate_sweep"], entry["local_confirmation"]) == (8 * d, 3**d)


def test_mixtures_are_the_registered_ones():
    for name, tasks in paper.mixtures().items():
        assert registry().mixtures[name] == tuple(find_task(task).name for task in tasks)


def test_sweeps_reuse_the_selected_gar_configurations():
    selected = {row[:3]: row for row in SELECTED}
    rows = paper.lambda_sweep_configs()
    assert len(rows) == 10
    for row in rows:
        main = selected[row.setting, row.mixture, "gar"]
        for column in ("learning_rate", "grad_clip", "weight_decay"):
            assert float(getattr(row, column)) == float(getattr(main, column))
        setting = SETTINGS[row.setting]
        for column in ("per_task_batch_size", "group_size", "max_seq_len"):
            assert getattr(row, column) == setting[column]


def test_oddities_that_the_documentation_tells():
    equal = []
    for mixture in paper.mixtures():
        sweep = presets.find(f"paper/lambda_sweep/roberta_head/{mixture}/load_normalized/1e-3").published
        main = presets.find(f"paper/roberta_head/{mixture}/gar").published
        assert float(sweep["util"]) == float(main["util"])
        if all(float(sweep[key]) == float(main[key]) for key in ("lvar", "purity", "util")):
            equal.append(mixture)
            assert float(sweep["acc"]) != float(main["acc"])
    assert equal == ["seven_paws", "seven_mrpc", "eight"]

    entropy = {
        row.comparison: (row.estimate, row.ci_low, row.ci_high)
        for row in paper.paired()
        if (row.setting, row.metric) == ("roberta_head", "norm_routing_entropy")
    }
    assert entropy["gar-stgc"] == entropy["gar-stgc_load"]

    printed = float(paper.endpoint("deberta_single_full_ffn", "MRPC", "baseline")["acc"])
    assert not any(round(right / (408 * 5), 4) == printed for right in range(408 * 5 + 1))


# ---------------------------------------------------------------------- the presets


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['setting']}/{row['mixture_or_task']}/{row['method']}"
)
def test_preset_equals_its_row(row):
    setting, subject = SETTINGS[row["setting"]], row["mixture_or_task"]
    name = f"paper/{row['setting']}/{subject}/{row['method']}"
    preset = presets.find(name)
    config = preset.config(seed=3)
    assert (config.preset, config.seed, preset.name) == (name, 3, name)

    optimizer = config.optimizer
    assert optimizer.learning_rate == float(row["learning_rate"])
    assert optimizer.clip == float(row["grad_clip"])
    assert optimizer.weight_decay == float(row["weight_decay"])
    assert optimizer.warmup == 0.1

    method = config.method.to_config()
    assert method["name"] == row["method"]
    match row["method"]:
        case "baseline":
            assert method == {"name": "baseline"}
        case "cagrad":
            assert (method["c"], method["inner_learning_rate"]) == (float(row["cagrad_c"]), 0.1)
            assert method["inner_steps"] == paper.hpo()["fixed"]["cagrad_inner_steps"]
        case "gar":
            assert (method["coefficient"], method["objective"]) == (
                float(row["lambda_align"]),
                "load_normalized",
            )
            assert method["entropy_weight"] == 0
        case "stgc":
            assert method["coefficient"] == float(row["beta_stgc"])
        case "loadpen":
            assert method["coefficient"] == float(row["lambda_load"])
        case "switchaux":
            assert method["coefficient"] == float(row["alpha_switch"])
        case "stgc_load":
            assert method["coefficient"] == float(row["beta_stgc"])
            assert method["load_coefficient"] == float(row["lambda_load"])

    if row["setting"].startswith("deberta_single"):
        assert config.mixture.tasks == (find_task(subject).name,)
        assert config.mixture.name is None
        assert optimizer.epochs == {"CoLA": 5, "MRPC": 5, "QQP": 3, "RTE": 5, "SST-2": 3}[subject]
        assert (config.experts.count, config.experts.top_k) == (4, 2)
        assert (config.mixture.batch_size, config.mixture.group_size, config.backbone.max_length) == (
            16,
            8,
            128,
        )
    else:
        assert (config.mixture.name, config.mixture.tasks) == (subject, ())
        assert (optimizer.updates, optimizer.epochs) == (2000, None)
        assert (config.experts.count, config.experts.top_k) == (
            8,
            1 if row["setting"].endswith("_top1") else 4,
        )
        assert (config.mixture.batch_size, config.mixture.group_size, config.backbone.max_length) == (
            32,
            8,
            256,
        )

    assert config.experts.site == setting["expert_kind"]
    if config.experts.site != "full_ffn":
        assert (config.experts.rank, config.experts.alpha, config.experts.dropout) == (16, 16.0, 0.1)
    assert config.observation.backward == "one_pass"
    assert config.backbone.pooling == "mean"
    assert preset.choices
    assert preset.published["acc"]


EXPECTED = {  # hub id, trainable, dtype of the weights, precision of the computation
    "roberta_frozen_lora_ffn": ("FacebookAI/roberta-base", False, "float32", "float32"),
    "roberta_frozen_lora_ffn_top1": ("FacebookAI/roberta-base", False, "float32", "float32"),
    "deberta_frozen_lora_ffn": ("microsoft/deberta-v3-base", False, "float32", "float32"),
    "qwen3_1_7b_frozen_lora_ffn": ("Qwen/Qwen3-1.7B", False, "bfloat16", "float32"),
    "qwen3_8b_frozen_lora_ffn": ("Qwen/Qwen3-8B", False, "bfloat16", "float32"),
    "roberta_head": ("FacebookAI/roberta-base", True, "float32", "bfloat16"),
    "roberta_head_top1": ("FacebookAI/roberta-base", True, "float32", "bfloat16"),
    "deberta_full_ffn": ("microsoft/deberta-v3-base", True, "float32", "float32"),
    "deberta_single_lora_ffn": ("microsoft/deberta-v3-base", False, "float32", "float32"),
    "deberta_single_full_ffn": ("microsoft/deberta-v3-base", True, "float32", "float32"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_base_agrees_with_the_printed_setting(setting):
    row, entry = SETTINGS[setting], BASES["settings"][setting]
    config = configuration.build(entry["config"])
    backbone, experts, mixture = config.backbone, config.experts, config.mixture
    assert row["backbone_hub_id"] in ("", backbone.name)
    assert backbone.trainable == (row["backbone_trainable"] == "trainable")
    half = (config.precision if backbone.trainable else backbone.dtype) == "bfloat16"
    assert half == row["precision"].startswith("bf16")
    assert experts.site == row["expert_kind"]
    printed = {
        "experts": experts.count,
        "top_k": experts.top_k,
        "max_seq_len": backbone.max_length,
        "per_task_batch_size": mixture.batch_size,
        "group_size": mixture.group_size,
        "optimizer_updates": config.optimizer.updates,
        "warmup_ratio": config.optimizer.warmup,
        "rank": experts.rank,
        "lora_alpha": experts.alpha,
        "lora_dropout": experts.dropout,
    }
    for column, value in printed.items():
        if row[column]:
            assert float(row[column]) == value, column
    epochs = dict(cell.split("=") for cell in row["epochs"].split(";") if cell)
    assert {task: float(number) for task, number in epochs.items()} == entry.get("epochs", {})


def test_backbones_and_precisions():
    assert set(EXPECTED) == set(SETTINGS)
    for row in SELECTED:
        config = presets.find("/".join(("paper", *row[:3]))).config()
        backbone = config.backbone
        found = (backbone.name, backbone.trainable, backbone.dtype, config.precision)
        assert found == EXPECTED[row.setting], row


def test_sweep_presets():
    coefficients = ["0", "1e-5", "1e-4", "1e-3", "1e-2"]
    mixtures = ["five", "six", "seven_paws", "seven_mrpc", "eight"]
    grid = itertools.product(["roberta_frozen_lora_ffn", "roberta_head"], mixtures, coefficients)
    expected = {f"paper/lambda_sweep/{s}/{m}/load_normalized/{c}" for s, m, c in grid}
    expected |= {f"paper/lambda_sweep/roberta_head/{m}/numerator_only/1e-3" for m in mixtures}
    assert set(SWEEP) == expected
    for name in SWEEP:
        _, _, setting, mixture, objective, coefficient = name.split("/")
        config, main = presets.find(name).config(), presets.find(f"paper/{setting}/{mixture}/gar").config()
        assert config.method.to_config() == {
            "name": "gar", "coefficient": float(coefficient), "objective": objective, "entropy_weight": 0.0,
        }  # fmt: skip
        assert config.optimizer.updates == 1000
        changed = {"method": main.method, "optimizer.updates": 2000, "preset": main.preset}
        same = config.to_dict()
        for key, value in changed.items():
            configuration.set_key(same, key, value)
        assert configuration.build(same) == main


def test_sweep_values_are_those_of_the_table():
    published = presets.find("paper/lambda_sweep/roberta_head/five/load_normalized/1e-3").published
    cells = {
        c.row: c.value
        for c in paper.lambda_sweep()
        if c[:4] == ("roberta_head", "five", "load_normalized", "1e-3")
    }
    assert float(published["acc"]) == pytest.approx(float(cells["macro"]) / 100)
    assert float(published["seed_std"]) == pytest.approx(float(cells["seed_std"]) / 100)
    assert (published["lvar"], published["purity"], published["util"]) == (
        cells["lvar"], cells["purity"], cells["util"],
    )  # fmt: skip


def test_own_presets():
    assert {name.split("/")[1] for name in OWN} == {"five", "six", "seven", "eight"}
    for name in OWN:
        preset = presets.find(name)
        config = preset.config()
        assert config.mixture.name == "bigbench_" + name.split("/")[1]
        assert config.backbone.name == "minilm"
        assert config.method.name == name.split("/")[2]
        assert not preset.published
        assert "not from the paper" in preset.choices["hyper-parameters"]
    baseline, gar = (presets.find(f"bigbench/five/{m}").config() for m in ("baseline", "gar"))
    assert baseline.optimizer == gar.optimizer


@pytest.mark.parametrize(
    ("name", "present", "absent"),
    [
        (
            "roberta_head/five/gar",
            {"backbone.name", "precision", "WiC input", "seed"},
            {"backbone.pooling", "STGC"},
        ),
        ("roberta_head/six/stgc_load", {"STGC", "experts.dropout_mask"}, {"WiC input", "frozen backbone"}),
        (
            "deberta_full_ffn/five/cagrad",
            {"CAGrad solver", "backbone.pooling"},
            {"backbone.name", "precision"},
        ),
        ("qwen3_8b_frozen_lora_ffn/six/gar", {"backbone.dtype", "pairs", "frozen backbone"}, {"WiC input"}),
        ("deberta_single_lora_ffn/QQP/gar", {"optimizer.epochs", "QQP input"}, {"pairs", "CAGrad solver"}),
        (
            "roberta_frozen_lora_ffn_top1/five/gar",
            {"experts.top_k", "frozen backbone"},
            {"trainable backbone"},
        ),
    ],
)
def test_choices_apply_to_their_presets(name, present, absent):
    choices = presets.find(f"paper/{name}").choices
    assert present <= set(choices)
    assert not absent & set(choices)


def test_every_choice_is_used_and_reads_well():
    seen = set()
    for name in presets.names():
        for key, note in presets.find(name).choices.items():
            seen.add(key)
            assert note == note.strip()
            assert not re.search(r"[{}\n]|None|^$", note), (name, key, note)
    groups = [group for section in ("choices", "tasks", "methods") for group in BASES[section].values()]
    groups += [entry["choices"] for entry in BASES["settings"].values()]
    assert seen == {key for group in groups for key in group}


def test_a_chosen_key_has_the_chosen_value():
    for name in presets.names():
        preset = presets.find(name)
        tree = preset.config().to_dict()
        for key, note in preset.choices.items():
            section, _, field = key.partition(".")
            if section in tree and field in (tree[section] if isinstance(tree[section], dict) else ()):
                assert note.startswith(f"{tree[section][field]}; "), (name, key)


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("PAPER/Roberta-Head/five/GAR", "paper/roberta_head/five/gar"),
        ("paper/deberta_single_lora_ffn/sst2/gar", "paper/deberta_single_lora_ffn/SST-2/gar"),
        ("paper/deberta_single_lora_ffn/cola/gar", "paper/deberta_single_lora_ffn/CoLA/gar"),
        ("paper/lambda_sweep/roberta_head/five/load_normalized/1e-3",) * 2,
    ],
)
def test_spellings(spelling, name):
    assert presets.is_preset(spelling)
    assert presets.find(spelling).name == name


def test_patterns():
    assert len(presets.names("deberta_single")) == 30
    assert (
        presets.names("paper/*/five/gar")
        == [name for name in presets.names() if name.endswith("/five/gar")][:-1]
    )
    assert presets.names("no such thing") == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("paper/roberta_head/five/garr", "did you mean 'paper/roberta_head/five/gar'?"),
        (
            "paper/roberta_head/five",
            "below it are baseline, cagrad, gar, loadpen, stgc, stgc_load, switchaux",
        ),
        ("paper/lambda_sweep/roberta_head/five/load_normalized/1e3", "did you mean"),
        ("xyzzy", "gar presets ls"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(UserError, match=re.escape(message)):
        presets.find(name)


# ---------------------------------------------------------------------- one word to a configuration


def test_resolve_preset_with_overrides():
    config = presets.resolve_config("paper/roberta_head/five/gar", ["optimizer.updates=10", "seed=4"])
    assert (config.optimizer.updates, config.seed, config.method.to_config()["coefficient"]) == (10, 4, 1e-3)
    other = presets.resolve_config("paper/roberta_head/five/gar", {"method.name": "baseline"})
    assert other.method.to_config() == {"name": "baseline"}


def test_resolve_file_mixture_and_task(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("mixture: {tasks: [rte]}\n")
    assert presets.resolve_config(str(path), ["seed=2"]).seed == 2
    assert presets.resolve_config("Seven-PAWS").mixture.name == "seven_paws"
    assert presets.resolve_config("five", ["optimizer.updates=7"]).optimizer.updates == 7
    assert presets.resolve_config("SST-2").mixture.tasks == ("sst2",)


def test_a_directory_does_not_hide_a_mixture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("five").mkdir()
    Path("mine").mkdir()
    assert presets.resolve_config("five").mixture.name == "five"
    with pytest.raises(UserError, match="is a directory"):
        presets.resolve_config("mine")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("fivee", "did you mean 'five'?"),
        ("colla", "did you mean 'cola'?"),
        ("bigbench/five/garr", "did you mean 'bigbench/five/gar'?"),
        ("bigbench/five", "below it are baseline"),
        ("missing.yaml", "missing.yaml: no such file"),
    ],
)
def test_resolve_unknown(what, message):
    with pytest.raises(UserError, match=re.escape(message)):
        presets.resolve_config(what)


def test_deviations():
    name = "paper/roberta_head/five/gar"
    neutral = ["seed=3", "device=cpu", "checkpoint.every=9", "max_tokens_per_pass=4096", "data_dir=somewhere"]
    assert presets.deviations(presets.resolve_config(name, neutral)) == []
    changed = presets.resolve_config(name, ["optimizer.updates=10", "backbone.pooling=first"])
    assert presets.deviations(changed) == ["backbone.pooling", "optimizer.updates"]
    assert "method.name" in presets.deviations(presets.resolve_config(name, ["method=stgc"]))
    assert presets.deviations(presets.resolve_config("five")) == []


def test_check_refuses_what_cannot_run(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("method: cagrad\nmixture: {tasks: [rte], batch_size: 8}\n")
    with pytest.raises(UserError, match="one group"):
        presets.check(str(path))
    path.write_text("mixture: fivee\n")
    with pytest.raises(UserError, match="five"):
        presets.check(str(path))


# ---------------------------------------------------------------------- the command


@pytest.fixture
def gar(capsys, monkeypatch):
    def call(*arguments):
        words = ["presets", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", ["gar", *words])
        code = run(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_ls(gar):
    code, out, _ = gar("ls")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == presets.names()
    code, out, _ = gar("ls", "paper/roberta_head/*/gar", "--format", "json")
    found = json.loads(out)
    assert [entry["subject"] for entry in found] == ["five", "six", "seven_paws", "seven_mrpc", "eight"]
    assert found[0]["origin"].startswith("paper, tab:")
    assert gar("ls", "xyzzy")[0] == 2


def test_show_prints_the_configuration_and_the_choices(gar):
    name = "paper/deberta_single_full_ffn/CoLA/cagrad"
    code, out, _ = gar("show", name)
    assert code == 0
    assert configuration.build(yaml.safe_load(out)) == presets.find(name).config()
    for key, choice in presets.find(name).choices.items():
        assert f"#   {key}: {choice}\n" in out


@pytest.mark.parametrize(
    "name", ["paper/qwen3_1_7b_frozen_lora_ffn/eight/stgc_load", SWEEP[0], SWEEP[-1], OWN[0]]
)
def test_cp_and_load(gar, tmp_path, name):
    path = tmp_path / "new" / "copy.yaml"
    assert gar("cp", name, path)[0] == 0
    assert configuration.load(path) == presets.find(name).config()
    code, _, err = gar("cp", "bigbench/five/gar", path)
    assert (code, err.count("\n")) == (2, 1)
    assert "--force" in err
    assert configuration.load(path) == presets.find(name).config()
    assert gar("cp", "bigbench/five/gar", path, "--force")[0] == 0
    assert configuration.load(path).preset == "bigbench/five/gar"
    assert gar("cp", name, tmp_path)[0] == 2


def test_every_preset_survives_a_file(tmp_path):
    for name in presets.names():
        preset = presets.find(name)
        path = presets.write(preset, tmp_path / "preset.yaml", force=True)
        assert configuration.load(path) == preset.config()


def test_validate(gar, tmp_path):
    code, out, err = gar("validate")
    assert (code, out, err) == (0, f"{len(presets.names())} valid, 0 invalid\n", "")
    bad = tmp_path / "bad.yaml"
    bad.write_text("experts: {count: 2, top_k: 4}\n")
    code, out, err = gar("validate", "bigbench/five/gar", bad, "nothing.yaml")
    assert code == 2
    assert out == "1 valid, 2 invalid\n"
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert "top_k is 4" in first
    assert second == "error: nothing.yaml: no such file"


# ---------------------------------------------------------------------- docs/paper.md


@pytest.fixture(scope="module")
def page():
    path = Path(__file__).parents[1] / "docs" / "paper.md"
    if not path.is_file():
        pytest.skip("not a source checkout")
    return path.read_text(encoding="utf-8")


def test_the_page_maps_every_setting_and_table(page):
    for setting in SETTINGS.values():
        assert f"`{setting['setting']}`" in page
        for column in ("config_tables", "endpoint_tables", "sweep_config_tables"):
            assert all(label in page for label in setting[column].split(";"))


def test_the_page_lists_every_packaged_reader_and_the_hub_ids(page):
    for reader in (
        "endpoints",
        "paired",
        "lambda_sweep",
        "configs",
        "settings",
        "mixtures",
        "runtime",
        "hpo",
    ):
        assert f"{reader}()" in page
    assert all(BASES["settings"][setting]["config"]["backbone"]["name"] in page for setting in SETTINGS)


def test_names_on_the_page_exist(page):
    for dotted in re.findall(r"`(gar\.[A-Za-z_.]+)", page):
        assert pkgutil.resolve_name(dotted) is not None
    for preset in re.findall(r"paper/\w+/\w+/\w+\b(?!/)", page):
        assert presets.is_preset(preset), preset
    suites = {
        path.name.removesuffix(".yaml") for path in resources.files("gar.sweeps").joinpath("suites").iterdir()
    }
    mentioned = set(re.findall(r"gar sweep (\w+)|`(paper_\w+)`", page))
    assert {a or b for a, b in mentioned} <= suites


def test_packaged_files_are_in_the_wheel():
    """The globs of pyproject.toml cover every data file beside the modules."""
    project = Path(presets.__file__).parents[3] / "pyproject.toml"
    if not project.is_file():
        pytest.skip("not a source checkout")
    import tomllib

    globs = tomllib.loads(project.read_text())["tool"]["setuptools"]["package-data"]["gar"]
    root = Path(presets.__file__).parents[1]
    covered = {path for glob in globs for path in root.glob(glob)}
    folder = root / "presets"
    data = [*folder.glob("*.yaml"), *(folder / "paper").glob("*.csv"), *(folder / "paper").glob("*.yaml")]
    assert len(data) == 11
    assert set(data) <= covered
