"""The memory of this process, as the system counts it; loads no torch."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

from pipeal.core.errors import ConfigError

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def of_glibc(name: str) -> Callable[..., int] | None:
    """A function that only glibc has; None with another C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def give_freed_memory_back() -> None:
    """Gives the system what glibc keeps of freed memory, wherever in its heaps; with another C library, nothing.

    For memory that will not be asked for again: it takes milliseconds.
    """
    trim = of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def reset_peak() -> bool:
    """Has Linux forget the peak (``VmHWM``) so far; False where that is not possible."""
    try:
        _CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def status_bytes(key: str) -> int:
    """What Linux says of this process: ``VmRSS`` is resident now, ``VmHWM`` was so at most.

    Raises:
        ConfigError: It does not say.
    """
    lines = _STATUS.read_text(encoding="utf-8").splitlines() if _STATUS.exists() else []
    for line in lines:
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"{_STATUS} has no {key}; this system does not count resident memory")


def lifetime_peak() -> int:
    """The most bytes that were resident since the process began.

    Raises:
        ConfigError: The system does not count them.
    """
    try:
        import resource
    except ImportError as error:
        raise ConfigError("this system does not count resident memory; measure on Linux or on a CUDA device") from error
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
