"""A run's folder: which one, whose it is, and how the run stands.

::

    <out>/<dataset>-<model>-<mode>-001/
        asked.yaml     the configuration as asked for: the same command finds its unfinished run by it
        status.json    running, finished, interrupted or failed
        run.lock       locked by the process that writes here, as long as it lives
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pipeal.config import RunConfig, dump_config, load_config
from pipeal.errors import ConfigError, Interrupted, PipealError, first_line
from pipeal.train.manifest import read_manifest
from pipeal.train.recorders import write_json

Status = Literal["running", "finished", "interrupted", "failed"]


class RunFolder:
    """A folder that this process alone writes to. Used with ``with``.

    Args:
        path: The folder.
        config: As asked for.
        resumed: Whether there was a run in it.
        lock: Its lock, held.

    Attributes:
        asked: What its run was asked for first.
        checkpoint: The folder of the checkpoint to go on from; None for the newest.
    """

    def __init__(self, path: Path, config: RunConfig, *, resumed: bool, lock: int) -> None:
        self.path = path
        self.checkpoint: Path | None = None
        self.resumed = resumed
        self._lock = lock
        self._epochs = config.train.epochs
        self._epoch = 0
        self._began = ""
        if resumed:
            self.asked = load_config(type(config), path / "asked.yaml")
        else:
            self.asked = config
            (path / "asked.yaml").write_text(dump_config(config), encoding="utf-8")

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._began:
                return  # a mistake was found before anything was done
            if error is None:
                self.tell("finished")
            elif isinstance(error, (KeyboardInterrupt, SystemExit, Interrupted)):
                self.tell("interrupted", str(error))
            else:
                self.tell("failed", first_line(error))
        except (OSError, PipealError):
            if error is None:
                raise  # a run that cannot say that it finished will be taken up again: the user should know
        finally:
            os.close(self._lock)

    def begin(self) -> None:
        """Says that the run is under way."""
        self._began = _now()
        self.tell("running")

    def tell(self, status: Status, message: str = "", epoch: int | None = None) -> None:
        """Writes how the run stands, with the epochs behind it."""
        self._epoch = self._epoch if epoch is None else epoch
        write_json(
            self.path / "status.json",
            {
                "status": status,
                "message": message,
                "epoch": self._epoch,
                "epochs": self._epochs,
                "started": self._began,
                "updated": _now(),
                "pid": os.getpid(),
            },
        )


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
        return _named(Path(resume), config)
    for path in sorted(Path(config.out).glob(f"{_name(config)}-[0-9]*"), reverse=True):
        found = _unfinished(path, config)
        if found is not None:
            return found
    return None


def new_run(config: RunConfig) -> RunFolder:
    """Makes the first folder of ``name-001``, ``name-002``, … that is not there yet, and locks it.

    Raises:
        ConfigError: The folder for all runs cannot be used.
    """
    root = Path(config.out)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            path = root / f"{_name(config)}-{number:03d}"
            with suppress(FileExistsError):
                path.mkdir()
                lock = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
                fcntl.lockf(lock, fcntl.LOCK_EX)
                return RunFolder(path, config, resumed=False, lock=lock)
    except OSError as error:
        raise ConfigError(f"out: cannot use {root}: {error.strerror or error}; choose another --out") from error
    raise AssertionError("unreachable: counting does not end")


def _name(config: RunConfig) -> str:
    return f"{config.dataset}-{config.model.name}-{config.train.mode}"


def _unfinished(path: Path, config: RunConfig) -> RunFolder | None:
    """The run in a folder, locked, if it was asked for in just this way, did not finish, and nobody works at it."""
    try:
        asked = (path / "asked.yaml").read_text(encoding="utf-8")
        lock = _try_lock(path)
    except (OSError, ValueError):
        return None
    if lock is None:
        return None
    if asked != dump_config(config) or _status(path) == "finished":
        os.close(lock)
        return None
    return RunFolder(path, config, resumed=True, lock=lock)


def _named(path: Path, config: RunConfig) -> RunFolder:
    run = _run_of(path)
    if run is not None:
        read_manifest(path)  # a mistake is told before anything is done
        found = _named(run, config)
        found.checkpoint = path
        return found
    if not (path / "asked.yaml").is_file():
        raise ConfigError(
            f"--resume {path}: no run there; expected the folder of a run or checkpoint, or auto or never"
        )
    asked = load_config(type(config), path / "asked.yaml")
    for (key, before), (_, now) in zip(_decisive(asked), _decisive(config), strict=True):
        if before != now:
            raise ConfigError(
                f"--resume {path}: its run has {key} {before}, this command {now}; give the same, or --resume never"
            )
    lock = _try_lock(path)
    if lock is None:
        raise ConfigError(f"--resume {path}: another process works at this run; wait for it, or end it")
    return RunFolder(path, config, resumed=True, lock=lock)


def _run_of(path: Path) -> Path | None:
    """The run that a checkpoint is of; None for other folders."""
    path = path.resolve()
    if path.parent.name != "checkpoints" or not path.name.startswith("step-"):
        return None
    own = path.parents[1]  # or in a comparison, where each form has one
    return own if (own / "asked.yaml").is_file() else own.parent


def _try_lock(path: Path) -> int | None:
    """The lock of a folder; None if another process holds it.

    Of the kind that forked loader workers do not inherit: they may outlive a run that was killed.
    """
    lock = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _status(path: Path) -> str | None:
    try:
        return str(json.loads((path / "status.json").read_text(encoding="utf-8"))["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


_FREE = (
    *("engine", "out", "train.epochs", "train.checkpoint", "train.on_non_finite", "train.tensorboard"),
    *("train.exit_tolerance", "data.root", "data.download", "data.workers", "data.cache"),
)
"""How a run is executed, where its data is, how long it goes: what may differ when it is taken up again."""


def _decisive(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """What decides the weights, key by key."""
    for key, value in _flat(config):
        if not any(key == free or key.startswith(f"{free}.") for free in _FREE):
            yield key, value


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    found = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if not isinstance(found, dict):
        yield path, found
        return
    for key, inner in found.items():
        yield from _flat(inner, f"{path}.{key}" if path else key)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
