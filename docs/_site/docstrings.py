"""Docstrings as Markdown: doctests become code blocks, roles become code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Markdown(griffe.Extension):
    """Rewrites every docstring once, when its object is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """A docstring of this project, which a reader of the source reads as it is, for a page."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"^(>>> .*(?:\n(?!\n).*)*)", r"```pycon\n\1\n```", text, flags=re.MULTILINE)
