"""Python's garbage collector, kept from looking at the libraries again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def libraries_left_out() -> Iterator[None]:
    """Leaves out of garbage collections whatever there is at the beginning: mostly what imported libraries are made of.

    A full collection looks at every object that could be in a cycle, some 400,000 once torch is imported and has made
    an optimizer, for which it imports as much again. That takes 0.2 s, in which no thread of the process does anything:
    every stage in it stands still, and those after it have nothing to do. What there is at the beginning, and is
    garbage of a cycle later, stays until the end. Affects the whole process, so programs use it, once their layers are
    made, and libraries do not; where something is left out already, it does nothing.

    >>> with libraries_left_out():
    ...     gc.get_freeze_count() > 0
    True
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
