"""A disk that takes no more, anywhere and for anybody: the system refuses to let files grow."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


@contextmanager
def _small_files(most_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_files() -> Callable[[int], AbstractContextManager[None]]:
    """Within ``with small_files(n)`` no file of this process grows beyond ``n`` bytes."""
    return _small_files
