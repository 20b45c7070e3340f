"""Modules of the user's own that bring methods or metrics.

A configuration names them (``plugins: [my_methods]``: a file beside it, any .py file, or an installed
module), and an installed package may announce itself under the entry-point group ``gar.plugins``. Importing
one is all that happens: it registers what it has (``gar.methods.register``, ``gar.metrics.register``).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from gar.errors import UserError, user_path

GROUP = "gar.plugins"


def load_plugins(names: Iterable[str], where: str = "configuration") -> list[ModuleType]:
    """Import the named modules and those of installed packages, each once.

    A name that ends in ``.py``, or that is a file or package of the working directory, is taken from there.
    """
    _load_installed()
    return [_load(name, where) for name in names]


def anchored_plugin(name: object, base: Path) -> object:
    """A plugin of a file's own directory as its path; other names stay as they are."""
    if not isinstance(name, str):
        return name
    found = plugin_file(name, base)
    return name if found is None else str(found)


def plugin_file(name: str, base: Path) -> Path | None:
    """The file behind a plugin's name below ``base``, or None where it is an installed module."""
    if name.endswith(".py"):
        return base / user_path(name)
    beside = (base / f"{name}.py", base / name / "__init__.py")
    return next((path for path in beside if path.is_file()), None)


def plugin_sources(names: Iterable[str]) -> dict[str, str]:
    """The text of every named plugin that is one file here, for a machine that may not have it."""
    sources = {}
    for name in names:
        file = plugin_file(name, Path.cwd())
        if file is None and "." not in name and (spec := importlib.util.find_spec(name)) and spec.origin:
            file = None if spec.submodule_search_locations else Path(spec.origin)
        if file is not None and file.suffix == ".py":
            sources[name] = file.read_text(encoding="utf-8")
    return sources


def preload(name: str, source: str) -> None:
    """Import a plugin from its text as if its file were here, so that :func:`load_plugins` finds it."""
    module = ModuleType(_module_name(Path.cwd() / user_path(name)) if name.endswith(".py") else name)
    if module.__name__ not in sys.modules:
        sys.modules[module.__name__] = module
        try:
            exec(compile(source, name, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[module.__name__]
            raise


def _load(name: str, where: str) -> ModuleType:
    file = plugin_file(name, Path.cwd())
    try:
        return importlib.import_module(name) if file is None else _from_file(file)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        if file is None and error.name == name.split(".")[0]:
            raise UserError(
                f"{where}: plugins names {name!r}, which is neither an installed module nor a file "
                f"({name}.py) beside the configuration or in {Path.cwd()}; "
                "expected a module or the path of a .py file"
            ) from None
        raise UserError(f"{where}: plugin {name} cannot be imported ({error})") from error
    except FileNotFoundError as error:
        raise UserError(f"{where}: plugins names {name}: no such file") from error
    except Exception as error:
        raise UserError(
            f"{where}: plugin {name} cannot be imported ({type(error).__name__}: {error})"
        ) from error


def _from_file(path: Path) -> ModuleType:
    """A module from a file, once; two files of one name stay apart."""
    path, name = path.resolve(), _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module_name(path: Path) -> str:
    path = path.resolve()
    stem = path.parent.name if path.name == "__init__.py" else path.stem
    return f"gar_plugin_{stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"


@functools.cache
def _load_installed() -> None:
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            raise UserError(
                f"the installed plugin {entry.name!r} ({entry.value}) cannot be imported "
                f"({type(error).__name__}: {error}); expected it to work or not to be installed"
            ) from error
