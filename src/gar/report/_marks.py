"""Marks on the parts of a figure: which methods they show, so that a reader of the page can hide them.

An artist with the gid ``series:<slugs>:...`` becomes a group with ``data-variant`` in the page's drawing.
Drawing functions set it on the series that they draw; here it is set on what carries a method's name: panels
by their titles, rows by their tick labels with all that lies in them, entries of legends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator

from gar.report._style import plain, slug


def mark(figure: Figure, variants: Sequence[str]) -> None:
    """Mark all that carries the name of one of ``variants``, or of a difference of two."""
    names = {plain(name): slug(name) for name in variants}
    for axes in figure.axes:
        _panel(axes, names)
        _rows(axes, names)
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    for legend in legends:
        if isinstance(legend, Legend):
            for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True):
                if (slugs := names.get(text.get_text())) is not None:
                    _set(slugs, text, *([handle] if isinstance(handle, Artist) else []))


def _panel(axes: Axes, names: Mapping[str, str]) -> None:
    """A panel is of one method where its title is the name, or begins with it and goes on after a comma."""
    said = " ".join(axes.get_title(loc="left").split())
    found = [name for name in names if said == name or said.startswith(f"{name}, ")]
    if found:
        place = axes.figure.axes.index(axes)  # a name for each panel: drawings are cut by it
        axes.set_gid(f"series:{names[max(found, key=len)]}:panel-{place}")


def _rows(axes: Axes, names: Mapping[str, str]) -> None:
    """Tick labels of the y axis that are names or differences, and everything that lies at such a tick."""
    rows = {}
    if not isinstance(axes.yaxis.get_major_locator(), FixedLocator):
        return
    for at, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=False):
        parts = [names.get(part) for part in label.get_text().split(" − ")]
        if None not in parts:
            rows[round(float(at))] = slugs = " ".join(map(str, parts))
            _set(slugs, label)
    for artist in [*axes.lines, *axes.patches, *axes.texts] if rows else []:
        height = _height(artist)
        if height is not None and round(height) in rows and artist.get_gid() is None:
            _set(rows[round(height)], artist)


def _height(artist: Artist) -> float | None:
    """Where an artist lies that keeps to one row; None for one that does not."""
    if isinstance(artist, Rectangle):
        return float(artist.get_y() + artist.get_height() / 2)
    if isinstance(artist, Annotation):
        return float(artist.xy[1])
    if isinstance(artist, Line2D):
        heights = np.atleast_1d(np.asarray(artist.get_ydata(), float))
        return float(heights[0]) if len(heights) and np.ptp(heights) == 0 and heights[0] % 1 == 0 else None
    return None


def _set(slugs: str, *artists: Artist) -> None:
    for artist in artists:
        artist.set_gid(f"series:{slugs}:mark")
