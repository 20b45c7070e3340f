"""Local files as tables: CSV, TSV, JSONL and Parquet, each also gzipped.

The line numbers are those of the file, so that a message about a row can be followed with an editor.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from gar.data._rows import Row, Table
from gar.errors import UserError, nearest, path_kind, user_path

# The csv module refuses fields above 128 KiB by default; whole documents are legitimate texts.
csv.field_size_limit(2**31 - 1)
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def open_table(path: str | Path) -> Table:
    """The rows of a local file, read lazily; its format follows from its name."""
    path = data_file(path)
    return _READERS[file_format(path)](path)


def open_lines(path: str | Path) -> Table:
    """The lines of a text file, read lazily, as rows with the one column ``text``."""
    path = _existing(user_path(path))
    return Table(
        str(path), ((number, {"text": line.rstrip("\r\n")}) for number, line in _lines(path)), ("text",)
    )


def data_file(path: str | Path) -> Path:
    """The path of an existing file of a known format."""
    path = user_path(path)
    file_format(path)
    return _existing(path)


def _existing(path: Path) -> Path:
    if (kind := path_kind(path)) != "file":
        raise _missing(path, kind)
    return path


def file_format(path: Path) -> str:
    """``".csv"`` for ``x.csv`` and ``x.csv.gz``."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    if suffix not in _READERS:
        found = f"unknown extension {suffix!r}" if suffix else "no extension"
        known = ", ".join(_READERS)
        raise UserError(f"{path}: {found}; expected one of {known}, each also .gz{nearest(suffix, _READERS)}")
    return suffix


def _missing(path: Path, kind: str) -> UserError:
    if kind != "missing":
        return UserError(f"{path}: is a {kind}, expected a file")
    if path_kind(path.parent) != "directory":
        return UserError(f"{path}: no such file; the directory {path.parent} does not exist")
    try:
        siblings = sorted(sibling.name for sibling in path.parent.iterdir() if sibling.is_file())
    except OSError:  # a directory may be entered and yet not listed
        siblings = []
    return UserError(f"{path}: no such file{nearest(path.name, siblings)}")


def _csv(path: Path) -> Table:
    return _delimited(path, _csv_cells(path))


def _tsv(path: Path) -> Table:
    # Quote marks in a TSV are text: GLUE's files have unbalanced ones.
    lines = ((number, line.rstrip("\r\n")) for number, line in _lines(path))
    return _delimited(path, ((number, line.split("\t")) for number, line in lines if line))


def _csv_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    start = 1  # a quoted field may span lines; a row is named by its first
    try:
        for cells in reader:
            if cells:
                yield start, cells
            start = reader.line_num + 1
    except csv.Error as error:
        reason = "a quoted field is never closed" if "unexpected end" in str(error) else str(error)
        raise UserError(f"{path}, line {start}: not valid CSV ({reason})") from None


def _delimited(path: Path, cells: Iterator[tuple[int, list[str]]]) -> Table:
    _, header = next(cells, (0, []))
    if not header:
        raise UserError(f"{path}: is empty; expected a header line and one example a line")
    _check_distinct(f"{path}, line 1", header)

    def rows() -> Iterator[Row]:
        for number, values in cells:
            if len(values) != len(header):
                raise UserError(
                    f"{path}, line {number}: {_fields(len(values))}, expected {len(header)} as in the header"
                )
            yield number, dict(zip(header, values, strict=True))

    return Table(str(path), rows(), tuple(header))


def _check_distinct(where: str, header: Sequence[str]) -> None:
    if repeated := sorted({name for name in header if header.count(name) > 1}):
        raise UserError(f"{where}: column {repeated[0]!r} stands twice in the header")


def _fields(n: int) -> str:
    return "1 field" if n == 1 else f"{n} fields"


def _jsonl(path: Path) -> Table:
    def rows() -> Iterator[Row]:
        for number, line in _lines(path):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: not valid JSON ({error.msg} at column {error.colno})"
                ) from None
            except (ValueError, RecursionError) as error:  # endless digits, deep nesting
                raise UserError(f"{path}, line {number}: not readable JSON ({error})") from None
            if not isinstance(value, dict):
                raise UserError(
                    f"{path}, line {number}: found a JSON {type(value).__name__}, expected an object a line"
                )
            yield number, value

    return Table(str(path), rows())


def _parquet(path: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def readable(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not a readable Parquet file ({_first_line(error)})") from None

    file = readable(lambda: pq.ParquetFile(io.BytesIO(_bytes(path)) if _gzipped(path) else path))

    columns = file.schema_arrow.names
    _check_distinct(str(path), columns)

    def rows() -> Iterator[Row]:
        number = 0
        batches = file.iter_batches()
        while (batch := readable(lambda: next(batches, None))) is not None:
            for row in readable(batch.to_pylist):
                number += 1
                yield number, row

    return Table(str(path), rows(), tuple(columns), unit="row")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines with their endings, decoded one by one so that a bad byte has a line number."""
    with _open(path) as file:
        for number, raw in enumerate(_guarded(path, file), start=1):
            if number == 1 and (raw.startswith(UTF16_MARKS) or b"\0" in raw):
                raise UserError(f"{path}, line 1: not UTF-8 but, it seems, UTF-16; save it as UTF-8")
            try:
                # utf-8-sig: spreadsheets put a byte order mark before the header.
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                found = f"byte 0x{raw[error.start]:02x} at position {error.start}"
                raise UserError(
                    f"{path}, line {number}: not UTF-8 ({found}); expected UTF-8 text: save it as UTF-8"
                ) from None


def _bytes(path: Path) -> bytes:
    with _open(path) as file:
        return b"".join(_guarded(path, file))


def _gzipped(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _open(path: Path) -> BinaryIO:
    try:
        return cast(BinaryIO, gzip.open(path, "rb")) if _gzipped(path) else path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be opened ({error.strerror})") from None


def _guarded(path: Path, lines: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from lines
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a readable gzip file ({_first_line(error)})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_READERS: dict[str, Callable[[Path], Table]] = {
    ".csv": _csv,
    ".tsv": _tsv,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}
