"""Text as characters: an alphabet, a split by position, and random blocks whose targets are the next characters.

::

    text     F i r s t   C i t i z e n          9 of 10 parts to train on │ the last one to validate on
                                                (of which the end may be held out, to choose by)
    inputs   F i r s t   C i                    a block
    targets    i r s t   C i t                  the same, one character on
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeal.core.atomic import write_whole
from pipeal.core.errors import ConfigError, DataError
from pipeal.core.rng import key_seed
from pipeal.data.batching.ranks import WHOLE, Share
from pipeal.data.loading.download import Progress
from pipeal.data.loading.loader import Batch
from pipeal.data.loading.sources import SOURCES, fetch
from pipeal.data.text.lines import read_lines

__all__ = ["Alphabet", "Characters", "RandomBlocks", "find_shakespeare", "read_characters"]

TRAINED_TENTHS = 9
"""So many tenths of a text, from its beginning, are trained on; the rest validates."""

_FORMAT = "pipeal-alphabet-1"
_UNICODE = 0x110000
_PIECE = 1 << 20
_FOLDER, _FILE = "tinyshakespeare", "input.txt"


class Alphabet:
    """The characters of a text, in order, and their numbers.

    >>> alphabet = Alphabet("abc")
    >>> alphabet.decode(alphabet.encode("cab"))
    'cab'

    Args:
        characters: Each once, in rising order.

    Raises:
        DataError: There are none, or they are not in rising order.
    """

    def __init__(self, characters: str) -> None:
        if not characters or any(one >= other for one, other in pairwise(characters)):
            raise DataError(f"an alphabet of {characters[:20]!r}; wanted characters, each once, in rising order")
        self.characters = characters
        self._codes = np.frombuffer(characters.encode("utf-32-le"), np.uint32)

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """``(N,)`` int64 numbers of the characters of a text.

        Raises:
            DataError: A character is not of this alphabet.
        """
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        places = np.searchsorted(self._codes, codes).clip(max=len(self) - 1)
        strange = np.flatnonzero(self._codes[places] != codes)
        if len(strange):
            unknown = "".join(dict.fromkeys(text[place] for place in strange))
            raise DataError(
                f"the text has characters that the model has never seen, such as {unknown[:10]!r}; "
                f"it knows {self.characters!r}"
            )
        return torch.from_numpy(places.astype(np.int64))

    def decode(self, numbers: Tensor) -> str:
        """The text that ``(N,)`` numbers stand for."""
        return "".join(self.characters[number] for number in numbers.tolist())

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        text = json.dumps({"format": _FORMAT, "characters": self.characters}, ensure_ascii=True)
        write_whole(path, text + "\n")

    @classmethod
    def load(cls, path: Path) -> Alphabet:
        """Reads what :meth:`save` wrote.

        Raises:
            DataError: The file cannot be read, or is something else.
        """
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            if state["format"] != _FORMAT or not isinstance(state["characters"], str):
                raise ValueError(f"format {state['format']!r}")
            return cls(state["characters"])
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}; it comes with a trained run") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path}: not a saved alphabet ({error!r}); train the model again") from error


@dataclass(frozen=True)
class Characters:
    """A text as numbers, divided by position.

    Attributes:
        alphabet: Of the whole text.
        train: ``(N,)``, the beginning.
        validation: ``(N,)``, the end.
        fingerprint: Tells texts apart.
    """

    alphabet: Alphabet
    train: Tensor
    validation: Tensor
    fingerprint: str


def read_characters(path: Path) -> Characters:
    """Reads a UTF-8 text, plain or ``.gz``; line ends become ``\\n``.

    Raises:
        DataError: It cannot be read, is not UTF-8, or is empty.
    """
    # Little is kept but a byte, or four, for each character: until all were seen they are numbered as they come.
    numbers = np.full(_UNICODE, -1, np.int32)
    known: list[int] = []
    parts: list[npt.NDArray[Any]] = []
    fingerprint = 0
    for text in _pieces(path):
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        fingerprint = crc32(codes.data, fingerprint)
        new = np.unique(codes[numbers[codes] < 0])
        numbers[new] = np.arange(len(known), len(known) + len(new))
        known += new.tolist()
        parts.append(numbers[codes].astype(_narrow(len(known))))
    characters = sum(map(len, parts))
    if characters < 2:
        raise DataError(f"{path}: a text of {characters} characters; expected some to train on and some to validate on")
    order = np.argsort(known)
    places = np.empty(len(known), _narrow(len(known)))
    places[order] = np.arange(len(known))
    numbered = np.empty(characters, places.dtype)
    end = characters
    while parts:
        part = parts.pop()
        numbered[end - len(part) : end] = places[part]
        end -= len(part)
    ids = torch.from_numpy(numbered)
    middle = characters * TRAINED_TENTHS // 10
    alphabet = Alphabet("".join(chr(known[place]) for place in order))
    return Characters(alphabet, ids[:middle], ids[middle:], f"{fingerprint:08x}")


def _pieces(path: Path) -> Iterator[str]:
    """A text in pieces of whole lines, whose ends are ``\\n``."""
    waiting: list[str] = []
    size = 0
    for line in read_lines(path):
        waiting.append(line)
        size += len(line)
        if size >= _PIECE:
            yield with_plain_ends("".join(waiting))
            waiting, size = [], 0
    if waiting:
        yield with_plain_ends("".join(waiting))


def _narrow(characters: int) -> type[np.uint8] | type[np.int32]:
    """The type of so many numbers."""
    return np.uint8 if characters <= 256 else np.int32


def with_plain_ends(text: str) -> str:
    """A text whose lines end as those of :func:`read_characters` do."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def find_shakespeare(root: Path, *, download: bool = True, progress: Progress | None = None) -> Path:
    """The file of the text that everybody begins with: 1,115,394 characters of Shakespeare's plays.

    It is looked for as ``tinyshakespeare/input.txt`` and as ``shakespeare.txt`` under ``root``, plain or ``.gz``,
    else downloaded.

    Raises:
        DataError: It is not there and not to be had, with what to fetch and where to put it.
    """
    wanted = root / _FOLDER / _FILE
    for path in (wanted, root / "shakespeare.txt"):
        for found in (path, path.with_name(path.name + ".gz")):
            if found.is_file():
                return found
    sources = SOURCES["shakespeare"]
    if not download:
        raise DataError(
            f"shakespeare: no {_FILE} (nor .gz) in {wanted.parent}; fetch {sources[0].url}, and put it there, or "
            "name another data root"
        )
    fetch(sources, wanted.parent, [_FILE], progress)
    return wanted


class RandomBlocks:
    """Batches of random blocks of a text, and as targets the same blocks one character on.

    Every batch is drawn from a key of its own, ``(seed, epoch, batch)``: what comes next depends on nothing but where
    one is, and a training that is taken up again sees what it would have seen.

    Args:
        text: ``(N,)`` numbers of characters.
        block: Characters of a block.
        batch_size: Blocks of a batch.
        batches: Batches of an epoch.
        seed: What is drawn follows from it.
        same: Draw the same blocks in every epoch, as an estimate wants that is compared with the one before.
        pin_memory: Put the tensors into page-locked memory, for copies that do not block; without a CUDA device there
            is nothing to copy to.
        share: Which of the blocks of each batch become tensors here.

    Raises:
        DataError: The text is too short for a block and its targets.
    """

    def __init__(
        self,
        text: Tensor,
        *,
        block: int,
        batch_size: int,
        batches: int,
        seed: int,
        same: bool = False,
        pin_memory: bool = False,
        share: Share = WHOLE,
    ) -> None:
        for name, size in (("block", block), ("batch_size", batch_size), ("batches", batches)):
            if size < 1:
                raise ConfigError(f"{name} is {size}; expected a whole number, at least 1")
        if len(text) <= block:
            raise DataError(
                f"{len(text)} characters, but a block of {block} with its targets takes {block + 1}; "
                "take a longer text or shorter blocks"
            )
        self.text = text
        self.block = block
        self.batch_size = batch_size
        self.batches = batches
        self.seed = seed
        self.same = same
        self.share = share
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self._offsets = torch.arange(block + 1)
        self._epoch = self._first = 0

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Chooses the epoch that the next iterators are for, and the batch they begin with, counted from 0."""
        self._epoch, self._first = epoch, first

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return self.batches

    def close(self) -> None:
        """Nothing runs that would have to end."""

    def __iter__(self) -> Iterator[Batch]:
        epoch = 0 if self.same else self._epoch
        generator = torch.Generator()
        for number in range(self._first, self.batches):
            generator.manual_seed(key_seed(self.seed, epoch, number))
            starts = torch.randint(len(self.text) - self.block, (self.batch_size,), generator=generator).tolist()
            own = torch.tensor(self.share.of(starts))
            blocks = self.text[own.unsqueeze(1) + self._offsets].long()
            x, y = blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()
            if self.pin_memory:
                x, y = x.pin_memory(), y.pin_memory()
            tokens = self.batch_size * self.block
            yield Batch(x, y, starts, tokens, tokens)
