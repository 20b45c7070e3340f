"""Modules of the user's own: named in a configuration or installed, they bring methods."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from gar import plugins
from gar.cli.app import run as gar_command
from gar.config import build, load
from gar.errors import UserError
from gar.methods import REGISTRY

METHOD = """
from typing import ClassVar
from pydantic import Field
import gar.methods
from gar.methods.base import Method

@gar.methods.register
class {cls}(Method):
    \"\"\"The task loss, by another name.\"\"\"
    name: ClassVar[str] = "{name}"
    strength: float = Field(0.5, ge=0)
"""


@pytest.fixture(autouse=True)
def _registry_as_before(tmp_path: Path) -> Iterator[None]:
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def write(path: Path, name: str = "mine") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(METHOD.format(cls=name.title(), name=name), encoding="utf-8")
    return path


def test_a_module_beside_the_file(tmp_path: Path) -> None:
    write(tmp_path / "my_methods.py")
    (tmp_path / "own.yaml").write_text("plugins: [my_methods]\nmethod: {name: mine, strength: 2}\n")
    config = load(tmp_path / "own.yaml")
    assert (config.method.name, config.method.to_config()["strength"]) == ("mine", 2.0)
    assert config.plugins == (str(tmp_path / "my_methods.py"),)
    again = build(config.to_dict())  # as a worker or a resumed run does
    assert again == config


def test_a_module_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "here.py", "here")
    monkeypatch.chdir(tmp_path)
    assert build({}).override(["plugins=[here]", "method.name=here"]).method.name == "here"


def test_a_package_and_two_files_of_one_name(tmp_path: Path) -> None:
    write(tmp_path / "a" / "methods.py", "first")
    write(tmp_path / "b" / "methods.py", "second")
    write(tmp_path / "pack" / "__init__.py", "third")
    names = [str(tmp_path / "a" / "methods.py"), str(tmp_path / "b" / "methods.py")]
    build({"plugins": [*names, str(tmp_path / "pack" / "__init__.py")]})
    assert {"first", "second", "third"} <= set(REGISTRY)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no_such_module.py) beside"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import not_installed_anywhere", "No module named 'not_installed_anywhere'"),
        ("def", "SyntaxError"),
    ],
)
def test_what_cannot_be_imported_is_one_line(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "no_such_module.py").write_text(content)
    (tmp_path / "own.yaml").write_text("plugins: no_such_module\n")
    with pytest.raises(UserError, match=r"own\.yaml: plugin") as found:
        load(tmp_path / "own.yaml")
    assert said in str(found.value)
    assert "\n" not in str(found.value)


def test_the_command_line_ends_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gar_command(["train", "five", f"plugins=[{tmp_path / 'absent.py'}]"]) == 2
    assert "absent.py: no such file" in capsys.readouterr().err


def test_an_installed_package_announces_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "announced_methods.py", "announced")
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("announced", "announced_methods", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == plugins.GROUP else [])
    plugins._load_installed.cache_clear()
    try:
        assert build({"method": "announced"}).method.name == "announced"
    finally:
        plugins._load_installed.cache_clear()
