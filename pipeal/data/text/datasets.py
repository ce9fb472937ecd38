"""The text data sets by name, out of their published files or made on the spot.

A new one is a :class:`~pipeal.data.text.published.PublishedTexts` in a file of its own, and a line in
:mod:`pipeal.core.names`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeal.core.errors import DataError
from pipeal.core.names import FILE, TEXT
from pipeal.data.loading.download import Progress
from pipeal.data.loading.sources import Source, obtain
from pipeal.data.text.lines import plain_or_gz
from pipeal.data.text.published import PublishedTexts

__all__ = ["TEXT_DATASETS", "TextDataset", "TextSplit", "canonical_text_name", "load_text", "published_max_len"]

TEXT_DATASETS = tuple(TEXT.datasets)
"""Their canonical names."""

canonical_text_name = TEXT.dataset
"""The canonical name of a data set that is given in any spelling; :meth:`pipeal.core.names.Names.dataset`."""


@dataclass(frozen=True)
class TextSplit:
    """Texts and their labels, counted from 0; both of one length."""

    texts: list[str]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class TextDataset:
    """A data set: its canonical name, the class names in label order, and two splits."""

    name: str
    classes: tuple[str, ...]
    train: TextSplit
    test: TextSplit


def published_max_len(name: str) -> int:
    """How many words of a text published experiments with a data set keep; of the user's own, as many as of most."""
    if TEXT.dataset(name) == FILE:
        return PublishedTexts.max_len
    published: PublishedTexts = TEXT.load_dataset(name)
    return published.max_len


def load_text(
    name: str,
    root: Path | str | None = None,
    *,
    download: bool = True,
    seed: int = 0,
    sources: Mapping[str, Collection[Source]] | None = None,
    progress: Progress | None = None,
) -> TextDataset:
    """Loads a data set by any of its spellings.

    The files, plain or ``.gz``, are looked for in ``root/<folder>`` and in ``root`` itself, the folder being
    ``ag_news_csv``, ``dbpedia_csv`` or ``imdb``. What is missing is downloaded into the folder. ``toynews`` is
    embedded and needs no files.

    Args:
        name: See :meth:`pipeal.core.names.Names.dataset`.
        root: The folder of all data; ``data`` in the current one by default.
        download: Fetch missing files where the data set has a public address.
        seed: Of the random split of IMDb into 80 % train and 20 % test, and of ``toynews``.
        sources: Other addresses than the public ones, by canonical name.
        progress: Called during downloads.

    Raises:
        DataError: An unknown name; missing files that are not to be had, with what to fetch and where to put
            it; a malformed file, with its line.
    """
    if TEXT.dataset(name) == FILE:
        raise DataError(f"{name} is no published data set; a file of your own is read by load_text_file")
    published: PublishedTexts = TEXT.load_dataset(name)
    folder, files = _find(published, Path(root or "data"))
    missing = [wanted for wanted, path in files.items() if path is None]
    if missing:
        lacking = f"{published.name}: no {' or '.join(missing)} (nor .gz) in {folder}"
        addresses = published.sources if sources is None else sources.get(published.name, ())
        obtain(lacking, addresses, folder, missing, download=download, progress=progress)
    paths = {wanted: path or folder / wanted for wanted, path in files.items()}
    classes, train, test = published.read(paths, seed)
    return TextDataset(published.name, classes, TextSplit(*train), TextSplit(*test))


def _find(published: PublishedTexts, root: Path) -> tuple[Path, dict[str, Path | None]]:
    """The folder the files belong to, and the path of each, None where it is missing."""
    folders = (root / published.folder, root)
    for folder in folders:
        found = {wanted: plain_or_gz(folder / wanted) for wanted in published.files}
        if any(found.values()):
            return folder, found
    return folders[0], dict.fromkeys(published.files)
