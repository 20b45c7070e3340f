"""BIG-bench tasks from the ``bigbench`` source distribution, fetched once by the user's own pip.

Only the ``task.json`` files of the registered tasks are kept, all of them, so that another mixture needs no
second download. BIG-bench asks for its data not to be used in pretraining.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from gar.data._permutation import fixed_permutation
from gar.data._rows import Row, Table
from gar.data.registry import RegisteredTask, bigbench_paths
from gar.errors import UserError

RELEASE = "bigbench-1.0.0"
REQUIREMENT = "bigbench==1.0.0"
SHA256 = "1bb398a5512c6d798cdebe0dfa0ac03f67f6033fa6b39c6ef71df978c7cbc5c2"
VALIDATION_SHARE = 0.2


def open_splits(task: RegisteredTask, cache: Path) -> tuple[Table, Table]:
    """Train and validation rows (``input``, ``label``) of a registered BIG-bench task."""
    assert task.bigbench is not None
    rows = _labelled(task, fetch(task.bigbench, cache))
    held_out = validation_inputs([row["input"] for _, row in rows], task.name)

    def table(in_validation: bool) -> Table:
        part = [row for row in rows if (row[1]["input"] in held_out) == in_validation]
        return Table(f"BIG-bench {task.bigbench}", part, ("input", "label"), unit="example")

    return table(False), table(True)


def validation_inputs(inputs: Sequence[str], name: str) -> frozenset[str]:
    """The inputs of the validation split: the last 20 % of a fixed permutation of the distinct inputs.

    Distinct inputs, in order of first occurrence, are permuted: equal texts stay on one side.
    """
    distinct = list(dict.fromkeys(inputs))
    order = fixed_permutation(len(distinct), f"{name}/split")
    first = len(distinct) - int(VALIDATION_SHARE * len(distinct))
    return frozenset(distinct[i] for i in order[first:])


def _labelled(task: RegisteredTask, file: Path) -> list[Row]:
    """Each example's input with its best-scored choice. Every example must offer the registered choices."""
    expected = sorted(task.labels)

    def read(found: dict[str, Any]) -> dict[str, Any]:
        # Scores of many choices are most of a file: they are judged and dropped as soon as they are read.
        scores: Mapping[str, float] | None = found.get("target_scores")
        if scores is None:
            return found
        choices = expected if scores.keys() == set(expected) else sorted(scores)
        top = max(scores.values(), default=0)
        best = [choice for choice, score in scores.items() if score == top]
        return {"input": found["input"], "choices": choices, "best": best}

    examples = json.loads(file.read_text(encoding="utf-8"), object_hook=read)["examples"]
    rows: list[Row] = []
    for number, example in enumerate(examples, start=1):
        choices, best = example["choices"], example["best"]
        if choices != expected:
            raise UserError(
                f"BIG-bench {task.bigbench}, example {number}: choices {choices}, "
                f"expected {expected} as in the other examples"
            )
        if len(best) > 1:
            raise UserError(
                f"BIG-bench {task.bigbench}, example {number}: {' and '.join(best)} score equally; "
                "expected one best choice"
            )
        rows.append((number, {"input": example["input"], "label": best[0]}))
    return rows


def fetch(path: str, cache: Path) -> Path:
    """The cached ``task.json`` of a BIG-bench folder, downloading the distribution when it is not there."""
    directory = cache / RELEASE
    file = _cached(directory, path)
    try:
        if not file.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            with FileLock(directory / "lock"):
                if not file.is_file():  # another process may have been faster
                    _fill(directory, {*bigbench_paths(), path})
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be read or written ({error.strerror or error}); set GAR_CACHE to a "
            "directory of yours"
        ) from None
    return file


def _fill(directory: Path, paths: set[str]) -> None:
    partial = directory / "partial"
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
    partial.mkdir()
    try:
        archive = directory / f"{RELEASE}.tar.gz"  # put there by the user of a machine without network
        if not archive.is_file():
            archive = download(partial)
        _check_digest(archive)
        _extract(archive, {_member(path): _cached(directory, path) for path in paths}, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def download(directory: Path) -> Path:
    """Let pip fetch the source distribution into ``directory``."""
    print("fetching BIG-bench (358 MB, once) with pip", file=sys.stderr, flush=True)
    options = ["--no-deps", "--no-binary", "bigbench", "--retries", "2", "--dest", str(directory)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, REQUIREMENT],
        stdout=2,  # pip's progress bar; our own stdout stays clean for --format json
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(directory)},  # pip unpacks it for the metadata: gigabytes
    )
    archives = list(directory.glob("bigbench-*.tar.gz"))
    if done.returncode or not archives:
        raise UserError(
            f"pip could not fetch {REQUIREMENT} ({_pip_reason(done.stderr)}); check the network and pip's "
            f"settings, or put {RELEASE}.tar.gz into {directory.parent}"
        )
    return archives[0]


def _pip_reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["no archive came"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines)[-1]


def _check_digest(archive: Path) -> None:
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise UserError(f"{archive}: SHA-256 is {found}, expected {SHA256}; delete it and fetch it again")


def _extract(archive: Path, wanted: Mapping[str, Path], staging: Path) -> None:
    """Copy the wanted members, by name, each into place in one step."""
    missing = dict(wanted)
    try:
        with tarfile.open(archive, "r|gz") as tar:
            for member in tar:
                target = missing.get(member.name)
                content = tar.extractfile(member) if target and member.isfile() else None
                if target is None or content is None:
                    continue
                staged = staging / target.name
                with staged.open("wb") as file:
                    shutil.copyfileobj(content, file)
                staged.replace(target)
                del missing[member.name]
                if not missing:  # the rest of the archive need not be unpacked
                    break
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f"{archive}: not a readable archive ({error})") from None
    if missing:
        raise UserError(f"{archive}: has no {', '.join(sorted(missing))}")


def _member(path: str) -> str:
    return f"{RELEASE}/bigbench/benchmark_tasks/{path}/task.json"


def _cached(directory: Path, path: str) -> Path:
    return directory / f"{path.replace('/', '--')}.json"
