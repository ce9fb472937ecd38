"""What a published text data set is: its names, its files, and what reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pipeal.data.loading.sources import Published

Labelled: TypeAlias = tuple[list[str], list[int]]
"""Texts and their labels, counted from 0."""


@dataclass(frozen=True, kw_only=True)
class PublishedTexts(Published):
    """A text data set. A new one is such a value in a file of its own, and a line in :mod:`pipeal.core.names`.

    Attributes:
        read: Takes the paths of the files by their names, and a seed; gives the class names in label order, what to
            train on, and what to test on.
        folder: Where its files lie in the folder of all data; they may also lie in that itself.
        files: Their names; each may lie there as ``.gz``, too. none of a data set that is made on the spot.
        max_len: How many words of a text are kept where nothing else is asked for: as in published experiments.
    """

    read: Callable[[Mapping[str, Path], int], tuple[tuple[str, ...], Labelled, Labelled]]
    folder: str = ""
    files: tuple[str, ...] = ()
    max_len: int = 128
