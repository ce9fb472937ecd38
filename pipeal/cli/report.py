"""``pipeal report RUN [RUN …]``: one page about what runs did."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pipeal.cli import entry
from pipeal.cli.options import PATH
from pipeal.core.artifacts import REPORT
from pipeal.core.errors import ConfigError, require_usable


@click.command(context_settings={"max_content_width": 110})
@click.argument("folders", type=PATH, metavar="RUN [RUN ...]", nargs=-1, required=True)
@click.option(
    "--out",
    type=PATH,
    help="The HTML file; default: report.html, in the run's folder or, of several runs, in this folder.",
)
def command(folders: tuple[str, ...], out: str | None) -> None:
    """Writes one HTML page about runs.

    RUN is a folder that a training left, such as runs/agnews-transformer-al-001. The page needs no network: it holds
    configuration, curves, the timeline of the stages and why they were idle, padding, throughput and, of several runs
    or of one that compares methods, a table of them side by side.
    """
    with entry.loading():
        from pipeal.reporting.page import Run, read_runs, require_no_part, write_report

    runs: dict[Path, Run] = {}
    for folder in folders:
        runs.update((run.folder, run) for run in read_runs(_path(folder)))
    path = _path(out) if out is not None else _default(folders)
    if path.name in ("", "..") or os.path.isdir(path):
        raise ConfigError(f"--out: {path} is a folder; name a file, such as {path / 'report.html'}")
    require_no_part(path, [REPORT])
    write_report(list(runs.values()), path)
    for run in runs.values():
        for line in run.missing:
            click.echo(f"pipeal: {run.name}: {' '.join(line.split())}", err=True)
    click.echo(path)


def _path(text: str) -> Path:
    require_usable(text, text, "; name another", ConfigError)
    return Path(text)


def _default(folders: tuple[str, ...]) -> Path:
    return REPORT.at(Path(folders[0] if len(folders) == 1 else ""))
