"""The files of a report and of a diagnosis."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from gar.errors import UserError
from gar.report import figures
from gar.report._draw import begin, draw
from gar.report._html import html
from gar.report._latex import PREAMBLE, latex
from gar.report._page import Page, Picture, Said, build_page
from gar.report._style import svg
from gar.report._table import Table
from gar.report._text import escape_markdown, markdown
from gar.report.results import Results
from gar.runs.files import write_bytes, write_text
from gar.runs.names import DIAGNOSTICS
from gar.runs.result import replace_json

HEATMAP, CONFLICT = "heatmap", "conflict"


def write(
    results: Results, out_dir: str | Path, common_seeds: bool = False, pdf: bool = False
) -> dict[str, Path]:
    """Write the report; returns the files by name. With ``pdf`` every figure is a file of PDF too.

    Paired differences and means over mixtures need the same seeds everywhere; with ``common_seeds`` they are
    over the seeds that are there, and say so.
    """
    out = Path(out_dir)
    with _uncollected():
        page = build_page(results, common_seeds, partial(begin, pdf=pdf))
        draw(page.pictures, pdf)  # what is left
    contents = {
        "report.html": html(page),
        "report.md": markdown_page(page),
        "tables.tex": _latex(page),
        "runs.csv": results.frame.to_csv(index=False),
        "endpoints.csv": page.endpoints.to_csv(index=False),
        "paired.csv": _paired_csv(page.compared),
        **{f"figures/{picture.name}.svg": picture.svg + "\n" for picture in page.pictures},
        **({f"figures/{picture.name}.pdf": picture.pdf for picture in page.pictures} if pdf else {}),
    }
    return write_files(out, contents)


def write_files(out: Path, contents: Mapping[str, str | bytes]) -> dict[str, Path]:
    """Texts and bytes by their name below ``out``; returns the files by name."""
    with _writing(out):
        for name, content in contents.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                write_text(out / name, content)
            else:
                write_bytes(out / name, content)
    return {name: out / name for name in contents}


def write_diagnosis(diagnosis: Mapping[str, Any], out: str | Path) -> dict[str, Path]:
    """diagnostics.json and its figures as SVG and PNG, in a directory; returns the files by name.

    ``heatmap`` is :func:`figures.load_heatmap`, ``conflict`` is :func:`figures.conflict_matrices` where there
    are two tasks whose gradients meet in an expert.
    """
    out = Path(out)
    drawn = {HEATMAP: (figures.load_heatmap(diagnosis), "which tasks an expert serves")}
    with suppress(figures.NothingToDraw):
        drawn[CONFLICT] = (figures.conflict_matrices(diagnosis), "cosines between the tasks' gradients")
    names = [DIAGNOSTICS]
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        replace_json(out / DIAGNOSTICS, dict(diagnosis))
        for name, (figure, label) in drawn.items():
            write_text(out / f"{name}.svg", svg(figure, name, label) + "\n")
            figure.savefig(out / f"{name}.png", dpi=200)
            names += [f"{name}.svg", f"{name}.png"]
    return {name: out / name for name in names}


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which goes through all of torch for every few figures."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or out}: cannot be written ({error.strerror or error})") from None


def markdown_page(page: Page) -> str:
    """The page as Markdown; its figures are files."""
    parts = [f"# {page.title}", "", f"{escape_markdown(page.summary)}.", ""]
    parts += [f"- {escape_markdown(note)}" for note in page.notes] + [""] * bool(page.notes)
    if page.problems.rows:
        parts += ["## Runs without a result", "", markdown(page.problems)]
    if page.collapses:
        parts += ["## Collapse", "", *(f"- {escape_markdown(said)}" for said in page.collapses), ""]
    for section in page.sections:
        parts += [f"## {escape_markdown(section.title)}", ""]
        for block in section.blocks:
            if items := block.items_in("md"):
                parts += [f"### {block.heading}", "", *map(_markdown, items)]
    return "\n".join(parts).rstrip() + "\n"


def _markdown(item: Table | Picture | Said) -> str:
    if isinstance(item, Said):
        return "\n\n".join(map(escape_markdown, item.lines)) + "\n"
    return markdown(item) if isinstance(item, Table) else _picture(item)


def _picture(picture: Picture) -> str:
    caption = escape_markdown(picture.caption)
    if picture.reason:
        return f"Not drawn: {escape_markdown(picture.reason)}.\n"
    return f"![{caption}](figures/{picture.name}.svg)\n\n*{caption}*\n"


def _latex(page: Page) -> str:
    parts = [PREAMBLE]
    for section in page.sections:
        title = "".join(sign if sign.isascii() and sign.isprintable() else " " for sign in section.title)
        parts += [f"% Setting: {title}"]
        items = (item for block in section.blocks for item in block.items_in("tex"))
        parts += [latex(item, f"tab:{item.name}") for item in items if isinstance(item, Table)]
    return "\n".join(parts)


def _paired_csv(compared: Mapping[str, pd.DataFrame]) -> str:
    """All metrics; accuracy in fractions. ``differences`` is JSON, by seed."""
    frames = [frame for frame in compared.values() if len(frame)] or [compared["accuracy"]]
    table = pd.concat(frames, ignore_index=True)
    table["differences"] = [json.dumps(values) for values in table["differences"]]
    return str(table.to_csv(index=False))
