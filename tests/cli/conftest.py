"""Runs of commands leave blank pictures, unless a test is marked ``draws``: the first of each command is."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _cheap(cheap_runs: None) -> None:
    """For all tests of this folder."""
