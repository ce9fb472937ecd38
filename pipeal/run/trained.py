"""The model that a run has trained, out of its folder alone: its data is not read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeal.config import LanguageConfig, RunConfig, TextConfig, VisionConfig, load_config
from pipeal.core.artifacts import ALPHABET, CHECKPOINTS, CLASSES, CONFIG, HF_FOLDER, IMAGES, VOCABULARY, Artifact
from pipeal.core.errors import ConfigError, DataError, first_line, require_usable
from pipeal.core.methods import METHODS
from pipeal.core.names import HF, source_of
from pipeal.data import Alphabet, Augment, FolderTokenizer, TextSplit, Vocab, published_max_len
from pipeal.data.images.decode import BrokenImageError, decode
from pipeal.engine.state.layer_state import State
from pipeal.methods.al import ALPackage
from pipeal.models.hf_folder import text_limits
from pipeal.reporting.page import is_run, runs_in
from pipeal.run.build import Models
from pipeal.run.build_language import LanguageModels
from pipeal.run.build_text import TextModels
from pipeal.run.build_vision import VisionModels
from pipeal.run.find_run import run_of
from pipeal.run.opening import new_layers
from pipeal.run.read_text import numbered
from pipeal.training.checkpoint.resume import ResumedTraining
from pipeal.training.checkpoint.store import Checkpoint, CheckpointStore

_log = logging.getLogger(__name__)

Classes = tuple[str, ...] | None
"""The names of the classes in their order, of a language model its characters; None where the run does not tell."""

Reader = Callable[[Sequence[str]], Tensor]
"""From texts, or names of image files, to inputs of the model, ``(B, T)`` or ``(B, 3, S, S)``; raises DataError."""

_Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Trained:
    """What a run has left, or one form of a comparison.

    Attributes:
        folder: Its folder.
        config: With every choice made.
        models: Makes such models.
        package: The model, in evaluation mode, on the CPU.
        classes: The names of the classes.
        read: Reads texts or images as the run did; None of a language model.
        checkpoint: Where its weights are from.
        states: Those of its layers.
        where: What was trained by then, in words.
    """

    folder: Path
    config: Any
    models: Models
    package: ALPackage
    classes: Classes
    read: Reader | None
    checkpoint: Checkpoint
    states: Mapping[int, State]
    where: str

    @property
    def longest(self) -> int | None:
        """The most words or characters of an input; None of images."""
        if isinstance(self.models, TextModels):
            words: int = self.config.data.max_len or published_max_len(self.config.dataset)
            return words
        return None if isinstance(self.models, VisionModels) else int(self.config.model.block)

    def check_exit(self, exit_at: int | None) -> None:
        """Refuses an exit that the model does not have; None is all of it.

        Raises:
            ConfigError: There is none of that number, or the form has none.
        """
        if exit_at is None:
            return
        depth = len(self.package)
        if not METHODS[self.config.train.mode].has_exits:
            raise ConfigError(f"--exit: found {exit_at}, but the form in {self.folder} has no exits; leave it out")
        if not 1 <= exit_at <= depth:
            raise ConfigError(f"--exit: found {exit_at}, but the model in {self.folder} has {depth}, counted from 1")

    def inputs(self, rows: int, length: int | None) -> Tensor:
        """Inputs as the model takes them, always the same; of texts all but the first are padded.

        Args:
            rows: How many.
            length: Of texts; None of images.
        """
        random, models = torch.Generator().manual_seed(0), self.models
        if length is None:
            size = self.config.data.size
            return torch.randn(rows, 3, size, size, generator=random)
        if isinstance(models, TextModels):
            tokens = torch.randint(models.vocab_size, (rows, length), generator=random)
            tokens[tokens == models.pad_index] = (models.pad_index + 1) % models.vocab_size  # no padding within texts
            tokens[1:, length - length // 2 :] = models.pad_index
            return tokens
        assert isinstance(models, LanguageModels)
        return torch.randint(models.characters, (rows, length), generator=random)


def load_trained(path: Path) -> Trained:
    """The model of a run, from its newest checkpoint.

    Args:
        path: The folder of a run, of a form in that of a comparison, or of one of their checkpoints, which is taken
            then.

    Raises:
        DataError: There is no such run, or it has no checkpoint that is as it was written.
        ConfigError: Its configuration is of something else.
    """
    require_usable(path, f"{path}: cannot be read", "; name the folder of a run of one form")
    named = path.resolve()
    is_checkpoint = run_of(path) is not None
    folder = named.parents[1] if is_checkpoint else path
    if not CONFIG.at(folder).is_file():
        raise _no_run(folder)
    # What the forms of a comparison have in common lies above them.
    homes = (folder, folder.resolve().parent)
    found = next(((kind, home) for home in homes for kind in _KINDS if kind.at(home).is_file()), None)
    if found is None:
        wanted = ", ".join(kind.name for kind in _KINDS)
        raise DataError(f"{folder}: none of {wanted}, one of which a run leaves; expected the folder of a run")
    (kind, home), checkpoint = found, _checkpoint(folder, named if is_checkpoint else None)
    schema, models_of = _KINDS[kind]
    config = load_config(schema, CONFIG.at(folder))
    config = replace(config, model=replace(config.model, weights=None))  # those that it began with; they may be gone
    resumed = ResumedTraining.of(checkpoint)
    models, classes, read = models_of(config, home, resumed.facts)
    layers = list(new_layers(models, config, 1))
    resumed.load_into(layers)
    package = ALPackage(layers).eval()
    return Trained(folder, config, models, package, classes, read, checkpoint, resumed.states, resumed.position.where)


def _no_run(folder: Path) -> DataError:
    """What a folder without ``config.yaml`` is, and what to name instead."""
    if is_run(folder):
        forms = sorted(str(found.parent) for found in folder.glob(f"*/{CONFIG.name}"))
        if not forms:
            return DataError(f"{folder}: {CONFIG.name} is missing, which a run writes when it begins")
        hint = f"it compares several; name {' or '.join(forms)}"
    else:
        within = runs_in(folder) if folder.is_dir() else []
        hint = f"it holds runs; name one, such as {within[0]}" if within else "name the folder of a run"
    return DataError(f"{folder}: no run of one form; {hint}")


def _checkpoint(folder: Path, named: Path | None) -> Checkpoint:
    if named is not None:
        return Checkpoint.open(named)
    saved = CheckpointStore(CHECKPOINTS.at(folder)).newest(_log.warning)
    if saved is None:
        raise DataError(f"{folder}: no checkpoint; train until the first one is written")
    return saved


_Found = tuple[Models, Classes, Reader | None]


def _of_text(config: TextConfig, home: Path, facts: _Facts) -> _Found:
    vocab: Vocab | FolderTokenizer
    if source_of(config.model.name) is None:
        vocab = Vocab.load(VOCABULARY.at(home))
    else:
        config = _as_kept(config, home)
        vocab = FolderTokenizer(HF_FOLDER.at(home), text_limits(config.model.name).pad_index)
    blueprint = {
        "vocab_size": len(vocab),
        "classes": _count(facts, home),
        "pad_index": vocab.pad_index,
        "thresholds": [],  # to group layers changes neither their answers nor the names of their weights
        "pretrained": False,
    }
    # Runs of earlier versions did not leave the names of their classes.
    names = _read(CLASSES.at(home), "classes") if CLASSES.at(home).is_file() else None
    return TextModels.of(config, blueprint), names, partial(_texts, config, vocab)


def _texts(config: TextConfig, vocab: Vocab | FolderTokenizer, texts: Sequence[str]) -> Tensor:
    split = TextSplit([*texts], [0] * len(texts))
    corpus = numbered(split, vocab, config.data, config.data.max_len or published_max_len(config.dataset), classes=1)
    return corpus.batch(range(len(corpus)))[0]


def _images(augment: Augment, size: int, paths: Sequence[str]) -> Tensor:
    pixels = []
    for path in paths:
        try:
            pixels.append(decode(Path(path).read_bytes(), size))
        except (OSError, ValueError) as error:  # a name with a null byte
            raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
        except BrokenImageError as error:
            raise DataError(f"{path}: {error}; expected an image, JPEG or PNG") from error
    return augment(np.stack(pixels), 0, range(len(pixels)))


def _of_images(config: VisionConfig, home: Path, _: _Facts) -> _Found:
    names = _read(IMAGES.at(home), "classes")
    if source_of(config.model.name) == HF:
        config = _as_kept(config, home)
    augment = Augment("none", mean=_read(IMAGES.at(home), "mean", float), std=_read(IMAGES.at(home), "std", float))
    return VisionModels(config, len(names)), names, partial(_images, augment, config.data.size)


def _as_kept(config: Any, home: Path) -> Any:
    """With the folder that the run has kept in the place of the one that it began with."""
    return replace(config, model=replace(config.model, name=f"{HF}:{HF_FOLDER.at(home).resolve()}"))


def _of_characters(config: LanguageConfig, home: Path, _: _Facts) -> _Found:
    alphabet = Alphabet.load(ALPHABET.at(home))
    return LanguageModels(config, len(alphabet)), tuple(alphabet.characters), None


_KINDS: Mapping[Artifact, tuple[type[RunConfig], Callable[[Any, Path, _Facts], _Found]]] = {
    VOCABULARY: (TextConfig, _of_text),
    IMAGES: (VisionConfig, _of_images),
    ALPHABET: (LanguageConfig, _of_characters),
    CLASSES: (TextConfig, _of_text),  # with a tokenizer in the place of words
}
"""By the file that each kind of run leaves."""


def _count(facts: _Facts, home: Path) -> int:
    found = facts.get("classes")
    if not isinstance(found, int):
        raise DataError(f"{home}: its checkpoint does not say how many classes there are; expected that of a training")
    return found


def _read(path: Path, key: str, kind: type = str) -> tuple[Any, ...]:
    """A list of names, or of numbers, out of a JSON file.

    Raises:
        DataError: The file cannot be read, or has no such list.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))[key]
        if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
            raise ValueError(f"{key} is no list of {'names' if kind is str else 'numbers'}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: not as a run writes it ({first_line(error)})") from error
    return tuple(found)
