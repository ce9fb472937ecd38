"""What pipeal logs, for tests to look at; the fixtures ``said`` and ``silent`` hold it for a whole test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pipeal.core.messages import logged_to


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def messages() -> Iterator[list[str]]:
    """The messages of this block, from every thread, as the commands would print them."""
    with logged_to(_Kept()) as kept:
        yield kept.lines
