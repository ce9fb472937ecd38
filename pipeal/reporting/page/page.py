"""One page about runs: a single file that needs nothing else, neither scripts nor a network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from pipeal.core.atomic import write_whole
from pipeal.reporting.page.comparison import comparison
from pipeal.reporting.page.folder import Run, are_forms
from pipeal.reporting.page.markup import Html, tag
from pipeal.reporting.page.pictures import Album
from pipeal.reporting.page.sections import badge, run_section

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""A browser then refuses to fetch or run anything, whatever a run's files say."""

_MOST_BYTES = 1_950_000
"""What a page with pictures may come to: it can then be sent by mail."""


def write_report(runs: Sequence[Run], path: str | Path) -> None:
    """Writes the page; a reader sees the old one or the new one, never a part.

    Args:
        runs: One or several.
        path: The HTML file.

    Raises:
        DataError: The system refused to write.
    """
    write_whole(path, page(runs))


def page(runs: Sequence[Run]) -> str:
    """The page about runs, as HTML."""
    names = _names(runs)
    anchors = [f"run-{place}" for place in range(1, len(runs) + 1)]
    title = _title(runs)
    album = Album()
    made = f"made {datetime.now().astimezone():%Y-%m-%d %H:%M}"
    heading = [tag("h1", title)] if len(runs) > 1 else []  # a single run is its own
    parts = [tag("header", tag("p", f"pipeal report · {made}", class_="note"), *heading)]
    if len(runs) > 1:
        links = (
            tag("li", tag("a", name, href=f"#{anchor}"), " ", badge(run))
            for run, name, anchor in zip(runs, names, anchors, strict=True)
        )
        parts += [tag("nav", tag("ul", *links)), comparison(runs, names)]
    parts += [run_section(*each, album) for each in zip(runs, names, anchors, strict=True)]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name_="viewport", content="width=device-width"),
        tag("title", f"{title} · pipeal report"),
        tag("style", Html(files("pipeal.reporting.page").joinpath("style.css").read_text(encoding="utf-8"))),
    )
    html = f"<!doctype html>\n{tag('html', head, tag('body', tag('main', *parts)), lang='en')}\n"
    return album.fill(html, _MOST_BYTES)


def _title(runs: Sequence[Run]) -> str:
    """The run's name, or that of the comparison whose forms they are, or how many they are."""
    if len(runs) == 1:
        return runs[0].name
    return runs[0].folder.parent.name if are_forms(runs) else f"{len(runs)} runs"


def _names(runs: Sequence[Run]) -> list[str]:
    """What the page calls each run: forms by their labels; if two are the same, their folders."""
    if are_forms(runs):
        forms = [run.form for run in runs]
        if len(set(forms)) == len(forms):
            return forms
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    shared = os.path.commonpath([run.folder for run in runs])
    return [os.path.relpath(run.folder, shared) for run in runs]
