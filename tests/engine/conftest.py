"""One intra-op thread in the caller, so that it computes with the bits of a worker with one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread_each(one_thread: None) -> None:
    """For all tests of this folder."""
