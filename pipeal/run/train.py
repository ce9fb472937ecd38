"""The kinds of data that a command trains on: how each is configured, read, and modelled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeal.config import LanguageConfig, RunConfig, TextConfig, VisionConfig
from pipeal.core.names import Mode
from pipeal.run.build_language import LanguageModels, language_experiment
from pipeal.run.build_text import TextModels, text_experiment
from pipeal.run.build_vision import VisionModels, vision_experiment
from pipeal.run.configure import chosen_file, configure, say_form
from pipeal.run.distributed import carry_out
from pipeal.run.followers import Kind

KINDS: Mapping[str, tuple[type[RunConfig], Kind[Any]]] = {
    "text": (TextConfig, Kind(text_experiment, TextModels.of)),
    "vision": (VisionConfig, Kind(vision_experiment, VisionModels.of)),
    "language": (LanguageConfig, Kind(language_experiment, LanguageModels.of)),
}


def train(
    kind: str,
    dataset: str,
    model: tuple[str, Mode | None],
    *,
    config_file: str | None,
    overrides: tuple[str, ...],
    resume: str,
    retry: bool,
    preset: str | None = None,
    **given: Any,
) -> None:
    """Trains as a command asks for it.

    Args:
        kind: One of :data:`KINDS`.
        dataset: The canonical name of the data set.
        model: The canonical name of the model, and the form that its spelling implies.
        config_file: As for :func:`pipeal.run.configure.configure`.
        overrides: Likewise.
        resume: As for :func:`pipeal.run.distributed.carry_out`.
        retry: Likewise.
        preset: Of a language model, the sizes that come with pipeal, in the place of ``config_file``.
        given: The other options, as :func:`pipeal.cli.options.setting` names them; None where they were not given.

    Raises:
        PipealError: As for :func:`pipeal.run.configure.configure` and :func:`pipeal.run.distributed.carry_out`.
    """
    schema, of_kind = KINDS[kind]
    config_file = chosen_file(preset, config_file)
    settings = {name.replace("__", "."): value for name, value in given.items()}
    config = configure(schema, dataset, model, config_file, overrides, settings)
    say_form(model, config)
    carry_out(of_kind, config, resume, retry=retry)
