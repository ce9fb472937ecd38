"""What pipeal logs, handed to someone for a while: the commands show it, and a run keeps what was tried for it.

Modules log to ``logging.getLogger(__name__)``: what the user should know as INFO, what went wrong as WARNING.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

_log = logging.getLogger(__name__)

Handler = TypeVar("Handler", bound=logging.Handler)


@cache
def tell_once(line: str, level: int = logging.INFO) -> None:
    """Logs what is found each time that a model is made, once in a process."""
    _log.log(level, line)


@contextmanager
def logged_to(handler: Handler) -> Iterator[Handler]:
    """Hands a handler what pipeal logs within the ``with`` block, from INFO on."""
    logger = logging.getLogger("pipeal")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
