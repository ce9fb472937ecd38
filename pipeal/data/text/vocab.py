"""The words a model knows, and their numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar
from zlib import crc32

from pipeal.core.atomic import write_whole
from pipeal.core.errors import ConfigError, DataError, is_whole

__all__ = ["Vocab"]

_FORMAT = "pipeal-vocab-1"

T = TypeVar("T")


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


@dataclass(frozen=True)
class Vocab:
    """An ordered set of words, among them one for padding and one for all unknown words.

    Args:
        words: The words by number.
        pad: The one that fills the end of short samples.
        unk: The one that stands for every word that is not in the vocabulary.

    Raises:
        DataError: A word is there twice, or one of the two is not there, or they are one.
    """

    words: tuple[str, ...]
    pad: str = "<pad>"
    unk: str = "<unk>"

    def __init__(self, words: Iterable[str], *, pad: str = "<pad>", unk: str = "<unk>") -> None:
        vars(self).update(words=tuple(words), pad=pad, unk=unk)  # it is frozen to others
        if len(self.indices) != len(self.words):
            ((word, count),) = Counter(self.words).most_common(1)
            raise DataError(f"vocabulary: {word!r} is there {count} times, wanted every word once")
        for role, word in (("padding", pad), ("unknown words", unk)):
            if word not in self.indices:
                raise DataError(f"vocabulary: no {word!r} for {role}; add it to the specials")
        if pad == unk:
            raise DataError(f"vocabulary: {pad!r} stands for padding and for unknown words; wanted two words")

    @cached_property
    def indices(self) -> Mapping[str, int]:
        """The numbers by word, not to be changed."""
        return {word: index for index, word in enumerate(self.words)}

    @property
    def pad_index(self) -> int:
        """The number that fills the end of short samples."""
        return self.indices[self.pad]

    @property
    def unk_index(self) -> int:
        """The number of every word that is not in the vocabulary."""
        return self.indices[self.unk]

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
            DataError: It is no such object, has no word for padding or for unknown words, or its default index is that
                of no word.
        """
        try:
            words, default = tuple(vocab.get_itos()), vocab.get_default_index()
        except AttributeError as error:
            raise DataError(f"{type(vocab).__name__} is no torchtext vocabulary: {error}") from error
        if unk is None:
            if default is not None and not is_whole(default, 0, len(words) - 1):
                raise DataError(
                    f"vocabulary: the default index is {default}, which is no word's of {len(words)}; wanted the index "
                    "of a word for unknown ones: name the word with unk"
                )
            unk = "<unk>" if default is None else words[default]
        return cls(words, pad=pad, unk=unk)

    @classmethod
    def load(cls, path: Path) -> Vocab:
        """Reads what :meth:`save` wrote.

        Raises:
            DataError: The file cannot be read or is something else.
        """
        return load_json(
            path, _FORMAT, "vocabulary", lambda state: cls(state["words"], pad=state["pad"], unk=state["unk"])
        )

    def save(self, path: Path) -> None:
        """Writes the vocabulary as JSON text, whole or not at all.

        Raises:
            DataError: The system refused to write.
        """
        state = {"format": _FORMAT, "pad": self.pad, "unk": self.unk, "words": self.words}
        write_whole(path, json.dumps(state, ensure_ascii=False))

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self.indices

    def __getitem__(self, word: str) -> int:
        return self.indices.get(word, self.unk_index)

    def __repr__(self) -> str:
        return f"Vocab({len(self)} words, pad_index={self.pad_index}, unk_index={self.unk_index})"


def load_json(path: Path, format: str, what: str, make: Callable[[dict[str, Any]], T]) -> T:
    """Makes what was saved as JSON out of its state, whose ``format`` must be that.

    Raises:
        DataError: The file cannot be read, or is something else.
    """
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["format"] != format:
            raise ValueError(f"format {state['format']!r}, wanted {format!r}")
        return make(state)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; it comes with a trained run") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: not a saved {what} ({error!r}); train the model again") from error
