"""A stage's own snapshots: written on a thread of their own while it works, and told to the stage before once they are
on the disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from time import time
from typing import Any

from pipeal.core.background import in_background
from pipeal.core.errors import DataError, PipealError, UntidyError
from pipeal.engine.state.layer_state import State
from pipeal.reporting.environment import environment
from pipeal.training.checkpoint.store import Checkpoint, CheckpointStore

_log = logging.getLogger(__name__)


class Snapshots:
    """Those of one stage. Used with ``with``.

    Args:
        folder: Where they are.
        line: The line's name.
        stage: The stage's number.

    Attributes:
        saved: The items that the last one covers; None for none yet.
        saved_at: When it was written, in seconds of Unix time.
    """

    def __init__(self, folder: Path, line: str, stage: int) -> None:
        self.saved: int | None = None
        self.saved_at: float | None = None
        self._of = {"line": line, "stage": stage}
        self._environment = _rounding()
        self._store = CheckpointStore(folder, keep=2)
        self._writing: Future[None] | None = None

    def __enter__(self) -> Snapshots:
        self._store.claim()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._writing is not None:
            wait([self._writing])
        self._store.close()

    def newest(self) -> Checkpoint | None:
        """The newest that is as it was written; says so where it is of another machine.

        Raises:
            DataError: It is of another line, or of another stage.
        """
        bad: list[str] = []

        def tell(what: str) -> None:
            bad.append(what)
            _log.warning(what)

        found = self._store.newest(tell)
        if found is None:
            if bad:
                _log.warning(f"stage {self._of['stage']} has no whole snapshot left, and begins at its first item")
            return None
        if (of := {key: found.state.get(key) for key in self._of}) != self._of:
            raise DataError(
                f"{found.path} is of stage {of['stage']} of the line {of['line']}, not of stage {self._of['stage']} of "
                f"{self._of['line']}; name another --folder"
            )
        now = self._environment
        for key, value in found.state["environment"].items():
            if now.get(key) != value:
                _log.warning(f"the snapshot was written with {key} {value}, here it is {now.get(key)}: bits may differ")
        self.saved, self.saved_at = found.position["item"], (found.path / "manifest.json").stat().st_mtime
        return found

    @property
    def is_writing(self) -> bool:
        """Whether one is being written."""
        return self._writing is not None and not self._writing.done()

    def save(
        self,
        items: int,
        layers: Mapping[int, State],
        state: Mapping[str, Any],
        counted: Mapping[str, Any],
        then: Callable[[int], None],
    ) -> None:
        """Has one written, after the one before.

        Args:
            items: How many are behind the stage.
            layers: What its layers have learnt.
            state: What else there is, as JSON.
            counted: Likewise, with tensors.
            then: Called with ``items``, on the thread that writes, once it is on the disk.
        """
        self.settle()
        body = {**self._of, **state, "environment": self._environment}

        def write() -> None:
            untidy: UntidyError | None = None
            try:
                self._store.save(items, layers, {"item": items}, body, epoch=counted)
            except UntidyError as error:  # it is written, but an older one could not be removed
                untidy = error
            self.saved, self.saved_at = items, time()
            then(items)
            if untidy is not None:
                raise untidy

        self._writing = in_background(write, "pipeal-line-snapshot")

    def settle(self, *, must: bool = False) -> None:
        """Waits for the one that is being written. Where the system refused it, that is logged: a later one may do.

        Raises:
            DataError: It was refused, and ``must`` be.
            Exception: Whatever else went wrong.
        """
        if self._writing is None:
            return
        ended, self._writing = self._writing, None
        try:
            ended.result()
        except PipealError as refused:
            if must:
                raise
            _log.warning(f"{refused}; the snapshot before it stands")


def _rounding() -> dict[str, Any]:
    """What decides how a machine rounds."""
    found = environment()
    return {key: found[key] for key in ("pipeal", "torch", "cpu", "cpu_capability", "gpus") if key in found}
