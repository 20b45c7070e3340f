"""Fill docs/planted.md: its tables and figures from docs/planted/runs.csv, and that file from runs.

A table stands between ``<!-- planted: SITE top-K -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from gar.report import planted
from gar.report import results as reading
from gar.report._style import svg
from gar.report._text import markdown
from gar.runs.files import write_text

DOCS = Path(__file__).parent.parent / "docs"
TABLE = re.compile(r"(<!-- planted: (\w+) top-(\d+) -->\n).*?(<!-- end -->)", re.DOTALL)


def family(table: pd.DataFrame, site: str, top_k: int) -> pd.DataFrame:
    return table[(table["site"] == site) & (table["top_k"] == top_k)]


def filled(text: str, table: pd.DataFrame) -> str:
    """The page with every table as the runs have it."""

    def block(match: re.Match[str]) -> str:
        begin, site, top_k, end = match.groups()
        return f"{begin}\n{markdown(planted.endpoints(family(table, site, int(top_k))))}\n{end}"

    return TABLE.sub(block, text)


def main(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run directories: runs.csv is made anew.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Fail where a table is old.")] = False,
    docs: Annotated[Path, typer.Option(help="Where planted.md and planted/ are.")] = DOCS,
) -> None:
    """Make the tables and figures of docs/planted.md."""
    folder, page = docs / "planted", docs / "planted.md"
    if runs:
        folder.mkdir(parents=True, exist_ok=True)
        table = planted.frame(reading.load(runs))
        write_text(folder / "runs.csv", table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    table = pd.read_csv(folder / "runs.csv")
    text = filled(before := page.read_text(encoding="utf-8"), table)
    if check:
        if text != before:
            raise SystemExit(f"{page}: is not what {folder / 'runs.csv'} gives; run benchmarks/planted.py")
        return
    write_text(page, text)
    for (site, top_k), part in table.groupby(["site", "top_k"]):
        if (figure := planted.figure(part)) is not None:
            name = f"{site}_top{top_k}"
            write_text(folder / f"{name}.svg", svg(figure, f"planted-{name}", planted.SAID) + "\n")


if __name__ == "__main__":
    typer.run(main)
