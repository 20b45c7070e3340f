"""A diagnosis as files: the numbers and the heatmap."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gar.errors import UserError
from gar.report import figures
from gar.report.style import svg
from gar.runs.files import write_json, write_text
from gar.runs.names import DIAGNOSTICS

HEATMAP = "heatmap"


def write_diagnosis(diagnosis: Mapping[str, Any], out: str | Path) -> dict[str, Path]:
    """diagnostics.json, heatmap.svg and heatmap.png in a directory; returns the files by name."""
    out = Path(out)
    figure = figures.load_heatmap(diagnosis)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / DIAGNOSTICS, dict(diagnosis))
        write_text(out / f"{HEATMAP}.svg", svg(figure, HEATMAP, "load by task and expert") + "\n")
        figure.savefig(out / f"{HEATMAP}.png", dpi=200, facecolor="white")
    except OSError as error:
        raise UserError(f"{error.filename or out}: cannot be written ({error.strerror or error})") from None
    return {name: out / name for name in (DIAGNOSTICS, f"{HEATMAP}.svg", f"{HEATMAP}.png")}
