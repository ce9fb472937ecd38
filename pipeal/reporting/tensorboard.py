"""Rows for TensorBoard, whose package is an extra and only looked for when it is asked for."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeal.core.errors import ConfigError
from pipeal.training.row import EpochRow

_PARTS = {1: ("",), 2: ("/associated", "/autoencoder")}


class TensorBoardRecorder:
    """Writes the scalars of each epoch; each turn is a run of its own, ``turn-1`` and so on.

    Not with PyTorch's writer: it writes on a thread that dies of a full disk, and what it had is lost.

    Args:
        folder: What TensorBoard is pointed at; event files that an earlier recorder left there are removed with the
            first row.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        require_tensorboard()
        self.path = Path(folder)
        self._files: dict[int, _EventFile] = {}

    def write(self, row: EpochRow) -> None:
        """Adds the scalars of an epoch: accuracies, times and rates, and the losses of each layer.

        Raises:
            OSError: The system refused to write, or to remove an older file; what is missing comes with the next epoch.
        """
        self._add(row)
        self._put()

    def rewrite(self, rows: Iterable[EpochRow]) -> None:
        """Writes these epochs and no others; raises as :meth:`write`."""
        self._files.clear()
        for row in rows:
            self._add(row)
        self._put()

    def close(self) -> None:
        """Nothing is open between two rows."""

    def _add(self, row: EpochRow) -> None:
        if row.turn not in self._files:
            self._files[row.turn] = _EventFile(self.path / f"turn-{row.turn}")
        self._files[row.turn].waiting.append(_record(step=row.epoch, summary=_summary(row)))

    def _put(self) -> None:
        for file in self._files.values():
            file.put()
        # Last, so that what cannot be removed keeps no row from being written; it is tried again with the next one.
        ours = {file.path for file in self._files.values()}
        for old in self.path.glob("turn-*/events.out.tfevents.*"):
            if old not in ours:
                old.unlink(missing_ok=True)

    def __enter__(self) -> TensorBoardRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _EventFile:
    """A file of events, which grows by whole ones: TensorBoard reads on while it does.

    Attributes:
        waiting: What is not on the disk yet.
    """

    def __init__(self, folder: Path) -> None:
        # The format's own name; the last part tells those apart that one process begins within a second.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self.path = folder / name
        self.waiting = [_record(file_version="brain.Event:2")]
        self._bytes = 0

    def put(self) -> None:
        """Writes what waits, all of it or nothing."""
        if not self.waiting:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = b"".join(self.waiting)
        with self.path.open("ab", buffering=0) as file:
            file.truncate(self._bytes)  # a part of an event, if a full disk took no more and would not give it back
            try:
                left = memoryview(new)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(self._bytes)
                raise
        self._bytes += len(new)
        self.waiting = []


def require_tensorboard() -> None:
    """Whether it is there.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    try:
        for name in ("", ".compat.proto.event_pb2", ".compat.proto.summary_pb2", ".summary.writer.record_writer"):
            import_module(f"tensorboard{name}")
    except ImportError as error:
        raise ConfigError(
            f"TensorBoard is not installed ({error}); install it with: pip install 'pipeal[tensorboard]'"
        ) from error


def _record(**content: Any) -> bytes:
    """An event as it lies in a file: its length, its bytes, and the check sums of both."""
    event = import_module("tensorboard.compat.proto.event_pb2").Event(wall_time=time.time(), **content)
    written = io.BytesIO()
    import_module("tensorboard.summary.writer.record_writer").RecordWriter(written).write(event.SerializeToString())
    return written.getvalue()


def _summary(row: EpochRow) -> Any:
    scalars = {
        "accuracy/train": row.train_acc,
        "accuracy/test": row.test_acc,
        "time/training_s": row.train_time,
        "time/epoch_s": row.epoch_time,
        "rate/samples_per_s": row.samples_per_s,
        "rate/tokens_per_s": row.tokens_per_s,
    }
    if row.held_acc is not None:
        scalars["accuracy/held_out"] = row.held_acc
    for part, loss in (("train", row.train_loss), ("held_out", row.held_loss), ("validation", row.test_loss)):
        if loss is not None:
            scalars[f"loss/{part}"] = loss
    for number, losses in enumerate(row.losses, start=1):
        parts = _PARTS.get(len(losses)) or tuple(f"/{part}" for part in range(1, len(losses) + 1))
        scalars |= {f"loss/layer_{number}{part}": loss for part, loss in zip(parts, losses, strict=True)}
    summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
    return summary(value=[summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()])
