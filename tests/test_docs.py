"""Names, paths and links in the documents lead somewhere; tests/test_snippets.py runs what they show."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

from gar import config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


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
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_say_in_words_where_they_lead(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"\[[^\]]*\.md`?\]\(", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for dotted in re.findall(r"\bgar(?:\.[A-Za-z_]\w*)+", text):
        assert pkgutil.resolve_name(dotted) is not None, dotted
    for path in re.findall(r"\b(?:src|benchmarks|tests|docs)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
