"""One page about runs: a single file that needs nothing else, neither scripts nor a network.

What it says comes from the modules beside this one, how it is laid out from the templates.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pipeal.core.artifacts import BATCHES, EXITS_PICTURE, TIMELINE, TRACE
from pipeal.core.atomic import write_whole
from pipeal.reporting.exits import EXIT_COLUMNS
from pipeal.reporting.page import facts
from pipeal.reporting.page.comparison import compared_figures
from pipeal.reporting.page.folder import Run, are_forms
from pipeal.reporting.page.idle import stage_shares, stage_table
from pipeal.reporting.page.settings import against_default, differences
from pipeal.reporting.page.shown import alignments, percent, shown
from pipeal.reporting.plots import Panel, loss_panels, measure_panels

if TYPE_CHECKING:
    from jinja2 import Environment

_MOST_BYTES = 1_950_000
"""What a page with pictures may come to, to be sent by mail: pictures are left out beyond it, text is not cut."""


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
    from pipeal.reporting.page.pictures import Album  # with Pillow, which only a page needs

    album = Album()
    html = (
        environment()
        .get_template("page.html")
        .render(
            title=_title(runs),
            made=f"{datetime.now().astimezone():%Y-%m-%d %H:%M}",
            runs=dict(zip(_names(runs), runs, strict=True)),
            picture=album.picture,
        )
    )
    return album.fill(html, _MOST_BYTES)


@cache
def environment() -> Environment:
    """The templates, in which every value is escaped unless a template made it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("pipeal.reporting.page"),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    found.filters.update(alignments=alignments, percent=percent)
    found.globals.update({call.__name__: call for call in _CALLED}, exit_columns=EXIT_COLUMNS)
    found.globals.update(TIMELINE=TIMELINE, TRACE=TRACE, BATCHES=BATCHES, EXITS_PICTURE=EXITS_PICTURE)
    return found


def run_curves(run: Run) -> list[Panel]:
    """The charts of one run; those of a second loss of each layer only where there are some."""
    first, *others = loss_panels({"": run.rows}, run.loss_titles)
    return [*measure_panels({"": run.rows}, run.measure), first, *(panel for panel in others if panel.lines)]


def compared_curves(runs: Mapping[str, Run]) -> list[Panel]:
    """Accuracy, or loss, of several runs in one chart over epochs, and in one over time."""
    return [
        panel
        for measure in dict.fromkeys(run.measure for run in runs.values())
        for panel in measure_panels({name: run.rows for name, run in runs.items() if run.measure is measure}, measure)
    ]


_CALLED = (
    *(facts.headline, facts.figures, facts.batch_facts, facts.exit_rows, facts.memory_facts, facts.circumstances),
    *(facts.whole_at, run_curves, stage_shares, stage_table, against_default),
    *(compared_curves, compared_figures, differences),
)
"""What templates call, by name."""


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
