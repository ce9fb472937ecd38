"""Where the configuration of a run on text becomes objects: texts, vocabulary, batches, models."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeal.config import GroupingConfig, RunConfig, TextConfig, TextDataConfig, TextModelConfig
from pipeal.core.artifacts import CLASSES, HF_FOLDER, VOCABULARY
from pipeal.core.errors import ConfigError, DataError
from pipeal.core.modules import module_of
from pipeal.core.names import FILE, TEXT, WITH_HEADS, source_of
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
    TextDataset,
    TextSplit,
    Vocab,
    clean,
    find_thresholds,
    find_vectors,
    list_vectors,
    load_text,
    load_text_file,
    load_vectors,
    published_max_len,
)
from pipeal.data.batching import Known, make_sampler
from pipeal.methods.al import TouchedAdam, touch_rows
from pipeal.models import TextDims, group_each, model_layers
from pipeal.models.hf_folder import folder_of, save_config, text_limits
from pipeal.models.imported import Imported
from pipeal.reporting import bars
from pipeal.reporting.recorders import write_json
from pipeal.run.build import (
    SPLIT_SEED,
    Experiment,
    Models,
    data_root,
    facts_of,
    hold_out,
    kept_in,
    looks_ahead,
    with_names,
)

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
        config, tokenizer = _tokenizer(config)
        data = config.data
    if config.model.embedding_updates == "touched" and config.engine.replicas > 1:
        raise ConfigError(
            "model.embedding_updates: found touched, whose gradients replicas cannot average; expected dense, or "
            "engine.replicas 1"
        )
    root = data_root(config)
    texts = _texts(config, root)
    numbered = _by_words(config, texts) if tokenizer is None else _by_tokenizer(config, texts, tokenizer)
    train, held, test, vocab = numbered
    classes = len(texts.classes)
    facts = facts_of(classes, train, held, test) | {
        "vocabulary": len(vocab),
        "mean_length": round(float(train.lengths.mean()), 2),
        "longest": int(train.lengths.max()),
        "batching": data.batching.kind,
        "fingerprint": f"{train.fingerprint}-{vocab.fingerprint}",
    }
    if config.dataset == FILE:
        facts["labels"] = _labels(texts)
        facts["tested_on"] = _tested_on(config)
    pretrained = None
    if config.model.pretrained == "none":
        if config.model.vectors is not None:
            raise ConfigError("model.vectors: found a file, but model.pretrained is none; say glove or fasttext")
        if tokenizer is None:
            _tell_of_vectors(config.model, root)
    elif isinstance(vocab, Vocab):
        pretrained, found = _pretrained(config, root, vocab)
        facts["words_with_pretrained_vectors"] = found
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
    models = TextModels(config, len(vocab), classes, vocab.pad_index, thresholds, pretrained)
    return TextExperiment(models, train, held, test, facts, vocab, texts.classes)


def _texts(config: TextConfig, root: Path) -> TextDataset:
    """A published data set, or what the user's own file holds."""
    data, dataset = config.data, config.dataset
    if dataset != FILE:
        if data.file is not None:
            raise ConfigError(
                f"data.file: found {data.file}, but the data set is {dataset}; name the file in its place"
            )
        _log.info(f"reading {dataset}")
        with bars.downloads() as bar:
            bar.begin(f"reading {dataset}")
            return load_text(dataset, root, download=data.download, seed=SPLIT_SEED, progress=bar)
    if data.file is None:
        raise ConfigError(f"data.file: found null, but the data set is {FILE}; name it in its place, as reviews.csv")
    path, test = Path(data.file), None if data.test_file is None else Path(data.test_file)
    _log.info(f"reading {path}")
    with bars.Steps(f"reading {path.name}"):
        columns = data.columns
        texts = load_text_file(
            path, test, text=columns.text, label=columns.label, test_share=data.test_share, seed=SPLIT_SEED
        )
    _log.info(f"{len(texts.classes)} classes ({_labels(texts)}); tested on {_tested_on(config)}")
    if test is not None:
        _require_other_texts(texts, path, test)
    return texts


def _require_other_texts(texts: TextDataset, path: Path, test: Path) -> None:
    """Warns where all that is tested on is trained on, too.

    Raises:
        DataError: The two files hold the same texts and labels.
    """
    trained, tested = (Counter(zip(split.texts, split.labels, strict=True)) for split in (texts.train, texts.test))
    if trained == tested:
        raise DataError(
            f"data.test_file: {test} holds just the texts of {path}: the accuracy on it would be that of training; "
            "name another file, or leave it out: a share of the first is kept to test on then"
        )
    if tested.keys() <= trained.keys():
        _log.warning(f"{test}: all of its texts are in {path}, too: the test accuracy is one of training")


def _labels(texts: TextDataset) -> str:
    """The names of the classes, in their order, as far as a line has room."""
    more = f", … {texts.classes[-1]}" if len(texts.classes) > 12 else ""
    return ", ".join(texts.classes[:12]) + more


def _tested_on(config: TextConfig) -> str:
    """In words without a file's name, by which a run that is taken up again knows its data wherever that lies."""
    share = config.data.test_share
    return f"{share:g} of it, drawn by seed {SPLIT_SEED}" if config.data.test_file is None else "a file of its own"


def _tokenizer(config: TextConfig) -> tuple[TextConfig, FolderTokenizer]:
    """That of a model of another library, and the configuration with lengths that the model takes.

    Raises:
        ConfigError: There is no such model, or it is none for texts.
        DataError: There is no tokenizer, or it is for another model.
    """
    name, limits = config.model.name, text_limits(config.model.name)
    tokenizer = FolderTokenizer(folder_of(name), limits.pad_index)
    if len(tokenizer) > limits.vocab_size or tokenizer.pad_index >= limits.vocab_size:
        raise DataError(
            f"{name}: its tokenizer has {len(tokenizer)} tokens, but the model takes {limits.vocab_size}; expected the "
            "tokenizer of this model"
        )
    wanted = config.data.max_len or tokenizer.longest
    longest = min(wanted, tokenizer.longest, limits.positions or wanted)
    if longest < wanted:
        _log.info(f"texts are cut after {longest} tokens, not {wanted}: {name} has no more positions")
    return replace(config, data=replace(config.data, max_len=longest)), tokenizer


def numbered(
    split: TextSplit, vocab: Vocab | FolderTokenizer, data: TextDataConfig, max_len: int | None, *, classes: int
) -> Corpus:
    """Texts as the numbers that a model takes, by its words or its tokenizer.

    Args:
        split: They and their labels.
        vocab: What numbers them.
        data: How they are cleaned.
        max_len: Where they are cut.
        classes: How many classes there are.
    """
    if isinstance(vocab, Vocab):
        return Corpus.encode(split, vocab, max_len=max_len, drop_stop_words=data.drop_stop_words, classes=classes)
    return Corpus.from_numbers(vocab.encode(split.texts, max_len), split.labels, vocab.pad_index, classes=classes)


Numbered: TypeAlias = tuple[Corpus, Corpus | None, Corpus, Vocab | FolderTokenizer]
"""The training, held-out and test texts as numbers, and what made them."""


def _by_words(config: TextConfig, texts: TextDataset) -> Numbered:
    data, classes = config.data, len(texts.classes)
    _log.info("building the vocabulary")
    with bars.Steps("building the vocabulary"):
        words = [clean(text, data.drop_stop_words) for text in texts.train.texts]
        kept, out = hold_out(len(words), data.held_out)
        vocab = Vocab.build([words[row] for row in kept], max_size=data.vocab_size, min_frequency=data.min_frequency)
        whole = Corpus.from_tokens(words, texts.train.labels, vocab, max_len=data.max_len, classes=classes)
        train, held = whole.subset(kept), (whole.subset(out) if len(out) else None)
        test = numbered(texts.test, vocab, data, data.max_len, classes=classes)
    return train, held, test, vocab


def _by_tokenizer(config: TextConfig, texts: TextDataset, tokenizer: FolderTokenizer) -> Numbered:
    data, classes = config.data, len(texts.classes)
    _log.info("tokenizing")
    with bars.Steps("tokenizing"):
        whole, test = (
            numbered(split, tokenizer, data, data.max_len, classes=classes) for split in (texts.train, texts.test)
        )
        kept, out = hold_out(len(whole), config.data.held_out)
        return whole.subset(kept), (whole.subset(out) if len(out) else None), test, tokenizer


def _pretrained(config: TextConfig, root: Path, vocab: Vocab) -> tuple[npt.NDArray[np.float32], int]:
    model = config.model
    if model.vectors is not None:
        path = Path(model.vectors)
    else:
        path = find_vectors(root, model.pretrained, model.embedding_dim)
    with bars.Steps("reading") as reading:
        reading(path.name)
        table = load_vectors(path, vocab, model.embedding_dim, cache=kept_in(config), seed=config.train.seed)
    return table.weight, table.found


def _tell_of_vectors(model: TextModelConfig, root: Path) -> None:
    """Says how vectors that lie there could be used, those of the configured width first."""
    there = list_vectors(root)
    if there:
        kind, dim = min(there, key=lambda found: (abs(found[1] - model.embedding_dim), found[0] != "glove"))
        wanted = {"pretrained": kind, "embedding_dim": dim}
        if model.name in WITH_HEADS:
            wanted["n_heads"] = next(heads for heads in range(model.n_heads, 0, -1) if dim % heads == 0)
        sets = [f"--set model.{key}={value}" for key, value in wanted.items() if value != getattr(model, key)]
        _log.info(f"word vectors are learnt from scratch; to begin with those of {there[kind, dim]}: {' '.join(sets)}")


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
