"""What the objective does to a small model on texts of two kinds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from support.scripts import FOLDER, script


@pytest.fixture(scope="module")
def benchmark() -> dict[str, Any]:
    return script("trainer_effect.py")


@pytest.mark.slow
def test_experts_part_the_kinds_and_the_loss_is_no_worse(benchmark: dict[str, Any]) -> None:
    """Nothing of the kinds is told to the router but which texts share a group. Of ten stored seeds, two."""
    arm, run = benchmark["Arm"], benchmark["run"]
    arms = [arm("characters", coefficient=c) for c in (0.0, 1.0)]
    found = [[run(each, seed) for seed in range(2)] for each in arms]
    nmi, purity, loss = (
        [np.mean([values[key] for values in of_arm]) for of_arm in found] for key in ("nmi", "purity", "loss")
    )
    assert nmi[1] > 2 * nmi[0]
    assert purity[1] > purity[0] + 0.1
    assert loss[1] < loss[0] + 0.05


def test_texts_are_those_of_their_kind(benchmark: dict[str, Any]) -> None:
    """They use the vocabulary without the padding, in turn; another seed has others."""
    for name, make in benchmark["KINDS"].items():
        texts, kind = make(40, 3)
        assert kind.tolist() == [0, 1] * 20
        assert 0 <= int(texts.min()) <= int(texts.max()) < benchmark["WORDS"]
        assert torch.equal(texts, make(40, 3)[0])
        assert not torch.equal(texts, make(40, 4)[0])
        if name != "chains":
            assert distinct(texts[0::2]) & distinct(texts[1::2]) <= distinct(torch.tensor([0, 39]))
    letters = benchmark["LETTERS"]
    texts, _ = benchmark["characters"](2, 0)
    first, second = ("".join(letters[i] for i in text) for text in texts.tolist())
    a, b, c = (int(part) for part in first.split(".")[0].replace("=", "+").split("+"))
    assert a + b == c
    assert second.split()[0] in benchmark["ARTICLES"]


def distinct(texts: Tensor) -> set[int]:
    return set(texts.flatten().tolist())


def test_runs_are_kept_and_read_again(benchmark: dict[str, Any], tmp_path: Path) -> None:
    arm, write, read = benchmark["Arm"], benchmark["write"], benchmark["read"]
    found = {
        arm("words", 4, 0.003, 0.0, coefficient=0.3): {1: {"nmi": 0.25, "purity": 0.5, "loss": 1.0}},
        arm("chains", 2): {0: {"nmi": 0.125, "purity": 0.75, "loss": 2.0}},
    }
    write(tmp_path / "x.csv", found)
    assert read(tmp_path / "x.csv") == found
    assert read(tmp_path / "none.csv") == {}
    first = (tmp_path / "x.csv").read_text().splitlines()[1]
    assert first == "chains,2,0.01,1.0,relative,0.0,0,0.12500000,0.75000000,2.00000000"


def test_the_stored_runs_are_complete(benchmark: dict[str, Any]) -> None:
    """Every arm with the same seeds, and every arm has its own without the objective."""
    found = benchmark["read"](FOLDER / "results" / "trainer_effect.csv")
    arms = list(benchmark["arms"]())
    assert list(found) == arms
    assert {tuple(runs) for runs in found.values()} == {tuple(range(10))}


def test_what_the_page_says_of_the_stored_runs(benchmark: dict[str, Any]) -> None:
    """Counts of 95 % intervals, Holm's correction and the default's furthest end, by scipy."""
    found = benchmark["read"](FOLDER / "results" / "trainer_effect.csv")
    sides: dict[str, list[int]] = {"nmi": [], "loss": []}
    p_values, furthest = [], 0.0
    for arm, runs in found.items():
        if arm.coefficient == 0:
            continue
        reference = found[replace(arm, coefficient=0.0, gradients="relative")]
        for key, of_key in sides.items():
            test = stats.ttest_rel(*([runs[seed][key] for seed in range(10)] for runs in (runs, reference)))
            low, high = test.confidence_interval(0.95)
            of_key.append(int(low > 0) - int(high < 0))
            if key == "loss":
                p_values.append(float(test.pvalue))
                if (arm.gradients, arm.coefficient) == ("relative", 0.3):
                    furthest = max(furthest, -low, high)
    assert len(p_values) == 44
    assert (sides["nmi"].count(1), sides["nmi"].count(-1)) == (38, 0)
    assert (sides["loss"].count(1), sides["loss"].count(-1)) == (2, 2)
    assert min(p_values) * 44 > 0.05  # Holm's first step: none is left
    assert furthest < 0.024
    page = (FOLDER.parent / "docs" / "trainer.md").read_text(encoding="utf-8")
    assert "of 44 intervals of NMI 38 lie above 0" in page
    assert "of 44 intervals two lie above 0" in page
