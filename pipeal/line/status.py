"""How a line stands: each stage writes it, and hears it of all stages before."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, time
from typing import Annotated, Any, TypeAlias

from pydantic import Field, TypeAdapter

from pipeal.core.checked import checked
from pipeal.core.errors import DataError
from pipeal.reporting.tables import Cell, table_text

_EVERY_S = 1.0
_log = logging.getLogger(__name__)

STATUS_FILE = "stage.json"
"""Not the name of a run's: the folder of a stage is none."""

_Word: TypeAlias = Annotated[str, Field(max_length=40, pattern="^[ -~]*$")]  # shown in a terminal, on a peer's word
_Count: TypeAlias = Annotated[int, Field(strict=True, ge=0, lt=2**62)]


@dataclass(frozen=True)
class StageStatus:
    """Of one stage.

    Attributes:
        stage: Its number.
        state: ``working`` or ``finished``.
        items: How many are behind it.
        batches: How many of them were batches to learn from.
        saved: The items that its last snapshot covers; None where there is none of this life.
        saved_at: When that was written, in seconds of Unix time.
        retained: Items that the next stage has not saved yet.
        retained_mib: Of their tensors.
        waiting: Items that have arrived.
        window: Items that may be on the way to the next stage.
        before: Whether the stage before is there.
        after: Likewise the next one.
        total: How many batches all epochs have, as the first stage counts; None for others.
        rate: Batches per second since the status before.
        at: When it was told, in seconds of Unix time.
    """

    stage: _Count
    state: _Word
    items: _Count
    batches: _Count
    saved: _Count | None
    saved_at: float | None
    retained: _Count
    retained_mib: float
    waiting: _Count
    window: _Count
    before: _Word
    after: _Word
    total: _Count | None = None
    rate: float = 0.0
    at: float = 0.0


_STATUSES = TypeAdapter(dict[str, StageStatus])


class Status:
    """Writes it, and passes it on.

    Args:
        folder: Of the stage.
        stage: Its number.
    """

    def __init__(self, folder: Path, stage: int) -> None:
        self._path = folder / STATUS_FILE
        self._stage = stage
        self._below = _told_before(folder, stage)
        self._told_at: float | None = None
        self._batches = 0
        self._refused = False

    def tell(
        self,
        status: Callable[[], StageStatus],
        below: Mapping[str, Any],
        pass_on: Callable[[Mapping[str, Any]], None] | None,
        *,
        at_once: bool = False,
    ) -> None:
        """Writes how it stands, if the last time was a second ago, or else ``at_once``."""
        now = monotonic()
        elapsed_s = None if self._told_at is None else now - self._told_at
        if elapsed_s is not None and elapsed_s < _EVERY_S and not at_once:
            return
        found = status()
        rate = max(0.0, (found.batches - self._batches) / elapsed_s) if elapsed_s else 0.0
        own = {**asdict(found), "rate": rate, "at": time()}
        self._told_at, self._batches = now, found.batches
        self._below.update(below)
        stages = {**self._below, str(self._stage): own}
        try:
            # Whole or absent, as ever; but no power cut is worth the time of waiting for the disk each second.
            aside = self._path.with_suffix(".aside")
            aside.write_text(json.dumps({"stages": stages}, indent=1) + "\n", encoding="utf-8")
            aside.replace(self._path)
            self._refused = False
        except OSError as error:  # a disk that is full now stops no training
            if not self._refused:
                _log.warning(f"{self._path}: {error.strerror or error}; the training goes on")
            self._refused = True
        if pass_on is not None:
            pass_on(stages)


def _told_before(folder: Path, stage: int) -> dict[str, Any]:
    """Of the stages before, what an earlier life wrote last: some may have left since, and tell nothing more."""
    with suppress(DataError):
        return {str(one.stage): asdict(one) for one in read_status(folder) if one.stage < stage}
    return {}


def stages_before(stage: int, found: Any) -> dict[str, Any]:
    """What the stage before has told of itself and of those before it, looked at, with times by the clock here: that of
    another machine may be hours off.

    Args:
        stage: The number of the stage that was told.
        found: What came.

    Raises:
        ValueError: It is none.
    """
    stages = checked(_STATUSES, found)
    if not stages.keys() <= {str(number) for number in range(stage)}:
        raise ValueError("its status is not of the stages before")
    sender = stages.get(str(stage - 1))
    behind_s = 0.0 if sender is None else time() - sender.at  # it has told of itself just now
    return {number: asdict(_later(one, behind_s)) for number, one in stages.items()}


def _later(one: StageStatus, by_s: float) -> StageStatus:
    return replace(one, at=one.at + by_s, saved_at=None if one.saved_at is None else one.saved_at + by_s)


def read_status(folder: Path) -> list[StageStatus]:
    """What a stage knows of itself and of all stages before.

    Raises:
        DataError: There is none.
    """
    path = folder / STATUS_FILE
    try:
        stages = checked(_STATUSES, json.loads(path.read_text(encoding="utf-8"))["stages"])
        return [stages[number] for number in sorted(stages, key=int)]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; name the folder of a stage, best of the last one") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not what a stage of a line writes: {error}") from error


def status_table(stages: Sequence[StageStatus]) -> str:
    """For people."""
    now = time()
    total = next((one.total for one in stages if one.total is not None), None)
    columns = [
        "stage",
        "state",
        "batches",
        "batches/s",
        "window",
        "arrived",
        "retained",
        "MiB",
        "saved",
        "before",
        "after",
        "told",
    ]
    rows: list[list[Cell]] = [
        [
            f"{one.stage}",
            one.state,
            one.batches if total is None else f"{one.batches} of {total}",
            one.rate,
            one.window,
            one.waiting,
            one.retained,
            one.retained_mib,
            "-" if one.saved_at is None else f"item {one.saved}, {max(0.0, now - one.saved_at):.0f} s ago",
            one.before,
            one.after,
            f"{max(0.0, now - one.at):.0f} s ago",
        ]
        for one in stages
    ]
    return table_text("the line", columns, rows)
