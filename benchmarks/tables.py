"""Fill tables of docs/benchmarks.md, ranks.md and trainer.md from benchmarks/results: none of them is typed.

A table of ``gar bench`` stands between ``<!-- table: FILE LABEL=VALUE ... -->`` and ``<!-- end -->``: the
labels choose lines. One of benchmarks/ranks.py stands between ``<!-- ranks: FILE FILE ... -->`` and the
same end, with a line a file. One of benchmarks/trainer_effect.py stands between
``<!-- trainer: FILE TEXTS -->`` and that end.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gar.benchmark.report import Report
from gar.report.verdict import Paired
from gar.runs.files import write_text

HERE = Path(__file__).parent
PAGES = tuple(HERE.parent / "docs" / name for name in ("benchmarks.md", "ranks.md", "trainer.md"))
RESULTS = HERE / "results"
TABLE = re.compile(r"(<!-- table: (\S+)((?: \S+=\S+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
RANKS = re.compile(r"(<!-- ranks:((?: \S+)+) -->\n).*?(<!-- end -->)", re.DOTALL)
TRAINER = re.compile(r"(<!-- trainer: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

#: What tells an arm of benchmarks/trainer_effect.py, and what its runs measured, as columns.
ARM = {
    "top_k": "top-k", "learning_rate": "learning rate", "max_grad_norm": "`max_grad_norm`",
    "gradients": "`gradients`", "coefficient": "coefficient",
}  # fmt: skip
EFFECT = {"nmi": "NMI", "purity": "purity", "loss": "loss"}


def used(text: str) -> set[str]:
    """The files that the tables of a page are made from."""
    names = {name for _, name, _, _ in TABLE.findall(text)}
    names |= {name for _, name, _, _ in TRAINER.findall(text)}
    return names.union(*(files.split() for _, files, _ in RANKS.findall(text)))


def scaling(results: list[dict[str, Any]]) -> str:
    """One line for each file of benchmarks/ranks.py: each number of ranks beside the first of them."""
    ranks = [line["ranks"] for line in results[0]["lines"]]
    header = ["precision", "batch size a task", *(f"{n} rank{'s' * (n > 1)}, ms" for n in ranks)]
    header += [f"{n} ranks, times as fast" for n in ranks[1:]] + ["MB sent per rank, update"]
    header += ["GiB at most", "replayed"]
    rows = []
    for result in results:
        setting, lines = result["setting"], result["lines"]
        row = [setting["precision"], str(setting.get("mixture.batch_size", 32))]
        row += [f"{line['ms']:.1f} ({line['lowest']:.1f} to {line['highest']:.1f})" for line in lines]
        row += [f"{line['speedup']:.2f}" for line in lines[1:]]
        row.append(", ".join(f"{line['bytes'] / 1e6:.0f}" for line in lines[1:]))
        row.append(", ".join(f"{line['peak_gib']:.1f}" for line in lines))
        row.append(", ".join("yes" if line["captured"] else "no" for line in lines))
        rows.append(row)
    machine = ", ".join(dict.fromkeys(result["machine"] for result in results))
    return f"{machine}.\n\n{markdown(header, rows)}"


def effect(lines: list[dict[str, str]]) -> str:
    """The arms of benchmarks/trainer_effect.py: means without the objective, else the paired differences."""
    varying = [name for name in ARM if len({line[name] for line in lines}) > 1]
    arms: dict[tuple[str, ...], dict[str, dict[int, float]]] = {}
    for line in lines:
        values = arms.setdefault(tuple(line[name] for name in ARM), {key: {} for key in EFFECT})
        for key in EFFECT:
            values[key][int(line["seed"])] = float(line[key])
    rows = []
    for arm, values in arms.items():
        setting = dict(zip(ARM, arm, strict=True))
        plain = float(setting["coefficient"]) == 0
        reference = values
        if not plain:
            reference = arms[tuple({**setting, "gradients": "relative", "coefficient": "0.0"}.values())]
        row = [setting[name].removesuffix(".0") for name in varying]
        if plain and "gradients" in varying:
            row[varying.index("gradients")] = "none"
        for key in EFFECT:
            change = Paired.of(values[key], reference[key])
            half = (change.high - change.low) / 2
            own = f"{statistics.mean(values[key].values()):.3f}"
            row.append(own if plain else f"{change.mean:+.3f} ± {half:.3f}".replace("-", "−"))
        rows.append(row)
    return markdown([*(ARM[name] for name in varying), *EFFECT.values()], rows)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


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

    def trainer(match: re.Match[str]) -> str:
        begin, name, texts, end = match.groups()
        with (results / name).open(newline="", encoding="utf-8") as file:
            lines = [line for line in csv.DictReader(file) if line["texts"] == texts]
        return f"{begin}\n{effect(lines)}\n{end}"

    return TRAINER.sub(trainer, RANKS.sub(ranks, TABLE.sub(table, text)))


def main(
    check: Annotated[bool, typer.Option("--check", help="Fail where a table is old.")] = False,
) -> None:
    """Fill the tables of these pages from the files in benchmarks/results."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = filled(before, RESULTS)
        if check and before != after:
            raise SystemExit(f"docs/{page.name}: tables differ from their files; run benchmarks/tables.py")
        if not check:
            write_text(page, after)


if __name__ == "__main__":
    typer.run(main)
