"""Print pyproject.toml's lower bounds as exact pins, one a line: pip's constraints for the oldest versions.

Packages named as arguments keep the versions of constraints.txt.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
extras = project["optional-dependencies"]
for requirement in project["dependencies"] + extras["quickstart"] + extras["torchjd"] + extras["trainer"]:
    name, lowest = re.fullmatch(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", requirement).groups()
    print(f"{name}=={pinned[name] if name in sys.argv[1:] else lowest}")
