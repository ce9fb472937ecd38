"""The options that training commands share, and how they become a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from pipeal.cli.grid import parse_grid, settings_of, with_setting
from pipeal.cli.say import say
from pipeal.config import RunConfig, check_effects, find_config, given_keys, load_config
from pipeal.engine import SCHEDULES
from pipeal.engine.device import device_names
from pipeal.engine.distributed.launch import Launch
from pipeal.errors import ConfigError
from pipeal.models.registry import Mode, form_told

Command = TypeVar("Command", bound=Callable[..., Any])
Config = TypeVar("Config", bound=RunConfig)

# Option -> the dotted path of the configuration it sets.
_KEYS = {
    "mode": "train.mode",
    "schedule": "engine.schedule",
    "devices": "engine.devices",
    "replicas": "engine.replicas",
    "epochs": "train.epochs",
    "repeat": "train.repeat",
    "max_len": "data.max_len",
    "text": "data.text",
    "size": "data.size",
    "augmentation": "data.augmentation",
    "batch_size": "data.batch_size",
    "seed": "train.seed",
    "tune": "tune.grid",
    "tune_epochs": "tune.epochs",
    "data_root": "data.root",
    "out": "out",
}


def training_options(*own: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Adds the options that every training command has, and among them a command's own, to a click command."""
    options: list[Callable[[Command], Command]] = [
        click.option(
            "--mode",
            shell_complete=offered(("al", "bp", "compare")),
            help="al (default), bp, or compare, which trains both.",
        ),
        click.option(
            "--schedule",
            shell_complete=offered(SCHEDULES),
            help=f"Of the AL form: {', '.join(SCHEDULES)} (default).",
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


def configure(
    schema: type[Config],
    dataset: str,
    model: tuple[str, Mode | None],
    config_file: str | None,
    overrides: tuple[str, ...],
    given: dict[str, Any],
) -> Config:
    """Defaults, then the YAML file, then the options given, then ``--set``; says which of those have no effect.

    Args:
        schema: What comes out.
        dataset: The canonical name of the data set.
        model: The canonical name of the model, and the form that its spelling implies.
        config_file: The YAML file that was named; None for the one that comes with pipeal, if there is one.
        overrides: What ``--set`` was given.
        given: The other options, None where they were not given.

    Raises:
        ConfigError: One line with the dotted path, or about what ``--tune`` was given.
        PlacementError: The devices are no names.
    """
    name, implied = model
    if implied == "al" and given["mode"] == "bp":
        raise ConfigError(f"that spelling of the model is its AL form, but --mode is bp; ask for {name!r}")
    given["mode"] = given["mode"] or implied
    values: dict[str, Any] = {"dataset": dataset, "model": {"name": name}}
    for option, value in given.items():
        if value is not None and value != ():
            *sections, key = _KEYS[option].split(".")
            section = values
            for inner in sections:
                section = section.setdefault(inner, {})
            section[key] = value
    path = Path(config_file) if config_file is not None else find_config(dataset, name)
    config = load_config(schema, path, overrides=overrides, values=values)
    grid = parse_grid(config)
    launch = Launch.found()
    asked = {*given_keys(schema, overrides=overrides, values=values), *grid}
    processes = 1 if launch is None else launch.size
    stages = _stages(config) if processes == 1 else None
    idle: dict[str, None] = {}  # each line once, in order
    for setting in settings_of(grid):
        idle |= dict.fromkeys(check_effects(with_setting(config, setting), asked, stages=stages, processes=processes))
    if launch is None or launch.rank == 0:
        for line in idle:
            say(line)
    return config


def _stages(config: RunConfig) -> int | None:
    """Those that may overlap, of the AL form in one process; None where that is chosen, or nothing is to overlap."""
    engine = config.engine
    if engine.devices == "auto" or engine.schedule == "sequential":
        return None
    return len(device_names(engine.devices))


def say_form(model: tuple[str, Mode | None], config: RunConfig) -> None:
    """Says in one line which form is trained, once for all ranks.

    Args:
        model: The canonical name of the model, and the form that its spelling implies.
        config: What is trained.
    """
    told, launch = form_told(model, config.train.mode), Launch.found()
    if told is not None and (launch is None or not launch.rank):
        say(told)
