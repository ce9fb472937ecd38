"""``pipeal runs [FOLDER]``: what was trained here, and how each run stands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeal.cli import entry
from pipeal.cli.options import PATH
from pipeal.core.errors import DataError

if TYPE_CHECKING:
    from pipeal.reporting.page import Run
    from pipeal.training.metric import MeanSd


@click.command(context_settings={"max_content_width": 110})
@click.argument("folder", type=PATH, default="runs")
def command(folder: str) -> None:
    """Lists the runs in FOLDER (default: runs), the latest last.

    A run is running, finished, interrupted, failed, or died, when its process is gone without a word; unknown if it
    left no status. Each can be given to `pipeal report`. "test at best held-out" is the test figure of the epoch that
    was best on held-out samples.
    """
    with entry.loading():
        from pipeal.reporting.page import read_runs, runs_in
        from pipeal.reporting.tables import print_table

    runs: list[Run] = []
    for child in runs_in(Path(folder)):
        try:
            runs += read_runs(child)
        except DataError as error:  # another user's, perhaps: the others are listed
            click.echo(f"pipeal: {error}", err=True)
    found = sorted(runs, key=lambda run: run.when)  # of the same time as they were read: forms as in their tables
    if not found:
        click.echo(f"no runs in {folder}")
        return
    columns = ["run", "status", "data set", "model", "form", "epochs"]
    columns += ["test at best held-out", "last test", "when", "MiB"]
    print_table(f"{len(found)} run{'s' * (len(found) != 1)} in {folder}", columns, [_row(run) for run in found])
    told = [run for run in found if run.status.message and run.status.state in ("failed", "interrupted", "died")]
    # The forms of a comparison have one status.
    for name, message in dict.fromkeys((run.name.partition("/")[0], run.status.message) for run in told):
        click.echo(f"{name}: {' '.join(message.split())}")


def _told(run: Run, found: MeanSd | None) -> str | None:
    if found is None:
        return None
    return str(found) if run.measure.is_share else f"loss {found}"


def _row(run: Run) -> list[str | float | int | None]:
    done, asked = run.epochs
    return [
        run.name,
        run.status.state,
        run.dataset,
        run.model,
        run.form,
        f"{done}/{asked}" if asked else f"{done}",
        _told(run, run.at_best),
        _told(run, run.last),
        f"{run.when:%Y-%m-%d %H:%M}",
        run.size_bytes / 2**20,
    ]
