"""The file of methods.py: a row for each training, what is read off rows, and how long a training is. No model here.

::

    of       what all rows share: the data, the configuration, the budget, how settings are tried
    rows     a training each: of a method in so many parts, with a setting and a seed
    costs    what a method costs in so many parts, by counting
    times    the same by the clock, measured in turns on one machine
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil, inf, isfinite
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pipeal.config import document
from pipeal.core.errors import ConfigError, DataError, unknown_name
from pipeal.core.lock import FileLock
from pipeal.core.methods import METHODS, Method
from pipeal.reporting.recorders import write_json
from pipeal.run.grid import Setting, Value

Facts: TypeAlias = dict[str, Any]
"""Figures and their circumstances, as they stand in the JSON."""

RATE = "train.lr."
"""What keys of a setting begin with that cost nothing."""

SPARED = 0.02
"""The share of a training that its budget would allow, and that it does without at most."""


@dataclass(frozen=True)
class Contestant:
    """A method, with options of its own or of the model.

    >>> Contestant.of("al model.x_hid=200")
    Contestant(name='al model.x_hid=200', method=..., options={'model.x_hid': 200})

    Attributes:
        name: As it was asked for; what tables call it.
        method: Which.
        options: Dotted keys of the configuration, beside those that are tried.
    """

    name: str
    method: Method
    options: Mapping[str, Value]

    @classmethod
    def of(cls, text: str) -> Contestant:
        """From the name of a method and ``key=value``, with spaces between.

        Raises:
            ConfigError: There is no such method, or an option is none.
        """
        method, *options = text.split() or [""]
        if method not in METHODS:
            raise ConfigError(unknown_name("method", method, METHODS))
        found: dict[str, Value] = {}
        for option in options:
            key, equals, value = option.partition("=")
            if not equals:
                raise ConfigError(f"--methods {text!r}: found {option!r}, expected a key, '=' and a value")
            found[key] = document.parse(value, source=f"--methods {text!r}")
        return cls(" ".join([method, *options]), METHODS[method], found)

    def parts(self, wanted: int) -> int | None:
        """How many it is in where so many are wanted; None for a method that trains the network as a whole."""
        return None if self.method.is_whole else wanted


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        kind: A ``try`` of a setting, which never sees the test samples, or a training with a ``seed`` to report.
        name: Of the contestant.
        parts: Into how many its network is divided; None for one that is trained as a whole.
        setting: Its options, and what was tried.
        seed: Of weights and batches.
        epochs: How many.
        batches: Of each epoch.
        measured: After each epoch, the figure of held-out samples and that of test samples: None of a try, and of
            epochs that were not tested.
        best: The number, from 0, of the epoch that is best by held-out samples; None where the training diverged.
        samples: That it was trained on, over all epochs.
        seconds: Of training, evaluation left out, by the wall's clock, whatever else the machine did.
        failed: Why there is nothing to measure; None where there is.
        machine: Hardware, versions and threads.
    """

    kind: Literal["try", "seed"]
    name: str
    parts: int | None
    setting: dict[str, Value]
    seed: int
    epochs: int
    batches: int
    measured: list[tuple[float, float | None]]
    best: int | None
    samples: int
    seconds: float
    failed: str | None = None
    machine: Facts = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Says which training it is, wherever it was done."""
        return key_of(self.kind, self.name, self.parts, self.setting, self.seed, self.epochs, self.batches)

    @property
    def held(self) -> float | None:
        """The figure of the best epoch on held-out samples."""
        return None if self.best is None else self.measured[self.best][0]

    @property
    def test(self) -> float | None:
        """The figure of that epoch on test samples."""
        return None if self.best is None else self.measured[self.best][1]


def shown(options: Mapping[str, Any]) -> str:
    """Options as they are given.

    >>> shown({"model.dropout": 0.0, "methods.bp.same_start": True})
    'model.dropout=0.0 methods.bp.same_start=true'
    """
    return " ".join(f"{key}={json.dumps(one) if isinstance(one, bool) else one}" for key, one in options.items())


def key_of(*what: Any) -> str:
    """The same text for the same things, whatever the order of keys in mappings."""
    return json.dumps(what, sort_keys=True)


def best_epoch(held: Sequence[float], *, is_loss: bool) -> int | None:
    """The first of those that are best by held-out samples; None where none is a number.

    >>> best_epoch([0.1, 0.4, 0.4], is_loss=False), best_epoch([float("nan")], is_loss=True)
    (1, None)
    """
    scores = [(-one if is_loss else one) if isfinite(one) else -inf for one in held]
    return scores.index(max(scores)) if scores and max(scores) > -inf else None


def length(epochs: float, batches: int) -> tuple[int, int]:
    """So many epochs, of which a part may be wanted, as whole ones that are shorter: how many, and batches of each.

    Up to :data:`SPARED` of all batches are left out rather than that every epoch is shortened for their sake.

    >>> length(10, 71), length(6.5, 71), length(0.4, 71), length(10.1, 71)
    ((10, 71), (7, 66), (1, 28), (10, 71))
    """
    whole = max(1, ceil(epochs * (1 - SPARED)))
    return whole, max(1, min(batches, round(epochs * batches / whole)))


class Table:
    """What was found so far, in a file of its own that no other process writes meanwhile.

    Args:
        path: The file; made with the first row.
        of: What all rows share.

    Raises:
        DataError: The file is none of these, is of something else, or another process writes it.
    """

    def __init__(self, path: Path, of: Facts) -> None:
        self.path, self.of = path, json.loads(json.dumps(of))
        self.rows: dict[str, Row] = {}
        self.costs: dict[str, Facts] = {}
        self.times: dict[str, Facts] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock.take(path.with_name(f"{path.name}.lock"))
        if lock is None:
            raise DataError(f"{path}: another process writes it; name another file with --json, and --merge it later")
        self._lock = lock
        try:
            if path.is_file():
                self.merge(path)
        except BaseException:
            lock.release()
            raise

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

    def merge(self, path: Path) -> None:
        """Takes in what another file has and this one has not; what this one has stays as it is.

        Args:
            path: Of that file.

        Raises:
            DataError: It is none of these, is of something else, or has other times, where budgets go by these.
        """
        found = read_table(path)
        require_alike(found["of"], self.of, str(path))
        if self.of["budget"] == "time" and any(
            self.times.get(key, time) != time for key, time in found["times"].items()
        ):
            raise DataError(
                f"{path}: its budgets go by other times than those of {self.path}; begin there with a copy of this file"
            )
        for row in map(row_of, found["rows"]):
            self.rows.setdefault(row.key, row)
        self.costs = {**found["costs"], **self.costs}
        self.times = {**found["times"], **self.times}

    def add(self, row: Row) -> None:
        """Keeps a row; it is on the disk when the call returns."""
        self.rows[row.key] = row
        self.write()

    def write(self) -> None:
        """Writes all of it; a reader sees the old file or the new one."""
        rows = [asdict(self.rows[key]) for key in sorted(self.rows)]
        write_json(self.path, {"of": self.of, "rows": rows, "costs": self.costs, "times": self.times})


def read_table(path: Path) -> Facts:
    """What :class:`Table` wrote.

    Raises:
        DataError: It did not.
    """
    try:
        found: Facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: no table of methods ({error}); expected a file that methods.py wrote") from error
    if not isinstance(found, dict) or {*found} != {"of", "rows", "costs", "times"}:
        raise DataError(f"{path}: no table of methods; expected a file that methods.py wrote")
    return found


def row_of(found: Mapping[str, Any]) -> Row:
    """A row as the JSON has it."""
    return Row(**{**found, "measured": [tuple(pair) for pair in found["measured"]]})


def require_alike(found: Facts, wanted: Facts, source: str) -> None:
    """Asks that two tables are of the same.

    Raises:
        DataError: They are not; with the first key that differs.
    """
    for key in sorted({*found, *wanted}):
        one, other = found.get(key), wanted.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            require_alike(one, other, source)
        elif one != other:
            raise DataError(f"{source}: has {key} {one}, where {other} is wanted; name another file with --json")


def joined(tables: Iterable[Facts]) -> list[Facts]:
    """Tables that are of the same as one each, in the order of their first: the rows of all, and the costs and times of
    the first that has them."""
    by_key: dict[str, list[Facts]] = {}
    for table in tables:
        by_key.setdefault(key_of(table["of"]), []).append(table)
    whole = []
    for alike in by_key.values():
        rows = {row_of(row).key: row for table in reversed(alike) for row in table["rows"]}
        costs = {key: cost for table in reversed(alike) for key, cost in table["costs"].items()}
        times = {key: time for table in reversed(alike) for key, time in table["times"].items()}
        whole.append({"of": alike[0]["of"], "rows": list(rows.values()), "costs": costs, "times": times})
    return whole


def cost_key(name: str, parts: int | None, setting: Setting) -> str:
    """Where the costs of a training stand: its learning rate makes no difference."""
    return key_of(name, parts, {key: value for key, value in setting.items() if not key.startswith(RATE)})


def best_try(rows: Iterable[Row], name: str, parts: int | None, *, is_loss: bool) -> Row | None:
    """The best of the tries of a contestant, of equals that whose key is first, whichever ended first; None where all
    diverged, or there are none yet."""
    own = [row for row in tries(rows, name, parts) if row.held is not None]
    sign = 1 if is_loss else -1
    return min(own, key=lambda row: (sign * (row.held or 0.0), row.key), default=None)


def tries(rows: Iterable[Row], name: str, parts: int | None) -> list[Row]:
    """All tries of a contestant."""
    return [row for row in rows if (row.kind, row.name, row.parts) == ("try", name, parts)]


def seeds_of(rows: Iterable[Row], chosen: Row) -> dict[int, Row]:
    """By seed, the trainings with the setting of a try."""
    what = (chosen.name, chosen.parts, chosen.setting)
    own = [row for row in rows if row.kind == "seed" and (row.name, row.parts, row.setting) == what]
    return {row.seed: row for row in sorted(own, key=lambda row: row.seed)}
