"""What a run leaves on disk: whole files and whole rows, whenever it is killed."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from pipeal.core.atomic import write_whole
from pipeal.core.methods import Loss
from pipeal.training.row import EpochRow


class Recorder(Protocol):
    """Where the rows of a run go: :class:`CsvRecorder`, :class:`JsonLinesRecorder` and
    :class:`pipeal.reporting.tensorboard.TensorBoardRecorder` are three.

    What an earlier recorder left at the same place is lost: a run that goes on writes its rows again. A row whose
    writing failed is written with the next one.

    Attributes:
        path: The file or folder.
    """

    path: Path

    def write(self, row: EpochRow) -> None:
        """Keeps a row; it is on the disk when the call returns."""
        ...

    def rewrite(self, rows: Iterable[EpochRow]) -> None:
        """Keeps these rows and no others."""
        ...

    def close(self) -> None:
        """Ends the recording; a second time does nothing."""
        ...


class _RowFile(ABC):
    """A file of whole rows: whatever happens, it holds those up to one epoch or those up to the next.

    Args:
        path: The file; what it held is lost with the first row. Its folder is made if need be.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._rows: list[EpochRow] = []

    def write(self, row: EpochRow) -> None:
        """Adds a row.

        Raises:
            DataError: The system refused to write; the file is as it was, and the row comes with the next one.
        """
        self._rows.append(row)
        self._put()

    def rewrite(self, rows: Iterable[EpochRow]) -> None:
        """Replaces all rows; raises as :meth:`write`."""
        self._rows = list(rows)
        self._put()

    def _put(self) -> None:
        # Not appended: a full disk takes a part of a row, and a power cut may leave a part of one.
        lines = "".join(f"{line}\n" for line in self._lines(self._rows))
        write_whole(self.path, lines)

    @abstractmethod
    def _lines(self, rows: Sequence[EpochRow]) -> Iterator[str]:
        """The rows as the file has them."""

    def close(self) -> None:  # noqa: B027  what others do, it need not
        """Nothing is open between two rows."""

    def __enter__(self: _File) -> _File:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_File = TypeVar("_File", bound=_RowFile)


class CsvRecorder(_RowFile):
    """Writes one row per epoch, the published columns first.

    The header comes with the first row, which knows the layers. Each row is on the disk when :meth:`write`
    returns.

    Args:
        path: The file; what it held is lost with the first row. Its folder is made if need be.
        losses: Of the method that trains: its layers' columns end with their names. Empty for numbers instead.
    """

    def __init__(self, path: str | Path, losses: Sequence[Loss] = ()) -> None:
        super().__init__(path)
        self._endings = [loss.column for loss in losses]

    def write(self, row: EpochRow) -> None:
        """Adds a row.

        Raises:
            DataError: The system refused to write; the file is as it was, and the row comes with the next one.
            ValueError: The row has other losses than the first one had, or than the method has.
        """
        if self._rows and list(self._cells(row)) != list(self._cells(self._rows[0])):
            wanted = ", ".join(self._cells(self._rows[0]))
            raise ValueError(f"the row has columns {', '.join(self._cells(row))}, but the file {wanted}")
        super().write(row)

    def _lines(self, rows: Sequence[EpochRow]) -> Iterator[str]:
        # Last, and blank where a run of an older version was taken up, whose rows have none.
        held = [name for name in ("held_acc", "held_loss") if any(getattr(row, name) is not None for row in rows)]
        for row in rows[:1]:
            yield ",".join([*self._cells(row), *held])
        for row in rows:
            found = [getattr(row, name) for name in held]
            cells = map(repr, self._cells(row).values())
            yield ",".join([*cells, *("" if one is None else repr(one) for one in found)])

    def _cells(self, row: EpochRow) -> dict[str, float]:
        names = ("turn", "train_acc", "test_acc", "train_time", "epoch", "epoch_time", "samples_per_s", "tokens_per_s")
        cells: dict[str, float] = {name: getattr(row, name) for name in names}
        for name in ("train_loss", "test_loss"):
            if (loss := getattr(row, name)) is not None:
                cells[name] = loss
        return cells | named_losses(row, "loss_", "_", self._endings)


class JsonLinesRecorder(_RowFile):
    """Writes one JSON object per epoch and line: the fields of :class:`EpochRow` by name.

    JSON knows no NaN and no infinity; both become ``null``. Each row is on the disk when :meth:`write` returns.

    Args:
        path: The file; what it held is lost with the first row. Its folder is made if need be.
    """

    def _lines(self, rows: Sequence[EpochRow]) -> Iterator[str]:
        for row in rows:
            fields = {name: _json_value(value) for name, value in asdict(row).items()}
            yield json.dumps(fields, allow_nan=False)


def write_json(path: str | Path, mapping: Mapping[str, Any]) -> None:
    """Writes a mapping as indented JSON; a reader sees the old file or the new one, never a part."""
    text = json.dumps(mapping, indent=2, ensure_ascii=False) + "\n"
    write_whole(path, text)


def _json_value(value: Any) -> Any:
    """A value that JSON has: ``_json_value((0.5, float("nan")))`` is ``[0.5, None]``."""
    if isinstance(value, tuple):
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
