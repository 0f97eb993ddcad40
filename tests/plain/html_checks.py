"""What a page says, and that it is whole and loads nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_EMPTY = ("meta", "link", "br", "hr")


class Page(HTMLParser):
    """Its tags, what they would load, and the cells of its tables, by the heading before them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.loads: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.heading = ""
        self.text = ""  # all that is shown
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in (*_EMPTY, "polyline", "polygon", "rect"):
            self.open.append(tag)
        if tag == "h2":
            self.heading = ""
        elif tag == "tr":
            self.tables.setdefault(self.heading, []).append([])
        elif tag in ("td", "th"):
            self.tables[self.heading][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] == "h2":
            self.heading += data
        elif self.open and self.open[-1] in ("td", "th"):
            self.tables[self.heading][-1][-1] += data


def check_page(text: str) -> Page:
    """Every tag is closed in its turn, and nothing comes from elsewhere."""
    found = Page(text)
    assert found.open == []
    assert {"table", "svg", "polygon", "polyline", "script", "style", "select", "dl"} <= found.seen
    assert found.loads == ["data:,"]
    assert found.ids == ["founds"]
    assert not re.search(r"http|url\(|@import|\bsrc=", text)
    return found
