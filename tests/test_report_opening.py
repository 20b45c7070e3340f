"""The opening of a report: sentences and one table, against scipy, and over any part of a sweep."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from gar.metrics import holm
from gar.report import write
from gar.report._page import Said, build_page
from gar.report._table import Table
from gar.report.results import load
from gar.runs import State
from support.made_up_runs import write_run


def opening(root: Path) -> tuple[list[str], Table]:
    page = build_page(load(root))
    (section,) = page.sections
    said, table = section.blocks[0].items
    assert isinstance(said, Said)
    assert isinstance(table, Table)
    return list(said.lines), table


def write_all(root: Path, accuracies: Mapping[str, list[float]], mixture: str = "five") -> None:
    for method, values in accuracies.items():
        for seed, value in enumerate(values):
            write_run(root, method, seed, mixture, accuracy=value)


BASE = [0.60, 0.62, 0.61, 0.63]


def test_better_worse_and_neither(tmp_path: Path) -> None:
    write_all(tmp_path, {
        "baseline": BASE,
        "gar": [x + d for x, d in zip(BASE, (0.020, 0.021, 0.019, 0.020), strict=True)],
        "stgc": [x - d for x, d in zip(BASE, (0.010, 0.020, 0.030, 0.015), strict=True)],
        "switchaux": [x + d for x, d in zip(BASE, (0.010, -0.01, 0.005, -0.006), strict=True)],
        "loadpen": BASE[:2],
    })  # fmt: skip
    said, table = opening(tmp_path)
    assert said[0].startswith("GAR is better than Baseline by 2.00 points (95 % interval 1.87 to 2.13")
    assert said[1].startswith("STGC is worse than Baseline by 1.88 points")
    assert said[2] == "No difference in accuracy from Baseline is shown for SwitchAux."
    assert said[3] == "After Holm's correction for 3 comparisons GAR and STGC still differ from Baseline."
    assert said[4].startswith("Not compared: LoadPen, with other seeds than Baseline")
    assert {row.variants[0]: row.strong for row in table.rows} == {
        "Baseline": False, "GAR": True, "STGC": False, "SwitchAux": False, "LoadPen": True,  # two seeds
    }  # fmt: skip


def test_tasks_not_above_the_majority_class_are_named(tmp_path: Path) -> None:
    write_run(tmp_path, "baseline", 0, accuracy={"rte": 0.5, "qnli": 0.8})
    write_run(tmp_path, "baseline", 1, accuracy={"rte": 0.4, "qnli": 0.45})
    write_run(tmp_path, "gar", 0, accuracy={"rte": 0.6, "qnli": 0.9})
    (line,) = [line for line in opening(tmp_path)[0] if "majority" in line]
    assert line.startswith("Of 3 runs some are not above the majority class in a task: rte (2) and qnli (1);")


def test_holm_takes_back_what_many_comparisons_do_not_carry(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    found: dict[str, list[float]] = {"baseline": BASE}
    for method, shift in (("gar", 0.012), ("stgc", 0.0), ("switchaux", 0.0), ("loadpen", 0.0)):
        found[method] = [x + shift + 0.007 * rng.standard_normal() for x in BASE]
    write_all(tmp_path, found)
    said, _ = opening(tmp_path)
    names = ["gar", "stgc", "switchaux", "loadpen"]
    chances = [stats.ttest_rel(found[name], found["baseline"]).pvalue for name in names]
    assert min(chances) < 0.05
    assert min(holm(chances)) > 0.05
    assert "After Holm's correction for 4 comparisons none still differs from Baseline." in said


def test_no_spread_one_seed_and_no_baseline(tmp_path: Path) -> None:
    write_all(tmp_path / "a", {"baseline": BASE, "gar": [x + 0.02 for x in BASE]})
    said, _ = opening(tmp_path / "a")
    assert "without any spread there is no interval" in said[0]
    write_all(tmp_path / "b", {"baseline": BASE[:1], "gar": [0.9]})
    said, table = opening(tmp_path / "b")
    assert said[0] == "Too few seeds to judge GAR by; 3 in common are the least."
    assert all(row.strong for row in table.rows)  # one seed sets nothing apart
    write_all(tmp_path / "c", {"gar": BASE})
    assert opening(tmp_path / "c")[0][0] == "There is no run of Baseline to compare with."


def test_the_widest_scope_and_what_is_unusual(tmp_path: Path) -> None:
    for mixture in ("five", "six"):
        for seed in range(3):
            write_run(tmp_path, "baseline", seed, mixture, accuracy=0.6, evaluations=(10, 20, 30))
            write_run(tmp_path, "gar", seed, mixture, accuracy=0.6)
    write_run(tmp_path, "gar", 7, "five", state=State.FAILED)
    said, table = opening(tmp_path)
    assert said[0] == "All of it is about the mean of 2 mixtures."
    assert said[-1] == "1 run of this setting without a result; see above."
    assert any(line.startswith("Experts are balanced") for line in said)
    assert table.caption == "In one table: mean of 2 mixtures"


@pytest.mark.parametrize("seed", range(4))
def test_any_part_of_a_sweep_has_a_report(seed: int, tmp_path: Path) -> None:
    """An unfinished result set is the normal case."""
    draw = random.Random(seed)
    accuracy = np.random.default_rng(seed)
    for method in ("baseline", "gar", "switchaux"):
        for coefficient in (None,) if method == "baseline" else (1e-3, 1e-2):
            for mixture in ("five", "six"):
                for number in range(3):
                    fields = None if coefficient is None else {"coefficient": coefficient}
                    path = write_run(
                        tmp_path / "runs", method, number, mixture,
                        accuracy=float(accuracy.uniform(0.5, 0.7)), fields=fields,
                        evaluations=draw.choice([(), (10, 20)]),
                        state=draw.choice([State.FINISHED] * 3 + [State.FAILED]),
                    )  # fmt: skip
                    if draw.random() < 0.4:
                        shutil.rmtree(path)
    if not any((tmp_path / "runs").glob("*")):
        pytest.skip("nothing was left")
    results = load(tmp_path / "runs")
    files = write(results, tmp_path / "report", common_seeds=draw.random() < 0.5)
    assert all(path.stat().st_size for path in files.values())
    for section in build_page(results).sections:
        said = section.blocks[0].items[0]
        assert isinstance(said, Said)
        assert not any("nan" in line for line in said.lines)
