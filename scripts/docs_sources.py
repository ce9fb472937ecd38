"""A hook of mkdocs: links of a page to files outside ``docs/`` lead somewhere in the site, too.

Files go into the site's folder ``source``. Of a link to a folder the text stays.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"!?\[([^\]]*)\]\(((?:\.\./)+)([^)#\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files that pages link to."""
    from mkdocs.structure.files import File

    linked = set()
    for page in files.documentation_pages():
        found = LINK.finditer(page.content_string)
        linked |= {match[3] for match in found if _leaves_docs(match, page.src_uri)}
    for path in sorted(linked):
        if (ROOT / path).is_file():
            files.append(File.generated(config, _in_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lets links lead to the copies of :func:`on_files`."""
    return linked_in_the_site(markdown, page.file.src_uri)


def linked_in_the_site(markdown: str, page: str) -> str:
    """A page whose links to files outside ``docs/`` lead to copies; ``page`` is its path in ``docs/``."""

    def led(match: re.Match[str]) -> str:
        if not _leaves_docs(match, page):
            return match[0]
        text, up, path = match.groups()
        in_site = up.removeprefix("../") + _in_site(path)
        return match[0].replace(up + path, in_site) if (ROOT / path).is_file() else text

    return LINK.sub(led, markdown)


def _leaves_docs(link: re.Match[str], page: str) -> bool:
    return link[2].count("../") > page.count("/")


def _in_site(path: str) -> str:
    """A page in Markdown that is no page of the site is plain text there."""
    return f"source/{path}.txt" if path.endswith((".md", ".service")) else f"source/{path}"
