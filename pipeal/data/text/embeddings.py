"""Pretrained word vectors for a vocabulary."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pipeal.core.errors import DataError, unknown_name
from pipeal.data.text.vector_file import VectorFile
from pipeal.data.text.vocab import Vocab

__all__ = ["VectorTable", "find_vectors", "list_vectors", "load_vectors", "vectors_from_torchtext"]

_FOLDERS = ("", "glove", "embedding")
_PATTERNS = {
    "glove": ("glove.6B.{dim}d*.txt", "glove.*.{dim}d*.txt"),
    "fasttext": ("wiki-news-{dim}d-1M*.vec", "crawl-{dim}d-2M*.vec"),
}
_ADDRESSES = {
    "glove": "https://nlp.stanford.edu/data/glove.6B.zip",
    "fasttext": "https://dl.fbaipublicfiles.com/fasttext/vectors-english/wiki-news-300d-1M.vec.zip",
}


class TorchtextVectors(Protocol):
    """What ``torchtext.vocab.Vectors`` offers, as far as it is needed here."""

    stoi: Mapping[str, int]
    vectors: Tensor
    dim: int


@dataclass(frozen=True, eq=False)
class VectorTable:
    """The rows of an embedding layer.

    Attributes:
        weight: ``(V, D)`` float32, row ``i`` for word ``i``; zero for the padding word.
        found: How many words of the vocabulary have a pretrained vector.
    """

    weight: npt.NDArray[np.float32]
    found: int


def load_vectors(
    path: Path | str,
    vocab: Vocab,
    dim: int | None = None,
    *,
    cache: bool | Path | str = True,
    seed: int = 0,
) -> VectorTable:
    """Reads the vectors of a vocabulary's words from a GloVe or fastText text file, plain or ``.gz``.

    Words that the file lacks get random vectors: normal, with the spread of the vectors found.

    Args:
        path: The file.
        vocab: The words.
        dim: The wanted dimension D; None takes the file's.
        cache: Keep a binary form in the user's cache folder (or in this one) and read that from the second time on;
            False reads the text and writes nothing. Where the user's cache folder cannot be written to, so does True.
        seed: Of the random vectors.

    Raises:
        DataError: Another dimension or a malformed line (file and line), or a file that cannot be read.
    """
    file = VectorFile(Path(path), dim)
    get = vocab.indices.get
    cached = file.cached(cache)
    if cached is not None:
        places: dict[int, int] = {}
        for place, word in enumerate(cached.words):
            index = get(word)
            if index is not None:
                places.setdefault(index, place)
        return _table(list(places), cached.matrix[list(places.values())], vocab, seed)
    known: dict[int, array[float]] = {}
    for line, word, texts in file.rows():
        index = get(word)
        if index is not None and index not in known:
            known[index] = file.numbers(line, texts)
    rows = np.array(list(known.values()), dtype=np.float32).reshape(len(known), file.dim)
    return _table(list(known), rows, vocab, seed)


def vectors_from_torchtext(vectors: TorchtextVectors, vocab: Vocab, *, seed: int = 0) -> VectorTable:
    """Takes the rows of a ``torchtext.vocab.Vectors`` object, or of what looks like one.

    Raises:
        DataError: It is no such object, or its parts do not fit each other.
    """
    try:
        stoi, matrix, dim = vectors.stoi, vectors.vectors.detach().cpu().float().numpy(), vectors.dim
    except AttributeError as error:
        raise DataError(f"{type(vectors).__name__} is no torchtext vectors object: {error}") from error
    if matrix.shape != (len(stoi), dim):
        raise DataError(f"vectors of shape {matrix.shape}, wanted ({len(stoi)}, {dim}) by its stoi and dim")
    places = {index: stoi[word] for word, index in vocab.indices.items() if word in stoi}
    return _table(list(places), matrix[list(places.values())], vocab, seed)


def find_vectors(root: Path | str, kind: str = "glove", dim: int = 300) -> Path:
    """Finds a published vector file under ``root``, ``root/glove`` or ``root/embedding``.

    Args:
        root: The folder of all data.
        kind: ``glove`` (6B before others) or ``fasttext`` (wiki-news before crawl).
        dim: The dimension, as it stands in the file's name.

    Raises:
        DataError: An unknown kind; or no such file, with what to fetch and where to put it.
    """
    if kind not in _PATTERNS:
        raise DataError(unknown_name("kind of vectors", kind, _PATTERNS))
    root = Path(root)
    found = list_vectors(root).get((kind, dim))
    if found is None:
        names = ", ".join(pattern.format(dim=dim) for pattern in _PATTERNS[kind])
        raise DataError(
            f"no {kind} vectors of dimension {dim} ({names}, plain or .gz) in {root}, its glove or its embedding; "
            f"fetch {_ADDRESSES[kind]}, unpack it into {root / 'glove'}, or choose another dimension"
        )
    return found


def list_vectors(root: Path | str) -> dict[tuple[str, int], Path]:
    """The published vector files under ``root``: by kind and dimension, what :func:`find_vectors` finds.

    Nothing of the files is read, and there may be none.
    """
    found: dict[tuple[str, int], Path] = {}
    for kind, patterns in _PATTERNS.items():
        for name in (pattern.format(dim="*") + end for pattern in patterns for end in ("", ".gz")):
            for path in (path for folder in _FOLDERS for path in sorted((Path(root) / folder).glob(name))):
                dim = re.search(r"[.-](\d+)d", path.name)
                if dim:
                    found.setdefault((kind, int(dim[1])), path)
    return found


def _table(indices: list[int], rows: npt.NDArray[np.float32], vocab: Vocab, seed: int) -> VectorTable:
    """Puts ``rows`` at ``indices``, random vectors elsewhere, zeros at the padding word."""
    spread = rows.std() if rows.size else rows.shape[1] ** -0.5
    # Drawn for every word, so that a word's random vector does not depend on which others were found.
    random = np.random.default_rng(seed)
    weight = random.standard_normal((len(vocab), rows.shape[1]), dtype=np.float32) * np.float32(spread)
    weight[indices] = rows
    weight[vocab.pad_index] = 0
    return VectorTable(weight, len(indices) - (vocab.pad_index in indices))
