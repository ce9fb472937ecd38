"""Small things that several iterators need: checked settings, guarded calls, notes on errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pipeal.core.errors import ConfigError, DataError
from pipeal.data.checks import at_least

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def check_instance(num_instances: Any, instance_rank: Any) -> tuple[int, int]:
    """Both as whole numbers of Python, which a state can hold; refuses a rank that does not exist.

    Raises:
        ConfigError: Not ``0 <= instance_rank < num_instances``.
    """
    instances, rank = at_least("num_instances", num_instances, 1), at_least("instance_rank", instance_rank, 0)
    if rank >= instances:
        raise ConfigError(f"instance_rank is {rank}; wanted less than num_instances, which is {instances}")
    return instances, rank


def a_function(name: str, value: F) -> F:
    """The value, which can be called.

    Raises:
        ConfigError: It cannot.
    """
    if not callable(value):
        raise ConfigError(f"{name} is of type {type(value).__name__}; wanted a function")
    return value


def apply(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a user's function. Its StopIteration is an error: let through, it would cut the stream short.

    Raises:
        DataError: The function raised StopIteration.
    """
    try:
        return function(*arguments)
    except StopIteration as stop:
        name = getattr(function, "__name__", type(function).__name__)
        raise DataError(f"{name} raised StopIteration, which would end the stream; it must return a value") from stop


def shorter(kind: str, wanted: str) -> DataError:
    """The error of a restored iterator whose source ends before it comes to where the state was taken."""
    return DataError(f"{kind} stood at {wanted}, but its source ends before; restore a state with the same data")
