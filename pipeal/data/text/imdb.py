"""IMDb: 50,000 film reviews, positive and negative."""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from pipeal.core.atomic import replacing
from pipeal.core.errors import DataError
from pipeal.data.loading.sources import Source, reading
from pipeal.data.text.published import Labelled, PublishedTexts
from pipeal.data.text.rows import read_rows

__all__ = ["unpack_imdb"]

_FILE = "IMDB_Dataset.csv"
_SENTIMENTS = ("positive", "negative")
"""The labels in class order: 0 for positive and 1 for negative, as in the published AL code."""


def read_reviews(path: Path) -> Labelled:
    """Reads ``review,sentiment`` rows under a header of that name.

    Raises:
        DataError: Another header, a wrong number of columns, an unknown sentiment, an empty review, open
            quotes, no rows; or what :func:`pipeal.data.text.lines.read_lines` raises.
    """
    texts: list[str] = []
    labels: list[int] = []
    for where, (text, label) in read_rows(path, ("review", "sentiment"), header=True):
        review, sentiment = text.strip(), label.strip().lower()
        if sentiment not in _SENTIMENTS:
            raise DataError(f"{where}: sentiment {label[:60]!r}, wanted positive or negative")
        if not review:
            raise DataError(f"{where}: the review is empty; fill in or delete the row")
        texts.append(review)
        labels.append(_SENTIMENTS.index(sentiment))
    return texts, labels


def _read_split(paths: Mapping[str, Path], seed: int) -> tuple[tuple[str, ...], Labelled, Labelled]:
    """A random 80 % to train on and 20 %, rounded up, to test on."""
    texts, labels = read_reviews(paths[_FILE])
    order = np.random.default_rng(seed).permutation(len(texts)).tolist()
    tests = -(-len(texts) // 5)
    if tests == len(texts):
        raise DataError(f"imdb: {len(texts)} review cannot be split into train and test; wanted at least 2")
    train, test = (([texts[i] for i in part], [labels[i] for i in part]) for part in (order[tests:], order[:tests]))
    return _SENTIMENTS, train, test


def unpack_imdb(archive: Path, folder: Path, files: Collection[str]) -> None:
    """Turns ``aclImdb/{train,test}/{pos,neg}/*.txt`` into one ``review,sentiment`` file, in archive order.

    Raises:
        DataError: The archive is broken, holds no reviews, or one of them is not UTF-8.
    """
    (name,) = files
    review = re.compile(r"(?:^|/)(?:train|test)/(pos|neg)/[^/]+\.txt$")
    rows = 0
    with (
        reading(archive) as tar,
        replacing(folder / name) as aside,
        aside.open("w", encoding="utf-8", newline="") as out,
    ):
        # Python before 3.13 puts no quotes around a carriage return, which readers take for the end of a row.
        writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL)
        writer.writerow(["review", "sentiment"])
        for member in tar:
            match = review.search(member.name)
            content = tar.extractfile(member) if match and member.isfile() else None
            if match and content:
                text = content.read().decode("utf-8")
                writer.writerow([text, "positive" if match[1] == "pos" else "negative"])
                rows += 1
        if not rows:
            raise DataError(f"{archive}: holds no reviews; delete it and fetch it again")


IMDB = PublishedTexts(
    name="imdb",
    folder="imdb",
    files=(_FILE,),
    sources=(
        # Address and checksum as torchtext lists them.
        Source(
            "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
            "7c2ac02c03563afcf9b574c7e56c153a",
            (_FILE,),
            unpack_imdb,
        ),
    ),
    read=_read_split,
    max_len=256,
)
