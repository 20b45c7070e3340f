"""The recipe of CONTRIBUTING.md for a module of one's own, followed as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import yaml

from support.tiny_runs import make_world, tree

PAGE = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return found


def test_a_plugin_with_a_method_and_a_metric_trains_and_is_reported(tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(block("python"), encoding="utf-8")
    base = tree(make_world(tmp_path / "world"), optimizer__updates=2)
    own = {**base, **yaml.safe_load(block("yaml"))}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
    out = tmp_path / "run"
    command = [sys.executable, "-c", "from gar.cli import main; main()"]
    subprocess.run([*command, "train", str(tmp_path / "own.yaml"), "--out", str(out)], check=True)
    result = json.loads((out / "result.json").read_text())
    assert result["method"] == "router_entropy"
    assert result["routing"]["top_share"] == max(result["routing"]["load"])
    subprocess.run([*command, "report", str(out), "--out", str(tmp_path / "report")], check=True)
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "Router entropy" in page
    assert "largest load" in page
