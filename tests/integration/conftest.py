"""One thread per operator: tiny tensors gain nothing from more, and busy machines lose much."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread_each(one_thread: None) -> None:
    """For all tests of this folder."""
