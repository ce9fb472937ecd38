"""A hook of mkdocs: what the HTML of a page lacks or has too much, and a file that pages look for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

SHORT = 18
"""Characters of a name in a table that is never broken."""
_CELL = re.compile(r"<td.*?</td>", flags=re.DOTALL)
_OPTION = re.compile(r"<code>(?=--?[a-z][\w-]*(?: [A-Z]+)?</code>)")
_FIGURE = re.compile(r"\d (?:± [\d.]+|[%×](?=[\s<]))")
_NAME = re.compile(rf"(?<=<code>)[^<]{{{SHORT},}}(?=</code>)")


def on_page_content(html: str, **_: Any) -> str:
    """Lets long names in tables break after dots, options nowhere; takes blanks of mkdocstrings before ``)`` away."""
    html = _CELL.sub(_cell, html)
    return re.sub(r"</code>\s+\)", "</code>)", _OPTION.sub('<code class="option">', html))


def on_post_build(config: MkDocsConfig) -> None:
    """Writes an empty index: pages opened from the folder, which have no search, ask for it and tell an error else."""
    empty = 'var __index = {config: {lang: ["en"], separator: " ", pipeline: []}, docs: []}\n'
    (Path(config.site_dir) / "search" / "search_index.js").write_text(empty, encoding="utf-8")


def _cell(cell: re.Match[str]) -> str:
    names = _NAME.sub(_breaking, cell[0])
    return _FIGURE.sub(lambda figure: figure[0].replace(" ", "&nbsp;"), names)


def _breaking(name: re.Match[str]) -> str:
    return re.sub(r"(?<=\w)([._/=])(?=\w{3})", r"\1<wbr>", name[0])
