"""Options of a command, given by name, become a configuration; a new option needs nothing here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pipeal.config import (
    LanguageConfig,
    RunConfig,
    TextConfig,
    VisionConfig,
    check_effects,
    find_config,
    given_keys,
    load_config,
    nested,
)
from pipeal.core.errors import ConfigError
from pipeal.core.methods import COMPARE, METHODS
from pipeal.core.names import (
    FILE,
    HF,
    LANGUAGE,
    TEXT,
    VISION,
    Mode,
    check_has_model,
    contradicts,
    form_told,
    is_file,
    source_of,
)
from pipeal.engine.distributed.launch import Launch
from pipeal.run.grid import parse_grid, settings_of, with_setting
from pipeal.run.imported_settings import usual_settings
from pipeal.run.opening import schedule_of

_log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=RunConfig)


def configure(
    schema: type[Config],
    dataset: str,
    model: tuple[str, Mode | None],
    config_file: str | None,
    overrides: tuple[str, ...],
    given: Mapping[str, Any],
) -> Config:
    """Defaults, then the YAML file, then the options given, then ``--set``; says which of those have no effect.

    A model of another library has no file; what is usual for it (:mod:`pipeal.run.imported_settings`) comes before all.

    Args:
        schema: What comes out.
        dataset: The canonical name of the data set.
        model: The canonical name of the model, and the form that its spelling implies.
        config_file: The YAML file that was named; None for the one that comes with pipeal, if there is one.
        overrides: What ``--set`` was given.
        given: The other options, by the key that each sets; None where it was not given.

    Raises:
        ConfigError: One line with the dotted path, or about what ``--tune`` was given.
        PlacementError: The devices are no names.
    """
    (name, implied), mode = model, given.get("train.mode")
    asked = {"dataset": dataset, "model.name": name, **given, "train.mode": implied if mode is None else mode}
    values = nested({key: value for key, value in asked.items() if value not in (None, ())})
    path = Path(config_file) if config_file is not None else find_config(dataset, name)
    usual = None if source_of(name) is None else usual_settings(schema, dataset, name, with_file=path is None)
    config = load_config(schema, path, overrides=overrides, values=values, usual=usual)
    for key, named, found in (("dataset", dataset, config.dataset), ("model.name", name, config.model.name)):
        if found != named:  # its file, and what is usual for it, would be those of another
            raise ConfigError(f"--set {key}: found {found}, but the command names {named}; name {found} in its place")
    if implied is not None and contradicts(implied, config.train.mode):
        label, key = METHODS[implied].label, "--mode" if mode == config.train.mode else "train.mode"
        raise ConfigError(
            f"that spelling of the model is its {label} form, but {key} is {config.train.mode}; ask for {name!r}"
        )
    schedule_of(config)  # refused before data are read
    grid = parse_grid(config)
    launch = Launch.found()
    keys = {*given_keys(schema, overrides=overrides, values=values), *grid}
    processes = 1 if launch is None else launch.size
    if "train.methods" in keys and config.train.mode != COMPARE:
        raise ConfigError(
            f"train.methods: found {', '.join(config.train.methods)}, but train.mode is {config.train.mode}; expected "
            f"--mode {COMPARE}, which trains them side by side, or --method with one name"
        )
    idle: dict[str, None] = {}  # each line once, in order
    for setting in settings_of(grid):
        idle |= dict.fromkeys(check_effects(with_setting(config, setting), keys, processes=processes))
    for line in idle:
        _log.warning(line)
    return config


def chosen_file(preset: str | None, config_file: str | None) -> str | None:
    """The YAML file that was named, or that of a language model's preset; None where neither was given.

    Raises:
        ConfigError: Both were.
    """
    if preset is None:
        return config_file
    if config_file is not None:
        raise ConfigError(f"--preset {preset} and --config {config_file}: either is a whole configuration; give one")
    return str(find_config("shakespeare", f"charlm-{preset}"))


def named_config(
    dataset: str | None,
    model: str | None,
    preset: str | None,
    config_file: str | None,
    overrides: tuple[str, ...],
    given: Mapping[str, Any],
    *,
    any_form: bool = False,
) -> tuple[str, RunConfig]:
    """The kind of data and the configuration of a data set and a model, in any spelling.

    Args:
        dataset: None for the embedded data of the model's kind.
        model: Its name; None for the transformer.
        preset: Of a language model's sizes.
        config_file: As for :func:`configure`, as are what follows.
        overrides: What ``--set`` was given.
        given: The other options.
        any_form: Whether the form that a spelling implies is of no matter.

    Raises:
        ConfigError: As :func:`configure`; or a name is unknown, or they do not go together.
    """
    model = "transformer" if model is None else model
    check_has_model(model, TEXT, VISION, LANGUAGE)
    if LANGUAGE.has_model(model):
        if dataset is None:
            raise ConfigError(
                f"--dataset: {model} has no embedded data; expected shakespeare, or text with --set data.text=FILE"
            )
        config_file = chosen_file(preset, config_file)
        kind, names = "language", LANGUAGE
        schema: type[RunConfig] = LanguageConfig
    elif preset is not None:
        raise ConfigError(f"--preset: found {preset}, but {model} has none; they are for charlm")
    elif source_of(model) == HF and dataset is None:
        raise ConfigError(f"--dataset: {model} may be for texts or for images; expected the data set that it is for")
    elif source_of(model) == HF and dataset is not None and VISION.has_dataset(dataset):
        kind, names, schema = "vision", VISION, VisionConfig
    elif TEXT.has_model(model):
        kind, names, schema = "text", TEXT, TextConfig
    else:
        kind, names, schema = "vision", VISION, VisionConfig
    data, (name, form) = names.dataset("embedded" if dataset is None else dataset), names.model(model)
    if dataset is not None and data == FILE and is_file(dataset):
        given = {**given, "data.file": dataset}
    return kind, configure(schema, data, (name, None if any_form else form), config_file, overrides, given)


def say_form(model: tuple[str, Mode | None], config: RunConfig) -> None:
    """Says in one line which form is trained.

    Args:
        model: The canonical name of the model, and the form that its spelling implies.
        config: What is trained.
    """
    told = form_told(model, config.train.mode)
    if told is not None:
        _log.info(told)
