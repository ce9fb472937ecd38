"""Options of a command, given by name, become a configuration."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeVar

from pipeal.config import RunConfig, check_effects, find_config, given_keys, load_config
from pipeal.core.errors import ConfigError
from pipeal.core.methods import METHODS
from pipeal.core.names import Mode, contradicts, form_told
from pipeal.engine.devices import device_names
from pipeal.engine.distributed.launch import Launch
from pipeal.run.grid import parse_grid, settings_of, with_setting

_log = logging.getLogger(__name__)

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
    if implied is not None and contradicts(implied, given["mode"]):
        label = METHODS[implied].label
        raise ConfigError(
            f"that spelling of the model is its {label} form, but --mode is {given['mode']}; ask for {name!r}"
        )
    if given["mode"] is None:
        given["mode"] = implied
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
    for line in idle:
        _log.warning(line)
    return config


def _stages(config: RunConfig) -> int | None:
    """Those that may overlap, in one process; None where that is chosen, or nothing is to overlap."""
    engine = config.engine
    if engine.devices == "auto" or engine.schedule == "sequential":
        return None
    return len(device_names(engine.devices))


def say_form(model: tuple[str, Mode | None], config: RunConfig) -> None:
    """Says in one line which form is trained.

    Args:
        model: The canonical name of the model, and the form that its spelling implies.
        config: What is trained.
    """
    told = form_told(model, config.train.mode)
    if told is not None:
        _log.info(told)
