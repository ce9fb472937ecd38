"""A run's folder: whose it is, and how the run stands.

::

    <out>/<dataset>-<model>-<mode>-001/
        asked.yaml     the configuration as asked for: the same command finds its unfinished run by it
        status.json    running, finished, interrupted or failed; since when, and how often it was taken up again; the
                       checkpoint that an unfinished run was told to go back to
        run.lock       locked by the process that writes here, as long as it lives
"""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pipeal.config import RunConfig, dump_config
from pipeal.core.artifacts import ASKED, LOCK, STATUS
from pipeal.core.atomic import write_whole
from pipeal.core.errors import DataError, Interrupted, PipealError, first_line, refusals_told
from pipeal.core.lock import FileLock
from pipeal.reporting.recorders import write_json
from pipeal.training.checkpoint.store import Checkpoint, CheckpointStore

Status = Literal["running", "finished", "interrupted", "failed"]


def lock_run(path: Path, option: str = "", kind: type[PipealError] = DataError) -> FileLock:
    """The lock of a run's folder, held from now on.

    Args:
        path: The folder.
        option: What named it, with a space behind.
        kind: The error to raise.

    Raises:
        PipealError: Of that kind: another process works there, or the system refused to make the file.
    """
    with refusals_told(f"{option}{path}: cannot work there", kind=kind):
        lock = FileLock.take(LOCK.at(path))
    if lock is None:
        raise kind(f"{option}{path}: another process works at this run; wait for it, or end it")
    return lock


class RunFolder:
    """A folder that this process alone writes to. Used with ``with``.

    Args:
        path: The folder.
        config: As asked for now.
        asked: As its run was asked for before; None for a new one.
        lock: Its lock, held.

    Attributes:
        resumed: Whether there was a run in it.
        asked: What its run was asked for before, or is now.
        checkpoint: The folder of the checkpoint to go on from; None for the newest.
        way_back: What goes on with the run once it was ended, in words.
        passed: That of one that was named, though the run has gone on from it already: a command that is given again,
            as by a batch system, does not go back again.
    """

    def __init__(self, path: Path, config: RunConfig, *, asked: RunConfig | None, lock: FileLock) -> None:
        self.path = path
        self.checkpoint: Path | None = None
        self.way_back = "the same command"
        self.passed: Path | None = None
        self.resumed = asked is not None
        self.asked = asked or config
        self._config = config
        self._lock = lock
        self._status: Status | None = None
        before = last_told(path)
        self._told: dict[str, Any] = {
            "epoch": _count(before.get("epoch")),
            "epochs": config.train.epochs,
            "started": str(before.get("started") or _now()),
            "resumes": _count(before.get("resumes")) + self.resumed,
            "back": before.get("back"),
        }

    @property
    def status_path(self) -> Path:
        """The file that :meth:`tell` writes."""
        return STATUS.at(self.path)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._status is None:
                return  # a mistake was found before anything was done
            if error is None:
                if self._status == "running":
                    self.tell("finished")
            elif isinstance(error, Interrupted):
                self.tell("interrupted", str(error))
            elif isinstance(error, (KeyboardInterrupt, SystemExit)):  # whose text is a number, or none
                self.tell("interrupted", f"ended at once; {self.way_back} goes on from the last checkpoint")
            else:
                self.tell("failed", first_line(error))
        except (OSError, PipealError):
            if error is None:
                raise  # a run that cannot say that it finished will be taken up again: the user should know
        finally:
            self.release()

    def release(self) -> None:
        """Lets other processes work there; a second time does nothing."""
        self._lock.release()

    def begin(self) -> None:
        """Says that the run is under way, and removes what a killed process left half-written."""
        for left in (*self.path.glob(".*.aside"), *self.path.glob("*/.*.aside")):
            if left.is_file():  # checkpoints have a broom of their own
                left.unlink(missing_ok=True)
        self.tell("running")

    def keep_asked(self) -> None:
        """From here on the run is found by what it is asked for now; all that was chosen for that is written by then.

        Raises:
            DataError: The system refused to write.
        """
        if self._config != self.asked:
            write_asked(self.path, self._config)

    def tell(self, status: Status, message: str = "", epoch: int | None = None) -> None:
        """Writes how the run stands, with the epochs behind it; when it began first is kept.

        Raises:
            DataError: The system refused to write.
        """
        self._status = status
        if epoch is not None:
            self._told["epoch"] = epoch
        now = {"status": status, "message": message, **self._told, "updated": _now(), "pid": os.getpid()}
        if status == "finished":
            now["back"] = None  # it may be told to go back to the same one again
        write_json(self.status_path, now)

    def go_back_to(self, path: Path) -> None:
        """Takes the run up from one of its checkpoints; a second time it goes on with what was saved since.

        Raises:
            DataError: The checkpoint is not as it was written.
        """
        path = path.resolve()
        name = str(path.relative_to(self.path.resolve()))
        newest, back = CheckpointStore(path.parent).last_number(), self._told["back"]
        back = back if isinstance(back, dict) else {}
        if back.get("to") == name and newest > _count(back.get("newest")):
            self.passed = path
            return
        Checkpoint.open(path)  # all of it: what is damaged is told before anything is done
        self.checkpoint = path
        self._told["back"] = {"to": name, "newest": newest}


def write_asked(path: Path, config: RunConfig) -> None:
    """Writes what a run is asked for.

    Raises:
        DataError: The system refused to write.
    """
    write_whole(ASKED.at(path), dump_config(config))


def last_told(path: Path) -> dict[str, Any]:
    """What a run told last; nothing if it told nothing that can be read."""
    try:
        found = json.loads(STATUS.at(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _count(told: object) -> int:
    return told if isinstance(told, int) and told >= 0 else 0


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
