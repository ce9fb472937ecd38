"""What a checkpoint is: where its run stood, its files, and the sums that each of them is held against.

Checkpoints of the first format are read and no longer written. A layer's file was a ``torch.save`` of plain values,
``{"state": …}``; that of the first layer also had what is counted of the epoch, ``"losses"`` and ``"splits"``.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
from pydantic import Field, TypeAdapter

from pipeal.core.checked import checked
from pipeal.core.errors import DataError, first_line
from pipeal.engine.state.layer_file import FORMAT, read_layer

EPOCH = "epoch.safetensors"
"""The file of what is counted of the epoch under way."""

_MANIFEST = "manifest.json"
_NUMBER = r"(\d{3}|[1-9]\d{3,})"  # one name for each number: layer-0000 would be another file of layer 0
_LAYERS = {1: re.compile(rf"layer-{_NUMBER}\.pt"), FORMAT: re.compile(rf"layer-{_NUMBER}\.safetensors")}
"""The names of layers' files, by the versions of the format that are read."""

_CHUNK = 1 << 20

_Whole: TypeAlias = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


@dataclass(frozen=True)
class Sums:
    """How many bytes a file has, and their CRC-32."""

    bytes: _Whole
    crc32: _Whole


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk: what its manifest holds.

    Attributes:
        path: Its folder.
        number: It is the how-manieth that was saved there; the newest has the greatest, whatever its step.
        step: The step it was saved under.
        best: Whether it was the best so far.
        position: Where the run stood, as given to :meth:`CheckpointStore.save`.
        state: The rest of what was given.
        files: Its files.
        format: The version of their format.
    """

    path: Path
    number: _Whole
    step: _Whole
    best: Annotated[bool, Field(strict=True)]
    position: dict[str, Any]
    state: dict[str, Any]
    files: dict[str, Sums]
    format: int

    @classmethod
    def open(cls, path: str | Path, layers: Iterable[int] | None = None) -> Checkpoint:
        """The checkpoint in a folder, after all of its bytes were held against the manifest.

        Args:
            path: The folder.
            layers: The numbers of those whose bytes are looked at, where the others are not needed; None for all.

        Raises:
            DataError: It is not as it was written; the message says in what.
        """
        found = read_manifest(Path(path))
        for name in found.files if layers is None else [found._layers()[number] for number in layers]:
            found._check(name)
        return found

    def layers(self) -> Mapping[int, dict[str, Any]]:
        """The states of all layers by their number, on the CPU, each read when it is looked up. Nothing in them is run.

        Their tensors are mapped: they take no memory of their own, and no file may be cut while its state lives.

        Raises:
            DataError: At a look-up: a file is gone, or holds something else than tensors, numbers, texts and
                collections of them.
        """
        paths = {number: self.path / name for number, name in self._layers().items()}
        return _Layers(paths, partial(read_layer, mapped=True) if self.format == FORMAT else _state_of_format_1)

    def epoch(self) -> dict[str, Any]:
        """What is counted of the epoch under way, on the CPU; empty if nothing was given. Raises as :meth:`layers`."""
        if self.format == FORMAT:
            return read_layer(self.path / EPOCH) if EPOCH in self.files else {}
        content = next((_read_format_1(self.path / name) for name in self._layers().values()), {})
        return {name: content[name] for name in ("losses", "splits") if name in content}

    def _layers(self) -> dict[int, str]:
        """The names of the layers' files, by number."""
        found = ((_LAYERS[self.format].fullmatch(name), name) for name in self.files)
        return dict(sorted((int(match[1]), name) for match, name in found if match))

    def _check(self, name: str) -> None:
        wanted = self.files[name]
        try:
            if stat.S_ISFIFO(os.stat(self.path / name).st_mode):  # to open it would wait for a writer
                raise _bad(self.path, f"{name} is a pipe")
            with (self.path / name).open("rb", buffering=0) as file:
                found = os.fstat(file.fileno()).st_size
                if found != wanted.bytes:
                    what = "truncated" if found < wanted.bytes else "too long"
                    raise _bad(self.path, f"{name} is {what}: {found:,} bytes found, {wanted.bytes:,} wanted")
                read = _crc32_of(file)
        except FileNotFoundError:
            raise _bad(self.path, f"{name} is missing") from None
        except OSError as error:
            raise _bad(self.path, f"{name} cannot be read: {error.strerror or error}") from error
        if read != wanted.crc32:
            sums = f"CRC-32 {read:08x} found, {wanted.crc32:08x} wanted"
            raise _bad(self.path, f"{name} has other bytes than were written: {sums}")


_CHECKPOINT = TypeAdapter(Checkpoint)


@dataclass(frozen=True)
class _Layers(Mapping[int, dict[str, Any]]):
    """States in files, of which none is in memory."""

    paths: Mapping[int, Path]
    read: Callable[[Path], dict[str, Any]]

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.read(self.paths[number])

    def __iter__(self) -> Iterator[int]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


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
        DataError: There is no such folder, or the manifest is not as it was written.
    """
    try:
        whole = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        body = whole["manifest"]
        if body["format"] not in _LAYERS:
            known = " and ".join(map(str, _LAYERS))
            raise _bad(path, f"its format version {body['format']!r} is unknown; this version of pipeal reads {known}")
        if _hash_of(body) != whole["sha256"]:
            raise _bad(path, f"the hash of {_MANIFEST} differs from the one in it")
        found = checked(_CHECKPOINT, {**body, "path": path})
    except DataError:
        raise
    except FileNotFoundError:
        if path.exists():
            raise _bad(path, f"{_MANIFEST} is missing") from None
        others = ", ".join(sorted(other.name for other in path.parent.glob("step-*"))) or "none"
        raise DataError(f"there is no checkpoint {path}; there are: {others}") from None
    except OSError as error:
        raise _bad(path, f"{_MANIFEST} cannot be read: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(path, f"{_MANIFEST} is not JSON ({error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad(path, f"{_MANIFEST} is not the one of a checkpoint ({error})") from error
    layer, also = _LAYERS[body["format"]], {EPOCH} if body["format"] == FORMAT else set()
    if strange := [name for name in found.files if not layer.fullmatch(name) and name not in also]:
        raise _bad(path, f"{_MANIFEST} names {strange[0]!r}, wanted files of layers, such as layer-000")
    return found


def _read_format_1(path: Path) -> dict[str, Any]:
    """The content of a layer's file of the first format, on the CPU; nothing in it is run."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"{path} is refused: it does not load as tensors, numbers, texts and collections of them "
            f"({first_line(error)}); nothing in it was run; take another checkpoint"
        ) from error
    if not (isinstance(content, dict) and isinstance(content.get("state"), dict)):
        raise DataError(f"{path} holds no state of a layer; take another checkpoint")
    return content


def _state_of_format_1(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = _read_format_1(path)["state"]
    return state


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
