"""Where downloads and caches live."""

from __future__ import annotations

import os
from pathlib import Path

from gar.errors import UserError, path_kind, user_path


def cache_root(directory: str | Path | None = None) -> Path:
    """The cache directory, which need not exist yet: the given one, ``$GAR_CACHE`` or ``~/.cache/gar``."""
    path = user_path(directory or os.environ.get("GAR_CACHE") or "~/.cache/gar")
    if path_kind(path) == "file":
        raise UserError(f"{path}: is a file, expected a cache directory")
    return path
