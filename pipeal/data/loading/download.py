"""One file from the network: resumed where it was cut, checked, and only then given its name."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from pipeal.core.atomic import sync_file, sync_folder
from pipeal.core.errors import DataError
from pipeal.core.lock import in_turn

__all__ = ["Progress", "download"]

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes there so far, and the bytes in all (None where unknown)."""

_CHUNK_BYTES = 1 << 18


def download(
    url: str,
    destination: Path,
    *,
    md5: str | None = None,
    progress: Progress | None = None,
    timeout_s: float = 30.0,
) -> Path:
    """Fetches ``url`` to ``destination``, by way of ``<destination>.part``.

    A part file that an earlier call left is continued (HTTP Range), where the server can do so. Without a
    checksum nothing could tell a stale part file from a good one, so then it starts afresh. Of several calls for one
    destination, in whatever processes, one fetches it and the others wait for what it gets.

    Args:
        url: An http or https address.
        destination: Where the file goes; never half-written, nor after a power cut. Its folder is made.
        md5: The wanted MD5, in hexadecimal.
        progress: Called after every chunk.
        timeout_s: How long the server may be silent.

    Returns:
        ``destination``.

    Raises:
        DataError: No connection, an HTTP error, a connection cut (the part file stays, for the next call), a
            wrong checksum (the part file is removed), or a disk that refuses.
    """
    before = _version(destination)
    part = destination.with_name(destination.name + ".part")
    with in_turn(part.with_name(part.name + ".lock")):
        # It may have come while another call had its turn.
        if _version(destination) in (before, None) or (md5 and md5_of(destination) != md5.lower()):
            _download(url, destination, part, md5, progress, timeout_s)
    return destination


def verify(path: Path, *, md5: str | None) -> None:
    """Raises DataError where the file does not have that MD5; ``None`` accepts any file."""
    found = md5_of(path) if md5 else None
    if md5 and found != md5.lower():
        raise DataError(f"{path}: md5 {found}, wanted {md5}; delete the file and fetch it again")


def md5_of(path: Path) -> str:
    """The MD5 of a file, in hexadecimal."""
    md5 = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            md5.update(chunk)
    return md5.hexdigest()


def _download(
    url: str, destination: Path, part: Path, md5: str | None, progress: Progress | None, timeout_s: float
) -> None:
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        if md5 is None:
            part.unlink(missing_ok=True)
        # A part that is already whole: the last call ended between the last byte and the rename.
        if md5 is None or not part.is_file() or md5_of(part) != md5.lower():
            _fetch(url, part, progress, timeout_s)
            found = md5_of(part) if md5 else None
            if md5 and found != md5.lower():
                part.unlink()
                raise DataError(f"{url}: md5 {found}, wanted md5 {md5}; the bad file is removed, try again")
        sync_file(part)
        os.replace(part, destination)
        sync_folder(destination.parent)
    except OSError as error:
        raise DataError(
            f"cannot write {destination}: {error.strerror or error}; make room there or choose another folder"
        ) from error


def _version(path: Path) -> tuple[int, int] | None:
    """Differs once another file has taken the name; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _fetch(url: str, part: Path, progress: Progress | None, timeout_s: float) -> None:
    """Appends what is missing to ``part``. OSError is the disk's; the network's errors become DataError."""
    start = part.stat().st_size if part.is_file() else 0
    response = _open(url, start, timeout_s)
    if response is None:  # The part is longer than the file: it is of something else.
        part.unlink()
        return _fetch(url, part, progress, timeout_s)
    with response:
        if response.status != 206:
            start = 0  # The server ignores ranges and sends the whole file.
        length = response.headers.get("Content-Length")
        total = start + int(length) if length and length.isdecimal() else None
        done = start
        with part.open("ab" if start else "wb") as file:
            while chunk := _read(response, url):
                file.write(chunk)
                done += len(chunk)
                if progress:
                    progress(part.name.removesuffix(".part"), done, total)
    if total is not None and done < total:
        raise DataError(f"{url}: cut after {done} of {total} bytes; run the same again to go on from there")
    return None


def _open(url: str, start: int, timeout_s: float) -> http.client.HTTPResponse | None:
    """The response from byte ``start`` on; None where the server has no such byte."""
    headers = {"User-Agent": "pipeal"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=timeout_s
        )
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and start:
            return None
        raise DataError(f"{url}: HTTP {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(f"no connection to {url} ({reason})") from error
    return response


def _read(response: http.client.HTTPResponse, url: str) -> bytes:
    try:
        return response.read(_CHUNK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{url}: connection lost ({error}); run the same again to go on from there") from error
