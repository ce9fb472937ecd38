"""The errors a user can meet. Each message says what was found, what was wanted and what to do."""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from numbers import Integral
from pathlib import Path


class PipealError(Exception):
    """Base of every error that pipeal raises on purpose.

    Commands print it in one line and exit with 2, a user's mistake, but for those of its kinds that say otherwise and
    for a full disk, which is no mistake of the user and exit code 1.
    """

    def __str__(self) -> str:
        # The message alone: some keep more in ``args``, with which they are pickled.
        return str(self.args[0]) if self.args else ""


class ConfigError(PipealError, ValueError):
    """A configuration value is unknown, ill-typed or out of range; the message holds its dotted path."""


class DataError(PipealError, ValueError):
    """A data file is missing, malformed or does not fit the model; the message holds file and line."""


class WorkerError(DataError):
    """A process that prepares data died; commands exit with 1, as it is no mistake of the user."""


class PlacementError(PipealError, ValueError):
    """Layers, stages and devices do not fit each other, or a device does not exist."""


class LayerError(PipealError, TypeError):
    """Something else is given as a layer, a part of one or a model, such as a class in the place of an instance."""


class ScheduleError(PipealError, RuntimeError):
    """A layer or pipeline was used out of order, or a recorded run broke its schedule."""


class CountingError(PipealError, RuntimeError):
    """FLOPs cannot be counted; what a layer raised meanwhile is the cause (``__cause__``)."""


class StallError(PipealError, RuntimeError):
    """No stage made progress for too long, or a disk does not answer; commands exit with 1.

    Of a stage, the message says which and shows its stack.
    """


class NonFiniteError(PipealError, ArithmeticError):
    """A layer's loss is not finite, or its weights are not; commands exit with 1.

    Args:
        message: What was found, and what to do.
        layer: The layer's number.
        batch: The batch's number.
        losses: The layer's losses on it; none where weights were found.
        is_to_blame: Whether it is known that just this batch did it. It is not where the weights were not finite
            before it already, and where they were not checked, as on a GPU.
    """

    def __init__(
        self, message: str, layer: int, batch: int, losses: tuple[float, ...], *, is_to_blame: bool = True
    ) -> None:
        super().__init__(message, layer, batch, losses)
        self.layer = layer
        self.batch = batch
        self.losses = losses
        self.is_to_blame = is_to_blame


class OutOfMemoryError(PipealError, MemoryError):
    """A stage's memory does not suffice for a batch; commands exit with 1.

    What the device said is the cause (``__cause__``).

    Args:
        message: Where it happened, for what input, and what to lower.
        stage: The stage's number.
        layer: The layer's number; None where the batch did not even arrive.
        batch: The batch's number.
    """

    def __init__(self, message: str, stage: int, layer: int | None, batch: int) -> None:
        super().__init__(message, stage, layer, batch)
        self.stage = stage
        self.layer = layer
        self.batch = batch


class UntidyError(DataError):
    """A checkpoint is written and good, but an older one that it should replace cannot be removed."""


class SaveError(PipealError, OSError):
    """Something a run leaves could not be written; the run itself came to its end, and commands exit with 1."""


class Interrupted(PipealError):  # noqa: N818  not a mistake: someone asked for it
    """A run was asked to end, and did, at a place from which it can go on; commands exit with :attr:`code`.

    Args:
        message: Where, and how it goes on.
        code: The exit code of a command: 128 and the number of the signal.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class LineError(PipealError, RuntimeError):
    """A stage of a line has failed for good, and with it the line; commands exit with 1."""


class PeerLostError(PipealError, RuntimeError):
    """Another process of a distributed run has ended before its time, or is not heard of any more.

    Args:
        message: Which one, where it ran, and what is known of its end.
        rank: Its rank; None where it is not one of them, but all that are not here.
        code: The exit code of a command that ends by this: that of the peer where it said why it ended.
    """

    def __init__(self, message: str, rank: int | None = None, code: int = 1) -> None:
        super().__init__(message, rank, code)
        self.rank = rank
        self.code = code


@contextmanager
def refusals_told(what: str, advice: str = "", kind: type[PipealError] = DataError) -> Iterator[None]:
    """Raises an error of pipeal for an OSError in its block: what was tried, what the system said, and what to do.

    >>> with refusals_told("cannot read words.txt", "; name another file"):
    ...     raise FileNotFoundError(2, "No such file or directory")
    Traceback (most recent call last):
      ...
    pipeal.core.errors.DataError: cannot read words.txt: No such file or directory; name another file

    Args:
        what: What was tried.
        advice: What to do, after a semicolon.
        kind: The error to raise.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}{advice}") from error


def require_usable(path: str | Path, what: str, advice: str = "", kind: type[PipealError] = DataError) -> None:
    """Asks that the system can look a path up; whether anything is there does not matter.

    Args:
        path: The file or folder.
        what: As for :func:`refusals_told`, likewise the others.
        advice: Likewise.
        kind: Likewise.

    Raises:
        PipealError: Of that kind: a name is too long, links lead in a circle, there is no permission.
    """
    with refusals_told(what, advice, kind), suppress(FileNotFoundError, NotADirectoryError):
        os.stat(path)


def exit_code(error: BaseException) -> int:
    """With what a command ends by an error: 2 for a user's mistake, 1 for a machine's failure or a bug.

    >>> exit_code(ConfigError("no such key")), exit_code(KeyboardInterrupt()), exit_code(ValueError())
    (2, 130, 1)
    """
    if isinstance(error, (Interrupted, PeerLostError)):
        return error.code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    not_the_users = (StallError, SaveError, WorkerError, NonFiniteError, OutOfMemoryError, LineError)
    return 2 if isinstance(error, PipealError) and not isinstance(error, not_the_users) else 1


def unknown_name(kind: str, found: str, known: Iterable[str]) -> str:
    """The message for an unknown name, with the nearest known one first.

    >>> unknown_name("data set", "agnew", ["agnews", "imdb"])
    "unknown data set 'agnew'; did you mean 'agnews'? (known: agnews, imdb)"
    """
    names = sorted(known)
    return f"unknown {kind} {_short.repr(found)}{did_you_mean(found, names)} (known: {', '.join(names)})"


_short = reprlib.Repr()
_short.maxstring = 60


def nearest(found: str, known: Iterable[str], *, likeness: float = 0.5) -> str | None:
    """The nearest of the known names, whatever their case, or the one of which it is the beginning.

    Args:
        likeness: Of a name that is near, from 0 to 1 (:class:`difflib.SequenceMatcher`).

    >>> nearest("layr", ["Layer", "Head"])
    'Layer'
    """
    lower, begun = {name.lower(): name for name in known}, found.lower()
    near = difflib.get_close_matches(begun, lower, n=1, cutoff=likeness)
    near = near or [name for name in lower if begun and name.startswith(begun)]
    return lower[near[0]] if len(near) == 1 else None


def did_you_mean(found: str, known: Iterable[str], *, likeness: float = 0.5) -> str:
    """The :func:`nearest` of the known names as the end of a message; nothing where none is near.

    >>> did_you_mean("Shakespere", ["agnews", "shakespeare"])
    "; did you mean 'shakespeare'?"
    """
    near = nearest(found, known, likeness=likeness)
    return f"; did you mean {near!r}?" if near else ""


def check_named(kind: str, found: object, known: Iterable[str | None]) -> None:
    """Refuses what is not among the known names.

    Raises:
        ConfigError: It is not.
    """
    names = list(known)
    if found not in names:
        raise ConfigError(unknown_name(kind, str(found), filter(None, names)))


def is_whole(value: object, least: float = -inf, most: float = inf) -> bool:
    """Whether it is a whole number from ``least`` to ``most``, of any library; a truth value is none.

    >>> [is_whole(value, 1) for value in (2, 0, 1.0, True, "2")]
    [True, False, False, False, False]
    """
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most


def check_counts(**sizes: int | None) -> None:
    """Refuses sizes below 1, by their names; None is no size.

    Raises:
        ConfigError: One is.
    """
    for name, size in sizes.items():
        if size is not None and not is_whole(size, 1):
            raise ConfigError(f"{name} is {size!r}; expected a whole number, at least 1")


def check_width(width: float) -> None:
    """Refuses what is no multiple of a network's own width; wider than 64 times is a slip, and would fill the memory.

    Raises:
        ConfigError: It is none.
    """
    if not 0 < width <= 64:
        raise ConfigError(f"width is {width}; expected a number above 0 and at most 64")


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note`` for every supported Python; 3.10 has no such method, and keeps the note as 3.11 would."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]


def listed(names: Sequence[str], most: int) -> str:
    """Names for a message; of many, the first.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def first_line(error: BaseException) -> str:
    """An exception in one line.

    >>> first_line(ValueError("too wide\\nby far"))
    'ValueError: too wide'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def a_type(value: object) -> str:
    """The type of a value, with its article.

    >>> a_type(3), a_type("a")
    ('an int', 'a str')
    """
    name = type(value).__name__
    return f"{'an' if name.lstrip('_')[:1].lower() in {*'aeio'} else 'a'} {name}"


def name_of(given: object) -> str:
    """Names an argument of the wrong type for an error message.

    >>> name_of(3.0), name_of(dict)
    ('float', 'the class dict itself instead of dict(…)')
    """
    if isinstance(given, type):
        return f"the class {given.__name__} itself instead of {given.__name__}(…)"
    return "None" if given is None else type(given).__name__
