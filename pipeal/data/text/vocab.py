"""The words a model knows, and their numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Protocol
from zlib import crc32

import numpy as np
import numpy.typing as npt

from pipeal.core.atomic import write_whole
from pipeal.core.errors import ConfigError, DataError

__all__ = ["Vocab"]

_FORMAT = "pipeal-vocab-1"


class TorchtextVocab(Protocol):
    """What ``torchtext.vocab.Vocab`` offers, as far as it is needed here."""

    def get_itos(self) -> Sequence[str]:
        """The words by number."""
        ...

    def get_stoi(self) -> Mapping[str, int]:
        """The numbers by word."""
        ...

    def get_default_index(self) -> int | None:
        """The number of unknown words, None where there is none."""
        ...


class Vocab:
    """An ordered set of words, among them one for padding and one for all unknown words.

    Attributes:
        words: The words by number.
        indices: The numbers by word, read-only.
        pad_index: The number that fills the end of short samples.
        unk_index: The number of every word that is not in the vocabulary.
    """

    def __init__(self, words: Iterable[str], *, pad: str = "<pad>", unk: str = "<unk>") -> None:
        self.words = tuple(words)
        indices = {word: index for index, word in enumerate(self.words)}
        if len(indices) != len(self.words):
            ((word, count),) = Counter(self.words).most_common(1)
            raise DataError(f"vocabulary: {word!r} is there {count} times, wanted every word once")
        for role, word in (("padding", pad), ("unknown words", unk)):
            if word not in indices:
                raise DataError(f"vocabulary: no {word!r} for {role}; add it to the specials")
        if pad == unk:
            raise DataError(f"vocabulary: {pad!r} stands for padding and for unknown words; wanted two words")
        self.indices: Mapping[str, int] = MappingProxyType(indices)
        self.pad_index = indices[pad]
        self.unk_index = indices[unk]

    @property
    def fingerprint(self) -> str:
        """Tells vocabularies apart: a check sum of the words in their order."""
        return f"{crc32(chr(0).join(self.words).encode()):08x}"

    @classmethod
    def build(
        cls,
        token_lists: Iterable[Iterable[str]],
        max_size: int = 30_000,
        min_frequency: int = 1,
        specials: Sequence[str] = ("<pad>", "<unk>"),
    ) -> Vocab:
        """Takes the most frequent words; among equally frequent ones, the first in the alphabet.

        Args:
            token_lists: The words of each text; only the training ones, usually.
            max_size: The most words, specials included.
            min_frequency: How often a word must occur.
            specials: The words to begin with: padding, unknown, and any more.

        Raises:
            ConfigError: No room for a word beside the specials, fewer than two specials, or a frequency
                below 1.
        """
        if len(specials) < 2:
            raise ConfigError(f"specials {tuple(specials)}: wanted at least two, for padding and unknown words")
        if max_size <= len(specials):
            raise ConfigError(f"max_size {max_size} leaves no room beside the {len(specials)} specials")
        if min_frequency < 1:
            raise ConfigError(f"min_frequency {min_frequency}, wanted at least 1")
        counts = Counter(chain.from_iterable(token_lists))
        for special in specials:
            counts.pop(special, None)
        frequent = [item for item in counts.items() if item[1] >= min_frequency]
        frequent.sort(key=lambda item: (-item[1], item[0]))
        words = [*specials, *(word for word, _ in frequent[: max_size - len(specials)])]
        return cls(words, pad=specials[0], unk=specials[1])

    @classmethod
    def from_torchtext(cls, vocab: TorchtextVocab, *, pad: str = "<pad>", unk: str | None = None) -> Vocab:
        """Takes over a ``torchtext.vocab.Vocab`` (or what looks like one) with its numbers.

        Args:
            vocab: The vocabulary.
            pad: Its word for padding.
            unk: Its word for unknown words; by default the one at its default index, else ``<unk>``.

        Raises:
            DataError: It is no such object, or has no word for padding or for unknown words.
        """
        try:
            words, default = tuple(vocab.get_itos()), vocab.get_default_index()
        except AttributeError as error:
            raise DataError(f"{type(vocab).__name__} is no torchtext vocabulary: {error}") from error
        if unk is None:
            unk = "<unk>" if default is None else words[default]
        return cls(words, pad=pad, unk=unk)

    @classmethod
    def load(cls, path: Path) -> Vocab:
        """Reads what :meth:`save` wrote.

        Raises:
            DataError: The file cannot be read or is something else.
        """
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            if state["format"] != _FORMAT:
                raise DataError(f"{path}: format {state['format']!r}, wanted {_FORMAT!r}")
            words, pad, unk = state["words"], state["pad"], state["unk"]
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not a saved vocabulary ({error!r}); build and save it again") from error
        return cls(words, pad=pad, unk=unk)

    def save(self, path: Path) -> None:
        """Writes the vocabulary as JSON text, whole or not at all.

        Raises:
            DataError: The system refused to write.
        """
        state = {
            "format": _FORMAT,
            "pad": self.words[self.pad_index],
            "unk": self.words[self.unk_index],
            "words": self.words,
        }
        write_whole(path, json.dumps(state, ensure_ascii=False))

    def encode(self, tokens: Iterable[str]) -> npt.NDArray[np.int32]:
        """The numbers of the words, ``(len(tokens),)``; unknown words get ``unk_index``."""
        get, unk = self.indices.get, self.unk_index
        return np.array([get(token, unk) for token in tokens], dtype=np.int32)

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self.indices

    def __getitem__(self, word: str) -> int:
        return self.indices.get(word, self.unk_index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocab):
            return NotImplemented
        mine, theirs = ((vocab.words, vocab.pad_index, vocab.unk_index) for vocab in (self, other))
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.words, self.pad_index, self.unk_index))

    def __repr__(self) -> str:
        return f"Vocab({len(self)} words, pad_index={self.pad_index}, unk_index={self.unk_index})"

    def __reduce__(self) -> tuple[object, ...]:
        # A mappingproxy cannot be pickled; spawn workers need it.
        return _rebuild, (self.words, self.words[self.pad_index], self.words[self.unk_index])


def _rebuild(words: Sequence[str], pad: str, unk: str) -> Vocab:
    return Vocab(words, pad=pad, unk=unk)
