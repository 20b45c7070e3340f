"""Where downloads and caches live."""

from __future__ import annotations

import os
from pathlib import Path

from gar.errors import user_path


def cache_root(directory: str | Path | None = None) -> Path:
    """The cache directory, which need not exist yet: the given one, ``$GAR_CACHE`` or ``~/.cache/gar``."""
    return user_path(directory or os.environ.get("GAR_CACHE") or "~/.cache/gar")
