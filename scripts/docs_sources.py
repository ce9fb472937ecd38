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

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"!?\[([^\]]*)\]\(\.\./([^)#\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files that pages link to."""
    from mkdocs.structure.files import File

    pages = Path(config.docs_dir).glob("*.md")
    linked = {match[2] for page in pages for match in LINK.finditer(page.read_text(encoding="utf-8"))}
    for path in sorted(linked):
        if (ROOT / path).is_file():
            files.append(File.generated(config, _in_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lets links lead to the copies of :func:`on_files`."""

    def led(match: re.Match[str]) -> str:
        text, path = match[1], match[2]
        return match[0].replace(f"../{path}", _in_site(path)) if (ROOT / path).is_file() else text

    return LINK.sub(led, markdown)


def _in_site(path: str) -> str:
    """A page in Markdown that is no page of the site is plain text there."""
    return f"source/{path}.txt" if path.endswith((".md", ".service")) else f"source/{path}"
