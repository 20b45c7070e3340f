"""The report's files: numbers, escaping, self-containment; the figures; the command."""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Annotation

from gar.cli.app import run as gar
from gar.errors import UserError
from gar.presets import catalogue as presets
from gar.report import figures, write
from gar.report._style import svg
from gar.report.results import load
from support.made_up_runs import write_run, write_sweep
from support.pages import read

NASTY = "<script>alert(1)</script> & 50%_ü $x$ {y} \\z | 漢"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    root = tmp_path_factory.mktemp("sweep")
    results = load(write_sweep(root / "runs"))
    return results, write(results, root / "report")


@pytest.fixture(scope="module")
def nasty(tmp_path_factory):
    """Names from data that would break a page, a table or a formula."""
    root = tmp_path_factory.mktemp("nasty")
    tree = {
        "mixture": {
            "name": NASTY,
            "tasks": [{"name": name, "train": "a.csv", "validation": "b.csv"} for name in (NASTY, "b")],
        }
    }
    for method in ("baseline", "gar"):
        for seed in (1, 2):
            accuracy = {NASTY: 0.5 + 0.01 * seed, "b": 0.6}
            write_run(
                root / "runs", method, seed, NASTY, accuracy=accuracy, tree=tree, name=f"{method}{seed}"
            )
    write_run(root / "runs", "gar", 3, NASTY, state="failed", tree=tree, name="failed <b>&")
    return write(load(root / "runs"), root / "report")


def test_endpoint_table_shows_the_numbers(sweep):
    results, files = sweep
    table = read(files["report.html"].read_text(encoding="utf-8")).tables["s1-endpoints"]
    shown = {(row[0], row[1]): row for row in table[1:]}
    assert len(shown) == 21  # two mixtures and their mean, seven methods
    for mixture in ("six", "seven_mrpc"):
        values = [
            json.loads((run.path / "result.json").read_text())["accuracy"]["macro"]
            for run in results.cell(results.settings[0], mixture, "GAR").values()
        ]
        row = shown[mixture, "GAR"]
        assert row[2:5] == ["3", f"{100 * np.mean(values):.2f}", f"{100 * np.std(values):.2f}"]


def test_paired_table_and_csv_agree_with_the_results(sweep):
    results, files = sweep
    expected = results.paired("accuracy", "gar", "baseline").set_index("scope")
    with files["paired.csv"].open(encoding="utf-8") as file:
        rows = [
            r
            for r in csv.DictReader(file)
            if (r["metric"], r["a"], r["b"]) == ("accuracy", "GAR", "Baseline")
        ]
    for row in rows:
        assert float(row["mean"]) == expected.loc[row["scope"], "mean"]
        assert float(row["low"]) == expected.loc[row["scope"], "low"]
        assert {int(s): d for s, d in json.loads(row["differences"]).items()} == expected.loc[
            row["scope"], "differences"
        ]
    table = read(files["report.html"].read_text(encoding="utf-8")).tables["s1-paired"]
    whole = next(row for row in table if row[:2] == ["mean of 2 mixtures", "GAR − Baseline"])
    mean = expected.loc["mean of 2 mixtures", "mean"]
    assert whole[3] == f"{100 * mean:+.2f}"
    assert whole[5] == "below the interval"


def test_every_section_is_there(sweep):
    _, files = sweep
    text = files["report.html"].read_text(encoding="utf-8")
    page = read(text)
    for name in (
        "problems",
        "s1-endpoints",
        "s1-paired",
        "s1-further",
        "s1-times",
        "s1-configurations",
        "s1-versions",
    ):
        assert page.tables[name], name
    drawings = 4 + 3 * 2  # three a mixture; no coefficient sweep here
    assert text.count('<div class="panels"') == drawings
    assert page.tags["svg"] > drawings  # an element a panel
    assert "Coefficient sweep: no method has runs with more than one coefficient." in text
    assert "s1-head-sweep" not in text  # no heading for what is not there
    states = {row[0]: row[-1] for row in page.tables["problems"][1:]}
    assert set(states) == {"failed", "unfinished", "unreadable"}
    assert "update 31: the loss of task <b>rte</b> & co is nan" in states["failed"]
    assert "5–6 tasks: six alone, see there." in text


@pytest.mark.parametrize("which", ["sweep", "nasty"])
def test_page_is_self_contained_and_its_ids_are_unique(which, request):
    made = request.getfixturevalue(which)
    files = made[1] if which == "sweep" else made
    text = files["report.html"].read_text(encoding="utf-8")
    page = read(text)
    assert [name for name, count in Counter(page.ids).items() if count > 1] == []
    assert re.findall(r"https?://[^\s\"'<]*", text) == []
    assert all(link.startswith(("#", "data:")) for link in page.links)
    known = {f"#{name}" for name in page.ids}
    assert {link for link in page.links if link.startswith("#")} <= known
    assert {f"#{name}" for name in re.findall(r"url\(#([^)]+)\)", text)} <= known
    assert page.tags["script"] == 2  # ours


def test_names_from_data_are_escaped(nasty):
    page = read(nasty["report.html"].read_text(encoding="utf-8"))
    assert page.tables["s1-endpoints"][1][0] == NASTY
    assert any(row[1].endswith("failed <b>&") for row in page.tables["problems"])
    markdown = nasty["report.md"].read_text(encoding="utf-8")
    assert "<script" not in markdown
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; 50%\\_ü \\$x\\$ {y} \\\\z \\| 漢" in markdown


def test_figures_survive_names_from_data(nasty):
    drawings = [path for name, path in nasty.items() if name.startswith("figures/")]
    assert len(drawings) >= 4
    text = ""
    for path in drawings:
        root = ElementTree.parse(path).getroot()  # well-formed
        text += "".join(root.itertext())
    assert "$x$" in text
    assert "漢" in text


@pytest.mark.parametrize("which", ["sweep", "nasty"])
def test_latex_is_balanced_and_escaped(which, request):
    made = request.getfixturevalue(which)
    text = (made[1] if which == "sweep" else made)["tables.tex"].read_text(encoding="utf-8")
    bare = re.sub(r"\\[\\{}&%$#_]", "", text)
    assert bare.count("{") == bare.count("}")
    assert text.count(r"\toprule") == text.count(r"\bottomrule") == text.count(r"\end{tabular}") > 4
    text = text[text.index("% Setting") :]  # what comes before are macros
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    assert not re.search(r"(?<!\\)[%$#_]", re.sub(r"\\label\{[^}]*\}", "", body))
    for table in re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        rows = [line for line in table[1].splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(table[0])}


def test_markdown_tables_are_rectangular(sweep, nasty):
    for files in (sweep[1], nasty):
        text = files["report.md"].read_text(encoding="utf-8")
        for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
        for picture in re.findall(r"!\[.*?\]\((figures/.*?)\)", text):
            assert (files["report.md"].parent / picture).is_file()


def test_report_is_the_same_twice(sweep, tmp_path):
    results, files = sweep
    again = write(load([run.path for run in results.runs]), tmp_path)
    for name in ("report.html", "report.md", "tables.tex", "paired.csv"):
        assert again[name].read_text(encoding="utf-8") == files[name].read_text(encoding="utf-8"), name


def test_one_seed_promises_nothing(tmp_path):
    for method in ("baseline", "gar"):
        write_run(tmp_path / "runs", method, 1)
    files = write(load(tmp_path / "runs"), tmp_path / "report")
    text = files["report.html"].read_text(encoding="utf-8")
    page = read(text)
    assert [row[4:6] for row in page.tables["s1-endpoints"][1:]] == [["–", "–"], ["–", "–"]]
    assert page.tables["s1-paired"][1][4:] == ["–", "one seed: no interval"]
    assert "One seed has no interval, so its difference may be chance alone." in text
    assert "±" not in re.sub(
        r"<(caption|summary|style)>.*?</\1>|aria-label=\"[^\"]*\"", "", text, flags=re.DOTALL
    )


def test_refused_comparisons_say_why(tmp_path):
    for method, seeds in (("baseline", (1, 2)), ("gar", (1, 2, 3))):
        for seed in seeds:
            write_run(tmp_path / "runs", method, seed)
    results = load(tmp_path / "runs")
    text = write(results, tmp_path / "a")["report.md"].read_text(encoding="utf-8")
    assert "five, GAR − Baseline: not compared: Baseline lacks seed 3." in text
    assert "five: methods have different seeds, so neither means nor ● compare like with like." in text
    text = write(results, tmp_path / "b", common_seeds=True)["report.md"].read_text(encoding="utf-8")
    assert "five, GAR − Baseline: over seeds 1, 2 only: Baseline lacks seed 3." in text


def write_presets(root, updates=None):
    for method, seeds in (("baseline", (0.76, 0.77)), ("gar", (0.78, 0.79))):
        preset = presets.find(f"paper/roberta_head/five/{method}")
        for seed, accuracy in enumerate(seeds):
            tree = preset.config(seed).to_dict()
            fields = {key: value for key, value in tree.pop("method").items() if key != "name"}
            del tree["seed"]
            if updates:
                tree["optimizer"]["updates"] = updates
            write_run(root, method, seed, accuracy=accuracy, tree=tree, fields=fields)


def test_the_papers_values_stand_beside(tmp_path):
    write_presets(tmp_path / "runs")
    files = write(load(tmp_path / "runs"), tmp_path / "report")
    text = files["report.html"].read_text(encoding="utf-8")
    table = read(text).tables["s1-paper-endpoints"]
    gar_row = next(row for row in table if row[1] == "GAR")
    printed = 100 * float(presets.find("paper/roberta_head/five/gar").published["acc"])
    assert gar_row[4] == "78.50"
    assert gar_row[6:] == [
        f"{printed:.2f}",
        f"{78.5 - printed:+.2f}".replace("-", "−"),
        "inside our interval",
    ]
    assert "roberta_head: " in text
    assert "Not a reproduction" not in text


def test_a_changed_preset_is_no_reproduction(tmp_path):
    write_presets(tmp_path / "runs", updates=20)
    text = write(load(tmp_path / "runs"), tmp_path / "report")["report.md"].read_text(encoding="utf-8")
    assert "Not a reproduction: 4 runs differ from their preset in optimizer.updates." in text


def test_every_figure_draws(sweep):
    results, _ = sweep
    for name, draw in figures.FIGURES.items():
        if name != "coefficient_sweep":
            assert svg(draw(results), name, name).startswith("<svg")
    assert len(figures.trajectories(results).axes) == 8  # the loss, four panels, the legend, two spares
    assert figures.loads(results)._repr_svg_().startswith("<svg")  # type: ignore[attr-defined]


def test_the_line_of_uniform_load(sweep):
    results, _ = sweep
    for axes in figures.loads(results).axes:
        if axes.patches:
            assert any(np.allclose(line.get_ydata(), 1 / 8) for line in axes.lines)


def test_balance_marks_are_means_over_seeds(tmp_path):
    for coefficient in (0.01, 0.1):
        for seed in (1, 2, 3):
            # The routing is drawn by the seed, so that other seeds are other means.
            write_run(tmp_path, "gar", seed + round(30 * coefficient), fields={"coefficient": coefficient})
    write_run(tmp_path, "baseline", 1)
    results = load(tmp_path)
    (setting,) = results.settings
    (scope,) = results.scopes(setting)
    for axes, name in zip(figures.balance(results).axes, ("purity_above_floor", "nmi"), strict=False):
        marks = [line for line in axes.lines if line.get_markersize() == 9]
        for line, variant in zip(marks, results.variants(setting), strict=True):
            means = [results.values(m, setting, scope, variant).mean() for m in ("effective_experts", name)]
            np.testing.assert_allclose(np.asarray(line.get_xydata())[0], means)
        crosses = [line for line in axes.lines if line.get_marker() == "x"]
        assert [np.size(line.get_xdata()) for line in crosses] == [1, 3, 3]
        (arrow,) = [text for text in axes.texts if isinstance(text, Annotation)]
        start, stop = (np.asarray(line.get_xydata())[0] for line in marks[1:])
        np.testing.assert_allclose(np.array([arrow.xyann, arrow.xy]), np.array([start, stop]))
        low, high = axes.get_xlim()
        assert low < 0.8 < high  # all four fields are in sight
        assert axes.get_ylim()[1] > 0.3


def test_bands_are_standard_errors(sweep):
    results, _ = sweep
    table = results.histories
    table = table[(table["variant"] == "GAR") & (table["update"] == 500)]
    seeds = 100 * table.groupby("seed")["accuracy"].mean()  # mixtures within a seed first
    axes = next(
        a for a in figures.trajectories(results).axes if a.get_title(loc="left").startswith("accuracy")
    )
    band = next(c for c in axes.collections if str(c.get_gid()).startswith("series:gar:"))
    ends = band.get_paths()[0].vertices
    at = np.unique(ends[np.isclose(ends[:, 0], 500), 1])
    half = seeds.std(ddof=1) / np.sqrt(3)
    assert (at.min(), at.max()) == pytest.approx((seeds.mean() - half, seeds.mean() + half))


def test_coefficient_sweep_draws_zero_apart(tmp_path):
    for coefficient in (0.0, 1e-3, 1e-2):
        for seed in (1, 2):
            write_run(
                tmp_path,
                "gar",
                seed,
                fields={"coefficient": coefficient},
                accuracy=0.6 + coefficient + seed / 100,
            )
    for seed in (1, 2):
        write_run(tmp_path, "baseline", seed)
    axes = figures.coefficient_sweep(load(tmp_path)).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "0.001", "0.01"]
    line = axes.containers[0].lines[0]  # type: ignore[attr-defined]
    assert line.get_ydata() == pytest.approx([61.5, 61.6, 62.5])


def test_a_sweep_with_differing_seed_counts_is_drawn(tmp_path):
    """Two seeds, one seed, and a coefficient that lacks a mixture, so that it has no mean over both."""
    cells: dict[float, dict[str, tuple[int, ...]]] = {
        1e-3: {"five": (1, 2), "six": (1, 2)},
        1e-2: {"five": (1,), "six": (1,)},
        1e-1: {"five": (1,)},
    }
    for coefficient, mixtures in cells.items():
        for mixture, seeds in mixtures.items():
            for seed in seeds:
                write_run(tmp_path, "gar", seed, mixture, fields={"coefficient": coefficient})
    write_run(tmp_path, "baseline", 1)
    results = load(tmp_path)
    axes = figures.coefficient_sweep(results).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.001", "0.01", "0.1"]
    line: Any = axes.containers[0][0]
    assert line.get_ydata() == pytest.approx([60, 60, np.nan], nan_ok=True)
    for common_seeds in (False, True):
        page = write(results, tmp_path / "report", common_seeds)["report.html"].read_text(encoding="utf-8")
        assert 'id="s1-sweep"' in page


def test_figures_say_what_they_cannot_draw(tmp_path):
    write_run(tmp_path, "gar", 1)
    write_run(tmp_path, "gar", 2, tree={"experts": {"count": 4, "top_k": 2}})
    results = load(tmp_path)
    with pytest.raises(UserError, match="several settings"):
        figures.loads(results)
    with pytest.raises(UserError, match="setting: unknown name 'nine'"):
        figures.loads(results, "nine")
    with pytest.raises(figures.NothingToDraw, match="no two methods"):
        figures.paired_gains(results, results.settings[0])


def test_command_prints_the_table_and_the_paths(tmp_path, capsys):
    for method in ("baseline", "gar"):
        for seed in (1, 2):
            write_run(tmp_path / "runs", method, seed, accuracy=0.6 + seed / 100)
    write_run(tmp_path / "runs", "gar", 3, state="failed")
    assert gar(["report", str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    assert "Baseline" in out
    assert "61.50" in out
    assert str(tmp_path / "runs" / "report" / "report.html") in out
    assert gar(["report", str(tmp_path / "runs" / "five-gar--1"), "--out", str(tmp_path / "other")]) == 0
    assert (tmp_path / "other" / "report.html").is_file()
    assert gar(["report", str(tmp_path / "runs" / "five-gar--1")]) == 0
    assert not (tmp_path / "runs" / "five-gar--1" / "report").exists()


def test_command_without_runs_is_one_line_and_two(tmp_path, capsys):
    assert gar(["report", str(tmp_path)]) == 2
    assert gar(["report", str(tmp_path / "nowhere")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "no run directories in" in lines[0]
    assert "no such directory" in lines[1]


def test_only_unfinished_runs_still_make_a_report(tmp_path):
    write_run(tmp_path / "runs", "gar", 1, state="running")
    files = write(load(tmp_path / "runs"), tmp_path / "report")
    assert "No finished runs yet." in files["report.html"].read_text(encoding="utf-8")
    with files["endpoints.csv"].open(encoding="utf-8") as file:
        assert next(csv.reader(file))[:3] == ["setting", "scope", "kind"]
