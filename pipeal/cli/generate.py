"""``pipeal generate RUN --prompt …``: a trained language model writes on."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from pipeal.config import LanguageConfig, load_config
from pipeal.core.artifacts import ALPHABET, CHECKPOINTS, CONFIG
from pipeal.core.errors import ConfigError, DataError
from pipeal.data import Alphabet
from pipeal.data.text.characters import with_plain_ends
from pipeal.engine.runner.precision import make_ready
from pipeal.methods.al import ALPackage
from pipeal.models import generate_each
from pipeal.run.build_language import LanguageModels, first_prompt
from pipeal.training.checkpoint.resume import ResumedTraining
from pipeal.training.checkpoint.store import CheckpointStore

_log = logging.getLogger(__name__)


@click.command(context_settings={"max_content_width": 110})
@click.argument("run")
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

    RUN is a folder such as runs/shakespeare-charlm-al-001; of a comparison, name the form: …/al or …/bp.
    """
    folder = Path(run)
    config, alphabet, package = load_trained(folder)
    prompt = first_prompt(alphabet) if prompt is None else with_plain_ends(prompt)
    numbers = alphabet.encode(prompt)
    if exit_at is not None and exit_at > len(package):
        raise ConfigError(f"--exit: found {exit_at}, but the model in {folder} has {len(package)}, counted from 1")
    model = package.to_bp(exit_at)
    written = generate_each(
        model, numbers, length=length, block=config.model.block, temperature=temperature, top_k=top_k, seed=seed
    )
    click.echo(prompt, nl=False)
    for number in written:
        click.echo(alphabet.characters[number], nl=False)  # and at once: it flushes
    click.echo()


def load_trained(folder: Path) -> tuple[LanguageConfig, Alphabet, ALPackage]:
    """The configuration, the alphabet and the model of a run of a language model, from its newest checkpoint.

    Raises:
        DataError: The folder is no such run, or holds no checkpoint that is as it was written.
        ConfigError: Its configuration is of something else.
    """
    if not CONFIG.at(folder).is_file():
        forms = sorted(path.parent for path in folder.glob(f"*/{CONFIG.name}"))
        hint = f"it compares several; name {' or '.join(map(str, forms))}" if forms else "name the folder of a run"
        raise DataError(f"{folder}: no run of one form; {hint}")
    # Of a comparison both forms read with the same alphabet, which lies above them.
    home = folder if ALPHABET.at(folder).is_file() else folder.resolve().parent
    if not ALPHABET.at(home).is_file():
        raise DataError(f"{folder}: no {ALPHABET.name}; expected the run of a language model")
    config = load_config(LanguageConfig, CONFIG.at(folder))
    alphabet = Alphabet.load(ALPHABET.at(home))
    saved = CheckpointStore(CHECKPOINTS.at(folder)).newest(_log.warning)
    if saved is None:
        raise DataError(f"{folder}: no checkpoint; train until the first one is written")
    package = LanguageModels(config, len(alphabet)).package(config.train.mode, config.train.seed)
    make_ready(package, config.train.precision)
    ResumedTraining.of(saved).load_into(package)
    return config, alphabet, package
