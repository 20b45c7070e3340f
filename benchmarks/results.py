"""Make docs/results.md and its figures from the stored runs in docs/results, so that none of it is typed.

The paragraph about them in docs/index.md and README.md is made too: what stands between the two comments.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated

import typer

from gar.report import evidence, evidence_page, evidence_summary
from gar.runs.files import write_text

DOCS = Path(__file__).parent.parent / "docs"
#: What stands around the paragraph; each on a line of its own.
BEGIN, END = "<!-- results: written by benchmarks/results.py -->", "<!-- end of results -->"


def main(
    check: Annotated[bool, typer.Option("--check", help="Fail where the page is old.")] = False,
    docs: Annotated[Path, typer.Option(help="Where results.md and results/ are.")] = DOCS,
) -> None:
    """Make docs/results.md, docs/results/*.svg and the paragraph of other pages from docs/results/*.csv*."""
    path, folder = docs / "results.md", docs / "results"
    stored = evidence.load(folder)
    text, figures = evidence_page.page(stored)
    texts = {path: text}
    for other in (docs / "index.md", docs.parent / "README.md"):
        if other.is_file():
            texts[other] = renewed(other, evidence_summary.summary(stored))
    if check:
        old = [each for each, new in texts.items() if not each.is_file() or each.read_text("utf-8") != new]
        drawn = {each.name for each in folder.glob("*.svg")}
        if drawn != set(figures):  # a figure's bytes are matplotlib's own
            old.append(folder)
        if old:
            raise SystemExit(f"{old[0]}: is not what the files in {folder} give; run benchmarks/results.py")
        return
    folder.mkdir(parents=True, exist_ok=True)
    for each in folder.glob("*.svg"):
        each.unlink()
    for name, picture in figures.items():
        write_text(folder / name, picture)
    for each, new in texts.items():
        write_text(each, new)


def renewed(path: Path, paragraph: str) -> str:
    """The page with this paragraph between the two comments."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"\n{END}")
    if not (begin and end):
        raise SystemExit(f"{path}: has no lines {BEGIN} and {END}, one after the other")
    filled = textwrap.fill(paragraph, 118, break_long_words=False, break_on_hyphens=False)
    return f"{before}{begin}{filled}{end}{after}"


if __name__ == "__main__":
    typer.run(main)
