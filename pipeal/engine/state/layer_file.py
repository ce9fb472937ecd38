"""The state of one layer in a file of its own: tensors as safetensors, which can be mapped, the rest as JSON beside.

::

    8 bytes   length of the header
    header    {"optimizers.enc_opt.state.state.0.exp_avg": {"dtype": "F32", "shape": [512, 64], "data_offsets": […]},
               …, "__metadata__": {"pipeal": '{"format": 2, "tree": …, "tensors": […]}'}}
    data      one entry after the other; the first begins at a multiple of 64 bytes

``tree`` is the state as :mod:`pipeal.core.tree_codec` describes it, ``tensors`` says of each tensor in it, in order,
where it lies: entry, type, offset, shape and strides. An entry holds the memory behind one or more tensors as it is, so
that tensors that share it share it again, and strides stay: some operators round differently on another layout. Where
one contiguous tensor is all of it, the entry has that tensor's type and shape for other readers; else it is of bytes.
"""

from __future__ import annotations

import io
import json
import math
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pipeal.core.errors import DataError, a_type, first_line
from pipeal.core.tree_codec import put_together, taken_apart

FORMAT = 2
"""The version of the format of checkpoints; the first had a ``torch.save`` of each layer."""

_ALIGNED = 64  # bytes: as allocators align, so that operators run the same way on mapped memory
_CHUNK = 1 << 20
_MOST_REPEATED = 1 << 20
"""Bytes up to which a tensor may repeat its memory, as an expanded one does. A copy of it takes all of them: a file of
a few bytes could ask for any amount."""
_KEY = "pipeal"
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Those that every version of safetensors knows; others are kept as bytes."""
_COMPRESSED = {torch.sparse_csr: "r", torch.sparse_bsr: "r", torch.sparse_csc: "c", torch.sparse_bsc: "c"}


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
    for _ in _named_tensors(value, where):
        pass


def write_layer(path: Path, state: Mapping[str, Any]) -> tuple[int, int]:
    """Writes a state to a new file and syncs it.

    Tensors go to the disk from where they are, without a copy, and the interpreter is free meanwhile. Parameters are
    written as tensors.

    Returns:
        The bytes of the file and their CRC-32: of what was meant to be written, whatever the disk made of it. It is
        to find accidents, for which it costs half of a SHA-256, even with processor instructions for that.

    Raises:
        DataError: The state holds something that is not plain.
        OSError: The system refused to write.
    """
    state = dict(state)
    entries = _Entries()
    for name, tensor in _named_tensors(state, ""):
        entries.add(name.lstrip("."), tensor)
    form, _ = taken_apart(state)
    with path.open("xb", buffering=0) as file:
        raw = _Summing(file)
        # Large buffers pass through; what lies between them is gathered into few writes.
        with io.BufferedWriter(raw, _CHUNK) as buffered:
            buffered.write(entries.header({"format": FORMAT, "tree": form, "tensors": entries.tensors}))
            for storage in entries.storages():
                buffered.write(_bytes_of(storage))
        os.fsync(file.fileno())
    return raw.written, raw.crc32


def read_layer(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """The state in a file, on the CPU, in memory of its own.

    Args:
        path: The file.
        mapped: Whether numbers come from the file as they are used, and take no memory of their own. While such a state
            lives, the file may be removed, but not cut.

    Raises:
        DataError: It is gone, or holds something else than plain values.
    """
    try:
        with safe_open(path, framework="pt") as file:
            told = json.loads((file.metadata() or {})[_KEY])
            entries = {name: _storage_of(file.get_tensor(name), mapped) for name in file.keys()}  # noqa: SIM118
        if told["format"] != FORMAT:
            raise DataError(f"its format is {told['format']!r}, wanted {FORMAT}")
        tensors = [_tensor_from(where, entries) for where in told["tensors"]]
        state = put_together(told["tree"], tensors, plain=True)
    except Exception as error:
        raise DataError(
            f"{path} is refused: it does not load as tensors, numbers, texts and collections of them "
            f"({first_line(error)}); nothing in it was run; take another checkpoint"
        ) from error
    if not isinstance(state, dict):
        raise DataError(f"{path} holds {a_type(state)}, wanted the dict of a layer; take another checkpoint")
    return state


def _storage_of(mapped: Tensor, stays_mapped: bool) -> torch.UntypedStorage:
    """Of an entry as safetensors has mapped it, which may be a stretch of the whole file."""
    if not stays_mapped:
        return mapped.clone().untyped_storage()
    begin = mapped.storage_offset() * mapped.element_size()
    found: torch.UntypedStorage = mapped.untyped_storage()[begin : begin + mapped.nbytes]
    return found


def _named_tensors(value: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors with where they are, in the order of :func:`taken_apart`; raises as :func:`require_plain`."""
    kind = type(value)
    if kind in (Tensor, torch.nn.Parameter):
        yield where, value
    elif kind in (dict, OrderedDict):
        for key, inner in value.items():
            yield from _named_tensors(key, f"a key of {where}")
            yield from _named_tensors(inner, f"{where}.{key}")
    elif kind in (list, tuple, torch.Size):
        for number, inner in enumerate(value):
            yield from _named_tensors(inner, f"{where}.{number}")
    elif kind not in _PLAIN:
        raise DataError(f"{where} is {a_type(value)}, wanted tensors, numbers, texts, dicts, lists and tuples")


class _Entries:
    """What a file will hold: each memory behind a tensor once, under the name of the first tensor that has it.

    Attributes:
        tensors: Where each tensor lies, for :func:`_tensor_from`.
    """

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self._names: dict[int, str] = {}
        self._found: dict[str, tuple[torch.UntypedStorage, str, list[int]]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        self.tensors.append(self._place(name, tensor.detach()))

    def storages(self) -> list[torch.UntypedStorage]:
        """In the order of the file."""
        return [storage for storage, _, _ in self._ordered().values()]

    def header(self, told: Any) -> bytes:
        """Padded, so that the data behind it is aligned."""
        content: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(told)}}
        begin = 0
        for name, (storage, kind, shape) in self._ordered().items():
            end = begin + storage.nbytes()
            content[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(content).encode()
        text += b" " * (-(len(text) + 8) % _ALIGNED)
        return len(text).to_bytes(8, "little") + text

    def _ordered(self) -> dict[str, tuple[torch.UntypedStorage, str, list[int]]]:
        # The format has no gaps. Each begins aligned where those before it have sizes that are multiples of as much.
        return dict(sorted(self._found.items(), key=lambda found: -_alignment(found[1][0].nbytes())))

    def _place(self, name: str, tensor: Tensor) -> Any:
        if tensor.is_quantized or tensor.is_meta:
            raise DataError(f"{name} is a tensor that is quantized or without data, which no file keeps")
        if tensor.layout is torch.strided:
            tensor = tensor.resolve_conj().resolve_neg()
            if tensor.nbytes > max(tensor.untyped_storage().nbytes(), _MOST_REPEATED):
                tensor = tensor.contiguous()
            dtype = str(tensor.dtype).removeprefix("torch.")
            return [self._entry(name, tensor), dtype, tensor.storage_offset(), [*tensor.shape], [*tensor.stride()]]
        if tensor.layout is torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
        elif rows := _COMPRESSED.get(tensor.layout):
            compressed, plain = ("crow", "col") if rows == "r" else ("ccol", "row")
            parts = [getattr(tensor, f"{compressed}_indices")(), getattr(tensor, f"{plain}_indices")(), tensor.values()]
        else:
            raise DataError(f"{name} has the layout {tensor.layout}, which no file keeps")
        placed = [self._place(f"{name}.{number}", part) for number, part in enumerate(parts)]
        layout = str(tensor.layout).removeprefix("torch.")
        is_coalesced = layout == "sparse_coo" and tensor.is_coalesced()
        return {"layout": layout, "parts": placed, "shape": [*tensor.shape], "coalesced": is_coalesced}

    def _entry(self, name: str, tensor: Tensor) -> str:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._names:
            name = name.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair is no JSON for readers
            while name in self._found or name == "__metadata__":
                name += "'"
            size = storage.nbytes()
            whole = tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.nbytes == size
            kind = _TYPES.get(tensor.dtype) if whole else None
            self._names[storage._cdata] = name
            self._found[name] = (storage, "U8", [size]) if kind is None else (storage, kind, [*tensor.shape])
        return self._names[storage._cdata]


def _tensor_from(where: Any, entries: Mapping[str, torch.UntypedStorage]) -> Tensor:
    if isinstance(where, dict):
        parts = [_tensor_from(part, entries) for part in where["parts"]]
        shape = where["shape"]
        if where["layout"] == "sparse_coo":
            indices, values = parts
            is_coalesced = where["coalesced"]
            return torch.sparse_coo_tensor(
                indices, values, shape, device="cpu", is_coalesced=is_coalesced, check_invariants=True
            )
        layout = next(known for known in _COMPRESSED if str(known) == f"torch.{where['layout']}")
        compressed, plain, values = parts
        return torch.sparse_compressed_tensor(
            compressed, plain, values, shape, layout=layout, device="cpu", check_invariants=True
        )
    entry, name, offset, shape, strides = where
    if name.startswith(("q", "bits")):  # quint8 and the like: no operator copies one that was made from its bits
        raise DataError(f"a tensor of {name} lies in {entry!r}, which no file keeps")
    made = torch.empty(0, dtype=put_together(["y", name], []), device="cpu")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    needed = (last + 1) * made.element_size() if math.prod(shape) else 0
    if min(offset, *shape, *strides, 0) < 0 or needed > entries[entry].nbytes():  # set_() would make the memory larger
        raise DataError(f"a tensor lies outside of {entry!r}")
    if (size := math.prod(shape) * made.element_size()) > max(entries[entry].nbytes(), _MOST_REPEATED):
        raise DataError(f"a tensor makes {size:,} bytes of the {entries[entry].nbytes():,} in {entry!r}")
    return made.set_(entries[entry], offset, shape, strides)


def _alignment(size: int) -> int:
    """The largest power of two that divides a size, at most ``_ALIGNED``.

    >>> [_alignment(size) for size in (1, 6, 20, 64, 192, 0)]
    [1, 2, 4, 64, 64, 64]
    """
    return min(size & -size or _ALIGNED, _ALIGNED)


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage.cpu())
    return flat.numpy().data


class _Summing(io.RawIOBase):
    """Writes to a file and sums up what it writes."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.written = self.crc32 = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        # Less where a disk is nearly full. In chunks: what was just written is summed while it is in the cache.
        count = self._file.write(memoryview(data)[:_CHUNK])
        self.crc32 = zlib.crc32(memoryview(data)[:count], self.crc32)
        self.written += count
        return count
