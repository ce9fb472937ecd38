"""Python's garbage collector, kept from looking at the libraries again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def libraries_left_out() -> Iterator[None]:
    """Leaves out of garbage collections whatever there is at the beginning: mostly what imported libraries are made of.

    A full collection looks at every object that could be in a cycle, some 230,000 once torch is imported. That takes
    0.1 s, in which no thread of the process does anything: every stage in it stands still, and those after it have
    nothing to do. Cycles that were garbage at the beginning stay until the end. Affects the whole process, so programs
    use it, and libraries do not.

    >>> with libraries_left_out():
    ...     gc.get_freeze_count() > 0
    True
    >>> gc.get_freeze_count()
    0
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
