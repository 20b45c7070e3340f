"""What mkdocs does not do by itself: links that leave docs/, and a reference page for every room.

The pages are written for a reader of the repository, where ``../benchmarks/tables.py`` is a good link. In the
site such a file becomes a page or a copy under ``source/``, so that nothing leads out of the site.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS, COPIES = "docs", "source"
#: Files that become a page with their text; others are copied.
CODE = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".cff": "yaml", "": "text"}
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[ ]*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^()\s#:]+)((?:#[^()\s]*)?)(?=\))")
ROOM = re.compile(r"^## (gar(?:\.\w+)?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
#: The names of an entry of docs/api.md stand before its colon.
ENTRY = re.compile(r"^- (.+?):", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"`(\w+)`")
#: Rooms whose names lie in a module of theirs.
INSIDE = {"gar.integrations": "gar.integrations.transformers"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages of the rooms into the navigation."""
    pages = [{room: f"reference/{room}.md"} for room in rooms()]
    config.nav = [
        {"Reference": ["api.md", *pages]} if item == {"Reference": "api.md"} else item
        for item in config.nav or ()
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the rooms, and whatever outside of docs/ a page links to."""
    for room, names in rooms().items():
        files.append(File.generated(config, f"reference/{room}.md", content=reference(room, names)))
    pages = [file for file in files.documentation_pages() if not file.src_uri.startswith("reference/")]
    waiting = [(origin(file.src_uri), file.content_string) for file in pages]
    waiting += [(f"{page}.md", f"[]({page}.md)") for page in ("CONTRIBUTING", "CHANGELOG")]
    seen = {file.src_uri for file in files}
    while waiting:
        page, text = waiting.pop()
        for target in targets(page, text):
            uri = address(target)
            if uri in seen or not uri.startswith(f"{COPIES}/"):
                continue
            seen.add(uri)
            path = ROOT / target
            if path.suffix == ".md":
                content = path.read_text(encoding="utf-8")
                files.append(File.generated(config, uri, content=content))
                waiting.append((target, content))
            elif path.suffix in CODE:
                text_of = path.read_text(encoding="utf-8").rstrip()
                files.append(
                    File.generated(
                        config, uri, content=f"# {target}\n\n````{CODE[path.suffix]}\n{text_of}\n````\n"
                    )
                )
            else:
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Rewrites links for the site; the names in the list of the API lead to their reference."""
    uri = page.file.src_uri
    if uri.startswith("reference/") or (uri.startswith(f"{COPIES}/") and Path(origin(uri)).suffix != ".md"):
        return markdown
    if uri == "api.md":
        markdown = ROOM.sub(lambda room: linked(room[0], room[1]), markdown)

    def moved(link: re.Match[str]) -> str:
        target = resolve(origin(uri), link[1])
        return f"{relpath(address(target), PurePosixPath(uri).parent)}{link[2]}" if target else link[0]

    return outside_code(markdown, lambda text: LINK.sub(moved, text))


def rooms() -> dict[str, list[str]]:
    """Every section of docs/api.md with its names; a test holds them equal to what the rooms export."""
    text = (ROOT / DOCS / "api.md").read_text(encoding="utf-8")
    return {room: NAME.findall(" ".join(ENTRY.findall(section))) for room, section in ROOM.findall(text)}


def owner(room: str, name: str) -> str | None:
    """The path under which a name is described; None for a room, which is a page, and for the version.

    `gar` repeats names of its rooms: they are described there.
    """
    if room != "gar":
        return place(INSIDE.get(room, room), name)
    if f"gar.{name}" in rooms() or name == "__version__":
        return None
    holders = [other for other, names in rooms().items() if other != "gar" and name in names]
    return place(holders[0] if holders else "gar", name)


def place(room: str, name: str) -> str:
    """The path of a name; that of its definition where a module of the room has the same name."""
    module = f"{room}.{name}"
    path = (ROOT / "src" / module.replace(".", "/")).with_suffix(".py")
    inside = path.is_file() and re.search(rf"^(?:def|class) {name}\b", path.read_text("utf-8"), re.MULTILINE)
    return f"{module}.{name}" if inside else module


def reference(room: str, names: list[str]) -> str:
    """The page of a room: its description and every name, in the order of docs/api.md."""
    parts = [
        f"# {room}\n",
        f"::: {room}\n    options:\n      members: false\n      show_root_heading: false\n"
        "      show_root_toc_entry: false\n",
    ]
    for name in names:
        where = owner(room, name)
        if where and (
            room != "gar" or not any(name in names for other, names in rooms().items() if other != "gar")
        ):
            parts.append(f"::: {where}\n")
    return "\n".join(parts)


def linked(section: str, room: str) -> str:
    """A section of docs/api.md with a link at every name before a colon."""

    def link(name: re.Match[str]) -> str:
        if room == "gar" and f"gar.{name[1]}" in rooms():
            return f"[{name[0]}](reference/gar.{name[1]}.md)"
        where = owner(room, name[1])
        return f"[{name[0]}][{where}]" if where else name[0]

    return ENTRY.sub(lambda entry: NAME.sub(link, entry[0]), section)


def origin(uri: str) -> str:
    """The file in the repository behind a page of the site."""
    if not uri.startswith(f"{COPIES}/"):
        return f"{DOCS}/{uri}"
    path = uri.removeprefix(f"{COPIES}/")
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def address(target: str) -> str:
    """The page or file of the site for a file of the repository."""
    if target.startswith(f"{DOCS}/"):
        return target.removeprefix(f"{DOCS}/")
    made = PurePosixPath(target).suffix in CODE
    return f"{COPIES}/{target}{'.md' if made else ''}"


def resolve(page: str, link: str) -> str | None:
    """The file of the repository that a page's link names; None where there is none, for mkdocs to report."""
    target = normpath(str(PurePosixPath(page).parent / unquote(link)))
    if (ROOT / target).is_dir():
        target = f"{target}/README.md"
    return target if (ROOT / target).is_file() else None


def targets(page: str, text: str) -> set[str]:
    """All files of the repository that a page links to."""
    found: set[str] = set()
    outside_code(
        text,
        lambda part: found.update(filter(None, (resolve(page, m[1]) for m in LINK.finditer(part)))) or part,
    )
    return found


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """``change`` applied to what is no fenced code."""
    parts, last = [], 0
    for block in FENCE.finditer(markdown):
        parts += [change(markdown[last : block.start()]), block[0]]
        last = block.end()
    return "".join([*parts, change(markdown[last:])])
