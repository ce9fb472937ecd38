"""The options that training commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, get_args

import click

from pipeal.core.methods import COMPARE, COMPARED, DEFAULT, MODES
from pipeal.core.names import ScheduleName

Command = TypeVar("Command", bound=Callable[..., Any])

SCHEDULES = get_args(ScheduleName)

_TOGETHER = " and ".join(method.name for method in COMPARED)
_MODES = f"{DEFAULT.name} (default), {', '.join(MODES[1:-1])}, or {COMPARE}, which trains {_TOGETHER}."


def training_options(*own: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Adds the options that every training command has, and among them a command's own, to a click command."""
    options: list[Callable[[Command], Command]] = [
        click.option(
            "--mode",
            shell_complete=offered(MODES),
            help=_MODES,
        ),
        click.option(
            "--schedule",
            shell_complete=offered(SCHEDULES),
            help=f"Of layers that learn side by side: {', '.join(SCHEDULES)} (default).",
        ),
        click.option(
            "--devices",
            help="One device per stage: cpu,cpu or cpu*4 or cuda:0,cuda:1; or auto (default), which tries some.",
        ),
        click.option(
            "--replicas",
            type=int,
            help="Under torchrun, whose processes are stages × replicas: how many share each batch; default: 1.",
        ),
        click.option("--epochs", type=int, help="Passes over the training data; default: the experiment's."),
        click.option("-r", "--repeat", type=int, help="Whole trainings, each with the next seed; default: 1."),
        *own,
        click.option("--seed", type=int, help="Seed of the first training; default: 0."),
        click.option(
            "--tune",
            multiple=True,
            metavar="KEY=V1,V2,…",
            help="Try these values first, on each form alike, and go on with what is best on held-out samples; "
            "repeatable: every combination.",
        ),
        click.option("--tune-epochs", type=int, help="Epochs of each trial; default: as many as the run has."),
        click.option("--data-root", help="Folder that holds the data sets; default: data."),
        click.option("--out", help="Folder in which each run gets a folder of its own; default: runs."),
        click.option(
            "--resume",
            metavar="auto|never|RUN",
            default="auto",
            help="auto (default) goes on with an unfinished run of the same command; or the folder of a run or "
            "of one of its checkpoints (RUN/checkpoints/step-000000100); or never.",
        ),
        click.option(
            "--retry",
            is_flag=True,
            help="In a new run, tries again what devices, sizes and threads are fastest; else known for a week.",
        ),
        click.option("--config", "config_file", help="YAML file; default: the one for this data set and model."),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Any configuration key, repeatable; config.yaml of a run lists all.",
        ),
    ]

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def offered(names: Iterable[str]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """What a shell offers to complete a word with; other spellings stay welcome."""
    return lambda _, __, begun: [name for name in names if name.startswith(begun.lower())]
