"""Checkpoints on the disk: each one is whole or absent, and is held against its sums before anything is loaded.

::

    checkpoints/
        .lock                     held by the process that saves here, as long as it lives
        step-000000050/
        step-000000100/
            layer-000.safetensors …    one per layer (:mod:`pipeal.engine.state.layer_file`); some layers, where a stage
                                       has saved its own
            epoch.safetensors     what is counted of the epoch under way, such as losses
            manifest.json         last: format, position, state, bytes and CRC-32 of each file, and its own SHA-256
        .step-000000150.aside     is being written; takes its name when all of it is on the disk
        .step-000000100.before    makes room for another of its step; is put back if that did not come
        .step-000000000.gone      is being removed
        .parts/                   what other ranks have written, on its way into a checkpoint

Checkpoints of the first format (:mod:`pipeal.training.checkpoint.manifest`) lie among them and are read as well.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeal.core.atomic import make_folder, sync_folder
from pipeal.core.errors import DataError, UntidyError, refusals_told
from pipeal.core.lock import FileLock
from pipeal.engine.state.layer_file import require_plain, write_layer
from pipeal.training.checkpoint.manifest import EPOCH, Checkpoint, read_manifest, write_manifest
from pipeal.training.checkpoint.rank_files import ELSEWHERE, KeptLayer, clear_parts, layer_name

__all__ = ["Checkpoint", "CheckpointStore"]

_NAME = re.compile(r"step-\d{9,}")


class CheckpointStore:
    """The checkpoints of a run, of which the newest and the best are kept.

    Reading needs nothing. Who saves holds a lock on the folder, from the first :meth:`claim` or ``with`` to
    :meth:`close`: a second process is refused. A process opens one store per folder.

    Args:
        folder: Made when it is claimed.
        keep: How many of the newest are kept, besides the best.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, wanted at least 1: without a checkpoint there is nothing to resume from")
        self.folder = Path(folder)
        self.keep = keep
        self._lock: FileLock | None = None
        self._number = 0
        self._bad: set[int] = set()

    def __enter__(self) -> CheckpointStore:
        self.claim()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def claim(self) -> None:
        """Makes and locks the folder, and removes what a killed process left half-written; a second time does nothing.

        Raises:
            DataError: Another process saves there, or the folder cannot be written to.
        """
        if self._lock is not None:
            return
        with refusals_told(f"cannot keep checkpoints in {self.folder}", ELSEWHERE):
            make_folder(self.folder)
            lock = FileLock.take(self.folder / ".lock")
            if lock is None:
                raise DataError(
                    f"another process saves checkpoints in {self.folder}; wait for it, or choose another folder"
                )
            try:
                self._sweep()
                clear_parts(self.folder)
                sync_folder(self.folder)  # a process that was killed may have left a name that the disk does not have
            except BaseException:
                lock.release()
                raise
        self._lock = lock
        self._number = self.last_number()

    def last_number(self) -> int:
        """That of the checkpoint that was written last, of those whose manifests are right; 0 where there is none."""
        return max((one.number for one in self._readable()), default=0)

    def close(self) -> None:
        """Gives the folder back; a second time does nothing."""
        if self._lock is not None:
            with suppress(OSError):  # at the next start, then
                clear_parts(self.folder)
            self._lock.release()
            self._lock = None

    def save(
        self,
        step: int,
        layers: Mapping[int, Mapping[str, Any] | KeptLayer],
        position: Mapping[str, Any],
        state: Mapping[str, Any],
        best: bool = False,
        epoch: Mapping[str, Any] | None = None,
    ) -> Path:
        """Writes a checkpoint; when this returns it is on the disk, and older ones that are not kept are gone.

        An older one of the same step gives way. When it cannot be written, the folder is as it was.

        Args:
            step: At least 0. Need not grow: a run that went back saves the same steps again.
            layers: The states of the layers by their number: tensors, numbers, texts, and dicts, lists and tuples; or
                files that another process has written.
            position: Where the run stands; what JSON can hold.
            state: Anything else, likewise.
            best: It is the best so far, and is kept until a better one comes.
            epoch: What is counted of the epoch under way; plain values, as a layer's state.

        Raises:
            DataError: A state holds what could not be loaded again, or the system refused to write it.
            UntidyError: It is written; the system refused to remove an older one.
            TypeError: The position or the state holds what JSON cannot.
        """
        kept: KeptLayer | None = None
        for number, layer in layers.items():
            if isinstance(layer, KeptLayer):
                kept = layer
            else:
                require_plain(layer, f"layer {number}")
        require_plain(epoch or {}, "epoch")
        self.claim()
        path = self.folder / f"step-{step:09d}"
        aside = _hidden(path, "aside")
        body = {"number": self._number + 1, "step": step, "best": best, "position": position, "state": state}
        try:
            with refusals_told(f"cannot write the checkpoint {path}", ELSEWHERE):
                self._sweep(path.name)  # alone: what else cannot be removed is not in the way
                aside.mkdir()
                files = {}
                for number in sorted(layers):
                    layer = layers[number]  # one at a time: of those of a checkpoint, each is mapped when looked up
                    to = aside / layer_name(number)
                    files[to.name] = layer.move(to) if isinstance(layer, KeptLayer) else write_layer(to, layer)
                if epoch:
                    files[EPOCH] = write_layer(aside / EPOCH, epoch)
                sums = {name: {"bytes": size, "crc32": crc32} for name, (size, crc32) in files.items()}
                write_manifest(aside, {**body, "files": sums})
                sync_folder(aside)
                self._put(aside, path)
        except BaseException:
            # What the system does not let go now is cleared away at the next try or the next start.
            with suppress(OSError):
                self._sweep()
            raise
        self._number += 1
        stays = f"the checkpoint {path} is written, but an older one cannot be removed"
        with refusals_told(stays, ELSEWHERE, UntidyError):
            self._rotate()
            self._sweep()
            if kept is not None:
                clear_parts(self.folder, kept)
        return path

    def newest(
        self, on_bad: Callable[[str], None], is_wanted: Callable[[Checkpoint], bool] = lambda _: True
    ) -> Checkpoint | None:
        """The newest checkpoint that is as it was written; None if there is none.

        Args:
            on_bad: Told of each one that is not, on the way there, and of what is wrong with it.
            is_wanted: Passes over others; may raise DataError of one that is bad.

        Raises:
            DataError: The folder cannot be read.
        """
        found = sorted(self._readable(on_bad), key=lambda one: one.number, reverse=True)
        for one in found:
            try:
                if is_wanted(opened := Checkpoint.open(one.path)):
                    return opened
            except DataError as error:
                if one.path.exists():  # or the process that saves here has just removed it
                    self._bad.add(one.number)
                    on_bad(f"{error}; it is skipped")
        return None

    def make_newest(self, one: Checkpoint) -> None:
        """Writes a checkpoint of this folder again, so that those that came after it are older; nothing for the newest.

        They are rotated away like any. Raises as :meth:`save`.
        """
        self.claim()
        if one.number < self._number:
            self.save(one.step, one.layers(), one.position, one.state, one.best, one.epoch())

    def _readable(self, on_bad: Callable[[str], None] = lambda _: None) -> Iterator[Checkpoint]:
        """The checkpoints whose manifests are right; their files are not looked at."""
        paths: list[Path] = []
        with refusals_told(f"cannot read the checkpoints in {self.folder}"), suppress(FileNotFoundError):
            paths = sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))
        for path in paths:
            try:
                yield read_manifest(path)
            except DataError as error:
                if path.exists():
                    on_bad(f"{error}; it is skipped")

    def _put(self, aside: Path, path: Path) -> None:
        before = _hidden(path, "before")
        if os.path.lexists(path):
            path.rename(before)
        try:
            aside.rename(path)
            sync_folder(self.folder)
        except OSError:
            if os.path.lexists(path):
                path.rename(aside)
            if os.path.lexists(before):
                before.rename(path)
            raise

    def _rotate(self) -> None:
        """Those that were found bad do not count: a good one is not removed for their sake."""
        found = sorted(self._readable(), key=lambda one: one.number, reverse=True)
        good = [one for one in found if one.number not in self._bad]
        newest = good[: self.keep]
        if not newest:
            return
        best = next((one for one in good if one.best), None)
        for old in found:
            if old.number < newest[-1].number and old is not best:
                # Renamed first: a kill while files are removed must not leave a folder that has the name of a good one.
                old.path.rename(_hidden(old.path, "gone"))

    def _sweep(self, name: str = "step-*") -> None:
        """Clears away what was begun and not ended, and what rotated; raises the first refusal after the last try."""
        refused: list[OSError] = []
        for path in self.folder.glob(f".{name}.*"):
            name, _, kind = path.name[1:].partition(".")
            try:
                if kind == "before" and not os.path.lexists(self.folder / name):
                    path.rename(self.folder / name)
                elif kind in ("before", "aside", "gone"):
                    _remove_whatever(path)
            except OSError as error:
                refused.append(error)
        if refused:
            raise refused[0]


def _remove_whatever(path: Path) -> None:
    """Someone may have put a file or a link in a checkpoint's place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")
