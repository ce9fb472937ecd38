"""A checkpoint that ``--resume`` names is gone back to once: the same command, if it is given again, goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from pipeal.cli.run_folder import run_of
from pipeal.errors import DataError
from pipeal.train.manifest import read_manifest
from pipeal.train.recorders import write_json

TAKEN_UP = "taken-up.json"
"""In a run's folder: the checkpoints that were named, by their places in it, with their numbers as written then."""


def unless_taken_up(resume: str, say: Callable[[str], None]) -> str:
    """What is to be resumed: the run itself, instead of a checkpoint that it was taken up from before.

    Args:
        resume: As given; what is no checkpoint of a run comes back as it is.
        say: Told of it.
    """
    path = Path(resume)
    run = run_of(path)
    if run is None:
        return resume
    before = _taken_up(run).get(_place(run, path))
    if before is None or _number(path) > before:  # or it was written anew since
        return resume
    say(
        f"{run} was taken up from {path.name} before, and goes on with what was done since; to go back there once "
        f"more, remove {run / TAKEN_UP}"
    )
    return str(run)


def note_taken_up(run: Path, path: Path) -> None:
    """Notes that a run goes on from a checkpoint, once no other is newer.

    Raises:
        DataError: The system refused to write.
    """
    write_json(run / TAKEN_UP, {**_taken_up(run), _place(run, path): _number(path)})


def _place(run: Path, path: Path) -> str:
    return path.resolve().relative_to(run.resolve()).as_posix()


def _number(path: Path) -> int:
    """That of a checkpoint; 0 for one that is not there any more."""
    try:
        return read_manifest(path).number
    except DataError:
        return 0


def _taken_up(run: Path) -> dict[str, int]:
    """What was noted; nothing where that cannot be read."""
    try:
        found = json.loads((run / TAKEN_UP).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {place: number for place, number in found.items() if isinstance(number, int)}
