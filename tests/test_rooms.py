"""The rooms of the package: imports run one way, in no circle, and never into a private part."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import gar

PACKAGE = Path(gar.__file__).parent
#: A room imports only from rooms before it. The package's own ``__init__`` hands names out.
ROOMS = (
    "version", "errors", "seeds", "precision", "objective", "routing", "theory", "distributed", "metrics",
    "nn", "observation", "methods", "plugins", "config", "runs", "data", "model", "features", "evaluation",
    "training", "presets", "inspection", "sweeps", "benchmark", "report", "comparison", "integrations", "cli",
    "__main__",
)  # fmt: skip


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name without ``gar.``."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str) -> Iterator[tuple[str, str]]:
    """``(module, name)`` of every import from the package, inside functions too."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            if node.module == "gar" or (node.module or "").startswith("gar."):
                for alias in node.names:
                    module = f"{node.module}.{alias.name}".removeprefix("gar.")
                    if module in MODULES:
                        yield module, ""
                    else:
                        yield str(node.module).removeprefix("gar").removeprefix("."), alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "gar" or alias.name.startswith("gar."):
                    yield alias.name.removeprefix("gar").removeprefix("."), ""


def room(module: str) -> str:
    return module.split(".")[0]


def test_every_room_is_listed() -> None:
    assert {room(name) for name in MODULES if name} == set(ROOMS)


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name))
def test_imports_run_down(name: str) -> None:
    for module, imported in imports(name):
        assert module, f"{name} imports {imported or 'gar'} from the package itself; expected its module"
        assert ROOMS.index(room(module)) <= ROOMS.index(room(name)), (
            f"{name} imports {module}, which is below it"
        )


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name))
def test_private_parts_stay_private(name: str) -> None:
    for module, imported in imports(name):
        if room(module) != room(name):
            private = [
                part
                for part in (*module.split("."), imported)
                if part.startswith("_") and part != "__version__"
            ]
            assert not private, f"{name} imports {module} {imported}"


def test_no_circles() -> None:
    graph = {
        name: {m for m, _ in imports(name) if m != name and not (m and name.startswith(f"{m}."))}
        for name in MODULES
        if name
    }
    for name, needed in graph.items():
        # A package's own ``__init__`` gathers its modules; to import it from inside would be a circle.
        assert room(name) not in needed or "." not in name, f"{name} imports its own room's __init__"
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")
