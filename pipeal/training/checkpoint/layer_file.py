"""The state of one layer in a file: plain values, summed while they are written, loaded without running anything."""

from __future__ import annotations

import io
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipeal.core.errors import DataError, first_line

_CHUNK = 1 << 20
_PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device)


def require_plain(value: Any, where: str) -> None:
    """Refuses what could be written, but not loaded again without running code.

    >>> require_plain({"step": 3, "betas": (0.9, 0.999)}, "layer 0")
    >>> require_plain({"seen": [1, {2}]}, "layer 0")
    Traceback (most recent call last):
      ...
    pipeal.core.errors.DataError: layer 0.seen.1 is a set, wanted tensors, numbers, texts, dicts, lists and tuples

    Raises:
        DataError: There is something else; the message says where.
    """
    kind = type(value)
    if kind in (dict, OrderedDict):
        for key, inner in value.items():
            require_plain(key, f"a key of {where}")
            require_plain(inner, f"{where}.{key}")
    elif kind in (list, tuple, torch.Size):
        for number, inner in enumerate(value):
            require_plain(inner, f"{where}.{number}")
    elif kind not in _PLAIN:
        raise DataError(f"{where} is a {kind.__name__}, wanted tensors, numbers, texts, dicts, lists and tuples")


def write_layer(path: Path, state: Mapping[str, Any]) -> tuple[int, int]:
    """Writes a state to a new file and syncs it.

    Tensors go to the disk from where they are, without a copy, and the interpreter is free meanwhile.

    Returns:
        The bytes of the file and their CRC-32: of what was meant to be written, whatever the disk made of it. It is
        to find accidents, for which it costs half of a SHA-256, even with processor instructions for that.

    Raises:
        OSError: The system refused to write.
    """
    with path.open("xb", buffering=0) as file:
        raw = _Summing(file)
        # Large buffers pass through; what lies between the tensors of a file is gathered into few writes.
        with io.BufferedWriter(raw, _CHUNK) as buffered, _without_crc32():
            torch.save(dict(state), buffered)
        if raw.error is not None:
            raise raw.error
        os.fsync(file.fileno())
    return raw.written, raw.crc32


def read_layer(path: Path) -> dict[str, Any]:
    """The state in a file, on the CPU.

    Raises:
        DataError: It is gone, or holds something else than plain values.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"{path} is refused: it does not load as tensors, numbers, texts and collections of them "
            f"({first_line(error)}); nothing in it was run; take another checkpoint"
        ) from error
    if not isinstance(state, dict):
        raise DataError(f"{path} holds a {type(state).__name__}, wanted the dict of a layer; take another checkpoint")
    return state


def crc32_of(file: io.FileIO) -> int:
    """The CRC-32 of what is left to read."""
    crc32 = 0
    chunk = memoryview(bytearray(_CHUNK))
    while count := file.readinto(chunk):
        crc32 = zlib.crc32(chunk[:count], crc32)
    return crc32


class _Summing(io.RawIOBase):
    """Writes to a file and sums up what it writes.

    An error is kept, not raised: ``torch.save`` calls from C++, where it would lose its kind.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.written = self.crc32 = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = len(data)
        if self.error is None:
            try:
                self._write(data)
            except OSError as error:
                self.error = error
        return size

    def _write(self, data: Any) -> None:
        self.crc32 = zlib.crc32(data, self.crc32)
        view = memoryview(data)
        while view:  # a system call writes 2 GiB at most, and less on a disk that is nearly full
            count = self._file.write(view)
            self.written += count
            view = view[count:]


_saving = threading.Lock()


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Lets ``torch.save`` leave out its own checksums, more than half of its work: ours covers every byte.

    The switch is the process's. Someone else's ``torch.save`` meanwhile is without them too, which no ``torch.load``
    minds.
    """
    with _saving:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)
