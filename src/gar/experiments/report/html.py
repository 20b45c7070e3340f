"""The page as one self-contained HTML file."""

from __future__ import annotations

from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gar import __version__
from gar.experiments.figures_style import adaptive, slug
from gar.experiments.report.page import Page, Picture


def html(page: Page) -> str:
    """Styles, script and figures are inside; everything from data is escaped by the template."""
    environment = Environment(
        loader=PackageLoader("gar.experiments.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["slug"] = slug
    environment.filters["drawing"] = _drawing
    files = resources.files("gar.experiments.report").joinpath("templates")
    return environment.get_template("report.html.j2").render(
        page=page,
        version=__version__,
        style=Markup(files.joinpath("report.css").read_text(encoding="utf-8")),
        script=Markup(files.joinpath("report.js").read_text(encoding="utf-8")),
    )


def _drawing(picture: Picture) -> Markup:
    return Markup(adaptive(picture.svg))  # matplotlib escapes the text in it
