"""What the documents say is run: Python blocks, YAML blocks and the commands' names."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest
import yaml

from gar import config
from gar.cli.app import VERBS
from gar.methods import REGISTRY

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


#: Snippets of the library page stand alone; those of a page that goes on from one to the next are one.
LIBRARY = [
    *blocks(ROOT / "docs" / "library.md", "python"),
    "\n".join(blocks(ROOT / "docs" / "native_moe.md", "python")),
    *blocks(ROOT / "docs" / "ranks.md", "python"),
    *blocks(ROOT / "docs" / "theory.md", "python"),
    *blocks(ROOT / "docs" / "trainer.md", "python"),
]


@pytest.mark.parametrize("number", [n for n, text in enumerate(LIBRARY) if "data_dir=" not in text])
def test_library_snippets_run(number: int) -> None:
    if "from trl" in LIBRARY[number]:
        pytest.importorskip("trl")
        pytest.importorskip("peft")
    before = dict(REGISTRY)
    try:
        exec(compile(LIBRARY[number], f"library block {number}", "exec"), {})
    finally:
        REGISTRY.clear()
        REGISTRY.update(before)


def test_the_readme_configuration_is_valid(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "README.md", "yaml")
    path = tmp_path / "own.yaml"
    path.write_text(text, encoding="utf-8")
    built = config.load(path)
    mood, same = built.mixture.tasks
    assert not isinstance(mood, str)
    assert mood.train == str(tmp_path / "mood_train.csv")
    assert not isinstance(same, str)
    assert same.text == ("first", "second")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for verb in re.findall(r"^\s*gar ([a-z]+)", "\n".join(blocks(page, "bash")), re.MULTILINE):
        assert verb in VERBS
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for dotted in re.findall(r"\bgar(?:\.[A-Za-z_]\w*)+", text):
        assert pkgutil.resolve_name(dotted) is not None, dotted
    for path in re.findall(r"\b(?:src|benchmarks|tests|docs)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_blocks_parse(page: Path) -> None:
    for text in blocks(page, "yaml"):
        yaml.safe_load(text)
