"""result.json: one form for whoever writes it and whoever reads it.

checksums.json, written just before it, guards the files of the finished run, result.json itself included; a
run of a version before it is read without.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from gar.config import explain
from gar.runs.files import checksum, checksum_of, read_json, write_json, write_text
from gar.runs.names import CHECKSUMS, CONFIG, DIAGNOSTICS, ENVIRONMENT, HISTORY, MODEL, RESULT, SCHEMA

#: Files of a finished run that its result vouches for, where they are there.
GUARDED = (CONFIG, ENVIRONMENT, HISTORY, DIAGNOSTICS, f"{MODEL}/config.json")


class DamagedFile(ValueError):
    """A file of a run that is not what was written; the message names it and says what is wrong."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class Selection(_Part):
    """Shares of right answers on the held out part of the training splits, to choose between models by."""

    macro: FiniteFloat
    tasks: dict[str, FiniteFloat] = Field(min_length=1)


class Accuracy(_Part):
    """Shares of right answers on the validation splits; ``selection`` where the run held a part out."""

    macro: FiniteFloat
    tasks: dict[str, FiniteFloat] = Field(min_length=1)
    extra: dict[str, FiniteFloat] = {}
    selection: Selection | None = None


class Timing(_Part):
    """Of the updates, without features and evaluations."""

    updates_per_second: FiniteFloat | None = None
    step_seconds_mean: FiniteFloat | None = None


def _not_newer(schema: int) -> int:
    if schema > SCHEMA:
        raise ValueError(f"{schema} is newer than this version's {SCHEMA}")
    return schema


def _numbers(routing: dict[str, Any]) -> dict[str, Any]:
    """Metrics are finite numbers, lists of them or tables of lists."""
    for key, value in _leaves(routing, "routing"):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{key} is {value!r}, not a finite number")
    return routing


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item, key)
    else:
        yield key, value


class RunResult(_Part):
    """The content of result.json; ``routing`` has the catalogue's metrics and the tables behind them."""

    model_config = ConfigDict(extra="allow", frozen=True, serialize_by_alias=True, validate_by_name=True)

    schema_: Annotated[int, AfterValidator(_not_newer)] = Field(SCHEMA, alias="schema")
    method: str
    mixture: str | None = None
    seed: int
    updates: int = 0
    examples: dict[str, tuple[int, int]] = {}
    majority: dict[str, FiniteFloat] = {}
    accuracy: Accuracy
    routing: Annotated[dict[str, Any], AfterValidator(_numbers)]
    timing: Timing = Timing()

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it; what the file did not have is left out."""
        return self.model_dump(mode="json", exclude_unset=True)

    def write(self, directory: Path) -> None:
        """Write checksums.json and then result.json, the last file of a run."""
        files = {name: checksum(path) for name in GUARDED if (path := directory / name).is_file()}
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        write_json(directory / CHECKSUMS, {"files": files | {RESULT: checksum_of(text.encode())}})
        write_text(directory / RESULT, text)


def read_result(directory: Path) -> RunResult:
    """The result of a finished run; :class:`DamagedFile` where it is not what was written."""
    try:
        tree = json.loads((directory / RESULT).read_text(encoding="utf-8"))
    except OSError as error:
        raise DamagedFile(f"{RESULT}: {error.strerror or error}") from None
    except ValueError:
        raise DamagedFile(f"{RESULT}: not valid JSON") from None
    check_files(directory, RESULT)
    try:
        return RunResult.model_validate(tree)
    except ValidationError as error:
        raise DamagedFile(f"{RESULT}: {explain(error, RunResult)}") from None


def replace_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file that a finished run may vouch for, as a new diagnosis; it vouches for the new one then.

    Until it is there, the run vouches for none, so that an interruption damages nothing.
    """
    index = path.parent / CHECKSUMS
    files: Any = (read_json(index) or {}).get("files")
    guarded = isinstance(files, dict) and path.name in files
    if guarded:
        write_json(index, {"files": {name: files[name] for name in files if name != path.name}})
    write_json(path, value)
    if guarded:
        write_json(index, {"files": {**files, path.name: checksum(path)}})


def check_files(directory: Path, *names: str) -> None:
    """Refuse files of a finished run that changed after its end, all of them or the named ones.

    Files that are no longer there (a model that was deleted to save room) pass.
    """
    if not (directory / CHECKSUMS).is_file():
        return
    files = (read_json(directory / CHECKSUMS) or {}).get("files")
    if not isinstance(files, dict) or RESULT not in files:
        raise DamagedFile(f"{CHECKSUMS}: cannot be read; the file was changed after the run had written it")
    for name in names or files:
        path = directory / name
        if name in files and path.is_file() and checksum(path) != files[name]:
            raise DamagedFile(
                f"{name}: its checksum differs from {CHECKSUMS}; the file was changed after the run had ended"
            )
