"""One process holds a lock file, once; and looking at it changes nothing."""

from __future__ import annotations

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import pytest

from pipeal.core.lock import FileLock, in_turn, lock_is_held
from tests.training.run_folders import held


def test_another_process_is_refused_and_after_its_end_is_not(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert lock_is_held(path) is False
    with held(path):
        assert FileLock.take(path) is None
        assert lock_is_held(path) is True
    assert lock_is_held(path) is False
    lock = FileLock.take(path)
    assert lock is not None
    lock.release()


def free_for_others(path: Path) -> bool:
    """Whether a process that was forked, which inherits no lock, gets it."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    lock = FileLock.take(path)
    os._exit(lock is None)


def test_the_same_process_does_not_get_it_twice_nor_lose_it_by_looking(tmp_path: Path) -> None:
    """The system gives a process its own lock again, and takes it away when any of its files on it is closed."""
    path = tmp_path / "lock"
    lock = FileLock.take(path)
    assert lock is not None
    assert FileLock.take(path) is None
    assert lock_is_held(path) is True
    assert not free_for_others(path)
    lock.release()
    lock.release()
    assert free_for_others(path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_where_the_file_system_has_no_locks_everybody_gets_it(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    (tmp_path / "lock").touch()
    assert lock_is_held(tmp_path / "lock") is None
    lock = FileLock.take(tmp_path / "lock")
    assert lock is not None
    lock.release()


def test_who_looks_does_not_keep_others_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking has the lock for a moment. Symptom: a killed run was "left alone" while someone listed it, and another
    was begun."""
    path, asked = tmp_path / "lock", []
    lock_file = fcntl.lockf

    def looked_at(file: int, how: int) -> None:
        asked.append(how)
        if len(asked) < 4:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        lock_file(file, how)

    monkeypatch.setattr(fcntl, "lockf", looked_at)
    lock = FileLock.take(path)
    assert lock is not None
    assert len(asked) == 4
    lock.release()


def test_in_turn_one_works_at_a_time_and_the_file_does_not_stay(tmp_path: Path) -> None:
    """Each one reads a number, and writes the next one: two at a time would write the same."""
    lock, counted = tmp_path / "new" / "lock", tmp_path / "counted"
    counted.write_text("0")

    def count() -> None:
        for _ in range(4):
            with in_turn(lock):
                found = int(counted.read_text())
                sleep(0.002)
                counted.write_text(str(found + 1))

    children = []
    for _ in range(2):
        if pid := os.fork():
            children.append(pid)
            continue
        code = 1
        try:
            count()
            code = 0
        finally:
            os._exit(code)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(count) for _ in range(2)]:
            done.result()
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
    assert counted.read_text() == "16"
    assert not lock.exists()


def test_in_turn_what_was_killed_keeps_no_one_out(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with in_turn(tmp_path / "lock"):
        assert lock_is_held(tmp_path / "lock")
    assert not (tmp_path / "lock").exists()


def test_in_turn_goes_ahead_where_no_file_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with in_turn(tmp_path / "a file" / "lock"):
        pass
