"""What a benchmark found: lines with their numbers, as JSON, as CSV, and as the tables of the documents."""

from __future__ import annotations

import csv
import io
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import transformers
from pydantic import BaseModel, ConfigDict, ValidationError

from gar.benchmark.timing import Measured
from gar.errors import UserError, one_of, path_errors
from gar.presets import paper
from gar.runs.files import write_text
from gar.version import __version__

FORMATS = (".json", ".csv")


class Spread(BaseModel):
    """Several measurements of one thing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(median=median(values), lowest=min(values), highest=max(values))


class Line(BaseModel):
    """One measured thing. ``labels`` say what it is; ``problem`` why it has no numbers.

    Times are milliseconds per update, memory is GiB, ``kernels`` and ``device_ms`` are per update; ratios are
    to the reference of the same setting, those of times and rates the median over turns. ``paper_ms`` and
    ``paper_ratio`` are the paper's own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    labels: dict[str, str]
    problem: str = ""
    ms: Spread | None = None
    per_second: Spread | None = None
    ratio: float | None = None
    kernels: float | None = None
    device_ms: float | None = None
    peak_gib: float | None = None
    peak_ratio: float | None = None
    paper_ms: float | None = None
    paper_ratio: float | None = None


def compared(
    found: Mapping[str, Measured],
    labels: Mapping[str, dict[str, str]],
    reference: str,
    theirs: Mapping[str, paper.Runtime | None] | None = None,
) -> list[Line]:
    """A line for everything measured together; ``reference`` is the name of the one that ratios are to."""
    base = found.get(reference, Measured())
    result = []
    for name, measured in found.items():
        published = (theirs or {}).get(name)
        line = Line(
            labels=labels[name],
            problem=measured.problem,
            paper_ms=None if published is None else float(published.step_s) * 1e3,
            paper_ratio=None if published is None else float(published.factor),
        )
        if measured.seconds and not measured.problem:
            line = line.model_copy(
                update={
                    "ms": Spread.of([seconds * 1e3 for seconds in measured.seconds]),
                    "ratio": paired_ratio(measured.seconds, base.seconds),
                    "kernels": measured.kernels,
                    "device_ms": None if measured.device_seconds is None else measured.device_seconds * 1e3,
                    "peak_gib": None if measured.peak is None else measured.peak / 2**30,
                    "peak_ratio": _ratio(measured.peak, base.peak),
                }
            )
        result.append(line)
    return result


def paired_ratio(seconds: Sequence[float], reference: Sequence[float]) -> float | None:
    """The median over turns: what slows the machine down for a while slows both of a turn."""
    if len(seconds) != len(reference):
        return None
    return median(mine / theirs for mine, theirs in zip(seconds, reference, strict=True))


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None


class Report(BaseModel):
    """The lines of one run of one command on one machine.

    ``note`` says what an update was, ``reference`` what ratios are to, ``columns`` which numbers are shown
    (names of :data:`COLUMNS`).
    """

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    command: str
    note: str
    machine: dict[str, str]
    reference: str
    columns: tuple[str, ...]
    lines: list[Line] = []

    def heading(self) -> str:
        """What was measured, and where, in two sentences."""
        return f"{self.note} {', '.join(f'{key} {value}' for key, value in self.machine.items())}."

    def header(self, labels: Sequence[str]) -> str:
        """The first two lines of the table."""
        names = [*labels, *(COLUMNS[name][0].format(reference=self.reference) for name in self.columns)]
        return f"{_row(names)}\n|{'---|' * len(names)}"

    def row(self, line: Line) -> str:
        """A line of the table; one without numbers says why in their place."""
        cells = [COLUMNS[name][1](line) for name in self.columns]
        if line.problem:
            cells[0] = line.problem.replace("|", "\\|")
        return _row([*line.labels.values(), *cells])

    def markdown(self, chosen: Mapping[str, str] | None = None) -> str:
        """The whole table, or the lines with the ``chosen`` labels, under its heading."""
        lines = [line for line in self.lines if (chosen or {}).items() <= line.labels.items()]
        if not lines:
            raise UserError(f"no line with {dict(chosen or {})}; expected labels of {self.command}")
        table = [self.header(list(lines[0].labels)), *map(self.row, lines)]
        return f"{self.heading()}\n\n" + "\n".join(table) + "\n"

    def csv(self) -> str:
        """A row a line; every number has its column, lengths of times and rates three."""
        rows = [_flat(line) | self.machine | {"command": self.command} for line in self.lines]
        text = io.StringIO()
        names = list(dict.fromkeys(key for row in rows for key in row))
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def write(self, path: Path) -> None:
        """As the file's name says, JSON or CSV; the file is whole or as it was."""
        check_name(path)
        text = self.csv() if path.suffix == ".csv" else self.model_dump_json(indent=1, exclude_none=True)
        with path_errors(path):
            write_text(path, f"{text.rstrip()}\n")

    @classmethod
    def read(cls, path: Path) -> Report:
        """What :meth:`write` left as JSON."""
        with path_errors(path):
            content = path.read_bytes()
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "the whole"
            raise UserError(
                f"{path}: {where}: {problem['msg']}; expected a file of gar bench --out"
            ) from None


def check_name(path: Path) -> None:
    """Refuse a file name whose ending says no format."""
    if path.suffix not in FORMATS:
        raise one_of(f"--out {path}: ending", path.suffix, FORMATS)


def command(program: str, arguments: Sequence[str]) -> str:
    """A command line as a reader may repeat it, without where its file went.

    >>> command("gar", ["bench", "step", "--out", "a.json", "--out=b.csv", "--site", "lora ffn"])
    "gar bench step --site 'lora ffn'"
    """
    kept = [
        argument
        for before, argument in zip(["", *arguments], arguments, strict=False)
        if before != "--out" and argument.partition("=")[0] != "--out"
    ]
    return shlex.join([*program.split(), *kept])


def machine_line(device: torch.device) -> str:
    """:func:`machine` in one line."""
    return ", ".join(f"{key} {value}" for key, value in machine(device).items())


def machine(device: torch.device) -> dict[str, str]:
    """What the numbers were measured on."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "gar": __version__,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "cpu"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return ""
    form = ".1f" if spread.median < 1000 else ".0f"
    return f"{spread.median:{form}} ({spread.lowest:{form}} to {spread.highest:{form}})"


def _published(line: Line) -> str:
    if line.paper_ms is None or line.paper_ratio is None:
        return ""
    return f"{line.paper_ratio:.2f} ({line.paper_ms:.1f} ms)"


#: Name of a column of numbers: its header, and the cell of a line.
COLUMNS: dict[str, tuple[str, Callable[[Line], str]]] = {
    "ms": ("ms per update (fastest to slowest)", lambda line: _spread(line.ms)),
    "per_second": ("updates/s, all jobs (slowest to fastest)", lambda line: _spread(line.per_second)),
    "ratio": ("ratio to {reference}", lambda line: _number(line.ratio, ".2f")),
    "kernels": ("kernels", lambda line: _number(line.kernels, ".0f")),
    "device_ms": ("device ms", lambda line: _number(line.device_ms, ".2f")),
    "peak_gib": ("peak GiB", lambda line: _number(line.peak_gib, ".2f")),
    "peak_ratio": ("its ratio", lambda line: _number(line.peak_ratio, ".2f")),
    "paper": ("the paper, DeBERTa-v3-base: ratio (step)", _published),
}


def _flat(line: Line) -> dict[str, object]:
    """One level: the median, lowest and highest of several measurements are columns."""
    flat: dict[str, object] = dict(line.labels)
    for key, value in line.model_dump(exclude={"labels"}).items():
        parts = value if isinstance(value, dict) else {}
        flat |= {f"{key}_{part}": number for part, number in parts.items()} or {key: value}
    return flat
