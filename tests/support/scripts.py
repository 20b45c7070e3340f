"""The scripts of benchmarks/ as modules."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> dict[str, Any]:
    """What a script defines; the test is skipped where the folder is not."""
    if not FOLDER.is_dir():
        pytest.skip("not a source checkout")
    return runpy.run_path(str(FOLDER / name), run_name="benchmark")
