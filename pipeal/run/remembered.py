"""What was found to be fastest here, for a model and batches like these, kept in the user's cache folder for a week."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, TypeAlias

from pydantic import Field, TypeAdapter
from torch import nn

from pipeal.core.atomic import write_whole
from pipeal.core.checked import checked
from pipeal.core.errors import DataError
from pipeal.core.samples import pair_of
from pipeal.core.tree import tensors
from pipeal.data.loading.cache_folder import cache_folder
from pipeal.engine.devices.cpus import load_average
from pipeal.planning.placement import Placement
from pipeal.reporting.environment import environment

_log = logging.getLogger(__name__)

RENEWED_AFTER_S = 7 * 24 * 3600.0
"""For so long a choice is remembered."""

FORMAT = 1
"""Raised whenever what is chosen among, or how, changes."""


_Count: TypeAlias = Annotated[int, Field(strict=True, gt=0)]


@dataclass(frozen=True)
class Remembered:
    """A choice, and when it was made: what a file holds.

    Attributes:
        devices: One for each stage.
        sizes: The layers of each.
        threads: Of each CPU worker.
        since: Seconds of the epoch.
        load: The machine's load average then, over a minute; None where the system does not say.

    Raises:
        ValueError: Devices and sizes are not of one number, or there are none.
    """

    devices: list[str]
    sizes: list[_Count]
    threads: _Count
    since: float
    load: float | None

    def __post_init__(self) -> None:
        if not self.devices or len(self.devices) != len(self.sizes):
            raise ValueError(f"{len(self.devices)} devices for {len(self.sizes)} sizes")

    @property
    def placement(self) -> Placement:
        """What was chosen."""
        return Placement(self.devices, self.sizes, self.threads)

    def __str__(self) -> str:
        date = datetime.fromtimestamp(self.since).strftime("%Y-%m-%d %H:%M")
        return f"remembered from {date}" + ("" if self.load is None else f", load {self.load:.1f}")


_REMEMBERED = TypeAdapter(Remembered)


class PlacementCache:
    """One choice each, in a file of its own.

    Args:
        folder: Where they are; None for the user's cache folder.
        retry: Whether nothing that is known counts.
        now: Seconds of the epoch.
        load: The machine's load average over a minute.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        retry: bool = False,
        now: Callable[[], float] = time.time,
        load: Callable[[], float | None] = load_average,
    ) -> None:
        self._folder = folder
        self._retry = retry
        self._now = now
        self._load = load

    def recall(self, key: str) -> Remembered | None:
        """The choice of that key; None if there is none, it is too old, or is not as it was written."""
        if self._retry:
            return None
        try:
            path = self._path(key)
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:  # none yet
            return None
        except (OSError, ValueError, DataError) as error:
            _log.warning(f"what was found before is not remembered: {error}")
            return None
        try:
            found = checked(_REMEMBERED, json.loads(text))
        except ValueError as error:
            _log.warning(f"{path} is not as it was written ({error}), and is made again")
            return None
        return found if 0 <= self._now() - found.since < RENEWED_AFTER_S else None

    def keep(self, key: str, placement: Placement) -> None:
        """Keeps a choice; that it cannot be kept is logged."""
        kept = Remembered(placement.devices, placement.sizes, placement.threads, self._now(), self._load())
        try:
            write_whole(self._path(key), json.dumps(asdict(kept)))
        except DataError as error:
            _log.warning(f"what was found is not remembered: {error}")

    def _path(self, key: str) -> Path:
        return (self._folder or cache_folder() / "placements") / f"{key}.json"


def key_of(model: nn.Module, batches: Sequence[Any], *settings: object) -> str:
    """What a choice is for: this machine, weights of these shapes, batches of about this size, and settings.

    Args:
        model: What is to be trained.
        batches: A few of its batches.
        settings: What else decides how fast it is.
    """
    machine = {name: value for name, value in environment().items() if name != "pipeal"}
    weights = [(name, tuple(value.shape)) for name, value in model.state_dict().items()]
    mean = fmean(sum(tensor.numel() for tensor in tensors(pair_of(batch)[0])) for batch in batches)
    size = round(2 * math.log2(max(1.0, mean)))  # of another seed, texts come in batches of slightly other sizes
    named = os.environ.get("OMP_NUM_THREADS")
    text = repr((FORMAT, machine, weights, size, named, settings))
    return blake2b(text.encode(), digest_size=12).hexdigest()
