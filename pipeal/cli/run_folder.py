"""A run's folder: which one, whose it is, and how the run stands.

::

    <out>/<dataset>-<model>-<mode>-001/
        asked.yaml     the configuration as asked for: the same command finds its unfinished run by it
        status.json    running, finished, interrupted or failed; since when, and how often it was taken up again; the
                       checkpoint that an unfinished run was told to go back to
        run.lock       locked by the process that writes here, as long as it lives
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from itertools import count
from pathlib import Path
from shutil import rmtree
from time import time
from types import TracebackType
from typing import Any, Literal
from uuid import uuid4

from pipeal.cli.decisive import decisive
from pipeal.config import RunConfig, document, dump_config, load_config
from pipeal.data.atomic import replacing, sync_folder
from pipeal.data.lock import FileLock, lock_is_held
from pipeal.errors import ConfigError, DataError, Interrupted, PipealError, first_line
from pipeal.train.manifest import Checkpoint, read_manifest
from pipeal.train.recorders import write_json

Status = Literal["running", "finished", "interrupted", "failed"]

_ABANDONED_S = 600.0
"""How long a folder may be in the making: it takes less than a second."""


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
        told = _told(path)
        self._epoch = _count(told.get("epoch"))
        self._started = str(told.get("started") or _now())
        self._resumes = _count(told.get("resumes")) + self.resumed
        self._back = told.get("back")

    @property
    def status_path(self) -> Path:
        """The file that :meth:`tell` writes."""
        return self.path / "status.json"

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
                self.tell("interrupted", "ended at once; the same command goes on from the last checkpoint")
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
            _write_asked(self.path, self._config)

    def tell(self, status: Status, message: str = "", epoch: int | None = None) -> None:
        """Writes how the run stands, with the epochs behind it; when it began first is kept.

        Raises:
            DataError: The system refused to write.
        """
        self._status = status
        self._epoch = self._epoch if epoch is None else epoch
        write_json(
            self.status_path,
            {
                "status": status,
                "message": message,
                "epoch": self._epoch,
                "epochs": self._config.train.epochs,
                "started": self._started,
                "resumes": self._resumes,
                "updated": _now(),
                "pid": os.getpid(),
                # A run that has come to its end may be told to go back to the same one again.
                "back": None if status == "finished" else self._back,
            },
        )

    def go_back_to(self, path: Path) -> None:
        """Takes the run up from one of its checkpoints; a second time it goes on with what was saved since.

        Raises:
            DataError: The checkpoint is not as it was written.
        """
        name = str(path.resolve().relative_to(self.path.resolve()))
        newest = max((found.number for found in _checkpoints(path.parent)), default=0)
        back = self._back if isinstance(self._back, dict) else {}
        if back.get("to") == name and newest > _count(back.get("newest")):
            self.passed = path
            return
        Checkpoint.open(path)  # all of it: what is damaged is told before anything is done
        self.checkpoint = path
        self._back = {"to": name, "newest": newest}


def find_run(config: RunConfig, resume: str, say: Callable[[str], None] = lambda _: None) -> RunFolder | None:
    """The folder of the run to take up again, locked; None to begin a new one.

    Args:
        config: As asked for.
        resume: ``auto`` takes the newest unfinished run of the same configuration, if there is one; ``never`` none;
            anything else is the folder of a run, or of one of its checkpoints to go on from.
        say: Told of an unfinished run that ``auto`` leaves alone since it cannot be taken up.

    Raises:
        ConfigError: The folder holds no run, another process works in it, or its run was asked for with another
            configuration (how it is executed, and for how many epochs, may differ).
    """
    if resume == "never":
        return None
    if resume != "auto":
        if not resume or "\0" in resume:
            raise ConfigError(
                f"--resume: found {resume!r}, expected the folder of a run or checkpoint, or auto or never"
            )
        try:
            return _named(Path(resume), config)
        except OSError as error:  # too long a name, links in a circle, no permission
            raise ConfigError(f"--resume {resume}: {error.strerror or error}; name another") from error
    paths = Path(config.out).glob(f"{_name(config)}-*")
    numbered = [(number, path) for path in paths if (number := _number(path, config)) is not None]
    for _, path in sorted(numbered, reverse=True):
        found = _unfinished(path, config, say)
        if found is not None:
            return found
    return None


def new_run(config: RunConfig) -> RunFolder:
    """Makes the first folder of ``name-001``, ``name-002``, … that is not there yet or empty, and locks it.

    Raises:
        ConfigError: The folder for all runs cannot be used.
    """
    root = Path(config.out)
    # Made aside: whoever finds the folder under its name finds it whole, and locked.
    aside = root / f".{_name(config)}.{uuid4().hex[:12]}.aside"
    lock = None
    try:
        aside.mkdir(parents=True)
        _sweep(config)
        lock = FileLock.take(aside / "run.lock")
        assert lock is not None  # nobody else knows of it
        _write_asked(aside, config)
        path = next(path for path in map(partial(_numbered, config), count(1)) if _takes_name(aside, path))
        sync_folder(root)
        return RunFolder(path, config, asked=None, lock=lock)
    except BaseException as error:
        if lock is not None:
            lock.release()
        rmtree(aside, ignore_errors=True)
        cause = error.__cause__ if isinstance(error, DataError) else error
        if isinstance(cause, OSError):
            raise ConfigError(f"out: cannot use {root}: {cause.strerror or cause}; choose another --out") from cause
        raise


def _sweep(config: RunConfig) -> None:
    """Removes folders that a kill left in the making, of runs of this name."""
    for left in Path(config.out).glob(f".{_name(config)}.*.aside"):
        with suppress(OSError):  # or another process has just done so
            if lock_is_held(left / "run.lock") is False and time() - left.stat().st_mtime > _ABANDONED_S:
                rmtree(left)


def _name(config: RunConfig) -> str:
    return f"{config.dataset}-{config.model.name}-{config.train.mode}"


def _numbered(config: RunConfig, number: int) -> Path:
    return Path(config.out) / f"{_name(config)}-{number:03d}"


def _number(path: Path, config: RunConfig) -> int | None:
    """That of a run of this name; None for other folders.

    The thousandth has four digits, so that names do not sort as their numbers do.
    """
    found = re.fullmatch(rf"{re.escape(_name(config))}-(\d{{3,}})", path.name, re.ASCII)
    return None if found is None else int(found[1])


def _takes_name(aside: Path, path: Path) -> bool:
    """Renames a folder, unless the name is taken; a folder without anything in it gives way."""
    try:
        aside.rename(path)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            return False
        raise
    return True


def _write_asked(path: Path, config: RunConfig) -> None:
    with replacing(path / "asked.yaml") as aside:
        aside.write_text(dump_config(config), encoding="utf-8")


def _unfinished(path: Path, config: RunConfig, say: Callable[[str], None]) -> RunFolder | None:
    """The run in a folder, locked, if it was asked for in just this way, did not finish, and nobody works at it."""
    if not (path / "asked.yaml").is_file():
        if (path / "checkpoints").is_dir() and _told(path).get("status") != "finished":
            say(f"{path} is left alone: it has no asked.yaml, which says what its run was asked for")
        return None
    try:
        asked = load_config(type(config), path / "asked.yaml")
        if "out" not in (document.parse((path / "asked.yaml").read_text(encoding="utf-8"), source="asked.yaml") or ()):
            raise ConfigError(f"{path / 'asked.yaml'} is cut off: its last key, out, is missing")
        # It lies where runs are looked for now, however that was spelled before.
        if replace(asked, out=config.out) != config:
            return None
        lock = FileLock.take(path / "run.lock")
    except (OSError, ValueError) as error:
        if _told(path).get("status") != "finished":
            say(f"{path} is left alone: {first_line(error)}")
        return None
    if lock is None:
        say(f"{path} is left alone: another process works at this run")
        return None
    if _told(path).get("status") == "finished":
        lock.release()
        return None
    return RunFolder(path, config, asked=asked, lock=lock)


def _named(path: Path, config: RunConfig) -> RunFolder:
    run = run_of(path)
    if run is not None:
        found = _named(run, config)
        try:
            found.go_back_to(path)
        except BaseException:
            found.release()
            raise
        return found
    if not (path / "asked.yaml").is_file():
        raise ConfigError(
            f"--resume {path}: no run there; expected the folder of a run or checkpoint, or auto or never"
        )
    asked = load_config(type(config), path / "asked.yaml")
    for (key, before), (_, now) in zip(decisive(asked), decisive(config), strict=True):
        if before != now:
            raise ConfigError(
                f"--resume {path}: its run has {key} {before}, this command {now}; give the same, or --resume never"
            )
    try:
        lock = FileLock.take(path / "run.lock")
    except OSError as error:
        raise ConfigError(f"--resume {path}: cannot work there: {error.strerror or error}") from error
    if lock is None:
        raise ConfigError(f"--resume {path}: another process works at this run; wait for it, or end it")
    return RunFolder(path, config, asked=asked, lock=lock)


def run_of(path: Path) -> Path | None:
    """The run that a checkpoint is of; None for other folders."""
    path = path.resolve()
    if path.parent.name != "checkpoints" or not path.name.startswith("step-"):
        return None
    own = path.parents[1]  # or in a comparison, where each form has one
    return own if (own / "asked.yaml").is_file() else own.parent


def _checkpoints(folder: Path) -> Iterator[Checkpoint]:
    """Those whose manifests are right."""
    for path in folder.glob("step-*"):
        with suppress(DataError):
            yield read_manifest(path)


def _told(path: Path) -> dict[str, Any]:
    """What a run told last; nothing if it told nothing that can be read."""
    try:
        found = json.loads((path / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _count(told: object) -> int:
    return told if isinstance(told, int) and told >= 0 else 0


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
