"""A hook of mkdocs: ends the build unless the site has the whole reference and asks no other host for anything."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

from docs_reference import anchors

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}
"""What a browser fetches with a page: the attribute of each element that says what."""
_HOST = re.compile(r"(?:https?:)?//")
_OF_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


class Page(HTMLParser):
    """What a page has and asks for.

    Attributes:
        anchors: The places in it that links may lead to.
        foreign: What it asks other hosts for.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.foreign = _OF_STYLE.findall(text)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Looks at one element."""
        found = {name: value or "" for name, value in attrs}
        self.anchors.add(found.get("id", ""))
        asked = found.get(LOADED.get(tag, ""), "")
        if _HOST.match(asked) and found.get("rel") != "canonical":
            self.foreign.append(asked)
        if "mermaid" in found.get("class", "").split():  # the theme fetches what draws it
            self.foreign.append("mermaid")


def on_post_build(config: MkDocsConfig) -> None:
    """Looks at all that was built.

    Raises:
        PluginError: The reference lacks something, or something comes from another host.
    """
    from mkdocs.exceptions import PluginError

    site = Path(config.site_dir)
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    missing = set(anchors()).difference(*(page.anchors for page in pages.values()))
    if missing:
        raise PluginError(f"the reference lacks {', '.join(sorted(missing))}")
    styles = [(path, _OF_STYLE.findall(path.read_text(encoding="utf-8"))) for path in site.rglob("*.css")]
    foreign = [(path, page.foreign) for path, page in pages.items()] + styles
    told = [f"{path.relative_to(site)}: {', '.join(asked)}" for path, asked in foreign if asked]
    if told:
        raise PluginError(f"pages ask other hosts for something: {'; '.join(told)}")
