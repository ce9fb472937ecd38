"""What pipeal logs, handed to someone for a while: the commands show it, and a run keeps what was tried for it.

Modules log to ``logging.getLogger(__name__)``: what the user should know as INFO, what went wrong as WARNING.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

Handler = TypeVar("Handler", bound=logging.Handler)


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
