"""The report's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from gar.errors import UserError
from gar.report.html import html
from gar.report.page import HEADINGS, Page, Section, build_page
from gar.report.results import Results
from gar.report.text import escape_markdown, latex, markdown


def write(results: Results, out_dir: str | Path, common_seeds: bool = False) -> dict[str, Path]:
    """Write the report; returns the files by name.

    Paired differences and means over mixtures need the same seeds everywhere; with ``common_seeds`` they are
    over the seeds that are there, and say so.
    """
    out = Path(out_dir)
    page = build_page(results, common_seeds)
    contents = {
        "report.html": html(page),
        "report.md": _markdown(page),
        "tables.tex": _latex(page),
        "runs.csv": results.frame.to_csv(index=False),
        "endpoints.csv": page.endpoints.to_csv(index=False),
        "paired.csv": _paired_csv(page.compared),
    }
    for section in page.sections:
        for picture in (picture for group in section.pictures.values() for picture in group):
            if picture.figure is not None:
                contents[f"figures/{picture.name}.svg"] = picture.svg + "\n"
    try:
        for name, text in contents.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename or out}: cannot be written ({error.strerror or error})") from None
    return {name: out / name for name in contents}


def _markdown(page: Page) -> str:
    parts = ["# Results", "", f"{page.summary}.", ""]
    parts += [f"- {escape_markdown(note)}" for note in page.notes] + [""] * bool(page.notes)
    if page.problems.rows:
        parts += ["## Runs without a result", "", markdown(page.problems)]
    if page.collapses:
        parts += ["## Collapse", "", *(f"- {escape_markdown(said)}" for said in page.collapses), ""]
    for section in page.sections:
        parts += [f"## {escape_markdown(section.title)}", "", markdown(section.endpoints)]
        parts += [markdown(section.paired), *map(markdown, section.beside_paper)]
        parts += _markdown_pictures(section)
        parts += [markdown(table) for table in (*section.seen, *section.folded, section.times)]
        parts += [
            "### Configuration and versions",
            "",
            markdown(section.configurations),
            markdown(section.versions),
        ]
        parts += ["The same in every run:", ""]
        parts += [
            f"- {escape_markdown(key)}: {escape_markdown(value)}" for key, value in section.shared.items()
        ]
        parts += [""]
    return "\n".join(parts).rstrip() + "\n"


def _markdown_pictures(section: Section) -> list[str]:
    lines: list[str] = []
    for key, pictures in section.pictures.items():
        lines += [f"### {HEADINGS[key]}", ""]
        for picture in pictures:
            caption = escape_markdown(picture.caption)
            if picture.figure is None:
                lines += [f"Not drawn: {escape_markdown(picture.reason)}.", ""]
            else:
                lines += [f"![{caption}](figures/{picture.name}.svg)", "", f"*{caption}*", ""]
    return lines


def _latex(page: Page) -> str:
    parts = [r"% Needs \usepackage{booktabs} and \usepackage[T1]{fontenc}.", ""]
    for section in page.sections:
        shown = [section.endpoints, section.paired, *section.beside_paper, *section.folded, section.times]
        title = "".join(sign if sign.isascii() and sign.isprintable() else " " for sign in section.title)
        parts += [
            f"% Setting: {title}",
            *(latex(table, f"tab:{table.name}") for table in shown if table.rows),
        ]
    return "\n".join(parts)


def _paired_csv(compared: Mapping[str, pd.DataFrame]) -> str:
    """All metrics; accuracy in fractions. ``differences`` is JSON, by seed."""
    frames = [frame for frame in compared.values() if len(frame)] or [compared["accuracy"]]
    table = pd.concat(frames, ignore_index=True)
    table["differences"] = [json.dumps(values) for values in table["differences"]]
    return str(table.to_csv(index=False))
