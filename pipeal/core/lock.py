"""A file that says who works in a folder: one process holds it, for as long as it lives."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep

_log = logging.getLogger(__name__)

_TAKEN = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""What a file system without locks says."""

_BETWEEN_LOOKS_S = 0.1
"""How long :func:`in_turn` waits between two tries."""

_TRIES = 10
_BETWEEN_TRIES_S = 0.02

_Key = tuple[int, int, int]

_guard = threading.Lock()
_held: set[_Key] = set()
"""Process, device and inode of what this process holds: the system would give it to the same process again, and would
take it away when the second holder, or anyone here who only opened the file, closes it."""


class FileLock:
    """A lock file, held from :meth:`take` to :meth:`release`, or until the process has ended in whatever way.

    Of the kind that forked processes do not inherit: a loader's workers may outlive a run that was killed.
    """

    def __init__(self, file: int, key: _Key) -> None:
        self._file: int | None = file
        self._key = key

    @classmethod
    def take(cls, path: str | Path) -> FileLock | None:
        """Makes the file if need be, and locks it; where the file system has no locks, everybody gets it.

        Returns:
            The lock; None if another process holds it, or this one does already.

        Raises:
            OSError: The file can be neither opened nor made.
        """
        with _guard:
            if _is_ours(path):
                return None
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _lock(file)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(file)
                    if error.errno in _TAKEN:
                        return None
                    raise
            key = _key(os.fstat(file))
            _held.add(key)
            return cls(file, key)

    def is_at(self, path: Path) -> bool:
        """Whether the file still has that name: it may have been removed just before it was locked."""
        try:
            return _key(os.stat(path)) == self._key
        except OSError:
            return False

    def release(self) -> None:
        """Gives it back; a second time does nothing."""
        with _guard:
            if self._file is not None:
                _held.discard(self._key)
                os.close(self._file)
                self._file = None


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Waits until no other process or thread is within such a block with the same lock file, and removes it at the end.

    Only what was killed leaves the file, which does no harm: the next one takes it. Where no such file can be made,
    everybody goes ahead.
    """
    lock = None
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _waited_for(path)
    try:
        yield
    finally:
        if lock is not None:
            # First the name: once it is released, another one may hold the file of that name.
            with suppress(OSError):
                path.unlink()
            lock.release()


def _waited_for(path: Path) -> FileLock:
    told = False
    while (lock := FileLock.take(path)) is None or not lock.is_at(path):
        if lock is not None:  # its name was taken away just now
            lock.release()
        elif not told:
            _log.info(f"waiting for who holds {path}")
            told = True
        sleep(_BETWEEN_LOOKS_S)
    return lock


def lock_is_held(path: Path) -> bool | None:
    """Whether a live process holds the lock file; None where the file system cannot tell."""
    with _guard:
        if _is_ours(path):
            return True
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError:
            return None
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return True if error.errno in _TAKEN else None
        finally:
            os.close(file)  # gives the lock back, if it was had
        return False


def _lock(file: int) -> None:
    """Retries for a moment: :func:`lock_is_held` of another process takes the lock while it looks."""
    for tries_left in reversed(range(_TRIES)):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _TAKEN or not tries_left:
                raise
        sleep(_BETWEEN_TRIES_S)


def _is_ours(path: str | Path) -> bool:
    try:
        return _key(os.stat(path)) in _held
    except OSError:
        return False


def _key(found: os.stat_result) -> _Key:
    return os.getpid(), found.st_dev, found.st_ino
