"""The C library's allocator, told to keep what training frees: the next batch asks for the same again."""

from __future__ import annotations

import os

from pipeal.core.host_memory import of_glibc

TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX of glibc's malloc.h
MMAP_THRESHOLD = -3
_ARENA_MAX = -8
_LARGEST = 2**30
_LARGEST_IN_OLD_GLIBC = 2**25


def map_large_blocks() -> bool:
    """Makes glibc map each block of 64 KiB and more from the system by itself, and give it back when it is freed.

    Slower than :func:`keep_freed_memory`, but the process then holds what its tensors take and little else: a heap
    holds 1.3 to 2 times as much, as blocks for tensors, which are aligned, hardly fit into the holes that equal ones
    leave behind. Affects the whole process, for what is allocated from now on.

    Returns:
        Whether it took effect: False where the C library is not glibc.
    """
    mallopt = of_glibc("mallopt")
    return mallopt is not None and bool(mallopt(MMAP_THRESHOLD, 2**16))


def keep_freed_memory() -> bool:
    """Makes glibc serve large blocks from its heap and hand none of it back to the system.

    By default each activation of some megabytes is mapped from the system and unmapped when freed, and the kernel
    zeroes its pages for every batch; ``scripts/bench/text.py`` shows what that costs. The process keeps its
    peak of memory until it ends. Affects the whole process, so programs call it, and libraries do not, and before they
    start threads: those that have allocated keep what glibc does for them.

    Returns:
        Whether it took effect: False where the C library is not glibc.
    """
    mallopt = of_glibc("mallopt")
    if mallopt is None:
        return False
    mapped = mallopt(MMAP_THRESHOLD, _LARGEST) or mallopt(MMAP_THRESHOLD, _LARGEST_IN_OLD_GLIBC)
    trimmed = mallopt(TRIM_THRESHOLD, 2**31 - 1)
    # Other threads than the first, as workers are, get heaps of 64 MiB at most, which glibc gives back when they are
    # empty, whatever the thresholds, and maps from the system what does not fit in them. So all share the first one,
    # unless the user has said how many heaps there may be.
    shared = "MALLOC_ARENA_MAX" in os.environ or mallopt(_ARENA_MAX, 1)
    return bool(mapped and trimmed and shared)
