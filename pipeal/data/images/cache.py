"""Images decoded once, by several threads, and kept as memory-mapped files."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeal.core.atomic import replacing, write_whole
from pipeal.core.errors import DataError
from pipeal.data.images.decode import BrokenImageError, Pixels
from pipeal.data.images.files import Listed, Listing, fingerprint
from pipeal.data.images.split import ImageSplit
from pipeal.data.loading.cache_folder import kept, writing
from pipeal.data.loading.download import Progress

__all__ = ["OnBroken"]

OnBroken: TypeAlias = Literal["raise", "skip"]
"""What a broken image does: end the run, or be left out and counted."""

Decoded: TypeAlias = tuple[tuple[str, ...], ImageSplit, ImageSplit]
"""Class names in label order, what to train on, what to test on."""

FORMAT = 1
"""Raised whenever other pixels would come out of the same files."""

_CHUNK = 64
_SPLITS = ("train", "test")


@dataclass(frozen=True)
class Decoding:
    """What is decoded, and how.

    Attributes:
        path: The source: an archive or a folder.
        opened: Opens it; called only where something has to be decoded.
        size: The side of the square images, in pixels.
        on_broken: What to do about an image that cannot be decoded: stop, or leave it out.
        threads: How many decode.
        tell: Called with the split, the images done and the images there are.
    """

    path: Path
    opened: Callable[[], AbstractContextManager[Listing]]
    size: int
    on_broken: OnBroken
    threads: int
    tell: Progress


class UnreadableError(DataError):
    """The images are at fault, not the place the cache is written to."""


def decoded(job: Decoding, cache: bool | Path | str) -> Decoded:
    """The decoded images out of their files in the cache; the first call makes them. Without a cache, in memory.

    For each split there are ``.npy`` files of pixels and labels, and for both a ``.json``, written last, which
    counts them. A set that is not whole, or of a source that changed, is made again, and older ones are removed. The
    cache remembers which broken images were left out, and ``raise`` raises also where ``skip`` made it.

    Args:
        job: What is decoded, and how.
        cache: See :func:`pipeal.data.loading.cache_folder.kept`.

    Raises:
        CacheError: The files cannot be written.
        DataError: The source cannot be read, or an image is broken.
    """
    key = f"{fingerprint(job.path)}-{FORMAT}"
    found = kept(job.path, "images", f".{job.size}px", key, partial(_read, job), partial(_write, job), cache)
    return _in_memory(job) if found is None else found


def _in_memory(job: Decoding) -> Decoded:
    splits = []
    with job.opened() as listing:
        for split in _SPLITS:
            out = BytesIO()
            labels, broken = _decode(job, getattr(listing, split), split, out)
            pixels = np.frombuffer(out.getbuffer(), np.uint8).reshape(-1, job.size, job.size, 3)
            splits.append(ImageSplit(pixels, labels, tuple(name for name, _ in broken)))
    return listing.classes, splits[0], splits[1]


def _decode(
    job: Decoding, listed: Listed, split: str, out: BinaryIO
) -> tuple[npt.NDArray[np.int64], list[tuple[str, str]]]:
    """Decodes a split by threads, in order and never many chunks ahead, and writes the pixels.

    Returns:
        The labels, and the broken images: path and reason.
    """

    def decode(start: int) -> tuple[Pixels, list[int], list[tuple[str, str]]]:
        pixels, good, bad = [], [], []
        for index in range(start, min(start + _CHUNK, count)):
            try:
                pixels.append(listed.pixels(index, job.size))
                good.append(listed.labels[index])
            except BrokenImageError as error:
                bad.append((listed.paths[index], str(error)))
                if job.on_broken == "raise":
                    break
        return np.array(pixels, np.uint8), good, bad

    def take() -> None:
        pixels, good, bad = waiting.popleft().result()
        if job.on_broken == "raise":
            _refuse(job.path, bad)
        out.write(pixels.tobytes())
        labels.extend(good)
        broken.extend(bad)
        job.tell(split, len(labels) + len(broken), count)

    count = len(listed.paths)
    labels: list[int] = []
    broken: list[tuple[str, str]] = []
    waiting: deque[Future[tuple[Pixels, list[int], list[tuple[str, str]]]]] = deque()
    with ThreadPoolExecutor(job.threads, "pipeal-decode") as pool:
        try:
            for start in range(0, count, _CHUNK):
                waiting.append(pool.submit(decode, start))
                if len(waiting) > 2 * job.threads:
                    take()
            while waiting:
                take()
        finally:
            for future in waiting:
                future.cancel()
    return np.array(labels, np.int64), broken


def _refuse(path: Path, broken: Sequence[tuple[str, str]]) -> None:
    if broken:
        name, reason = broken[0]
        raise UnreadableError(
            f"{path}: broken image {name} ({reason}); fetch it again, or leave broken images out by "
            "on_broken: skip (data.on_broken)"
        )


def _write(job: Decoding, stem: Path) -> None:
    with job.opened() as listing, writing():
        facts: dict[str, Any] = {"source": str(job.path), "size": job.size, "classes": listing.classes}
        for split in _SPLITS:
            listed: Listed = getattr(listing, split)
            with replacing(_file(stem, split)) as aside, aside.open("wb") as out:
                # The count is known at the end; numpy pads the header so that it keeps its length.
                _write_header(out, len(listed.paths), job.size)
                room = out.tell()
                labels, broken = _decode(job, listed, split, out)
                out.seek(0)
                _write_header(out, len(labels), job.size)
                assert out.tell() == room
            with replacing(_file(stem, split, "labels")) as aside, aside.open("wb") as out:
                np.save(out, labels)
            facts[split] = {"count": len(labels), "broken": broken}
        write_whole(_facts(stem), json.dumps(facts))


def _write_header(out: BinaryIO, count: int, size: int) -> None:
    shape = (count, size, size, 3)
    np.lib.format.write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": shape})


def _read(job: Decoding, stem: Path) -> Decoded | None:
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
            if (*pixels.shape, *labels.shape) != (count, job.size, job.size, 3, count) or pixels.dtype != np.uint8:
                return None
            splits.append(ImageSplit(pixels, labels, tuple(name for name, _ in broken), file=file))
            if job.on_broken == "raise":
                _refuse(job.path, broken)
        return tuple(facts["classes"]), splits[0], splits[1]
    except UnreadableError:
        raise
    except (OSError, ValueError, EOFError, LookupError, TypeError):
        return None


def _file(stem: Path, split: str, what: str = "pixels") -> Path:
    return stem.with_name(f"{stem.name}.{split}.{what}.npy")


def _facts(stem: Path) -> Path:
    return stem.with_name(stem.name + ".json")
