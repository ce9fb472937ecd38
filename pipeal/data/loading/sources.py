"""Where the data sets can be fetched, and how text archives become the published CSV files."""

from __future__ import annotations

import csv
import re
import shutil
import tarfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pipeal.core.atomic import replacing
from pipeal.core.errors import DataError
from pipeal.data.loading.download import Progress, download, verify

__all__ = ["SOURCES", "Source", "unpack_imdb", "unpack_members"]

Unpack = Callable[[Path, Path, Collection[str]], None]
"""Takes an archive, a folder and the names of the files to make there."""


@dataclass(frozen=True)
class Source:
    """One file on the network and the data files it gives.

    Attributes:
        url: Its address.
        md5: Its wanted MD5; None accepts any.
        files: The names of the data files it gives.
        unpack: Makes them out of an archive; None where the file itself is the one data file.
    """

    url: str
    md5: str | None
    files: tuple[str, ...]
    unpack: Unpack | None = None

    @property
    def name(self) -> str:
        """The name under which it lies in the data folder."""
        return self.url.rsplit("/", 1)[-1] if self.unpack else self.files[0]


def unpack_members(archive: Path, folder: Path, files: Collection[str]) -> None:
    """Copies the members with those names, whatever folder they have in the archive, into ``folder``.

    Members are read, not extracted: no path in the archive can reach outside the folder.

    Raises:
        DataError: The archive is broken or lacks one of the files.
    """
    left = set(files)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                content = tar.extractfile(member) if name in left and member.isfile() else None
                if content is not None:
                    with content, replacing(folder / name) as aside, aside.open("wb") as out:
                        shutil.copyfileobj(content, out)
                    left.remove(name)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{archive}: broken archive ({error}); delete it and fetch it again") from error
    if left:
        raise DataError(f"{archive}: holds no {', '.join(sorted(left))}; delete it and fetch it again")


def unpack_imdb(archive: Path, folder: Path, files: Collection[str]) -> None:
    """Turns ``aclImdb/{train,test}/{pos,neg}/*.txt`` into one ``review,sentiment`` file, in archive order.

    Raises:
        DataError: The archive is broken, holds no reviews, or one of them is not UTF-8.
    """
    (name,) = files
    review = re.compile(r"(?:^|/)(?:train|test)/(pos|neg)/[^/]+\.txt$")
    rows = 0
    with replacing(folder / name) as aside:
        try:
            with aside.open("w", encoding="utf-8", newline="") as out, tarfile.open(archive) as tar:
                writer = csv.writer(out, lineterminator="\n")
                writer.writerow(["review", "sentiment"])
                for member in tar:
                    match = review.search(member.name)
                    content = tar.extractfile(member) if match and member.isfile() else None
                    if match is None or content is None:
                        continue
                    text = content.read().decode("utf-8")
                    writer.writerow([text, "positive" if match[1] == "pos" else "negative"])
                    rows += 1
        except (tarfile.TarError, EOFError, UnicodeDecodeError) as error:
            raise DataError(f"{archive}: broken archive ({error}); delete it and fetch it again") from error
        if not rows:
            raise DataError(f"{archive}: holds no reviews; delete it and fetch it again")


def fetch(sources: Collection[Source], folder: Path, missing: Collection[str], progress: Progress | None) -> None:
    """Makes the missing files in ``folder``; an archive is removed once it is unpacked.

    Raises:
        DataError: What :func:`pipeal.data.loading.download.download` raises, with what to do by hand.
    """
    for source in sources:
        files = [name for name in source.files if name in missing]
        if not files:
            continue
        try:
            fetched = download(source.url, folder / source.name, md5=source.md5, progress=progress)
        except DataError as error:
            raise DataError(f"{error}; or fetch it elsewhere and put {source.name} into {folder}") from error
        if source.unpack:
            source.unpack(fetched, folder, files)
            fetched.unlink()


def unpack_present(sources: Collection[Source], folder: Path, missing: Collection[str]) -> None:
    """Makes missing files out of archives that the user put into ``folder``; they stay.

    Raises:
        DataError: An archive has another checksum or is broken.
    """
    for source in sources:
        files = [name for name in source.files if name in missing]
        if files and source.unpack and (folder / source.name).is_file():
            verify(folder / source.name, md5=source.md5)
            source.unpack(folder / source.name, folder, files)


_AGNEWS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"

SOURCES: Mapping[str, tuple[Source, ...]] = {
    # Checksums as torchtext lists them.
    "agnews": (
        Source(_AGNEWS + "train.csv", "b1a00f826fdfbd249f79597b59e1dc12", ("train.csv",)),
        Source(_AGNEWS + "test.csv", "d52ea96a97a2d943681189a97654912d", ("test.csv",)),
    ),
    # Address and checksum as fastText's tests/fetch_test_data.sh lists them.
    "dbpedia": (
        Source(
            "https://github.com/le-scientifique/torchDatasets/raw/master/dbpedia_csv.tar.gz",
            "8139d58cf075c7f70d085358e73af9b3",
            ("train.csv", "test.csv"),
            unpack_members,
        ),
    ),
    # Address and checksum as torchtext lists them.
    "imdb": (
        Source(
            "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
            "7c2ac02c03563afcf9b574c7e56c153a",
            ("IMDB_Dataset.csv",),
            unpack_imdb,
        ),
    ),
    "shakespeare": (
        Source(
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            "6fb458f1232090904fb40fe944165e91",
            ("input.txt",),
        ),
    ),
    # Image archives stay as they are, and are read as they are. Checksums as torchvision and common loaders list them.
    "tinyimagenet": (
        Source(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "90528d7ca1a48142e341f4ef8d21d0de",
            ("tiny-imagenet-200.zip",),
        ),
    ),
    "cifar10": (
        Source(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            ("cifar-10-python.tar.gz",),
        ),
    ),
    "cifar100": (
        Source(
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            ("cifar-100-python.tar.gz",),
        ),
    ),
}
"""The public addresses by data set."""
