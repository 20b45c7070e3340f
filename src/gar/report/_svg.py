"""What matplotlib writes as SVG, made small, and cut into its panels for pages of any width.

A page places the panels side by side, where there is room, and below each other on a phone: none is scaled
down, so that text keeps its size. A file has them all in one drawing on white, whatever the viewer's colours.
"""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.etree.ElementTree import Element
from xml.sax.saxutils import escape, quoteattr

from matplotlib.axes import Axes
from matplotlib.figure import Figure

#: Pixels of CSS in a point.
PIXELS = 96 / 72
#: Pixels that a phone has for a panel.
NARROW = 350
FAMILY = "system-ui, 'DejaVu Sans', sans-serif"
#: What a group may say for all of its children. Opacity is none of them: it would apply once.
INHERITED = re.compile(r"(fill|stroke|font|text-anchor)")
_NUMBER = re.compile(r"-?\d+\.\d+")
_REFERENCE = re.compile(r'(?:url\(#|href="#)([^)"]+)')
_HEAD = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
_STYLE = f"stroke-linejoin:round;stroke-linecap:butt;font-family:{FAMILY}"


class Box(NamedTuple):
    """In points, from the top left."""

    left: float
    top: float
    width: float
    height: float


class Panel(NamedTuple):
    """A part of the drawing, and what is in it."""

    box: Box
    content: str


@dataclass(frozen=True)
class Sheet:
    """A drawing of ``width`` by ``height`` points; ``updates`` are those of the states that cells keep."""

    label: str
    width: float
    height: float
    panels: Sequence[Panel]
    updates: Sequence[int] = ()

    def whole(self, background: str | None = "#ffffff") -> str:
        """One ``<svg>`` element."""
        under = f'<rect width="100%" height="100%" fill="{background}"/>' if background else ""
        content = "".join(panel.content for panel in self.panels)
        return (
            f'<svg {_HEAD} viewBox="0 0 {_short(self.width)} {_short(self.height)}" role="img" '
            f"aria-label={quoteattr(self.label)} "
            f'style="max-width:{self.width * PIXELS:.0f}px;{_STYLE}">{under}{content}</svg>'
        )

    def page(self) -> str:
        """A ``<div>`` that holds an ``<svg>`` for each panel."""
        parts = [
            f'<svg viewBox="{" ".join(map(_short, box))}" width="{box.width * PIXELS:.0f}" style="{_STYLE}" '
            f'aria-hidden="true">{content}</svg>'
            for box, content in self.panels
        ]
        states = f' data-updates="{" ".join(map(str, self.updates))}"' if len(self.updates) > 1 else ""
        label = quoteattr(self.label)
        # What is wider than a phone scrolls there, and a keyboard has to reach it.
        reach = ' tabindex="0"' if any(box.width * PIXELS > NARROW for box, _ in self.panels) else ""
        return f'<div class="panels" role="img" aria-label={label}{reach}{states}>{"".join(parts)}</div>'


def sheet(figure: Figure, text: str, ident: str, label: str) -> Sheet:
    """What ``text``, matplotlib's SVG of ``figure`` as it was laid out, shows.

    All ids start with ``ident``; only those that something refers to are kept. Artists with the gid
    ``series:<slugs>:…`` become groups with ``data-variant="<slugs>"``, and cells whose states the figure
    keeps get them as ``data-states``, six hexadecimal digits a cell, and its words as ``data-words``.
    """
    root = ElementTree.fromstring(text)
    drawing, *loose = [child for child in root if _tag(child) == "g"]
    shared = [child for child in root if _tag(child) == "defs" and child.find("{*}style") is None]
    cells: Mapping[str, list[list[str]]] = getattr(figure, "states", {})
    words: Mapping[str, list[str]] = getattr(figure, "words", {})
    states = {
        name: {"data-states": " ".join("".join(color[1:] for color in state) for state in every)}
        for name, every in cells.items()
    } | {name: {"data-words": "|".join(every)} for name, every in words.items()}
    kept = set(_REFERENCE.findall(text))
    width, height = figure.get_figwidth() * 72, figure.get_figheight() * 72

    def written(elements: Sequence[Element]) -> str:
        return "".join(_written(element, ident, kept, states) for element in elements)

    unnamed = itertools.count(1)  # matplotlib numbers the axes that have no name of their own
    axes = {at.get_gid() or f"axes_{next(unnamed)}": at for at in figure.axes}
    # The first patch is the figure's background.
    parts = [(part.get("id", ""), part) for part in drawing if part.get("id") != "patch_1"]
    whole, boxes = Box(0.0, 0.0, width, height), _boxes(figure.axes, width, height)
    if loose or boxes is None or any(name not in axes for name, _ in parts):
        boxes = dict.fromkeys(figure.axes, whole)
    panels: dict[Box, str] = {}
    for name, part in [*parts, *((next(iter(axes)), part) for part in loose)]:
        box = boxes[axes[name]] if name in axes else whole
        if content := _written(part, ident, kept, states):
            panels[box] = panels.get(box, "") + content
    common = "".join(_written(part, ident, kept, states) for part in shared)
    found = [
        Panel(box, common * (number == 0) + content) for number, (box, content) in enumerate(panels.items())
    ]
    return Sheet(label, width, height, found, getattr(figure, "updates", ()))


def _boxes(every: Sequence[Axes], width: float, height: float) -> dict[Axes, Box] | None:
    """Each axes with all around it; the boxes tile the figure.

    A colour bar is in the box of the axes at its left. None where the figure is no plain grid.
    """
    places = {axes: axes.get_position() for axes in every}
    spans = {axes: span for axes in every if (span := axes.get_subplotspec()) is not None}
    grid = [axes for axes in spans if axes.get_label() != "<colorbar>"]
    at = {axes: (spans[axes].colspan.start, spans[axes].rowspan.start) for axes in grid}
    columns, rows = (sorted({place[kind] for place in at.values()}) for kind in (0, 1))
    # Left of an axes stand its numbers, right of it next to nothing; above it its title.
    lefts, tops = [0.0], [0.0]
    lefts += [width * max(places[a].x1 for a in grid if at[a][0] < n) + 2 for n in columns[1:]]
    tops += [min((1 - places[a].y1) * height - _above(a) for a in grid if at[a][1] == n) for n in rows[1:]]
    rights, bottoms = [*lefts[1:], width], [*tops[1:], height]
    boxes = {}
    for axes in grid:
        x, y = columns.index(at[axes][0]), rows.index(at[axes][1])
        boxes[axes] = Box(lefts[x], tops[y], rights[x] - lefts[x], bottoms[y] - tops[y])
    for bar in every:
        if bar in boxes:
            continue
        x, low, high = places[bar].x0 * width, (1 - places[bar].y1) * height, (1 - places[bar].y0) * height
        inside = [
            box
            for box in boxes.values()
            if box.left < x < box.left + box.width and box.top <= low and high <= box.top + box.height
        ]
        if not inside:
            return None
        boxes[bar] = inside[0]
    return boxes


def _above(axes: Axes) -> float:
    """Points that a title takes above its axes."""
    text = axes.get_title(loc="left")
    return 8 + 11.5 * (text.count("\n") + 1) if text else 8


def _written(element: Element, ident: str, kept: set[str], states: Mapping[str, Mapping[str, str]]) -> str:
    """The element as text without what nobody sees; empty if nothing is left of it."""
    kind, attributes = _tag(element), dict(element.attrib)
    name = attributes.pop("id", "")
    if _declarations(attributes.get("style", "")).get("opacity") == "0":
        return ""  # the background of an axes
    if name in kept:
        attributes["id"] = f"{ident}-{name}"
    if name.startswith("series:"):
        attributes |= {"class": "series", "data-variant": name.split(":")[1]}
    if name in states:
        attributes |= states[name]
    if kind == "g":
        _hoist(element, attributes)
    inside = escape(element.text or "") if kind in ("text", "tspan") else ""
    for child in element:
        inside += _written(child, ident, kept, states)
        if kind in ("text", "tspan"):
            inside += escape(child.tail or "")
    if kind in ("g", "defs") and not inside:
        return ""
    if kind == "g" and not attributes:
        return inside
    values = {_local(key): _value(key, value, ident) for key, value in attributes.items()}
    told = "".join(f" {key}={quoteattr(value)}" for key, value in values.items() if value)
    return f"<{kind}{told}>{inside}</{kind}>" if inside else f"<{kind}{told}/>"


def _hoist(group: Element, attributes: dict[str, str]) -> None:
    """Move what all children of a group say alike to the group."""
    children = [child for child in group if _tag(child) != "defs"]
    if len(children) < 2 or any(_tag(child) not in ("path", "use", "text") for child in children):
        return
    clips = {child.get("clip-path") for child in children}
    styles = [_declarations(child.get("style", "")) for child in children]
    common = {
        key: value
        for key, value in styles[0].items()
        if INHERITED.match(key) and all(style.get(key) == value for style in styles)
    }
    if common:
        attributes["style"] = _style(common | _declarations(attributes.get("style", "")))
        for child, style in zip(children, styles, strict=True):
            child.set("style", _style({key: value for key, value in style.items() if key not in common}))
    if len(clips) == 1 and None not in clips and "clip-path" not in attributes:
        attributes["clip-path"] = str(clips.pop())
        for child in children:
            del child.attrib["clip-path"]


def _declarations(style: str) -> dict[str, str]:
    return dict(part.strip().split(": ", 1) for part in style.split(";") if ": " in part)


def _style(declarations: Mapping[str, str]) -> str:
    return "; ".join(f"{key}: {value}" for key, value in declarations.items())


def _value(key: str, value: str, ident: str) -> str:
    """An attribute's value with fewer digits, and with the figure's ids."""
    if key == "style":
        family = {"font-family": None}
        told = {k: v for k, v in _declarations(value).items() if k not in family}
        return _style(told).replace("'DejaVu Sans'", FAMILY)
    if _local(key) in ("xlink:href", "clip-path"):
        return re.sub(r"^(url\()?#", lambda found: f"{found[0]}{ident}-", value)
    if key == "transform" and value.startswith("rotate(-0 "):
        return ""
    if key in ("d", "x", "y", "transform", "points", "width", "height"):
        value = _NUMBER.sub(lambda found: _short(float(found[0])), value)
    return re.sub(r"\s*([MLQCHVzZ])\s*", r"\1", value.strip()) if key == "d" else value


def _short(value: float) -> str:
    """Two decimals at most.

    >>> _short(3.0), _short(0.126), _short(-0.001)
    ('3', '0.13', '0')
    """
    return f"{value:z.2f}".rstrip("0").rstrip(".")


def _tag(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _local(key: str) -> str:
    """An attribute's name as it is written in SVG inside HTML, too."""
    space, _, name = key.rpartition("}")
    prefix = "xlink:" if space.endswith("xlink") else "xml:" if space.endswith("namespace") else ""
    return prefix + name
