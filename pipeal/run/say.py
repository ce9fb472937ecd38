"""Telling a user what is being done."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeAlias

Say: TypeAlias = Callable[[str], None]
"""Is told what is being done, in a few words."""


def say(text: str) -> None:
    """Tells a user what is being done, on standard error."""
    print(text, file=sys.stderr)
