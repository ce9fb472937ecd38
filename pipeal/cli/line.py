"""``pipeal line``: a pipeline of stages that are started, ended and taken up again each on its own."""

from __future__ import annotations

from typing import Any

import click

from pipeal.cli import entry
from pipeal.cli.options import OVERRIDES, PATH, model_options, setting

_SETTINGS = {"max_content_width": 110, "show_default": True}


@click.group(context_settings=_SETTINGS)
def command() -> None:
    """Trains over machines that may come and go.

    Every stage is a process of its own: it saves on its own, and when it ends, by whatever cause, only it begins again,
    from its own last snapshot. The others wait, and no batch is done twice but by the stage that was away.
    """


@command.command(context_settings=_SETTINGS)
@model_options
@click.option(
    "--stage",
    "addresses",
    multiple=True,
    required=True,
    metavar="HOST:PORT",
    help="Where a stage listens for the one before it; once for each stage but the first, which listens to none.",
)
@setting("train.mode", "--method", "--mode", metavar="NAME", help="A method of layers that learn side by side: al, …")
@setting("train.epochs", "--epochs", type=int, help="Passes over the training data.")
@setting("data.root", "--data-root", help="Folder that holds the data sets, on the first stage's machine.")
@click.option("--config", "config_file", type=PATH, help="YAML file.  [default: the one for this data set and model]")
@OVERRIDES
@click.option(
    "--resume",
    type=PATH,
    metavar="RUN",
    help="Go on with a run, of a line or not, from the end of its last epoch; or with the checkpoint of that name. "
    "Its folder lies on the first stage's machine.",
)
@click.option("--out", type=PATH, default="line", help="Folder for line.yaml and the keys.")
def init(**given: Any) -> None:
    """Makes the file and the keys of a line.

    Every stage's machine gets line.yaml and its own key, such as stage-1.key, which nobody else needs.
    """
    with entry.loading():
        from pipeal.line.commands import init as make

    make(**given)


@command.command(context_settings=_SETTINGS)
@click.argument("file", type=PATH, metavar="LINE.YAML")
@click.option("--stage", type=click.IntRange(min=0), required=True, help="Which one this is, from 0.")
@click.option("--key", type=PATH, metavar="FILE", help="Its secret key.  [default: stage-K.key beside LINE.YAML]")
@click.option("--folder", type=PATH, help="For its snapshots and its status.  [default: stage-K beside LINE.YAML]")
@click.option(
    "--run", "run_folder", type=PATH, help="On the last stage, the run's folder.  [default: run beside LINE.YAML]"
)
@click.option("--again", is_flag=True, help="After an error that stopped the line, once its cause is mended.")
def run(**given: Any) -> None:
    """Runs one stage, from where its last snapshot stands to the end of the training.

    Stages are started in any order. What starts them again when they end is up to you: systemd, a batch system, a loop
    in a shell. The exit code is 0 at the end of the training alone.
    """
    with entry.loading():
        from pipeal.line.commands import run as run_it

    run_it(**given)


@command.command(context_settings=_SETTINGS)
@click.argument("folder", type=PATH)
def status(folder: str) -> None:
    """Shows how the line stands, as the stage with that FOLDER knows it: itself and all stages before it."""
    from pipeal.line.commands import status as show

    show(folder)
