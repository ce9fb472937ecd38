"""An exception as plain values, and as an exception again in another process."""

from __future__ import annotations

import builtins
import json
import os
import traceback
from collections.abc import Mapping
from typing import Any

import pipeal.core.errors
from pipeal.core.errors import PipealError, add_note, first_line


def told(error: BaseException) -> dict[str, Any]:
    """What another process needs to know of an exception; what JSON can hold."""
    kind = type(error)
    fields = dict(vars(error))
    notes = fields.pop("__notes__", [])
    known = getattr(pipeal.core.errors, kind.__name__, None) is kind or getattr(builtins, kind.__name__, None) is kind
    args = list(error.__reduce__()[1]) if known else list(error.args)  # an OSError keeps its file's name elsewhere
    return {
        "kind": kind.__name__ if known else None,
        "line": first_line(error),
        "args": args if _plain(args) else [str(error)],
        "fields": fields if _plain(fields) else {},
        "notes": [str(note) for note in notes],
        "errno": error.__cause__.errno if isinstance(error.__cause__, OSError) else None,
        "stack": "".join(traceback.format_exception(kind, error, error.__traceback__)),
    }


def rebuilt(found: Mapping[str, Any], where: str) -> BaseException:
    """The exception that :func:`told` was given.

    One of pipeal's own or of Python's comes as its own type, any other one as a RuntimeError that names it.

    Args:
        found: What was told.
        where: The process it happened in; a note says it, with the stack it had there.
    """
    error = _same_kind(found) or RuntimeError(found["line"])
    for note in found["notes"]:
        add_note(error, note)
    add_note(error, f"on {where}:\n{found['stack'].rstrip()}")
    if found["errno"] is not None:  # a full disk is no mistake of the user's, on any rank
        error.__cause__ = OSError(found["errno"], os.strerror(found["errno"]))
    return error


def _same_kind(found: Mapping[str, Any]) -> BaseException | None:
    kind = found["kind"]
    if kind is None:
        return None
    cls: Any = getattr(pipeal.core.errors, kind, None) or getattr(builtins, kind, None)
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        return None
    args = [tuple(value) if isinstance(value, list) else value for value in found["args"]]
    try:
        error: BaseException = cls(*args)
    except TypeError:
        if not issubclass(cls, PipealError):
            return None
        error = cls.__new__(cls, *args)  # past an __init__ that gives fewer arguments on than it takes
    for name, value in found["fields"].items():
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error


def _plain(value: Any) -> bool:
    """Whether JSON gives it back as it was, but for tuples."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return False
    return bool(_listed(json.loads(text)) == _listed(value))


def _listed(value: Any) -> Any:
    """Tuples as lists, and NaN, which equals nothing, as a word: of the losses that end a run, it is the usual one."""
    if isinstance(value, float) and value != value:
        return "nan"
    if isinstance(value, list | tuple):
        return [_listed(part) for part in value]
    if isinstance(value, dict):
        return {key: _listed(part) for key, part in value.items()}
    return value
