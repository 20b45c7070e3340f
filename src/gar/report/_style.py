"""Colours, axes and the SVG form of the figures.

The methods' colours are those of Okabe and Ito, told apart by colour-blind people; every method has a
marker of its own too. Everything dark is drawn in one ink, which becomes ``currentColor`` in a page, so that
a figure reads on light and dark alike.
"""

from __future__ import annotations

import io
import itertools
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from gar.methods import REGISTRY
from gar.report._svg import Sheet, sheet

INK = "#1b1f24"
OTHER = (("#8c8c8c", "*"), ("#8c8c8c", "h"), ("#8c8c8c", "p"))
MARKERS = ("<", ">", "p", "h", "*", "d")
DASHES: tuple[object, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
RC = {
    "font.size": 9,
    "font.family": ["DejaVu Sans"],
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
}


class Drawing(Figure):
    """A matplotlib figure without pyplot that notebooks show by themselves.

    ``states`` has, by the gid of a heatmap's cells, their colours at each of ``updates``; the last one is
    drawn, and a page leads over them with a slider. ``words`` has what a text says at each, by its gid.
    """

    updates: list[int]
    states: dict[str, list[list[str]]]
    words: dict[str, list[str]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.updates, self.states, self.words = [], {}, {}

    def _repr_svg_(self) -> str:
        return svg(self, "figure", "figure")


def adaptive(drawing: str) -> str:
    """The SVG with its ink as ``currentColor``."""
    return drawing.replace(INK, "currentColor")


class Panels:
    """A grid of axes in the common style; unused cells stay empty."""

    def __init__(
        self, count: int, columns: int, width: float, height: float, extra: int = 0, **options: Any
    ) -> None:
        self.columns = columns = max(1, min(columns, count + extra))
        rows = -(-(count + extra) // columns)
        with matplotlib.rc_context(RC):
            self.figure: Drawing = Drawing(figsize=(width * columns, height * rows), layout="constrained")
            self.figure.patch.set_facecolor("white")  # dark ink reads in a dark notebook, too
            grid = self.figure.subplots(rows, columns, squeeze=False, **options)
        self.axes: list[Axes] = list(grid.flat)[:count]
        self.spare: list[Axes] = list(grid.flat)[count:]
        for axes in self.axes:
            dress(axes)
        for axes in self.spare:
            axes.set_axis_off()

    def legend(self, handles: Sequence[Any], labels: Sequence[str], most: int = 7) -> None:
        """In the spare cells, or below, ``most`` beside each other."""
        labels = [plain(label) for label in labels]
        options: dict[str, Any] = {"frameon": False, "labelcolor": INK, "fontsize": 9}
        if self.spare:
            self.spare[0].legend(
                handles, labels, loc="center left", ncols=1 if len(labels) < 9 else 2, **options
            )
        else:
            self.figure.legend(
                handles, labels, loc="outside lower center", ncols=min(len(labels), most), **options
            )


def dress(axes: Axes) -> None:
    """Thin frame, light grid, everything in ink."""
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8, width=0.6)
    axes.grid(visible=True, color=INK, alpha=0.12, linewidth=0.6)
    axes.set_axisbelow(True)


def title(axes: Axes, text: str | Sequence[str], below: str) -> None:
    """What a panel shows, in one or several lines, and what its x axis is."""
    lines = [text] if isinstance(text, str) else text
    wrapped = [part for line in lines for part in textwrap.wrap(line, 38)]
    axes.set_xlabel(below, fontsize=8)
    axes.set_title(plain("\n".join(wrapped)), fontsize=9, color=INK, loc="left")


def plain(text: str) -> str:
    """Text that is no formula, whatever dollar signs it holds."""
    return text.replace("$", r"\$")


def slug(text: str) -> str:
    """A name as part of an id or attribute.

    >>> slug("STGC+Load λ=0.1")
    'stgc-load-0-1'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def styles(variants: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Colour, marker and dashes of each ``(variant, method)``; variants of one method share the colour."""
    others = itertools.cycle(OTHER)
    own = {name: REGISTRY[name].style if name in REGISTRY else None for _, name in variants}
    looks = {method: style or next(others) for method, style in own.items()}
    counts: Counter[str] = Counter()
    chosen = {}
    for variant, method in variants:
        (color, marker), number = looks[method], counts[method]
        counts[method] += 1
        chosen[variant] = {
            "color": INK if color == "ink" else color,
            "marker": MARKERS[(number - 1) % len(MARKERS)] if number else marker,
            "linestyle": DASHES[number % len(DASHES)],
        }
    return chosen


@contextmanager
def _drawing(options: Mapping[str, Any]) -> Iterator[None]:
    """The common style; without :meth:`Figure.savefig`, which lays out and draws everything twice."""
    with matplotlib.rc_context({**RC, **options}), warnings.catch_warnings():
        # A glyph that the measuring font lacks is still there in the reader's font.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def pdf(figure: Figure, laid_out: bool = False) -> bytes:
    """The figure as a page of PDF with its fonts inside, the same bytes each time; all else is vectors.

    ``laid_out`` says that :func:`svg` has arranged it, so that it need not be arranged again.
    """
    file = io.BytesIO()
    if laid_out:
        figure.set_layout_engine("none")
    with _drawing({"pdf.fonttype": 42}):
        FigureCanvasPdf(figure).print_pdf(file, metadata={"CreationDate": None, "Producer": None})
    return file.getvalue()


def svg(figure: Figure, ident: str, label: str) -> str:
    """The figure as an ``<svg>`` element on white; text stays text, nothing is external."""
    return drawn(figure, ident, label).whole()


def drawn(figure: Figure, ident: str, label: str) -> Sheet:
    """The figure as SVG, for files and pages: text stays text, all ids start with ``ident``."""
    file = io.StringIO()
    silent = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with _drawing({"svg.hashsalt": ident}):
        FigureCanvasSVG(figure).print_svg(file, metadata=silent)
    return sheet(figure, file.getvalue(), ident, label)
