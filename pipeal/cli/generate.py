"""``pipeal generate RUN --prompt …``: a trained language model writes on."""

from __future__ import annotations

from pathlib import Path

import click

from pipeal.cli import entry
from pipeal.cli.options import PATH
from pipeal.core.errors import DataError


@click.command(context_settings={"max_content_width": 110})
@click.argument("run", type=PATH)
@click.option("--prompt", help="What to go on from; default: the beginning of a line.")
@click.option("--length", type=click.IntRange(1, 1_000_000), default=500, help="Characters to write; default: 500.")
@click.option("--temperature", type=float, default=0.8, help="0 takes the likeliest always; 1 as learnt; default: 0.8.")
@click.option("--top-k", type=click.IntRange(min=1), help="Draw from so many of the likeliest; default: all.")
@click.option(
    "--exit", "exit_at", type=click.IntRange(min=1), help="Layers to climb, of a form with exits; default: all of them."
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="The same writes the same; default: 0.")
def command(
    run: str, prompt: str | None, length: int, temperature: float, top_k: int | None, exit_at: int | None, seed: int
) -> None:
    """Writes on from a prompt, with the model that the training in the folder RUN left, a character at a time.

    RUN is a folder such as runs/shakespeare-charlm-al-001; of a comparison, name the form, such as …/al.
    """
    with entry.loading():
        from pipeal.config import LanguageConfig
        from pipeal.data import Alphabet
        from pipeal.data.text.characters import with_plain_ends
        from pipeal.models import generate_each
        from pipeal.run.build_language import first_prompt
        from pipeal.run.trained import load_trained

    folder = Path(run)
    trained = load_trained(folder)
    config, package = trained.config, trained.package
    if not isinstance(config, LanguageConfig):
        raise DataError(f"{folder}: a run of {config.model.name}; expected the run of a language model")
    assert trained.classes is not None  # its characters
    alphabet = Alphabet("".join(trained.classes))
    prompt = first_prompt(alphabet) if prompt is None else with_plain_ends(prompt)
    numbers = alphabet.encode(prompt)
    trained.check_exit(exit_at)
    model = package.to_bp(exit_at)
    written = generate_each(
        model, numbers, length=length, block=config.model.block, temperature=temperature, top_k=top_k, seed=seed
    )
    click.echo(prompt, nl=False)
    for number in written:
        click.echo(alphabet.characters[number], nl=False)  # and at once: it flushes
    click.echo()
