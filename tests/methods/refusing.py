"""A method need not be for every kind of network: what skips a test of it with such a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipeal import ConfigError
from pipeal.core.methods import METHODS

PIPEALS = ("al", "bp", "greedy", "dgl", "auglocal", "predsim", "infopro", "scpl", "deinforeg")
"""The methods that come with pipeal: a reader of the documentation may have added another."""


@contextmanager
def skipped_where_refused(method: str) -> Iterator[None]:
    """Skips the test where a method refuses a network, which it says in one line with its label."""
    try:
        yield
    except ConfigError as refused:
        told = str(refused)
        assert METHODS[method].label in told, told
        assert "\n" not in told
        pytest.skip(told)
