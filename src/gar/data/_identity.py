"""What the examples of a mixture come from, told without reading them into memory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from gar.config import MixtureConfig, TaskConfig
from gar.data import _bigbench
from gar.data._files import data_file, file_format
from gar.data._planted import PlantedTask
from gar.data.load import Entry, local_files, resolve
from gar.data.paths import cache_root
from gar.data.registry import RegisteredTask
from gar.errors import path_errors
from gar.runs.files import remembered_checksum


def identity(config: MixtureConfig, data_dir: str | Path | None = None) -> dict[str, str]:
    """A digest for every task of what its examples come from.

    For local files (``data_dir`` too) it is their format and content, byte by byte, wherever they lie; for
    the hub the data set's id, configuration and splits; for BIG-bench the release and the task's folder; for
    a planted task its examples.
    Which columns, labels and how many rows are taken is configuration and has no part in it. Missing files
    are a :class:`~gar.errors.UserError`, as in :func:`~gar.data.load_mixture`.
    """
    _, entries = resolve(config)
    return {entry.name: _digest(_source(entry, data_dir)) for entry in entries}


def contents(
    entry: Entry,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
) -> str:
    """One task's digest as in :func:`identity`, but of BIG-bench's file too, which is fetched for it (unless
    ``data_dir`` stands in).

    Equal digests are equal rows. What comes from the hub is believed to be what it was.
    """
    source = [_source(entry, data_dir)]
    here = local_files(entry, data_dir) is not None
    if isinstance(entry, RegisteredTask) and entry.bigbench is not None and not here:
        source.append(remembered_checksum(_bigbench.fetch(entry.bigbench, cache_root(cache_dir))))
    return _digest(source)


def _source(entry: Entry, data_dir: str | Path | None) -> object:
    if isinstance(entry, PlantedTask):
        return ["planted", entry.make().fingerprint()]
    if (files := local_files(entry, data_dir)) is not None:
        return ["files", *map(_content, files)]
    if isinstance(entry, TaskConfig):
        return ["hub", entry.hub, entry.hub_config, [entry.train_split], [entry.validation_split]]
    if entry.hub is not None:
        return ["hub", entry.hub, entry.config, entry.train, entry.validation]
    return ["bigbench", _bigbench.RELEASE, _bigbench.SHA256, entry.bigbench]


def _digest(source: object) -> str:
    return hashlib.blake2b(json.dumps(source).encode(), digest_size=16).hexdigest()


def _content(file: Path) -> list[str]:
    file = data_file(file)
    with path_errors(file):
        return [file_format(file), remembered_checksum(file)]
