"""Exceptions as plain values: own and built-in ones come back as themselves, all others by name, none by pickle."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from pipeal import PipealError
from pipeal.core.errors import (
    ConfigError,
    Interrupted,
    NonFiniteError,
    OutOfMemoryError,
    PeerLostError,
    StallError,
    add_note,
    exit_code,
)
from pipeal.engine.distributed.remote_errors import rebuilt, told

ERRORS: list[BaseException] = [
    ConfigError("no such key"),
    NonFiniteError("not finite", 2, 7, (1.0, float("inf"))),
    OutOfMemoryError("too much", 1, None, 4),
    Interrupted("saved", 143),
    PeerLostError("gone", 3, 9),
    StallError("stands still"),
    ValueError("wrong", 3),
    KeyError("missing"),
    FileNotFoundError(2, "No such file", "there"),
    SystemExit(4),
    KeyboardInterrupt(),
    StopIteration(3),
    RuntimeError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_known_exceptions_come_back_as_themselves(error: BaseException) -> None:
    add_note(error, "in the forward")
    found = rebuilt(json.loads(json.dumps(told(error))), "rank 2")
    assert type(found) is type(error)
    assert (str(found), found.args, exit_code(found)) == (str(error), error.args, exit_code(error))
    fields = {name: value for name, value in vars(error).items() if name != "__notes__"}
    assert {name: value for name, value in vars(found).items() if name != "__notes__"} == fields
    assert getattr(found, "filename", None) == getattr(error, "filename", None)
    first, second = found.__notes__
    assert first == "in the forward"
    assert second.startswith("on rank 2:\n")


def test_losses_that_are_not_numbers_come_back() -> None:
    """Symptom: on rank 0 the error had no losses, and looking for them raised another one. NaN equals nothing."""
    found: Any = rebuilt(json.loads(json.dumps(told(NonFiniteError("broken", 2, 7, (1.0, math.nan))))), "rank 2")
    assert (type(found), str(found), found.layer, found.batch) == (NonFiniteError, "broken", 2, 7)
    assert found.losses[0] == 1.0
    assert math.isnan(found.losses[1])


class OwnError(PipealError):
    """A user's own."""

    def __init__(self, *, hint: object) -> None:
        super().__init__(f"hint {hint}")


@pytest.mark.parametrize("error", [OwnError(hint=3), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why")])
def test_others_come_by_name(error: BaseException) -> None:
    found = rebuilt(json.loads(json.dumps(told(error))), "rank 1")
    assert type(found) is RuntimeError
    assert str(found) == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", ["eval", "open", "exit_code", "__import__", "Nothing"])
def test_what_is_no_exception_is_not_called(name: str) -> None:
    facts = {"kind": name, "line": "x", "args": ["1 + 1"], "fields": {}, "notes": [], "stack": "", "errno": None}
    assert type(rebuilt(facts, "rank 1")) is RuntimeError
