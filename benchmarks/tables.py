"""Fill the tables of docs/benchmarks.md and docs/ranks.md from benchmarks/results: none of them is typed.

A table of ``gar bench`` stands between ``<!-- table: FILE LABEL=VALUE ... -->`` and ``<!-- end -->``: the
labels choose lines. One of benchmarks/ranks.py stands between ``<!-- ranks: FILE FILE ... -->`` and the
same end, with a line a file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from gar.benchmark.report import Report
from gar.runs.files import write_text

HERE = Path(__file__).parent
PAGES = tuple(HERE.parent / "docs" / name for name in ("benchmarks.md", "ranks.md"))
RESULTS = HERE / "results"
TABLE = re.compile(r"(<!-- table: (\S+)((?: \S+=\S+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
RANKS = re.compile(r"(<!-- ranks:((?: \S+)+) -->\n).*?(<!-- end -->)", re.DOTALL)


def used(text: str) -> set[str]:
    """The files that the tables of a page are made from."""
    names = {name for _, name, _, _ in TABLE.findall(text)}
    return names.union(*(files.split() for _, files, _ in RANKS.findall(text)))


def scaling(results: list[dict[str, Any]]) -> str:
    """One line for each file of benchmarks/ranks.py: each number of ranks beside the first of them."""
    ranks = [line["ranks"] for line in results[0]["lines"]]
    header = ["precision", "batch size a task", *(f"{n} rank{'s' * (n > 1)}, ms" for n in ranks)]
    header += [f"{n} ranks, times as fast" for n in ranks[1:]] + ["MB sent per rank, update", "GiB at most"]
    rows = []
    for result in results:
        setting, lines = result["setting"], result["lines"]
        row = [setting["precision"], str(setting.get("mixture.batch_size", 32))]
        row += [f"{line['ms']:.1f} ({line['lowest']:.1f} to {line['highest']:.1f})" for line in lines]
        row += [f"{line['speedup']:.2f}" for line in lines[1:]]
        row.append(", ".join(f"{line['bytes'] / 1e6:.0f}" for line in lines[1:]))
        row.append(", ".join(f"{line['peak_gib']:.1f}" for line in lines))
        rows.append(row)
    machine = ", ".join(dict.fromkeys(result["machine"] for result in results))
    table = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(r)} |" for r in rows)]
    return f"{machine}.\n\n" + "\n".join(table) + "\n"


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

    def ranks(match: re.Match[str]) -> str:
        begin, names, end = match.groups()
        read = [json.loads((results / name).read_text(encoding="utf-8")) for name in names.split()]
        return f"{begin}\n{scaling(read)}\n{end}"

    return RANKS.sub(ranks, TABLE.sub(table, text))


def main(
    check: Annotated[bool, typer.Option("--check", help="Fail where a table is old.")] = False,
) -> None:
    """Fill the tables of docs/benchmarks.md and docs/ranks.md from the files in benchmarks/results."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = filled(before, RESULTS)
        if check and before != after:
            raise SystemExit(f"docs/{page.name}: tables differ from their files; run benchmarks/tables.py")
        if not check:
            write_text(page, after)


if __name__ == "__main__":
    typer.run(main)
