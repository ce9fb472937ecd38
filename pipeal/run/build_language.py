"""Where the configuration of a run of a language model becomes objects: text, blocks, models."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeal.config import LanguageConfig, LanguageModelConfig
from pipeal.core.artifacts import ALPHABET
from pipeal.core.errors import ConfigError, DataError
from pipeal.core.names import LANGUAGE
from pipeal.core.protocols import TrainableLayer
from pipeal.core.rng import key_seed
from pipeal.data import WHOLE, Alphabet, RandomBlocks, ReadAhead, Share, read_characters
from pipeal.engine import Pipeline
from pipeal.methods.al import OptimizerFactory
from pipeal.models import CharDims, TokenCrossEntropy, generate_each, model_layers
from pipeal.reporting import bars
from pipeal.run.build import SPLIT_SEED, Experiment, Models, data_root, looks_ahead, with_names
from pipeal.run.stopping import StopRequest, Unless
from pipeal.training.evaluation import Criterion, accuracy_and_loss

_log = logging.getLogger(__name__)

SAMPLE = 300
"""Characters that are shown of what a trained model writes."""

adam: OptimizerFactory = partial(torch.optim.Adam, fused=True, betas=(0.9, 0.99))
"""With a shorter memory of squares than usual, for trainings of one or two thousand steps."""


@dataclass(frozen=True)
class LanguageModels(Models):
    """Makes language models.

    Attributes:
        config: Which, and how wide.
        characters: How many there are.
    """

    config: LanguageConfig
    characters: int

    @property
    def criterion(self) -> Criterion:
        """Nats per character."""
        return TokenCrossEntropy()

    def build(self, mode: str) -> Iterator[TrainableLayer]:
        """See :meth:`Models.build <pipeal.run.build.Models.build>`."""
        return model_layers(
            LANGUAGE,
            self.config.model.name,
            mode,
            self.characters,
            **self.how(mode),
            optimizer=adam,
            dims=_dims(self.config.model),
            weights=self.config.model.weights,
        )


@dataclass(frozen=True)
class CharacterPart:
    """A part of a text.

    Attributes:
        characters: ``(N,)``.
        seed: By which the blocks are drawn that it is evaluated on.
    """

    characters: torch.Tensor
    seed: int

    def __len__(self) -> int:
        return len(self.characters)


@dataclass(frozen=True)
class LanguageExperiment(Experiment):
    """A text and a model for it; both are trained and evaluated on random blocks, all of one length."""

    models: LanguageModels
    train: CharacterPart
    held: CharacterPart | None
    test: CharacterPart
    alphabet: Alphabet

    def batches(self, seed: int, share: Share = WHOLE) -> ReadAhead:
        """Random blocks, others in each epoch."""
        data = self.config.data
        return ReadAhead(self._blocks(self.train, batches=data.steps, seed=seed, share=share), data.prefetch)

    def in_order(self, part: CharacterPart) -> RandomBlocks:
        """Random blocks, always the same."""
        return self._blocks(part, batches=self.config.data.estimate_batches, seed=part.seed, same=True)

    def save(self, folder: Path) -> None:
        """Leaves ``alphabet.json``."""
        self.alphabet.save(ALPHABET.at(folder))

    def afterword(self, pipe: Pipeline, stop: StopRequest) -> list[str]:
        """The loss at each exit, if there are several, and something that the model writes."""
        lines = []
        exits = sum(len(stage.layers) for stage in pipe.stages)
        if exits > 1:
            blocks, criterion = Unless(stop, self.test_evaluation()), self.models.criterion
            found = [accuracy_and_loss(pipe, blocks, criterion, k + 1)[1] for k in range(exits)]
            lines.append(f"exits:    validation loss {' '.join(f'{loss:.4f}' for loss in found)}")
        prompt = self.alphabet.encode(first_prompt(self.alphabet))
        # With the pipeline's own precision and processes: the same text, wherever its stages are. Compiled with
        # ``static``, its one shape is compiled once more.
        block, seed = self.config.model.block, self.config.train.seed
        try:
            written = list(Unless(stop, generate_each(pipe.predict, prompt, length=SAMPLE, block=block, seed=seed)))
        except DataError as error:
            return [*lines, f"sample:   none, {error}"]
        return [*lines, "sample:", self.alphabet.decode(torch.tensor([*prompt.tolist(), *written])).strip()]

    def _blocks(self, part: CharacterPart, **options: Any) -> RandomBlocks:
        config = self.config
        block, batch_size = config.model.block, config.data.batch_size
        return RandomBlocks(part.characters, block=block, batch_size=batch_size, pin_memory=True, **options)


def language_experiment(config: LanguageConfig) -> LanguageExperiment:
    """Reads the text.

    Args:
        config: What was asked for.

    Raises:
        DataError: The text is missing, malformed, or too short for the blocks.
        ConfigError: The data set or the model is unknown, a size does not fit, or an option is of other models.
    """
    config = with_names(config, LANGUAGE)
    dataset = config.dataset
    _dims(config.model)  # sizes that do not fit are told before anything is read
    data = config.data
    for key in ("train_accuracy_samples", "exit_tolerance"):
        given, default = (getattr(of.train, key) for of in (config, LanguageConfig()))
        if given != default:
            raise ConfigError(f"train.{key}: found {given:g}, but it is for classifiers; leave it out")
    if data.cache_dir is not None:
        raise ConfigError(f"data.cache_dir: found {data.cache_dir}, but characters are not cached; leave it out")
    if dataset == "text":
        if data.text is None:
            raise ConfigError("data.text: found null, but the data set is text; name the file with --text FILE")
        path = Path(data.text)
    else:
        if data.text is not None:
            raise ConfigError(f"data.text: found {data.text}, but the data set is {dataset}; for a file, say text")
        with bars.downloads() as bar:
            path = LANGUAGE.load_dataset(dataset)(data_root(config), download=data.download, progress=bar)
    _log.info(f"reading {path.name}")
    text = read_characters(path)
    count = round(len(text.train) * data.held_out)
    if data.held_out and not count:
        raise ConfigError(
            f"data.held_out: {data.held_out:g} of {len(text.train):,} characters is 0; expected some, but not all"
        )
    # By position, as the split itself: what is drawn from a part never reaches into another.
    kept = len(text.train) - count
    # Not by the seed of a training, whose first batches these would be.
    train = CharacterPart(text.train[:kept], key_seed(SPLIT_SEED))
    held = CharacterPart(text.train[kept:], key_seed(SPLIT_SEED, 1)) if count else None
    test = CharacterPart(text.validation, SPLIT_SEED)
    for part in (train, held, test):
        if part is not None and len(part) <= config.model.block:
            raise DataError(
                f"{path}: {len(train):,} characters to train on, {count:,} held out and {len(test):,} to validate on, "
                f"but a block of {config.model.block} takes {config.model.block + 1}; take a longer text, lower "
                "model.block, or hold out another share (data.held_out)"
            )
    facts: dict[str, int | float | str] = {
        "characters": len(text.alphabet),
        "train_characters": len(train),
        "held_out_characters": count,
        "validation_characters": len(test),
        "fingerprint": text.fingerprint,
    }
    models = LanguageModels(config, len(text.alphabet))
    return LanguageExperiment(models, train, held, test, facts, text.alphabet)


def first_prompt(alphabet: Alphabet) -> str:
    """What to go on from where none is given: the beginning of a line, or, if a text has none, its first character."""
    return "\n" if "\n" in alphabet.characters else alphabet.characters[0]


def _dims(model: LanguageModelConfig) -> CharDims:
    sizes = {size.name: getattr(model, size.name) for size in fields(CharDims)}
    return CharDims(**{**sizes, "ahead": looks_ahead(model)})
