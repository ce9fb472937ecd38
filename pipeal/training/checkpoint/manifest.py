"""What a checkpoint is: where its run stood, its files, and the sums that each of them is held against."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field, TypeAdapter

from pipeal.core.errors import DataError
from pipeal.engine.state.layer_file import FORMAT, read_layer
from pipeal.training.checkpoint.checked import checked
from pipeal.training.checkpoint.format_1 import epoch_of, state_of

EPOCH = "epoch.safetensors"
"""The file of what is counted of the epoch under way."""

_MANIFEST = "manifest.json"
_LAYERS = {1: re.compile(r"layer-(\d{3,})\.pt"), FORMAT: re.compile(r"layer-(\d{3,})\.safetensors")}
"""The names of layers' files, by the versions of the format that are read."""

_CHUNK = 1 << 20


_Whole: TypeAlias = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


@dataclass(frozen=True)
class _File:
    bytes: _Whole
    crc32: _Whole


@dataclass(frozen=True)
class _Body:
    """What a manifest holds, beside the version of its format."""

    number: _Whole
    step: _Whole
    best: Annotated[bool, Field(strict=True)]
    position: dict[str, Any]
    state: dict[str, Any]
    files: dict[str, _File]


_BODY = TypeAdapter(_Body)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk.

    Attributes:
        path: Its folder.
        number: It is the how-manieth that was saved there; the newest has the greatest, whatever its step.
        step: The step it was saved under.
        best: Whether it was the best so far.
        position: Where the run stood, as given to :meth:`CheckpointStore.save`.
        state: The rest of what was given.
        files: Its files, with bytes and CRC-32.
        format: The version of their format.
    """

    path: Path
    number: int
    step: int
    best: bool
    position: dict[str, Any]
    state: dict[str, Any]
    files: dict[str, tuple[int, int]]
    format: int = FORMAT

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """The checkpoint in a folder, after all of its bytes were held against the manifest.

        Raises:
            DataError: It is not as it was written; the message says in what.
        """
        found = read_manifest(Path(path))
        for name in found.files:
            found._check(name)
        return found

    def layers(self) -> dict[int, dict[str, Any]]:
        """The states of all layers by their number, on the CPU. Nothing in the files is run.

        Raises:
            DataError: A file is gone, or holds something else than tensors, numbers, texts and collections of them.
        """
        read = read_layer if self.format == FORMAT else state_of
        return {number: read(self.path / name) for number, name in self._layers().items()}

    def epoch(self) -> dict[str, Any]:
        """What is counted of the epoch under way, on the CPU; empty where nothing was given. Raises as :meth:`layers`.

        In the first format, it lay in the file of the first layer.
        """
        if self.format == FORMAT:
            return read_layer(self.path / EPOCH) if EPOCH in self.files else {}
        first, *_ = [*self._layers().values(), None]
        return epoch_of(self.path / first) if first else {}

    def _layers(self) -> dict[int, str]:
        """The names of the layers' files, by number."""
        found = ((_LAYERS[self.format].fullmatch(name), name) for name in self.files)
        return dict(sorted((int(match[1]), name) for match, name in found if match))

    def _check(self, name: str) -> None:
        wanted, crc32 = self.files[name]
        try:
            if stat.S_ISFIFO(os.stat(self.path / name).st_mode):  # to open it would wait for a writer
                raise _bad(self.path, f"{name} is a pipe")
            with (self.path / name).open("rb", buffering=0) as file:
                found = os.fstat(file.fileno()).st_size
                if found != wanted:
                    what = "truncated" if found < wanted else "too long"
                    raise _bad(self.path, f"{name} is {what}: {found:,} bytes found, {wanted:,} wanted")
                read = _crc32_of(file)
        except FileNotFoundError:
            raise _bad(self.path, f"{name} is missing") from None
        except OSError as error:
            raise _bad(self.path, f"{name} cannot be read: {error.strerror or error}") from error
        if read != crc32:
            raise _bad(
                self.path, f"{name} has other bytes than were written: CRC-32 {read:08x} found, {crc32:08x} wanted"
            )


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes the attributes of a :class:`Checkpoint`, and a hash of them, into its folder, and syncs the file.

    Raises:
        OSError: The system refused to write.
        TypeError: There is something that JSON cannot hold.
    """
    body = json.dumps({"format": FORMAT, **content})
    whole = {"sha256": _hash_of(json.loads(body)), "manifest": json.loads(body)}
    with (folder / _MANIFEST).open("x", encoding="utf-8") as file:
        file.write(json.dumps(whole, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> Checkpoint:
    """The checkpoint in a folder by its manifest; its files are not looked at.

    Raises:
        DataError: The manifest is not as it was written.
    """
    try:
        whole = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        body = whole["manifest"]
        if body["format"] not in _LAYERS:
            known = " and ".join(map(str, _LAYERS))
            raise _bad(path, f"its format version {body['format']!r} is unknown; this version of pipeal reads {known}")
        if _hash_of(body) != whole["sha256"]:
            raise _bad(path, f"the hash of {_MANIFEST} differs from the one in it")
    except DataError:
        raise
    except FileNotFoundError:
        raise _bad(path, f"{_MANIFEST} is missing") from None
    except OSError as error:
        raise _bad(path, f"{_MANIFEST} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"{_MANIFEST} is not JSON ({error})") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise _bad(path, f"{_MANIFEST} is not the one of a checkpoint") from error
    try:
        found = checked(_BODY, body)
    except ValueError as error:
        raise _bad(path, f"{_MANIFEST} is not the one of a checkpoint ({error})") from error
    layer, also = _LAYERS[body["format"]], {EPOCH} if body["format"] == FORMAT else set()
    if strange := [name for name in found.files if not layer.fullmatch(name) and name not in also]:
        raise _bad(path, f"{_MANIFEST} names {strange[0]!r}, wanted files of layers")
    files = {name: (file.bytes, file.crc32) for name, file in found.files.items()}
    return Checkpoint(path, found.number, found.step, found.best, found.position, found.state, files, body["format"])


def _crc32_of(file: io.FileIO) -> int:
    """The CRC-32 of what is left to read."""
    crc32 = 0
    chunk = memoryview(bytearray(_CHUNK))
    while count := file.readinto(chunk):
        crc32 = zlib.crc32(chunk[:count], crc32)
    return crc32


def _hash_of(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _bad(path: Path, what: str) -> DataError:
    return DataError(f"the checkpoint {path} is bad: {what}")
