"""Whether a run goes on, has come to its end, or was cut short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeal.core.artifacts import LOCK
from pipeal.core.lock import lock_is_held

State = Literal["running", "finished", "interrupted", "failed", "died", "unknown"]

_TOLD: dict[str, State] = {
    "running": "running",
    "finished": "finished",
    "interrupted": "interrupted",
    "failed": "failed",
}


@dataclass(frozen=True)
class Status:
    """How a run stands.

    Attributes:
        state: ``died`` is a run that says it is running, but whose process is gone. ``unknown`` is one that says
            nothing and has not come to its end.
        message: What the run said last; empty if nothing.
        started: When it began, in ISO 8601; empty where it did not say.
        updated: When it spoke last, in ISO 8601.
    """

    state: State
    message: str = ""
    started: str = ""
    updated: str = ""


def told_status(told: Mapping[str, Any], folder: Path) -> Status:
    """The status that a run wrote into its ``status.json``, held against its lock.

    Args:
        told: The content of ``status.json``.
        folder: The run's folder, in which ``run.lock`` is held for as long as its process lives.
    """
    state = _TOLD.get(str(told.get("status")), "unknown")
    if state == "running":
        held = lock_is_held(LOCK.at(folder))
        state = "unknown" if held is None else "running" if held else "died"
    words = {name: str(told.get(name) or "") for name in ("message", "started", "updated")}
    if state == "died":
        words["message"] = words["message"] or "its process is gone without a word, as after a kill or a power cut"
    return Status(state, **words)


def inferred_status(*, done: int, asked: int | None, summarised: bool) -> Status:
    """The status of a run that left no ``status.json``.

    Args:
        done: Epochs in its rows, of all turns.
        asked: Epochs that were asked for; None where nobody knows.
        summarised: Whether it wrote a summary, which it does when it ends, however it ends.
    """
    if summarised:
        return Status("interrupted" if asked is not None and 0 < done < asked else "finished")
    return Status("unknown")
