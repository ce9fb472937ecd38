"""Where the texts of a run, their words and word vectors are read, and become numbers."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from pipeal.config import TextConfig, TextDataConfig, TextModelConfig
from pipeal.core.errors import ConfigError, DataError
from pipeal.core.names import FILE, WITH_HEADS
from pipeal.data import (
    Corpus,
    FolderTokenizer,
    TextDataset,
    TextSplit,
    Vocab,
    clean,
    find_vectors,
    list_vectors,
    load_text,
    load_text_file,
    load_vectors,
)
from pipeal.data.text.embeddings import VectorTable
from pipeal.models.hf_folder import folder_of, text_limits
from pipeal.reporting import bars
from pipeal.run.build import SPLIT_SEED, hold_out, kept_in

_log = logging.getLogger(__name__)


def read_tokenizer(config: TextConfig) -> tuple[TextConfig, FolderTokenizer]:
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


def read_texts(config: TextConfig, root: Path) -> TextDataset:
    """A published data set, or what the user's own file holds.

    Raises:
        DataError: The data is missing or malformed.
        ConfigError: The data set is unknown, or no file is named, or one that is not read.
    """
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


def facts_of_file(config: TextConfig, texts: TextDataset) -> dict[str, str]:
    """What is to be told of the user's own file; nothing of a published data set."""
    if config.dataset != FILE:
        return {}
    return {"labels": _labels(texts), "tested_on": _tested_on(config)}


def _labels(texts: TextDataset) -> str:
    """The names of the classes, in their order, as far as a line has room."""
    more = f", … {texts.classes[-1]}" if len(texts.classes) > 12 else ""
    return ", ".join(texts.classes[:12]) + more


def _tested_on(config: TextConfig) -> str:
    """In words without a file's name, by which a run that is taken up again knows its data wherever that lies."""
    share = config.data.test_share
    return f"{share:g} of it, drawn by seed {SPLIT_SEED}" if config.data.test_file is None else "a file of its own"


Numbered: TypeAlias = tuple[Corpus, Corpus | None, Corpus, Vocab | FolderTokenizer]
"""The training, held-out and test texts as numbers, and what made them."""


def number(config: TextConfig, texts: TextDataset, tokenizer: FolderTokenizer | None) -> Numbered:
    """By a tokenizer, or without one by the words of the training texts."""
    return _by_words(config, texts) if tokenizer is None else _by_tokenizer(config, texts, tokenizer)


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


def read_vectors(config: TextConfig, root: Path, vocab: Vocab | FolderTokenizer) -> VectorTable | None:
    """Those that the configuration asks for; where it asks for none, says which lie there.

    Raises:
        DataError: They are not found, or malformed.
        ConfigError: A file is named, but none is asked for.
    """
    model = config.model
    if model.pretrained == "none":
        if model.vectors is not None:
            raise ConfigError("model.vectors: found a file, but model.pretrained is none; say glove or fasttext")
        if isinstance(vocab, Vocab):
            _tell_of_vectors(model, root)
        return None
    if not isinstance(vocab, Vocab):
        return None
    named, width = model.vectors, model.embedding_dim
    path = find_vectors(root, model.pretrained, width) if named is None else Path(named)
    with bars.Steps("reading") as reading:
        reading(path.name)
        return load_vectors(path, vocab, width, cache=kept_in(config), seed=config.train.seed)


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
