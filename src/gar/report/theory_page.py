"""The figures of docs/theory.md: each claim of :mod:`gar.theory` computed on one small example, and drawn.

Values and drawing are apart: :func:`compute` gives rows of numbers, :func:`draw` makes figures of such rows
alone, so that stored rows and stored figures can be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from gar import theory
from gar.objective import association, marginal_scores
from gar.report._style import INK, Panels, svg, title
from gar.routing import masked_softmax, straight_through

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#8c8c8c"
#: The observations of each figure are drawn with this seed.
SEED = 3
STABILISERS = (0.0, 1e-4, 1e-2)
TEMPERATURES = (0.3, 1.0, 3.0)
RHO = 0.5

Row = tuple[str, str, float, float]


def compute() -> pd.DataFrame:
    """The rows of every figure: figure, series, x, y. Takes some seconds."""
    rows = [
        (name, series, float(f"{x:.6g}"), float(f"{y:.6g}"))
        for name, points in POINTS.items()
        for series, x, y in points()
    ]
    return pd.DataFrame(rows, columns=["figure", "series", "x", "y"])


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """A figure for each name in ``rows``, from these numbers alone."""
    return {str(name): DRAW[str(name)](Series(part)) for name, part in rows.groupby("figure", sort=False)}


def pictures(rows: pd.DataFrame) -> dict[str, str]:
    """The figures as SVG on a white ground, each with the :func:`digest` of its rows."""
    found = {}
    for name, figure in draw(rows).items():
        mark = f"{name}, data {digest(rows[rows['figure'] == name])}"
        text = svg(figure, name, mark)
        found[name] = text.replace('style="max-width', 'style="background:#fff;max-width', 1) + "\n"
    return found


def digest(rows: pd.DataFrame) -> str:
    """Twelve digits that tell one set of rows from another."""
    return hashlib.sha256(rows.to_csv(index=False, float_format="%.6g").encode()).hexdigest()[:12]


class Series:
    """The rows of one figure by series."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.rows = rows

    def __getitem__(self, name: str) -> tuple[list[float], list[float]]:
        part = self.rows[self.rows["series"] == name]
        return part["x"].tolist(), part["y"].tolist()


Points = Iterator[tuple[str, float, float]]


def _clusters(rows: int, count: int, noise: float, seed: int = SEED, size: int = 0) -> Tensor:
    """``rows`` observations around ``count`` orthogonal prototypes, in as many dimensions or ``size``."""
    kinds = torch.arange(rows) % count
    drawn = torch.Generator().manual_seed(seed)
    around = torch.randn(rows, size or count, generator=drawn, dtype=torch.float64)
    return torch.eye(count, size or count, dtype=torch.float64)[kinds] + noise * around


def _grid(first: float, last: float, count: int) -> list[float]:
    return torch.linspace(first, last, count, dtype=torch.float64).tolist()


def _kmeans() -> Points:
    g = _clusters(7, 3, 0.3)
    trace = float(g.square().sum())
    drawn = torch.Generator().manual_seed(SEED)
    for p in theory.partitions(7, 3):
        x = float(theory.scatter(p, g))
        yield "one-hot", x, float(association(p, g, eps=0.0))
        yield "stabilised", x, float(association(p, g, eps=0.5))
    for sharpness in _grid(0.5, 6, 40):
        p = (sharpness * torch.randn(7, 3, generator=drawn, dtype=torch.float64)).softmax(1)
        yield "soft", float(theory.scatter(p, g)), float(association(p, g, eps=0.0))
    yield from (("line", x, trace - x) for x in (0.0, trace))


def _spectral() -> Points:
    every = list(theory.partitions(7, 3))
    for noise in _grid(0, 1.2, 13):
        g = _clusters(7, 3, noise, size=6)
        gram = g @ g.T
        values = sorted(float(association(p, gram=gram, eps=0.0)) for p in every)
        bound = theory.spectral_bound(every[0], gram)
        trace = float(gram.trace())
        named = {
            "bound": bound.bound,
            "centred": bound.centred,
            "best": values[-1],
            "median": values[len(values) // 2],
            "worst": values[0],
            "floor": bound.floor,
        }
        yield from ((name, noise, value / trace) for name, value in named.items())


def _gibbs() -> Points:
    scores = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    for tau in TEMPERATURES:
        best = theory.gibbs(scores, tau)
        for first in _grid(0, 1, 41):
            p = torch.tensor([[first, 1 - first]], dtype=torch.float64)
            yield f"lost {tau}", first, float(theory.linearised_optimum(p, scores, tau).left)
        yield f"softmax {tau}", float(best[0, 0]), float(theory.linearised_optimum(best, scores, tau).left)
    for seed in range(3):
        g = _clusters(10, 2, 0.4, seed)
        critical = theory.critical_temperature(g)
        p = torch.eye(2, dtype=torch.float64)[torch.arange(10) % 2] * 0.98 + 0.01
        for share in _grid(0.15, 1.55, 15):
            p = theory.fixed_point(p, g, share * critical, steps=150)
            yield f"split {seed}", share, float(p.max(1).values.mean())


def _collapse() -> Points:
    u, half = theory.equiangular(2, RHO), 4
    g = u.repeat_interleave(half, 0)

    def moved(rows: slice, mass: float) -> Tensor:
        p = theory.collapsed(len(g), 2)
        p[rows] = p.new_tensor([1 - mass, mass])
        return p

    for normalize, name in ((True, "normalised"), (False, "numerator")):
        start = association(moved(slice(0), 0), g, eps=0.0, normalize=normalize)
        for share in _grid(0, 1, 21):
            value = association(moved(slice(half, None), share), g, eps=0.0, normalize=normalize)
            yield name, share, float(value / start)
    for eps in STABILISERS:
        start = association(moved(slice(0), 0), g, eps=eps)
        for power in _grid(-6, 0, 37):
            mass = 10**power
            yield (
                f"eps {eps}",
                mass,
                float(association(moved(slice(half, half + 1), mass), g, eps=eps) - start) / mass,
            )


def _load() -> Points:
    g = theory.equiangular(3, 0.0)
    of = theory.moments(g)
    formulas = {
        "member": theory.member_score,
        "newcomer": theory.newcomer_score,
        "joining": theory.joining_gain,
    }
    for normalize, kind in ((True, "normalised"), (False, "numerator")):
        for load in range(1, 13):
            for name, formula in formulas.items():
                yield f"{kind} {name}", load, formula(load, of, normalize=normalize)
        for load in range(1, 5):
            found = theory.window(g, load, normalize=normalize)
            for name in formulas:
                yield f"{kind} {name} counted", load, float(getattr(found, name).left)
    yield "gamma", 1, of.gamma
    yield "gamma", 12, of.gamma


def _tilt() -> Points:
    drawn = torch.Generator().manual_seed(SEED)
    g = _clusters(12, 4, 0.4)
    logits = torch.randn(12, 4, generator=drawn, dtype=torch.float64)
    for name, top_k in (("softmax", None), ("top-2", 2), ("top-1", 1)):
        tilt = theory.router_tilt(logits, g, top_k=top_k, eps=0.0).left
        p = straight_through(logits) if top_k == 1 else masked_softmax(logits, top_k or 4)
        q = logits.softmax(1) if top_k == 1 else p
        scores = marginal_scores(p, g, eps=0.0)
        ahead = scores - (q * scores).sum(1, keepdim=True)
        yield from (
            (name, *pair) for pair in zip(ahead.flatten().tolist(), tilt.flatten().tolist(), strict=True)
        )
    count, rho, load = 3, 0.2, 3
    for delta in _grid(-1 / 3, 2 / 3, 16):
        found = theory.mixture_tilt(count, rho, load, delta)
        yield "alignment", delta, float(found.alignment.right) / load
        yield "utility", delta, float(found.utility.right) / load
    for delta in (-1 / 3, -1 / 6, 0.0, 1 / 6, 1 / 3, 1 / 2, 2 / 3):
        found = theory.mixture_tilt(count, rho, load, delta)
        yield "alignment counted", delta, float(found.alignment.left) / load
        yield "utility counted", delta, float(found.utility.left) / load


def _note(axes: Axes, x: float, y: float, text: str, color: str = INK) -> None:
    """A word right of a point."""
    axes.annotate(
        text, (x, y), (5, 0), textcoords="offset points", color=color, fontsize=8, va="center",
        annotation_clip=False,
    )  # fmt: skip


def _draw_kmeans(series: Series) -> Figure:
    panels = Panels(1, 1, 5.2, 3.6)
    (axes,) = panels.axes
    axes.plot(*series["line"], color=GREY, linewidth=1)
    axes.plot(*series["stabilised"], ".", color=ORANGE, markersize=4, alpha=0.5)
    axes.plot(*series["one-hot"], "o", color=BLUE, markersize=4)
    axes.plot(*series["soft"], "^", color=GREEN, markersize=4)
    x, y = series["one-hot"]
    best = max(range(len(y)), key=lambda i: y[i])
    _note(axes, x[best], y[best], "best partition: most association, least scatter")
    title(axes, "Association = constant − k-means", "k-means objective J")
    axes.set_ylabel("association A", fontsize=8)
    panels.legend(
        [axes.lines[2], axes.lines[3], axes.lines[1]],
        ["all 301 partitions", "soft assignments", "partitions, ε = 0.5"],
    )
    return panels.figure


def _draw_spectral(series: Series) -> Figure:
    panels = Panels(1, 1, 5.2, 3.6)
    (axes,) = panels.axes
    axes.fill_between(series["worst"][0], series["worst"][1], series["best"][1], color=GREY, alpha=0.25, lw=0)
    looks = {
        "bound": ("top 3 eigenvalues", INK, "-"),
        "centred": ("mean, and top 2 of the rest", ORANGE, "--"),
        "best": ("best of 301 partitions", BLUE, "-"),
        "median": ("median partition", GREY, "-"),
        "floor": ("all in one expert", GREEN, "-"),
    }
    for name, (label, color, dash) in looks.items():
        x, y = series[name]
        axes.plot(x, y, color=color, linestyle=dash, linewidth=1.6)
        _note(axes, x[-1], y[-1], label, "#5c5c5c" if color == GREY else color)
    axes.set_xlim(0, 1.8)
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2])
    axes.set_ylim(0, 1.03)
    title(axes, "No partition passes the eigenvalues", "noise around 3 orthogonal prototypes")
    axes.set_ylabel("association / tr W", fontsize=8)
    return panels.figure


def _draw_gibbs(series: Series) -> Figure:
    panels = Panels(2, 2, 3.6, 3.0)
    left, right = panels.axes
    for tau, color in zip(TEMPERATURES, (BLUE, GREEN, ORANGE), strict=True):
        left.plot(*series[f"lost {tau}"], color=color, linewidth=1.4, label=f"τ = {tau:g}")
        left.plot(*series[f"softmax {tau}"], "o", color=color, markersize=7, clip_on=False)
    left.set_ylim(0, 1)
    left.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper center")
    title(left, "The softmax (dot) is the one best row", "probability of the better expert")
    left.set_ylabel("lost against the best", fontsize=8)
    for seed in range(3):
        right.plot(
            *series[f"split {seed}"], ".-", color=(BLUE, GREEN, ORANGE)[seed], markersize=4, linewidth=1
        )
    right.axvline(1, color=INK, linewidth=1, linestyle="--")
    _note(right, 1.03, 0.92, "uniform routing\nis stable here")
    _note(right, 0.14, 0.6, "three random sets\nof observations")
    right.set_ylim(0.48, 1.02)
    title(right, "Uniform routing splits below a temperature", "τ / (2 λmax of the covariance)")
    right.set_ylabel("mean largest probability", fontsize=8)
    return panels.figure


def _draw_collapse(series: Series) -> Figure:
    panels = Panels(2, 2, 3.6, 3.0)
    left, right = panels.axes
    for name, color, label in (
        ("normalised", BLUE, "load-normalised"),
        ("numerator", ORANGE, "numerator only"),
    ):
        left.plot(*series[name], color=color, linewidth=1.8, label=label)
    left.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    left.legend(frameon=False, fontsize=8, labelcolor=INK)
    title(left, "From collapse (0) to separated (1)", "share of the second kind that has moved")
    left.set_ylabel("reward / reward at collapse", fontsize=8)
    for eps, color in zip(STABILISERS, (BLUE, GREEN, ORANGE), strict=True):
        right.semilogx(*series[f"eps {eps}"], color=color, linewidth=1.6, label=f"ε = {eps:g}")
    right.xaxis.set_major_formatter(lambda mass, _: f"{mass:g}")
    right.set_xticks([1e-6, 1e-4, 1e-2, 1])
    right.minorticks_off()
    right.axhline(0, color=INK, linewidth=0.8, linestyle=":")
    right.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower right")
    title(right, "With ε, mass far below ε is not rewarded", "mass that leaves the collapsed expert")
    right.set_ylabel("gain per mass", fontsize=8)
    return panels.figure


def _draw_load(series: Series) -> Figure:
    panels = Panels(2, 2, 3.6, 3.0)
    looks = {
        "member": ("score of a member", BLUE),
        "newcomer": ("score of a newcomer", ORANGE),
        "joining": ("gain of one that joins", GREEN),
    }
    lines: list[Line2D] = []
    for axes, kind, text in zip(
        panels.axes,
        ("normalised", "numerator"),
        ("Load-normalised: all go to γ", "Numerator only: all grow with load"),
        strict=True,
    ):
        lines = []
        for name, (_, color) in looks.items():
            lines += axes.plot(*series[f"{kind} {name}"], color=color, linewidth=1.5)
            axes.plot(*series[f"{kind} {name} counted"], "o", color=color, markersize=5)
        title(axes, text, "load L of the expert")
        axes.set_ylabel("expected reward", fontsize=8)
        axes.set_ylim(bottom=0 if kind == "numerator" else None)
    axes = panels.axes[0]
    axes.plot(*series["gamma"], color=INK, linewidth=0.8, linestyle=":")
    _note(axes, 12, series["gamma"][1][0], "γ")
    panels.legend(lines, [label for label, _ in looks.values()])
    return panels.figure


def _draw_tilt(series: Series) -> Figure:
    panels = Panels(2, 2, 3.6, 3.0)
    left, right = panels.axes
    for name, color, marker in (("softmax", BLUE, "o"), ("top-2", ORANGE, "x"), ("top-1", GREEN, "+")):
        left.plot(*series[name], marker, color=color, markersize=4, label=name)
    left.axhline(0, color=INK, linewidth=0.8)
    left.axvline(0, color=INK, linewidth=0.8)
    left.legend(frameon=False, fontsize=8, labelcolor=INK)
    _note(left, -3.6, 0.06, "not selected: no push", ORANGE)
    title(left, "A logit rises where its expert's score is above average", "score minus the gate's average")
    left.set_ylabel("push on the logit", fontsize=8)
    for name, color, label in (("alignment", BLUE, "alignment"), ("utility", ORANGE, "utility")):
        right.plot(*series[name], color=color, linewidth=1.5, label=label)
        right.plot(*series[f"{name} counted"], "o", color=color, markersize=5)
    right.axhline(0, color=INK, linewidth=0.8)
    right.axvline(0, color=INK, linewidth=0.8)
    right.legend(frameon=False, fontsize=8, labelcolor=INK)
    title(right, "Enriching one kind: alignment at first order, utility at second", "enrichment δ")
    right.set_ylabel("change per load", fontsize=8)
    return panels.figure


POINTS = {
    "kmeans": _kmeans,
    "spectral": _spectral,
    "gibbs": _gibbs,
    "collapse": _collapse,
    "load": _load,
    "tilt": _tilt,
}
DRAW = {
    "kmeans": _draw_kmeans,
    "spectral": _draw_spectral,
    "gibbs": _draw_gibbs,
    "collapse": _draw_collapse,
    "load": _draw_load,
    "tilt": _draw_tilt,
}
