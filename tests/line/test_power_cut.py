"""Law: after a power cut at any moment the newest snapshot is whole, and no older than what the stage before was told.

The disk of these tests has what was synced alone: bytes of a file when the file was, names in a folder when the folder
was. After each step of a save it is copied as such a disk would have it, and looked at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeal.core.atomic import make_folder
from pipeal.training.checkpoint.store import CheckpointStore


class Disk:
    """What of a folder would be left by a power cut, kept beside by the same calls that make it durable.

    A file's bytes are kept under the number of its inode as of its last sync; a folder's names, and the inodes that
    they stand for, as of its own. What was never synced is empty or absent: the worst that a file system may do.

    Args:
        root: The folder.
        at_step: Called after every call that a power cut could follow.
    """

    def __init__(self, root: Path, at_step: Callable[[], None] = lambda: None) -> None:
        self.root = root
        self.at_step = at_step
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, bool]]] = {root.stat().st_ino: {}}
        self._held: list[int] = []

    def synced(self, path: Path) -> None:
        """A file or a folder was synced."""
        number = path.stat().st_ino
        # Held open: the number of an inode that is removed would be given to another one.
        self._held.append(os.open(path, os.O_RDONLY))
        if path.is_dir():
            self._names[number] = {one.name: (one.stat().st_ino, one.is_dir()) for one in path.iterdir()}
        else:
            self._bytes[number] = path.read_bytes()

    def after_a_cut(self, to: Path) -> Path:
        """What is there when the power is back."""
        self._restore(self.root.stat().st_ino, to)
        return to

    def close(self) -> None:
        for number in self._held:
            os.close(number)

    def _restore(self, number: int, to: Path) -> None:
        to.mkdir()
        for name, (inner, is_folder) in self._names.get(number, {}).items():
            if is_folder:
                self._restore(inner, to / name)
            else:
                (to / name).write_bytes(self._bytes.get(inner, b""))


@contextmanager
def disk(root: Path, monkeypatch: pytest.MonkeyPatch, at_step: Callable[[Disk], None]) -> Iterator[Disk]:
    """A disk that is told of each sync below a folder, and asked after each call that changes something."""
    found = Disk(root)
    fsync = os.fsync
    busy = [False]

    def step() -> None:
        if not busy[0]:
            busy[0] = True
            try:
                at_step(found)
            finally:
                busy[0] = False

    def synced(number: int) -> None:
        fsync(number)
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        if path == root or root in path.parents:
            found.synced(path)
        step()

    def then(name: str, owner: Any) -> None:
        before = getattr(owner, name)

        def called(*given: Any, **more: Any) -> Any:
            step()
            result = before(*given, **more)
            step()
            return result

        monkeypatch.setattr(owner, name, called)

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("rename", "mkdir", "unlink"):
        then(name, Path)
    then("rmtree", shutil)
    try:
        yield found
    finally:
        monkeypatch.undo()
        found.close()


def state(number: int) -> dict[str, Any]:
    return {"module": {"weight": torch.full((50,), float(number))}, "count": number}


def saved(store: CheckpointStore, number: int) -> None:
    """As a stage of a line does."""
    store.save(number, {0: state(number)}, {"item": number}, {"first": number}, epoch={"retained": [number]})


def newest(folder: Path) -> int:
    """The number of the newest snapshot, which is whole; -1 where there is none."""
    told: list[str] = []
    found = CheckpointStore(folder).newest(told.append)
    if found is None:
        return -1
    number = int(found.position["item"])
    assert (found.state, found.epoch()) == ({"first": number}, {"retained": [number]})
    assert found.layers()[0]["module"]["weight"].eq(number).all()
    return number


def test_a_power_cut_at_any_step_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, folder = tmp_path / "disk", tmp_path / "disk" / "line" / "stage-1" / "snapshots"
    root.mkdir()
    told, found = [-1], list[int]()

    def cut(at: Disk) -> None:
        after = at.after_a_cut(tmp_path / "after")
        place = after / "line" / "stage-1" / "snapshots"
        found.append(newest(place) if place.exists() else -1)
        assert found[-1] >= told[0], "the stage before has dropped the items that this one would ask for"
        shutil_rmtree(after)

    shutil_rmtree = shutil.rmtree
    with disk(root, monkeypatch, cut):
        make_folder(folder.parent)  # as the command does
        with CheckpointStore(folder, keep=2) as store:
            for number in (3, 8, 8, 13, 21):  # a stage that ended between two saves the same number again
                saved(store, number)
                told[0] = number
    assert len(found) > 60
    assert set(found) == {-1, 3, 8, 13, 21}
    assert found == sorted(found)


def test_a_snapshot_whose_name_only_memory_has_is_on_the_disk_before_it_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed between rename and sync is started again, and finds the snapshot: by what it says then
    the stage before drops the items. A power cut after that lost both."""
    root = tmp_path / "disk"
    folder = root / "snapshots"
    root.mkdir()

    class Died(BaseException):
        pass

    with disk(root, monkeypatch, lambda _: None) as at:
        with CheckpointStore(folder) as store:
            saved(store, 3)
        sync, count = os.fsync, [0]

        def killed(number: int) -> None:
            if os.readlink(f"/proc/self/fd/{number}") == str(folder):
                count[0] += 1
                raise Died
            sync(number)

        with CheckpointStore(folder) as store:
            monkeypatch.setattr(os, "fsync", killed)
            with pytest.raises(Died):
                saved(store, 9)
        monkeypatch.setattr(os, "fsync", sync)
        assert newest(at.after_a_cut(tmp_path / "lost") / "snapshots") == 3
        with CheckpointStore(folder) as store:
            assert newest(store.folder) == 9
            assert newest(at.after_a_cut(tmp_path / "after") / "snapshots") == 9
