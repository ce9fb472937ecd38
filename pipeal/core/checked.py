"""What was read from a file, as the dataclass it should be: one line says what is not."""

from __future__ import annotations

import reprlib
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


def checked(adapter: TypeAdapter[T], value: Any) -> T:
    """Makes a value of a type out of plain ones.

    >>> checked(TypeAdapter(dict[str, int]), {"step": "many"})
    Traceback (most recent call last):
      ...
    ValueError: step: input should be a valid integer, unable to parse string as an integer, found 'many'

    Raises:
        ValueError: It does not fit; the first misfit is named.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ValueError(misfit(error)) from None


def misfit(error: ValidationError) -> str:
    """The first thing that does not fit: where it is, what was wanted, what was found."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "all of it"
    if first["type"] == "missing":
        return f"{where} is missing"
    wanted = first["msg"][:1].lower() + first["msg"][1:]
    return f"{where}: {wanted}, found {reprlib.repr(first['input'])}"
