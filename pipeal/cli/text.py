"""``python nlpmain.py <dataset> <model>``: trains a text model."""

from __future__ import annotations

from typing import Any

import click

from pipeal.cli import entry
from pipeal.cli.build_text import TextModels, text_experiment
from pipeal.cli.distributed import carry_out
from pipeal.cli.followers import Kind
from pipeal.cli.options import configure, offered, training_options
from pipeal.config import TextConfig
from pipeal.data import TEXT_DATASETS, canonical_text_name
from pipeal.models import TEXT_MODELS, canonical_text_model


@click.command(context_settings={"max_content_width": 110, "show_default": False})
@click.argument("dataset", shell_complete=offered(TEXT_DATASETS))
@click.argument("model", shell_complete=offered(TEXT_MODELS))
@training_options(click.option("--max-len", type=int, help="Words kept of a text; default: the published length."))
def command(
    dataset: str,
    model: str,
    config_file: str | None,
    overrides: tuple[str, ...],
    resume: str | None,
    **given: Any,
) -> None:
    """Trains MODEL on DATASET, and shows how it went.

    DATASET is agnews, dbpedia, imdb, or toynews, which needs no download. MODEL is lstm or transformer; the
    published spellings (LSTMAL, Transformer, ...) also choose the form.
    """
    names = canonical_text_name(dataset), canonical_text_model(model)
    config = configure(TextConfig, *names, config_file, overrides, given)
    carry_out(Kind(text_experiment, TextModels.of), config, "auto" if resume is None else resume)


def main() -> None:
    """The entry point of ``nlpmain.py``."""
    entry.run(command)
