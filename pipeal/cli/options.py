"""The options that training commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, get_args

import click

from pipeal.core.errors import ConfigError
from pipeal.core.methods import COMPARE, COMPARED, DEFAULT, METHODS, MODES
from pipeal.core.names import BACKPROP_SCHEDULES, DEFAULT_SCHEDULE, LAYER_SCHEDULES, ScheduleName

Command = TypeVar("Command", bound=Callable[..., Any])

SCHEDULES = get_args(ScheduleName)

PRESETS = ("cpu", "gpu")
"""Sizes of charlm beside the lesson's."""


class _Path(click.types.StringParamType):
    """The name of a file or folder; an empty one would stand for the folder that one is in."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value or "\0" in value:
            self.fail(f"found {value!r}, expected the name of a file or folder", param, ctx)
        return value


PATH = _Path()

OVERRIDES = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any configuration key, repeatable; config.yaml of a run lists all.",
)

_MODES = f"{DEFAULT.name} (default), {', '.join(MODES[1:-1])}, or {COMPARE}, which trains those of --methods."


def _the_one(_: click.Context, option: click.Parameter, given: Sequence[str]) -> str | None:
    """The value of an option that has two spellings.

    Raises:
        ConfigError: It was given different ones.
    """
    found = [*dict.fromkeys(given)]
    if len(found) > 1:
        raise ConfigError(
            f"{' and '.join(option.opts)} are one option: found {' and '.join(map(repr, found))}; expected one name"
        )
    return found[0] if found else None


def training_options(*own: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Adds the options that every training command has, and among them a command's own, to a click command."""
    options: list[Callable[[Command], Command]] = [
        setting(
            "train.mode",
            "--method",
            "--mode",
            metavar="NAME",
            multiple=True,
            callback=_the_one,
            shell_complete=offered(MODES),
            help=_MODES,
        ),
        setting(
            "train.methods",
            "--methods",
            metavar="NAME,NAME,…",
            shell_complete=_listed,
            help=f"With --mode {COMPARE}: two or more, in the order of the tables; default: {','.join(COMPARED)}.",
        ),
        setting(
            "engine.schedule",
            "--schedule",
            shell_complete=offered(SCHEDULES),
            help=f"Of layers that learn side by side: {', '.join(LAYER_SCHEDULES)}; default {DEFAULT_SCHEDULE}. "
            f"Of --mode bp under torchrun, a stage in each process: {', '.join(BACKPROP_SCHEDULES)}.",
        ),
        setting(
            "engine.devices",
            "--devices",
            help="One device per stage: cpu,cpu or cpu*4 or cuda:0,cuda:1; or auto (default), which tries some.",
        ),
        setting(
            "engine.replicas",
            "--replicas",
            type=int,
            help="Under torchrun, whose processes are stages × replicas: how many share each batch; default: 1.",
        ),
        setting("train.epochs", "--epochs", type=int, help="Passes over the training data; default: the experiment's."),
        setting(
            "train.repeat", "-r", "--repeat", type=int, help="Whole trainings, each with the next seed; default: 1."
        ),
        *own,
        setting("train.seed", "--seed", type=int, help="Seed of the first training; default: 0."),
        setting(
            "tune.grid",
            "--tune",
            multiple=True,
            metavar="KEY=V1,V2,…",
            help="Try these values first, on each form alike, and go on with what is best on held-out samples; "
            "repeatable: every combination.",
        ),
        setting(
            "tune.epochs", "--tune-epochs", type=int, help="Epochs of each trial; default: as many as the run has."
        ),
        setting("data.root", "--data-root", help="Folder that holds the data sets; default: data."),
        setting("out", "--out", help="Folder in which each run gets a folder of its own; default: runs."),
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
        click.option(
            "--config", "config_file", type=PATH, help="YAML file; default: the one for this data set and model."
        ),
        OVERRIDES,
    ]
    return _together(options)


def model_options(command: Command) -> Command:
    """Which model on which data, for a command that looks at it without a training."""
    return _together(
        [
            click.option(
                "--dataset", help="A data set as training takes it.  [default: embedded data, which need no download]"
            ),
            click.option("--model", help="A model as training takes it.  [default: transformer]"),
            click.option("--preset", type=click.Choice(PRESETS), help="Sizes of charlm, as training takes them."),
        ]
    )(command)


def _together(options: Sequence[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def setting(key: str, *flags: str, **described: Any) -> Callable[[Command], Command]:
    """An option that sets a key of the configuration; the command is given it by the key, with ``__`` for its dots.

    Args:
        key: The dotted key.
        flags: Such as ``--epochs``.
        described: As for ``click.option``.
    """
    return click.option(*flags, key.replace(".", "__"), **described)


def offered(names: Iterable[str]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """What a shell offers to complete a word with; other spellings stay welcome."""
    return lambda _, __, begun: [name for name in names if name.startswith(begun.lower())]


def _listed(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """As :func:`offered`, for the last of several methods with commas between."""
    before, comma, last = begun.rpartition(",")
    return [
        before + comma + name for name in METHODS if name.startswith(last.lower()) and name not in before.split(",")
    ]
