"""The public API: what the package exports, and the page that lists it."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gar

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
#: Rooms with a public part; importing them by their name is what `gar` itself does on first use.
ROOMS = [
    name
    for name in (info.name for info in pkgutil.iter_modules(gar.__path__))
    if hasattr(importlib.import_module(f"gar.{name}"), "__all__")
]


def listed() -> dict[str, list[str]]:
    """Section: the names of its list entries, before the colon."""
    if not PAGE.is_file():
        pytest.skip("not a source checkout")
    sections = re.split(r"^## gar(?:\.(\w+))?\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    entries = {
        room or "": re.findall(r"^- (.+?):", text, re.MULTILINE | re.DOTALL)
        for room, text in zip(sections[::2], sections[1::2], strict=True)
    }
    return {room: re.findall(r"`(\w+)`", " ".join(found)) for room, found in entries.items()}


def test_the_page_has_every_room() -> None:
    assert sorted(listed()) == sorted(["", *ROOMS])


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_the_page_lists_what_a_room_exports(room: str) -> None:
    module = importlib.import_module(f"gar.{room}") if room else gar
    assert sorted(listed().get(room, [])) == sorted(module.__all__)


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_every_exported_name_exists(room: str) -> None:
    module = importlib.import_module(f"gar.{room}") if room else gar
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert len(set(module.__all__)) == len(module.__all__)


def test_the_package_exports_every_room() -> None:
    assert set(ROOMS) - {"cli"} == set(gar._ROOMS)


def test_what_type_checkers_see_is_what_is_resolved() -> None:
    """The imports under TYPE_CHECKING, the table behind ``__getattr__`` and ``__all__`` are one list."""
    tree = ast.parse(Path(gar.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: f"{statement.module}.{alias.name}".removeprefix("gar.")
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == gar._EXPORTS | {room: room for room in gar._ROOMS}
    assert set(gar.__all__) == {*seen, "__version__"}


def test_the_names_are_resolved_on_first_use() -> None:
    code = (
        "import sys, gar\n"
        "assert 'torch' not in sys.modules\n"
        "gar.alignment_loss, gar.Routing, gar.UserError, gar.metrics\n"
        "assert 'transformers' not in sys.modules\n"
        "gar.MultiTaskModel, gar.results\n"
        "assert set(gar.__all__) <= set(dir(gar))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        gar.trian  # noqa: B018
