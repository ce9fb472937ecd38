"""What a published image data set is: its names, its files, what opens them, and the statistics of its pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from pipeal.data.images.files import Files, Listing, open_files
from pipeal.data.images.split import ImageSplit
from pipeal.data.loading.sources import Published

Colour: TypeAlias = tuple[float, float, float]
Layout: TypeAlias = Callable[[Files], Listing]
"""Finds the classes and images among files."""


class Form(NamedTuple):
    """A way in which a data set may lie in the folder of all data.

    Attributes:
        path: Where; with a ``/`` at its end, a folder.
        is_there: Whether it is there, of the whole path.
        opened: Lists its images; of the whole path and the MD5 that an archive should have, None if that is not known.
    """

    path: str
    is_there: Callable[[Path], bool]
    opened: Callable[[Path, str | None], AbstractContextManager[Listing]]


@dataclass(frozen=True, kw_only=True)
class PublishedImages(Published):
    """An image data set. A new one is such a value in a file of its own, and a line in :mod:`pipeal.core.names`.

    Attributes:
        mean: Red, green and blue, of values in [0, 1].
        std: Their standard deviations.
        forms: In which it may lie there, first come first.
        fetched_to: The folder it is fetched to.
        make: Makes it on the spot, of a size and a seed: class names, what to train on, what to test on.
    """

    mean: Colour
    std: Colour
    forms: tuple[Form, ...] = ()
    fetched_to: str = ""
    make: Callable[[int, int], tuple[tuple[str, ...], ImageSplit, ImageSplit]] | None = None

    def found_in(self, root: Path) -> Form | None:
        """The form in which it lies in a folder of all data."""
        return next((form for form in self.forms if form.is_there(root / form.path)), None)


def zip_or_folder(name: str, layout: Layout) -> tuple[Form, ...]:
    """A zip archive, and what it unpacks to: in the folder of all data, or in a folder of their name there."""

    @contextmanager
    def opened(path: Path, _md5: str | None) -> Iterator[Listing]:
        with open_files(path) as files:
            yield layout(files)

    def is_folder(path: Path) -> bool:
        # One that holds no such folder holds no images: an archive's own, before the archive is there.
        return (path / "train").is_dir()

    return (
        Form(f"{name}/{name}.zip", Path.is_file, opened),
        Form(f"{name}.zip", Path.is_file, opened),
        Form(f"{name}/{name}/", is_folder, opened),
        Form(f"{name}/", is_folder, opened),
    )
