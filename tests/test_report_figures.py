"""The figures of experts and of training: their numbers against loops, what is degenerate, and their SVG."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_hex

from gar.report import figures
from gar.report._experts import COSINE, IDLE, NEVER, PREFERENCE, SHARE
from gar.report._style import drawn, svg
from gar.report.results import load
from support.made_up_runs import TASKS, write_run
from support.pages import read


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Baseline and two coefficients of GAR, the second of which is the better one, with evaluations."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        write_run(root, "baseline", seed, accuracy=0.6, evaluations=(500, 1000))
        write_run(root, "cagrad", seed, accuracy=0.7, evaluations=(500, 1000))
        for coefficient, accuracy in ((0.01, 0.62), (0.1, 0.65)):
            fields = {"coefficient": coefficient}
            write_run(root, "gar", seed, accuracy=accuracy, fields=fields, evaluations=(500, 1000))
    return load(root)


def diagnosis(by_task: Any, gradients: Any = None, **routing: Any) -> dict[str, Any]:
    """Of these loads by task [T, E], the tasks being as large, and gradients [T, E, d]."""
    names = ["rte", "cb", "cola", "wic"][: len(by_task)]
    found: dict[str, Any] = {
        "load": np.mean(by_task, 0).tolist(),
        "load_by_task": dict(zip(names, by_task, strict=True)),
    }
    if gradients is not None:
        g = np.asarray(gradients, float)
        found["gradient_grams"] = [
            [[float(g[i, e] @ g[j, e]) for j in range(len(g))] for i in range(len(g))]
            for e in range(g.shape[1])
        ]
        found["gradient_norms"] = dict(zip(names, np.linalg.norm(g, axis=2).tolist(), strict=True))
    return {"mixture": "ours", "routing": found | routing}


def cells(axes: Any) -> list[list[str]]:
    (mesh,) = [artist for artist in axes.collections if isinstance(artist, QuadMesh)]
    colors = np.asarray(mesh.get_array())
    return [[to_hex(color) for color in row] for row in colors]


def tick_labels(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def titles(figure: Any) -> list[str]:
    return [text for axes in figure.axes if (text := axes.get_title(loc="left"))]


def test_heatmap_is_the_log_ratio_in_loops():
    by_task = [[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]]
    left, right, _ = figures.load_heatmap(diagnosis(by_task, np.ones((2, 4, 1)) * [[[3.0]], [[1.0]]])).axes
    order = [int(text) for text in tick_labels(left.xaxis)]
    assert sorted(order) == [0, 1, 2, 3]
    for t in range(2):
        for place, e in enumerate(order):
            load_ = (by_task[0][e] + by_task[1][e]) / 2
            if by_task[t][e] == 0:
                expected = NEVER
            else:
                ratio = max(-2.0, min(2.0, math.log2(by_task[t][e] / load_)))
                expected = to_hex(PREFERENCE((ratio + 2) / 4))
            assert cells(left)[t][place] == expected
            assert cells(right)[t][place] == to_hex(SHARE(math.sqrt((3.0, 1.0)[t] / 4)))
    assert [tick_labels(axes.yaxis) for axes in (left, right)] == [["rte", "cb"]] * 2


def test_no_preference_is_white_and_idle_experts_are_grey():
    by_task = [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]
    left, right, _ = figures.load_heatmap(diagnosis(by_task)).axes  # an old result has no gradients
    for row in cells(left):
        assert all(min(int(color[i : i + 2], 16) for i in (1, 3, 5)) > 0xF0 for color in row[:2])
        assert row[2] == IDLE
    assert cells(right) == [[IDLE] * 3] * 2
    one = figures.load_heatmap(diagnosis([[1.0, 0.0]], [[[1.0], [0.0]]]))
    assert cells(one.axes[0])[0][1] == IDLE
    assert cells(one.axes[1])[0] == [to_hex(SHARE(1.0)), IDLE]


def test_heatmap_of_a_hundred_experts_is_one_picture():
    rng = np.random.default_rng(0)
    figure = figures.load_heatmap(diagnosis(rng.dirichlet(np.ones(300), 4).tolist()))
    assert "<image" in svg(figure, "many", "many")


def test_heatmap_keeps_the_states_over_training(runs):
    figure: Any = figures.task_expert_heatmap(runs)
    assert titles(figure)[:1] == ["Baseline, seed 1: log₂ P(e|t) / P(e)"]
    assert titles(figure)[2].startswith("GAR λ=0.1, seed 1")
    assert figure.updates == [500, 1000, 2000]
    left, right = figure.axes[:2]
    assert figure.states["cells:0:0"][-1] == [color for row in cells(left) for color in row]
    assert figure.states["cells:0:1"][-1] == [color for row in cells(right) for color in row]
    (run,) = [r for r in runs.runs if runs.label(r).variant == "Baseline" and r.result["seed"] == 1]
    order = [int(text) for text in tick_labels(left.xaxis)]
    first = run.evaluations[0][1]["routing"]
    rows = list(first["load_by_task"].values())
    for t, row in enumerate(rows):
        for place, e in enumerate(order):
            ratio = max(-2.0, min(2.0, math.log2(row[e] / first["load"][e])))
            assert figure.states["cells:0:0"][0][t * 8 + place] == to_hex(PREFERENCE((ratio + 2) / 4))


def test_runs_of_unlike_length_keep_no_states(tmp_path):
    write_run(tmp_path, "baseline", 1, evaluations=(500,))
    path = write_run(tmp_path, "gar", 1, evaluations=(500,))
    result = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps({**result, "updates": 900}))
    figure: Any = figures.task_expert_heatmap(load(tmp_path))
    assert (figure.updates, figure.states) == ([], {})


def test_conflict_shows_cosines_in_loops():
    rng = np.random.default_rng(3)
    gradients = rng.normal(size=(3, 2, 5)) * [[[1.0], [1e-3]]]
    even = [[0.6, 0.4]] * 3
    figure = figures.conflict_matrices(diagnosis(even, gradients))
    lowest = []
    for axes in figure.axes:
        expert = int(re.findall(r"expert (\d)", axes.get_title(loc="left"))[0])
        found = {}
        for i in range(3):
            for j in range(i):
                a, b = gradients[i, expert], gradients[j, expert]
                dot = sum(x * y for x, y in zip(a, b, strict=True))
                found[i, j] = dot / math.sqrt(sum(x * x for x in a) * sum(x * x for x in b))
        shown = {
            (round(text.get_position()[1] + 0.5), round(text.get_position()[0] - 0.5)): text.get_text()
            for text in axes.texts
        }
        assert {at: float(text.replace("−", "-")) for at, text in shown.items()} == pytest.approx(
            found, abs=0.0051
        )
        (i, j), cosine = min(found.items(), key=lambda item: item[1])
        names = ["rte", "cb", "cola"]
        share = ("60", "40")[expert]
        sign = f"{cosine:+.2f}".replace("-", "−")
        expected = f"expert {expert}, {share} % of the load:\n{names[j]} against {names[i]} {sign}"
        assert axes.get_title(loc="left") == expected
        lowest.append(cosine)
    assert lowest == sorted(lowest)
    assert len(lowest) == 2


def test_conflict_leaves_out_what_has_none():
    g = np.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]], [[-1.0, 0.1], [0.0, 0.0], [0.0, 0.0]]])
    shown = titles(figures.conflict_matrices(diagnosis([[0.4, 0.3, 0.3]] * 2, g)))
    assert len(shown) == 1
    assert shown[0].startswith("expert 0, 40 % of the load:\nrte against cb −1.00")
    dead = np.ones((2, 2, 1))
    shown = titles(figures.conflict_matrices(diagnosis([[1.0, 0.0]] * 2, dead)))
    assert [text.split(",")[0] for text in shown] == ["expert 0"]


@pytest.mark.parametrize("gradients", [np.zeros((2, 2, 3)), np.ones((1, 2, 3)), None])
def test_conflict_says_why_there_is_none(gradients):
    tasks = 2 if gradients is None else len(gradients)
    with pytest.raises(figures.NothingToDraw):
        figures.conflict_matrices(diagnosis([[0.5, 0.5]] * tasks, gradients))


def test_conflict_of_older_runs_is_not_drawn(tmp_path):
    path = write_run(tmp_path, "gar", 1)
    result = json.loads((path / "result.json").read_text())
    del result["routing"]["gradient_grams"]
    (path / "result.json").write_text(json.dumps(result))
    with pytest.raises(figures.NothingToDraw, match="versions before"):
        figures.conflict(load(tmp_path))


def test_conflict_sets_two_models_of_one_seed_side_by_side(tmp_path):
    for method, seeds in (("baseline", (1, 2)), ("gar", (2, 3))):
        for seed in seeds:
            write_run(tmp_path, method, seed)
    shown = [text.split("\n")[0] for text in titles(figures.conflict(load(tmp_path)))]
    assert shown == ["Baseline, seed 2", "GAR, seed 2"] * 4


def test_compared_is_baseline_and_the_most_accurate(runs, tmp_path):
    assert runs.compared(runs.settings[0]) == ["Baseline", "GAR λ=0.1"]
    for method, accuracy in (("cagrad", 0.6), ("stgc", 0.7)):
        write_run(tmp_path, method, 1, accuracy=accuracy)
    results = load(tmp_path)
    assert results.compared(results.settings[0]) == ["STGC"]


def test_loss_curve_is_a_mean_over_windows_then_seeds(tmp_path):
    rng = np.random.default_rng(0)
    losses = {}
    for seed in (1, 2):
        path = write_run(tmp_path, "gar", seed)
        losses[seed] = rng.uniform(size=150)
        lines = [json.dumps({"update": u, "loss": x, "tasks": {}}) for u, x in enumerate(losses[seed], 1)]
        (path / "history.jsonl").write_text("\n".join(lines) + "\n")
    figure = figures.trajectories(load(tmp_path))
    assert titles(figure) == ["training loss, means of 3 updates"]  # there was no evaluation
    line = figure.axes[0].lines[0]
    for number in range(50):
        first = 3 * number
        means = [sum(losses[seed][first : first + 3]) / 3 for seed in (1, 2)]
        assert np.asarray(line.get_xydata())[number].tolist() == pytest.approx([first + 3, sum(means) / 2])
    assert line.get_xdata()[-1] == 150


def test_trajectories_have_the_majority_line_and_strong_lines(runs):
    figure = figures.trajectories(runs, metrics=["accuracy", "nmi"])
    assert [text.split(",")[0] for text in titles(figure)] == ["accuracy", "NMI"]
    (majority,) = [line for line in figure.axes[0].lines if line.get_gid() == "majority"]
    assert np.allclose(majority.get_ydata(), 50)
    widths = {
        str(line.get_gid()).split(":")[1]: line.get_linewidth()
        for line in figure.axes[1].lines
        if str(line.get_gid()).startswith("series:")
    }
    strong = {name for name, width in widths.items() if width == max(widths.values())}
    assert strong == {"baseline", "gar-0-1"}
    assert len(widths) == 4


def test_majority_is_averaged_as_accuracies_are(tmp_path):
    shares = {"five": 0.5, "six": 0.7}
    for mixture, share in shares.items():
        path = write_run(tmp_path, "gar", 1, mixture)
        result = json.loads((path / "result.json").read_text())
        names = TASKS[mixture]
        result["majority"] = dict.fromkeys(names, share - 0.1) | {names[0]: share - 0.1 + 0.1 * len(names)}
        (path / "result.json").write_text(json.dumps(result))
    results = load(tmp_path)
    (setting,) = results.settings
    assert results.majority(setting, results.scopes(setting)[-1]) == pytest.approx(0.6)
    del result["majority"]
    (path / "result.json").write_text(json.dumps(result))
    results = load(tmp_path)
    assert math.isnan(results.majority(setting, results.scopes(setting)[-1]))


def test_panels_hold_all_that_the_drawing_does(runs):
    for name in ("trajectories", "balance", "conflict", "task_expert_heatmap", "loads", "coefficient_sweep"):
        found = drawn(figures.FIGURES[name](runs), "x", "a <label> & more")
        whole, page = found.whole(), found.page()
        root = ElementTree.fromstring(whole)
        assert root.get("aria-label") == "a <label> & more"
        texts = sorted(text for text in root.itertext() if text.strip())
        parts = [ElementTree.fromstring(f"<p xmlns:xlink='x'>{svg}</p>") for svg in
                 re.findall(r"<svg.*?</svg>", page, re.DOTALL)]  # fmt: skip
        assert sorted(text for part in parts for text in part.itertext() if text.strip()) == texts
        assert len(parts) > 1
        assert all(box.width <= 368 * 72 / 96 for box, _ in found.panels)  # as wide as a phone's page
        known = set(re.findall(r'\bid="([^"]+)"', page))
        used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', page))
        assert used <= known
        assert known <= used
        assert read(page).tags["svg"] == len(parts)
        assert '<rect width="100%" height="100%" fill="#ffffff"/>' in whole
        sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", page)]
        assert min(sizes) * 96 / 72 > 9  # units are points, and nothing is scaled


def test_notebooks_and_files_are_on_white(tmp_path):
    figure: Any = figures.load_heatmap(diagnosis([[0.5, 0.5]]))
    assert 'fill="#ffffff"' in figure._repr_svg_()
    figure.savefig(tmp_path / "x.png", dpi=20)
    corner = matplotlib.image.imread(tmp_path / "x.png")[0, 0]
    assert corner.tolist() == [1, 1, 1, 1]


def test_what_is_no_grid_is_one_panel():
    figure = figures.heatmaps({str(n): {"a": [0.5, 0.5], "b": [0.2, 0.8]} for n in range(9)}, 3)
    (panel,) = drawn(figure, "x", "x").panels  # its colour bar spans three rows
    assert panel.box.width == pytest.approx(72 * figure.get_figwidth())


def test_states_of_cells_are_in_the_page_alone(runs):
    found = drawn(figures.task_expert_heatmap(runs), "x", "x")
    page = found.page()
    assert 'data-updates="500 1000 2000"' in page
    kept = re.findall(r'data-states="([^"]+)"', page)
    assert len(kept) == 4
    for states in kept:
        assert {len(state) for state in states.split()} == {6 * 5 * 8}
    last = re.findall(r'<g[^>]*data-states="[^"]+"[^>]*>(.*?)</g>', page, re.DOTALL)[0]
    fills = re.findall(r"fill: #(\w{6})", last)
    assert "".join(fills) == kept[0].split()[-1]


def test_conflict_keeps_the_cosines_over_training(runs):
    figure: Any = figures.conflict(runs)
    assert figure.updates == [500, 1000, 2000]
    (run,) = [r for r in runs.runs if runs.label(r).variant == "Baseline" and r.result["seed"] == 1]
    expert = int(re.findall(r"expert (\d)", titles(figure)[0])[0])
    states = [sections["routing"] for _, sections in run.evaluations[:2]] + [run.result["routing"]]
    pairs = [(i, j) for i in range(len(states[0]["load_by_task"])) for j in range(i)]
    for number, state in enumerate(states):
        gram = state["gradient_grams"][expert]
        cosines = [gram[i][j] / math.sqrt(gram[i][i] * gram[j][j]) for i, j in pairs]
        words = [figure.words[f"words:0:{i}:{j}"][number].replace("−", "-") for i, j in pairs]
        assert [float(word) for word in words] == pytest.approx(cosines, abs=0.0051)
        assert figure.states["cells:0"][number] == [to_hex(COSINE((cosine + 1) / 2)) for cosine in cosines]
    page = drawn(figure, "c", "c").page()
    assert 'data-updates="500 1000 2000"' in page
    group = re.findall(r'<g[^>]*data-states="([^"]+)"[^>]*>(.*?)</g>', page, re.DOTALL)[0]
    seen = [fill for fill in re.findall(r"fill: ([^;\"]+)", group[1]) if fill != "none"]
    assert "".join(fill.removeprefix("#") for fill in seen) == group[0].split()[-1]


def test_conflict_of_earlier_evaluations_without_gradients_has_no_slider(tmp_path):
    path = write_run(tmp_path, "gar", 1, evaluations=(500,))
    history = (path / "history.jsonl").read_text().replace('"gradient_grams"', '"other"')
    (path / "history.jsonl").write_text(history)
    figure: Any = figures.conflict(load(tmp_path))
    assert (figure.updates, figure.states, figure.words) == ([], {}, {})
