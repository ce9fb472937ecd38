"""Small things that several iterators need: checked settings, guarded calls, notes on errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from pipeal.errors import ConfigError, DataError

T = TypeVar("T")


def at_least(name: str, value: Any, least: int) -> int:
    """A whole number of at least ``least``.

    Raises:
        ConfigError: It is not.
    """
    # __index__ takes the integers of numpy, and no floats.
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < least:
        raise ConfigError(f"{name} is {value!r}; wanted a whole number of at least {least}")
    return int(value.__index__())


def check_instance(num_instances: int, instance_rank: int) -> None:
    """Refuses a rank that does not exist.

    Raises:
        ConfigError: Not ``0 <= instance_rank < num_instances``.
    """
    at_least("num_instances", num_instances, 1)
    if at_least("instance_rank", instance_rank, 0) >= num_instances:
        raise ConfigError(f"instance_rank is {instance_rank}; wanted less than num_instances, which is {num_instances}")


def check_callable(name: str, function: Callable[..., Any]) -> None:
    """Refuses what cannot be called.

    Raises:
        ConfigError: It cannot.
    """
    if not callable(function):
        raise ConfigError(f"{name} is of type {type(function).__name__}; wanted a function")


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


def rest_of(items: Sequence[T], start: int) -> Iterator[T]:
    """The items from ``start`` on, without a copy."""
    return (items[index] for index in range(start, len(items)))


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note`` for every supported Python; 3.10 has no such method, and keeps the note as 3.11 would."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]
