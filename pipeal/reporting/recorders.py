"""What a run leaves on disk: whole files and whole rows, whenever it is killed."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pipeal.core.atomic import write_whole
from pipeal.core.methods import Loss
from pipeal.training.row import EpochRow


class Recorder(ABC):
    """Where the rows of a run go: :class:`CsvRecorder`, :class:`JsonLinesRecorder` and
    :class:`pipeal.reporting.tensorboard.TensorBoardRecorder` are three. Used with ``with``, or closed.

    What an earlier recorder left at the same place is lost with the first row: a run that goes on writes its rows
    again. A row whose writing failed is written with the next one.

    Args:
        path: The file or folder. It is made if need be, as its own folder is.

        losses: Of the method that trains, whose names their columns bear. Empty: they are numbered.

    Attributes:
        path: As given.
        losses: Likewise.
    """

    def __init__(self, path: str | Path, losses: Sequence[Loss] = ()) -> None:
        self.path = Path(path)
        self.losses = losses
        self._rows: list[EpochRow] = []

    def write(self, row: EpochRow) -> None:
        """Keeps a row; it is on the disk when the call returns.

        Raises:
            DataError: The system refused to write; what is there are the rows before, and this one comes with the next.
        """
        self._rows.append(row)
        self._put()

    def rewrite(self, rows: Iterable[EpochRow]) -> None:
        """Keeps these rows and no others; raises as :meth:`write`."""
        self._rows = list(rows)
        self._put()

    @abstractmethod
    def _put(self) -> None:
        """Has all rows on the disk when it returns."""

    def close(self) -> None:  # noqa: B027  what some do, others need not
        """Ends the recording; a second time does nothing."""

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


R = TypeVar("R", bound=Recorder)


class CsvRecorder(Recorder):
    """Writes one row per epoch, the published columns first.

    The header comes with the first row, which knows the layers.
    """

    def write(self, row: EpochRow) -> None:
        """Adds a row; raises as :meth:`Recorder.write`.

        Raises:
            ValueError: The row has other losses than the first one had, or than the method has.
        """
        if self._rows and list(self._cells(row)) != list(self._cells(self._rows[0])):
            wanted = ", ".join(self._cells(self._rows[0]))
            raise ValueError(f"the row has columns {', '.join(self._cells(row))}, but the file {wanted}")
        super().write(row)

    def _put(self) -> None:
        # Last, and blank where a run of an older version was taken up, whose rows have none.
        held = [name for name in ("held_acc", "held_loss") if any(getattr(row, name) is not None for row in self._rows)]
        lines = [",".join([*self._cells(row), *held]) for row in self._rows[:1]]
        for row in self._rows:
            found = [*self._cells(row).values(), *(getattr(row, name) for name in held)]
            lines.append(",".join("" if one is None else repr(one) for one in found))
        _write_lines(self.path, lines)

    def _cells(self, row: EpochRow) -> dict[str, float]:
        names = ("turn", "train_acc", "test_acc", "train_time", "epoch", "epoch_time", "samples_per_s", "tokens_per_s")
        cells: dict[str, float] = {name: getattr(row, name) for name in names}
        for name in ("train_loss", "test_loss"):
            if (loss := getattr(row, name)) is not None:
                cells[name] = loss
        return cells | named_losses(row, "loss_", "_", [loss.column for loss in self.losses])


class JsonLinesRecorder(Recorder):
    """Writes one JSON object per epoch and line: the fields of :class:`EpochRow` by name.

    JSON knows no NaN and no infinity; both become ``null``.
    """

    def _put(self) -> None:
        _write_lines(self.path, [json.dumps(_json_value(asdict(row)), allow_nan=False) for row in self._rows])


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    # Not appended: a full disk takes a part of a row, and a power cut may leave a part of one.
    write_whole(path, "".join(f"{line}\n" for line in lines))


def write_json(path: str | Path, mapping: Mapping[str, Any]) -> None:
    """Writes a mapping as indented JSON; a reader sees the old file or the new one, never a part.

    JSON knows no NaN and no infinity; both become ``null``.
    """
    text = json.dumps(_json_value(mapping), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(path, text)


def _json_value(value: Any) -> Any:
    """A value that JSON has: ``_json_value((0.5, float("nan")))`` is ``[0.5, None]``."""
    if isinstance(value, Mapping):
        return {key: _json_value(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def named_losses(row: EpochRow, before: str, joint: str, names: Sequence[str]) -> dict[str, float]:
    """The losses of a row by name, such as ``loss_1_enc``: of the first layer, and by the method's name; numbered where
    ``names`` is empty. The one loss of a layer that has no other goes by the number of the layer alone.

    Raises:
        ValueError: A layer has another number of losses than there are names.
    """
    named = {}
    for number, losses in enumerate(row.losses, start=1):
        if len(losses) == 1:
            named[f"{before}{number}"] = losses[0]
            continue
        for name, loss in zip(names or map(str, range(1, len(losses) + 1)), losses, strict=True):
            named[f"{before}{number}{joint}{name}"] = loss
    return named
