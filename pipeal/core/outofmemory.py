"""Memory that ran out: how each library says so, and what a person needs to know then."""

from __future__ import annotations

import re

import torch

from pipeal.core.errors import PeerLostError

_SAYS = ("out of memory", "can't allocate memory", "not enough memory", "_status_alloc_failed")
"""As PyTorch words it on the CPU (a plain RuntimeError), and libraries beneath it."""

_AMOUNT = r"(\d+(?:\.\d+)?) ?(bytes|[KMGT]?i?B)"
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out here: Python's, PyTorch's on any device, cuBLAS's and its like.

    That of a lost process may quote what ended it there.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes do not match"))
    (True, False)
    >>> is_out_of_memory(PeerLostError("rank 1 ended: MemoryError: out of memory"))
    False
    """
    if isinstance(error, PeerLostError):
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in said for words in _SAYS)


def bytes_asked(error: BaseException) -> int | None:
    """How much memory was asked for, if the error says it.

    >>> bytes_asked(RuntimeError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ..."))
    1610612736
    """
    return _amount(rf"tried to allocate {_AMOUNT}", error)


def bytes_free(error: BaseException) -> int | None:
    """How much memory was free, if the error says it.

    >>> bytes_free(RuntimeError("Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 8.00 GiB of which 512.00 MiB is free."))
    536870912
    """  # noqa: E501  as it is said
    return _amount(rf"of which {_AMOUNT} is free", error)


def in_units(count: int) -> str:
    """Bytes in words.

    >>> in_units(1610612736), in_units(700)
    ('1.50 GiB', '700 bytes')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.2f} {unit}"
    return f"{count} bytes"


def _amount(pattern: str, error: BaseException) -> int | None:
    found = re.search(pattern, str(error), re.IGNORECASE)
    return None if found is None else int(float(found[1]) * _UNITS.get(found[2], 1))
