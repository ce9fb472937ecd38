"""``pipeal ask RUN TEXT …``: what a trained classifier says of one's own texts or images."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from pipeal.cli import entry
from pipeal.cli.options import PATH
from pipeal.core.errors import ConfigError


@click.command(context_settings={"max_content_width": 110})
@click.argument("run", type=PATH)
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@click.option(
    "--file", type=PATH, metavar="FILE", help="A file with an input in each line; - for what comes through a pipe."
)
@click.option(
    "--exit", "exit_at", type=click.IntRange(min=1), help="Layers to climb, of a form with exits; default: all of them."
)
@click.option("--json", "as_json", is_flag=True, help="An object in each line, with the probabilities of all classes.")
def command(run: str, inputs: tuple[str, ...], file: str | None, exit_at: int | None, as_json: bool) -> None:
    """Says which class each INPUT is of, by the model that the training in the folder RUN left.

    An INPUT is a text, or of a run on images the name of a JPEG or PNG file. There is a line for each, in their order:
    class, probability and input, with tabs between them.

    RUN is a folder such as runs/agnews-transformer-al-001; of a comparison, name the form, such as …/al.
    """
    if bool(inputs) == (file is not None):
        found = "both" if inputs else "neither"
        raise ConfigError(f"expected what to ask, after the run, or --file FILE; found {found}")
    with entry.loading():
        from pipeal.run.ask import AT_ONCE, answers
        from pipeal.run.trained import load_trained

    asked = file == "-" and sys.stdin.isatty()  # each line is answered when it is there
    given: Iterable[str] = inputs if file is None else _lines(file)
    is_empty = True
    for answer in answers(load_trained(Path(run)), given, exit_at, at_once=1 if asked else AT_ONCE):
        is_empty = False
        label, probability = answer.label, answer.probabilities[answer.label]
        if as_json:
            told = {"input": answer.given, "label": label, "probability": probability}
            line = json.dumps({**told, "probabilities": dict(answer.probabilities)}, ensure_ascii=False)
        else:
            line = f"{label}\t{probability:.4f}\t{' '.join(answer.given.split())}"
        click.echo(line)
    if is_empty:
        raise ConfigError(f"--file {file}: expected an input in each line; found none")


def _lines(file: str) -> Iterator[str]:
    """The lines of a file that are not blank; of ``-``, those of the standard input."""
    from pipeal.data.text.lines import read_lines

    lines: Iterable[str] = _piped() if file == "-" else read_lines(Path(file), old_ends=True)
    return (line.strip() for line in lines if line.strip())


def _piped() -> Iterator[str]:
    from pipeal.data.text.lines import text_of

    for number, line in enumerate(sys.stdin.buffer, start=1):
        yield from text_of(line, number, "--file -", old_ends=True)
