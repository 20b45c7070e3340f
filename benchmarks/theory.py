"""Draw the figures of docs/theory.md from `gar.theory`; their numbers go to docs/theory/figures.csv."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from gar.report import theory_page
from gar.runs.files import write_text

DOCS = Path(__file__).parent.parent / "docs"
NUMBERS = "figures.csv"


def old(docs: Path, rows: pd.DataFrame) -> list[str]:
    """What in ``docs`` differs from ``rows``, the numbers as computed now; nothing if all is up to date.

    Numbers may differ by rounding. An SVG's bytes are matplotlib's own: it is compared by the digest of its
    numbers that it carries.
    """
    folder = docs / "theory"
    if not (folder / NUMBERS).is_file():
        return [f"no {NUMBERS}"]
    stored = pd.read_csv(folder / NUMBERS)
    names = ["figure", "series"]
    if len(stored) != len(rows) or not (stored[names] == rows[names]).all(axis=None):
        return [f"{NUMBERS} has other series"]
    found = []
    if not np.allclose(stored[["x", "y"]], rows[["x", "y"]], rtol=1e-4, atol=1e-9):
        found.append(f"{NUMBERS} has other numbers")
    page = docs / "theory.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    drawn = {path.stem for path in folder.glob("*.svg")}
    for name in sorted(drawn.union(rows["figure"])):
        mark = theory_page.digest(stored[stored["figure"] == name])
        path = folder / f"{name}.svg"
        if not path.is_file() or f"data {mark}" not in path.read_text(encoding="utf-8"):
            found.append(f"{name}.svg is not drawn from {NUMBERS}")
        if f"(theory/{name}.svg)" not in text:
            found.append(f"theory.md does not show {name}.svg")
    return found


def main(
    check: Annotated[bool, typer.Option("--check", help="Fail where numbers or figures are old.")] = False,
    docs: Annotated[Path, typer.Option(help="Where theory.md and theory/ are.")] = DOCS,
) -> None:
    """Make docs/theory/*.svg and docs/theory/figures.csv."""
    rows = theory_page.compute()
    if check:
        if found := old(docs, rows):
            raise SystemExit(f"{docs / 'theory'}: {'; '.join(found)}; run benchmarks/theory.py")
        return
    folder = docs / "theory"
    folder.mkdir(parents=True, exist_ok=True)
    for each in folder.glob("*.svg"):
        each.unlink()
    write_text(folder / NUMBERS, rows.to_csv(index=False, float_format="%.6g"))
    for name, picture in theory_page.pictures(rows).items():
        write_text(folder / f"{name}.svg", picture)


if __name__ == "__main__":
    typer.run(main)
