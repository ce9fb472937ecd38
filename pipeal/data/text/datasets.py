"""The text data sets by name, out of their published files or made on the spot."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeal.core.errors import DataError
from pipeal.core.names import TEXT
from pipeal.data.loading.download import Progress
from pipeal.data.loading.sources import SOURCES, Source, fetch, unpack_present
from pipeal.data.text import toynews as embedded
from pipeal.data.text.lines import read_lines
from pipeal.data.text.rows import SENTIMENTS, read_labelled, read_reviews

__all__ = ["TEXT_DATASETS", "TextDataset", "TextSplit", "canonical_text_name", "load_text"]

TEXT_DATASETS = TEXT.datasets
canonical_text_name = TEXT.dataset


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


@dataclass(frozen=True)
class _Published:
    """The layout of a published data set: its folder, its files, its classes."""

    folder: str
    files: tuple[str, ...]
    classes: tuple[str, ...]


_AGNEWS_CLASSES = ("World", "Sports", "Business", "Sci/Tech")
_DBPEDIA_CLASSES = (
    *("Company", "EducationalInstitution", "Artist", "Athlete", "OfficeHolder", "MeanOfTransportation"),
    *("Building", "NaturalPlace", "Village", "Animal", "Plant", "Album", "Film", "WrittenWork"),
)
_PUBLISHED = {
    "agnews": _Published("ag_news_csv", ("train.csv", "test.csv"), _AGNEWS_CLASSES),
    "dbpedia": _Published("dbpedia_csv", ("train.csv", "test.csv"), _DBPEDIA_CLASSES),
    "imdb": _Published("imdb", ("IMDB_Dataset.csv",), SENTIMENTS),
}


def load_text(
    name: str,
    root: Path | None = None,
    *,
    download: bool = True,
    seed: int = 0,
    sources: Mapping[str, Collection[Source]] = SOURCES,
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
        sources: The public addresses, by canonical name.
        progress: Called during downloads.

    Raises:
        DataError: An unknown name; missing files that are not to be had, with what to fetch and where to put
            it; a malformed file, with its line.
    """
    known = TEXT.dataset(name)
    if known == "toynews":
        return _toynews(seed)
    published = _PUBLISHED[known]
    folder, files = _find(published, root or Path("data"))
    missing = [wanted for wanted, path in files.items() if path is None]
    addresses = sources.get(known, ())
    if missing:
        unpack_present(addresses, folder, missing)
        missing = [wanted for wanted in missing if not (folder / wanted).is_file()]
        if missing and download and addresses:
            fetch(addresses, folder, missing, progress)
        elif missing:
            raise DataError(_how_to_get(known, missing, folder, addresses))
    paths = {wanted: path or folder / wanted for wanted, path in files.items()}
    if known == "imdb":
        train, test = _shuffle_split(*read_reviews(paths["IMDB_Dataset.csv"]), seed=seed)
        return TextDataset(known, published.classes, train, test)
    classes = _class_names(paths["train.csv"].with_name("classes.txt"), published.classes)
    splits = [TextSplit(*read_labelled(paths[wanted], len(classes))) for wanted in published.files]
    return TextDataset(known, classes, *splits)


def _find(published: _Published, root: Path) -> tuple[Path, dict[str, Path | None]]:
    """The folder the files belong to, and the path of each, None where it is missing."""
    folders = (root / published.folder, root)
    for folder in folders:
        found = {wanted: _plain_or_gz(folder / wanted) for wanted in published.files}
        if any(found.values()):
            return folder, found
    return folders[0], dict.fromkeys(published.files)


def _plain_or_gz(path: Path) -> Path | None:
    zipped = path.with_name(path.name + ".gz")
    return path if path.is_file() else zipped if zipped.is_file() else None


def _how_to_get(name: str, missing: list[str], folder: Path, sources: Collection[Source]) -> str:
    urls = [source.url for source in sources if set(source.files) & set(missing)]
    what = f"fetch {' and '.join(urls)}, and put it there" if urls else "put it there"
    return f"{name}: no {' or '.join(missing)} (nor .gz) in {folder}; {what}, or name another data root"


def _class_names(path: Path, default: tuple[str, ...]) -> tuple[str, ...]:
    """The lines of ``classes.txt``; the default where there is no such file."""
    if not path.is_file():
        return default
    names = tuple(line.strip() for line in read_lines(path) if line.strip())
    # Another count is another data set: without this, AG News files would pass for DBpedia.
    if len(names) != len(default):
        raise DataError(f"{path}: {len(names)} class names, wanted {len(default)}; is it another data set's?")
    return names


def _shuffle_split(texts: list[str], labels: list[int], *, seed: int) -> tuple[TextSplit, TextSplit]:
    """A random 80 % to train on and 20 %, rounded up, to test on."""
    order = np.random.default_rng(seed).permutation(len(texts)).tolist()
    tests = -(-len(texts) // 5)
    parts = order[tests:], order[:tests]
    if not parts[0]:
        raise DataError(f"imdb: {len(texts)} review cannot be split into train and test; wanted at least 2")
    train, test = (TextSplit([texts[i] for i in part], [labels[i] for i in part]) for part in parts)
    return train, test


def _toynews(seed: int) -> TextDataset:
    train, test = (TextSplit(*split) for split in embedded.toynews(seed))
    return TextDataset("toynews", embedded.CLASSES, train, test)
