"""GloVe and fastText text files: read once as a stream, then from a memory-mapped binary form."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeal.core.atomic import replacing
from pipeal.core.errors import DataError
from pipeal.data.loading.cache_folder import kept, writing
from pipeal.data.text.lines import read_lines


@dataclass(frozen=True)
class VectorRows:
    """All vectors of a file: the words and, row by row, a memory-mapped ``(words, D)`` float32 matrix."""

    words: list[str]
    matrix: npt.NDArray[np.float32]


class VectorFile:
    """A text file of ``word v1 ... vD`` lines, plain or ``.gz``; fastText has ``count D`` on the first line.

    Words may hold spaces (glove.840B has some): the vector is the last D columns.

    Args:
        path: The file.
        dim: The wanted D; None takes the file's.

    Raises:
        DataError: The file cannot be read, its first line holds no vector, or D is another one.
    """

    def __init__(self, path: Path, dim: int | None = None) -> None:
        self.path = path
        self.has_header, self.dim = _first_line(path)
        if dim is not None and self.dim != dim:
            raise DataError(
                f"{path}, line {1 + self.has_header}: vectors of dimension {self.dim}, wanted {dim}; "
                "choose another file or another embedding dimension"
            )

    def rows(self) -> Iterator[tuple[int, str, list[str]]]:
        """Yields line number, word and the D numbers, still as text.

        Raises:
            DataError: A line with fewer columns, no vectors; or what :func:`pipeal.data.text.lines.read_lines` raises.
        """
        empty = True
        for number, line in enumerate(read_lines(self.path), start=1):
            if number == 1 and self.has_header:
                continue
            parts = line.rstrip(" \r\n").rsplit(" ", self.dim)
            if len(parts) != self.dim + 1 or not parts[0]:
                raise DataError(
                    f"{self.path}, line {number}: {max(len(parts) - 1, 0)} numbers after the word, "
                    f"wanted {self.dim}; the file is cut or damaged, fetch it again"
                )
            empty = False
            yield number, parts[0], parts[1:]
        if empty:
            raise DataError(f"{self.path}: no vectors under the header; fetch the file again")

    def numbers(self, line: int, texts: list[str]) -> array[float]:
        """The D numbers of a line as float32.

        Raises:
            DataError: Something that is no finite number.
        """
        try:
            numbers = array("f", map(float, texts))
            if isfinite(sum(numbers)):
                return numbers
            found = "a number that is not finite"
        except ValueError as error:
            found = str(error)
        raise DataError(f"{self.path}, line {line}: {found}; wanted a word and {self.dim} numbers")

    def cached(self, cache: bool | Path | str = True) -> VectorRows | None:
        """All rows, from the binary form; the first call makes it.

        The form is two files, named after the text file's place, size and time of change: ``.words`` (UTF-8, one a
        line) and ``.f32`` (the rows, end to end).

        Args:
            cache: See :func:`pipeal.data.loading.cache_folder.kept`.

        Raises:
            CacheError: They cannot be written.
            DataError: What :meth:`rows` and :meth:`numbers` raise.
        """
        stat = self.path.stat()
        key = hashlib.blake2b(f"{stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=8).hexdigest()
        return kept(self.path, "vectors", "", key, self._open, self._convert, cache)

    def _convert(self, stem: Path) -> None:
        words_path, matrix_path = _form(stem)
        with (
            writing(),
            replacing(words_path) as words_aside,
            replacing(matrix_path) as matrix_aside,
            words_aside.open("w", encoding="utf-8", newline="\n") as words,
            matrix_aside.open("wb") as matrix,
        ):
            for number, word, texts in self.rows():
                words.write(word + "\n")
                matrix.write(self.numbers(number, texts))

    def _open(self, stem: Path) -> VectorRows | None:
        """None where there is no binary form, or half of one."""
        words_path, matrix_path = _form(stem)
        try:
            # As bytes: reading as text would take a "\r" within a word for the end of a line.
            words = words_path.read_bytes().decode("utf-8").split("\n")[:-1]
            if not words or matrix_path.stat().st_size != 4 * self.dim * len(words):
                return None
        except (OSError, ValueError):
            return None
        return VectorRows(words, np.memmap(matrix_path, np.float32, "r", shape=(len(words), self.dim)))


def _form(stem: Path) -> tuple[Path, Path]:
    return stem.with_name(stem.name + ".words"), stem.with_name(stem.name + ".f32")


def _first_line(path: Path) -> tuple[bool, int]:
    """Whether the first line is a header, and D."""
    lines = read_lines(path)
    first = next(lines, "").split()
    lines.close()
    if len(first) == 2 and all(part.isdecimal() for part in first):
        if int(first[1]) == 0 and int(first[0]) != 1:
            raise DataError(f"{path}, line 1: vectors of dimension 0; fetch the file again")
        if int(first[1]):
            return True, int(first[1])
    # Counted from the end, since a word may hold spaces; a word that is a number itself is not one more.
    dim = 0
    while dim < len(first) - 1 and _is_number(first[-1 - dim]):
        dim += 1
    if not dim:
        found = " ".join(first)[:60]
        raise DataError(f"{path}, line 1: {found!r}; wanted a word and its vector, or the header 'count dim'")
    return False, dim


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
