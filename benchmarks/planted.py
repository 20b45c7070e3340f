"""Fill docs/planted.md: its tables and figures from docs/planted/*.csv, and those files from runs.

A table stands between ``<!-- planted: SITE top-K -->`` and ``<!-- end -->``; that of the runs with searched
hyper-parameters, which are in ``chosen.csv``, between ``<!-- planted: chosen -->`` and ``<!-- end -->``.
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
TUNED = re.compile(r"(<!-- planted: chosen -->\n).*?(<!-- end -->)", re.DOTALL)
#: What tells two runs apart.
RUN = [*planted.FAMILY, *planted.CELL, "learning_rate", "seed"]


def family(table: pd.DataFrame, site: str, top_k: int) -> pd.DataFrame:
    return table[(table["site"] == site) & (table["top_k"] == top_k)]


def stored(runs: list[Path], path: Path, keep: bool = False) -> None:
    """The runs as lines of ``path``; ``keep``: beside those of other runs that it has."""
    table = planted.frame(reading.load(runs))
    if keep:
        table = pd.concat([table, pd.read_csv(path)]).drop_duplicates(RUN)
        table = table.sort_values([*planted.FAMILY, *planted.CELL, "seed"], ignore_index=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def filled(text: str, table: pd.DataFrame, chosen: pd.DataFrame) -> str:
    """The page with every table as the runs have it."""

    def block(match: re.Match[str]) -> str:
        begin, site, top_k, end = match.groups()
        return f"{begin}\n{markdown(planted.endpoints(family(table, site, int(top_k))))}\n{end}"

    text = TABLE.sub(block, text)
    return TUNED.sub(lambda match: f"{match[1]}\n{markdown(planted.tuned(chosen))}\n{match[2]}", text)


def main(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run directories: runs.csv is made anew.")] = None,
    chosen: Annotated[
        list[Path] | None, typer.Option(help="Runs of `gar sweep --chosen`: chosen.csv is made anew.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep what runs.csv has of other runs.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Fail where a table is old.")] = False,
    docs: Annotated[Path, typer.Option(help="Where planted.md and planted/ are.")] = DOCS,
) -> None:
    """Make the tables and figures of docs/planted.md."""
    folder, page = docs / "planted", docs / "planted.md"
    if runs:
        stored(runs, folder / "runs.csv", keep)
    if chosen:
        stored(chosen, folder / "chosen.csv")
    table, searched = (pd.read_csv(folder / name) for name in ("runs.csv", "chosen.csv"))
    text = filled(before := page.read_text(encoding="utf-8"), table, searched)
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
