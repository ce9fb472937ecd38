"""Which part of what a model returns is its answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from pipeal.core.errors import ConfigError, a_type
from pipeal.core.tree import Tree, describe, shapes_of

ANSWERS = ("logits", "out", "last_hidden_state")
"""What the answer is called in an output of several fields, the first of these that is there."""


class Answer(nn.Module):
    """Takes the answer out of an output of several fields (:func:`answer_of`)."""

    def forward(self, out: Tree) -> Tree:
        """``out`` is what a model returned."""
        return answer_of(out)


def answer_of(out: Any) -> Any:
    """The answer in what a model returns: of a ``ModelOutput``, another dataclass, a dict or a named tuple the field of
    that name, of a tuple the one item that is not None; anything else is the answer itself.

    >>> answer_of({"loss": None, "logits": 3}), answer_of((3, None)), answer_of(3)
    (3, 3, 3)

    Raises:
        ConfigError: There are several fields, and none is called as in :data:`ANSWERS`.
    """
    if type(out) in (tuple, list):
        there = [item for item in out if item is not None]
        return there[0] if len(there) == 1 else out
    fields = fields_of(out)
    if fields is None:
        return out
    there = [name for name, value in fields.items() if value is not None]
    named = [name for name in ANSWERS if name in there]
    if not named and len(there) != 1:
        raise ConfigError(
            f"the model returns {a_type(out)} with {', '.join(map(str, there)) or 'no field set'}; expected "
            f"one field, or one called {', '.join(ANSWERS)}: wrap the model in a module that returns its answer"
        )
    return fields[named[0] if named else there[0]]


def has_answer(out: Any) -> bool:
    """Whether :func:`answer_of` finds one."""
    try:
        answer_of(out)
    except ConfigError:
        return False
    return True


def fields_of(out: Any) -> Mapping[str, Any] | None:
    """The fields of a dict, a ``ModelOutput`` or another dataclass, or a named tuple; None of anything else."""
    if isinstance(out, Mapping):
        return out
    if isinstance(out, tuple) and hasattr(out, "_asdict"):
        return out._asdict()
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        return {field.name: getattr(out, field.name) for field in dataclasses.fields(out)}
    return None


def what_is(out: Tree) -> str:
    """Shapes and types for a message, and what holds them where that is no tensor or tuple."""
    shapes = describe(shapes_of(out))
    if fields_of(out) is None:
        return shapes
    return f"{a_type(out)} with {', '.join(map(str, fields_of(out) or ()))} ({shapes}), which is no tensor"
