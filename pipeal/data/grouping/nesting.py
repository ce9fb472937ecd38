"""Nested data: dicts, tuples and lists, and whatever stands at their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from pipeal.core.errors import DataError, a_type, unknown_name

Keys: TypeAlias = tuple[str | int, ...]
"""The way to a leaf."""


def leaves(nested: Any) -> Iterator[tuple[Keys, Any]]:
    """What stands at the ends, each with the way to it.

    >>> list(leaves({"a": (1, 2), "b": 3}))
    [(('a', 0), 1), (('a', 1), 2), (('b',), 3)]
    """
    if not isinstance(nested, dict | tuple | list):
        yield (), nested
        return
    for key, part in items(nested):
        for keys, leaf in leaves(part):
            yield (key, *keys), leaf


def mapped(function: Callable[[Any], Any], nested: Any) -> Any:
    """The same nesting, with ``function`` applied at the ends.

    >>> mapped(str, {"a": (1, 2)})
    {'a': ('1', '2')}
    """
    if not isinstance(nested, dict | tuple | list):
        return function(nested)
    parts = [mapped(function, part) for _, part in items(nested)]
    if isinstance(nested, dict):
        return dict(zip(nested, parts, strict=True))
    return type(nested)(*parts) if hasattr(nested, "_fields") else type(nested)(parts)


def build(form: Any, parts: Iterator[Any]) -> Any:
    """Nested as ``form`` is, its leaves taken from ``parts`` in order."""
    return mapped(lambda _: next(parts), form)


def at(nested: Any, keys: Keys, what: str) -> Any:
    """The entry at the end of a way; ``what`` names the data in an error.

    Raises:
        DataError: There is no such entry.
    """
    for depth, key in enumerate(keys):
        name = what + path(keys[:depth])
        if not isinstance(nested, dict if isinstance(key, str) else (tuple, list)):
            wanted = "dict" if isinstance(key, str) else "tuple"
            raise DataError(f"{name} is no {wanted} but {a_type(nested)}; wanted one with the entry {key!r}")
        entries = dict(items(nested))
        if key not in entries:
            raise DataError(f"{name}: {unknown_name('input', str(key), map(str, entries))}")
        nested = entries[key]
    return nested


def renamed(nested: Any, names: Any, what: str) -> Any:
    """Nested data under other keys.

    Args:
        nested: Copied where keys change.
        names: ``{old: (new, names of what is below, or None)}``; None changes nothing.
        what: Names the argument in an error.

    Raises:
        DataError: A key that is not there, or two entries of one name.
    """
    if names is None:
        return nested
    for old in names:
        at(nested, (old,), what)
    new: dict[Any, Any] = {}
    for key, part in items(nested):
        other, below = names.get(key, (key, None))
        if other in new:
            raise DataError(f"{what}: two entries would be called {other!r}; give each a name of its own")
        new[other] = renamed(part, below, what + path((key,)))
    return new


def path(keys: Keys) -> str:
    """A way as it is written behind a name: ``['a'][0]``."""
    return "".join(f"[{key!r}]" for key in keys)


def items(nested: Any) -> Sequence[tuple[str | int, Any]]:
    """The entries of a dict, or the numbered ones of a tuple or list."""
    return list(nested.items()) if isinstance(nested, dict) else list(enumerate(nested))
