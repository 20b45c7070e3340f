"""What leaves the report for a paper or a notebook: LaTeX, PDF, HTML; and the paper's values beside ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from scipy import stats

from gar.cli.app import run as gar
from gar.presets import catalogue as presets
from gar.report import _draw, load, write
from gar.report._latex import latex
from gar.report._page import Picture, build_page
from gar.report._table import Row, Table
from support.made_up_runs import write_run, write_sweep
from support.pages import read

DOCUMENT = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage{booktabs}
\usepackage{graphicx}
\begin{document}
\input{tables.tex}
\input{tables.tex}
\end{document}
"""


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    root = tmp_path_factory.mktemp("sweep")
    return root / "runs", write(load(write_sweep(root / "runs")), root / "report", pdf=True)


def compiled(folder: Path) -> str:
    """What pdfLaTeX says about a folder's tables.tex, read twice."""
    command = shutil.which("pdflatex")
    if command is None:
        pytest.skip("no pdflatex on this machine")
    (folder / "all.tex").write_text(DOCUMENT, encoding="utf-8")
    done = subprocess.run(
        [command, "-interaction=nonstopmode", "-halt-on-error", "all.tex"],
        cwd=folder, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=300,
        env={**os.environ, "max_print_line": "1000"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_tables_compile_and_fit_the_page(sweep: tuple[Path, dict[str, Path]]) -> None:
    said = compiled(sweep[1]["tables.tex"].parent)
    assert "Overfull" not in said
    assert "too large" not in said  # a float for its page


def test_tables_with_any_names_compile(tmp_path: Path) -> None:
    """Many methods with long names, nasty ones among them, and a mixture of as many tasks as there are."""
    nasty = "50%_ü $x$ {y} \\z | 漢 long"
    shares = {f"{nasty} {number}": 0.5 + number / 100 for number in range(9)}
    tasks = [{"name": name, "train": "a.csv", "validation": "b.csv"} for name in shares]
    for method in ("baseline", "gar"):
        for seed in range(3):
            for rate in (1e-3, 2e-3, 5e-3):
                tree = {"mixture": {"name": nasty, "tasks": tasks}, "optimizer": {"learning_rate": rate}}
                write_run(tmp_path / "runs", method, seed, nasty, tree=tree, name=f"{method}{seed}{rate}",
                          accuracy={name: share + seed / 50 for name, share in shares.items()})  # fmt: skip
    write(load(tmp_path / "runs"), tmp_path)
    assert "Overfull" not in compiled(tmp_path)


def test_long_tables_are_set_in_parts() -> None:
    rows = [
        Row({"mixture": f"m{at // 30}", "mean": at, **{f"a long heading {n}": at for n in range(12)}},
            group=f"m{at // 30}") for at in range(90)
    ]  # fmt: skip
    text = latex(Table("t", "Many", rows, ["a note"]), "tab:t")
    tables = re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", text, re.DOTALL)
    heads = [table.splitlines()[2] for _, table in tables]
    assert all(head.startswith("mixture & ") for head in heads)
    # Every number of every row once, each row beside its name; no part is longer than a page.
    lines = [line for _, table in tables for line in table.splitlines() if line.startswith("m")]
    cells = [line[:-3].split(" & ") for line in lines if line not in heads]
    assert sum(len(row) - 1 for row in cells) == 90 * 13
    assert all(row[0] == f"m{int(value) // 30}" for row in cells for value in row[1:])
    assert all(table.count(r"\\") <= 42 for _, table in tables)
    assert text.count("(continued)") == len(tables) - 1
    assert text.count("a note") == 1
    assert len(set(re.findall(r"\\label\{(.*?)\}", text))) == len(tables)


def test_marks_are_intervals_that_exclude_zero(sweep: tuple[Path, dict[str, Path]]) -> None:
    results = load(sweep[0])
    (setting,) = results.settings
    (section,) = build_page(results).sections
    table = next(
        item for block in section.blocks for item in block.items
        if isinstance(item, Table) and item.name == "s1-paper"
    )  # fmt: skip
    assert table.absent == ("html", "md")
    marks = set()
    for row in table.rows:
        variant = row.variants[0]
        for mixture in ("six", "seven_mrpc"):
            found = [
                np.array(
                    [run.result["accuracy"]["macro"] for run in results.cell(setting, mixture, v).values()]
                )
                for v in (variant, "Baseline")
            ]
            low, high = 0.0, 0.0
            if variant != "Baseline":
                low, high = stats.ttest_1samp(found[0] - found[1], 0).confidence_interval(0.95)
            mark = "⁺" if low > 0 else "⁻" if high < 0 else ""
            mean, std = 100 * found[0].mean(), 100 * found[0].std()
            assert row.contents[mixture].text == f"{mean:.2f} ± {std:.2f}{mark}"
            marks.add(mark)
    assert {"⁺", "⁻", ""} == marks
    text = sweep[1]["tables.tex"].read_text(encoding="utf-8")
    assert r"{\scriptsize\,\ensuremath{\pm}\," in text
    assert r"\ensuremath{^{+}}" in text


def test_figures_are_pdf_with_fonts_and_without_pixels(sweep: tuple[Path, dict[str, Path]]) -> None:
    files = sweep[1]
    names = {name for name in files if name.endswith(".pdf")}
    assert names == {name.replace(".svg", ".pdf") for name in files if name.endswith(".svg")}
    for name in names:
        content = files[name].read_bytes()
        assert content.startswith(b"%PDF")
        assert b"/Type3" not in content  # journals refuse these fonts
        assert b"/FontFile2" in content
        assert b"/Subtype /Image" not in content or "balance" in name or "heatmap" in name  # colour bars


def test_the_command_writes_pdf_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("baseline", "gar"):
        write_run(tmp_path / "runs", method, 1)
    assert gar(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "a")]) == 0
    assert gar(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "b"), "--pdf"]) == 0
    capsys.readouterr()
    assert not list((tmp_path / "a").rglob("*.pdf"))
    assert (tmp_path / "b" / "figures" / "s1-gains.pdf").is_file()


def test_notebooks_show_the_opening(sweep: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    results = load(sweep[0])
    text = results._repr_html_()
    read(f"<main>{text.replace('<table', '<table id=x')}</main>")  # balanced
    assert "GAR is better than Baseline by" in text
    assert "<caption style='text-align: left'>In one table: mean of 2 mixtures</caption>" in text
    assert text.count("<table") == 1
    assert len(text) < 10_000
    # Nothing comes from elsewhere, and no colour but that of the notebook's text.
    assert not re.search(r"https?:|<script|<style|<svg|#[0-9a-f]{3,6}\b|background|rgb", text)
    assert set(re.findall(r"(?<!-)color:\s*(\w+)", text)) == set()
    nasty = "<script>alert(1)</script>"
    tree = {"backbone": {"name": nasty}}
    write_run(tmp_path, "gar", 1, tree=tree)
    assert "<script" not in load(tmp_path)._repr_html_()
    write_run(tmp_path / "running", "gar", 1, state="running")
    assert load(tmp_path / "running")._repr_html_()


def write_presets(root: Path, backbone: str) -> None:
    for method in ("baseline", "gar"):
        for seed in range(3):
            tree = presets.find(f"paper/roberta_head/five/{method}").config(seed).to_dict()
            fields = {key: value for key, value in tree.pop("method").items() if key != "name"}
            del tree["seed"]
            tree["backbone"]["name"] = backbone
            write_run(root, method, seed, accuracy=0.7 + seed / 100, tree=tree, fields=fields)


def test_another_backbone_is_not_set_beside_the_paper(tmp_path: Path) -> None:
    write_presets(tmp_path / "minilm", "minilm")
    text = write(load(tmp_path / "minilm"), tmp_path / "a")["report.html"].read_text(encoding="utf-8")
    assert not any("paper" in name for name in read(text).tables)
    said = "Not set beside the paper: 6 runs of its presets with other models or tasks (backbone minilm)."
    assert said in text
    write_presets(tmp_path / "moved", "/models/roberta-base/")  # the published one, kept in a directory
    text = write(load(tmp_path / "moved"), tmp_path / "b")["report.html"].read_text(encoding="utf-8")
    assert "s1-paper-endpoints" in read(text).tables
    assert "changed preset" not in text


def test_one_run_is_one_run(tmp_path: Path) -> None:
    tree = presets.find("paper/roberta_head/five/gar").config(0).to_dict()
    fields = {key: value for key, value in tree.pop("method").items() if key != "name"}
    del tree["seed"]
    tree["optimizer"]["updates"] = 20
    write_run(tmp_path / "runs", "gar", 0, tree=tree, fields=fields, evaluations=(10, 20))
    text = write(load(tmp_path / "runs"), tmp_path / "report")["report.md"].read_text(encoding="utf-8")
    assert "1 run differs from its preset in optimizer.updates." in text
    assert "changed preset; one seed" in text
    assert not re.search(r"\b1 (runs|seeds)\b", text)


class Broken(Text):
    def draw(self, renderer: object) -> None:
        raise ZeroDivisionError


def picture(number: int, broken: bool = False) -> Picture:
    figure = Figure()
    figure.subplots().plot([0, number])
    if broken:
        figure.add_artist(Broken())
    return Picture(f"p{number}", "a caption", figure)


def test_two_processes_draw_what_one_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, both = ([picture(number) for number in range(7)] for _ in range(2))
    monkeypatch.setattr(_draw, "_forks", lambda: False)
    _draw.draw(alone, pdf=True)
    monkeypatch.setattr(_draw, "_forks", lambda: True)
    _draw.draw(both, pdf=True)
    assert [vars(each)["drawn"] for each in both] == [vars(each)["drawn"] for each in alone]
    assert [vars(each)["pdf"] for each in both] == [vars(each)["pdf"] for each in alone]


def test_a_fault_of_the_other_process_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_draw, "_forks", lambda: True)
    with pytest.raises(ZeroDivisionError):
        _draw.draw([picture(number, broken=number == 3) for number in range(7)])
