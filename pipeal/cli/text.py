"""``python nlpmain.py <dataset> <model>``: trains a text model."""

from __future__ import annotations

from typing import Any

import click

from pipeal.cli import entry
from pipeal.cli.options import offered, training_options
from pipeal.config import LanguageConfig, TextConfig, find_config
from pipeal.core.errors import ConfigError
from pipeal.data import TEXT_DATASETS, canonical_text_name
from pipeal.models import (
    LANGUAGE_MODELS,
    TEXT_MODELS,
    canonical_language_model,
    canonical_text_model,
    is_language_model,
)
from pipeal.run.build_language import DATASETS, LanguageModels, canonical_corpus, language_experiment
from pipeal.run.build_text import TextModels, text_experiment
from pipeal.run.configure import configure, say_form
from pipeal.run.distributed import carry_out
from pipeal.run.followers import Kind

PRESETS = ("cpu", "gpu")


@click.command(context_settings={"max_content_width": 110, "show_default": False})
@click.argument("dataset", shell_complete=offered((*TEXT_DATASETS, *DATASETS)))
@click.argument("model", shell_complete=offered((*TEXT_MODELS, *LANGUAGE_MODELS)))
@training_options(
    click.option("--max-len", type=int, help="Words kept of a text; default: the published length."),
    click.option("--text", metavar="FILE", help="The file that the data set text stands for; charlm."),
    click.option("--preset", type=click.Choice(PRESETS), help="Sizes of charlm; default: the lesson's, tiny."),
)
def command(
    dataset: str,
    model: str,
    preset: str | None,
    config_file: str | None,
    overrides: tuple[str, ...],
    resume: str | None,
    retry: bool,
    **given: Any,
) -> None:
    """Trains MODEL on DATASET, and shows how it went.

    DATASET is agnews, dbpedia, imdb, or toynews, which needs no download, and MODEL lstm or transformer; or DATASET
    is shakespeare, or text for any file, and MODEL charlm, which writes texts like it. The published spellings
    choose the form: LSTM and Transformer the BP form, LSTMAL and TransformerAL the AL form.
    """
    if is_language_model(model):
        corpus, language_model = canonical_corpus(dataset), canonical_language_model(model)
        if preset is not None:
            config_file = _preset_file(preset, config_file)
        language = configure(LanguageConfig, corpus, language_model, config_file, overrides, given)
        say_form(language_model, language)
        carry_out(
            Kind(language_experiment, LanguageModels.of), language, "auto" if resume is None else resume, retry=retry
        )
        return
    classifier = canonical_text_model(model)
    if dataset.lower() in DATASETS:
        raise ConfigError(f"{dataset} is for language models ({', '.join(LANGUAGE_MODELS)}), found {model}")
    if preset is not None:
        raise ConfigError(f"--preset: found {preset}, but {model} has none; they are for {', '.join(LANGUAGE_MODELS)}")
    config = configure(TextConfig, canonical_text_name(dataset), classifier, config_file, overrides, given)
    say_form(classifier, config)
    carry_out(Kind(text_experiment, TextModels.of), config, "auto" if resume is None else resume, retry=retry)


def _preset_file(preset: str, config_file: str | None) -> str:
    if config_file is not None:
        raise ConfigError(f"--preset {preset} and --config {config_file}: either is a whole configuration; give one")
    path = find_config("shakespeare", f"charlm-{preset}")
    assert path is not None  # they come with pipeal
    return str(path)


def main() -> None:
    """The entry point of ``nlpmain.py``."""
    entry.run(command)
