"""One page about runs: a single file that needs nothing else, neither scripts nor a network.

What it says comes from the modules beside this one, how it is laid out from the templates.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeal.core.artifacts import BATCHES, EXITS_PICTURE, ROWS, TIMELINE, TRACE
from pipeal.core.atomic import write_whole
from pipeal.core.by_size import even_sample
from pipeal.reporting.exits import EXIT_COLUMNS
from pipeal.reporting.page import facts
from pipeal.reporting.page.folder import are_forms
from pipeal.reporting.page.idle import stage_shares, stage_table
from pipeal.reporting.page.run import Run
from pipeal.reporting.page.settings import against_default, differences
from pipeal.reporting.page.shown import alignments, percent, shown
from pipeal.reporting.plots import Panel, drawn_rows, loss_panels, measure_panels

if TYPE_CHECKING:
    from jinja2 import Environment

_MOST_BYTES = 1_950_000
"""What a page may come to, to be sent by mail: beyond it, pictures are left out first, then charts, then whole runs."""

_MOST_RUNS = 100
"""Runs that one page tells of."""

_MOST_ROWS = 200
"""Rows of a table and epochs of a chart, of which more could not be told apart."""


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
    from pipeal.reporting.page.room import Room  # with Pillow, which only a page needs

    room = Room(_MOST_BYTES)
    made = (
        environment()
        .get_template("page.html")
        .render(
            title=_title(runs),
            made=f"{datetime.now().astimezone():%Y-%m-%d %H:%M}",
            runs=dict(list(zip(_names(runs), runs, strict=True))[:_MOST_RUNS]),
            more=len(runs) - _MOST_RUNS,
            room=room,
        )
    )
    return room.fill(made)


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
    found.filters.update(alignments=alignments, percent=percent, sample=partial(even_sample, most=_MOST_ROWS))
    found.globals.update({call.__name__: call for call in _CALLED}, exit_columns=EXIT_COLUMNS)
    found.globals.update(TIMELINE=TIMELINE, TRACE=TRACE, BATCHES=BATCHES, EXITS_PICTURE=EXITS_PICTURE, ROWS=ROWS)
    found.globals.update(most_rows=_MOST_ROWS)
    return found


def run_curves(run: Run) -> list[Panel]:
    """The charts of one run."""
    rows = drawn_rows(run.rows, _MOST_ROWS)
    return [*measure_panels({"": rows}, run.measure), *loss_panels(rows, run.loss_titles)]


def compared_curves(runs: Mapping[str, Run]) -> list[Panel]:
    """Accuracy, or loss, of several runs in one chart over epochs, and in one over time."""
    epochs = max(20, _MOST_ROWS // len(runs))
    return [
        panel
        for measure in dict.fromkeys(run.measure for run in runs.values())
        for panel in measure_panels(
            {name: drawn_rows(run.rows, epochs) for name, run in runs.items() if run.measure is measure}, measure
        )
    ]


_CALLED = (
    *(facts.headline, facts.named_figures, facts.batch_facts, facts.exit_rows, facts.memory_facts, facts.whole_at),
    *(facts.weights_of_exits, facts.circumstances, run_curves, stage_shares, stage_table, against_default),
    *(facts.compared_figures, compared_curves, differences),
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
