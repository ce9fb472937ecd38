"""Encoded texts of any length in three flat arrays, and batches cut out of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeal.core.errors import ConfigError, DataError
from pipeal.data.text.cleaning import clean
from pipeal.data.text.datasets import TextSplit
from pipeal.data.text.vocab import Vocab

__all__ = ["Corpus"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Ragged samples with labels. No sample is empty.

    Attributes:
        tokens: ``(sum of lengths,)`` int32: all samples, end to end.
        offsets: ``(N + 1,)`` int64: sample ``i`` is ``tokens[offsets[i]:offsets[i + 1]]``.
        labels: ``(N,)`` int64, each in ``0..classes-1``.
        classes: How many classes there are.
        pad_index: What fills the end of short samples in a batch.
    """

    tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    classes: int
    pad_index: int

    @classmethod
    def encode(
        cls,
        split: TextSplit,
        vocab: Vocab,
        *,
        max_len: int | None,
        drop_stop_words: bool = True,
        classes: int | None = None,
    ) -> Corpus:
        """Cleans and encodes a split; see :meth:`from_tokens`."""
        token_lists = (clean(text, drop_stop_words) for text in split.texts)
        return cls.from_tokens(token_lists, split.labels, vocab, max_len=max_len, classes=classes)

    @classmethod
    def from_tokens(
        cls,
        token_lists: Iterable[Sequence[str]],
        labels: Sequence[int],
        vocab: Vocab,
        *,
        max_len: int | None,
        classes: int | None = None,
    ) -> Corpus:
        """Encodes texts that are words already.

        A text without any word (nothing was left of it after cleaning) becomes the one word for unknown
        words, so that no sample has length 0.

        Args:
            token_lists: The words of each text.
            labels: Their labels, counted from 0.
            vocab: Numbers the words.
            max_len: Texts are cut after so many words; None cuts none.
            classes: How many classes there are; by default, as many as the labels show.

        Raises:
            ConfigError: ``max_len`` is below 1.
            DataError: No texts, another number of labels, or a label out of range.
        """
        if max_len is not None and max_len < 1:
            raise ConfigError(f"max_len {max_len}, wanted at least 1 (None cuts no text)")
        get, unk = vocab.indices.get, vocab.unk_index
        numbers = ([get(word, unk) for word in words[:max_len]] or [unk] for words in token_lists)
        return cls.from_numbers(numbers, labels, vocab.pad_index, classes=classes)

    @classmethod
    def from_numbers(
        cls, texts: Iterable[Sequence[int]], labels: Sequence[int], pad_index: int, *, classes: int | None = None
    ) -> Corpus:
        """Texts that are numbers already.

        Args:
            texts: The tokens of each, at least one.
            labels: Their labels, counted from 0.
            pad_index: What fills the end of short samples in a batch.
            classes: How many classes there are; by default, as many as the labels show.

        Raises:
            DataError: As :meth:`from_tokens`.
        """
        tokens, ends = array("i"), array("q", [0])
        for numbers in texts:
            tokens.extend(numbers)
            ends.append(len(tokens))
        return cls(
            np.array(tokens, dtype=np.int32),
            np.array(ends, dtype=np.int64),
            np.asarray(labels, dtype=np.int64),
            max(labels, default=-1) + 1 if classes is None else classes,
            pad_index,
        )

    def __post_init__(self) -> None:
        if not len(self):
            raise DataError("no texts to encode; wanted at least 1")
        if len(self.labels) != len(self):
            raise DataError(f"{len(self)} texts, but {len(self.labels)} labels")
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= self.classes))
        if wrong.size:
            raise DataError(
                f"sample {wrong[0]}: label {self.labels[wrong[0]]} out of range, wanted 0..{self.classes - 1}"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """``(N,)`` int64: the words of each sample, at least 1."""
        return np.diff(self.offsets)

    @property
    def fingerprint(self) -> str:
        """Tells corpora apart: a check sum of all tokens, lengths and labels."""
        check = 0
        for part in (self.tokens, self.offsets, self.labels):
            check = crc32(np.ascontiguousarray(part).view(np.uint8).data, check)
        return f"{check:08x}"

    def subset(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Corpus:
        """A corpus of some of the samples, in the order given."""
        rows = np.asarray(indices, dtype=np.int64)
        pieces = [self.tokens[self.offsets[row] : self.offsets[row + 1]] for row in rows]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths[rows])])
        tokens = np.concatenate([self.tokens[:0], *pieces])
        return Corpus(tokens, ends, self.labels[rows], self.classes, self.pad_index)

    def batch(
        self, indices: Sequence[int] | npt.NDArray[np.int64], padded_length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Collects samples, padded on the right.

        Args:
            indices: Which samples, ``(B,)``, in any order.
            padded_length: ``T``, at least the longest of them, which is the default.

        Returns:
            ``x`` of shape ``(B, T)`` and ``y`` of shape ``(B,)``, both int64.

        Raises:
            DataError: No index, or a sample that is longer than ``padded_length``.
            IndexError: An index not in ``0..N-1``.
        """
        rows = np.asarray(indices, dtype=np.int64)
        if not rows.size:
            raise DataError("a batch of no samples; wanted at least one index")
        # numpy would take a negative index from the end, and then the wrong offsets.
        if rows.min() < 0 or rows.max() >= len(self):
            raise IndexError(f"index out of range in {rows.min()}..{rows.max()}, wanted 0..{len(self) - 1}")
        lengths = self.lengths[rows]
        longest = int(lengths.max())
        if padded_length is not None and padded_length < longest:
            raise DataError(
                f"a sample of length {longest} in a batch of length {padded_length}; wanted at least {longest}"
            )
        step = np.arange(padded_length or longest)
        # Places behind a sample's end read its first word: an address that is always good, replaced anyway.
        inside = step < lengths[:, None]
        places = self.offsets[rows, None] + np.where(inside, step, 0)
        x = np.where(inside, self.tokens[places], self.pad_index).astype(np.int64, copy=False)
        return torch.from_numpy(x), torch.from_numpy(self.labels[rows])
