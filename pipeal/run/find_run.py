"""Which run a command is about: an unfinished one of the same configuration, one that is named, or a new one."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from shutil import rmtree
from uuid import uuid4

from pipeal.config import RunConfig, TextConfig, all_values, document, load_config
from pipeal.core.artifacts import ASKED, CHECKPOINTS, LOCK
from pipeal.core.atomic import abandoned, sync_folder
from pipeal.core.errors import ConfigError, DataError, first_line, refusals_told, require_usable
from pipeal.core.lock import FileLock, lock_is_held
from pipeal.core.methods import METHODS
from pipeal.core.names import FILE, as_file_name, stem_of
from pipeal.run.grid import is_in
from pipeal.run.run_folder import RunFolder, last_told, lock_run, write_asked

_log = logging.getLogger(__name__)

WHERE_DATA_IS = (
    *("data.root", "data.text", "data.download", "data.workers", "data.file", "data.test_file"),
    *("data.prefetch", "data.cache", "data.cache_dir"),
)
"""Where a run has its data from, and how it is read."""

_FREE = (
    *("engine", "out", "train.epochs", "train.checkpoint", "train.on_non_finite", "train.tensorboard"),
    *("train.exit_tolerance", *WHERE_DATA_IS),
)
"""How a run is executed, where its data is, how long it goes: what may differ when it is taken up again."""

_DECISIVE = ("engine.packet",)
"""Of these, what may not: it decides the weights."""


def find_run(config: RunConfig, resume: str) -> RunFolder | None:
    """The folder of the run to take up again, locked; None to begin a new one.

    Args:
        config: As asked for.
        resume: ``auto`` takes the newest unfinished run of the same configuration, if there is one; ``never`` none;
            anything else is the folder of a run, or of one of its checkpoints to go on from.

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
        with refusals_told(f"--resume {resume}", "; name another", ConfigError):  # too long, no permission, in a circle
            return _named(Path(resume), config)
    for name in _names(config):
        numbered = [(number, path) for path in _called(name, config) if (number := _number(path, name)) is not None]
        for _, path in sorted(numbered, reverse=True):
            found = _unfinished(path, config)
            if found is not None:
                return found
    return None


def require_place(config: RunConfig, resume: str) -> None:
    """Tells before any data is read that a new run, if this becomes one, could not be written; raises as
    :func:`require_out`."""
    may_go_on = resume == "auto" and any(_called(name, config) for name in _names(config))
    if resume in ("auto", "never") and not may_go_on:
        require_out(config.out)


def require_out(out: str) -> None:
    """Tells before anything is measured that nothing could be written.

    Raises:
        ConfigError: A folder is not one, or this process may not write there.
    """
    path, told = Path(out), (f"--out {out}", "; choose another", ConfigError)
    require_usable(path, *told)
    with refusals_told(*told):
        there = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{there} is no folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"nothing may be written in {there}")


def new_run(config: RunConfig) -> RunFolder:
    """Makes the first folder of ``name-001``, ``name-002``, … that is not there yet or empty, and locks it.

    Raises:
        ConfigError: The folder for all runs cannot be used.
    """
    root = Path(config.out)
    # Made aside: a process that finds the folder under its name finds it whole, and locked.
    aside = root / f".{_name(config)}.{uuid4().hex[:12]}.aside"
    lock = None
    try:
        aside.mkdir(parents=True)
        _sweep(config)
        lock = FileLock.take(LOCK.at(aside))
        assert lock is not None  # no other process knows of it
        write_asked(aside, config)
        named = (root / f"{_name(config)}-{number:03d}" for number in count(1))
        path = next(path for path in named if _takes_name(aside, path))
        sync_folder(root)
        return RunFolder(path, config, asked=None, lock=lock)
    except BaseException as error:
        if lock is not None:
            lock.release()
        rmtree(aside, ignore_errors=True)
        cause = error.__cause__ if isinstance(error, DataError) else error
        if isinstance(cause, OSError):
            raise _unusable(config, cause) from cause
        raise


def _unusable(config: RunConfig, cause: OSError) -> ConfigError:
    return ConfigError(f"--out {config.out}: {cause.strerror or cause}; choose another")


def _sweep(config: RunConfig) -> None:
    """Removes folders that a kill left in the making, of runs of this name."""
    for left in (
        left for name in _names(config) for left in abandoned(Path(config.out), f"{name}.", older_than_s=600.0)
    ):
        if lock_is_held(LOCK.at(left)) is False:  # it is taken within a second after the folder is made
            rmtree(left, ignore_errors=True)  # another process may just have done so


def _called(name: str, config: RunConfig) -> list[Path]:
    """What there is under the name of a run and a number, or what looks like one."""
    try:
        return list(Path(config.out).glob(f"{name}-*"))
    except OSError as error:
        raise _unusable(config, error) from error


def _name(config: RunConfig) -> str:
    return _names(config)[0]


def _names(config: RunConfig) -> list[str]:
    """That of its runs; of a user's own file then also that of runs of earlier versions, ``file-…``."""
    data = [config.dataset]
    if isinstance(config, TextConfig) and config.dataset == FILE and config.data.file is not None:
        data.insert(0, stem_of(config.data.file))
    return [f"{name}-{as_file_name(config.model.name)}-{config.train.mode}" for name in dict.fromkeys(data)]


def _number(path: Path, name: str) -> int | None:
    """That of a run of this name; None for other folders.

    The thousandth has four digits, so that names do not sort as their numbers do.
    """
    found = re.fullmatch(rf"{re.escape(name)}-(\d{{3,}})", path.name, re.ASCII)
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


def _unfinished(path: Path, config: RunConfig) -> RunFolder | None:
    """The run in a folder, locked, if it was asked for in just this way, did not finish, and no process works at it."""
    if not ASKED.at(path).is_file():
        if CHECKPOINTS.at(path).is_dir() and last_told(path).get("status") != "finished":
            _log.warning(f"{path} is left alone: it has no asked.yaml, which says what its run was asked for")
        return None
    try:
        asked = _asked(path, config)
        if not _is_same_command(asked, config):
            return None
        lock = FileLock.take(LOCK.at(path))
    except (OSError, ValueError) as error:
        if last_told(path).get("status") != "finished":
            _log.warning(f"{path} is left alone: {first_line(error)}")
        return None
    if lock is None:
        _log.warning(f"{path} is left alone: another process works at this run")
        return None
    if last_told(path).get("status") == "finished":
        lock.release()
        return None
    return RunFolder(path, config, asked=asked, lock=lock)


def _is_same_command(asked: RunConfig, config: RunConfig) -> bool:
    # It lies where runs are looked for now, however that was spelled before.
    asked = replace(asked, out=config.out)
    method = METHODS.get(config.train.mode)  # None for a comparison
    if method is not None and method.is_whole:  # its replicas are the processes, however many there are this time
        asked = replace(asked, engine=replace(asked.engine, replicas=config.engine.replicas))
    return asked == config


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
    if not ASKED.at(path).is_file():
        raise ConfigError(
            f"--resume {path}: no run there; expected the folder of a run or checkpoint, or auto or never"
        )
    asked = _asked(path, config)
    require_same_training(asked, config, path, otherwise="--resume never")
    return RunFolder(path, config, asked=asked, lock=lock_run(path, "--resume ", ConfigError))


def _asked(path: Path, config: RunConfig) -> RunConfig:
    """What the run in a folder was asked for.

    Raises:
        ConfigError: It is not as it was written; a part of it may be a configuration, too.
    """
    asked = load_config(type(config), ASKED.at(path))
    if "out" not in (document.parse(ASKED.at(path).read_text(encoding="utf-8"), source="asked.yaml") or ()):
        raise ConfigError(f"{ASKED.at(path)} is cut off: its last key, out, is missing; put it back")
    return asked


def require_same_training(before: RunConfig, now: RunConfig, path: Path, *, otherwise: str) -> None:
    """Refuses to go on with a run by another training. How that is executed, and for how many epochs, may differ.

    Args:
        before: What the run was.
        now: What is asked for.
        path: The run, or a checkpoint of it.
        otherwise: What to do where another training is wanted.

    Raises:
        ConfigError: A key that decides the training is another one.
    """
    for key, was, found in changes(before, now):
        if key in _DECISIVE or not is_in(key, _FREE):
            raise ConfigError(
                f"--resume {path}: its run has {key} {was}, this command {found}; give the same, or {otherwise}"
            )


def changes(before: RunConfig, now: RunConfig) -> Iterator[tuple[str, str, str]]:
    """The keys that differ, with what they were and are, for messages."""
    values = all_values(now)
    for key, value in all_values(before).items():
        if values[key] != value:
            yield key, _shown(value), _shown(values[key])


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def run_of(path: Path) -> Path | None:
    """The run that a checkpoint is of; None for other folders."""
    path = path.resolve()
    if path.parent.name != CHECKPOINTS.name or not path.name.startswith("step-"):
        return None
    own = path.parents[1]  # or in a comparison, where each form has one
    return own if ASKED.at(own).is_file() else own.parent
