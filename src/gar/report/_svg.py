"""What matplotlib writes into an SVG without need, taken out: a page has dozens of them."""

from __future__ import annotations

import re

FONT = "system-ui, 'DejaVu Sans', sans-serif"
_GEOMETRY = re.compile(r'\b(d|x|y|width|height|points)="[^"]*\d\.\d{3}[^"]*"')
_DIGITS = re.compile(r"(\d\.\d\d)\d+")


def slim(drawing: str) -> str:
    """The drawing with hundredths of a point, no ids that nothing points at, and the font named once.

    >>> slim('<g id="a"><path id="b" d="M 1.23456 7"/></g>\\n   <use href="#b"/>')
    '<g><path id="b" d="M 1.23 7"/></g>\\n<use href="#b"/>'
    """
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', drawing))
    drawing = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", drawing)
    drawing = _GEOMETRY.sub(lambda found: _DIGITS.sub(r"\1", found[0]), drawing)
    drawing = re.sub(r' transform="rotate\(-?0 [^"]*\)"', "", drawing)
    drawing = drawing.replace(f"font-family: {FONT}; ", "")
    return re.sub(r"\n +", "\n", drawing)
