"""Images decoded once, by several threads, and kept as memory-mapped files."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from glob import escape
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np

from pipeal.core.atomic import replacing, write_whole
from pipeal.core.errors import DataError
from pipeal.data.images.decode import BrokenImageError, Pixels
from pipeal.data.images.files import Listed, Listing, fingerprint
from pipeal.data.images.split import ImageSplit
from pipeal.data.loading.cache_folder import CacheError, writing
from pipeal.data.loading.download import Progress

__all__ = ["OnBroken"]

OnBroken: TypeAlias = Literal["raise", "skip"]

FORMAT = 1
"""Raised whenever other pixels would come out of the same files."""

_CHUNK = 64
_SPLITS = ("train", "test")


@dataclass(frozen=True)
class Decoded:
    """Class names in label order, and two splits."""

    classes: tuple[str, ...]
    train: ImageSplit
    test: ImageSplit


class UnreadableError(DataError):
    """The images are at fault, not the place the cache is written to."""


def in_memory(listing: Listing, path: Path, size: int, on_broken: OnBroken, threads: int, tell: Progress) -> Decoded:
    """Decodes all images into memory; arguments and errors as in :func:`cached`."""
    splits = []
    for split in _SPLITS:
        listed: Listed = getattr(listing, split)
        pixels = np.empty((len(listed.paths), size, size, 3), np.uint8)
        labels, broken, done = [], [], 0
        for chunk in _chunks(listed, split, path, size, on_broken, threads, tell):
            pixels[done : done + len(chunk.labels)] = chunk.pixels
            done += len(chunk.labels)
            labels += chunk.labels
            broken += chunk.broken
        splits.append(ImageSplit(pixels[:done], np.array(labels, np.int64), tuple(name for name, _ in broken)))
    return Decoded(listing.classes, *splits)


def cached(
    opened: Callable[[], AbstractContextManager[Listing]],
    path: Path,
    folder: Path,
    *,
    size: int,
    on_broken: OnBroken,
    threads: int,
    tell: Progress,
) -> Decoded:
    """The decoded images out of their files in ``folder``; the first call makes them.

    For each split there are ``.npy`` files of pixels and labels, and for both a ``.json``, written last, which
    counts them. A set that is not whole, or of a source that changed, is made again, and older ones are removed.

    Args:
        opened: Opens the source; called only where something has to be decoded.
        path: The source: an archive or a folder.
        folder: Where the files go.
        size: The side of the square images, in pixels.
        on_broken: What to do about an image that cannot be decoded: stop, or leave it out. The cache remembers
            what was left out, and ``raise`` raises also where ``skip`` made it.
        threads: How many decode.
        tell: Called with the split, the images done and the images there are.

    Raises:
        CacheError: The files cannot be written.
        DataError: The source cannot be read, or an image is broken.
    """
    place = blake2b(str(path.resolve()).encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
    known = f"{path.name}.{size}px.{place}."
    stem = folder / f"{known}{fingerprint(path)}-{FORMAT}"
    found = _open(stem, path, size, on_broken)
    if found is None:
        with opened() as listing:
            _write(stem, listing, path, size, on_broken, threads, tell)
        for old in folder.glob(escape(known) + "*"):
            if not old.name.startswith(stem.name):
                # Another process may be faster, or own the file; it only takes room.
                with suppress(OSError):
                    old.unlink()
        found = _open(stem, path, size, on_broken)
    if found is None:
        raise CacheError(
            f"{stem}.*: not what was just written; check the disk, or choose another folder by data.cache_dir"
        )
    return found


@dataclass(frozen=True)
class _Chunk:
    pixels: Pixels
    labels: list[int]
    broken: list[tuple[str, str]]


def _chunks(
    listed: Listed, split: str, path: Path, size: int, on_broken: OnBroken, threads: int, tell: Progress
) -> Generator[_Chunk, None, None]:
    """Decodes by threads, in order; never many chunks ahead of who takes them."""

    def decode(start: int) -> _Chunk:
        good, labels, broken = [], [], []
        for index in range(start, min(start + _CHUNK, count)):
            try:
                good.append(listed.pixels(index, size))
                labels.append(listed.labels[index])
            except BrokenImageError as error:
                broken.append((listed.paths[index], str(error)))
                if on_broken == "raise":
                    break
        return _Chunk(np.stack(good) if good else np.empty((0, size, size, 3), np.uint8), labels, broken)

    count = len(listed.paths)
    waiting: deque[Future[_Chunk]] = deque()
    with ThreadPoolExecutor(threads, "pipeal-decode") as pool:
        try:
            for start in range(0, count + _CHUNK * 2 * threads, _CHUNK):
                if start < count:
                    waiting.append(pool.submit(decode, start))
                if waiting and (len(waiting) > 2 * threads or start >= count):
                    chunk = waiting.popleft().result()
                    if on_broken == "raise":
                        _refuse(path, chunk.broken)
                    yield chunk
                    tell(split, min(start + _CHUNK - _CHUNK * len(waiting), count), count)
        finally:
            for future in waiting:
                future.cancel()


def _refuse(path: Path, broken: Sequence[tuple[str, str]]) -> None:
    if broken:
        name, reason = broken[0]
        raise UnreadableError(
            f"{path}: broken image {name} ({reason}); fetch it again, or leave broken images out by "
            "on_broken: skip (data.on_broken)"
        )


def _write(
    stem: Path, listing: Listing, path: Path, size: int, on_broken: OnBroken, threads: int, tell: Progress
) -> None:
    facts: dict[str, Any] = {"source": str(path), "size": size, "classes": listing.classes}
    with writing():
        for split in _SPLITS:
            listed: Listed = getattr(listing, split)
            labels, broken = [], []
            with replacing(_file(stem, split)) as aside, aside.open("wb") as out:
                # The count is known at the end; numpy pads the header so that it keeps its length.
                room = out.write(_header(len(listed.paths), size))
                # Closed whatever happens: it owns threads.
                with closing(_chunks(listed, split, path, size, on_broken, threads, tell)) as chunks:
                    for chunk in chunks:
                        out.write(chunk.pixels.tobytes())
                        labels += chunk.labels
                        broken += chunk.broken
                header = _header(len(labels), size)
                assert len(header) == room
                out.seek(0)
                out.write(header)
            with replacing(_file(stem, split, "labels")) as aside, aside.open("wb") as out:
                np.save(out, np.array(labels, np.int64))
            facts[split] = {"count": len(labels), "broken": broken}
        write_whole(_facts(stem), json.dumps(facts))


def _open(stem: Path, path: Path, size: int, on_broken: OnBroken) -> Decoded | None:
    """None where the files are not there, or not whole."""
    try:
        facts = json.loads(_facts(stem).read_text(encoding="utf-8"))
        splits = []
        for split in _SPLITS:
            count, broken = facts[split]["count"], facts[split]["broken"]
            file = _file(stem, split)
            # NumPy refuses to map a file that is shorter than its header says.
            pixels = np.load(file, mmap_mode="r") if count else np.load(file)
            labels = np.load(_file(stem, split, "labels"))
            if pixels.shape != (count, size, size, 3) or pixels.dtype != np.uint8 or labels.shape != (count,):
                return None
            splits.append(ImageSplit(pixels, labels, tuple(name for name, _ in broken), file=file))
            if on_broken == "raise":
                _refuse(path, broken)
        return Decoded(tuple(facts["classes"]), *splits)
    except UnreadableError:
        raise
    except (OSError, ValueError, EOFError, LookupError, TypeError):
        return None


def _header(count: int, size: int) -> bytes:
    out: BinaryIO = BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": (count, size, size, 3)})
    out.seek(0)
    return out.read()


def _file(stem: Path, split: str, what: str = "pixels") -> Path:
    return stem.with_name(f"{stem.name}.{split}.{what}.npy")


def _facts(stem: Path) -> Path:
    return stem.with_name(stem.name + ".json")
