"""Rows for TensorBoard, whose package is an extra and only looked for when it is asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from pipeal.core.errors import ConfigError
from pipeal.core.methods import Loss
from pipeal.reporting.recorders import named_losses
from pipeal.training.row import EpochRow

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardRecorder:
    """Writes the scalars of each epoch; each turn is a run of its own, ``turn-1`` and so on.

    Args:
        folder: What TensorBoard is pointed at; event files that an earlier recorder left there are removed with the
            first row.
        losses: Of the method that trains; empty where they have no names.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path, losses: Sequence[Loss] = ()) -> None:
        require_tensorboard()
        self._tags = [loss.tag for loss in losses]
        self.path = Path(folder)
        self._rows: list[EpochRow] = []
        self._begin()

    def write(self, row: EpochRow) -> None:
        """Adds the scalars of an epoch: accuracies, times and rates, and the losses of each layer.

        Raises:
            OSError: The system refused to write, or to remove an older file; what is missing comes with the next epoch.
        """
        self._rows.append(row)
        self._put()

    def rewrite(self, rows: Iterable[EpochRow]) -> None:
        """Writes these epochs and no others; raises as :meth:`write`."""
        self.close()
        self._begin()
        self._rows = list(rows)
        self._put()

    def close(self) -> None:
        """Ends the writers, whose threads have nothing to do between two rows."""
        for writer in self._writers.values():
            with suppress(OSError):  # already told by the row that could not be written
                writer.close()
        self._writers.clear()

    def _begin(self) -> None:
        """Makes the next rows, from the first one on, go into new files."""
        self._writers: dict[int, SummaryWriter] = {}
        self._sizes: dict[Path, int] = {}
        self._written = 0
        # Tells our files from older ones, and those apart that one process begins within a second.
        self._suffix = f".{time.monotonic_ns()}"

    def _put(self) -> None:
        try:
            for row in self._rows[self._written :]:
                self._add(row)
            for writer in self._writers.values():
                writer.flush()
            self._sizes = {path: _synced(path) for path in self._ours()}
        except Exception:
            self._give_up()
            raise
        self._written = len(self._rows)
        # Last, so that what cannot be removed keeps no row from being written; it is tried again with the next one.
        for old in set(self.path.glob("turn-*/events.out.tfevents.*")) - self._sizes.keys():
            old.unlink(missing_ok=True)

    def _add(self, row: EpochRow) -> None:
        if row.turn not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            self._writers[row.turn] = SummaryWriter(self.path / f"turn-{row.turn}", filename_suffix=self._suffix)
        for tag, value in (_scalars(row) | named_losses(row, "loss/layer_", "/", self._tags)).items():
            self._writers[row.turn].add_scalar(tag, value, row.epoch)

    def _give_up(self) -> None:
        """Cuts the files back to their whole rows. A writer whose thread has died writes no more: new files follow."""
        self.close()
        with suppress(OSError):
            for path in self._ours():
                os.truncate(path, self._sizes.get(path, 0))
        self._begin()

    def _ours(self) -> list[Path]:
        return list(self.path.glob(f"turn-*/*{self._suffix}"))

    def __enter__(self) -> TensorBoardRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def require_tensorboard() -> None:
    """Whether it is there.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    try:
        import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise ConfigError(
            f"TensorBoard is not installed ({error}); install it with: pip install 'pipeal[tensorboard]'"
        ) from error


def _synced(path: Path) -> int:
    """Waits until a file is on the disk; gives its size in bytes."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        return file.seek(0, os.SEEK_END)


def _scalars(row: EpochRow) -> dict[str, float]:
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
    return scalars
