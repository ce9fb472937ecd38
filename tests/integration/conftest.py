"""One thread per operator: tiny tensors gain nothing from more, and busy machines lose much. Pictures are not drawn."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _cheap(one_thread: None, cheap_runs: None) -> None:
    """For all tests of this folder."""
