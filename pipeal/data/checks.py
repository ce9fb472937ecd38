"""Arguments, checked: what is wrong with one is told in one line, with its name, what was found and what was wanted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import numpy as np

from pipeal.core.errors import ConfigError


def at_least(name: str, value: Any, least: int) -> int:
    """A whole number as Python's own, which a state can hold.

    Raises:
        ConfigError: It is not one, or below ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"{name} is {value!r}; wanted a whole number of at least {least}")
    return int(value)


def one_of(name: str, value: Any, choices: Any) -> Any:
    """One of a ``Literal``'s texts, or of some others.

    Raises:
        ConfigError: It is none.
    """
    wanted: Iterable[str] = get_args(choices) or choices
    if value not in wanted:
        raise ConfigError(f"{name} is {value!r}; wanted one of {', '.join(wanted)}")
    return value


def check_rank(rank: Any, world_size: Any) -> tuple[int, int]:
    """A rank and the number of ranks, as Python's own numbers.

    Raises:
        ConfigError: Not ``0 <= rank < world_size``.
    """
    found = at_least("rank", rank, 0), at_least("world_size", world_size, 1)
    if found[0] >= found[1]:
        raise ConfigError(f"rank {rank} of world_size {world_size}; wanted 0 <= rank < world_size")
    return found
