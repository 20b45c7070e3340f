"""The page as one self-contained HTML file."""

from __future__ import annotations

from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gar.report._page import Page, Picture
from gar.report._style import adaptive, slug
from gar.version import __version__

SCRIPTS = ("report.js", "states.js")


def html(page: Page) -> str:
    """Styles, script and figures are inside; everything from data is escaped by the template."""
    environment = Environment(
        loader=PackageLoader("gar.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["slug"] = slug
    environment.filters["drawing"] = _drawing
    files = resources.files("gar.report").joinpath("templates")
    return environment.get_template("report.html.j2").render(
        page=page,
        version=__version__,
        style=Markup(files.joinpath("report.css").read_text(encoding="utf-8")),
        script=Markup("".join(files.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)),
    )


def _drawing(picture: Picture) -> Markup:
    return Markup(
        adaptive(picture.drawn.page() if picture.drawn else "")
    )  # matplotlib escapes the text in it
