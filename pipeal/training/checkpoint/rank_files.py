"""Layer files that other ranks write, for rank 0 to take into a checkpoint.

::

    checkpoints/
        .parts/5f0c-3-12/layer-002.safetensors    of the 12th snapshot of the third pipeline of attempt 5f0c, written by
                                                  the rank that has layer 2
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeal.core.errors import refusals_told
from pipeal.engine.state.layer_file import require_plain, write_layer
from pipeal.engine.state.snapshot import LayerState, Snapshot
from pipeal.training.checkpoint.finite import not_finite_in

ELSEWHERE = "; make room there or make it writable, or choose another folder"
"""What to do where the system refuses to write."""

_PARTS = ".parts"


def layer_name(number: int) -> str:
    """The name of a layer's file."""
    return f"layer-{number:03d}.safetensors"


@dataclass(frozen=True)
class KeptLayer:
    """A layer's file that is on the disk, but not yet in a checkpoint."""

    path: Path
    size: int
    crc32: int

    @classmethod
    def of(cls, kept: Mapping[str, Any], layer: int) -> KeptLayer:
        """What :class:`RankFiles` said of a layer."""
        path, size, crc32 = kept["files"][str(layer)]
        return cls(Path(path), size, crc32)

    def move(self, to: Path) -> tuple[int, int]:
        """Puts it where it belongs; its bytes and their CRC-32."""
        self.path.rename(to)
        return self.size, self.crc32


class RankFiles:
    """Writes this rank's layers when a snapshot comes by.

    Args:
        folder: That of the checkpoints, on a file system that rank 0 sees, too.
        attempt: Tells the attempts at a run apart: one that is behind a cable that was cut may still write.
        pipeline: Tells the pipelines of an attempt apart.
    """

    def __init__(self, folder: Path, attempt: str, pipeline: int) -> None:
        self._folder = folder / _PARTS
        self._pipeline = f"{attempt}-{pipeline}"

    def __call__(self, snapshot: Snapshot, states: Mapping[int, LayerState]) -> dict[str, Any]:
        """Writes the states; says where, for :meth:`KeptLayer.of`, and what in them is not finite.

        Raises:
            DataError: A state cannot be written, or the system refused to.
        """
        where = self._folder / f"{self._pipeline}-{snapshot.number}"
        files, not_finite = {}, {}
        with refusals_told(f"cannot write a layer's file below {where}", ELSEWHERE):
            where.mkdir(parents=True, exist_ok=True)
            for layer, found in states.items():
                require_plain(found.state, f"layer {layer}")
                path = where / layer_name(layer)
                files[str(layer)] = [str(path), *write_layer(path, found.state)]
                not_finite[str(layer)] = not_finite_in(found.state)
        return {"files": files, "not_finite": not_finite}


def clear_parts(folder: Path, until: KeptLayer | None = None) -> None:
    """Removes what no checkpoint has taken: all of it, or what the same attempt wrote no later than a certain file.

    Raises:
        OSError: The system refused to.
    """
    last = None if until is None else _order(until.path.parent)
    parts = folder / _PARTS
    for path in list(parts.iterdir()) if parts.is_dir() else []:
        if last is None or (_order(path)[0] == last[0] and _order(path) <= last):
            shutil.rmtree(path)
    if last is None and parts.is_dir():
        os.rmdir(parts)


def _order(path: Path) -> tuple[str, int, int]:
    attempt, pipeline, snapshot = path.name.split("-")
    return attempt, int(pipeline), int(snapshot)
