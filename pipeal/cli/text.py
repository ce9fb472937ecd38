"""``python nlpmain.py <dataset> <model>``: trains a text model.

A new option is a key in ``config/`` (``schema``, ``text`` or ``language``), a ``setting(...)`` here or, for all
commands, in :mod:`pipeal.cli.options`, and its effect in ``run/read_text``, ``run/build_text``, ``run/build_language``
or ``run/opening``.
"""

from __future__ import annotations

from typing import Any

import click

from pipeal.cli import entry
from pipeal.cli.options import PRESETS, offered, setting, training_options
from pipeal.core.errors import ConfigError
from pipeal.core.names import LANGUAGE, TEXT, check_has_model, is_file, source_of


@click.command(context_settings={"max_content_width": 110, "show_default": False})
@click.argument("dataset", shell_complete=offered((*TEXT.datasets, *LANGUAGE.datasets)))
@click.argument("model", shell_complete=offered((*TEXT.models, *LANGUAGE.models)))
@training_options(
    setting("data.max_len", "--max-len", type=int, help="Words kept of a text; default: the published length."),
    setting(
        "data.test_file", "--test-file", metavar="FILE", help="To test on; default: a fifth of the data set's file."
    ),
    setting(
        "data.columns.text",
        "--text-column",
        multiple=True,
        metavar="NAME",
        help="Of a file of your own; repeatable: joined by a space; default: text.",
    ),
    setting("data.columns.label", "--label-column", metavar="NAME", help="Of a file of your own; default: label."),
    setting("data.text", "--text", metavar="FILE", help="The file that the data set text stands for; charlm."),
    click.option("--preset", type=click.Choice(PRESETS), help="Sizes of charlm; default: the lesson's, tiny."),
)
def command(dataset: str, model: str, preset: str | None, config_file: str | None, **given: Any) -> None:
    """Trains MODEL on DATASET, and shows how it went.

    DATASET is agnews, dbpedia, imdb, or toynews, which needs no download, or a file of your own with texts and
    labels, NAME.csv or NAME.jsonl, and MODEL lstm, transformer, or hf:FOLDER, a folder of transformers; or DATASET is
    shakespeare, or text for any file, and MODEL charlm, which writes texts like it. The published spellings choose
    the form: LSTM and Transformer the BP form, LSTMAL and TransformerAL the AL form.
    """
    if source_of(model) is None:  # the message of another library's is that of its kind
        check_has_model(model, TEXT, LANGUAGE)
    is_language = LANGUAGE.has_model(model)
    names, kind = (LANGUAGE, "language") if is_language else (TEXT, "text")
    named = names.model(model)
    if preset is not None and not is_language:
        raise ConfigError(f"--preset: found {preset}, but {model} has none; they are for {', '.join(LANGUAGE.models)}")
    data = names.dataset(dataset)
    if is_file(dataset):
        given["data__file"] = dataset
    with entry.loading():
        from pipeal.run.train import train

    train(kind, data, named, preset=preset, config_file=config_file, **given)


def main() -> None:
    """The entry point of ``nlpmain.py``."""
    entry.run(command)
