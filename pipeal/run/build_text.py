"""Where the configuration of a run on text becomes objects: batches and models."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeal.config import GroupingConfig, RunConfig, TextConfig, TextModelConfig
from pipeal.core.artifacts import CLASSES, HF_FOLDER, VOCABULARY
from pipeal.core.errors import ConfigError
from pipeal.core.modules import module_of
from pipeal.core.names import TEXT, source_of
from pipeal.core.protocols import TrainableLayer
from pipeal.data import (
    WHOLE,
    BatchLoader,
    Corpus,
    EpochBatches,
    FolderTokenizer,
    PlannedBatchSampler,
    ReadAhead,
    Share,
    Vocab,
    find_thresholds,
    published_max_len,
)
from pipeal.data.batching import Known, make_sampler
from pipeal.methods.al import TouchedAdam, touch_rows
from pipeal.models import TextDims, group_each, model_layers
from pipeal.models.hf_folder import save_config
from pipeal.models.imported import Imported
from pipeal.reporting.recorders import write_json
from pipeal.run.build import (
    Experiment,
    Models,
    data_root,
    facts_of,
    looks_ahead,
    with_names,
)
from pipeal.run.read_text import facts_of_file, number, read_texts, read_tokenizer, read_vectors

_log = logging.getLogger(__name__)

EVALUATION_BUDGET = 32_768
"""Tokens per batch where nothing has to be kept for a backward."""


@dataclass(frozen=True)
class TextModels(Models):
    """Makes text models.

    Attributes:
        config: Which, and how wide.
        vocab_size: How many words there are.
        classes: How many classes there are.
        pad_index: The word that pads.
        thresholds: Where layers group; none for no grouping.
        pretrained: ``(vocab_size, embedding_dim)`` word vectors; in the blueprint, whether there are any.
    """

    config: TextConfig
    vocab_size: int
    classes: int
    pad_index: int
    thresholds: list[int]
    pretrained: npt.NDArray[np.float32] | None

    @classmethod
    def of(cls, config: RunConfig, blueprint: Mapping[str, Any]) -> TextModels:
        """Those of an experiment whose data was read elsewhere; the first layer's vectors, if any, are left blank."""
        assert isinstance(config, TextConfig)
        shape = blueprint["vocab_size"], config.model.embedding_dim
        pretrained = np.zeros(shape, np.float32) if blueprint["pretrained"] else None
        return cls(config, **{**blueprint, "pretrained": pretrained})

    @property
    def blueprint(self) -> dict[str, Any]:
        """Sizes; see :meth:`of`."""
        return {**super().blueprint, "pretrained": self.pretrained is not None}

    def under(self, config: RunConfig) -> TextModels:
        """Those of another configuration of the same texts.

        Raises:
            ConfigError: Word vectors that were read are of another width.
        """
        assert isinstance(config, TextConfig)
        width = config.model.embedding_dim
        if self.pretrained is not None and self.pretrained.shape[1] != width:
            raise ConfigError(
                f"model.embedding_dim: found {width}, but the word vectors that were read have "
                f"{self.pretrained.shape[1]}; expected the same"
            )
        return super().under(config)

    def imported(self, mode: str) -> tuple[Imported, dict[str, Any]]:
        """A model of another library, and what its :meth:`Imported.layers` are given for a method."""
        model = self.config.model
        network = Imported(model.name, self.classes, pad_index=self.pad_index, parts=model.parts, weights=model.weights)
        return network, {"code": model.y_hid, **self.how(mode)}

    def build(self, mode: str) -> Iterator[TrainableLayer]:
        """See :meth:`Models.build <pipeal.run.build.Models.build>`."""
        model = self.config.model
        if source_of(model.name) is not None:
            imported, options = self.imported(mode)
            yield from imported.layers(mode, **options)
            return
        touched = model.embedding_updates == "touched"
        layers = model_layers(
            TEXT,
            model.name,
            mode,
            self.vocab_size,
            self.classes,
            **self.how(mode),
            optimizer=TouchedAdam if touched else None,
            dims=_dims(model),
            pad_index=self.pad_index,
            pretrained=self.pretrained,
            weights=model.weights,
        )
        if self.thresholds:
            layers = group_each(layers, self.thresholds, model.grouping.layers, pad_index=self.pad_index)
        for layer in layers:
            if touched:
                touch_rows(module_of(layer))
            yield layer


@dataclass(frozen=True)
class TextExperiment(Experiment):
    """A data set of classified texts and a model for it.

    Attributes:
        vocab: The words, or the tokenizer of the model's folder.
        class_names: In order.
    """

    models: TextModels
    train: Corpus
    held: Corpus | None
    test: Corpus
    vocab: Vocab | FolderTokenizer
    class_names: tuple[str, ...]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The lengths of the training samples."""
        return self.train.lengths

    def batches(self, seed: int, share: Share = WHOLE) -> EpochBatches:
        """Shuffled batches as configured."""
        data = self.config.data
        known = Known(self.lengths, data.max_len or int(self.lengths.max()), seed)
        sampler = make_sampler(data.batching.kind, known, **data.batching.heeded)
        return ReadAhead(BatchLoader(self.train, sampler, pin_memory=True, share=share), data.prefetch)

    def in_order(self, part: Corpus) -> EpochBatches:
        """Batches of as many texts as the budget of an evaluation holds."""
        budget = max(EVALUATION_BUDGET, int(part.lengths.max()))
        return BatchLoader(part, PlannedBatchSampler(part.lengths, budget, shuffle=False), pin_memory=True)

    def save(self, folder: Path) -> None:
        """Leaves ``classes.json``, and ``vocab.json`` or another library's configuration and tokenizer."""
        write_json(CLASSES.at(folder), {"classes": self.class_names})
        if isinstance(self.vocab, Vocab):
            self.vocab.save(VOCABULARY.at(folder))
        else:
            save_config(self.config.model.name, self.class_names, HF_FOLDER.at(folder), self.vocab.pad_index)
            self.vocab.save(HF_FOLDER.at(folder))


def text_experiment(config: TextConfig) -> TextExperiment:
    """Reads the data and makes the vocabulary.

    Args:
        config: What was asked for.

    Raises:
        DataError: The data is missing or malformed.
        ConfigError: The data set or the model is unknown, or a size does not fit.
    """
    config = with_names(config, TEXT)
    dataset = config.dataset
    data = replace(config.data, max_len=config.data.max_len or published_max_len(dataset))
    config = replace(config, data=data)
    tokenizer = None
    if source_of(config.model.name) is None:
        _dims(config.model)  # widths that do not fit are told before anything is read
    else:
        config, tokenizer = read_tokenizer(config)
        data = config.data
    if config.model.embedding_updates == "touched" and config.engine.replicas > 1:
        raise ConfigError(
            "model.embedding_updates: found touched, whose gradients replicas cannot average; expected dense, or "
            "engine.replicas 1"
        )
    root = data_root(config)
    texts = read_texts(config, root)
    train, held, test, vocab = number(config, texts, tokenizer)
    classes = len(texts.classes)
    facts = facts_of(classes, train, held, test) | {
        "vocabulary": len(vocab),
        "mean_length": round(float(train.lengths.mean()), 2),
        "longest": int(train.lengths.max()),
        "batching": data.batching.kind,
        "fingerprint": f"{train.fingerprint}-{vocab.fingerprint}",
        **facts_of_file(config, texts),
    }
    vectors = read_vectors(config, root, vocab)
    if vectors is not None:
        facts["words_with_pretrained_vectors"] = vectors.found
    if data.batching.oversize == "drop":
        over = int((train.lengths > data.batching.budget_tokens).sum())
        facts["dropped_samples"] = over
        if over:
            _log.warning(
                f"dropping {over:,} of {len(train):,} training samples, which are over the budget by themselves"
            )
    thresholds = _thresholds(train.lengths, config.model.grouping)
    if thresholds:
        facts["grouped_at"] = " ".join(map(str, thresholds))
    pretrained = None if vectors is None else vectors.weight
    models = TextModels(config, len(vocab), classes, vocab.pad_index, thresholds, pretrained)
    return TextExperiment(models, train, held, test, facts, vocab, texts.classes)


def _dims(model: TextModelConfig) -> TextDims:
    return TextDims(
        embedding=model.embedding_dim,
        hidden=model.x_hid,
        code=model.y_hid,
        heads=model.n_heads,
        dropout=model.dropout,
        parts=model.parts,
        bridges=model.bridges,
        ahead=looks_ahead(model),
    )


def _thresholds(lengths: npt.NDArray[np.int64], grouping: GroupingConfig) -> list[int]:
    if not grouping.thresholds:
        if grouping != GroupingConfig():
            raise ConfigError("model.grouping: found layers or cost, but thresholds is 0, which groups nothing; set it")
        return []
    power = 1 if grouping.cost == "length" else 2
    distinct = len(np.unique(lengths))
    if grouping.thresholds > distinct:
        raise ConfigError(
            f"model.grouping.thresholds: found {grouping.thresholds}, but the lengths of the training samples "
            f"are of {distinct} kinds; expected at most as many"
        )
    return find_thresholds(lengths, lambda length: length**power, grouping.thresholds)
