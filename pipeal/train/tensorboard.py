"""Rows for TensorBoard, whose package is an extra and only looked for when it is asked for."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from pipeal.errors import ConfigError
from pipeal.train.recorders import EpochRow

_PARTS = {1: ("",), 2: ("/associated", "/autoencoder")}


class TensorBoardRecorder:
    """Writes the scalars of each epoch; each turn is a run of its own, ``turn-1`` and so on.

    Args:
        folder: What TensorBoard is pointed at; event files that an earlier recorder left there are removed.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self._open = _writer()
        self.folder = Path(folder)
        for old in self.folder.glob("turn-*/events.out.tfevents.*"):
            old.unlink()
        self._writers: dict[int, Any] = {}

    def write(self, row: EpochRow) -> None:
        """Adds the scalars of an epoch: accuracies, times and rates, and the losses of each layer."""
        if row.turn not in self._writers:
            self._writers[row.turn] = self._open(str(self.folder / f"turn-{row.turn}"))
        writer = self._writers[row.turn]
        scalars = {
            "accuracy/train": row.train_acc,
            "accuracy/test": row.test_acc,
            "time/training_s": row.train_time,
            "time/epoch_s": row.epoch_time,
            "rate/samples_per_s": row.samples_per_s,
            "rate/tokens_per_s": row.tokens_per_s,
        }
        for part, loss in (("train", row.train_loss), ("validation", row.test_loss)):
            if loss is not None:
                scalars[f"loss/{part}"] = loss
        for number, losses in enumerate(row.losses, start=1):
            parts = _PARTS.get(len(losses)) or tuple(f"/{part}" for part in range(1, len(losses) + 1))
            scalars |= {f"loss/layer_{number}{part}": loss for part, loss in zip(parts, losses, strict=True)}
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, global_step=row.epoch)
        writer.flush()

    def close(self) -> None:
        """Ends the files and their threads; a second time does nothing."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

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
    _writer()


def _writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"TensorBoard is not installed ({error}); install it with: pip install 'pipeal[tensorboard]'"
        ) from error
    return SummaryWriter
