"""The documents as code: their blocks, the command lines in them, and the world that they speak of."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gar.data import registry
from support.saved_moe import KINDS, save_moe, some_texts, write_jsonl
from support.tiny_runs import make_world

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md",
                 *(ROOT / "docs").rglob("*.md"))
    if path.is_file()
)  # fmt: skip
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w-]+\.(?:py|yaml))\b")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that a block is which begins with a file's name."""
        named = _FILE.match(self.text)
        return named[1] if named else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text[: found.start()].count("\n") + 1, found[2], textwrap.dedent(found[3]))
        for found in _BLOCK.finditer(text)
    ]


def prose(page: str) -> str:
    """A page without its blocks."""
    return _BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))


def commands(block: Block) -> list[list[str]]:
    """The command lines of a bash block as words: without comments, redirections and variables."""
    variables: dict[str, str] = {}
    found = []
    for line in re.sub(r"\\\n", " ", block.text).splitlines():
        line = re.sub(r"\$(\w+)", lambda name: variables.get(name[1], name[0]), line)
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            while words and (assigned := re.fullmatch(r"(\w+)=(.*)", words[0])):
                variables[assigned[1]] = assigned[2]
                del words[0]
            if ">" in words:
                del words[words.index(">") :]
            if words:
                found.append(words)
    return found


# --------------------------------------------------------------------------------------------------
# The world
# --------------------------------------------------------------------------------------------------

#: What makes a configuration of the documents small; the updates follow from SHORT.
TINY: dict[str, Any] = {
    "backbone": {"name": "tiny", "max_length": 24},
    "experts": {"count": 4, "top_k": 2, "rank": 2, "alpha": 4.0},
    "evaluation": {"probe_examples": 8},
    "optimizer": {"updates": 2},
}


def small(tree: dict[str, Any]) -> dict[str, Any]:
    """A configuration of the documents with TINY's values."""
    changed = tree | {
        section: {**tree.get(section, {}), **values}
        for section, values in TINY.items()
        if "settings" not in tree
    }
    if "mixture" in changed:
        changed["mixture"] = {**changed["mixture"], "batch_size": 8, "group_size": 4}
    return changed


def shortened(text: str) -> str:
    """Python or a command with two updates in the place of hundreds."""
    return re.sub(r"\bupdates=\d+", "updates=2", text)


def make_documents_world(root: Path) -> Path:
    """A folder with the files and models that the documents name: small, made up, under those names."""
    make_world(root / "made")

    (root / "made" / "bert").rename(root / "tiny")
    words = [f"w{n} w{n + 10}" for n in range(10)]
    for name, count in (("mood_train", 24), ("mood_dev", 12), ("train", 24), ("dev", 12)):
        rows = [f"{words[n % 10]} w{20 + n % 7},{('bad', 'good')[n % 2]}" for n in range(count)]
        (root / f"{name}.csv").write_text("\n".join(["review,mood", *rows, ""]), encoding="utf-8")
    for name, count in (("pairs", 24), ("pairs_dev", 12)):
        lines = [f"{words[n % 10]}\t{words[(n * n) % 10]}\t{('no', 'yes')[n % 2]}" for n in range(count)]
        (root / f"{name}.tsv").write_text("\n".join(["first\tsecond\tsame", *lines, ""]), encoding="utf-8")
    readme = next(block for block in blocks("README.md") if block.file == "own.yaml")
    own = small(yaml.safe_load(readme.text))
    (root / "own.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
    (root / "base.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
    (root / "other.yaml").write_text(yaml.safe_dump({"mixture": own["mixture"]}), encoding="utf-8")
    suite = {"settings": {"small": "base.yaml"}, "methods": ["baseline", "gar"], "seeds": 1}
    (root / "own_suite.yaml").write_text(yaml.safe_dump(suite), encoding="utf-8")
    for name in ("allenai/OLMoE-1B-7B-0924", "my-model"):
        save_moe(root / name)
    texts = some_texts(12)
    mixed = [{"text": text, "domain": kind} for kind, of_kind in texts.items() for text in of_kind]
    write_jsonl(root / "texts.jsonl", mixed)
    first, second = KINDS
    (root / "news.txt").write_text("\n".join(texts[first]), encoding="utf-8")
    write_jsonl(root / "code.jsonl", [{"text": text} for text in texts[second]])
    for name in registry().mixtures["five"]:
        write_registered(root / "data", name)
    (root / "DIR").symlink_to("data")
    return root


def write_registered(folder: Path, name: str) -> None:
    """A registered task in the form that ``data_dir`` has."""
    task = registry().tasks[name]
    columns = [
        column for segment in task.text for column in ([segment] if isinstance(segment, str) else segment)
    ]
    (folder / name).mkdir(parents=True)
    for split, count in (("train", 16), ("validation", 8)):
        rows = [
            {**dict.fromkeys(columns, f"w{n % 9} w{n % 7} w{n % 5}"), "label": n % len(task.labels)}
            for n in range(count)
        ]
        write_jsonl(folder / name / f"{split}.jsonl", rows)
