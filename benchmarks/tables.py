"""Fill the tables of docs/benchmarks.md from the files in benchmarks/results, so that none of them is typed.

A table stands between ``<!-- table: FILE LABEL=VALUE ... -->`` and ``<!-- end -->``; the labels choose lines.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from gar.benchmark.report import Report
from gar.runs.files import write_text

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
RESULTS = HERE / "results"
TABLE = re.compile(r"(<!-- table: (\S+)((?: \S+=\S+)*) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, results: Path) -> str:
    """The page with every table as its file has it; where there is no file, it says so."""

    def table(match: re.Match[str]) -> str:
        begin, name, labels, end = match.groups()
        chosen = dict(label.split("=", 1) for label in labels.split())
        path = results / name
        if not path.is_file():
            return f"{begin}\n*Not measured yet ({name}).*\n\n{end}"
        report = Report.read(path)
        return f"{begin}\n`{report.command}`\n\n{report.markdown(chosen)}\n{end}"

    return TABLE.sub(table, text)


def main(
    check: Annotated[bool, typer.Option("--check", help="Fail where a table is old.")] = False,
) -> None:
    """Fill the tables of docs/benchmarks.md from the files in benchmarks/results."""
    before = PAGE.read_text(encoding="utf-8")
    after = filled(before, RESULTS)
    if check and before != after:
        raise SystemExit("docs/benchmarks.md: tables differ from their files; run benchmarks/tables.py")
    if not check:
        write_text(PAGE, after)


if __name__ == "__main__":
    typer.run(main)
