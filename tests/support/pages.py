"""A page as the tests of the report see it."""

from collections import Counter
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Reader(HTMLParser):
    """Tables as lists of rows, ids, and whether tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.table: list[list[str]] = []
        self.cell: str | None = None

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags[tag] += 1
        self.ids += [values["id"]] if "id" in values else []
        self.links += [v for k, v in attrs if k in ("href", "src", "xlink:href") and v]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.table = self.tables.setdefault(values["id"], [])
        elif tag == "tr":
            self.table.append([])
        elif tag in ("td", "th"):
            self.cell = ""

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag in ("td", "th"):
            self.table[-1].append(self.cell or "")
            self.cell = None

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data


def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader
