"""Make docs/results.md and its figures from the stored runs in docs/results, so that none of it is typed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gar.report import evidence, evidence_page
from gar.runs.files import write_text

DOCS = Path(__file__).parent.parent / "docs"


def main(
    check: Annotated[bool, typer.Option("--check", help="Fail where the page is old.")] = False,
    docs: Annotated[Path, typer.Option(help="Where results.md and results/ are.")] = DOCS,
) -> None:
    """Make docs/results.md and docs/results/*.svg from docs/results/*.csv."""
    path, folder = docs / "results.md", docs / "results"
    text, figures = evidence_page.page(evidence.load(folder))
    if check:
        old = not path.is_file() or path.read_text(encoding="utf-8") != text
        drawn = {each.name for each in folder.glob("*.svg")}
        if old or drawn != set(figures):  # a figure's bytes are matplotlib's own
            raise SystemExit(f"{path}: is not what the files in {folder} give; run benchmarks/results.py")
        return
    folder.mkdir(parents=True, exist_ok=True)
    for each in folder.glob("*.svg"):
        each.unlink()
    for name, picture in figures.items():
        write_text(folder / name, picture)
    write_text(path, text)


if __name__ == "__main__":
    typer.run(main)
