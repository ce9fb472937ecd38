"""Text as characters: an alphabet, a split by position, and random blocks whose targets are the next characters.

::

    text     F i r s t   C i t i z e n          9 of 10 parts to train on │ the last one to validate on
                                                (of which the end may be held out, to choose by)
    inputs   F i r s t   C i                    a block
    targets    i r s t   C i t                  the same, one character on
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from pipeal.core.atomic import write_whole
from pipeal.core.errors import DataError
from pipeal.core.rng import key_seed
from pipeal.data.batching.ranks import WHOLE, Share
from pipeal.data.checks import at_least
from pipeal.data.loading.download import Progress
from pipeal.data.loading.loader import Batch
from pipeal.data.loading.sources import Source, obtain
from pipeal.data.text.lines import plain_or_gz, read_lines
from pipeal.data.text.vocab import load_json

__all__ = ["Alphabet", "Characters", "RandomBlocks", "find_shakespeare", "read_characters"]

TRAINED_TENTHS = 9
"""So many tenths of a text, from its beginning, are trained on; the rest validates."""

_FORMAT = "pipeal-alphabet-1"
_PIECE = 10_000
"""Lines that are numbered at a time."""
_SHAKESPEARE = Source(
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "6fb458f1232090904fb40fe944165e91",
)


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
        return load_json(path, _FORMAT, "alphabet", lambda state: cls("".join(state["characters"])))


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


def read_characters(path: Path | str) -> Characters:
    """Reads a UTF-8 text, plain or ``.gz``; line ends become ``\\n``.

    Raises:
        DataError: It cannot be read, is not UTF-8, or is empty.
    """
    path = Path(path)
    # Read twice: the numbers of the characters are known once all were seen, and little is kept but a byte for each.
    # A pipe gives what it has once, and a second reader would wait for another writer: of it the text is kept.
    kept = None if os.path.isfile(path) else list(_pieces(path))
    seen: set[str] = set()
    count = fingerprint = 0
    for text in _pieces(path) if kept is None else kept:
        seen.update(text)
        count += len(text)
        fingerprint = crc32(text.encode("utf-32-le"), fingerprint)
    if count < 2:
        raise DataError(f"{path}: a text of {count} characters; expected some to train on and some to validate on")
    alphabet = Alphabet("".join(sorted(seen)))
    ids = torch.empty(count, dtype=torch.uint8 if len(alphabet) <= 256 else torch.int32)
    done = 0
    for text in _pieces(path) if kept is None else kept:
        ids[done : done + len(text)] = alphabet.encode(text)
        done += len(text)
    if done != count:
        raise DataError(f"{path}: {done:,} of {count:,} characters when read a second time; take a file that stays")
    middle = count * TRAINED_TENTHS // 10
    return Characters(alphabet, ids[:middle], ids[middle:], f"{fingerprint:08x}")


def _pieces(path: Path) -> Iterator[str]:
    """A text in pieces of whole lines, whose ends are ``\\n``."""
    lines = read_lines(path)
    while piece := "".join(islice(lines, _PIECE)):
        yield with_plain_ends(piece)


def with_plain_ends(text: str) -> str:
    """A text whose lines end as those of :func:`read_characters` do."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def find_shakespeare(root: Path | str, *, download: bool = True, progress: Progress | None = None) -> Path:
    """The file of the text that everybody begins with: 1,115,394 characters of Shakespeare's plays.

    It is looked for as ``tinyshakespeare/input.txt`` and as ``shakespeare.txt`` under ``root``, plain or ``.gz``,
    else downloaded.

    Raises:
        DataError: It is not there and not to be had, with what to fetch and where to put it.
    """
    root = Path(root)
    wanted = root / "tinyshakespeare" / _SHAKESPEARE.name
    found = plain_or_gz(wanted) or plain_or_gz(root / "shakespeare.txt")
    if found is None:
        lacking = f"shakespeare: no {wanted.name} (nor .gz) in {wanted.parent}"
        obtain(lacking, [_SHAKESPEARE], wanted.parent, [wanted.name], download=download, progress=progress)
    return found or wanted


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
        if len(text) <= block:
            raise DataError(
                f"{len(text)} characters, but a block of {block} with its targets takes {block + 1}; "
                "take a longer text or shorter blocks"
            )
        self.text = text
        self.block = at_least("block", block, 1)
        self.batch_size = at_least("batch_size", batch_size, 1)
        self.batches = at_least("batches", batches, 1)
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
